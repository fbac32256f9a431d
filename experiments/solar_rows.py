"""The rows of the SOLAR claims: how each is trained, from which other row, and for how many samples."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Budget = Literal["stage1", "stage2", "whole", "time", "rest"]

MINERS = {
    "tower-text": ("towers", "text", "text"),
    "tower-image": ("towers", "image", "image"),
    "text-image": ("model", "text", "image"),
    "image-text": ("model", "image", "text"),
    "text-text": ("model", "text", "text"),
    "image-image": ("model", "image", "image"),
    "fused": ("model", "fused", "fused"),
}
"""The seven of App. D.4: model, view of the anchor, view of the candidate. The model that stage 2 starts from takes
CLIP's place."""
TOWERS, CROSS_MODAL, OWN = ("tower-text", "tower-image"), tuple(MINERS)[2:6], ("fused",)

ITC_ONLY = {"gla_weight": 0.0, "gd_weight": 0.0, "ld_weight": 0.0, "mask": "none"}
GCL_TERM = {"gcl_weight": 1.0}
NO_CN = {"constructed_negatives": False}
GCL_ONLY = {"itc_weight": 0.0, "gla_weight": 0.0, "gd_weight": 0.0, "ld_weight": 0.0, **GCL_TERM}
HALF = {"mask_share": 0.5}
LATE = {"mask_start_ratio": 0.3, "mask_warmup_ratio": 0.5}
WINDOWS = {"scores": "windows"}


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        name: Its name.
        group: What `--rows` can call it together with others.
        method: Key of the method; None for towers without training.
        start: The row whose model it starts from.
        budget: Whose steps and rate: those of a stage; "whole" has the samples of both stages, "time" their compute
            time, and "rest" the samples of stage 2.
        changes: Fields of the method's configuration.
        miners: Which miners' negatives stage 2 uses.
        lora: Train the vision-language encoder by LoRA.
        live: Run the towers at every step.
        truth: Take the masks from the boxes and spans of the scenes.
        auroc: Of scores whose errors the true masks get; 1 for none.
        shuffled: Move the masks to random places.
        versions: Rows have augmented versions.
        grouped: Mined neighbours beside each anchor in a batch, all of them anchors.
    """

    name: str
    group: str
    method: str | None = None
    start: str | None = None
    budget: Budget = "whole"
    changes: Mapping[str, Any] = field(default_factory=dict)
    miners: Sequence[str] = tuple(MINERS)
    lora: bool = False
    live: bool = False
    truth: bool = False
    auroc: float = 1.0
    shuffled: bool = False
    versions: bool = False
    grouped: int = 0


def _first(name: str, group: str, **changes: Any) -> Row:  # noqa: ANN401 - fields of the configuration
    return Row(name, group, "solar_stage1", budget="stage1", changes=changes)


def _second(name: str, group: str, start: str | None, changes: Mapping[str, Any], **options: Any) -> Row:  # noqa: ANN401
    return Row(name, group, "solar_stage2", start, "stage2", changes, **options)


BASELINES = [
    Row("towers", "baselines"),
    Row("towers, whitened", "baselines"),
    Row("CL", "baselines", "contrastive"),
    Row("CL, equal time", "baselines", "contrastive", budget="time"),
    Row("GCL", "baselines", "gcl"),
    Row("GCL, equal time", "baselines", "gcl", budget="time"),
    Row("GCL, short", "baselines", "gcl", budget="stage1"),
    Row("GCL, continued", "baselines", "gcl", "GCL, short", "rest"),
    _first("ITC only", "baselines", **ITC_ONLY),
    Row("ITC only, continued", "baselines", "solar_stage1", "ITC only", "rest", ITC_ONLY),
]

FIRST = {
    "w/o ITC": {"itc_weight": 0.0},
    "w/o GLA": {"gla_weight": 0.0},
    "w/o GD": {"gd_weight": 0.0},
    "w/o LD": {"ld_weight": 0.0},
    "w/o masks": {"mask": "none"},
    "hard masks": {"mask": "hard"},
    "w/o W": {"projection_heads": False},
}
"""Table 2, besides ITC only."""

SECOND: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "w/o CN": (NO_CN, {}),
    "RP, w/o CN": (NO_CN | {"positive": "random"}, {}),
    "AP, w/o CN": (NO_CN | {"positive": "augmented"}, {"versions": True}),
    "w/o segments": ({"segments": False}, {}),
    "w/o mined negatives": ({"mined_per_anchor": 0}, {}),
    "w/o towers' miners": ({}, {"miners": (*CROSS_MODAL, *OWN)}),
    "w/o cross-modal miners": ({}, {"miners": (*TOWERS, *OWN)}),
    "w/o own miner": ({}, {"miners": (*TOWERS, *CROSS_MODAL)}),
    "own miner only": ({}, {"miners": OWN}),
    "LoRA": ({}, {"lora": True}),
    "input-level masks": ({"mask_level": "input"}, {"live": True}),
}
"""Tables 3, 6 and 12, and the level of masks: fields of the configuration, and of `Row`."""

WINDOW: dict[str, dict[str, Any]] = {
    "all rows": {"mask_share": 1.0},
    "global tokens": {"scores": "global", "gla_weight": 1.0},
    "true masks": {},
    "shuffled masks": {},
}
"""What window masks need: half of the rows, windows, and the right places."""

FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "stage 2": ("stage 1", {}, "ablations"),
    "Mixed": ("stage 1", {"itc_weight": 1.0}, "mixed-ablations"),
    "GCL + stage 2": ("GCL, short", GCL_TERM, "gcl-ablations"),
}
"""The variants of stage 2: their start, their further term, and the group of their ablations."""


DOSES = (0.5, 0.59, 0.7, 0.8, 0.9, 1.0)
"""Quality of masks in the dose-response; the paper's text masks have 0.59 (App. H.2)."""


def _ablations(name: str) -> list[Row]:
    """The ablations of one variant of stage 2."""
    start, term, group = FAMILIES[name]
    rows = [
        _second(f"{name}, {what}", group, start, term | changes, **options)
        for what, (changes, options) in SECOND.items()
    ]
    rows.append(_second(f"{name}, true masks", group, start, term, truth=True))
    if start != "stage 1":
        return rows
    rows += [_second(f"{name} after {what}", group, f"stage 1, {what}", term) for what in FIRST]
    rows.append(_second(f"{name} after ITC only", group, "ITC only", term))
    rows.append(_second(f"{name} after true masks", group, "stage 1, true masks", term, truth=True))
    rows.append(_second(f"{name} without stage 1", group, None, term))
    if name == "Mixed":
        rows.append(_second("Mixed, LoRA and two layers", group, start, term | {"trainable_vl_layers": 2}, lora=True))
    return rows


SOLAR = [
    _first("stage 1", "solar"),
    _first("stage 1 with GCL", "solar", itc_weight=0.0, **GCL_TERM),
    Row("GCL, window masks", "solar", "solar_stage1", changes=GCL_ONLY | HALF | WINDOWS | LATE),
    *(_second(name, "solar", start, term) for name, (start, term, _) in FAMILIES.items()),
    _second("stage 2 with GCL", "solar", "stage 1", GCL_TERM),
    _second("stage 2 with GCL after stage 1 with GCL", "solar", "stage 1 with GCL", GCL_TERM),
    _second("GCL + stage 2 alone", "solar", "GCL, short", {}),
]

RECORDED = [
    *(
        Row(f"{name} + intersection", "recorded", start=name)
        for name in ("GCL, window masks", "GCL", "GCL, equal time")
    ),
    *(Row(f"{name} + random parts", "recorded", start=name, shuffled=True) for name in ("GCL", "GCL, equal time")),
]
"""Rows of stored results: the model of another row, read also with views of shared or of random parts of each item."""

ROWS = {
    row.name: row
    for row in [
        *BASELINES,
        *SOLAR,
        *RECORDED,
        *(_first(f"stage 1, {name}", "ablations", **changes) for name, changes in FIRST.items()),
        *(
            Row(
                f"GCL, window masks, {name}",
                "window-ablations",
                "solar_stage1",
                changes=GCL_ONLY | HALF | WINDOWS | LATE | changes,
                truth=name == "true masks",
                shuffled=name == "shuffled masks",
            )
            for name, changes in WINDOW.items()
        ),
        Row("stage 1, true masks", "ablations", "solar_stage1", budget="stage1", truth=True),
        *(row for name in FAMILIES for row in _ablations(name)),
        *(
            _second(f"{name}, AUROC {dose}", group, "stage 1", term | {"mined_per_anchor": 0}, truth=True, auroc=dose)
            for name, group, term in (("stage 2", "dose", {}), ("Mixed", "dose-mixed", {"itc_weight": 1.0}))
            for dose in DOSES
        ),
        Row("GCL, continued, grouped", "grouped", "gcl", "GCL, short", "rest", grouped=2),
        _second("GCL + stage 2, grouped", "grouped", "GCL, short", GCL_TERM | {"mined_per_anchor": 0}, grouped=2),
    ]
}
GROUPS = tuple(dict.fromkeys(row.group for row in ROWS.values() if row not in RECORDED))


def chosen(names: Sequence[str]) -> list[Row]:
    """The rows of these names and groups, in the order of the table.

    Raises:
        ValueError: There is no such row or group, or it is only recorded.
    """
    unknown = [name for name in names if name not in ROWS and name not in GROUPS]
    if unknown:
        raise ValueError(f"no row or group {unknown[0]!r}; groups: {', '.join(GROUPS)}; rows: {'; '.join(ROWS)}")
    recorded = [row.name for row in RECORDED if row.name in names]
    if recorded:
        raise ValueError(f"{recorded[0]!r} is in stored results only; the last commit that runs it is 28f18ad")
    return [row for row in ROWS.values() if row.name in names or row.group in names]


def uses_mined(row: Row) -> bool:
    """Whether the row needs mined negatives."""
    return row.grouped > 0 or (row.method == "solar_stage2" and row.changes.get("mined_per_anchor", 1) > 0)


def samples_per_step(row: Row, args: argparse.Namespace) -> int:
    """Scenes that one step reads: anchors, and mined negatives of stage 2."""
    if row.method != "solar_stage2":
        return args.batch_size
    return args.stage2_batch_size * (1 + row.changes.get("mined_per_anchor", args.mined))


def stage2_samples(args: argparse.Namespace) -> int:
    """Samples of the whole stage 2."""
    return args.stage2_steps * args.stage2_batch_size * (1 + args.mined)


def steps_of(row: Row, args: argparse.Namespace) -> int:
    """Steps of a row with any budget but "time".

    "rest" has the samples of stage 2 and "whole" those of both stages, unless `--steps` is given. Ablations of stage 2
    have its steps, as in the paper: fewer samples without mined negatives.
    """
    if row.budget == "stage1":
        return args.stage1_steps
    if row.budget == "stage2":
        return max(1, round(stage2_samples(args) / args.stage2_batch_size)) if row.grouped else args.stage2_steps
    rest = max(1, round(stage2_samples(args) / args.batch_size))
    return rest if row.budget == "rest" else args.steps or args.stage1_steps + rest


def rate_of(row: Row, args: argparse.Namespace) -> float:
    """The learning rate of a row."""
    rates = {"stage1": args.stage1_lr, "stage2": args.stage2_lr, "rest": args.continued_lr}
    if row.budget in ("whole", "time") or (row.method == "gcl" and row.budget == "stage1"):
        return args.lr
    return rates[row.budget]
