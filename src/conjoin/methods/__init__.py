"""The training methods, one folder each; importing a folder registers its methods."""

from . import contrastive as contrastive, coral as coral, gcl as gcl, puma as puma, solar as solar
