"""Layouts drawn at random: every axis of the program against one process.

A `Case` is a model and a layout as command-line flags. The generator is seeded; a draw that breaks one of the
mathematical constraints (see `fits`) is drawn again. `required` names combinations that must be among the cases;
the generator is asked for a case that has them, the rest of it stays random.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

MAX_RANKS = 8
SEQUENCE = 12
CHUNKS = {"gpipe": (1, 2), "1f1b": (1,), "interleaved": (2,), "zb-h1": (1,), "zb-v": (2,)}
"""Model chunks per rank that the cases have under each schedule."""


@dataclass(frozen=True)
class Case:
    """One model on one layout."""

    heads: int
    layers: int
    vocab: int
    positions: str
    tied: bool
    norm: str
    activation: str
    groups: int | None
    bias: bool
    dropout: float
    smoothing: float
    document_mask: bool
    tp: int
    pp: int
    dp: int
    zero: int
    schedule: str
    virtual: int
    sequence_parallel: bool
    recompute: str
    every: int
    accumulation: int
    micro_batch: int
    overlap: bool
    bucket: int

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def name(self) -> str:
        parts = [f"tp{self.tp}", f"pp{self.pp}", f"dp{self.dp}", f"z{self.zero}", f"{self.schedule}x{self.virtual}"]
        parts += ["sp"] * self.sequence_parallel + [f"re-{self.recompute}{self.every}"] * (self.recompute != "none")
        parts += ["tied" if self.tied else "untied", self.positions, f"n{self.heads}", f"L{self.layers}", f"V{self.vocab}"]
        return "-".join([*parts, f"acc{self.accumulation}", f"drop{self.dropout}"])

    def model_flags(self, precision: str = "fp64") -> list[str]:
        """What the model and the optimizer step compute: the same on one process."""
        flags = {
            "--num-layers": self.layers,
            "--hidden-size": 24,
            "--num-attention-heads": self.heads,
            "--vocab-size": self.vocab,
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
            "--global-batch-size": self.micro_batch * self.dp * self.accumulation,
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
        return words + (["--document-mask", "--eod-id", "0", "--eod-mask-loss"] if self.document_mask else [])

    def layout_flags(self) -> list[str]:
        """How ranks share the work."""
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
        words += ["--recompute-num-layers", str(self.every)] * (self.recompute == "full")
        return words + ["--sequence-parallel"] * self.sequence_parallel + ["--no-overlap"] * (not self.overlap)


def fits(case: Case) -> bool:
    """The mathematical constraints, and the ranks that a small machine can start."""
    return (
        1 < case.ranks <= MAX_RANKS
        and case.heads % case.tp == 0
        and (case.groups is None or (case.heads % case.groups == 0 and case.groups % case.tp == 0))
        and SEQUENCE % case.tp == 0
        and case.virtual in CHUNKS[case.schedule]
        and case.layers + 2 >= case.pp * case.virtual
        and (not case.sequence_parallel or case.tp > 1)
    )


def draw(random_: random.Random, **fixed: object) -> Case:
    """A random case that fits and has these values."""
    pick = random_.choice
    while True:
        values: dict[str, object] = {
            "heads": pick((4, 6, 12)),
            "layers": pick((2, 4, 7)),
            "vocab": 1003,
            "positions": pick(("learned", "alibi", "rotary", "none")),
            "tied": pick((True, False)),
            "norm": pick(("layernorm", "rmsnorm")),
            "activation": pick(("gelu", "gelu-tanh", "relu", "swiglu")),
            "groups": pick((None, None, 2, 3, 4)),
            "bias": pick((True, True, False)),
            "dropout": pick((0.0, 0.1)),
            "smoothing": pick((0.0, 0.0, 0.1)),
            "document_mask": pick((False, False, True)),
            "tp": pick((1, 2, 3, 4)),
            "pp": pick((1, 2, 3, 4)),
            "dp": pick((1, 2, 3)),
            "zero": pick((0, 1, 2)),
            "schedule": pick(tuple(CHUNKS)),
            "virtual": pick((1, 2)),
            "sequence_parallel": pick((True, False)),
            "recompute": pick(("none", "selective", "full")),
            "every": pick((1, 2)),
            "accumulation": pick((1, 3, 8)),
            "micro_batch": pick((1, 2)),
            "overlap": pick((True, True, False)),
            "bucket": pick((500, 4000, 8_388_608)),
        }
        case = Case(**(values | fixed))  # type: ignore[arg-type]
        if fits(case):
            return case


REQUIRED: tuple[dict[str, object], ...] = (
    {"heads": 6, "positions": "alibi", "tp": 3},
    {"heads": 6, "positions": "alibi", "tp": 2, "pp": 2, "dropout": 0.1, "sequence_parallel": True},
    {"vocab": 1003, "tp": 4, "groups": None},
    {"vocab": 1003, "tp": 3, "tied": True, "pp": 2},
    {"layers": 7, "pp": 3, "virtual": 1},
    {"layers": 7, "pp": 3, "virtual": 2, "dp": 2},
    {"pp": 4, "accumulation": 1, "schedule": "1f1b"},
    {"pp": 4, "accumulation": 3, "virtual": 2, "schedule": "interleaved", "tied": True, "dp": 2, "zero": 2},
    {"pp": 2, "dp": 2, "tp": 2, "zero": 2, "tied": True, "sequence_parallel": True, "recompute": "full"},
    {"pp": 2, "dp": 3, "zero": 1, "tied": True},
    {"pp": 1, "dp": 2, "virtual": 2, "tied": True, "zero": 2},
    {"pp": 2, "virtual": 2, "schedule": "gpipe", "zero": 2, "dp": 2, "accumulation": 3},
    {"layers": 2, "pp": 4, "virtual": 1, "dp": 2, "zero": 2, "tied": False},
    {"pp": 2, "schedule": "zb-h1", "dp": 2, "zero": 2, "tied": True, "accumulation": 3},
    {"pp": 4, "schedule": "zb-h1", "accumulation": 8, "layers": 7},
    {"pp": 2, "schedule": "zb-v", "dp": 2, "zero": 2, "tied": True, "accumulation": 8, "layers": 7},
    {"pp": 3, "schedule": "zb-v", "tied": True, "accumulation": 3, "dp": 2, "zero": 1},
    {"pp": 2, "tp": 2, "schedule": "zb-v", "tied": False, "sequence_parallel": True, "recompute": "full", "accumulation": 1},
    {"pp": 1, "dp": 2, "schedule": "zb-v", "tied": True, "zero": 2, "accumulation": 3},
)


def cases(count: int, seed: int = 2026) -> Iterator[Case]:
    """`count` different cases; the required ones come first."""
    random_ = random.Random(seed)
    seen: set[Case] = set()
    while len(seen) < count:
        fixed = REQUIRED[len(seen)] if len(seen) < len(REQUIRED) else {}
        case = draw(random_, **fixed)
        if case not in seen:
            seen.add(case)
            yield case
