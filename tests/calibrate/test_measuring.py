"""What the ranks of a calibration measure, where it needs no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from megazero.calibrate import measuring
from megazero.calibrate.effort import GROUPS, MeasuredRun
from megazero.mpu.grid import single_process_grid
from megazero.train.measured_rates import Work


@pytest.mark.parametrize(("threads", "rates", "seconds"), [(1, (), 0.0), (2, (1e5, 4e4), 1.5e-5), (2, (4e4, 1e5), 0.0)])
def test_threads_that_sleep_are_what_a_kernel_takes_more(
    threads: int, rates: tuple[float, ...], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rates: of the kernel alone, and beside a thread with threads of its own. A gain is noise."""
    left = iter(rates)

    def per_second(work: Work, device: torch.device) -> float:
        work.call()
        return next(left)

    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(measuring, "per_second", per_second)
    assert measuring._waking(torch.device("cpu")) == pytest.approx(seconds)
    assert next(left, None) is None


RUN = MeasuredRun((), 1, 0.1, 10_000, 500)


@pytest.mark.parametrize(
    ("kind", "is_first", "order", "memory", "first"),
    [
        ("cpu", True, ["group", "run", "compiler", "run"], {"compiler": 7.0, "group": 30.0}, 10_000 - GROUPS * 30),
        ("cpu", False, ["run", "run"], {}, 10_000),
        ("cuda", True, ["run", "run", "context"], {"context": 400.0}, 10_000),
    ],
)
def test_memory_beside_tensors_is_that_of_the_kind(
    kind: str, is_first: bool, order: list[str], memory: dict[str, float], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card imports no compiler for it. Groups are made before any run, and a context has the kernels of all."""
    done = list[str]()

    def bytes_of(name: str, nbytes: int) -> Callable[[object], int]:
        return lambda _: done.append(name) or nbytes  # type: ignore[func-returns-value]

    monkeypatch.setattr(measuring, "_group_bytes", bytes_of("group", 30))
    monkeypatch.setattr(measuring, "_compiler_bytes", bytes_of("compiler", 7))
    monkeypatch.setattr(measuring.devices, "context_bytes", bytes_of("context", 400))

    def runs() -> Iterator[MeasuredRun]:
        for _ in range(2):
            done.append("run")
            yield RUN

    grid = single_process_grid(torch.device("cpu"))
    timed, beside = measuring.WITH_MEMORY[kind](runs(), grid, is_first)
    later = RUN if kind == "cuda" else replace(RUN, memory=None, free=None)
    assert (done, beside, timed) == (order, memory, [replace(RUN, memory=first), later])
