"""Columns of images of a dataset: one per row or several, undecoded."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import datasets
import pyarrow
import pyarrow.compute

from conjoin.data.interleaved import listed_images

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
    return feature in [datasets.Value(kind) for kind in ("string", "large_string", "string_view")]


def image_column(dataset: datasets.Dataset, column: str) -> datasets.Dataset | None:
    """Return a column of images, bytes or paths as the undecoded column `image`; None if it holds something else."""
    feature, several = dataset.features[column], element_of(dataset.features[column]) is not None
    kind = element_of(feature) if several else feature
    images = dataset.select_columns(column).rename_columns({column: "image"})
    if kind in (datasets.Value("large_binary"), datasets.Value("binary_view")):
        kind = datasets.Value("binary")
        images = images.cast_column("image", datasets.List(kind) if several else kind)
    if not is_text(kind) and not isinstance(kind, datasets.Image | dict) and kind != datasets.Value("binary"):
        return None
    return images.cast_column("image", datasets.List(IMAGE) if several else IMAGE)


def list_lengths(dataset: datasets.Dataset, column: str) -> list[int]:
    """Return the length of each row's list, without reading what it holds; 0 for a missing one."""
    counts: list[int] = []
    for batch in dataset.select_columns(column).with_format("arrow").iter(batch_size=1000):
        counts += [count or 0 for count in pyarrow.compute.list_value_length(batch[column]).to_pylist()]
    return counts


def with_lists(dataset: Source, column: str | None, first: Mapping[str, Any]) -> Source:
    """Return the dataset with lists of paths in a column of texts, if a cell (of a stream, the first) is a JSON list.

    Args:
        dataset: The rows.
        column: Of the images; None leaves the dataset as it is.
        first: The first row.
    """
    if column is None or not isinstance(first[column], str):
        return dataset

    def read(row: Mapping[str, Any]) -> dict[str, Any]:
        found = listed_images(row[column])
        return {column: found if isinstance(found, list) else [found]}

    cells = dataset[column][:] if isinstance(dataset, datasets.Dataset) else [first[column]]
    if not any(isinstance(listed_images(cell), list) for cell in cells):
        return dataset
    lists = [read({column: cell})[column] for cell in cells]
    if isinstance(dataset, datasets.Dataset):
        others, listed = dataset.remove_columns(column), strings({column: lists}, several=True)
        return datasets.concatenate_datasets([others, listed], axis=1) if others.column_names else listed
    features = dataset.features
    if features is not None:
        features = datasets.Features(features | {column: datasets.List(datasets.Value("string"))})
    return dataset.map(read, features=features)


def image_files(images: datasets.Dataset) -> dict[int, tuple[str, ...]]:
    """Return the paths or URLs of the rows none of whose images has bytes."""
    several = element_of(images.features["image"]) is not None
    counts = list_lengths(images, "image") if several else [1] * len(images)
    found = {row: tuple(path for path in paths if path) for row, paths in unread_images(images)}
    return {row: paths for row, paths in found.items() if paths and len(paths) == counts[row]}


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
