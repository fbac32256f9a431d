"""Transformers' own tests of a model (`ModelTesterMixin`) on the models of this package.

The mixin is in the source distribution of transformers, not in its wheel. `make test-common` fetches the distribution
of the installed version; `TRANSFORMERS_SDIST` names the unpacked folder. Without it, these tests are skipped.
"""

import importlib
import os
import sys
import types
import unittest
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

from conjoin import JointEncoderModel, MllmRetrieverModel, ScoreFusionModel, TokenFusionModel
from tiny_mllms import qwen2_vl

SDIST = os.environ.get("TRANSFORMERS_SDIST")
if SDIST is None:
    pytest.skip("TRANSFORMERS_SDIST does not name an unpacked distribution", allow_module_level=True)

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
VISION = {"image_size": 16, "patch_size": 8, **SIZES}
TEXT = {"vocab_size": 99, "max_position_embeddings": 64, **SIZES}
TOWERS = {"vision_config": {"model_type": "dinov2", **VISION}, "text_config": {"model_type": "bert", **TEXT}}
ROWS, PATCHES, WORDS, RET = 7, 4, 9, 262
CLIP = {"vision_config": VISION, "text_config": TEXT | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}}
CLIP = {"backbone_config": CLIP | {"projection_dim": 32}}
QWEN = {"backbone_config": qwen2_vl()[0].config, "keep_layers": 2, "ret_token_id": RET}

NO_LOSS = "the mixin skips base models, too: they have no loss, and it knows base models by transformers' own names"
PER_TOWER = "as CLIP: no layer sees both modalities; the outputs of the towers hold their states and attentions"
COMPOSITE = "the models have towers; test_sdpa_can_dispatch_composite_models checks them"
KNOWN = {
    "test_sdpa_can_dispatch_non_composite_models": COMPOSITE,
    "test_training": NO_LOSS,
    "test_training_gradient_checkpointing": f"{NO_LOSS}; see test_contract.py",
    "test_training_gradient_checkpointing_use_reentrant_false": NO_LOSS,
    "test_training_gradient_checkpointing_use_reentrant_true": NO_LOSS,
}
"""Tests that no model can pass, or patterns of their names, and why."""


def import_mixin():
    """Import the mixin; two of its base classes are in folders that the distribution leaves out."""
    package = types.ModuleType("transformers_tests")
    package.__path__ = [str(Path(SDIST) / "tests")]
    modules = {"transformers_tests": package}
    for folder, file, name in (
        ("exporters", "test_export", "ExportTesterMixin"),
        ("generation", "test_utils", "GenerationTesterMixin"),
    ):
        modules[f"transformers_tests.{folder}"] = types.ModuleType(folder)
        modules[f"transformers_tests.{folder}.{file}"] = module = types.ModuleType(file)
        setattr(module, name, type(name, (), {}))
    sys.modules.update(modules)
    return importlib.import_module("transformers_tests.test_modeling_common").ModelTesterMixin


ModelTesterMixin = import_mixin()


class CommonTests(ModelTesterMixin):
    """The mixin but for the tests in `known`, each of which has its reason.

    It asks `model_tester` for a configuration, a batch and sizes: of `config`, `inputs` and `tokens` of a subclass.
    """

    known = KNOWN
    _is_composite = True
    batch_size, seq_length, is_training = ROWS, WORDS, True
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4

    def setUp(self):
        self.model_tester, self.encoder_seq_length = self, self.tokens
        for pattern, reason in self.known.items():
            if fnmatchcase(self._testMethodName, pattern):
                self.skipTest(reason)

    def get_config(self):
        return self.all_model_classes[0].config_class(**self.config)

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        return config, type(self).inputs(config)


def pairs(config):
    special = torch.zeros(ROWS, WORDS, dtype=torch.long)
    special[:, [0, -1]] = 1
    return {
        "pixel_values": torch.rand(ROWS, 3, 16, 16),
        "input_ids": torch.randint(3, 84, (ROWS, WORDS)),
        "attention_mask": torch.ones(ROWS, WORDS, dtype=torch.long),
        "special_tokens_mask": special,
    }


def prompts(config):
    """Prompts of an image, words and [RET], which two more tokens follow."""
    ids = torch.randint(3, 200, (ROWS, WORDS + PATCHES))
    ids[:, 2] = config.backbone_config.vision_start_token_id
    ids[:, 3 : 3 + PATCHES] = config.backbone_config.image_token_id
    ids[:, 3 + PATCHES] = config.backbone_config.vision_end_token_id
    ids[:, -3] = RET
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.rand(ROWS, 4 * PATCHES, 96),
        "pixel_attention_mask": torch.ones(ROWS, 4 * PATCHES, dtype=torch.bool),
        "image_grids": torch.tensor([[[1, 4, 4]]] * ROWS),
    }


class JointEncoderTest(CommonTests, unittest.TestCase):
    all_model_classes, inputs, tokens = (JointEncoderModel,), pairs, 1 + PATCHES + WORDS
    additional_model_inputs = ("input_ids", "special_tokens_mask")
    config = TOWERS | {"hidden_size": 32, "num_vl_layers": 2, "num_attention_heads": 4}


class TokenFusionTest(CommonTests, unittest.TestCase):
    all_model_classes, inputs, tokens = (TokenFusionModel,), pairs, PATCHES + WORDS
    additional_model_inputs = ("input_ids",)
    config = TOWERS | {"cls_token_id": 1, "sep_token_id": 2}


class ScoreFusionTest(CommonTests, unittest.TestCase):
    all_model_classes, inputs, tokens = (ScoreFusionModel,), pairs, WORDS
    reasons = (
        "*_attention_outputs",
        "*_eager_matches_sdpa_inference*",
        "*_hidden_states_output",
        "*_retain_grad_hidden*",
    )
    known = KNOWN | dict.fromkeys(reasons, PER_TOWER)
    config = CLIP


class MllmRetrieverTest(CommonTests, unittest.TestCase):
    all_model_classes, inputs, tokens = (MllmRetrieverModel,), prompts, WORDS + PATCHES
    additional_model_inputs = ("pixel_values", "pixel_attention_mask", "image_grids")
    config = QWEN
