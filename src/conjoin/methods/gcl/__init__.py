"""GCL: one generalized contrastive loss over the image, text and fused embeddings of each pair."""

from conjoin.training import METHODS, Method

from .trainer import GclConfig as GclConfig, GclTrainer as GclTrainer

METHODS.register(Method("gcl", GclConfig, GclTrainer))
