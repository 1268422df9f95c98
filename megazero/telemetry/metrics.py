"""The metrics file: one JSON object per line. A line that was not written whole is removed."""

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
"""The beginning of every line, also of a torn one as far as it was written."""


class ForeignFileError(OSError):
    """The file is no metrics file. It is not changed."""


class MetricsFile:
    """Appends lines to `path`, whose folder it creates. A `Sink`; rank 0 only.

    check  called before each write. It raises if another job has taken over the run; then nothing is written and the
           error is passed on. If it raises OSError (its disk does not answer), the line waits as below
    tell   called with warnings; default: print to stderr

    Each line is one `write` on a descriptor with O_APPEND. So a killed process leaves at most one torn line, the last,
    which is removed when the file is opened again. Lines that cannot be written (a full disk) wait in memory and are
    tried again with the next line. Raises ForeignFileError for a file of another kind, and OSError when the file cannot
    be opened.
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
        """Does nothing: remarks are not written to the metrics file."""

    def write(self, values: Mapping[str, object]) -> None:
        """Append one object as one line. Its values must be finite."""
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
        """Write the waiting lines, each in one call. If a line is written in part, the rest goes on waiting."""

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


def why_not_a_metrics_file(path: str | Path) -> str | None:
    """Why lines cannot be appended to this file; None if it is empty, a metrics file, or no regular file (a pipe)."""
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
    """Remove a torn last line; return the number of bytes removed. A whole line that lacks its newline gets one.

    Raises ForeignFileError for a file of another kind, before it changes anything.
    """
    start, torn = _last_line(descriptor)
    if _is_record(torn):
        os.pwrite(descriptor, b"\n", start + len(torn))
        return 0
    if torn:
        os.ftruncate(descriptor, start)
    return len(torn)


def _last_line(descriptor: int) -> tuple[int, bytes]:
    """(offset, bytes) of the text behind the last newline.

    Raises ForeignFileError unless the first line, the last whole line and that text look like a metrics file's.
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
            f"is no metrics file (it contains {shown!r}), and lines would damage it; name another file"
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
