"""A model whose gradients are known: every parameter w has the loss sum(a w + b w^2 / 2), a and b random by name and
sample.

Units do not depend on each other, so a pipeline stage or a tp rank runs by itself, and the whole loss is a sum that one
process can compute: `reference` trains it with torch.optim. Parameters cover every kind of spec: sharded along either
dimension, replicated, partial over tp, padded, decayed or not, and a word embedding used at both ends.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import dropwhile, takewhile
from typing import Any

import torch
from torch import Tensor, nn

from megazero.config.dtypes import compute_dtype
from megazero.config.schema import OptimizerConfig, ParallelConfig
from megazero.mpu import collectives
from megazero.mpu.axes import Axes
from megazero.mpu.grid import Group, ProcessGrid, build_grid, single_rank_group
from megazero.mpu.parameter import Parameter, ParameterKind, ParameterSpec, StateGroup, shard
from megazero.mpu.random import initialise
from megazero.optim.clip import clip_coefficient
from megazero.program.instruction import Instruction, Op
from megazero.program.passes.cut import units_of
from megazero.program.step import StepOptions, training_step
from megazero.zero.actions import UpdateValues
from megazero.zero.optimizer import ShardedOptimizer
from megazero.zero.portions import initialise_state
from megazero.zero.sharding import Column
from megazero.zero.state import ModelState
from tests.late import late_collectives
from tests.parameters import Piece, held_fragments, values_of
from tests.program import kinds

HIDDEN, VOCABULARY, PADDED = 6, 11, 24
SEED = 7


@dataclass(frozen=True)
class Case:
    """One layout of the toy, and how it trains."""

    axes: Axes = field(default_factory=Axes)
    zero_stage: int = 0
    accumulation: int = 1
    virtual_stages: int = 1
    partial: bool = False
    tied: bool = True
    precision: str = "fp64"
    overlap: bool = True
    bucket_size: int = 60
    grad_reduce_dtype: str = "auto"
    optimizer: str = "adamw"
    clip: float = 1.0
    blocks: int = 4
    samples: int = 12
    steps: int = 3
    reduce_every: bool | None = None
    poison: bool = False
    gathered_bytes: int | None = None


@cache
def _coefficients(name: str, role: str, shape: tuple[int, ...], samples: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The sums over samples of a (any sign) and b (positive) of a whole parameter; a function so that nothing global is
    drawn for a rank without it.
    """
    if len(samples) > 1:
        each = [_coefficients(name, role, shape, (sample,)) for sample in samples]
        return torch.stack([a for a, _ in each]).sum(0), torch.stack([b for _, b in each]).sum(0)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {role} {samples[0]}".encode()))
    a = torch.randn(shape, generator=generator, dtype=torch.float64)
    return a, torch.rand(shape, generator=generator, dtype=torch.float64)


class _Quadratic(torch.autograd.Function):
    """sum(a w + b w^2 / 2), whose gradient is made in forward: as that of a table, which backward does not read."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a + b * w)
        return (a * w + 0.5 * b * w * w).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (known,) = ctx.saved_tensors
        return gradient * known, None, None


class Unit(nn.Module):
    """Some parameters; `role` is how this unit uses them. tp: who this is among the ranks that hold pieces."""

    def __init__(self, parameters: Iterable[Parameter], role: str, tp: Group) -> None:
        super().__init__()
        self.role, self.tp = role, tp
        for number, parameter in enumerate(parameters):
            self.register_parameter(f"p{number}", parameter)

    def forward(self, samples: Sequence[int]) -> Tensor:
        """The loss of samples, as far as this rank's gradients need it: a partial replica adds its rank's share."""
        total = torch.zeros((), dtype=torch.float64)
        for parameter in self.parameters():
            spec = parameter.spec  # type: ignore[attr-defined]
            region = tuple(slice(start, stop) for start, stop in spec.box)
            a, b = (whole[region] for whole in _coefficients(spec.name, self.role, spec.shape, tuple(samples)))
            share = (self.tp.index + 1) / sum(range(1, self.tp.size + 1)) if spec.tp_partial else 1.0
            w = parameter.flatten()[: spec.stored_numel].view(a.shape).double()
            if spec.kind is ParameterKind.EMBEDDING:
                total = total + share * _Quadratic.apply(w, a, b)
            else:
                total = total + share * (a * w + 0.5 * b * w * w).sum()
        return total


class Chunk(nn.Module):
    """Units that run together."""

    def __init__(self, units: Sequence[Unit]) -> None:
        super().__init__()
        self._units = nn.ModuleList(units)

    def units(self) -> list[nn.Module]:
        return list(self._units)

    def forward(self, samples: Sequence[int]) -> Tensor:
        return torch.stack([unit(samples) for unit in self._units]).sum()


def _block_places(name: str, tp: Group, partial: bool) -> list[ParameterSpec]:
    h, split = HIDDEN, {"rank": tp.index, "size": tp.size}
    partial = partial and tp.size > 1
    return [
        shard(f"{name}.norm.weight", (h,), ParameterKind.NORM, fill=1.0, tp_partial=partial),
        shard(f"{name}.up.weight", (2 * h, h), ParameterKind.MATRIX, dim=0, std=0.5, **split),
        shard(f"{name}.up.bias", (2 * h,), ParameterKind.BIAS, dim=0, fill=0.1, **split),
        shard(f"{name}.down.weight", (h, 2 * h), ParameterKind.MATRIX, dim=1, std=0.5, **split),
        shard(f"{name}.down.bias", (h,), ParameterKind.BIAS, tp_partial=partial),
    ]


def _word_place(tp: Group, tied: bool) -> ParameterSpec:
    shape, split = (VOCABULARY, HIDDEN), {"rank": tp.index, "size": tp.size}
    group = StateGroup.TIED if tied else StateGroup.REPLICAS
    kind = ParameterKind.EMBEDDING
    return shard("embedding.word.weight", shape, kind, dim=0, padded=PADDED, std=0.5, state_group=group, **split)


def build_chunks(case: Case, pp_index: int, tp: Group) -> list[Chunk]:
    """The chunks of one pipeline rank, blocks dealt out in turn; the first has the embedding, the last the head."""
    dtype = compute_dtype(case.precision)

    def parameter(spec: ParameterSpec) -> Parameter:
        return Parameter(spec, dtype, "cpu")

    def block(number: int) -> Unit:
        return Unit(map(parameter, _block_places(f"blocks.{number}", tp, case.partial)), "block", tp)

    pp, parts = case.axes.pp, case.axes.pp * case.virtual_stages
    across = case.tied and pp > 1
    word: Parameter | None = None
    chunks = []
    for number in range(pp_index, parts, pp):
        units = []
        if number == 0:
            word = parameter(_word_place(tp, across))
            place: dict[str, Any] = {"std": 0.5, "tp_partial": case.partial and tp.size > 1}
            position = shard("embedding.position.weight", (5, HIDDEN), ParameterKind.EMBEDDING, **place)
            units.append(Unit([word, parameter(position)], "embedding", tp))
        units += [block(i) for i in range(case.blocks * number // parts, case.blocks * (number + 1) // parts)]
        if number == parts - 1 and case.tied:
            units.append(Unit([word if word is not None else parameter(_word_place(tp, across))], "head", tp))
        chunks.append(Chunk(units))
    return chunks


@dataclass
class Rank:
    """What one rank trains with."""

    case: Case
    grid: ProcessGrid
    chunks: list[Chunk]
    state: ModelState
    optimizer: ShardedOptimizer

    losses: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    """By micro-batch, chunk and first unit: what `execute` has computed, and not gone back through."""

    def schedule(self) -> list[Instruction]:
        """One micro-batch after the other: all chunks forward, then all back."""
        chunks = range(len(self.chunks))
        return [
            Instruction(op, batch, chunk)
            for batch in range(self.case.accumulation)
            for op, order in ((Op.FORWARD, chunks), (Op.BACKWARD, chunks[::-1]))
            for chunk in order
        ]

    @cached_property
    def step_list(self) -> tuple[Instruction, ...]:
        """The list of a whole step."""
        case = self.case
        every = case.zero_stage >= 2 if case.reduce_every is None else case.reduce_every
        return training_step(self.schedule(), self.state.shape, StepOptions(every, case.overlap, case.gathered_bytes))

    def execute(self, instructions: Iterable[Instruction], step: int, now: UpdateValues | None = None) -> None:
        """Execute a part of a step's list. now: for its updates."""
        state, mine = self.state, sample_numbers(self.case, step)[self.grid.replicas.index :: self.grid.replicas.size]
        for i in instructions:
            if i.op is Op.FORWARD:
                self._forward(i, mine[i.micro_batch :: self.case.accumulation])
            elif i.op is Op.BACKWARD:
                self._backward(i)
            elif i.op in state.actions.by_kind:
                state.actions.by_kind[i.op](i)
            elif i.op == kinds.UPDATE:
                assert now is not None
                self.optimizer.update(i, now)
            else:
                assert i.op is Op.NORM, i

    def _forward(self, i: Instruction, samples: list[int]) -> None:
        units = units_of(i, self.state.shape)
        for number in units:
            self.state.actions.ready(self.state.shape.units[i.chunk][number].forward)
        if samples:
            losses = [self.chunks[i.chunk].units()[number](samples) for number in units]
            self.losses[i.micro_batch, i.chunk, units.start] = torch.stack(losses).sum()

    def _backward(self, i: Instruction) -> None:
        units = units_of(i, self.state.shape)
        for number in units:
            self.state.actions.ready(self.state.shape.units[i.chunk][number].backward)
        self.state.reducer.before_backward(None)
        loss = self.losses.pop((i.micro_batch, i.chunk, units.start), None)
        if loss is not None:
            (loss / self.case.samples).backward()
        self.state.reducer.after_backward()

    def backward(self, step: int) -> None:
        """A step's list as far as the norm: all micro-batches; ends with the reduced gradients."""
        self.execute(takewhile(before_norm, self.step_list), step)
        self.optimizer.complete_reduction()

    def reduce(self) -> None:
        """The step's reductions, each once, of gradients that are there already."""
        once = training_step(self.schedule(), self.state.shape, StepOptions())
        self.execute((i for i in once if i.op in (Op.REDUCE, Op.REDUCE_ACROSS, Op.REDUCE_PARTIAL)), 0)
        self.optimizer.complete_reduction()

    def update(self, lr: float, multiplier: Tensor, skip: Tensor) -> None:
        """The rest of the list: the updates, and what follows them."""
        now = UpdateValues(lr, multiplier, skip, self.optimizer.step_count + 1.0)
        self.execute(dropwhile(before_norm, self.step_list), 0, now)
        self.optimizer.end_step(skip)

    def norm(self) -> Tensor:
        """The global norm, as a trainer takes it."""
        squares = self.optimizer.sum_of_squares().clone()
        collectives.all_reduce(squares, self.grid.world).wait()
        return squares.sqrt()

    def step(self, number: int, lr: float = 0.05) -> Tensor:
        """One whole training step; the norm before clipping."""
        self.backward(number)
        norm = self.norm()
        self.update(lr, clip_coefficient(norm, self.case.clip), ~torch.isfinite(norm))
        return norm

    def gradients(self) -> list[tuple[ParameterSpec, int, Tensor]]:
        """Spec, first element and values of every gradient piece that this rank owns."""
        column = self.state.columns[Column.GRADIENT]
        return [
            (piece.spec, piece.start, column.view(i, piece.offset, piece.offset + piece.numel).clone())
            for i, bucket in enumerate(self.state.buckets)
            for piece in bucket.layout.fragments(*bucket.shard)
        ]

    def values(self) -> list[Piece]:
        with self.state.reading():
            return values_of(self.chunks)


def before_norm(i: Instruction) -> bool:
    """Whether it is not the step's norm."""
    return i.op is not Op.NORM


def sample_numbers(case: Case, step: int) -> list[int]:
    return list(range(step * case.samples, (step + 1) * case.samples))


def configs(case: Case) -> tuple[OptimizerConfig, ParallelConfig]:
    optimizer = OptimizerConfig(precision=case.precision, optimizer=case.optimizer, weight_decay=0.1)
    same = {name: getattr(case, name) for name in ("zero_stage", "overlap", "bucket_size", "grad_reduce_dtype")}
    return optimizer, ParallelConfig(**same)


def build(case: Case, grid: ProcessGrid | None = None) -> Rank:
    """This rank's part of the toy, initialised.

    A world has one grid: torch cannot make the same local groups twice on some of its ranks.
    """
    grid = grid or build_grid(case.axes)
    for group in (*grid.step_groups, grid.pp, grid.replicas):
        group.traffic.clear()
    chunks = build_chunks(case, grid.at.pp, grid.tp)
    cfg, parallel = configs(case)
    state = ModelState(chunks, grid, cfg, parallel)
    initialise_state(state, SEED)
    return Rank(case, grid, chunks, state, ShardedOptimizer(state, cfg, grid))


def joined(ranks: Iterable[list[tuple[ParameterSpec, int, Tensor]]]) -> dict[str, Tensor]:
    """Global tensors from owned pieces; where replicas give one more than once they must be equal bit by bit."""
    whole: dict[str, Tensor] = {}
    for pieces in ranks:
        for spec, start, values in pieces:
            total = whole.setdefault(spec.name, torch.full(spec.shape, torch.nan, dtype=values.dtype))
            region = tuple(slice(i, j) for i, j in spec.box)
            box = total[region].flatten()
            old = box[start : start + values.numel()]
            assert bool((old.isnan() | (old == values)).all()), f"{spec.name}: replicas of the gradient differ"
            box[start : start + values.numel()] = values
            total[region] = box.view(total[region].shape)
    for name, total in whole.items():
        assert not total.isnan().any(), f"{name}: not all elements are owned, or NaN"
    return whole


def reference(case: Case) -> dict[str, Any]:
    """One process in float64 with torch.optim: first gradients, norms, and the weights after the case's steps. The same
    for all layouts of a model, and made once.
    """
    model = Case(blocks=case.blocks, tied=case.tied, optimizer=case.optimizer, clip=case.clip)
    return _trained(replace(model, samples=case.samples, steps=case.steps))


@cache
def _trained(case: Case) -> dict[str, Any]:
    single = Case(precision="fp64", blocks=case.blocks, tied=case.tied)
    (chunk,) = build_chunks(single, 0, single_rank_group())
    parameters: dict[str, Parameter] = {}
    for unit in chunk.units():
        for p in unit.parameters():
            assert isinstance(p, Parameter)
            parameters[p.spec.name] = p
    for p in parameters.values():
        initialise(p.data, p.spec, SEED)
    groups = [
        {"params": [p for p in parameters.values() if p.spec.kind.decays is decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    kinds: dict[str, Any] = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=0.05, betas=(0.9, 0.95), eps=1e-8),
        "adam": lambda: torch.optim.Adam(groups, lr=0.05, betas=(0.9, 0.95), eps=1e-8),
        "sgd": lambda: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    }
    optimizer = kinds[case.optimizer]()
    norms, first = [], {}
    for step in range(case.steps):
        optimizer.zero_grad()
        (chunk(sample_numbers(case, step)) / case.samples).backward()
        if step == 0:
            first = {name: p.grad[: p.spec.shape[0]].clone() for name, p in parameters.items() if p.grad is not None}
        norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), case.clip or torch.inf).item())
        optimizer.step()
    weights = {name: p.detach()[: p.spec.shape[0]].clone() for name, p in parameters.items()}
    return {"gradients": first, "norms": norms, "weights": weights}


def train(rank: int, case: Case, grid: ProcessGrid | None = None) -> dict[str, Any]:
    """A test body: the same things from one rank of a layout."""
    here = build(case, grid)
    norms, first = [], []
    for step in range(case.steps):
        if case.poison:
            poison(here.state)
        if step == 0:
            here.backward(0)
            first = here.gradients()
            norm = here.norm()
            here.update(0.05, clip_coefficient(norm, case.clip), ~torch.isfinite(norm))
        else:
            norm = here.step(step)
        norms.append(norm.item())
    fragments = [(f.spec, f.start, f.weight.clone()) for f in held_fragments(here.optimizer)]
    return {"gradients": first, "norms": norms, "weights": here.values(), "fragments": fragments}


def train_all(rank: int, cases: Sequence[Case], shared_memory: bool = True) -> list[dict[str, Any]]:
    """`train` for several layouts of one world, whose start costs more than a toy's training."""
    grid = build_grid(cases[0].axes, shared_memory=shared_memory)
    return [train(rank, case, grid) for case in cases]


def train_late(rank: int, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """As `train`, with collectives whose results come as late as possible (`tests.late`)."""
    with late_collectives() as count:
        results = train_all(rank, cases)
    assert count
    return results


def poison(state: ModelState) -> None:
    """Fill memory whose content must not matter between steps with NaN: gradients, spare buffers, unused tails of
    weights.
    """
    for index, bucket in enumerate(state.buckets):
        state.columns[Column.GRADIENT].held(index).fill_(torch.nan)
        state.wait_parameters()
        parameters = state.columns[Column.PARAMETER]
        parameters.held(index)[max(0, bucket.layout.used - parameters.range_of(index)[0]) :] = torch.nan
    for buffer in state.reducer.pool.free:
        buffer.fill_(torch.nan)
