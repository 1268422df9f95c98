"""The search for a placement, without processes: never over a budget, and no slower in the simulation than others."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from itertools import product

import pytest

from megazero.config.parse import ConfigError, parse_run
from megazero.config.placement import ROWS, applied
from megazero.config.tiers import Tier
from megazero.config.validate import problems_of
from megazero.mpu.axes import axes_of
from megazero.plan.placed_step import Machine, PlacedStep
from megazero.plan.placement import EQUAL, SWITCHES, PlacementChoice, choose_placement
from megazero.plan.rank_state import stage_bytes
from megazero.plan.search import SearchLimits
from megazero.plan.step_memory import StageMemory, run_peaks
from megazero.plan.step_times import MachineRates
from megazero.program.instruction import LOCAL_LANES, Lane

CARD = MachineRates(1e12, to_host=10e9, to_device=12e9, update=40e9, update_host=2e9, read=2e9, write=1e9, messages=5e9)
SLOW_COPIES = replace(CARD, to_host=1e8, to_device=1e8)
SLOW_UPDATES = replace(CARD, update=1e8)
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 500 --data-path x "
    "--micro-batch-size 1 --precision bf16 --nvme-buffer-bytes 1MB --placement auto"
)
LARGE = "--hidden-size 512 --nvme-buffer-bytes 8MB"
"""More state than the buffers of files take, 32 MiB, in few parts: each is an instruction of every simulated step."""
LAYOUTS = {
    "one rank": ("", 1),
    "ZeRO-1 on two": ("--zero-stage 1", 2),
    "ZeRO-3 on two": ("--zero-stage 3", 2),
    "two stages": ("--pp 2 --pipeline-schedule zb-h1", 4),
    "recompute": ("--recompute-granularity full", 1),
}


def machine(layout: str, rates: MachineRates = CARD, more: str = "", micro_batches: int = 3) -> Machine:
    words, ranks = LAYOUTS[layout]
    batch = micro_batches * min(ranks, 2)
    run = parse_run(f"{MODEL} --global-batch-size {batch} {words} {more}".split(), ranks)
    return Machine(run, axes_of(run, ranks), "cpu", rates, nccl=False)


def static(share: str, activations: str = "none", **switches: object) -> dict[str, object]:
    return {"offload_optimizer": share, "offload_activations": activations, **switches}


PLACED = (
    static("none"),
    static("cpu:0.4"),
    static("nvme", "cpu:0.5"),
    static("cpu", late_update=True),
    static("cpu:0.3", offload_gradients="cpu"),
    static("nvme", "nvme", offload_gradients="nvme", offload_params="cpu"),
)


def need(of: Machine) -> int:
    """Bytes of the device with everything on it."""
    return of.placed({"offload_optimizer": "none"}).device.nbytes


def chosen(of: Machine, budgets: SearchLimits) -> PlacementChoice:
    found = choose_placement(of, budgets)
    for step in filter(None, (found.best, found.next_best)):
        assert budgets.hold(step), (dict(step.settings), step.device, step.host_bytes, step.disk)
        assert problems_of(step.run, of.axes.world_size) == []
    return found


TEN = tuple(f"cpu:{tenths / 10:g}" for tenths in range(1, 11))


@pytest.mark.slow
@pytest.mark.parametrize("rates", [CARD, SLOW_COPIES, SLOW_UPDATES], ids=["card", "slow copies", "slow updates"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sampled(cases=3)
def test_no_slower_than_the_best_of_ten_static_shares(layout: str, rates: MachineRates) -> None:
    """Under 40, 60 and 80 % of what everything on the device takes, and of what can leave it: shares of the optimizer
    state alone, and of both columns. Where none of them fits there may be no placement at all.
    """
    of = machine(layout, rates)
    most, least = need(of), of.placed(static("cpu", "cpu")).device.nbytes
    statics = [of.placed(static(share, other)) for share in TEN for other in ("none", share)]
    fitted = 0
    for percent, floor in product((40, 60, 80), (0, least)):
        budgets = SearchLimits(device=floor + (most - floor) * percent // 100)
        fits = [step.seconds for step in statics if budgets.hold(step)]
        assert not budgets.hold(of.placed(static("none")))
        if fits:
            fitted += 1
            assert chosen(of, budgets).best.seconds <= min(fits) * (1 + EQUAL), (percent, floor)
    assert fitted >= 4


@pytest.mark.slow
@pytest.mark.parametrize("percent", [10, 50])
@pytest.mark.parametrize("rates", [CARD, SLOW_COPIES, replace(CARD, beside=0.1)], ids=["card", "slow copies", "cpu"])
@pytest.mark.parametrize("layout", ["one rank", "ZeRO-3 on two"])
@pytest.mark.sampled(cases=1)
def test_no_slower_than_anything_on_a_grid(layout: str, rates: MachineRates, percent: int) -> None:
    """All tiers and switches, and some shares of the optimizer state and of activations, one by one."""
    of = machine(layout, rates, more="--nvme-path d", micro_batches=2)
    least = min(of.placed(static("cpu", "cpu", offload_gradients=word)).device.nbytes for word in ("none", "cpu"))
    budgets = SearchLimits(device=least + (need(of) - least) * percent // 100)
    shares = ("none", "cpu:0.33", "cpu:0.66", "cpu", "nvme:0.5", "nvme")
    halves, whole = ("none", "cpu:0.5", "cpu", "nvme"), ("none", "cpu", "nvme")
    fits = []
    for optimizer, params, gradients, activations, late, order in product(
        shares, whole, whole, halves, *(values for _, values in SWITCHES)
    ):
        more = {"offload_params": params, "offload_gradients": gradients}
        step = of.placed(static(optimizer, activations, late_update=late, micro_batch_order=order, **more))
        if budgets.hold(step) and not problems_of(step.run, of.axes.world_size):
            fits.append(step.seconds)
    assert len(fits) > 20
    assert chosen(of, budgets).best.seconds <= min(fits) * (1 + EQUAL)


def test_without_budgets_everything_stays_on_a_device_that_updates_quickly() -> None:
    found = chosen(machine("one rank"), SearchLimits()).best
    assert found.flags == ""
    found = chosen(machine("one rank", SLOW_UPDATES), SearchLimits()).best
    assert found.run.offload.offload_optimizer.tier is Tier.HOST


@pytest.mark.slow
def test_the_first_column_gives_way_as_far_as_it_must_and_no_further() -> None:
    """With copies that take long, every hundredth of the state costs time."""
    of = machine("one rank", replace(CARD, update_host=1e7))
    limit = need(of) * 70 // 100
    budgets = SearchLimits(device=limit)
    best = chosen(of, budgets).best
    settings = dict(best.settings)
    tier, _, share = str(settings["offload_optimizer"]).partition(":")
    assert tier == "cpu" and 0 < float(share) < 1
    less = of.placed({**settings, "offload_optimizer": f"cpu:{float(share) - 0.01:g}"})
    assert not budgets.hold_device(less) and best.device.nbytes <= limit < less.device.nbytes


@pytest.mark.slow
def test_disks_where_host_memory_is_too_small() -> None:
    of = machine("one rank", more=f"--nvme-path d {LARGE}", micro_batches=2)
    device = of.placed(static("nvme")).device.nbytes
    roomy = chosen(of, SearchLimits(device)).best
    assert "nvme" not in roomy.flags and roomy.host_bytes > of.placed(static("nvme")).host_bytes
    budgets = SearchLimits(device, of.placed(static("nvme")).host_bytes)
    tight = chosen(of, budgets).best
    assert tight.flags == "--offload-optimizer nvme" and tight.disk > 0
    diskless = replace(of, rates=replace(CARD, read=None, write=None))
    with pytest.raises(ConfigError, match=r"--host-memory-budget .* --nvme-path DIR"):
        choose_placement(diskless, budgets)
    with pytest.raises(ConfigError, match=rf"--nvme-path: .* have 99 bytes of room, .* they take {tight.disk:,};"):
        choose_placement(of, replace(budgets, disk=99))


@pytest.mark.slow
def test_what_does_not_fit_is_an_error_with_the_numbers() -> None:
    of = machine("two stages", more="--nvme-path d")
    every = product(("none", "cpu"), (False, True), ("none", "cpu"), ("none", "cpu", "nvme"))
    least = min(
        of.placed(
            static("cpu", activations, late_update=late, offload_params=params, offload_gradients=gradients)
        ).device.nbytes
        for activations, late, params, gradients in every
    )
    with pytest.raises(ConfigError) as refused:
        choose_placement(of, SearchLimits(device=least // 2))
    (problem,) = refused.value.problems
    assert problem.startswith(f"--device-memory-budget {least // 2:,}: no placement keeps to it; the least")
    assert f" {least:,} bytes, with --offload-optimizer cpu" in problem
    assert choose_placement(of, SearchLimits(device=least)).best.device.nbytes <= least
    with pytest.raises(ConfigError, match=r"--host-memory-budget 9: of the placements .* takes [\d,]+ bytes there"):
        choose_placement(of, SearchLimits(device=least, host=9))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one rank", "two stages"])
def test_the_workspace_of_products_is_left_free(layout: str) -> None:
    """A budget with it chooses what the rest of the budget alone does, and an error names both."""
    of, own = machine(layout), 300_000
    limit = need(of) * 70 // 100
    found, alone = chosen(of, SearchLimits(limit + own, workspace=own)), chosen(of, SearchLimits(limit))
    assert found.best.settings == alone.best.settings and found.looked_at == alone.looked_at
    assert chosen(of, SearchLimits(limit + own)).best.device.nbytes > limit
    with pytest.raises(ConfigError, match=r"a rank takes is [\d,]+ bytes, 300,000 of them for matrix products"):
        choose_placement(of, SearchLimits(device=own + 1000, workspace=own))


@pytest.mark.slow
def test_the_hosts_memory_is_a_limit_without_budgets() -> None:
    """Where device and host are one memory only disks help. Where they are two the device has what it needs."""
    of = machine("one rank", more=f"--nvme-path d {LARGE}", micro_batches=2)
    everything = need(of)
    half = SearchLimits(memory=everything * 3 // 4, is_one=True)
    found = chosen(of, half).best
    assert found.disk > 0 and found.device.nbytes + found.host_bytes <= everything * 3 // 4
    assert chosen(of, replace(half, memory=everything)).best.disk == 0
    assert chosen(of, replace(half, is_one=False)).best.disk == 0
    diskless = replace(of, rates=replace(CARD, read=None, write=None))
    with pytest.raises(ConfigError, match=rf"memory has {half.memory:,} bytes for a rank, .*--nvme-path DIR for"):
        choose_placement(diskless, half)


@pytest.mark.slow
def test_the_same_numbers_give_the_same_choice_and_a_second_best_of_another_kind() -> None:
    limits = SearchLimits(device=need(machine("one rank")) * 65 // 100)
    found = [chosen(machine("one rank"), limits) for _ in range(2)]
    assert found[0].best.settings == found[1].best.settings and found[0].looked_at == found[1].looked_at > 10
    best, other = found[0].best, found[0].next_best
    assert other is not None and other.seconds >= best.seconds / (1 + EQUAL)

    def kind(step: PlacedStep) -> dict[str, object]:
        return {name: str(value).partition(":")[0] for name, value in step.settings}

    assert kind(best) != kind(other)


def test_a_search_makes_no_cycles() -> None:
    """It runs without collections of cyclic garbage, so what is in a cycle would stay until its end."""
    of = machine("one rank")
    budgets = SearchLimits(device=need(of) * 60 // 100)
    gc.collect()
    gc.disable()
    try:
        found = choose_placement(of, budgets)
        assert gc.collect() < found.looked_at > 10, "not as much as an object of each simulated step"
    finally:
        gc.enable()


def test_a_row_for_every_column_that_a_flag_moves() -> None:
    """A new flag that places something needs a row here, or no placement moves it."""
    run = parse_run(MODEL.split(), 1)
    flags = {name for part in (run.offload, run.parallel) for name in vars(part) if name.startswith("offload_")}
    assert {row.field for row in ROWS.values() if row.column} == flags


@pytest.mark.few(cases=2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bytes_are_those_of_the_memory_trace(layout: str) -> None:
    """Without what has left the device: on a CPU the trace counts that, and calls activations in host memory apart. And
    in every tier they are those that budgets of a run are compared with.
    """
    of = machine(layout, more="--nvme-path d --num-layers 6")
    for settings in PLACED:
        run = applied(of.run, settings)
        step = replace(of, run=run, rates=CARD).placed(settings)
        found = []
        for stage, state in enumerate(step.states):
            total = StageMemory(step.lists, stage, state, "cpu").trace.peak.total
            found.append(total - state.elsewhere.memory)
        assert step.device.nbytes == max(found)
        assert step.device.stage == found.index(max(found))
        peaks = run_peaks(run, of.axes, "cpu")
        assert step.device.nbytes == max(peak.device_bytes for peak in peaks)
        assert step.host_bytes == max(peak.host_bytes for peak in peaks)
        assert step.disk == max(peak.disk for peak in peaks)


@pytest.mark.slow
def test_where_processors_are_shared_no_more_leaves_than_must() -> None:
    """The device updates as slowly as its host. With processors of its own the host would update half of the state
    beside it. On the same ones that gains nothing, and late updates do not either.
    """
    for of, leaves in (
        (machine("one rank", replace(SLOW_UPDATES, update_host=1e8)), True),
        (machine("one rank", replace(SLOW_UPDATES, update_host=1e8, beside=0.0)), False),
    ):
        assert bool(chosen(of, SearchLimits()).best.flags) == leaves


@pytest.mark.few(cases=2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_placements_share_is_what_each_would_find_alone(layout: str) -> None:
    """The machine keeps model states and walks by settings. A fresh one has nothing to take them from."""
    shared = machine(layout, more="--nvme-path d")
    shares, whole = ("none", "cpu:0.3", "nvme"), ("none", "nvme")
    for params, gradients, activations, late, order, optimizer in product(
        shares, whole, ("none", "cpu:0.5"), (False, True), ("horizontal", "vertical"), shares
    ):
        more = {"offload_params": params, "offload_gradients": gradients}
        settings = static(optimizer, activations, late_update=late, micro_batch_order=order, **more)
        if problems_of(applied(shared.run, settings), shared.axes.world_size):
            continue
        step, alone = shared.placed(settings), applied(shared.run, settings)
        assert step.states == stage_bytes(alone, shared.axes), settings
        if late and order == "vertical":
            fresh = replace(shared, rates=CARD).placed(settings)
            assert (step.device, step.host_bytes, step.disk) == (fresh.device, fresh.host_bytes, fresh.disk), settings


@pytest.mark.few(cases=2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bound_is_one(layout: str) -> None:
    shared = replace(CARD, update_host=1e9, beside=0.0)
    for rates in (CARD, SLOW_COPIES, SLOW_UPDATES, replace(CARD, write=1e7), shared):
        of = machine(layout, rates, "--nvme-path d --num-layers 3", micro_batches=4)
        for settings in (*PLACED, static("cpu", offload_params="nvme", micro_batch_order="vertical")):
            step = of.placed(settings)
            assert 0 < step.least_seconds <= step.seconds * (1 + 1e-12)


def test_times_are_operations_and_bytes_over_rates() -> None:
    """One block of 12 h^2 weights and its attention, a head of V h, three micro-batches of two samples."""
    words = (
        "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --vocab-size 24 --data-path x "
        "--make-vocab-size-divisible-by 8 --micro-batch-size 2 --global-batch-size 6 --precision fp32 "
        "--disable-bias-linear"
    )
    run = parse_run(words.split(), 1)
    rates = replace(CARD, flops=1e3)
    times = Machine(run, axes_of(run, 1), "cpu", rates, nccl=False).placed({}).times
    forward = 2 * (2 * 16 * 12 * 64 + 4 * 16 * 16 * 8 + 2 * 16 * 24 * 8 + 16 * 8) / 1e3
    assert math.isclose(times.forward[0], forward) and math.isclose(times.backward[0], 2 * forward)
    assert times.per_byte[Lane.HOST] == 1 / rates.update_host and times.update == 1 / rates.update
    assert times.per_byte[Lane.FROM_DISK] == 1 / 2e9 and times.per_byte[Lane.TO_DISK] == 1 / 1e9
    # Plain files take as long as swap files, since nobody measures their folder.
    assert times.per_byte[Lane.FROM_FILES] == 1 / 2e9 and times.per_byte[Lane.TO_FILES] == 1 / 1e9
    assert times.per_byte.keys() >= LOCAL_LANES, "a tier of one's own has lanes that take no time"
