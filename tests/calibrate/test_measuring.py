"""What the ranks of a calibration measure, where it needs no clock."""

from __future__ import annotations

import pytest
import torch

from megazero.calibrate import measuring
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
