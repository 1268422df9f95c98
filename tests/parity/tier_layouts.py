"""Layouts with model state and activations off the device: every two values of every axis, on a few models.

What leaves the device is said by flags, by a table in a file, or found by --placement auto under a budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megazero.config.parse import parse_run
from megazero.config.placement import applied
from megazero.config.schema import Run
from megazero.mpu.axes import axes_of
from megazero.plan.tier_peaks import run_peaks
from megazero.train.init_from import model_source
from tests.parity.pairs import Axes, Values, table

MAX_RANKS = 8
VIRTUAL = {"gpipe": 2, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}
TIERS = ("none", "cpu", "cpu:SHARE", "nvme", "nvme:SHARE")
COLUMNS = ("optimizer", "params", "gradients", "activations")
"""What can leave the device: --offload-NAME has a value of `TIERS`. Each is a field of `Case`."""
IN_FILES = ("optimizer", "params", "gradients")
"""Columns that a table of --placement has in these cases; the others have their flags beside it."""
AXES: Axes = {
    **dict.fromkeys(COLUMNS, TIERS),
    "share": (0.25, 0.6),
    "late": (False, True),
    "order": (None, "horizontal", "vertical", "vertical in threes"),
    "placement": ("flags", "flags", "file", "auto"),
    "checkpoint": (False, True),
    "folders": (1, 2),
    "tp": (1, 2),
    "sequence_parallel": (False, True),
    "pp": (1, 2, 3),
    "dp": (1, 2, 4),
    "zero": (0, 1, 2, 3),
    "shard": (None, 1, 2),
    "regather": ("micro-batch", "step"),
    "schedule": tuple(VIRTUAL),
    "recompute": ("none", "selective", "full"),
    "accumulation": (1, 4, 7),
    "bucket": (500, 4000, 8_388_608),
    "overlap": (True, False),
    "carrier": ("shared memory", "gloo", "as NCCL"),
    "heads": (3, 6),
    "layers": (4, 5),
    "tied": (True, False),
    "dropout": (True, False),
    "lora": (False, True),
}
RATES = "{flops: 1e10, to_host: 2GB, to_device: 2GB, update: 4GB, update_host: 1GB, read: 500MB, write: 300MB}\n"


class Case(NamedTuple):
    """A model and a layout.

    share              of the columns that leave in part
    order              of the micro-batches; None: not given
    folders            of the swap files
    carrier            of the collectives of ranks
    sequence_parallel, shard, regather, ...
                       as the flags of these names
    """

    optimizer: str
    params: str
    gradients: str
    activations: str
    share: float
    late: bool
    order: str | None
    placement: str
    checkpoint: bool
    folders: int
    tp: int
    sequence_parallel: bool
    pp: int
    dp: int
    zero: int
    shard: int | None
    regather: str
    schedule: str
    recompute: str
    accumulation: int
    bucket: int
    overlap: bool
    carrier: str
    heads: int
    layers: int
    tied: bool
    dropout: bool
    lora: bool

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def batch(self) -> int:
        """Samples of a step, so many that each replica has one in each micro-batch."""
        return max(AXES["dp"]) * self.accumulation

    @property
    def name(self) -> str:
        words = [f"{name[:3]}-{value}" for name in COLUMNS if (value := getattr(self, name)) != "none"]
        words += [f"by-{self.placement}"] * (self.placement != "flags") + ["late"] * self.late
        words += [f"{self.order}"] * (self.order is not None) + ["ckpt"] * self.checkpoint
        words += [f"tp{self.tp}-pp{self.pp}-dp{self.dp}-z{self.zero}-{self.schedule}-acc{self.accumulation}"]
        words += [f"re-{self.recompute}"] * (self.recompute != "none") + ["lora"] * self.lora
        return "-".join(word.replace(" ", "-") for word in words)

    def tier(self, column: str) -> str:
        """What --offload-COLUMN says."""
        return str(getattr(self, column)).replace("SHARE", str(self.share))

    def uses_disks(self) -> bool:
        """Also a search, where it has two folders: without disks it looks at fewer placements."""
        searched = self.placement == "auto" and self.folders > 1
        return searched or any(self.tier(column).startswith("nvme") for column in COLUMNS)

    def placed(self) -> Values:
        """What is to lie where and when it moves, by key of a table of --placement."""
        values: Values = {column: self.tier(column) for column in COLUMNS if getattr(self, column) != "none"}
        values |= {"late_update": True} if self.late else {}
        if self.order is not None:
            values["micro_batch_order"] = self.order.partition(" ")[0]
        return values | ({"vertical_group_size": 3} if self.order == "vertical in threes" else {})

    def layout_flags(self) -> list[str]:
        """The flags of the layout, without what lies where."""
        words = f"--tp {self.tp} --pp {self.pp} --zero-stage {self.zero} --zero3-regather {self.regather} "
        words += f"--pipeline-schedule {self.schedule} --virtual-stages {VIRTUAL[self.schedule]} "
        words += f"--recompute-granularity {self.recompute} --bucket-size {self.bucket} "
        words += f"--micro-batch-size {self.batch // (self.dp * self.accumulation)}"
        words += f" --zero-shard-size {self.shard}" * (self.shard is not None)
        words += " --sequence-parallel" * self.sequence_parallel + " --no-overlap" * (not self.overlap)
        return [*words.split(), *["--no-shared-memory"] * (self.carrier != "shared memory")]

    def offload_flags(self, folder: Path, run: Run) -> list[str]:
        """The flags of what lies where. folder: for swap files and tables. run: that without them."""
        words = ["--nvme-checkpoint"] * self.checkpoint
        folders = [folder / f"disk{number}" for number in range(self.folders)] if self.uses_disks() else []
        for each in folders:
            each.mkdir()
        if folders:
            words += ["--nvme-path", *map(str, folders), "--nvme-buffer-bytes", "4MB"]
        values = self.placed()
        if self.placement == "auto":
            (folder / "rates.yaml").write_text(RATES)
            words += ["--placement", "auto", "--placement-rates", str(folder / "rates.yaml")]
            words += ["--device-memory-budget", str(tight_budget(run, self.ranks))]
        if self.placement == "file":
            table = {key: value for key, value in values.items() if key not in COLUMNS or key in IN_FILES}
            values = {key: value for key, value in values.items() if key not in table}
            lines = [f"{key}: {str(value).lower()}\n" for key, value in table.items()]
            (folder / "placement.yaml").write_text("".join(lines))
            words += ["--placement", str(folder / "placement.yaml")] * bool(lines)
        for key, value in values.items():
            flag = f"--offload-{key}" if key in COLUMNS else f"--{key.replace('_', '-')}"
            words += [flag] if value is True else [flag, str(value)]
        return words


def tight_budget(run: Run, ranks: int, part: float = 0.4) -> int:
    """Bytes between what a rank takes on its device with all gone that a search can move, and before the search: below
    their middle, or another part of the way.
    """
    away = applied(run, {f"offload_{column}": "cpu" for column in COLUMNS})
    found = [
        max(peaks.device_bytes for peaks in run_peaks(each, axes_of(each.parallel, ranks), "cpu").every())
        for each in (run, away)
    ]
    most, least = found
    assert least < most
    return least + int((most - least) * part)


def fit(values: Values) -> Values | None:
    """The values with those changed that cannot be beside others."""
    found: dict[str, Any] = dict(values)
    if found["placement"] == "auto":
        found |= dict.fromkeys(COLUMNS, "none") | {"late": False, "order": None}
    elif all(found[column] == "none" for column in COLUMNS):
        return None
    found["checkpoint"] &= found["optimizer"].startswith("nvme")
    found["sequence_parallel"] &= found["tp"] > 1
    if found["tp"] * found["pp"] * found["dp"] > MAX_RANKS:
        return None
    if found["shard"] is not None and found["shard"] >= found["dp"]:
        found["shard"] = None
    if found["zero"] < 3 and found["params"] == "none":
        found["regather"] = "micro-batch"
    return None if found["heads"] % found["tp"] else found


def cases(count: int, seed: int) -> Iterator[Case]:
    """`count` different cases, those with the most pairs that are new first."""
    return (Case(**values) for values in table(AXES, fit, seed, count))


def whole_run(flags: list[str], ranks: int) -> Run:
    """The run of these flags."""
    return parse_run(flags, ranks, model_source)
