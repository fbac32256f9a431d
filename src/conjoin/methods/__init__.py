"""The training methods, one folder each; importing a folder registers its methods."""

MODULES = {
    "contrastive": "conjoin.methods.contrastive",
    "gcl": "conjoin.methods.gcl",
    "solar_stage1": "conjoin.methods.solar",
    "solar_stage2": "conjoin.methods.solar",
}
"""The folder of each method, imported when `conjoin.training.METHODS` is asked for it."""
