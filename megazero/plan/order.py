"""The order of the micro-batches where the user leaves it open and there are budgets of memory.

With parameters on disks vertical order reads each unit once for all micro-batches, and keeps the activations of all of
them (`config.derive.micro_batch_order`). Under a budget the groups are as large as there is room for; where not even
small ones have room the order is horizontal. So a run that fits is never refused for an order that nobody asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megazero.config.derive import micro_batch_order
from megazero.config.placement import AUTO, applied
from megazero.config.schema import Run
from megazero.mpu.axes import Axes
from megazero.plan.budget_changes import peaks_within
from megazero.plan.budgets import budgets_of, has_budgets
from megazero.plan.rank_state import micro_batches_of
from megazero.plan.search import Question, search


def leaves_order_to_budgets(run: Run) -> bool:
    """Whether the order of a run's micro-batches depends on its budgets: the user gives neither the order nor a size of
    groups, and parameters rest on disks.
    """
    p = run.parallel
    is_open = p.micro_batch_order is None and p.vertical_group_size is None and run.offload.placement != AUTO
    limited = p.activation_memory_budget is not None or has_budgets(run)
    return is_open and limited and micro_batch_order(run) == "vertical"


def order_within_budgets(run: Run, axes: Axes, kind: str) -> Mapping[str, Any]:
    """The order and the size of its groups, by field: those of the largest groups tried with which the run keeps its
    budgets, each half of the one before; else horizontal order. Empty for a run that does not leave it to budgets, or
    whose vocabulary is not known.

    kind: of device, cpu or cuda. Walks through the lists of a few steps. Communicates nothing.
    """
    if not leaves_order_to_budgets(run) or run.model.vocab_size is None:
        return {}
    budgets = budgets_of(run, kind)

    def fits(order: Mapping[str, Any]) -> bool:
        peaks = peaks_within(applied(run, order), axes, kind, budgets)
        return peaks is not None and all(map(budgets.hold, peaks))

    orders = ({"micro_batch_order": "vertical", "vertical_group_size": size} for size in _sizes(run, axes))
    return next(iter(search(Question[Mapping[str, Any]](fits), orders).best), {"micro_batch_order": "horizontal"})


def _sizes(run: Run, axes: Axes) -> Iterator[int | None]:
    """Sizes of groups, the largest first. None: all of a step."""
    yield None
    size = micro_batches_of(run, axes)
    while size > 2:
        size = -(-size // 2)
        yield size


def order_notes(asked: Run, run: Run, micro_batches: int) -> list[str]:
    """A sentence on the order that follows from parameters on disks; none where the user says which. asked: the run as
    the user has it. run: the same with its order. micro_batches: of a step.
    """
    given = asked.parallel.micro_batch_order is not None or asked.offload.placement == AUTO
    if given or micro_batches < 2 or not run.offload.offload_params.on_disks:
        return []
    words, most = f"--offload-params {run.offload.offload_params}", run.parallel.vertical_group_size
    if micro_batch_order(run) == "horizontal":
        return [
            f"{words}: the order of the micro-batches is horizontal, because the budgets have no room for the "
            "activations of several, so each of them reads all parameters from disks"
        ]
    together = f"all {micro_batches}" if most is None or most >= micro_batches else f"at most {most}"
    return [
        f"{words}: the order of the micro-batches is vertical, so that a layer's parameters are read once for "
        f"{together} of them, whose activations are alive together; with less memory: --vertical-group-size, or "
        "--micro-batch-order horizontal"
    ]
