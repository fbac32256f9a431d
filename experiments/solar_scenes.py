"""Scenes for the SOLAR claims: made once, with the frozen towers' features of all their parts computed once."""

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import ROOT
from filelock import FileLock
from scene_features import SceneTriplets
from scenes import NEITHER, SHARED, make_scenes, shared_patches, shared_tokens
from torch import Tensor
from transformers.utils import logging

from conjoin import JointEncoderModel
from conjoin.data import EpochRows, augment_image, load_pairs
from conjoin.processing import load_image
from conjoin.trainers import CachedFeatures, load_recipe

SETS = (
    "validation_known", "validation_unseen", "test_known", "test_unseen", "test_known_same_union",
    "test_unseen_same_union",
)  # fmt: skip


class Scenes:
    """The scenes and the features of their parts in the folder `--data`, shared by all rows, seeds and processes."""

    def __init__(self, args: argparse.Namespace) -> None:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.folder, self.args = args.data, args
        self.dtype = torch.bfloat16 if args.bf16 else torch.float32
        sizes = {
            "hidden_size": args.width,
            "num_attention_heads": max(1, args.width // 64),
            "intermediate_size": 2 * args.width,
            "vision_hidden_layer": 11,
        } | args.set.get("model", {})
        flags = ["--image_size", str(args.image_size), "--model_init_kwargs", json.dumps(sizes)]
        recipe = load_recipe(ROOT / "training_args/solar/sample_stage1.yaml", flags)
        self.encoder, self.processor = recipe.model.load()
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / ".lock"):  # another process may make the same
            make_scenes(
                self.scenes,
                train=args.train,
                distractors=args.distractors,
                triplets=args.triplets,
                objects=args.objects,
                show_progress=True,
            )
            self.train = self._cache("train", self.pairs)
            distractors = load_pairs(self.scenes / "distractors.parquet")
            self.distractors = self._cache("distractors", distractors)
            self.sets = {name: self._triplets(name) for name in SETS}

    @property
    def scenes(self) -> Path:
        """The output of `make_scenes`."""
        return self.folder / "scenes"

    @cached_property
    def pairs(self) -> Any:  # noqa: ANN401 - a dataset
        """The training pairs."""
        return load_pairs(self.scenes / "train.parquet", keep=("alternative_text", "image_objects", "text_objects"))

    @cached_property
    def versions(self) -> CachedFeatures:
        """Of each training scene another version: its picture augmented, its objects named in another phrase."""
        random = np.random.default_rng(0)
        rows = [
            {
                "id": row["id"],
                "image": augment_image(load_image(row["image"], row["id"]), random),
                "text": row["metadata"]["alternative_text"],
            }
            for row in self.pairs
        ]
        with FileLock(self.folder / ".lock"):
            return self._cache("versions", rows)

    @cached_property
    def truth(self) -> list[dict[str, Tensor]]:
        """Of each training scene: `image` `(P,)` and `text` `(T,)`, what is shared, and `segments` `(P,)`, objects."""
        grid = round((self.train[0]["image_features"].shape[0] - 1) ** 0.5)
        width = len(self.train[0]["attention_mask"])
        return [self._truth_of(row["text"], row["metadata"], grid, width) for row in self.pairs]

    def _truth_of(self, text: str, scene: Mapping[str, Any], grid: int, width: int) -> dict[str, Tensor]:
        objects = scene["image_objects"], scene["text_objects"]
        offsets = self.processor.tokenizer(text, truncation=True, return_offsets_mapping=True)["offset_mapping"]
        words = np.full(width, NEITHER, dtype=np.int8)
        words[: len(offsets)] = shared_tokens(*objects, offsets)
        segments = np.zeros(grid * grid, dtype=np.int64)
        for number, entry in enumerate(scene["image_objects"]):  # the background is in the first
            segments[shared_patches([entry], [entry], grid) == SHARED] = number
        patches = shared_patches(*objects, grid)
        return {name: torch.from_numpy(value) for name, value in
                (("image", patches), ("text", words), ("segments", segments))}  # fmt: skip

    def new_model(self, seed: int) -> JointEncoderModel:
        """An untrained model on the shared frozen towers."""
        torch.manual_seed(seed)
        model = JointEncoderModel(self.encoder.config)
        model.vision_model, model.text_model = self.encoder.vision_model, self.encoder.text_model
        return model

    def _triplets(self, name: str) -> SceneTriplets:
        return SceneTriplets.read(self.scenes / f"{name}.jsonl", self._cache)

    def _cache(self, name: str, rows: Any) -> CachedFeatures:  # noqa: ANN401
        folder = self.folder / f"features-{self.args.image_size}" / name
        return CachedFeatures(self.encoder, self.processor, rows, folder, dtype=self.dtype, first_only=True)


class WithVersions(CachedFeatures):
    """Pairs whose augmented version is a row of other features."""

    def __init__(self, pairs: CachedFeatures, versions: CachedFeatures) -> None:
        EpochRows.__init__(self, pairs.rows, pairs.seed)
        self.images, self.texts = pairs.images, pairs.texts
        self.first_only, self.versions = True, versions

    def choose(self, index: int, *salt: int) -> dict[str, Tensor]:
        """The row itself, or with a `salt` its version."""
        return self.versions[index] if salt else super().choose(index)


class WithTruth(EpochRows):
    """Rows with the truth of what picture and text share."""

    def __init__(self, rows: Any, truth: Sequence[dict[str, Tensor]]) -> None:  # noqa: ANN401
        super().__init__(rows)
        self.truth = truth

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"row": self.rows[index], "truth": self.truth[index]}


class TruthCollator:
    """Collates the rows of `WithTruth`: the truth becomes the entry `teacher` of the part `pairs`."""

    def __init__(self, collator: Any) -> None:  # noqa: ANN401
        self.collator = collator

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate a list of rows."""
        batch = self.collator([row["row"] for row in rows])
        width = batch["pairs"]["attention_mask"].shape[1]
        truth = {name: torch.stack([row["truth"][name] for row in rows]) for name in rows[0]["truth"]}
        batch["pairs"]["teacher"] = truth | {"text": truth["text"][:, :width]}
        return batch


class Grouped(EpochRows):
    """Rows in an order in which each batch holds anchors, each followed by some of its mined negatives.

    Args:
        rows: Pairs.
        ids: Their ids.
        mined: Negatives by id.
        others: Negatives beside each anchor.
        count: Rows to order.
        seed: Of the order.
    """

    def __init__(self, rows: Any, ids: Sequence[str], mined: Any, others: int, count: int, seed: int) -> None:  # noqa: ANN401
        super().__init__(rows, seed)
        generator = torch.Generator().manual_seed(seed)
        places, self.order = {name: place for place, name in enumerate(ids)}, []
        while len(self.order) < count:
            for anchor in torch.randperm(len(ids), generator=generator).tolist():
                names = mined[ids[anchor]]
                drawn = torch.randperm(len(names), generator=generator)[:others].tolist()
                self.order += [anchor, *(places[names[place]] for place in drawn)]
        del self.order[count:]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[self.order[index]]
