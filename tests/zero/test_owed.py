"""Late updates: whoever reads parameters sees updated ones, and updates are made once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from megazero.train.resume import probe_loss
from megazero.zero.actions import OwedUpdates
from megazero.zero.sharding import Column
from tests.parameters import held_fragments, values_of
from tests.parity.training import data_flags, job_on_rank, small_model
from tests.ranks import run_ranks
from tests.train.told import digest

NUMBERS = [
    *("--global-batch-size", "8", "--rampup-batch-size", "4", "4", "16", "--micro-batch-size", "1", "--lr", "1e-2"),
    *("--lr-warmup-iters", "5", "--clip-grad", "0.001", "--bucket-size", "4000", "--precision", "bf16"),
]
"""The rate, the batch and with it the number of micro-batches change from step to step."""


def visits(rank: int, size: int, flags: list[str]) -> list[Any]:
    """What stands between the steps of a run, and what it sees: parameters, tensors that a save writes, losses of
    evaluation, a warm-up.
    """
    job, _ = job_on_rank(rank, size, flags)
    trainer, model = job.trainer, job.state.model
    engine: Any = trainer.engine

    def parameters() -> list[str]:
        with model.reading():
            return digest(piece.values for piece in values_of(nn.ModuleList(job.stages)))

    def whole() -> list[str]:
        model.wait_parameters()
        return digest(model.columns[Column.PARAMETER].held(number) for number in range(len(model.buckets)))

    def weights() -> list[str]:
        return digest(fragment.weight for fragment in held_fragments(job.state.optimizer))

    def warm_up() -> None:
        engine.is_warm[True] = False

    looks: list[Callable[[], object] | None] = [
        None,
        parameters,
        None,
        whole,
        weights if job.state.optimizer.resident else parameters,
        None,
        None,
        trainer.evaluate,
        lambda: probe_loss(job.run, job.probe_engine, job.grid),
        warm_up,
        None,
        lambda: job.state.record(trainer.position),
        parameters,
    ]
    seen: list[Any] = []
    for look in looks:
        values = trainer.train_step(stop=False)
        left = model.owed._left is not None
        assert left == job.run.parallel.late_update
        seen += [float(values.loss), float(values.grad_norm), None if look is None else look()]
        if look not in (None, warm_up, looks[-2]):
            assert model.owed._left is None, "the updates have been made"
    return seen


@pytest.mark.slow
@pytest.mark.sampled(cases=2)
@pytest.mark.parametrize(("zero_stage", "tier"), [("0", "none"), ("1", "none"), ("3", "none"), ("1", "nvme")])
def test_whoever_reads_parameters_sees_updated_ones(zero_stage: str, tier: str, corpus: Path, tmp_path: Path) -> None:
    """And a warm-up between two steps, whose gradients are thrown away, loses nothing."""
    flags = [*small_model(4, heads=4), *NUMBERS, *data_flags(corpus, tmp_path / "cache"), "--train-iters", "50"]
    flags += ["--zero-stage", zero_stage, "--offload-optimizer", tier]
    flags += ["--nvme-path", str(tmp_path)] if tier == "nvme" else []
    on_time, late = (run_ranks(2, visits, 2, words) for words in (flags, [*flags, "--late-update"]))
    assert on_time == late
    states = [seen for seen in on_time[0] if isinstance(seen, list)]
    assert len(states) == 4 and all(one != other for one, other in pairwise(states))


def test_updates_are_made_once() -> None:
    owed, made = OwedUpdates(), list[Any]()
    owed.settle()
    assert owed.take() is None and not made
    first, second = object(), object()
    owed.leave(first, made.append)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="have not been made"):
        owed.leave(second, made.append)  # type: ignore[arg-type]
    assert owed.take() is first and owed.take() is None and not made
    owed.leave(second, made.append)  # type: ignore[arg-type]
    owed.settle()
    owed.settle()
    assert made == [second] and owed.take() is None
