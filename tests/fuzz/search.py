"""A search for files that break a reader, in a process of its own, because a reader may end it.

Anything but the reader's own error is a finding: another exception, a crash, more than `MEGABYTES` of memory or
`SECONDS` of processor time. hypothesis shrinks such a file, and it is written into the folder `found`. Once the reader
is mended, the file belongs into the corpus.
"""

from __future__ import annotations

import faulthandler
import hashlib
import resource
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.changes import changed_bytes, changed_values
from tests.fuzz.targets import Target

CORPUS = Path(__file__).with_name("corpus")
MEGABYTES = 1024
SECONDS = 3.0


class TooSlow(BaseException):
    """A reader has taken more than its time."""


@contextmanager
def within_bounds() -> Iterator[None]:
    """Ends what takes too much memory by a MemoryError.

    Whatever hangs in a library for a minute ends the process, with a traceback.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (MEGABYTES << 20), before[1]))
    signal.signal(signal.SIGPROF, _stop)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()
        resource.setrlimit(resource.RLIMIT_AS, before)


def _stop(number: int, frame: object) -> None:
    raise TooSlow(f"more than {SECONDS:g} s of processor time")


def tried(name: str, target: Target, data: bytes, last: Path) -> None:
    """Give one file to a reader. last: where the file is kept while it is read, for what ends the process."""
    last.write_bytes(data)
    faulthandler.dump_traceback_later(60, exit=True)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        target.give(data)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    del name


def corpus(name: str) -> list[bytes]:
    """What was found before, by the name of its file."""
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]


def search(name: str, target: Target, examples: int, seed: int, found: Path) -> str | None:
    """Draw so many files. What was found, in words, or None."""
    seeds = [*target.seeds, *corpus(name)]
    drawn = changed_bytes(seeds)
    if target.is_json:
        drawn = st.one_of(changed_values(list(target.seeds)), changed_values(list(target.seeds)), drawn)
    smallest: list[bytes] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=max(1, examples // target.dear),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=hypothesis.Verbosity.quiet,
    )
    @given(drawn)
    def read(data: bytes) -> None:
        try:
            tried(name, target, data, found / f"last-{name}")
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            smallest[:] = [data]
            raise AssertionError("".join(traceback.format_exception(error)[-6:])) from None

    try:
        read()
    except Exception as error:
        if not smallest:
            raise
        path = found / f"{name}-{hashlib.sha256(smallest[0]).hexdigest()[:12]}"
        path.write_bytes(smallest[0])
        return f"{name} (seed {seed}), {path}: {smallest[0][:200]!r}\n{error}"
    return None
