"""Data that every room's tests may use, and how much of everything runs: docs/testing.md."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.corpus import write_corpus
from tests.costs import Costs
from tests.sampling import thinned
from tests.skips import SkipsAreFailures, in_ci

LONGEST = (
    "tests/parity",
    "tests/e2e",
    "tests/checkpoint",
    "tests/fused_ops",
    "tests/convert",
    "tests/lora",
    "tests/pipeline",
    "tests/zero",
)
"""Rooms whose files come first: where processes of pytest share the files, none is to begin a long one when the others
have ended.
"""
BYTES_PER_WORKER = 4 * 2**30

# On a busy machine an example takes as long as it takes.
settings.register_profile("megazero", deadline=None)
settings.load_profile("megazero")


# A shell that starts the tests in the background has them ignore what some of them send, and so would all that they
# start.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(number, handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("megazero")
    group.addoption(
        "--depth", choices=("check", "test", "all"), default="test", help="how much runs: see docs/testing.md"
    )
    group.addoption(
        "--seed", type=int, metavar="N", help="draws the samples and layouts again that a run with this seed drew"
    )
    group.addoption(
        "--layouts", type=int, metavar="N", help="how many generated layouts each test of tests/parity tries"
    )
    group.addoption(
        "--cpu", type=int, metavar="N", help="list the N tests, files and rooms that took most processor time"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed is None:  # processes that share the tests must draw alike
        config.option.seed = getattr(config, "workerinput", {}).get("seed", random.SystemRandom().randrange(1_000_000))
    if config.option.cpu is not None:
        config.pluginmanager.register(Costs(config.option.cpu), "costs")
    if in_ci():
        config.pluginmanager.register(SkipsAreFailures(), "skips")


def pytest_report_header(config: pytest.Config) -> str:
    return f"--depth {config.option.depth} --seed {config.option.seed}"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["seed"] = node.config.option.seed


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """`-n auto`: a process of pytest per core, each of which may have eight ranks and a compiler in memory.

    With one more, so that none waits for a program, ranks took 1.4 times the processor time that they take with two,
    and nothing was gained.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // BYTES_PER_WORKER))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:], out = thinned(items, config.option.depth, config.option.seed)
    config.hook.pytest_deselected(items=out)
    items.sort(
        key=lambda item: next((n for n, room in enumerate(LONGEST) if item.nodeid.startswith(f"{room}/")), len(LONGEST))
    )


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    """The run's own, for tests that draw samples themselves."""
    return int(pytestconfig.option.seed)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of 200 documents with ids below 1003, each ended by id 0."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "words")
