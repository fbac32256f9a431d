"""The training methods, one folder each; importing a folder registers its methods."""

MODULES = {"contrastive": "conjoin.methods.contrastive", "gcl": "conjoin.methods.gcl"}
"""The folder of each method, imported when `conjoin.training.METHODS` is asked for it."""
