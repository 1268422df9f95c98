"""Starting N ranks on this host through torch's own launcher, and ending with their status.

torch's launcher ends with status 1 and a traceback when it gets a signal, even if all ranks have saved and ended with
status 0. After a rank's error it writes forty more lines. Here only the ranks get the signals, and the command ends
with their status and prints their messages only.
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
"""Seconds until a signal is sent to the ranks again, because it may come before they exist. A second one has no effect.
"""
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "900"
"""Seconds that ranks have to end when another one has failed. torch's default of 30 is less than a save may take."""
LOOPBACK = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def start_ranks(count: int, command: Sequence[str]) -> int:
    """Run a command as `count` ranks and return their status. Call it on the main thread, before torch is imported."""
    kinds = [kind for kind in STOPPING if kind is not signal.SIGHUP or signal.getsignal(kind) is not signal.SIG_IGN]
    signal.pthread_sigmask(signal.SIG_BLOCK, kinds)  # threads and ranks inherit it; a rank unblocks them in `start`
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
    """Launch the ranks and return their status. The rendezvous is a file that only this user can read, not a port."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # the launcher's own log; this process does nothing else
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
                if failure.exitcode < 0:  # a signal ended it, so it could print nothing itself
                    print(f"rank {rank} was ended by {failure.signal_name()}", file=sys.stderr, flush=True)
            return MISTAKEN if error.get_first_failure()[1].exitcode == MISTAKEN else FAILED
        except SignalException as error:
            print(f"ended by {error.sigval.name}: nothing was saved", file=sys.stderr, flush=True)
            return FAILED
    return 0


def _pass_on(kinds: Sequence[signal.Signals], over: threading.Event) -> None:
    """On a thread: wait for the first of these signals, and send it to the ranks repeatedly until they have ended."""
    kind = signal.sigwait(kinds)
    while not over.is_set():
        for child in _children():
            with suppress(ProcessLookupError):
                os.kill(child, kind)
        over.wait(AGAIN)


def _children() -> list[int]:
    """The ids of the processes that the main thread has started."""
    own = os.getpid()
    try:
        words = Path(f"/proc/{own}/task/{own}/children").read_text()
    except OSError:  # another system, or a kernel without this file
        words = subprocess.run(["pgrep", "-P", str(own)], capture_output=True, text=True, check=False).stdout
    return [int(word) for word in words.split()]
