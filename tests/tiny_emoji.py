"""The first concepts of each split of the emoji sample."""

from itertools import islice

import pytest

from conjoin.data import EMOJI_SPLITS, emoji_concepts, load_emoji
from conjoin.data.emoji import sample


def first_concepts(count):
    """`emoji_concepts` of the first `count` concepts of each split."""

    def concepts(*arguments):
        every = emoji_concepts(*arguments)
        return [each for split in EMOJI_SPLITS for each in islice((one for one in every if one.split == split), count)]

    return concepts


def few_emoji(count, cache):
    """`load_emoji` of these."""

    def load(split, *arguments, cache_dir=None, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sample, "emoji_concepts", first_concepts(count))
            return load_emoji(split, *arguments, cache_dir=cache_dir or cache, **options)

    return load
