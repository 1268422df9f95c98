"""The record of swap files: which slot of each piece belongs to a whole step. One atomic rename replaces it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from megazero.disk.errors import DiskError, SwapDamaged
from megazero.system.durable import replace_file
from megazero.system.reading import BOUNDS, raised_as, read_text

VERSION = 1


class Version(NamedTuple):
    """The content of a piece: its slot and its checksum."""

    slot: int
    sum: int


@dataclass(frozen=True)
class WholeStep:
    """A step whose pieces have all been written.

    step      its number
    versions  of the pieces
    about     what the caller keeps with the step, as JSON
    """

    step: int
    versions: Mapping[str, Version]
    about: Mapping[str, Any]

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> WholeStep:
        """From JSON."""
        return cls(fields["step"], {name: Version(*pair) for name, pair in fields["versions"].items()}, fields["about"])


@dataclass(frozen=True)
class SwapRecord:
    """What is in swap files.

    ids      of the files, in the order of the paths
    weights  of the paths
    pieces   bytes by name, in the order of the layout
    last     the last whole step
    earlier  the one before it. It is whole until something is written after the last. Of ranks that were killed
             together, some may have flipped and others not: this is the step that all of them have
    """

    ids: tuple[str, ...]
    weights: tuple[float, ...]
    pieces: Mapping[str, int]
    last: WholeStep
    earlier: WholeStep | None = None

    @property
    def steps(self) -> list[int]:
        """The numbers of the whole steps, the last one first."""
        return [whole.step for whole in (self.last, self.earlier) if whole is not None]

    def back_to(self, step: int | None) -> SwapRecord:
        """The record whose last step is this one; None: itself. Raises KeyError if there is no such step."""
        if step is None or step == self.last.step:
            return self
        if self.earlier is None or step != self.earlier.step:
            raise KeyError(step)
        return replace(self, last=self.earlier, earlier=None)

    def write(self, path: Path) -> None:
        """Replace the file durably. Raises DiskError; then the earlier record is still there."""
        text = json.dumps({"version": VERSION, **asdict(self)})
        try:
            replace_file(path, f"{_digest(text)}\n{text}\n".encode(), str(os.getpid()))
        except OSError as error:
            raise DiskError.of(f"{path}: the record of step {self.last.step} cannot be written", error) from error

    @classmethod
    def read(cls, path: Path) -> SwapRecord:
        """Raises SwapDamaged for a record that is missing or was not written by `write`."""
        with raised_as(SwapDamaged):
            digest, _, text = read_text(path, BOUNDS.index).partition("\n")
        if digest != _digest(text.rstrip("\n")):
            raise SwapDamaged(f"{path}: its checksum is not that of its {len(text):,} characters")
        fields = json.loads(text)
        if fields["version"] != VERSION:
            raise SwapDamaged(f"{path}: was written by another version of megazero")
        last, earlier = WholeStep.of(fields["last"]), fields["earlier"] and WholeStep.of(fields["earlier"])
        return cls(tuple(fields["ids"]), tuple(fields["weights"]), fields["pieces"], last, earlier)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
