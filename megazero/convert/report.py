"""What became of every key of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field

_SHOWN = 12


@dataclass(frozen=True)
class Disagreement:
    """Replicas of one tensor that differed and were averaged in float64.

    key      the tensor's key
    copies   number of replicas
    largest  the largest absolute difference of an element from the mean
    """

    key: str
    copies: int
    largest: float


@dataclass
class ConversionReport:
    """What became of every key, and everything that a user should know.

    mapped    keys of the format that became tensors of ours
    unused    keys that were not used, with the reason
    filled    tensors of ours that the format does not hold, with what was used for them
    replicas  replicas that differed
    apart     other facts that the checkpoint has twice, with different values
    notes     everything else
    """

    mapped: list[str] = field(default_factory=list)
    unused: dict[str, str] = field(default_factory=dict)
    filled: dict[str, str] = field(default_factory=dict)
    replicas: list[Disagreement] = field(default_factory=list)
    apart: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report as lines of text: numbers, and the names of unusual keys."""
        found = [f"keys mapped        {len(self.mapped)}"]
        found += _listed("keys unused", [f"{key} ({why})" for key, why in self.unused.items()])
        found += _listed("tensors filled", [f"{name} ({how})" for name, how in self.filled.items()])
        differing = [f"{r.key}: {r.copies} copies averaged, largest distance {r.largest:.3g}" for r in self.replicas]
        return [
            *found,
            *_listed("replicas differed", differing),
            *(f"note               {note}" for note in self.apart + self.notes),
        ]


def _listed(what: str, items: list[str]) -> list[str]:
    more = [f"    and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
    return [f"{what:<18} {len(items)}", *(f"    {item}" for item in items[:_SHOWN]), *more]
