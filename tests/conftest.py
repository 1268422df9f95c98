"""Fixtures for all tests, and how much of everything runs. docs/testing.md explains it."""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path

import pytest

from tests.corpus import write_corpus
from tests.costs import Costs
from tests.ranks import seed_global_generators
from tests.repeats import Repeats, fix_examples, fix_the_order_of_sets, seed_of_the_repository
from tests.sampling import part, thinned
from tests.skips import SkipsAreFailures, in_ci

LONGEST = "parity e2e checkpoint fused_ops convert lora pipeline zero".split()
"""Rooms whose files run first. Processes of pytest share the files, so a long file must not be the last to start."""
BYTES_PER_WORKER = 4 * 2**30


os.environ["HF_HUB_OFFLINE"] = "1"  # no test may depend on a network, nor wait for one


# A shell that starts the tests in the background makes them ignore signals that some tests send. Child processes would
# inherit that.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(number, handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("megazero")
    group.addoption(
        "--depth", choices=("check", "test", "all"), default="test", help="how much runs: see docs/testing.md"
    )
    group.addoption(
        "--seed", type=int, metavar="N", help="draws other samples, layouts and examples than the seed in tests/seed"
    )
    group.addoption("--layouts", type=int, metavar="N", help="how many generated layouts each test of such tries")
    group.addoption(
        "--part", type=part, metavar="K/N", help="run the K-th of N parts of what would run, so that days can share it"
    )
    group.addoption(
        "--failures", type=Path, metavar="FILE", help="add the commands that repeat the failures to this file"
    )
    group.addoption(
        "--cpu", type=int, metavar="N", help="list the N tests, files and rooms that took most processor time"
    )


def pytest_configure(config: pytest.Config) -> None:
    option = config.option
    if option.seed is None:
        option.seed = seed_of_the_repository()
    fix_examples(option.seed)  # before test modules are imported: their own settings are changes of these
    fix_the_order_of_sets(option.seed)
    if not hasattr(config, "workerinput"):  # the process that is told of all tests
        config.pluginmanager.register(Repeats(config), "repeats")
    if option.cpu is not None:
        config.pluginmanager.register(Costs(option.cpu), "costs")
    if in_ci():
        config.pluginmanager.register(SkipsAreFailures(), "skips")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`layouts` marks a test of generated cases, with what draws them, how many there are at each depth, and what is
    added to the seed.
    """
    mark = metafunc.definition.get_closest_marker("layouts")
    if mark is not None:
        option = metafunc.config.option
        count = option.layouts or mark.kwargs[option.depth]
        made = mark.kwargs["draw"](count, option.seed + mark.kwargs["salt"])
        metafunc.parametrize("case", list(made), ids=lambda case: case.name)


def pytest_report_header(config: pytest.Config) -> str:
    return f"--depth {config.option.depth} --seed {config.option.seed}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The number of processes for `-n auto`: one for each core, if each has memory for eight ranks and a compiler.

    One process more was tried, so that no core waits for a program. Ranks then took 1.4 times the processor time, and
    the run was not faster.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // BYTES_PER_WORKER))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    seed_global_generators(item.config.option.seed)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:], out = thinned(items, config.option.depth, config.option.seed)
    if config.option.part is not None:
        items[:], others = config.option.part.of(items)
        out += others
    config.hook.pytest_deselected(items=out)
    order = {f"tests/{room}": number for number, room in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get("/".join(item.nodeid.split("/")[:2]), len(LONGEST)))


def pytest_collection_finish() -> None:
    _keep_what_is_there()


@pytest.hookimpl(trylast=True)  # when the file's fixtures are gone
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        _keep_what_is_there()


def _keep_what_is_there() -> None:
    """Later garbage collections pass over the modules and tests of today: looking at all takes a third of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    """The run's seed, for tests that draw samples themselves."""
    return int(pytestconfig.option.seed)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of a dataset of 200 documents with ids below 1003, each ended by id 0."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "words")
