"""What ranks hold against what one process holds: the first difference, in the order in which a step makes values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.mpu.parameter import Box
from megazero.program.instruction import Op
from megazero.verify.session import Held, Values

TOLERANCE = 1e-9
"""The largest relative difference that is equal. float64 rounds to 1e-16, sums in another order over a few layers and
steps make 1e-13 of it, and 1e-11 in a deep model; the smallest fault that is known, a mean of means of nearly equal
counts, is above 1e-4."""
FLOOR = 1e-3
"""Values are compared with the largest one of their tensor, or with this share of the largest one of all tensors of
their column: some gradients are zero but for what is rounded, as those of keys' biases."""
GRADIENT = "gradient"


class FirstDifference(NamedTuple):
    """Where ranks and one process differ first.

    parameter    its global name; what else differs, as "the loss": no parameter
    column       of the parameter: gradient, exp_avg, exp_avg_sq, weight, parameter, ...; "" of what is none
    rank         of the small run
    instruction  of that rank's list
    step, leg    when
    error        relative
    """

    parameter: str
    column: str
    rank: int
    instruction: str
    step: int
    leg: str
    error: float

    @property
    def what(self) -> str:
        """What differs, in words."""
        return f"the {self.column} of {self.parameter}" if self.column else self.parameter


@dataclass
class Whole:
    """The values of one process after a step: a global tensor for each column of a parameter."""

    numbers: Values
    tensors: Mapping[str, Mapping[str, Tensor]]
    largest: Mapping[str, float] = field(init=False)
    _boxes: dict[tuple[str, str, Box], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.largest = {column: max(map(_largest, named.values())) for column, named in self.tensors.items()}
        self._scales = {
            (column, name): max(_largest(tensor), FLOOR * self.largest[column], 1e-300)
            for column, named in self.tensors.items()
            for name, tensor in named.items()
        }

    def part(self, column: str, held: Held) -> Tensor:
        """The values of one process where a rank holds `held`."""
        key = column, held.spec.name, held.spec.box
        if key not in self._boxes:
            region = tuple(slice(*ends) for ends in held.spec.box)
            self._boxes[key] = self.tensors[column][held.spec.name][region].reshape(-1)
        return self._boxes[key][held.start : held.stop]

    def error(self, column: str, held: Held, values: Tensor) -> float:
        """The largest difference, relative to the largest value of the tensor (`FLOOR`); infinite for NaN."""
        if not values.numel():
            return 0.0
        apart = float((values - self.part(column, held)).abs().max())
        return apart / self._scales[column, held.spec.name] if apart == apart else math.inf


def wholes(values: Sequence[Values], decay: float) -> dict[int, Whole]:
    """The values of one process, by step, as far as they were looked at. decay: of the first moment (`gradients`)."""
    made: dict[int, Whole] = {}
    for now, gradient in zip(values, gradients(values, decay), strict=True):
        columns: dict[str, dict[str, Tensor]] = {}
        for held in (*now.owned, *now.whole, *gradient):
            for column, part in held.columns.items():
                named = columns.setdefault(column, {})
                if held.spec.name not in named:
                    named[held.spec.name] = torch.full((held.spec.stored_numel,), math.nan, dtype=part.dtype)
                named[held.spec.name][held.start : held.stop] = part
        shapes = {held.spec.name: held.spec.shape for held in now.owned + now.whole}
        if columns:
            tensors = {
                column: {name: flat.view(shapes[name]) for name, flat in named.items()}
                for column, named in columns.items()
            }
            made[now.step] = Whole(now, tensors)
    return made


def gradients(values: Sequence[Values], decay: float) -> list[list[Held]]:
    """The reduced gradients of each step, before clipping, as far as the first moments tell: m' = decay m + (1 - decay)
    g, or m' = -decay m + g of sgd, for which a negative decay stands. Moments begin as zeros.
    """
    made = list[list[Held]]()
    before: dict[tuple[str, int, Box], Tensor] | None = {} if values and values[0].step == 1 else None
    for now in values:
        moments = {(held.spec.name, held.start, held.spec.box): held.columns["exp_avg"] for held in now.owned}
        factor = (1.0 - decay if decay >= 0 else 1.0) * min(1.0, now.clip / (now.grad_norm + 1e-6) if now.clip else 1.0)
        found = list[Held]()
        for held in now.owned if before is not None else ():
            key = held.spec.name, held.start, held.spec.box
            gradient = (moments[key] - (abs(decay) * before[key] if key in before else 0.0)) / factor  # type: ignore[index,operator]
            found.append(Held(held.spec, held.start, held.stop, {GRADIENT: gradient}))
        made.append(found)
        before = moments if now.owned else None
    return made


Errors = dict[str, float]
"""The largest relative error by what it is of: a column, the loss, the norm."""


def compared(
    ranks: Sequence[Sequence[Values]], one: Mapping[int, Whole], leg: str, decay: float, errors: Errors
) -> FirstDifference | None:
    """The first difference of a leg, in the order in which a step makes its values: gradients, numbers that all ranks
    know, moments, weights, and the parameters of all ranks. Steps that not all ranks have ended are left out.

    errors: gets what is larger than before
    """
    by_rank = [gradients(values, decay) for values in ranks]
    for at, now in enumerate(ranks[0][: min(map(len, ranks))]):
        whole = one[now.step]
        owned = [values[at].owned for values in ranks]
        found = _worst(GRADIENT, [of_rank[at] for of_rank in by_rank], whole, leg, errors)
        found = found or _first_number(ranks, at, whole.numbers, leg, errors)
        names = {column for held in now.owned for column in held.columns}
        for column in sorted(names, key=lambda name: _ORDER.get(name, len(_ORDER))):
            found = found or _worst(column, owned, whole, leg, errors)
        found = found or _worst("parameter", [values[at].whole for values in ranks], whole, leg, errors)
        if found is not None:
            return found
    return None


_ORDER = {"exp_avg": 0, "exp_avg_sq": 1, "weight": 2}
"""The columns that an update makes first."""


def _worst(
    column: str, by_rank: Sequence[Sequence[Held]], whole: Whole, leg: str, errors: Errors
) -> FirstDifference | None:
    """The largest difference of a column above the tolerance."""
    found: FirstDifference | None = None
    for rank, parts in enumerate(by_rank):
        for held in parts:
            error = whole.error(column, held, held.columns[column])
            errors[column] = max(errors.get(column, 0.0), error)
            if error > TOLERANCE and (found is None or error > found.error):
                found = FirstDifference(held.spec.name, column, rank, "", whole.numbers.step, leg, error)
    if found is not None and column == GRADIENT and _are_multiples(by_rank, whole):
        return found._replace(instruction=Op.NORM.value)
    return found


def _are_multiples(by_rank: Sequence[Sequence[Held]], whole: Whole) -> bool:
    """Whether all gradients are the true ones times one number: then what they are multiplied with is wrong."""
    mine = torch.cat([held.columns[GRADIENT] for parts in by_rank for held in parts])
    true = torch.cat([whole.part(GRADIENT, held) for parts in by_rank for held in parts])
    factor = float(mine @ true) / max(float(true @ true), 1e-300)
    return float((mine - factor * true).abs().max()) <= TOLERANCE * _largest(mine)


def _first_number(
    ranks: Sequence[Sequence[Values]], at: int, theirs: Values, leg: str, errors: Errors
) -> FirstDifference | None:
    for rank, values in enumerate(ranks):
        for name, mine, true in _numbers(values[at], theirs):
            if math.isfinite(mine) and math.isfinite(true):
                error = abs(mine - true) / max(abs(true), 1e-300)
            else:  # of a skipped step
                error = 0.0 if math.isfinite(mine) == math.isfinite(true) else math.inf
            errors[name] = max(errors.get(name, 0.0), error)
            if error > TOLERANCE:
                return FirstDifference(f"the {name}", "", rank, "", theirs.step, leg, error)
    return None


def _numbers(mine: Values, theirs: Values) -> Iterator[tuple[str, float, float]]:
    yield "loss", mine.loss, theirs.loss
    yield "gradient norm", mine.grad_norm, theirs.grad_norm
    yield "learning rate", mine.lr, theirs.lr
    yield "number of skipped steps", 1.0 + mine.skipped, 1.0 + theirs.skipped
    if mine.valid_loss is not None and theirs.valid_loss is not None:
        yield "validation loss", mine.valid_loss, theirs.valid_loss


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
