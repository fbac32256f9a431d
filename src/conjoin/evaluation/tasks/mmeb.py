"""MMEB (VLM2Vec, arXiv 2410.05160): Precision@1 of each subset over its published rows.

The share of queries whose right target is closer than all others of the row; ties are failures. The averages are over
subsets. A query that asks about an image has an image and a text. A target whose text only asks for its representation
is an image.
"""

from dataclasses import dataclass
from pathlib import Path

from conjoin.evaluation.tasks import Cell, Rows, Task

COLUMNS = ("qry_text", "qry_img_path", "tgt_text", "tgt_img_path")


@dataclass(kw_only=True)
class MmebOptions:
    """Which subsets of MMEB.

    Args:
        data: Folder of the subsets.
        images: Folder that the paths of images are relative to (default: that of the data).
        subsets: Only these (default: all).
    """

    data: str
    images: str | None = None
    subsets: list[str] | None = None


def mmeb_cells(options: MmebOptions) -> list[Cell]:
    """One cell for each subset. A row has one query and its targets, the first of which is right.

    The instruction is part of the published texts. `<|image_1|>` marks the one image of an item and is left out of
    its text. A target of several rows is encoded once. What equals the right target of a row is not among the others.

    Raises:
        FileNotFoundError: As `find_subsets`.
        ValueError: As `find_subsets`, or a malformed row; the message names file and row.
    """
    from conjoin.data.mmeb import find_subsets, mmeb_item, mmeb_modality
    from conjoin.data.query_rows import open_rows

    images, cells = Path(options.images or options.data), []
    for name, path in find_subsets(options.data, options.subsets).items():
        queries, targets, pools = [], dict[tuple[str, str], str](), dict[str, list[str]]()
        for number, row in enumerate(open_rows(path)[0]):
            id_ = f"{path.parent.name}/{path.name}, row {number}"
            lists = [row.get(name) for name in COLUMNS[2:]]
            is_whole = set(COLUMNS) <= set(row) and all(isinstance(each, list) for each in lists)
            if not is_whole or len(lists[0]) != len(lists[1]):
                raise ValueError(f"{id_}: expected {', '.join(COLUMNS)}, the last two lists of one length; got {row}")
            found = [(text or "", image or "") for text, image in zip(*lists, strict=True)]
            pools[id_] = list(dict.fromkeys(targets.setdefault(target, f"target {len(targets)}") for target in found))
            if len(pools[id_]) < 2:
                raise ValueError(f"{id_}: expected two different targets or more")
            queries.append({"id": id_, **mmeb_item(row["qry_text"], row["qry_img_path"], images, id_)})
        items = [{"id": id_, **mmeb_item(*target, images, f"{path.name}, {id_}")} for target, id_ in targets.items()]
        right = {pool[0] for pool in pools.values()}
        sides = [
            {mmeb_modality(item).replace(",", "+") for item in side}
            for side in (queries, [each for each in items if each["id"] in right])
        ]
        modality = " → ".join(side.pop() if len(side) == 1 else "several" for side in sides)
        qrels = {id_: pool[:1] for id_, pool in pools.items()}
        rows = Rows(f"{name}-queries", queries), Rows(f"{name}-targets", items)
        cells.append(Cell(name, *rows, qrels, pools, labels={"query → target": modality}))
    return sorted(cells, key=lambda cell: cell.labels["query → target"])


TASK = Task(
    "mmeb", "MMEB", str(__doc__), MmebOptions, mmeb_cells, ks=(1,), mrr=None, averages=True, by="query → target"
)
