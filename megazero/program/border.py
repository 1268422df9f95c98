"""What a step's list takes over from the step before it, and what it leaves to the step behind it.

On time, a list makes the updates of its own gradients at its end, and nothing crosses the border between two steps but
parameters. With late updates it leaves its gradients and its norm. The next list makes these updates where it comes to
the parameters. Or a list of updates alone makes them, because something else is about to read the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Border:
    """The two ends of a list.

    owed    the step before has left its gradients and its norm. This list makes their updates
    leaves  this list makes no updates of its own gradients: it leaves them, with its norm
    ahead   it has then read the first optimizer state for them already, and so had the step before
            (`program.passes.ahead`)
    """

    owed: bool = False
    leaves: bool = False
    ahead: bool = False

    @property
    def is_late(self) -> bool:
        """Whether the updates in the list are those of the step before. A list that neither takes over nor leaves
        anything makes its own.
        """
        return self.owed or self.leaves


ON_TIME = Border()
FIRST = Border(leaves=True)
"""A step before which nothing is owed: a run's first one, and one behind a list of updates."""
LATE = Border(owed=True, leaves=True)
SETTLING = Border(owed=True)
"""A list of updates alone."""
