"""Columns of images of a dataset: one per row or several, undecoded."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import datasets
import pyarrow
import pyarrow.compute

Source = TypeVar("Source", datasets.Dataset, datasets.IterableDataset)

IMAGE = datasets.Image(decode=False)


def undecoded(dataset: Source) -> Source:
    """Return the dataset as plain rows, with images as bytes or paths."""
    dataset = dataset.with_format(None)
    for name, feature in (dataset.features or {}).items():
        if isinstance(feature, datasets.Image):
            dataset = dataset.cast_column(name, IMAGE)
        elif isinstance(element_of(feature), datasets.Image):
            dataset = dataset.cast_column(name, datasets.List(IMAGE))
    return dataset


def strings(columns: Mapping[str, Sequence[Any]], several: bool = False) -> datasets.Dataset:
    """Make a dataset of strings or nulls, or with `several` of lists of strings; its columns may be all null."""
    kind = pyarrow.list_(pyarrow.string()) if several else pyarrow.string()
    arrays = {name: pyarrow.array(values, kind) for name, values in columns.items()}
    return datasets.Dataset(datasets.table.InMemoryTable(pyarrow.table(arrays)))


def element_of(feature: Any) -> Any:  # noqa: ANN401 - any feature of `datasets`
    """Return what a list holds; None if the feature is no list."""
    return feature.feature if isinstance(feature, datasets.List | datasets.LargeList) else None


def is_text(feature: Any) -> bool:  # noqa: ANN401 - any feature of `datasets`
    """Whether a feature is text."""
    return feature in (datasets.Value("string"), datasets.Value("large_string"))


def unread_images(images: datasets.Dataset) -> Iterator[tuple[int, list[str | None]]]:
    """Yield the rows with an image that has no bytes, without reading the bytes of the others.

    Yields:
        The row, and the paths of its images without bytes; None for an image without a path, or a row without images.
    """
    several = element_of(images.features["image"]) is not None
    start = 0
    for batch in images.with_format("arrow").iter(batch_size=1000):
        column = batch["image"].combine_chunks() if several else batch["image"]
        found = pyarrow.compute.list_flatten(column) if several else column
        data, path = (pyarrow.compute.struct_field(found, field) for field in ("bytes", "path"))
        unread = zip(data.is_null().to_pylist(), path.to_pylist(), strict=True)
        paths = [[value] if is_unread else [] for is_unread, value in unread]
        if several:
            counts = (count or 0 for count in pyarrow.compute.list_value_length(column).to_pylist())
            ends = list(itertools.accumulate(counts, initial=0))
            paths = [
                list(itertools.chain.from_iterable(paths[first:end])) if first < end else [None]
                for first, end in itertools.pairwise(ends)
            ]
        yield from ((start + offset, some) for offset, some in enumerate(paths) if some)
        start += len(batch)
