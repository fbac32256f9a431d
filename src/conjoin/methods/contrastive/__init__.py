"""Symmetric InfoNCE between images and their texts: the baseline of every method."""

from conjoin.training import METHODS, Method

from .trainer import ContrastiveConfig as ContrastiveConfig, ContrastiveTrainer as ContrastiveTrainer

METHODS.register(Method("contrastive", ContrastiveConfig, ContrastiveTrainer))
