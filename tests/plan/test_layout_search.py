"""The search over layouts against all of them, one by one; and the bounds by which it leaves layouts out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from megazero.config.parse import parse_arguments
from megazero.plan.budgets import keeps_all
from megazero.plan.cluster.candidates import OpenRun, Settings, Split
from megazero.plan.cluster.cluster_step import ClusterStep
from megazero.plan.cluster.hardware import known_hardware
from megazero.plan.cluster.layout_flags import setting, settings_words
from megazero.plan.cluster.layout_search import Candidate, LayoutSearch, Turn
from megazero.plan.cluster.least_memory import FILLINGS, LeastMemory, fullest_stages, short_step, state_width
from megazero.plan.cluster.misfit import cheapest_change, short_words
from megazero.plan.cluster.programs import DEEPSPEED_BF16, MEGATRON, OURS, Program
from megazero.plan.placement import EQUAL
from megazero.plan.recompute import activation_peaks
from megazero.plan.step_lists import StageLists
from megazero.plan.step_memory import stage_memories
from megazero.program.simulate import step_time

MODEL = (
    "--num-layers 6 --hidden-size 2048 --num-attention-heads 8 --vocab-size 30003 --seq-length 1024 --precision bf16 "
    "--global-batch-size 24"
)
TIGHT = 3.2e9
"""Bytes of a device on which some layouts of the model fit and some do not."""


def open_run(flags: str, gpus: int, memory: float = 80e9, model: str = MODEL) -> OpenRun:
    cluster = known_hardware().cluster("a100-80gb", gpus, 4, None)
    device = replace(
        cluster.device, memory=memory, constants={**cluster.device.constants, "context": 0.0, "communicators": 0.0}
    )
    parsed = parse_arguments(["--device", "cuda", *model.split(), *flags.split()], None)
    return OpenRun.of(parsed.run, replace(cluster, device=device), parsed.explicit)


def all_steps(asked: OpenRun) -> Iterator[tuple[Split, ClusterStep]]:
    for split in asked.splits():
        for settings, placement in product(asked.computed(split), asked.placed(split, {})):
            run = asked.run_with({**settings, **placement})
            if run is not None:
                yield split, ClusterStep(run, asked.cluster)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [80e9, TIGHT], ids=["roomy", "tight"])
def test_the_search_equals_trying_everything(memory: float) -> None:
    """On four devices, with sequence parallelism and the schedules of one chunk left out to keep the list short."""
    asked = open_run("--virtual-stages 1 --pipeline-schedule 1f1b --no-sequence-parallel", 4, memory)
    fastest, fitting, tried = dict[Split, float](), 0, 0
    for split, step in all_steps(asked):
        tried += 1
        if step.fits:
            fitting += 1
            fastest[split] = min(step.seconds, fastest.get(split, float("inf")))
    assert fitting == tried if memory == 80e9 else 0 < fitting < tried
    search = LayoutSearch(asked, wanted=3)
    steps = search.run().steps
    expected = sorted(fastest.values())[:3]
    assert [step.seconds for step in steps] == pytest.approx(expected, rel=2 * EQUAL)
    assert all(step.fits for step in steps)
    assert search.simulated < tried / 2, "bounds leave most out"


LAYOUTS: tuple[Settings, ...] = (
    {"tp": 1, "pp": 4, "pipeline_schedule": "1f1b", "zero_stage": 1},
    {"tp": 2, "pp": 2, "pipeline_schedule": "interleaved", "virtual_stages": 3, "zero_stage": 2},
    {"tp": 2, "pp": 4, "pipeline_schedule": "zb-h1", "zero_stage": 0, "sequence_parallel": True},
    {"tp": 1, "pp": 2, "pipeline_schedule": "zb-v", "virtual_stages": 2, "zero_stage": 3},
    {"tp": 1, "pp": 8, "pipeline_schedule": "zb-h1", "zero_stage": 1, "num_layers": 14},
    {"tp": 4, "pp": 4, "pipeline_schedule": "1f1b", "zero_stage": 3},
    {"tp": 1, "pp": 2, "pipeline_schedule": "1f1b", "zero_stage": 2, "zero_shard_size": 4},
    {"tp": 1, "pp": 4, "pipeline_schedule": "zb-v", "virtual_stages": 2, "zero_stage": 1},
    {"tp": 1, "pp": 8, "pipeline_schedule": "interleaved", "virtual_stages": 2, "zero_stage": 1, "num_layers": 14},
    {"tp": 4, "pp": 1, "zero_stage": 3, "recompute_granularity": "full"},
    {"tp": 1, "pp": 4, "pipeline_schedule": "gpipe", "zero_stage": 1, "recompute_granularity": "selective"},
    {"tp": 1, "pp": 1, "zero_stage": 2, "offload_optimizer": "cpu"},
    {"tp": 1, "pp": 3, "zero_stage": 1, "late_update": True, "untie_embeddings_and_output_weights": True},
)


ORDERS: tuple[Settings, ...] = (
    {"pp": 2, "pipeline_schedule": "1f1b"},
    {"pp": 2, "pipeline_schedule": "interleaved", "virtual_stages": 2},
    {"pp": 4, "pipeline_schedule": "zb-h1"},
    {"pp": 2, "pipeline_schedule": "zb-v", "virtual_stages": 2},
)


def step_of(settings: Settings, micro_batches: int = 26) -> ClusterStep:
    asked = open_run("", 24 if settings["pp"] == 3 else 16)
    split = settings["tp"] * settings["pp"]
    batch = micro_batches * 2 * asked.cluster.gpus // split
    run = asked.run_with({**settings, "micro_batch_size": 2, "global_batch_size": batch})
    assert run is not None
    return ClusterStep(run, asked.cluster)


@pytest.mark.parametrize("settings", LAYOUTS, ids=lambda settings: f"{settings.get('pipeline_schedule')}")
def test_bounds_hold(settings: Settings) -> None:
    """No step is faster than the bound of its time, and none takes less memory than the bound of its memory."""
    step = step_of(settings)
    exact = 1 + 1e-9
    assert 0.4 * step.seconds < step.least_seconds <= step.seconds * exact
    assert step.least_seconds <= step.scheduled_least * exact or step.run.parallel.zero_stage > 1
    assert 0.4 * step.seconds < step.scheduled_least <= step.seconds * exact
    assert step.scheduled <= step.begun_least * exact <= step.seconds * exact * exact
    bounds = LeastMemory(step.run, step.axes, step.kind)
    states = bounds.states(state_width(step.run, step.axes.shard_size, step.axes.dp))
    assert 0 < bounds.first_activations <= bounds.activations[0]
    for stage, least in zip(bounds.stages, map(sum, zip(states, bounds.activations, strict=True)), strict=True):
        assert 0.3 * step.taken(stage).device_bytes < least <= step.taken(stage).device_bytes


def test_what_host_memory_has_no_room_for_is_left_out_by_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search in which nothing fits would else walk through the lists of all layouts."""
    flags = "--tp 1 --pp 1 --micro-batch-size 1 --offload-optimizer cpu --offload-params cpu --offload-gradients cpu"
    asked = open_run(flags, 2)
    (step, *_) = LayoutSearch(asked, wanted=1).run().steps
    width = state_width(step.run, step.axes.shard_size, step.axes.dp)
    least = LeastMemory(step.run, step.axes, step.kind).away(width)
    assert 0.9 * step.host_bytes < least <= step.host_bytes
    small = replace(asked.cluster, device=replace(asked.cluster.device, host_memory=least - 1.0))
    monkeypatch.setattr(ClusterStep, "taken", None)
    layouts = LayoutSearch(OpenRun.of(asked.run, small, asked.fixed), wanted=1).run()
    assert not layouts.steps and layouts.least is not None and layouts.left_out["does not fit"] == layouts.looked_at


@pytest.mark.parametrize("settings", LAYOUTS, ids=lambda settings: f"{settings.get('pipeline_schedule')}")
def test_a_short_step_says_how_long_the_whole_one_takes(settings: Settings) -> None:
    step = step_of(settings)
    assert step.micro_batches == 26
    lists = StageLists(step.run, step.axes, nccl=True)
    stages = [lists.of(stage) for stage in range(step.axes.pp)]
    shapes = [stage.shape for stage in stages]
    whole = step_time([stage.instructions for stage in stages], step.times, shapes, stages[0].border, 3)
    assert step.seconds == pytest.approx(whole, rel=0.01)
    assert keeps_all(step.run) or short_step(step.run, step.axes, FILLINGS) < 26


@pytest.mark.parametrize("settings", LAYOUTS, ids=lambda settings: f"{settings.get('pipeline_schedule')}")
def test_the_first_of_equal_stages_holds_most(settings: Settings) -> None:
    step = step_of(settings)
    stages = fullest_stages(step.run)
    assert sorted(stage for equal in stages.values() for stage in equal) == [*range(step.axes.pp)]
    for fullest, equal in stages.items():
        assert all(step.taken(stage).device_bytes <= step.taken(fullest).device_bytes for stage in equal)


@pytest.mark.parametrize("settings", LAYOUTS, ids=lambda settings: f"{settings.get('pipeline_schedule')}")
def test_a_short_step_holds_as_much_as_the_whole_one(settings: Settings) -> None:
    step = step_of(settings)
    whole = stage_memories(StageLists(step.run, step.axes, nccl=True), "cuda")
    for stage in step.alike:
        assert step.taken(stage).device_bytes == whole[stage].fullest.nbytes


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: f"{order['pipeline_schedule']}")
@pytest.mark.parametrize("shard", [None, 4])
def test_a_higher_zero_stage_is_never_faster(order: Settings, shard: int | None) -> None:
    """A search leaves out what differs in a higher ZeRO stage from something that fits."""
    steps = [step_of({"tp": 1, **order, "zero_shard_size": shard, "zero_stage": stage}, 10) for stage in (1, 2, 3)]
    first, second, third = (step.seconds for step in steps)
    assert first * (1 - EQUAL) <= second and second * (1 - EQUAL) <= third
    assert first < third, "messages of each micro-batch take time"


@pytest.mark.parametrize(("micro_batches", "is_slower"), [(1, False), (4, False), (5, True)])
def test_zero_3_may_be_faster_where_nothing_hides_its_gathers(micro_batches: int, is_slower: bool) -> None:
    search = LayoutSearch(open_run(f"--pp 4 --global-batch-size {8 * micro_batches}", 16))
    second, third = ({"micro_batch_size": 2, "zero_stage": stage, "zero_shard_size": None} for stage in (2, 3))
    candidates = [Candidate(1, Split(1, 4, 4), settings) for settings in (second, third)]
    assert [search._sends_more(candidate, 1) for candidate in candidates] == [True, is_slower]
    search._push(Turn(5.0, 0, Candidate(1, Split(1, 4, 4), {**second, "zero_stage": 1})))
    assert [search._rivals_least(candidate) for candidate in candidates] == [5.0, 5.0 * is_slower]


def test_what_the_user_says_is_fixed() -> None:
    asked = open_run("--tp 2 --zero-stage 3 --recompute-granularity full --micro-batch-size 3", 8)
    steps = LayoutSearch(asked, wanted=2).run().steps
    assert len(steps) == 2
    for step in steps:
        p, schedule = step.run.parallel, step.run.schedule
        assert (p.tp, p.zero_stage, p.recompute_granularity, schedule.micro_batch_size) == (2, 3, "full", 3)


HYBRID = {(stage, shard) for stage in (1, 2, 3) for shard in (None, 2)} | {(0, None)}


@pytest.mark.parametrize(
    ("program", "schedules", "sequence_parallel", "state", "away"),
    [
        (OURS, {"1f1b", "interleaved", "zb-h1", "zb-v"}, {True, False}, HYBRID, 4),
        (MEGATRON, {"1f1b", "interleaved"}, {True, False}, {(1, None), (1, 2), (0, None)}, 3),
        (DEEPSPEED_BF16, {"1f1b"}, {False}, {(1, None), (0, None)}, 1),
    ],
)
def test_of_another_program_only_what_it_has_is_looked_at(
    program: Program,
    schedules: set[str],
    sequence_parallel: set[bool],
    state: set[tuple[int, int | None]],
    away: int,
) -> None:
    asked, split = replace(open_run("", 16), program=program), Split(2, 2, 4)
    computed, placed = list(asked.computed(split)), list(asked.placed(split, {}))
    assert {settings["pipeline_schedule"] for settings in computed} == schedules
    assert {settings["sequence_parallel"] for settings in computed} == sequence_parallel
    assert {(settings["zero_stage"], settings["zero_shard_size"]) for settings in placed} == state
    assert len(asked.offloads) == away
    fixed = replace(open_run("--zero-stage 3 --sequence-parallel", 16), program=program)
    assert {settings["zero_stage"] for settings in fixed.placed(split, {})} == {3}, "what the user says is fixed"


def test_a_switch_that_is_off_is_named_by_its_negation() -> None:
    run = open_run("--tp 2 --no-sequence-parallel", 8).run
    assert setting(run, "sequence_parallel") == "--no-sequence-parallel"
    assert setting(replace(run, parallel=replace(run.parallel, sequence_parallel=True)), "sequence_parallel") == (
        "--sequence-parallel"
    )


def test_shards_that_the_user_says_are_fixed() -> None:
    asked = open_run("--tp 2 --pp 1 --zero-stage 1 --zero-shard-size 2 --micro-batch-size 3 --no-sequence-parallel", 8)
    (step,) = LayoutSearch(asked, wanted=1).run().steps
    assert (step.run.parallel.zero_shard_size, step.axes.shard_size, step.axes.dp) == (2, 2, 4)


def test_a_budget_of_activations_is_kept_on_every_layout() -> None:
    flags = "--tp 1 --pp 2 --zero-stage 1 --pipeline-schedule 1f1b --micro-batch-size {} --activation-memory-budget {}"
    free = open_run(flags.format(3, 10**12), 4)
    (whole,) = LayoutSearch(free, wanted=1).run().steps
    budget = int(0.7 * max(activation_peaks(whole.run, whole.axes, "cuda")))
    (kept,) = LayoutSearch(open_run(flags.format(3, budget), 4), wanted=1).run().steps
    assert max(activation_peaks(kept.run, kept.axes, "cuda")) <= budget and kept.seconds > whole.seconds
    small = open_run(flags.format(3, 1000), 4)
    none = LayoutSearch(small, wanted=1).run()
    assert not none.steps and "keeps --activation-memory-budget 1,000" in short_words(none, small)
    change = cheapest_change(small)
    assert change is not None and change.words.startswith("in place of --activation-memory-budget 1000: ")


def test_settings_that_are_no_run_are_named() -> None:
    asked = open_run("--tp 1 --pp 1 --zero-stage 1 --zero-shard-size 3 --micro-batch-size 1", 8)
    words = short_words(LayoutSearch(asked, wanted=1).run(), asked)
    assert "no layout of 8 ranks is legal: --zero-shard-size 3 does not divide the 8 data-parallel ranks" in words


def test_offload_is_for_what_does_not_fit_without() -> None:
    small = open_run("--tp 1 --pp 1 --micro-batch-size 1", 1, 8e9)
    whole = LayoutSearch(small, wanted=1).run().steps
    assert whole and not whole[0].run.offload.offload_optimizer
    away = LayoutSearch(open_run("--tp 1 --pp 1 --micro-batch-size 1", 1, 4.5e9), wanted=1).run().steps
    assert away and away[0].run.offload.offload_optimizer and away[0].fits


def test_a_change_that_leaves_little_says_so() -> None:
    """As the star in the table of layouts does."""
    asked = open_run("--tp 1 --pp 1 --micro-batch-size 1 --zero-stage 0 --recompute-granularity full", 1)
    step = ClusterStep(asked.run, asked.cluster)
    for left, little in ((0.1, False), (0.02, True)):
        device = replace(asked.cluster.device, memory=step.memory_bytes / (1 - left))
        words = settings_words(replace(step, cluster=replace(asked.cluster, device=device)))
        assert words.endswith("leaves a few per cent of the memory)") is little


def test_state_that_is_not_tied_is_shared_by_the_replicas_of_its_stage() -> None:
    flags = "--tp 1 --pp 1 --micro-batch-size 1 --zero-stage 3 --untie-embeddings-and-output-weights"
    layouts = LayoutSearch(open_run(flags, 4, 1e9), wanted=1).run()
    whole = LayoutSearch(open_run(flags, 4), wanted=1).run().steps[0]
    state = stage_memories(StageLists(whole.run, whole.axes, nccl=True), "cuda")[0].state
    assert layouts.state.device + layouts.state.away == pytest.approx(
        state.weights + state.gradients + state.optimizer, rel=0.02
    )


def test_state_on_disks_takes_no_host_memory() -> None:
    asked = open_run("--offload-optimizer nvme --nvme-path /x --tp 1 --pp 1 --micro-batch-size 1", 1, 8e9)
    small = replace(asked.cluster, device=replace(asked.cluster.device, host_memory=1e9))
    steps = LayoutSearch(OpenRun.of(asked.run, small, asked.fixed), wanted=1).run().steps
    assert steps and steps[0].host_bytes < 1e9 < steps[0].taken(0).disk


def test_splits_share_heads_and_ranks() -> None:
    splits = open_run("", 12).splits()
    assert {split.tp for split in splits} == {1, 2, 4}, "3 does not divide 8 heads, and a node has 4 devices"
    assert all(split.tp * split.pp * split.dp == 12 and split.pp <= 8 for split in splits)
    assert Split(2, 3, 2) in splits and Split(1, 12, 1) not in splits
