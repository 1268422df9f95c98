"""All faults that are planted."""

from __future__ import annotations

from tests.planted.fault import Fault
from tests.planted.faults import data, files, gradients, model, mpu, steps, training, updates

FAULTS: tuple[Fault, ...] = (
    *mpu.FAULTS,
    *model.FAULTS,
    *gradients.FAULTS,
    *updates.FAULTS,
    *steps.FAULTS,
    *training.FAULTS,
    *data.FAULTS,
    *files.FAULTS,
)
"""In the order in which they are planted."""
