"""What moves bytes between swap files and memory: the two ways share this interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megazero.disk.layout import Move

ENDED = 0
"""The code of a Failure without errno: nothing more could be read or written."""


class Failure(Exception):
    """A move has failed; nothing is under way any more.

    code    errno, or ENDED
    number  of the move in its list
    done    bytes of it that were moved
    """

    def __init__(self, code: int, number: int = 0, done: int = 0) -> None:
        super().__init__(code, number, done)
        self.code, self.number, self.done = code, number, done


class Broken(Exception):
    """The system has not answered, and may still use the buffers. The transport cannot be used any more."""


class Transport(Protocol):
    """One thread at a time uses it."""

    def run(self, write: bool, moves: Sequence[Move], pieces: int, memory: object) -> list[int]:
        """Execute the moves, whose files are descriptors, and return when all are done.

        Returns the checksum of each of `pieces` pieces. A move's bytes are written with zeros up to the next multiple
        of ALIGNMENT; of a read the rest is dropped. Raises Failure, Broken.

        memory: what keeps the moves' addresses valid. After Broken, a transport that may still use them holds it.
        """

    def close(self) -> None:
        """End its threads and free its memory. It may be called twice."""
