"""The benchmarks, one file or folder each; the import of one registers it."""

from . import (
    emoji as emoji,
    mbeir as mbeir,
    merit as merit,
    mmeb as mmeb,
    pairs as pairs,
    scenes as scenes,
    symmetric as symmetric,
)
