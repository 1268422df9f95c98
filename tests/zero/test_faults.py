"""Rows of NUMERICAL_FAULTS that live in the model state and are not among the parities of test_parity.py."""

import math
from dataclasses import replace
from itertools import product, takewhile
from typing import Any

import pytest
import torch

from megazero.config.schema import OptimizerConfig
from megazero.mpu.axes import Axes
from megazero.mpu.grid import build_grid
from megazero.mpu.parameter import StateGroup
from megazero.optim.clip import clip_coefficient
from megazero.optim.loss_scale import LossScaler
from megazero.program.instruction import Instruction, Op
from megazero.zero.sharding import Column
from tests.parameters import Piece, assemble, held_fragments, worst_difference
from tests.ranks import run_ranks
from tests.stages import STAGES
from tests.zero.toy import Case, Rank, before_norm, build, joined, poison, reference, sample_numbers, train_all

ALL_AXES = Axes(pp=2, dp=2, tp=2)
HYBRID = replace(ALL_AXES, shard_size=1)


def weights_of(axes: Axes, cases: list[Case]) -> list[list[list[Piece]]]:
    """By case and rank."""
    ranks = run_ranks(axes.world_size, train_all, cases)
    return [[results[i]["weights"] for results in ranks] for i in range(len(cases))]


@pytest.mark.slow
@pytest.mark.sampled(strength=1)
@pytest.mark.parametrize(
    ("precision", "axes"),
    [("fp32", ALL_AXES), ("bf16", ALL_AXES), ("bf16", HYBRID), ("fp32", Axes(pp=2, dp=4, shard_size=2))],
    ids=str,
)
def test_fault_02_03_all_replicas_stay_equal_bit_by_bit(precision: str, axes: Axes) -> None:
    """MLM#656, BLOOM, DS PR#1801: with a maximum norm that clips every step, on dp, tp and both tied stages."""
    partials = (False, True)[: axes.tp]
    cases = [Case(axes, s, 2, precision=precision, partial=p, clip=1e-3) for s in STAGES for p in partials]
    for case, ranks in zip(cases, weights_of(axes, cases), strict=True):
        whole = assemble(ranks, tolerance=0.0)
        names = [piece.spec.name for pieces in ranks for piece in pieces]
        assert names.count("embedding.word.weight") == 8, "both stages hold a copy"
        expected = reference(case)["weights"]
        assert worst_difference({n: t.double() for n, t in whole.items()}, expected)[0] < (
            1e-5 if precision == "fp32" else 0.05
        ), case


def known_norms(rank: int, cases: list[Case]) -> list[float]:
    """The norm where every element of every whole gradient is 1, however it is shared out."""
    grid, norms = build_grid(cases[0].axes), []
    for case in cases:
        here = build(case, grid)
        for chunk in here.chunks:
            losses = []
            with here.state.reading():
                for parameter in chunk.parameters():
                    spec = parameter.spec  # type: ignore[attr-defined]
                    ends = 2 if spec.state_group is StateGroup.TIED else 1
                    holders = here.grid.replicas.size * (here.grid.tp.size if spec.tp_partial else 1) * ends
                    losses.append(parameter.flatten()[: spec.stored_numel].sum() / holders)
            here.state.reducer.before_backward(None)
            torch.stack(losses).sum().backward()
            here.state.reducer.after_backward()
        here.reduce()
        norms.append(here.norm().item())
    return norms


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [
        *(Axes(), Axes(tp=2), Axes(tp=4), Axes(pp=2), Axes(dp=4), ALL_AXES, Axes(pp=2, tp=3), HYBRID),
        Axes(dp=4, shard_size=2),
    ],
    ids=str,
)
def test_fault_04_05_06_each_element_counts_once_in_the_norm(axes: Axes) -> None:
    """MLM#7227, #7452, DS#5411, TT#596, #649: tied, replicated, sharded and partial parameters, stages and chunks."""
    shapes = product(STAGES, (1, 2)[: axes.pp], (False, True)[: axes.tp])
    cases = [Case(axes, stage, virtual_stages=virtual, partial=partial) for stage, virtual, partial in shapes]
    elements = sum(t.numel() for t in reference(Case(steps=0))["weights"].values())
    for found in run_ranks(axes.world_size, known_norms, cases):
        torch.testing.assert_close(found, [math.sqrt(elements)] * len(cases), rtol=1e-14, atol=0.0)


@pytest.mark.slow
def test_fault_07_the_norm_of_bf16_does_not_depend_on_the_partition() -> None:
    """TT#4135: 1.4453 and 1.4508. One sample a micro-batch, so that the 16-bit gradients are the same
    on all layouts.
    """
    norms = []
    for axes in (Axes(), Axes(tp=2), Axes(pp=2), Axes(dp=2)):
        base = Case(axes, precision="bf16", steps=1, accumulation=12 // axes.dp, tied=False)
        cases = [replace(base, zero_stage=stage, bucket_size=size) for stage in STAGES for size in (30, 10_000)]
        norms += [result["norms"][0] for result in run_ranks(axes.world_size, train_all, cases)[0]]
    assert max(norms) / min(norms) - 1 < 1e-6


@pytest.mark.slow
def test_fault_09_16_18_gradients_do_not_depend_on_how_samples_are_dealt_out() -> None:
    """DS#8152, #8154, #7773, #5118, #5555: stages x micro-batches, a number of samples that divides by neither, dp and
    tp.
    """
    expected = reference(Case(steps=1, samples=13))
    for axes in (Axes(), Axes(pp=4), Axes(dp=3), Axes(dp=2, tp=2)):
        partials = (False, True)[: axes.tp]  # sequence parallel: what each tp rank has is a part of the sum
        cases = [Case(axes, s, n, partial=p, steps=1, samples=13) for s in STAGES for n in (1, 4, 7) for p in partials]
        ranks = run_ranks(axes.world_size, train_all, cases)
        for i, case in enumerate(cases):
            found = joined(results[i]["gradients"] for results in ranks)
            assert worst_difference(found, expected["gradients"], floor=0.0)[0] < 1e-13, case
            assert ranks[0][i]["norms"][0] == pytest.approx(expected["norms"][0], rel=1e-13), case


def whole_gradients(rank: int, cases: list[Case]) -> list[list[torch.Tensor]]:
    """What each rank holds of every bucket's gradient after the reduction, before the step."""
    grid, results = build_grid(cases[0].axes), []
    for case in cases:
        here = build(case, grid)
        here.step(0)
        here.backward(1)
        results.append([here.state.columns[Column.GRADIENT].held(i).clone() for i in range(len(here.state.buckets))])
    return results


def test_fault_10_the_last_micro_batch_is_in_the_reduction() -> None:
    """DS#7985: under ZeRO-0 the accumulators of all dp ranks are identical; that they are right is test_parity's."""
    first, *others = run_ranks(
        3, whole_gradients, [Case(Axes(dp=3), 0, accumulation=batches, precision="fp32") for batches in (1, 3)]
    )
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_fault_12_bf16_without_zero_follows_fp32() -> None:
    """DS#7837, #7839: two steps without clipping, with sgd, which would show any factor; gradients are right to bf16's
    8 bits.
    """
    for axes in (Axes(), Axes(dp=2)):
        cases = [Case(axes, 0, 2, precision=p, steps=2, optimizer="sgd", clip=0.0) for p in ("bf16", "fp32")]
        ranks = run_ranks(axes.world_size, train_all, cases)
        torch.testing.assert_close(ranks[0][0]["norms"], ranks[0][1]["norms"], rtol=5e-3, atol=0.0)
        narrow, wide = (joined(results[i]["fragments"] for results in ranks) for i in range(2))
        for name, weight in narrow.items():
            assert weight.dtype == torch.float32
            torch.testing.assert_close(weight, wide[name], rtol=0.01, atol=2e-3, msg=name)


def unequal_ranks(rank: int, case: Case) -> tuple[float, list[Piece]]:
    """A step in which parameters of some ranks get no gradient at all, then one in which none does anywhere."""
    here = build(case)
    unit = here.chunks[0].units()[-1]
    with here.state.reading(unit):
        here.state.reducer.before_backward(None)
        if here.grid.replicas.index == 0:
            unit([0]).backward()
        here.state.reducer.after_backward()
    here.reduce()
    norm = here.norm()
    here.update(0.0, clip_coefficient(norm, 1.0), ~torch.isfinite(norm))
    poison(here.state)
    here.reduce()
    zero = here.norm()
    here.update(0.1, clip_coefficient(zero, 1.0), ~torch.isfinite(zero))
    assert zero.item() == 0.0
    return norm.item(), here.values()


@pytest.mark.few(cases=1)
@pytest.mark.parametrize("stage", STAGES)
def test_fault_14_ranks_without_gradients(stage: int) -> None:
    """MLM#5530: no gradient counts as zero, the buckets are reduced all the same, and the norm 0 harms nothing."""
    case = Case(Axes(dp=3), stage, tied=False)
    results = run_ranks(3, unequal_ranks, case)
    assert len({norm for norm, _ in results}) == 1 and results[0][0] > 0
    assert all(values.isfinite().all() for values in assemble(pieces for _, pieces in results).values())


def snapshot(here: Rank) -> list[torch.Tensor]:
    """All state that a step may change, without the gradients."""
    columns = [column for name, column in here.state.columns.items() if name is not Column.GRADIENT]
    held = [column.held(i).clone() for column in columns for i in range(len(here.state.buckets))]
    return [*held, here.optimizer.step_count.clone()]


def overflows(rank: int, cases: list[tuple[Case, float]], victims: dict[int, str]) -> list[list[dict[str, Any]]]:
    grid = build_grid(cases[0][0].axes)
    return [overflow(rank, build(case, grid), victims, bad) for case, bad in cases]


def overflow(rank: int, here: Rank, victims: dict[int, str], bad: float) -> list[dict[str, Any]]:
    """A good step, then for each victim a step with a bad value in this gradient of that rank, then a good one."""
    scaler = LossScaler(OptimizerConfig(precision="fp16", hysteresis=1, initial_loss_scale=64.0))

    def step(number: int) -> bool:
        here.backward(number)
        norm = here.norm()
        skip = ~torch.isfinite(norm)
        here.update(0.05, clip_coefficient(norm, 1.0), skip)
        here.state.wait_parameters()
        scaler.update(skip)
        return bool(skip)

    assert not step(0)
    results = []
    for number, (victim, name) in enumerate(victims.items()):
        before, scale = snapshot(here), scaler.scale.item()
        parameter = next(p for p in here.chunks[-1].parameters() if p.spec.name.endswith(name))  # type: ignore[attr-defined]
        hook = parameter.register_hook(lambda g: g.index_fill(0, torch.tensor([0]), bad)) if rank == victim else None
        skipped = step(number + 1)
        if hook is not None:
            hook.remove()
        same = all(torch.equal(a, b) for a, b in zip(before, snapshot(here), strict=True))
        results.append({"victim": victim, "skipped": skipped, "same": same, "scale": scaler.scale.item() / scale})
    before = snapshot(here)
    assert not step(9)
    moved = [not torch.equal(a, b) for a, b in zip(before, snapshot(here), strict=True)]
    assert any(moved) and here.optimizer.step_count.item() == 2.0
    return results


@pytest.mark.slow
@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("axes", [ALL_AXES, HYBRID], ids=str)
def test_fault_15_one_ranks_overflow_skips_the_step_on_all(axes: Axes) -> None:
    """DS#7568, #7580, #8035: on a rank of each axis; the scale halves once, no bit of the state changes.

    The last one has a bad value in a replica that does not count in the norm: tp rank 0's does.
    """
    victims = {0: "up.weight", 1: "up.weight", 2: "up.weight", 5: "down.bias"}
    values = {"fp16": math.inf, "bf16": math.inf, "fp32": math.nan}
    cases = [
        (Case(axes, s, accumulation=2, precision=p, bucket_size=100), bad) for s in STAGES for p, bad in values.items()
    ]
    expected = [{"victim": v, "skipped": True, "same": True, "scale": 0.5} for v in victims]
    for found in run_ranks(8, overflows, cases, victims):
        for case, results in zip(cases, found, strict=True):
            assert results == expected, case


def uneven(rank: int, cases: list[Case]) -> list[bool]:
    """Whether this rank's parameters are those of the step at the moment each unit of the next forward needs them."""
    grid, good = build_grid(cases[0].axes), []
    for case in cases:
        here = build(case, grid)
        here.step(0)
        instructions = here.step_list
        begin = next(at for at, i in enumerate(instructions) if i.is_backward)
        here.execute(instructions[:begin], 1)
        found = [here.losses[0, 0, number].detach() for number in range(len(here.chunks[0].units()))]
        here.execute(takewhile(before_norm, instructions[begin:]), 1)
        samples = sample_numbers(case, 1)[rank :: case.axes.dp]
        with here.state.reading(), torch.no_grad():
            wanted = [unit(samples) for unit in here.chunks[0].units()]
        good.append(all(map(torch.equal, found, wanted)))
    return good


@pytest.mark.slow
def test_fault_19_forward_waits_for_the_parameters_it_reads() -> None:
    cases = [
        Case(Axes(dp=3), stage, precision="fp32", bucket_size=size) for stage in STAGES[1:] for size in (1, 60, 10_000)
    ]
    assert run_ranks(3, uneven, cases) == [[True] * len(cases)] * 3


def pending_after_step(rank: int, case: Case) -> tuple[int, int, int]:
    """Gathers that are still under way after the step, after the first unit's forward, and after all."""
    here = build(case)
    here.step(0)
    pending = here.state.gatherer._gathers
    found = [len(pending)]
    for i in here.step_list:
        if i.op is Op.FORWARD:
            here.execute([i], 1)
            found.append(len(pending))
    return found[0], found[1], found[-1]


def test_gathers_overlap_the_next_forward_only_where_asked() -> None:
    case = Case(Axes(dp=2), 1, bucket_size=1)
    for after_step, after_first, after_all in run_ranks(2, pending_after_step, case):
        assert after_step == 2 + 3 * 4 and after_first == after_step - 2 and after_all == 0
    assert run_ranks(2, pending_after_step, replace(case, overlap=False)) == [(0, 0, 0)] * 2


def launches(rank: int, case: Case) -> tuple[list[tuple[int, int]], dict[int, int]]:
    """(bucket, the first unit whose backward is over) for each reduction of a step; rank 1 has no gradients.

    And for each bucket the first unit that adds to its gradients.
    """
    here = build(case)
    log: list[tuple[int, int]] = []
    launch, backward, over = here.state.reducer.reduce, here._backward, [-1]

    def spy(index: int) -> None:
        log.append((index, over[0]))
        launch(index)

    def counted(i: Instruction) -> None:
        if rank == 1:
            here.losses.clear()
        backward(i)
        over[0] = 0 if i.units is None else i.units[0]

    here.state.reducer.reduce = spy  # type: ignore[method-assign]
    here._backward = counted  # type: ignore[method-assign]
    here.backward(0)
    units = here.state.shape.units[0]
    first = {bucket: number for number in reversed(range(len(units))) for bucket in units[number].gradients}
    return log, first


def test_all_ranks_launch_their_buckets_in_one_order() -> None:
    """Last bucket first whatever arrives; with overlap as soon as it is complete, while backward runs."""
    case = Case(Axes(dp=2), 2, bucket_size=100, tied=False)
    (in_order, first), (other, _) = run_ranks(2, launches, case)
    order = [index for index, _ in in_order]
    assert order == sorted(order, reverse=True) and len(order) > 3
    assert other == in_order == [(index, first[index]) for index in order]
    assert len({over for _, over in in_order}) > 3
    (apart, _), _ = run_ranks(2, launches, replace(case, overlap=False))
    assert apart == [(index, 0) for index in order]


def after_load(rank: int, cases: list[Case]) -> list[list[Piece]]:
    """Fills the fragments with numbers that say where they are, then reads parameters everywhere."""
    grid, results = build_grid(cases[0].axes), []
    for case in cases:
        here = build(case, grid)
        for fragment in held_fragments(here.optimizer):
            values = torch.arange(math.prod(fragment.spec.shape)).remainder(64).double().view(fragment.spec.shape)
            box = values[tuple(slice(i, j) for i, j in fragment.spec.box)]
            local = box.flatten()[fragment.start : fragment.stop]
            fragment.weight.copy_(local)
            fragment.columns["exp_avg"].copy_(local + 1)
            fragment.columns["exp_avg_sq"].copy_(local + 2)
        here.optimizer.after_load()
        state = here.state
        for index, bucket in enumerate(state.buckets):
            weights, first, second = state.weights, state.columns[Column.EXP_AVG], state.columns[Column.EXP_AVG_SQ]
            for piece in bucket.layout.fragments(*first.range_of(index)):
                at = index, piece.offset, piece.offset + piece.numel
                assert torch.equal(first.view(*at), weights.view(*at) + 1)
                assert torch.equal(second.view(*at), weights.view(*at) + 2)
        results.append(here.values())
    return results


@pytest.mark.slow
@pytest.mark.parametrize("axes", [Axes(), Axes(dp=3), ALL_AXES, HYBRID], ids=str)
def test_fault_27_parameters_are_gathered_after_a_load(axes: Axes) -> None:
    """MLM#6920: what is in the fragments is in every parameter of every rank, and in replicated optimizer columns."""
    cases = [Case(axes, stage, precision=p) for stage in STAGES for p in ("fp64", "bf16")]
    ranks = run_ranks(axes.world_size, after_load, cases)
    for i, _ in enumerate(cases):
        for whole in assemble(results[i] for results in ranks).values():
            assert torch.equal(whole.double(), (torch.arange(whole.numel()) % 64).double().view(whole.shape))


def masters(rank: int, cases: list[Case]) -> list[list[Piece]]:
    grid = build_grid(cases[0].axes)
    return [build(case, grid).values() for case in cases]


@pytest.mark.slow
def test_initial_weights_are_the_same_on_every_layout() -> None:
    """And 16-bit parameters are the rounded fp32 ones, which the master keeps."""
    expected = reference(Case(steps=0))["weights"]
    for axes in (Axes(dp=2), ALL_AXES):
        cases = [Case(axes, stage, precision=p) for stage in STAGES for p in ("fp64", "bf16")]
        ranks = run_ranks(axes.world_size, masters, cases)
        for i, case in enumerate(cases):
            whole = assemble(results[i] for results in ranks)
            for name, tensor in whole.items():
                target = expected[name]
                assert torch.equal(tensor, target.float().bfloat16() if case.precision == "bf16" else target), (
                    case,
                    name,
                )


def test_a_late_gradient_is_an_error() -> None:
    """A bucket that has been reduced in place cannot take another gradient; it must not be lost in silence."""
    here = build(Case())
    here.backward(0)
    with pytest.raises(AssertionError, match="after its bucket was reduced"):
        here.chunks[0]([0]).backward()
