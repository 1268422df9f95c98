"""The order of the micro-batches where the user leaves it open: vertical with parameters on disks, and never so that a
run is refused that would keep its budgets in horizontal order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from megazero.config.derive import micro_batch_order
from megazero.config.parse import parse_run
from megazero.config.placement import applied, as_flags
from megazero.config.schema import Run
from megazero.mpu.axes import axes_of
from megazero.plan.budgets import leaves_order_to_budgets, memory_problems, order_notes, order_within_budgets
from megazero.plan.recompute import activation_peaks
from megazero.plan.step_lists import StageLists
from megazero.plan.step_memory import run_peaks
from tests.program import kinds

MODEL = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 500 --data-path x "
    "--micro-batch-size 1 --global-batch-size 8 --precision bf16"
)
ON_DISKS = "--nvme-path d --nvme-buffer-bytes 1MB --offload-params nvme:0.5"
HORIZONTAL, VERTICAL = "--micro-batch-order horizontal", "--micro-batch-order vertical"


def asked(words: str, ranks: int = 1) -> Run:
    return parse_run(f"{MODEL} {words}".split(), ranks)


@pytest.mark.parametrize(
    ("words", "order"),
    [
        ("", "horizontal"),
        ("--zero-stage 3 --offload-params cpu", "horizontal"),
        ("--offload-optimizer nvme --nvme-path d", "horizontal"),
        (ON_DISKS, "vertical"),
        (f"{ON_DISKS} {HORIZONTAL}", "horizontal"),
        (f"{ON_DISKS} --offload-params cpu --offload-activations nvme {VERTICAL}", "vertical"),
        (f"{ON_DISKS} --micro-batch-order none", "vertical"),
    ],
)
def test_the_order_follows_from_where_parameters_rest(words: str, order: str) -> None:
    run = asked(words)
    assert micro_batch_order(run) == order
    explicit = applied(run, {"micro_batch_order": order})
    lists, others = (StageLists(each, axes_of(each, 1), nccl=False).of(0) for each in (run, explicit))
    assert lists.instructions == others.instructions


def test_one_micro_batch_computes_the_same_in_both_orders_and_reads_no_more() -> None:
    words = f"{ON_DISKS} --micro-batch-size 8"
    runs = [asked(f"{words} {order}") for order in (HORIZONTAL, VERTICAL)]
    lists = [StageLists(run, axes_of(run, 1), nccl=False).of(0).instructions for run in runs]
    horizontal, vertical = ([i for i in own if i.is_compute] for own in lists)
    assert horizontal == vertical and len(vertical) == 2 * (3 + 2)
    reads, others = (sum(i.op == kinds.READ_PARAMETERS for i in own) for own in lists)
    assert 0 < others <= reads
    assert order_notes(runs[0], runs[0], 1) == []


def found(run: Run, ranks: int = 1) -> Mapping[str, Any]:
    return order_within_budgets(run, axes_of(run, ranks), "cpu")


def bytes_on_cpu(words: str, ranks: int) -> int:
    run = asked(words, ranks)
    return max(peaks.total_bytes for peaks in run_peaks(run, axes_of(run, ranks), "cpu"))


@pytest.mark.parametrize(("layout", "ranks"), [("", 1), ("--pp 2 --zero-stage 1", 4)])
def test_groups_are_as_large_as_the_device_has_room_for(layout: str, ranks: int) -> None:
    """At every size's own peak it is that size, and one byte below the next smaller one. No byte more is refused than
    in horizontal order.
    """
    words = f"{ON_DISKS} {layout} --global-batch-size {8 if ranks == 1 else 16}"
    orders = [None, 4, 2]
    peaks = [bytes_on_cpu(f"{words} --vertical-group-size {size or 8}", ranks) for size in orders]
    least = bytes_on_cpu(f"{words} {HORIZONTAL}", ranks)
    assert peaks == sorted({*peaks}, reverse=True) and peaks[-1] > least
    expected = [{"micro_batch_order": "vertical", "vertical_group_size": size} for size in orders]
    expected.append({"micro_batch_order": "horizontal"})
    for number, peak in enumerate(peaks):
        for budget, order in ((peak, expected[number]), (peak - 1, expected[number + 1])):
            run = asked(f"{words} --device-memory-budget {budget}", ranks)
            assert found(run, ranks) == order
            assert memory_problems(applied(run, order), ranks, "cpu") == []
    run = asked(f"{words} --device-memory-budget {least - 1}", ranks)
    assert found(run, ranks) == expected[-1]
    assert memory_problems(applied(run, expected[-1]), ranks, "cpu")


def test_a_budget_of_activations_counts_too() -> None:
    words = f"{ON_DISKS} --recompute-granularity full"
    run = asked(f"{words} {HORIZONTAL}")
    (least,) = activation_peaks(run, axes_of(run, 1), "cpu")
    assert found(asked(f"{ON_DISKS} --activation-memory-budget {least}"))["micro_batch_order"] == "horizontal"
    whole = {"micro_batch_order": "vertical", "vertical_group_size": None}
    assert found(asked(f"{ON_DISKS} --activation-memory-budget 100MB")) == whole


def test_buffers_that_hold_no_unit_are_refused_in_words() -> None:
    """A run whose buffers are too small for activations on disks has no list, and so no peak to compare."""
    run = asked(f"{ON_DISKS} --seq-length 512 --offload-activations nvme --device-memory-budget 20MB")
    assert found(run) == {"micro_batch_order": "horizontal"}
    (problem,) = memory_problems(applied(run, found(run)), 1, "cpu")
    assert problem.startswith("--nvme-buffer-bytes 1000000 does not hold 4 times what a unit")


@pytest.mark.parametrize(
    "words",
    [
        ON_DISKS,
        f"{ON_DISKS} --device-memory-budget 1KB {VERTICAL}",
        f"{ON_DISKS} --device-memory-budget 1KB {HORIZONTAL}",
        f"{ON_DISKS} --device-memory-budget 1KB --vertical-group-size 2",
        "--device-memory-budget 1KB --offload-params cpu",
        "--device-memory-budget 1KB --placement auto --nvme-path d",
    ],
)
def test_what_the_user_gives_is_left_alone(words: str) -> None:
    run = asked(words)
    assert not leaves_order_to_budgets(run) and found(run) == {}


def test_what_is_told() -> None:
    run = asked(ON_DISKS)
    (told,) = order_notes(run, run, 8)
    assert told.startswith("--offload-params nvme:0.5: the order of the micro-batches is vertical")
    assert "for all 8 of them" in told
    fours = applied(run, {"micro_batch_order": "vertical", "vertical_group_size": 4})
    assert "for at most 4 of them" in order_notes(run, fours, 8)[0]
    assert "no room" in order_notes(run, applied(run, {"micro_batch_order": "horizontal"}), 8)[0]
    for given in (asked(""), asked(f"{ON_DISKS} {VERTICAL}"), asked("--placement auto --nvme-path d")):
        assert order_notes(given, given, 8) == []


def test_flags_name_an_order_that_does_not_follow() -> None:
    """Those of a placement that was searched for: it has both orders."""
    assert as_flags({"offload_params": "cpu", "micro_batch_order": "horizontal"}) == "--offload-params cpu"
    on_disks = {"offload_params": "nvme:0.5", "late_update": True}
    assert as_flags(on_disks | {"micro_batch_order": "vertical"}) == "--offload-params nvme:0.5 --late-update"
    assert as_flags(on_disks | {"micro_batch_order": "horizontal"}).endswith(
        "--late-update --micro-batch-order horizontal"
    )
