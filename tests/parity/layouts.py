"""Layouts drawn at random: every axis of the program against one process, on a few models.

A `Case` is a model and a layout as command-line flags. The models are fixed, so that one process trains each of them
once for all its layouts; together they have every value of every choice. The layouts come from a seed; a draw that
breaks one of the mathematical constraints (see `fits`) is drawn again. `REQUIRED` names combinations that must be among
the cases; the rest of such a case stays random.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from typing import NamedTuple

from tests.parity.pairs import DRAWS, Pair, Values, pairs
from tests.parity.ways import Way
from tests.stages import STAGES

MAX_RANKS = 8
SEQUENCE = 12
BATCH = 12
"""Samples of a step: the product of dp, the number of micro-batches and their size."""
ACCUMULATIONS = (1, 2, 3, 4, 6, 12)
VOCABULARY = 1003
"""A vocabulary that no tp divides."""
CHUNKS = {"gpipe": (1, 2), "1f1b": (1,), "interleaved": (2,), "zb-h1": (1,), "zb-v": (2,)}
"""Model chunks per rank that the cases have under each schedule."""


@dataclass(frozen=True)
class Model:
    """The model and the optimizer of a case."""

    name: str
    heads: int
    layers: int
    positions: str
    tied: bool
    norm: str
    activation: str
    groups: int | None
    bias: bool
    dropout: float
    smoothing: float
    document_mask: bool
    masked: bool = False
    """Batches have masks that leave very unequal numbers of predictions (`ways.mask`)."""
    kinds: tuple[str, ...] = ()
    """Further words of the command line: what families of today have, and layers that differ."""

    def flags(self, precision: str = "fp64") -> list[str]:
        """The flags of the model, which are the same on one process and on every layout."""
        flags = {
            "--num-layers": self.layers,
            "--hidden-size": 24,
            "--num-attention-heads": self.heads,
            "--vocab-size": VOCABULARY,
            "--make-vocab-size-divisible-by": 1,
            "--seq-length": SEQUENCE,
            "--position-embedding": self.positions,
            "--norm": self.norm,
            "--activation": self.activation,
            "--ffn-hidden-size": 48,
            "--hidden-dropout": self.dropout,
            "--attention-dropout": self.dropout,
            "--label-smoothing": self.smoothing,
            "--z-loss": 1e-3 if self.smoothing else 0.0,
            "--global-batch-size": BATCH,
            "--precision": precision,
            "--clip-grad": 0.5,
            "--lr": 1e-3,
            "--init-method-std": 0.1,
        }
        words = [str(word) for pair in flags.items() for word in pair]
        words += ["--num-query-groups", str(self.groups)] if self.groups else []
        words += [] if self.tied else ["--untie-embeddings-and-output-weights"]
        words += [] if self.bias else ["--disable-bias-linear"]
        words += ["--embedding-layernorm"] if self.positions == "alibi" else ["--no-embedding-layernorm"]
        words += [*self.kinds]
        return words + (["--document-mask", "--eod-id", "0", "--eod-mask-loss"] if self.document_mask else [])


GEMMA = (
    *("--layer-pattern", "window:5 local x2, full", "--rotary-sets", "local base=50", "--rotary-base", "900"),
    *("--norm-placement", "both", "--norm-plus-one", "--query-key-norm", "head", "--kv-channels", "10"),
    *("--attention-cap", "2", "--logits-cap", "3", "--embedding-multiplier", "4.9", "--attention-scale", "0.2"),
)
OLMO = (
    *("--norm-placement", "after", "--query-key-norm", "all", "--kv-channels", "6"),
    *("--rotary-scaling", "yarn factor=4 original_max_position_embeddings=6", "--rotary-base", "100"),
)
NEOX = (
    *("--parallel-block", "two-norms", "--kv-channels", "8", "--rotary-share", "0.5", "--rotary-interleaved"),
    *("--layer-pattern", "full, window:4 ffn:24", "--no-attention-output-bias"),
)
MIXED = (
    *("--layer-pattern", "chunk:5 alibi, window:1 rotary ffn:36 x2, full none", "--query-key-norm", "l2"),
    *("--residual-multiplier", "0.3", "--logits-multiplier", "0.5", "--attention-cap", "5"),
    *("--disable-bias-linear", "--qkv-bias"),
)
MODELS = (
    Model("bloom", 6, 4, "alibi", True, "layernorm", "gelu-tanh", None, True, 0.1, 0.0, False),
    Model("gpt2", 4, 2, "learned", True, "layernorm", "gelu-tanh", None, True, 0.0, 0.1, False, masked=True),
    Model("llama", 12, 7, "rotary", False, "rmsnorm", "swiglu", 4, False, 0.0, 0.0, True),
    Model("opt", 12, 4, "learned", False, "layernorm", "relu", None, True, 0.1, 0.0, True),
    Model("grouped", 6, 7, "none", True, "rmsnorm", "gelu", 3, True, 0.1, 0.1, False),
    Model("deep", 12, 7, "alibi", True, "layernorm", "gelu", None, False, 0.0, 0.0, False),
    Model("shallow", 4, 2, "rotary", False, "rmsnorm", "swiglu", 2, True, 0.0, 0.0, False, masked=True),
    Model("plain", 12, 4, "none", True, "layernorm", "swiglu", None, True, 0.0, 0.1, True),
    Model("gemma", 6, 7, "rotary", True, "rmsnorm", "geglu-tanh", 3, False, 0.1, 0.0, True, kinds=GEMMA),
    Model("olmo", 12, 4, "rotary", False, "rmsnorm", "swiglu", 4, False, 0.0, 0.1, False, kinds=OLMO),
    Model("neox", 12, 4, "rotary", False, "layernorm", "gelu", None, True, 0.1, 0.0, True, kinds=NEOX),
    Model("mixed", 6, 7, "none", True, "rmsnorm", "relu2", None, True, 0.0, 0.0, True, masked=True, kinds=MIXED),
)


@dataclass(frozen=True)
class Case:
    """One model on one layout."""

    model: Model
    tp: int
    pp: int
    dp: int
    zero: int
    shard: int | None
    schedule: str
    virtual: int
    sequence_parallel: bool
    recompute: str
    every: int
    accumulation: int
    overlap: bool
    bucket: int
    late_update: bool
    group: int | None
    """In vertical order: most micro-batches of a group, 0 for all. None: horizontal order."""
    offload: str
    shared_memory: bool
    unwritten: bool
    """Memory that nobody has written holds NaN."""
    as_nccl: bool
    """gloo carries what the program does with NCCL."""

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def micro_batch(self) -> int:
        return BATCH // (self.dp * self.accumulation)

    @property
    def name(self) -> str:
        parts = [
            self.model.name,
            f"tp{self.tp}",
            f"pp{self.pp}",
            f"dp{self.dp}",
            f"z{self.zero}" + (f"of{self.shard}" if self.shard else ""),
            f"{self.schedule}x{self.virtual}",
        ]
        parts += ["sp"] * self.sequence_parallel + [f"re-{self.recompute}{self.every}"] * (self.recompute != "none")
        parts += ["as-nccl"] * self.as_nccl + ["gloo"] * (not self.shared_memory)
        parts += ["no-overlap"] * (not self.overlap) + ["late-update"] * self.late_update
        parts += [f"vertical{self.group or ''}"] * (self.group is not None)
        parts += [f"off-{self.offload}"] * (self.offload != "none")
        return "-".join([*parts, f"acc{self.accumulation}", f"b{self.bucket}"])

    def way(self) -> Way:
        """How its ranks run."""
        return Way(as_nccl=self.as_nccl, unwritten=self.unwritten, masked=self.model.masked)

    def layout_flags(self) -> list[str]:
        """The flags of the layout."""
        flags = {
            "--tp": self.tp,
            "--pp": self.pp,
            "--zero-stage": self.zero,
            "--pipeline-schedule": self.schedule,
            "--virtual-stages": self.virtual,
            "--recompute-granularity": self.recompute,
            "--micro-batch-size": self.micro_batch,
            "--bucket-size": self.bucket,
        }
        words = [str(word) for pair in flags.items() for word in pair]
        words += ["--zero-shard-size", str(self.shard)] * (self.shard is not None)
        words += ["--recompute-num-layers", str(self.every)] * (self.recompute == "full")
        words += ["--sequence-parallel"] * self.sequence_parallel + ["--no-overlap"] * (not self.overlap)
        words += ["--late-update"] * self.late_update
        words += ["--micro-batch-order", "vertical"] * (self.group is not None)
        words += ["--vertical-group-size", str(self.group)] * bool(self.group)
        words += ["--offload-activations", self.offload]
        return words + ["--no-shared-memory"] * (not self.shared_memory)


def fits(case: Case) -> bool:
    """The mathematical constraints, and the ranks that a small machine can start."""
    model = case.model
    return (
        1 < case.ranks <= MAX_RANKS
        and model.heads % case.tp == 0
        and (model.groups is None or model.groups % case.tp == 0)
        and BATCH % (case.dp * case.accumulation) == 0
        and case.virtual in CHUNKS[case.schedule]
        and model.layers + 2 >= case.pp * case.virtual
        and (not case.sequence_parallel or case.tp > 1)
        and (case.shard is None or (case.shard < case.dp and case.dp % case.shard == 0))
    )


def draw(random_: random.Random, fixed: Mapping[str, object]) -> Case:
    """A random case that fits and has these values, of the model or of the layout."""
    of_model = {field.name for field in fields(Model)} & fixed.keys()
    models = [model for model in MODELS if all(getattr(model, name) == fixed[name] for name in of_model)]
    of_layout = {name: value for name, value in fixed.items() if name not in of_model}
    pick = random_.choice
    while True:
        values: dict[str, object] = {
            "model": pick(models),
            "tp": pick((1, 2, 3, 4)),
            "pp": pick((1, 2, 3, 4)),
            "dp": pick((1, 2, 3, 4)),
            "shard": pick((None, None, None, 1, 2)),
            "zero": pick(STAGES),
            "schedule": pick(tuple(CHUNKS)),
            "virtual": pick((1, 2)),
            "sequence_parallel": pick((True, False)),
            "recompute": pick(("none", "selective", "full")),
            "every": pick((1, 2)),
            "accumulation": pick(ACCUMULATIONS),
            "overlap": pick((True, True, False)),
            "bucket": pick((500, 4000, 8_388_608)),
            "late_update": pick((False, True)),
            "group": pick((None, None, 0, 2)),
            "offload": pick(("none", "none", "cpu:0.4", "cpu")),
            "unwritten": pick((False, True)),
            "as_nccl": False,
        }
        case = Case(**(values | of_layout))  # type: ignore[arg-type]
        if fits(case):
            return case


REQUIRED: tuple[dict[str, object], ...] = (
    {"heads": 6, "positions": "alibi", "tp": 3, "pp": 2, "tied": True},
    {"heads": 6, "positions": "alibi", "tp": 2, "pp": 2, "dropout": 0.1, "sequence_parallel": True},
    {
        "pp": 2,
        "dp": 2,
        "tp": 2,
        "zero": 2,
        "tied": True,
        "sequence_parallel": True,
        "recompute": "full",
        "masked": True,
        "accumulation": 6,
    },
    {"tp": 4, "groups": None, "masked": True, "sequence_parallel": True},
    {"layers": 7, "pp": 3, "virtual": 1, "dp": 2, "shard": 1, "tied": True, "zero": 0},
    {
        "layers": 7,
        "pp": 3,
        "virtual": 2,
        "dp": 2,
        "schedule": "zb-v",
        "tied": True,
        "accumulation": 3,
        "zero": 1,
        "late_update": True,
    },
    {"pp": 4, "accumulation": 1, "schedule": "1f1b"},
    {"pp": 4, "accumulation": 3, "virtual": 2, "schedule": "interleaved", "tied": True, "dp": 2, "zero": 2},
    {"pp": 2, "dp": 3, "zero": 1, "tied": True, "late_update": True},
    {
        "pp": 1,
        "dp": 2,
        "virtual": 2,
        "schedule": "zb-v",
        "tied": True,
        "zero": 2,
        "accumulation": 3,
        "offload": "cpu",
    },
    {"pp": 2, "virtual": 2, "schedule": "gpipe", "zero": 2, "dp": 2, "accumulation": 3},
    {"layers": 2, "pp": 4, "virtual": 1, "dp": 2, "zero": 2, "tied": False},
    {"pp": 2, "schedule": "zb-h1", "dp": 2, "zero": 2, "tied": True, "accumulation": 3, "group": 2},
    {"pp": 4, "schedule": "zb-h1", "accumulation": 12, "layers": 7},
    {"pp": 2, "schedule": "zb-v", "dp": 2, "zero": 2, "tied": True, "accumulation": 6, "layers": 7},
    {
        "pp": 2,
        "tp": 2,
        "schedule": "zb-v",
        "tied": False,
        "sequence_parallel": True,
        "recompute": "full",
        "accumulation": 1,
    },
    {"pp": 2, "dp": 4, "shard": 2, "tied": True, "zero": 2, "accumulation": 3, "group": 0},
    {"tp": 2, "dp": 4, "shard": 2, "zero": 1},
    {"masked": True, "dp": 4, "zero": 3, "accumulation": 3},
    # norms of queries and keys over tp, windows across documents, caps that are computed again, pairs of neighbours on
    # a part of each head, layers of unequal sizes over stages
    {"name": "gemma", "tp": 3, "sequence_parallel": True, "recompute": "selective"},
    {"name": "gemma", "pp": 3, "zero": 3, "dp": 2, "recompute": "full", "tp": 1},
    {"name": "gemma", "tp": 3, "sequence_parallel": False, "dp": 2, "zero": 1},
    {"name": "olmo", "tp": 4, "sequence_parallel": False, "recompute": "full"},
    {"name": "olmo", "tp": 2, "sequence_parallel": True, "zero": 2, "dp": 2},
    {"name": "neox", "tp": 4, "recompute": "selective", "pp": 2},
    {"name": "neox", "pp": 4, "sequence_parallel": True, "tp": 2},
    {"name": "mixed", "tp": 3, "pp": 2, "accumulation": 2},
    {"name": "mixed", "dp": 3, "zero": 3, "recompute": "full"},
    {"name": "mixed", "tp": 2, "schedule": "zb-v", "pp": 2},
)


def _rarest(seen: Set[Case]) -> dict[str, object]:
    models, accumulations = Counter(case.model.name for case in seen), Counter(case.accumulation for case in seen)
    return {
        "name": min((model.name for model in MODELS), key=models.__getitem__),
        "accumulation": min(ACCUMULATIONS, key=accumulations.__getitem__),
    }


def values_of(case: Case) -> Values:
    """The values of all axes of a case."""
    return {field.name: getattr(case, field.name) for field in fields(case)} | {"model": case.model.name}


def cost(case: Case) -> float:
    """What a case costs, about: to start its ranks, and passes of each rank through its layers."""
    return case.ranks + case.model.layers * case.accumulation * case.tp * case.dp / 10


def _newest(draws: Sequence[Case], met: set[Pair]) -> Case:
    """The case with the most pairs of values that nobody has met, for its cost. They are met then."""
    best = max(draws, key=lambda case: len({*pairs(values_of(case))} - met) / cost(case))
    met.update(pairs(values_of(best)))
    return best


def cases(count: int, seed: int, required: Sequence[dict[str, object]] = REQUIRED) -> Iterator[Case]:
    """`count` different cases. The required ones come first, then others of the models and accumulations that there are
    fewest of. Of some that are drawn, each is the one with the most pairs of values that are new for its cost.

    Ranks of every third one have gloo's collectives, as those of several hosts, and of every third one those of NCCL.
    """
    random_ = random.Random(seed)
    seen: set[Case] = set()
    met: set[Pair] = set()
    while len(seen) < count:
        number = len(seen)
        fixed = required[number] if number < len(required) else _rarest(seen)
        carrier = (number + seed) % 3
        fixed = fixed | {"shared_memory": carrier != 0, "as_nccl": carrier == 1}
        draws = [case for _ in range(DRAWS) if (case := draw(random_, fixed)) not in seen]
        if draws:
            case = _newest(draws, met)
            seen.add(case)
            yield case


class Chain(NamedTuple):
    """The layouts of a run that goes on elsewhere after each step."""

    layouts: tuple[Case, ...]

    @property
    def name(self) -> str:
        links = [f"tp{each.tp}-pp{each.pp}-dp{each.dp}-z{each.zero}-{each.schedule}" for each in self.layouts]
        return "-to-".join([self.layouts[0].model.name, *links])


def chains(count: int, seed: int) -> Iterator[Chain]:
    """`count` chains of five layouts of few ranks, with stages of ZeRO and schedules in turn; half of the embeddings
    are tied.
    """
    random_ = random.Random(seed)
    met: set[Pair] = set()
    for number in range(count):
        model = random_.choice([model for model in MODELS if model.tied == (number % 2 == 0)])
        layouts: list[Case] = []
        for link in range(5):
            zero, schedule = STAGES[(number + link) % len(STAGES)], [*CHUNKS][(number + link) % len(CHUNKS)]
            fixed = {"name": model.name, "zero": zero, "schedule": schedule, "shared_memory": True}
            draws = [draw(random_, fixed | ({"dp": 2} if zero else {})) for _ in range(DRAWS)]
            layouts.append(_newest([case for case in draws if 2 < case.ranks <= 4] or draws, met))
        yield Chain(tuple(layouts))
