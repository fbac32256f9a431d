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
from .locks import lock_also as lock_also, lock_folder as lock_folder, locked as locked
