"""Global tensors from the pieces that ranks hold, by the parameters' specs.

    mine = values_of(stage)                       # or gradients_of(stage); plain tensors, so a rank can return them
    whole = assemble(run_ranks(...))              # {name: global tensor}, replicas checked equal

For gradients before any reduction over tp or over the tied stages, `assemble(ranks, unreduced=True)` adds the partial
ones (tp_partial, tied).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from megazero.convert.stages import copy_box
from megazero.model.stage import Stage
from megazero.mpu.parameter import Parameter, ParameterSpec, StateGroup, spec_of
from megazero.zero.layout import Fragment
from megazero.zero.optimizer import ShardedOptimizer
from tests.convert.transformers_tensors import from_transformers


@dataclass(frozen=True)
class Piece:
    """One rank's part of one parameter: the elements of its box, without padding."""

    spec: ParameterSpec
    values: Tensor


def cut(spec: ParameterSpec, local: Tensor) -> Piece:
    """The piece in a local tensor (shape `spec.local_shape`, or flat), without padding rows."""
    box_shape = tuple(stop - start for start, stop in spec.box)
    flat = local.detach().reshape(-1)[: spec.stored_numel]
    return Piece(spec, flat.reshape(box_shape).cpu().clone())


def load_transformers_state(stage: Stage, family: str, state: Mapping[str, Tensor]) -> None:
    """Fill a stage with its part of a `transformers` model's weights."""
    with torch.no_grad():
        for parameter in parameters_of(stage):
            spec = spec_of(parameter)
            copy_box(parameter, spec, from_transformers(family, stage.layout.model, spec.name, state))


def parameters_of(modules: nn.Module | Iterable[nn.Module]) -> list[Parameter]:
    """Every parameter once, in order; one that two modules share counts once."""
    seen: dict[int, Parameter] = {}
    for module in [modules] if isinstance(modules, nn.Module) else modules:
        for parameter in module.parameters():
            assert isinstance(parameter, Parameter)
            seen.setdefault(id(parameter), parameter)
    return list(seen.values())


def values_of(modules: nn.Module | Iterable[nn.Module]) -> list[Piece]:
    """The values of all parameters."""
    return [cut(spec_of(p), p) for p in parameters_of(modules)]


def held_fragments(optimizer: ShardedOptimizer) -> list[Fragment]:
    """All fragments of a rank, as views of its state."""
    assert optimizer.resident
    return list(chain.from_iterable(optimizer.portions()))


def gradients_of(modules: nn.Module | Iterable[nn.Module]) -> list[Piece]:
    """The gradients of all parameters. Every parameter must have one."""
    pieces = []
    for parameter in parameters_of(modules):
        assert parameter.grad is not None, f"{parameter.spec.name} has no gradient"
        pieces.append(cut(parameter.spec, parameter.grad))
    return pieces


def assemble(ranks: Iterable[Iterable[Piece]], *, unreduced: bool = False, tolerance: float = 0.0) -> dict[str, Tensor]:
    """The global tensors that the pieces of all ranks make up.

    Replicas must agree to `tolerance` (largest difference over largest value; 0: bitwise). With `unreduced`, pieces
    whose spec is tp_partial or tied are partial sums and are added instead; the ranks must then have the same dp index.
    Fails if no piece covers an element, or if shapes, kinds or standard deviations of a name differ.
    """
    whole: dict[str, Tensor] = {}
    covered: dict[str, Tensor] = {}
    facts: dict[str, tuple[object, ...]] = {}
    for rank, pieces in enumerate(ranks):
        for piece in pieces:
            spec = piece.spec
            known = facts.setdefault(spec.name, (spec.shape, spec.kind, spec.std, spec.fill))
            assert known == (spec.shape, spec.kind, spec.std, spec.fill), f"{spec.name}: ranks tell {known} and {spec}"
            total = whole.setdefault(spec.name, torch.zeros(spec.shape, dtype=piece.values.dtype))
            mark = covered.setdefault(spec.name, torch.zeros(spec.shape, dtype=torch.bool))
            region = tuple(slice(start, stop) for start, stop in spec.box)
            if unreduced and (spec.tp_partial or spec.state_group is StateGroup.TIED):
                total[region] += piece.values
            elif mark[region].any():
                assert mark[region].all(), f"{spec.name}: rank {rank}'s box overlaps another's in part"
                scale = total[region].abs().max().item() if total[region].numel() else 0.0
                apart = (total[region] - piece.values).abs().max().item()
                assert apart <= tolerance * scale, f"{spec.name}: rank {rank}'s replica differs by {apart} of {scale}"
            else:
                total[region] = piece.values
            mark[region] = True
    for name, mark in covered.items():
        assert mark.all(), f"{name}: {int((~mark).sum())} of {mark.numel()} elements are held by no rank"
    return whole


def worst_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor], floor: float = 1e-11) -> tuple[float, str]:
    """Largest over tensors of (largest difference / largest value), and the name of that tensor.

    A tensor whose difference is below `floor` counts as equal: gradients that are mathematically zero (key bias).
    """
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    worst = (0.0, "none")
    for name, mine in ours.items():
        other = theirs[name]
        assert mine.shape == other.shape, (name, mine.shape, other.shape)
        apart = (mine - other).abs().max().item() if mine.numel() else 0.0
        assert apart == apart, f"{name} holds NaN"
        if apart > floor:
            worst = max(worst, (apart / other.abs().max().clamp_min(1e-300).item(), name))
    return worst
