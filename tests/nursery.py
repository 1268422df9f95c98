"""Processes that have imported torch and the program and are forked on demand: a rank starts in a tenth of a second,
instead of three seconds of imports.

    nursery = Nursery("1")            # a process that imports, with this hash seed, and then waits
    pid = nursery.fork(pipe)          # a child of it that serves this pipe with tests.ranks.serve

A nursery starts no threads, so that forking it is safe. Sets of strings have the same order in all children of a
nursery. The ranks of a world are children of two nurseries with different orders, so that a program that sends messages
in the order of a set fails.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMPORTED = (
    *("torch.distributed", "torch.fx.experimental.symbolic_shapes", "torch._dynamo"),
    *("numpy", "yaml", "safetensors.torch", "regex", "pytest", "tests.parity.training"),
)
"""The first backward of any process imports the second, with sympy; its first recomputation imports the third. The last
is the program.
"""


class Nursery:
    """The nursery's handle in the process of the tests. Children inherit the environment at its creation."""

    def __init__(self, hash_seed: str) -> None:
        self.socket, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.nursery", str(theirs.fileno())]
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()

    def fork(self, pipe: Connection) -> int:
        """Fork a child that serves the pipe, close the pipe's end here, and return the child's process id."""
        socket.send_fds(self.socket, [os.fsencode(os.getcwd())], [pipe.fileno()])
        pipe.close()
        told = self.socket.recv(16)
        assert told, f"the nursery of ranks ended with status {self.process.wait()}"
        return int(told)

    def close(self) -> None:
        """End the nursery. Its children end when their pipes close."""
        self.socket.close()
        self.process.wait()


def wait_and_fork(orders: socket.socket) -> None:
    """Fork a child for every request, until the connection closes."""
    from tests.ranks import serve

    for module in IMPORTED:
        importlib.import_module(module)
    gc.freeze()  # garbage collections then do not touch memory that the children share
    signal.signal(signal.SIGCHLD, lambda *_: _bury())
    while True:
        folder, fds, _, _ = socket.recv_fds(orders, 4096, 1)
        if not folder:
            return
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            orders.close()
            os.chdir(folder)
            serve(Connection(fds[0]))
            os._exit(0)
        os.close(fds[0])
        orders.send(str(pid).encode())


def _bury() -> None:
    """Wait for children that have ended, so that their processor time is added to this process's."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


if __name__ == "__main__":
    wait_and_fork(socket.socket(fileno=int(sys.argv[1])))
