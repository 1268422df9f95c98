"""What lies where in the swap files of a rank, as one number: files of the same number can be taken over."""

from __future__ import annotations

import hashlib

from megazero.config.schema import Run
from megazero.mpu.axes import Axes, Coordinates
from megazero.plan.shapes import updated_layouts
from megazero.zero.layout import state_groups
from megazero.zero.offload import run_parts
from megazero.zero.shape import state_widths
from megazero.zero.sharding import OPTIMIZER, run_columns


def swap_contents(run: Run, axes: Axes, at: Coordinates, *, nccl: bool) -> str:
    """A digest of what the pieces of the rank at `at` hold: which elements of which parameters, in which columns.

    nccl: as in `plan.shapes.shape_of`.
    """
    layouts, ranges = updated_layouts(run, axes, at, nccl=nccl)
    groups = state_groups(axes, at)
    widths = state_widths(run.optimizer, run.parallel, run.offload)
    resting = run_parts(ranges, layouts, widths, run.offload)
    dtypes = run_columns(run.optimizer, run.parallel, run.offload)
    told = (
        [(column.value, str(dtypes[column])) for column in OPTIMIZER if column in dtypes],
        sorted(axes.sizes.items()),
        (at.pp, at.dp, at.cp, at.tp),
        [
            (
                layout.numel,
                tuple(groups[layout.group]),
                [(entry.spec.name, entry.spec.shape, entry.spec.box, entry.offset) for entry in layout.entries],
                [(part.start, part.stop, part.tier.value) for part in own.parts],
                own.rests.value,
            )
            for layout, own in zip(layouts, resting, strict=True)
        ],
    )
    return hashlib.sha256(repr(told).encode()).hexdigest()
