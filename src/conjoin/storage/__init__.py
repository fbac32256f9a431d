"""What every resumable folder needs: atomic writes, files with checksums under a manifest, and fingerprints."""

from .atomic import (
    STALE_SECONDS as STALE_SECONDS,
    atomic_path as atomic_path,
    flush as flush,
    remove_temporary as remove_temporary,
    write_text as write_text,
)
from .checksum_file import (
    FOLDER_CHECKSUMS as FOLDER_CHECKSUMS,
    check_checksum as check_checksum,
    check_checksums as check_checksums,
    write_checksums as write_checksums,
    write_with_checksum as write_with_checksum,
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
from .locks import lock_also as lock_also, lock_folder as lock_folder, locked as locked
from .manifest import (
    DamagedError as DamagedError,
    FolderKind as FolderKind,
    Manifest as Manifest,
    StoredFile as StoredFile,
    check_file as check_file,
    check_key as check_key,
    differences as differences,
    file_digest as file_digest,
    read_manifest as read_manifest,
    recorded_rows as recorded_rows,
)
from .row_shards import NAMES as NAMES, RowShards as RowShards
from .update import FolderUpdate as FolderUpdate
from .writer import FolderWriter as FolderWriter, is_intact as is_intact
