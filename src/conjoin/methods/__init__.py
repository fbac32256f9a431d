"""The training methods, one folder each; importing a folder registers its methods."""

MODULES = {
    "contrastive": "conjoin.methods.contrastive",
    "coral": "conjoin.methods.coral",
    "gcl": "conjoin.methods.gcl",
    "puma_stage1": "conjoin.methods.puma",
    "puma_stage2": "conjoin.methods.puma",
}
"""The folder of each method, imported when `conjoin.training.METHODS` is asked for it."""
