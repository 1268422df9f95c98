"""The metrics file: one JSON object per line, whole or not there at all."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from megazero.telemetry.record import StepRecord, finite

_BLOCK = 65536
_BEGINS = b'{"iteration": '
"""How every line begins, a torn one as far as it goes."""


class ForeignFileError(OSError):
    """The file was written by something else; nothing is cut off it and nothing put behind it."""


class MetricsFile:
    """Appends lines to `path`, creating its folder. A `Sink`; rank 0 only.

    Every line is one `write` on a descriptor opened with O_APPEND, so that a killed process leaves at most one torn
    line, the last, which is cut here when the file is opened again. `check` is called before each write; what it raises
    where this run is a leftover and must not write goes through, and nothing is written. Raises ForeignFileError for a
    file of another kind, and OSError when the file cannot be opened.

    What a disk does not take, a full one say, waits in memory and is tried again with the next line; `tell` gets a word
    about it. So does what is to be written while `check` finds no answer (OSError), its disk being away.
    """

    def __init__(
        self, path: str | Path, check: Callable[[], None] | None = None, tell: Callable[[str], None] | None = None
    ) -> None:
        self.path = Path(path)
        self._check, self._tell = check or (lambda: None), tell or _tell_stderr
        self._waiting: deque[bytes] = deque()
        self._behind = False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._regular = stat.S_ISREG(os.fstat(self._descriptor).st_mode)
        if self._regular:
            self._check()
            self._mend()

    def step(self, record: StepRecord) -> None:
        self.write(record.as_json())

    def evaluation(self, iteration: int, losses: dict[str, float]) -> None:
        self.write({"iteration": iteration} | {name: finite(float(loss)) for name, loss in losses.items()})

    def note(self, text: str) -> None:
        """Remarks are not metrics."""

    def write(self, values: Mapping[str, object]) -> None:
        """Append one object as one line."""
        line = json.dumps(values, allow_nan=False, separators=(", ", ": ")).encode() + b"\n"
        self._waiting.append(line)
        self._drain()

    def flush(self, durable: bool) -> None:
        if self._waiting:
            self._drain()
        if durable and self._regular:
            self._trying(lambda: os.fsync(self._descriptor))

    def close(self) -> None:
        if self._descriptor >= 0:
            self.flush(False)
            if self._waiting:
                self._tell(f"WARNING: the last {len(self._waiting)} lines of {self.path} could not be written")
            os.close(self._descriptor)
            self._descriptor = -1

    def _drain(self) -> None:
        """Write the lines that wait, each at once; of one that the disk took in part the rest goes on waiting."""

        def write() -> None:
            self._check()
            while self._waiting:
                written = os.write(self._descriptor, self._waiting[0])
                rest = self._waiting.popleft()[written:]
                if rest:
                    self._waiting.appendleft(rest)

        self._trying(write)

    def _trying(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            if not self._behind:
                self._tell(
                    f"WARNING: {self.path} cannot be written: {error.strerror}. Its lines wait in memory, and each new "
                    "one tries again"
                )
            self._behind = True
        else:
            if self._behind:
                self._tell(f"{self.path} can be written again, and has all lines")
            self._behind = False

    def _mend(self) -> None:
        try:
            mend_last_line(self._descriptor)
        except ForeignFileError as error:
            os.close(self._descriptor)
            raise ForeignFileError(f"{self.path}: {error}") from None


def foreign(path: str | Path) -> str | None:
    """Why lines cannot be put behind what is in this file; None: it is empty, a metrics file, or none that has an end
    (a pipe).
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        return None
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _last_line(descriptor)
    except ForeignFileError as error:
        return str(error)
    finally:
        os.close(descriptor)
    return None


def mend_last_line(descriptor: int) -> int:
    """Cut what a killed process has left of its last line; the number of bytes that were cut. A line that lacks its
    newline only gets it.

    Raises ForeignFileError, before anything is changed.
    """
    start, torn = _last_line(descriptor)
    if _is_record(torn):
        os.pwrite(descriptor, b"\n", start + len(torn))
        return 0
    if torn:
        os.ftruncate(descriptor, start)
    return len(torn)


def _last_line(descriptor: int) -> tuple[int, bytes]:
    """Where what follows the last newline begins, and what it is. Raises ForeignFileError unless the file is ours.

    Looked at are the first line, the last one that is whole and what follows it.
    """
    end = os.lseek(descriptor, 0, os.SEEK_END)
    head, first = os.pread(descriptor, _BLOCK, 0), max(0, end - _BLOCK)
    tail = os.pread(descriptor, _BLOCK, first)
    *_, whole, torn = [b"", *tail.split(b"\n")]
    begun = torn.startswith(_BEGINS) or _BEGINS.startswith(torn)
    lines = [] if end == len(torn) else [head.partition(b"\n")[0], whole]
    if not begun or not all(_is_record(line) for line in lines):
        shown = (torn if not begun else next(line for line in lines if not _is_record(line)))[:40]
        raise ForeignFileError(
            f"is no metrics file (it holds {shown!r}), and would be damaged by one; name another file"
        )
    return end - len(torn), torn


def _is_record(line: bytes) -> bool:
    """Whether a line is an object of a metrics file."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and isinstance(record.get("iteration"), int)


def _tell_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
