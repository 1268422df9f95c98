"""In which layouts `megazero verify-layout` looks for a fault, by the fault's file, and which faults it cannot see."""

from __future__ import annotations

from tests.planted.fault import Fault
from tests.planted.unseen import UNSEEN

LOOKED_AT = (
    ("fused_ops/", "tensor rotary"),
    ("megazero/mpu/axes.py", "grid hybrid"),
    ("megazero/mpu/lora.py", "adapters adapters-sequence"),
    ("megazero/mpu/", "tensor sequence grid"),
    ("megazero/model/", "tensor sequence grid rotary packed"),
    ("megazero/pipeline/", "sharded tiers"),
    ("megazero/program/passes/late.py", "late hybrid"),
    ("megazero/program/passes/vertical.py", "disks"),
    ("megazero/program/", "grid sharded tiers hybrid disks gathered"),
    ("megazero/zero/mover.py", "tiers host"),
    ("megazero/zero/", "grid sharded tiers hybrid gathered host"),
    ("megazero/data/", "grid sequence"),
    ("megazero/", "grid sharded"),
)
"""(the beginning of a path, names of layouts), the first that fits. They are proven in this order until one differs."""


def layouts_of(fault: Fault) -> tuple[str, ...]:
    """The names of the layouts in which a fault is looked for; none for one that is not in what a proof runs."""
    if why_unseen(fault):
        return ()
    return tuple(next(names for path, names in LOOKED_AT if fault.path.startswith(path)).split())


def why_unseen(fault: Fault) -> str:
    """Why a proof cannot see a fault; empty if it can."""
    return next((reason for reason, names in UNSEEN if fault.name in names), "")
