"""The order of the micro-batches where the user leaves it open: what is told of it, and the one that budgets have room
for, the same on all ranks.
"""

from __future__ import annotations

import json

from megazero.checkpoint.agreement import broadcast_text, raise_on_all_ranks
from megazero.config.derive import micro_batch_order
from megazero.config.placement import AUTO, applied
from megazero.config.schema import Run
from megazero.mpu.grid import ProcessGrid
from megazero.plan.order import leaves_order_to_budgets, order_within_budgets


def ordered_run(run: Run, grid: ProcessGrid) -> Run:
    """The run with the order that rank 0 has found, where it depends on budgets. On a CPU `train.prepare` has found it.
    On a card it depends on what attention keeps, whose body is tried on the rank's own card.

    Then it is a collective of the world: an all-reduce and a broadcast.
    """
    if not leaves_order_to_budgets(run):
        return run
    found, failure = {}, None
    if grid.rank == 0:
        try:
            found = dict(order_within_budgets(run, grid.axes, grid.device.type))
        except Exception as error:
            failure = error
    raise_on_all_ranks(grid.world, grid.device, failure)
    return applied(run, json.loads(broadcast_text(grid.world, grid.device, json.dumps(found)) or "{}"))


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
