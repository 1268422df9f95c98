"""The words of a tensor-parallel plan, which say how a module or a parameter is cut among tp ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megazero.mpu.parameter import ParameterKind, ParameterSpec, shard

TensorParallelPlan = Mapping[str, str]
"""From patterns of names to words, such as {"layers.*.up": "column", "layers.*.down": "row"}."""
NUMBERS_OF: Mapping[str, tuple[int, int]] = {
    "column": (0, 1),
    "column gathered": (0, 0),
    "row": (0, 1),
    "row split": (0, 0),
    "vocabulary": (0, 0),
    "summed": (0, 0),
    "partial": (0, 0),
    "divided": (0, 0),
    "cut": (1, 2),
}
"""How many numbers each kind has at least and at most."""
OF_TRANSFORMERS: Mapping[str, str] = {
    "colwise": "column",
    "colwise_gather_output": "column gathered",
    "colwise_rep": "column gathered",
    "packed_colwise": "column 2",
    "rowwise": "row",
    "rowwise_split_input": "row split",
    "packed_rowwise": "row 2",
    "embedding_rowwise": "vocabulary",
    "moe_tp_experts": "summed",
    "replicated_with_grad_allreduce": "partial",
}
"""Words of `transformers` for plans of its models, in ours."""


@dataclass(frozen=True)
class PlanWord:
    """What a plan says of one thing. numbers: such as the parts of "column 3", or the dimension of "cut 1"."""

    kind: str
    numbers: tuple[int, ...] = ()

    @classmethod
    def of(cls, text: str) -> PlanWord:
        """Raises ValueError for a text that means nothing."""
        words = OF_TRANSFORMERS.get(text, text).split() if isinstance(text, str) else []
        numbers = [word for word in words if word.lstrip("-").isdigit()]
        kind = " ".join(words[: len(words) - len(numbers)])
        least, most = NUMBERS_OF.get(kind, (0, -1))
        if not least <= len(numbers) <= most or [*kind.split(), *numbers] != words:
            raise ValueError(f"{text!r} is none of {', '.join(NUMBERS_OF)} (column, row and cut with numbers behind)")
        made = cls(kind, tuple(map(int, numbers)))
        if made.parts < 1:
            raise ValueError(f"{text!r} has {made.parts} parts: one at least is needed")
        return made

    @property
    def parts(self) -> int:
        """How many equal parts, one behind the other, are cut each."""
        of_parts = self.numbers[1:] if self.kind == "cut" else self.numbers
        return of_parts[0] if of_parts else 1

    @property
    def text(self) -> str:
        return " ".join((self.kind, *map(str, self.numbers)))


@dataclass(frozen=True)
class ParameterSplit:
    """How a parameter is cut among tp ranks.

    dim    along which dimension
    parts  so many equal parts along it are cut each: three where one product makes queries, keys and values
    pads   whether rows of padding at the end of dim 0 make it divisible
    """

    dim: int
    parts: int = 1
    pads: bool = False

    def problem(self, shape: tuple[int, ...], size: int) -> str | None:
        """What is wrong with it for a parameter of this shape on so many tp ranks, in words; None: nothing is."""
        if not 0 <= self.dim < len(shape):
            return f"has no dimension {self.dim}"
        if self.pads or shape[self.dim] % (self.parts * size) == 0:
            return None
        each = "" if self.parts == 1 else f"{self.parts} parts of "
        extent = shape[self.dim] // self.parts if shape[self.dim] % self.parts == 0 else shape[self.dim] / self.parts
        return f"has {each}{extent:g} along dimension {self.dim}, which {size} ranks cannot share"

    def shape_in_parts(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape with the parts as a dimension of their own in front of `dim`, so that a rank holds one box of it."""
        if self.parts == 1:
            return shape
        return (*shape[: self.dim], self.parts, shape[self.dim] // self.parts, *shape[self.dim + 1 :])

    def spec(self, name: str, shape: tuple[int, ...], rank: int, size: int, **rest: Any) -> ParameterSpec:
        """The spec of tp rank `rank` of `size`. rest: further fields of it."""
        dim = self.dim + (self.parts > 1)
        padded = -(-shape[0] // size) * size if self.pads and size > 1 else None
        in_parts = self.shape_in_parts(shape)
        spec = shard(name, in_parts, ParameterKind.MATRIX, dim=dim, rank=rank, size=size, padded=padded, **rest)
        local = (*shape[: self.dim], -(-shape[self.dim] // size), *shape[self.dim + 1 :])
        return replace(spec, local_shape=local, parts_dim=self.dim if self.parts > 1 else None)
