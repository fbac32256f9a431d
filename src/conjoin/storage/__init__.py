"""Files and folders that appear in one step, checksums, locks, fingerprints, and the cache of training."""

from .atomic import (
    TEMPORARY as TEMPORARY,
    atomic_path as atomic_path,
    flush as flush,
    flush_tree as flush_tree,
    publish_folder as publish_folder,
    remove_temporary as remove_temporary,
    temporary_path as temporary_path,
    write_text as write_text,
)
from .cache import CACHE_FILE as CACHE_FILE, RowCache as RowCache, differences as differences
from .checksums import (
    FOLDER_CHECKSUMS as FOLDER_CHECKSUMS,
    DamagedError as DamagedError,
    check_checksums as check_checksums,
    checksummed_path as checksummed_path,
    file_digest as file_digest,
    has_checksum as has_checksum,
    write_checksums as write_checksums,
)
from .fingerprints import (
    content_digest as content_digest,
    item_digest as item_digest,
    model_fingerprint as model_fingerprint,
    name_ids as name_ids,
    part_digest as part_digest,
    processor_digest as processor_digest,
    row_digest as row_digest,
    rows_digest as rows_digest,
    settings_digest as settings_digest,
    stable_id as stable_id,
    text_digest as text_digest,
    tokenizer_digest as tokenizer_digest,
    weights_digest as weights_digest,
)
from .folder import (
    StoredFolder as StoredFolder,
    check_place as check_place,
    check_places as check_places,
    is_current as is_current,
    read_folder as read_folder,
    replace_folder as replace_folder,
    write_shard as write_shard,
)
from .locks import lock_folder as lock_folder, locked as locked
from .manifest import (
    FolderKind as FolderKind,
    Manifest as Manifest,
    StoredFile as StoredFile,
    check_checksum as check_checksum,
    check_file as check_file,
    check_key as check_key,
    read_manifest as read_manifest,
    recorded_rows as recorded_rows,
    write_with_checksum as write_with_checksum,
)
from .update import FolderUpdate as FolderUpdate
from .writer import FolderWriter as FolderWriter, is_intact as is_intact
