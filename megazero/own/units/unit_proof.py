"""A proof that a unit which is cut among tp ranks computes what the whole unit does: its output, the gradient of its
input, and the gradient of each parameter.

A plan cuts modules that a program has written, and nobody but the program knows what is between them. A norm over a
part of its features, a number of heads that is still the whole one, or a parameter whose gradient is a part of a sum
would train another model without a word. So the first step computes each unit in both ways and compares.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from megazero.mpu import collectives
from megazero.mpu.bundle import Bundle, tensors_of, with_tensors
from megazero.mpu.parameter import Parameter, spec_of
from megazero.own.tensor_parallel.boxes import part_of, whole_of
from megazero.own.tensor_parallel.modules import TensorParallelModules
from megazero.own.units.model import BatchTensors, OwnUnit
from megazero.own.units.parameter_shape import ParameterShape
from megazero.own.units.stage import as_bundle, by_places, loss_of, named
from megazero.system.generators import seed_torch, torch_generators_kept

TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}
"""By how much of its largest number a tensor may be off, by the dtype of the computation. Modules may compute in less
than they get, as many norms do. Other dtypes: a tenth."""
CHANGES = 0.05, 0.0
"""Standard deviations of what is added to parameters, as zeros would hide a fault: the first with finite gradients."""
ENOUGH = 8
"""Micro-batches that are compared at most where gradients of a unit are zero."""
BETWEEN = (
    "What is between a column and a row has to be the same for a part: it is not for numbers of heads ('divided'), "
    "norms over all features, and random numbers ('cut' for a dropout)"
)


class _Inputs(NamedTuple):
    """What a unit takes. is_last: whether it returns the losses."""

    hidden: Bundle | None
    batch: BatchTensors
    is_last: bool


class _Computed(NamedTuple):
    """What a unit has made, the gradients of its inputs and, by name, of its parameters, and its buffers behind it."""

    outputs: list[Tensor]
    of_inputs: list[Tensor]
    of_parameters: dict[str, Tensor]
    buffers: list[Tensor]

    @property
    def is_finite(self) -> bool:
        return all(bool(each.isfinite().all()) for each in (*self.of_inputs, *self.of_parameters.values()))


class _Difference(NamedTuple):
    """By how much of its largest number a tensor is off. of_sum: by how much the sum over tp ranks is."""

    words: str
    off: float
    of_sum: float = 1.0


@dataclass
class UnitProof:
    """Compares each unit in each mode (training, evaluation, dropouts that drop), with its first micro-batch, or a few
    where gradients are zero. A collective of the tp ranks.

    cuts    this rank's modules that are cut
    shapes  this rank's parameters by name
    hint    words behind an error
    """

    cuts: TensorParallelModules
    shapes: Mapping[str, ParameterShape]
    hint: str = ""

    def __post_init__(self) -> None:
        self._comparisons = Counter[tuple[object, ...]]()
        """Of a unit in a mode, so far: `ENOUGH` where no further one is needed."""

    def __call__(self, unit: OwnUnit, hidden: Bundle | None, batch: BatchTensors, *, is_last: bool) -> None:
        """As of `own.units.stage.CutUnitProof`. Raises ValueError with the names of the unit and of what is off."""
        graded = torch.is_grad_enabled()  # an evaluation may compute otherwise, and is proven on its own
        modes = tuple((each.training, bool(getattr(each, "p", 0))) for each in unit.modules())  # p: of a dropout
        known = unit.name, graded, modes
        if self._comparisons[known] >= ENOUGH or not self._is_cut(unit):
            return
        given = _Inputs(hidden, batch, is_last)
        with named(unit):
            whole, values, dtype = self._as_a_whole(unit, given)
            try:
                with unit.without_trace():
                    part = self._computed(unit, self._parts(unit, values), given, dtype)
            except Exception as error:
                words = f"it computes as a whole, and not with parts of what tp_plan cuts: {error}{self.hint}"
                raise ValueError(words) from error
            of_step = (each.dtype for each in unit.parameters())
            coarsest = max(TOLERANCES.get(each, 0.1) for each in ([dtype] if dtype else of_step))
            self._compare(unit, whole, part, coarsest)
        # a loss that counts nothing, or an expert without a token, says nothing: the next one is compared, too
        says_all = all(bool(each.any()) for each in (*whole.of_inputs, *whole.of_parameters.values()))
        self._comparisons[known] += ENOUGH if says_all or not graded else 1

    def _is_cut(self, unit: OwnUnit) -> bool:
        """Whether a plan says anything of it."""
        shapes = [self.shapes[spec_of(each).name] for each in unit.parameters()]
        is_in_parts = any(each.split is not None or each.is_partial for each in shapes)
        return is_in_parts or not self.cuts.modules.isdisjoint(unit.modules())

    # --- two computations ------------------------------------------------------------------------------------------

    def _as_a_whole(self, unit: OwnUnit, given: _Inputs) -> tuple[_Computed, dict[int, Tensor], torch.dtype | None]:
        """What the whole unit makes, and with which values by the number (`id`) of each parameter and buffer: in
        float64, or (None) in the dtypes of a step where its modules do not take that.
        """
        is_exact = all(each.dtype == torch.float64 for each in unit.parameters())
        dtypes = (torch.float64,) if is_exact else (torch.float64, None)
        for dtype, change in product(dtypes, CHANGES):
            values = {id(each): self._value(each, dtype, change) for each in (*unit.parameters(), *unit.buffers())}
            try:
                with unit.without_trace(), self.cuts.whole():
                    computed = self._computed(unit, _placed(unit, values), given, dtype)
            except Exception:
                if dtype == dtypes[-1]:
                    raise
                continue
            if computed.is_finite:
                break
        return computed, values, dtype

    def _value(self, tensor: Tensor, dtype: torch.dtype | None, change: float) -> Tensor:
        """A whole value for a parameter or buffer, in memory of its own. dtype: of floats; None: their own."""
        wanted = dtype if dtype and tensor.is_floating_point() else tensor.dtype
        if not isinstance(tensor, Parameter):
            return tensor.detach().to(wanted, copy=True)
        shape = self.shapes[spec_of(tensor).name]
        value = tensor.detach()
        if shape.split is not None:
            value = whole_of(value, shape.split, shape.shape, self.cuts.group)
        return (value.to(wanted) + change * _known(shape.name, value).to(wanted)).requires_grad_(tensor.requires_grad)

    def _parts(self, unit: OwnUnit, values: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """By place, this rank's parts of these values."""

        def part(tensor: Tensor) -> Tensor:
            value = values[id(tensor)].detach()
            if isinstance(tensor, Parameter) and self.shapes[spec_of(tensor).name].split is not None:
                value = part_of(value, spec_of(tensor))
            return value.clone().requires_grad_(tensor.requires_grad)

        return _placed(unit, {id(each): part(each) for each in (*unit.parameters(), *unit.buffers())})

    def _computed(
        self, unit: OwnUnit, tensors: Mapping[str, Tensor], given: _Inputs, dtype: torch.dtype | None
    ) -> _Computed:
        """A forward and a backward with these parameters and buffers by place. The gradients of outputs are known.

        dtype: of inputs of floats; None: their own.
        """

        def like(tensor: Tensor) -> Tensor:
            wanted = dtype if dtype and tensor.is_floating_point() else tensor.dtype
            return tensor.detach().to(wanted, copy=True).requires_grad_(tensor.requires_grad)

        inputs = [] if given.hidden is None else [like(each) for each in tensors_of(given.hidden)]
        # a unit may change what it takes
        hidden = None if given.hidden is None else with_tensors(given.hidden, [each.clone() for each in inputs])
        batch = {name: like(tensor) for name, tensor in given.batch.items()}
        device = next(iter(batch.values())).device
        with torch_generators_kept(device):
            seed_torch(zlib.crc32(unit.name.encode()), device)
            # a unit may change buffers, and replace them here
            copies = {id(tensors[name]): tensors[name].clone() for name, _ in unit.named_buffers() if name in tensors}
            handed = {name: copies.get(id(each), each) for name, each in tensors.items()}
            returned: Any = functional_call(unit, handed, (hidden, batch), tie_weights=False)
        if given.is_last:
            total, number = loss_of(unit, returned)
            outputs = [total, torch.as_tensor(number, dtype=torch.float64, device=device)]
        else:
            outputs = [*tensors_of(as_bundle(unit, returned))]
        by_name = {spec_of(each).name: tensors[place] for place, each in self._places(unit).items()}
        leaves = [each for each in (*inputs, *by_name.values()) if each.requires_grad]
        graded = [each for each in outputs if each.requires_grad]
        known = [_known(f"output {at}", each) for at, each in enumerate(graded)]
        taken = torch.autograd.grad(graded, leaves, known, allow_unused=True) if graded and leaves else ()
        gradients = {id(leaf): gradient for leaf, gradient in zip(leaves, taken, strict=bool(taken))}

        def gradient_of(leaf: Tensor) -> Tensor:
            gradient = gradients.get(id(leaf))
            return torch.zeros_like(leaf) if gradient is None else gradient

        return _Computed(
            [each.detach() for each in outputs],
            [gradient_of(each) for each in inputs if each.requires_grad],
            {name: gradient_of(each) for name, each in by_name.items() if each.requires_grad},
            [handed[name].detach() for name, _ in unit.named_buffers() if name in handed],
        )

    def _places(self, unit: OwnUnit) -> dict[str, Parameter]:
        """The parameters of a unit by one place of each."""
        return {place: each for place, each in unit.named_parameters() if isinstance(each, Parameter)}

    # --- their comparison ------------------------------------------------------------------------------------------

    def _compare(self, unit: OwnUnit, whole: _Computed, part: _Computed, tolerance: float) -> None:
        """Raise ValueError on all tp ranks where two computations differ on one."""
        shapes = [[[*each.shape] for each in computed.outputs] for computed in (whole, part)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"unit {unit.name!r} returns {shapes[0]} as a whole, and {shapes[1]} with parts of what tp_plan cuts: "
                f"what a column has cut has to go through a row, or be gathered ('column gathered'){self.hint}"
            )
        for words, pairs in (
            ("what it returns", zip(whole.outputs, part.outputs, strict=True)),
            ("the gradient of its input", zip(whole.of_inputs, part.of_inputs, strict=True)),
            ("its buffers", zip(whole.buffers, part.buffers, strict=True)),
        ):
            self._require(
                [_Difference(f"tensor {at} of {words}", _off(*pair)) for at, pair in enumerate(pairs)], unit, tolerance
            )
        self._require([*self._of_parameters(unit, whole, part)], unit, tolerance)

    def _of_parameters(self, unit: OwnUnit, whole: _Computed, part: _Computed) -> Iterator[_Difference]:
        """By how much gradients of parameters are off. A collective of the tp ranks."""
        specs = {spec_of(each).name: spec_of(each) for each in self._places(unit).values()}
        for name, right in whole.of_parameters.items():
            words, mine = f"the gradient of parameter {name}", part.of_parameters[name]
            if self.shapes[name].split is not None:
                scale = float(right.abs().max()) if right.numel() else 0.0
                yield _Difference(words, _off(part_of(right, specs[name]), mine, scale))
                continue
            total = mine.clone()
            collectives.all_reduce(total, self.cuts.group).wait()
            of_sum = _off(right, total)
            yield _Difference(words, of_sum if self.shapes[name].is_partial else _off(right, mine), of_sum)

    def _require(self, differences: Sequence[_Difference], unit: OwnUnit, tolerance: float) -> None:
        """Raise ValueError on all tp ranks for what is off on one. A collective of these."""
        if not differences:
            return
        off = torch.tensor([[each.off, each.of_sum] for each in differences], dtype=torch.float64)
        off = off.to(next(unit.parameters()).device)
        collectives.all_reduce(off, self.cuts.group, "max").wait()
        for each, (worst, of_sum) in zip(differences, off.tolist(), strict=True):
            if worst > tolerance:
                is_partial = of_sum <= tolerance
                hint = "The sum over tp ranks is right: tp_plan has to say 'partial' for it" if is_partial else BETWEEN
                raise ValueError(
                    f"unit {unit.name!r} computes something else in {self.cuts.group.size} parts, as tp_plan cuts it, "
                    f"than as a whole: {each.words} is off by {worst:.2g} of its largest number. {hint}"
                )


def _placed(unit: OwnUnit, values: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """Values by the place of each parameter and buffer of a unit. values: by its number (`id`)."""
    return by_places(unit, lambda _, tensor: values[id(tensor)])


def _known(words: str, like: Tensor) -> Tensor:
    """Numbers of the normal distribution in the shape, and of the dtype and device, of a tensor: the same on all ranks
    for the same words.
    """
    draw = torch.Generator(like.device).manual_seed(zlib.crc32(words.encode()))
    return torch.randn(like.shape, generator=draw, device=like.device).to(like.dtype)


def _off(right: Tensor, made: Tensor, scale: float | None = None) -> float:
    """By how much of its largest number a tensor is off. scale: that of the whole, where tensors are parts of it."""
    if not right.numel():
        return 0.0
    one, other = (torch.nan_to_num(each.double()) for each in (right, made))
    largest = float(one.abs().max()) if scale is None else scale
    off = float((one - other).abs().max())
    return off / largest if largest else float(off > 0)
