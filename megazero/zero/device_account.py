"""What a model state has allocated on the device, kept below --device-memory-budget while the program runs.

A plan has said before the start that a step fits (`plan.budgets`). This is the account of what is really allocated by
the step's list: columns, gathered parameters, whole gradients. What it refuses the plan has counted wrongly.
"""

from __future__ import annotations

from collections import Counter


class BudgetExceeded(RuntimeError):
    """An allocation would exceed the device's budget."""


class DeviceAccount:
    """The bytes of a model state on the device, by kind. budget: the most that they may be together; None: any number.

    On a CUDA device the allocator has a limit too, which counts activations as well (`system.device.limit_memory`).
    """

    def __init__(self, budget: int | None = None) -> None:
        self.budget = budget
        self.held = Counter[str]()

    @property
    def nbytes(self) -> int:
        return self.held.total()

    def take(self, kind: str, nbytes: int, what: str) -> None:
        """Count an allocation that is about to be made. what: for the error. Raises BudgetExceeded."""
        if self.budget is not None and self.nbytes + nbytes > self.budget:
            taken = ", ".join(f"{size:,} of {name}" for name, size in self.held.most_common() if size)
            raise BudgetExceeded(
                f"--device-memory-budget {self.budget:,}: {what} would take {nbytes:,} bytes, and the model state has "
                f"{self.nbytes:,} already ({taken or 'nothing'}). By its plan the step fits, so the plan is "
                "wrong: this is a fault of megazero"
            )
        self.held[kind] += nbytes

    def give(self, kind: str, nbytes: int) -> None:
        """Count what has been freed."""
        self.held[kind] -= nbytes
