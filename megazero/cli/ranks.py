"""N ranks of this host, started through torch's own launcher, and how they end.

torch's launcher ends with 1 and a traceback when it gets a signal, also where all ranks have saved and left with 0. It
writes forty lines behind what a failing rank has said. Here signals reach the ranks alone, and the command ends with
their status and their words.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megazero.system.status import FAILED, MISTAKEN
from megazero.telemetry.watchdog import STOPPING

AGAIN = 1.0
"""Seconds until ranks are told once more: a signal may come before there are any. Being told twice changes nothing."""
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "900"
"""Seconds that ranks have to end when another has failed; torch's own 30 are less than a save takes."""
LOOPBACK = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def start_ranks(count: int, command: Sequence[str]) -> int:
    """Run a command as `count` ranks; their status. It is to be called before torch is imported, on the main thread."""
    kinds = [kind for kind in STOPPING if kind is not signal.SIGHUP or signal.getsignal(kind) is not signal.SIG_IGN]
    signal.pthread_sigmask(signal.SIG_BLOCK, kinds)  # for threads and ranks, too; a rank unblocks them when it listens
    over = threading.Event()
    threading.Thread(target=_pass_on, args=(kinds, over), name="signals", daemon=True).start()
    os.environ.setdefault(*SHUTDOWN)
    if Path("/sys/class/net/lo").is_dir():
        for name in LOOPBACK:
            os.environ.setdefault(name, "lo")
    try:
        return _launched(count, command)
    finally:
        over.set()


def _launched(count: int, command: Sequence[str]) -> int:
    """The rendezvous is a file that nobody else can read, so that no port is open for it."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # of this process, which does nothing else
    with tempfile.TemporaryDirectory(prefix="megazero-ranks-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=os.urandom(16).hex(),
            rdzv_backend="c10d",
            rdzv_endpoint=f"{folder}/rendezvous",
            rdzv_configs={"store_type": "file"},
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle="SIGQUIT",
        )
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            for rank, failure in sorted(error.failures.items()):
                if failure.exitcode < 0:  # it could say nothing itself
                    print(f"rank {rank} was ended by {failure.signal_name()}", file=sys.stderr, flush=True)
            return MISTAKEN if error.get_first_failure()[1].exitcode == MISTAKEN else FAILED
        except SignalException as error:
            print(f"ended by {error.sigval.name}: nothing was saved", file=sys.stderr, flush=True)
            return FAILED
    return 0


def _pass_on(kinds: Sequence[signal.Signals], over: threading.Event) -> None:
    """On a thread: wait for the first of these signals, and tell it to the ranks until they are gone."""
    kind = signal.sigwait(kinds)
    while not over.is_set():
        for child in _children():
            with suppress(ProcessLookupError):
                os.kill(child, kind)
        over.wait(AGAIN)


def _children() -> list[int]:
    """Numbers of the processes that the main thread has started."""
    own = os.getpid()
    try:
        words = Path(f"/proc/{own}/task/{own}/children").read_text()
    except OSError:  # not on Linux, or its kernel does not say
        words = subprocess.run(["pgrep", "-P", str(own)], capture_output=True, text=True, check=False).stdout
    return [int(word) for word in words.split()]
