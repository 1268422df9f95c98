"""Lists of whole steps: what is cut and what is not, and what a list prints."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from megazero.config.parse import parse_run
from megazero.mpu.axes import Coordinates, axes_of
from megazero.pipeline.build import schedules, step_lists
from megazero.plan import step_lists as step_lists_of_run
from megazero.plan.rank_state import RankState
from megazero.plan.step_lists import StageLists
from megazero.plan.traffic import gathered_bytes
from megazero.program import step
from megazero.program.instruction import Instruction, Op, ProgramError
from megazero.program.passes.gathers import place_gathers
from megazero.program.step import Lists
from tests.parity.training import small_model
from tests.program import kinds
from tests.program.made import texts

MICRO_BATCHES = 4
UNITS = 6
"""An embedding, four blocks and a head."""


def lists_of(*flags: str, dp: int = 2, pp: int = 1, stage: int = 0) -> Lists:
    words = [*small_model(4, heads=4), "--pp", str(pp), "--micro-batch-size", "1", "--global-batch-size", str(4 * dp)]
    run = parse_run([*words, *flags], pp * dp)
    axes = axes_of(run, pp * dp)
    return step_lists(run, stage, RankState(run, axes, Coordinates(stage, 0, 0, 0), nccl=False).shape)


def cut_in(instructions: tuple[Instruction, ...], *ops: Op) -> list[int]:
    """The micro-batches whose computations of these kinds are cut by unit; the others must be whole."""
    parts = [[i for i in instructions if i.op in ops and i.micro_batch == number] for number in range(MICRO_BATCHES)]
    for some in parts:
        assert len(some) == 1 if some[0].units is None else len(some) == UNITS
    return [number for number, some in enumerate(parts) if some[0].units is not None]


ALL = [0, 1, 2, 3]
CUTS = [
    # flags, dp, micro-batches that a training step cuts, and that an evaluation cuts
    (["--zero-stage", "0"], 1, [], []),
    (["--zero-stage", "2"], 1, [], []),
    (["--zero-stage", "3"], 1, [], []),
    (["--zero-stage", "0"], 2, [3], []),
    (["--zero-stage", "1"], 2, [0, 3], [0]),
    (["--zero-stage", "2"], 2, ALL, [0]),
    (["--zero-stage", "3"], 2, ALL, ALL),
    (["--zero-stage", "0", "--no-overlap"], 2, [], []),
    (["--zero-stage", "2", "--no-overlap"], 2, [], []),
    (["--zero-stage", "3", "--no-overlap"], 2, ALL, ALL),
    (["--zero-stage", "1", "--zero-shard-size", "1"], 2, [3], []),
]


@pytest.mark.parametrize(
    ("flags", "dp", "training", "evaluation"), CUTS, ids=[f"{' '.join(c[0])} dp {c[1]}" for c in CUTS]
)
def test_only_what_has_to_be_is_cut(flags: list[str], dp: int, training: list[int], evaluation: list[int]) -> None:
    """Backward where something is reduced meanwhile, forward where something is gathered; all else is one graph."""
    lists = lists_of(*flags, dp=dp)
    found = lists.training(MICRO_BATCHES)
    assert cut_in(found, Op.FORWARD) == cut_in(found, Op.BACKWARD) == training
    assert cut_in(lists.evaluation(MICRO_BATCHES), Op.FORWARD) == evaluation
    assert not any(i.is_backward or i.op is Op.NORM for i in lists.evaluation(MICRO_BATCHES))


@pytest.mark.parametrize("zero_stage", ["0", "1", "2", "3"])
def test_a_list_is_its_schedule_and_what_was_placed(zero_stage: str) -> None:
    """Without the units and the instructions on model state, the schedule is left; the order of both is kept."""
    run = parse_run([*small_model(4, heads=4), "--pp", "2", "--pipeline-schedule", "zb-h1"], 4)
    for stage in range(2):
        lists = lists_of("--zero-stage", zero_stage, "--pipeline-schedule", "zb-h1", pp=2, stage=stage)
        kept = [(i.op, i.micro_batch, i.chunk, i.peer) for i in lists.training(5) if i.is_compute or i.is_transfer]
        once = [key for at, key in enumerate(kept) if at == 0 or key != kept[at - 1]]
        assert once == [(i.op, i.micro_batch, i.chunk, i.peer) for i in schedules(run, stage)(5)]


@pytest.mark.parametrize("flags", [["--zero-stage", str(stage)] for stage in range(4)], ids=str)
def test_every_bucket_is_reduced_and_updated_and_the_norm_lies_between(flags: list[str]) -> None:
    lists = lists_of(*flags, "--bucket-size", "1000")
    found = lists.training(MICRO_BATCHES)
    (norm,) = (at for at, i in enumerate(found) if i.op is Op.NORM)
    reduced = {bucket for i in found[:norm] if i.op is Op.REDUCE for bucket in i.buckets}
    updated = [bucket for i in found[norm:] if i.op == kinds.UPDATE for bucket in i.buckets]
    assert sorted(updated) == list(lists.shape.trained) == sorted(reduced) and len(reduced) > 3
    assert not any(i.op is Op.REDUCE for i in found[norm:]) and not any(i.op == kinds.UPDATE for i in found[:norm])


def test_what_a_list_prints() -> None:
    """ZeRO-1 on two ranks with all parameters in one bucket, two micro-batches."""
    units = range(UNITS)
    assert texts(lists_of("--zero-stage", "1").training(2)) == [
        *(f"forward (micro-batch 0, chunk 0, unit {n})" for n in units),
        "backward (micro-batch 0, chunk 0, unit 5)",
        *(f"backward (micro-batch 0, chunk 0, unit {n})" for n in reversed(units[:-1])),
        *(f"forward (micro-batch 1, chunk 0, unit {n})" for n in units),
        *(f"backward (micro-batch 1, chunk 0, unit {n})" for n in reversed(units)),
        "reduce gradients (bucket 0)",
        "norm",
        "update (bucket 0)",
        "gather parameters (bucket 0)",
    ]


def test_a_list_is_made_once() -> None:
    lists = lists_of("--zero-stage", "3")
    assert lists.training(3) is lists.training(3) and lists.evaluation(3) is lists.evaluation(3)
    assert len(lists.training(3)) < len(lists.training(4))


def test_the_default_budget_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that gathers too much is refused, where no budget was given too: on this rank, and in the lists of all."""
    monkeypatch.setattr(
        step, "place_gathers", lambda listed, shape, *_, by_row: place_gathers(listed, shape, 10**9, "step")
    )
    with pytest.raises(ProgramError, match=r"makes \d+ bytes of gathered parameters, the budget is \d+"):
        lists_of("--zero-stage", "3").training(MICRO_BATCHES)
    run = parse_run([*small_model(4, heads=4), "--zero-stage", "3", "--global-batch-size", "8"], 2)
    with pytest.raises(ProgramError, match=r"stage 0: .* makes \d+ bytes of gathered parameters, the budget is \d+"):
        StageLists(run, axes_of(run, 2), nccl=False).check()


def test_the_lists_of_all_stages_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long list takes a second: what checks all stages and what the banner tells look at the same ones."""
    made = Mock(wraps=step.training_step)
    monkeypatch.setattr(step_lists_of_run, "training_step", made)
    run = parse_run([*small_model(4, heads=4), *["--zero-stage", "3", "--pp", "2", "--global-batch-size", "8"]], 4)
    lists = StageLists(run, axes_of(run, 4), nccl=False)
    lists.check()
    assert gathered_bytes(lists, 0) is not None and gathered_bytes(lists, 1) is not None
    assert made.call_count == 2
