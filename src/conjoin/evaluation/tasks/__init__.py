"""The benchmarks, one file each."""

TASKS = {
    "emoji": "the embedded sample: nine modality combinations and symmetric triplets",
    "mbeir": "M-BEIR: 16 cells, local and global pools; also writes run files",
    "merit": "MERIT: queries of several images and texts; also writes run files",
    "mmeb": "MMEB: Precision@1 of its subsets",
    "pairs": "text → image and image → text on pairs of your own, or Flickr30k and COCO",
    "symmetric": "symmetric triplets of your own, with or without distractors",
}
"""The name of each, which is that of its file, and what it measures."""
