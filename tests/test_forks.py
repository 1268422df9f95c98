"""Tests fork by `tests.forks`."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import torch

from tests.forks import fork

TESTS = Path(__file__).parent
FORK_THEMSELVES = {"forks.py", "test_forks.py", "nursery.py", "cli/chat_process.py", "e2e/halting.py"}
"""`fork` itself and its test; two processes that never compute; one that sets the threads of its children later."""


def test_a_child_computes_after_its_parent_has_computed_in_parallel() -> None:
    """It does not wait for threads that it does not have."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.full((1 << 20,), 3).sum().item() == 3 << 20
        child = fork()
        if not child:
            os._exit(int(torch.full((1 << 20,), 2).sum()) >> 20)
        ended = select.select([os.pidfd_open(child)], [], [], 60)[0]
        if not ended:
            os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    finally:
        torch.set_num_threads(before)


def test_all_tests_fork_so() -> None:
    files = {str(path.relative_to(TESTS)) for path in TESTS.rglob("*.py") if "os.fork()" in path.read_text()}
    assert files == FORK_THEMSELVES
