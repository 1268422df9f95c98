"""A rank ends when its launcher does, and finishes its step when it is asked to stop."""

import os
import signal
import subprocess
import sys
import time

import pytest

from megazero.telemetry.watchdog import STOPPING, StopSignals, die_with_parent, parent_alive, started_by_torchrun
from tests.ranks import run_ranks


def test_signals_set_a_flag_and_a_second_one_does_not_kill() -> None:
    before = {kind: signal.getsignal(kind) for kind in STOPPING}
    with StopSignals() as stop:
        assert not stop.raised and stop.name is None
        for kind in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            os.kill(os.getpid(), kind)
        assert stop.raised and stop.name == "SIGTERM"
    assert {kind: signal.getsignal(kind) for kind in before} == before


def test_handlers_come_back_after_an_error() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(RuntimeError), StopSignals():
        raise RuntimeError
    assert signal.getsignal(signal.SIGINT) is before


EARLY = """
import os, sys, time
from megazero.telemetry.watchdog import StopSignals
def end(name):
    print("early", name, flush=True)
    os._exit(0)
with StopSignals(early=end) as stop:
    if "begun" in sys.argv:
        stop.begin()
    print("ready", flush=True)
    sum(range(1 << 24)) if "busy" in sys.argv else None
    while not (stop.raised and "begun" in sys.argv):
        time.sleep(0.01)
    print("asked", stop.name, flush=True)
"""


@pytest.mark.parametrize(
    ("when", "said"), [("waiting", "early SIGTERM"), ("busy", "early SIGTERM"), ("begun", "asked SIGTERM")]
)
def test_before_there_is_something_to_save_a_signal_ends_the_process_at_once(when: str, said: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", EARLY, when], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.stdout.read().strip() == said and process.wait() == 0


@pytest.mark.parametrize(
    ("start", "status"), [("", 0), ("trap '' HUP; ", None)], ids=["a terminal that closes", "nohup"]
)
def test_a_hang_up_stops_the_run_unless_it_is_ignored(start: str, status: int | None) -> None:
    process = subprocess.Popen(
        ["bash", "-c", f'{start}exec "$@"', "bash", sys.executable, "-c", EARLY, "begun"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.read().strip() == ("asked SIGHUP" if status == 0 else "asked SIGTERM")
    process.wait()


def test_the_parent_is_known() -> None:
    assert parent_alive()
    assert parent_alive(os.getppid())
    assert not parent_alive(os.getppid() + 1)


def parent_of_a_rank(rank: int) -> tuple[bool, int]:
    return parent_alive(), os.getppid()


def test_who_forks_a_process_is_its_parent() -> None:
    """Ranks of the pool are forked off a process that has imported the program, and has another parent."""
    ((alive, parent),) = run_ranks(1, parent_of_a_rank)
    assert alive and parent not in (os.getpid(), os.getppid())


def test_only_torchruns_ranks_die_with_their_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not started_by_torchrun()
    assert not die_with_parent()
    assert started_by_torchrun({"TORCHELASTIC_RUN_ID": "none"})


CHILD = """
import sys, time
from megazero.telemetry.watchdog import die_with_parent, parent_alive
asked = die_with_parent()
print(asked, flush=True)
while parent_alive():
    time.sleep(0.02)
print("orphaned", flush=True)
"""


def orphan(torchrun: bool) -> tuple[str, float]:
    """Start a parent that starts the child above; kill the parent with -9; what the child said and how long it lived
    on.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TORCHELASTIC_RUN_ID"}
    if torchrun:
        environment["TORCHELASTIC_RUN_ID"] = "test"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"
    parent = subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, env=environment, text=True)
    assert parent.stdout is not None
    said = parent.stdout.readline()
    parent.kill()
    killed = time.monotonic()
    said += parent.stdout.read()  # ends when the child, which holds the other end, is gone
    parent.wait()
    return said, time.monotonic() - killed


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")
def test_a_rank_dies_with_its_launcher() -> None:
    said, seconds = orphan(torchrun=True)
    assert said == "True\n"
    assert seconds < 5


def test_an_orphan_notices_within_a_step() -> None:
    said, seconds = orphan(torchrun=False)
    assert said == "False\norphaned\n"
    assert seconds < 5
