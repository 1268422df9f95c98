"""Layouts with model state and activations off the device: every two values of every axis, on a few models.

What leaves the device is said by flags, by a table in a file, or found by --placement auto under a budget. `without` is
the same layout without all that is to change no bit of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megazero.config.checks_layout import least_buffer
from megazero.config.parse import parse_run
from megazero.config.placement import applied
from megazero.config.schema import Run
from megazero.mpu.axes import axes_of
from megazero.plan.step_memory import run_peaks
from megazero.plan.traffic import largest_unit
from megazero.train.init_from import model_source
from tests.parity.pairs import Axes, Values, table
from tests.parity.ways import FP16, Way

MAX_RANKS = 8
VIRTUAL = {"gpipe": 2, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}
TIERS = ("none", "cpu", "cpu:SHARE", "nvme", "nvme:SHARE", "files")
COLUMNS = ("optimizer", "params", "gradients", "activations")
"""What can leave the device: --offload-NAME has a value of `TIERS`. Each is a field of `Case`."""
IN_FILES = ("optimizer", "params", "gradients")
"""Columns that a table of --placement has in these cases; the others have their flags beside it."""
UNITS = {
    "optimizer": "[the embedding, blocks 1-2]",
    "params": "[block 1, block 3]",
    "gradients": "[embedding, block 1]",
    "activations": "[block 0, block 2]",
}
"""Units that leave alone, by column, where a table names units."""
NUMBERS = {
    "fp64": "--precision fp64",
    "fp32": "--precision fp32",
    "bf16": "--precision bf16",
    "fp16": FP16,
    "fp8": "--precision bf16 --fp8 delayed --hidden-size 48 --ffn-hidden-size 96 --seq-length 16",
}
RULES = {"adamw": "", "adam": "--optimizer adam", "sgd": "--optimizer sgd --sgd-momentum 0.9"}
MESSAGES = {
    "exact": "",
    "bf16": "--grad-reduce-dtype bf16",
    "weights": "",  # their blocks are those of int4 and feedback too
    "int8": "--zero-quantized-gradients int8",
    "int4": "--zero-quantized-gradients int4",
    "feedback": "--zero-quantized-gradients int4 --zero-gradient-error-feedback",
}
AXES: Axes = {
    **dict.fromkeys(COLUMNS, TIERS),
    "share": (0.25, 0.6),
    "units": (False, False, True),
    "updates": ("on time", "late", "early"),
    "order": (None, "horizontal", "vertical", "vertical in threes"),
    "placement": ("flags", "flags", "file", "auto"),
    "checkpoint": (False, True),
    "folders": (1, 2),
    "parts": ("small", "small", "large"),
    "tp": (1, 2),
    "sequence_parallel": (False, True),
    "pp": (1, 2, 3),
    "dp": (1, 2, 4),
    "zero": (0, 1, 2, 3),
    "shard": (None, 1, 2),
    "regather": ("micro-batch", "step"),
    "gathered": ("two", "one", "all"),
    "persist": (0, 100),
    "messages": ("exact", "exact", "exact", *MESSAGES),
    "schedule": tuple(VIRTUAL),
    "recompute": ("none", "selective", "full", "full"),
    "shard_inputs": (False, True),
    "accumulation": (1, 2, 5),
    "bucket": (500, 4000, 8_388_608),
    "overlap": (True, False),
    "carrier": ("shared memory", "gloo", "as NCCL", "late"),
    "slow": (False, True),
    "unwritten": (False, True),
    "resumes": (False, False, True),
    "background": (False, True),
    "numbers": ("fp64", "fp64", "fp64", *NUMBERS),
    "rule": ("adamw", "adamw", *RULES),
    "clip": (0.5, 0.5, 0.0),
    "heads": (3, 6),
    "layers": (4, 5),
    "tied": (True, False),
    "dropout": (True, False),
    "lora": ("none", "none", "whole", "8 bits", "4 bits"),
    "average": (False, True),
}
REQUIRED: tuple[Values, ...] = (
    {
        "params": "nvme",
        "optimizer": "nvme",
        "zero": 3,
        "updates": "late",
        "order": None,
        "accumulation": 5,
        "numbers": "fp16",
        "messages": "feedback",
    },
    {
        "gradients": "cpu",
        "zero": 2,
        "dp": 2,
        "tp": 1,
        "tied": False,
        "shard": None,
        "units": False,
        "accumulation": 5,
        "numbers": "fp16",
        "messages": "feedback",
    },
    {"shard_inputs": True, "carrier": "late", "zero": 1, "numbers": "bf16", "messages": "bf16"},
    {"carrier": "late", "zero": 3, "pp": 2, "updates": "late", "unwritten": True, "recompute": "full"},
    # The padding of a bucket was memory that nobody wrote, and the int8 block that reached into it lost precision.
    {
        **dict.fromkeys(("optimizer", "params", "gradients"), "none"),
        "activations": "cpu",
        "unwritten": True,
        "carrier": "late",
        "zero": 3,
        "numbers": "bf16",
        "messages": "weights",
    },
    {"order": "vertical in threes", "zero": 1, "dp": 2, "tied": False, "gradients": "none", "accumulation": 5},
    {"numbers": "fp8", "zero": 3, "dp": 2},
    {
        "messages": "int4",
        "zero": 2,
        "updates": "late",
        "resumes": True,
        "numbers": "fp32",
        "dp": 4,
        "shard": 2,
        "unwritten": True,
    },
    {"zero": 3, "dp": 2, "shard": 1, "gathered": "one", "regather": "step"},
    {"units": True, "zero": 1, "params": "nvme", "gradients": "cpu", "numbers": "fp64"},
    {"gradients": "nvme", "clip": 0.0, "zero": 3, "tied": False, "tp": 1, "parts": "small", "accumulation": 5},
    {"optimizer": "nvme:SHARE", "zero": 0, "parts": "small", "slow": True, "resumes": True, "numbers": "fp16"},
    # Stages without a unit on disks would save in the background, and wait for those with one.
    {"units": True, "optimizer": "nvme", "params": "cpu", "gradients": "cpu", "pp": 3, "background": True},
    {"placement": "auto", "folders": 2},
    # Eight ranks, which few draws have: of those that share out inputs, two have the shards of a state.
    {
        "shard_inputs": True,
        "recompute": "full",
        "tp": 2,
        "heads": 6,
        "pp": 1,
        "dp": 4,
        "shard": 2,
        "optimizer": "files",
    },
)
"""Combinations that must be among the first cases."""
ACTIVATIONS = 700_000
"""Bytes that hold what the largest unit keeps of a micro-batch, as often as is needed."""
NO_BIT: Values = {
    "activations": "none",
    "updates": "on time",
    "checkpoint": False,
    "regather": "micro-batch",
    "gathered": "two",
    "overlap": False,
    "shard_inputs": False,
    "slow": False,
    "unwritten": False,
    "resumes": False,
    "background": False,
}
"""Values of axes whose other values change no bit of any layout."""
TO_ITSELF: Values = {"units": False, "slow": False, "resumes": False, "numbers": "fp64", "messages": "exact"}
"""What a layout has that is compared with one process only: what a search chooses may change bits."""
RATES = "{flops: 1e10, to_host: 2GB, to_device: 2GB, update: 4GB, update_host: 1GB, read: 500MB, write: 300MB}\n"


class Case(NamedTuple):
    """A model, a layout, and how it runs.

    share       of the columns that leave in part
    units       whether `UNITS` of the columns leave, and no others
    order       of the micro-batches; None: not given
    folders     of the swap files
    parts       of buckets, which pass through slots: small ones take turns in them
    gathered    budget of gathered parameters, in units
    messages    what travels of gradients and parameters
    carrier     of the collectives of ranks; late: results come as late as they may
    slow        whether lanes are delayed
    updates     of a step: behind it, in the next one, or before its norm
    unwritten   whether memory that nobody has written holds NaN
    resumes     whether the run goes on from a checkpoint of `without`
    background  whether checkpoints are written beside the training
    numbers     the precision; fp16: with steps that overflow, and are skipped
    rule        the optimizer
    lora        of adapters: the base
    average     whether an average of the weights is kept
    sequence_parallel, shard, regather, ...
                as the flags of these names
    """

    optimizer: str
    params: str
    gradients: str
    activations: str
    share: float
    units: bool
    updates: str
    order: str | None
    placement: str
    checkpoint: bool
    folders: int
    parts: str
    tp: int
    sequence_parallel: bool
    pp: int
    dp: int
    zero: int
    shard: int | None
    regather: str
    gathered: str
    persist: int
    messages: str
    schedule: str
    recompute: str
    shard_inputs: bool
    accumulation: int
    bucket: int
    overlap: bool
    carrier: str
    slow: bool
    unwritten: bool
    resumes: bool
    background: bool
    numbers: str
    rule: str
    clip: float
    heads: int
    layers: int
    tied: bool
    dropout: bool
    lora: str
    average: bool

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
        words += [f"by-{self.placement}"] * (self.placement != "flags") + [self.updates] * (self.updates != "on time")
        words += [f"{self.order}"] * (self.order is not None) + ["ckpt"] * self.checkpoint
        words += [f"tp{self.tp}-pp{self.pp}-dp{self.dp}-z{self.zero}-{self.schedule}-acc{self.accumulation}"]
        words += [f"re-{self.recompute}"] * (self.recompute != "none") + [f"lora-{self.lora}"] * (self.lora != "none")
        words += [self.numbers, *[self.messages] * (self.messages != "exact"), *["resumes"] * self.resumes]
        words += ["average"] * self.average
        return "-".join(word.replace(" ", "-") for word in words)

    @property
    def sends_blocks(self) -> bool:
        """Whether parameters travel in blocks of int8. Without ZeRO none travel."""
        return self.zero > 0 and self.messages in ("weights", "int4", "feedback")

    @property
    def is_exact(self) -> bool:
        """Whether its numbers are those of one process in float64."""
        return self.numbers == "fp64" and self.messages == "exact"

    @property
    def norm_alone_differs(self) -> bool:
        """Whether the norm has other last bits than that of `without`: a sum of parts, of gradients in files. All that
        leaves the device decides how these are cut.
        """
        return self.gradients.startswith(("nvme", "files"))

    def without(self) -> Case:
        """The layout without all that is to change no bit: loss, norm and weights are the same."""
        changes: Values = {**NO_BIT, "order": self.resolved_order()}
        # With ZeRO-3, and where units have names, a bucket holds one unit. Other buckets have other sums of the norm.
        alike = self.zero == 3 or not self.units
        # ZeRO-2 and 3 reduce each micro-batch's gradient, wherever its sum rests.
        added_alike = self.zero > 1 and self.tp == 1 and self.shard is None and not (self.tied and self.pp > 1)
        changes |= {"carrier": "shared memory"} if self.carrier == "late" else {}
        # ZeRO-1 and 2 make blocks of parameters from master weights, where these are on the device.
        masters = self.zero in (1, 2) and self.sends_blocks and self.numbers not in ("fp64", "fp32")
        changes |= {"optimizer": "none"} if alike and not masters else {}
        changes |= {"params": "none"} if self.zero == 3 else {}
        if alike and added_alike and (self.gradients.startswith("cpu") or not self.clip):
            changes["gradients"] = "none"
        if self.zero < 2 and not self.tied and self.gradients == "none":
            changes["order"] = "horizontal"
        return self._replace(**changes)

    def resolved_order(self) -> str:
        """The order of the micro-batches, the default one too."""
        return self.order or ("vertical" if self.params.startswith("nvme") else "horizontal")

    def way(self) -> Way:
        """How ranks run it."""
        return Way(
            as_nccl=self.carrier == "as NCCL",
            late=self.carrier == "late",
            delays=1 if self.slow else None,
            unwritten=self.unwritten,
            infinite=frozenset({3} if self.numbers == "fp16" else ()),
            apart=(self.updates == "late") != self.slow,
            eager=self.updates == "early",
        )

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
        values |= {} if self.updates == "on time" else {f"{self.updates}_update": True}
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
        words += " --shard-recompute-inputs" * self.shard_inputs + f" --zero3-persist-below {self.persist}"
        words += f" {MESSAGES[self.messages]}" + " --zero-quantized-weights" * self.sends_blocks
        words += " --ema-decay 0.7" * self.average
        return [*words.split(), *["--no-shared-memory"] * (self.carrier in ("gloo", "as NCCL"))]

    def budget_flags(self, run: Run) -> list[str]:
        """The flags of how much is gathered at any time. run: that without them, and with nothing off the device."""
        if self.gathered == "two":
            return []
        brought = applied(run, {"offload_params": "cpu"}) if self.params != "none" else run
        # Where each rank has whole parameters, there is nothing to gather.
        one = max(1, largest_unit(brought, axes_of(run, self.ranks))[0])
        return ["--zero3-gathered-bytes", str(one if self.gathered == "one" else 10**9)]

    def buffer_flags(self, run: Run) -> list[str]:
        """The flags of the memory through which parts and activations pass. run: that without them."""
        columns = self.optimizer, self.gradients, self.params.replace("cpu", "none")
        moves = any(not tier.startswith("none") for tier in columns)
        kept = self.activations.startswith(("nvme", "files"))
        if not moves and not kept and self.placement != "auto":
            return []
        least = least_buffer(applied(run, {f"offload_{column}": self.tier(column) for column in COLUMNS}))
        small = max(least, ACTIVATIONS if kept or self.checkpoint else 0)
        return ["--nvme-buffer-bytes", str(small if self.parts == "small" else 4_000_000)]

    def offload_flags(self, folder: Path, run: Run) -> list[str]:
        """The flags of what lies where. folder: for swap files and tables. run: that without them."""
        words = ["--nvme-checkpoint"] * self.checkpoint
        folders = [folder / f"disk{number}" for number in range(self.folders)] if self.uses_disks() else []
        for each in folders:
            each.mkdir()
        words += ["--nvme-path", *map(str, folders)] if folders else []
        if any(self.tier(column) == "files" for column in COLUMNS):
            (folder / "files").mkdir()
            words += ["--files-path", str(folder / "files")]
        words += self.buffer_flags(run)
        values = self.placed()
        if self.placement == "auto":
            (folder / "rates.yaml").write_text(RATES)
            words += ["--placement", "auto", "--placement-rates", str(folder / "rates.yaml")]
            words += ["--device-memory-budget", str(tight_budget(run, self.ranks)), "--host-memory-budget", "1GB"]
        if self.placement == "file":
            table = {key: value for key, value in values.items() if self.units or key not in COLUMNS or key in IN_FILES}
            values = {key: value for key, value in values.items() if key not in table}
            if self.units:
                named = {key: f"{{tier: {table[key]}, units: {UNITS[key]}}}" for key in COLUMNS if key in table}
                table |= named
            lines = [f"{key}: {value if key in COLUMNS else str(value).lower()}\n" for key, value in table.items()]
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
    found = [max(peaks.device_bytes for peaks in run_peaks(each, axes_of(each, ranks), "cpu")) for each in (run, away)]
    most, least = found
    assert least < most
    return least + int((most - least) * part)


def fit(values: Values) -> Values | None:
    """The values with those changed that cannot be beside others."""
    found: dict[str, Any] = dict(values)
    if found["placement"] == "auto":
        found |= dict.fromkeys(COLUMNS, "none") | {"updates": "on time", "order": None} | TO_ITSELF
    elif all(found[column] == "none" for column in COLUMNS):
        return None
    if found["tp"] * found["pp"] * found["dp"] > MAX_RANKS or found["heads"] % found["tp"]:
        return None
    found["checkpoint"] &= found["optimizer"].startswith("nvme")
    if found["updates"] == "early" and not found["optimizer"].startswith("nvme"):
        found["updates"] = "on time"
    found["sequence_parallel"] &= found["tp"] > 1
    found["shard_inputs"] &= found["tp"] > 1 and found["recompute"] == "full" and not found["sequence_parallel"]
    found["units"] &= found["placement"] == "file"
    if found["units"]:
        found |= {column: found[column].partition(":")[0] for column in COLUMNS}
    if found["shard"] is not None and found["shard"] >= found["dp"]:
        found["shard"] = None
    if found["zero"] < 3 and found["params"] == "none":
        found |= {"regather": "micro-batch", "gathered": "two", "persist": 0}
    if found["placement"] == "auto":  # a budget says nothing of what a search chooses
        found |= {"gathered": "two", "parts": "large"}
    if found["dp"] == 1 or (found["messages"] == "weights" and found["zero"] == 0):
        found["messages"] = "exact"
    if found["messages"] == "bf16" and found["numbers"] != "bf16":
        found["messages"] = "exact"
    found["resumes"] &= found["messages"] != "feedback"  # no checkpoint has what blocks have lost
    if found["numbers"] == "fp8":  # of a larger model
        found |= {"lora": "none", "parts": "large"}
    if found["carrier"] == "late" and (found["dp"] == 1 or not found["overlap"]):
        found["carrier"] = "gloo"
    return found


def cost(values: Values) -> float:
    """What a case costs, about: to start its ranks, and passes of each rank through its layers. One that says more,
    because it is compared with one process to the last digits, counts as cheap.
    """
    case = Case(**values)
    passes = case.layers * case.accumulation * case.tp * case.dp
    return (4 + case.ranks + passes / 10) * (1 if case.is_exact else 1.5)


def cases(count: int, seed: int) -> Iterator[Case]:
    """`count` different cases, those with the most pairs that are new for their cost first."""
    return (Case(**values) for values in table(AXES, fit, seed, count, REQUIRED, cost))


def whole_run(flags: list[str], ranks: int) -> Run:
    """The run of these flags."""
    return parse_run(flags, ranks, model_source)
