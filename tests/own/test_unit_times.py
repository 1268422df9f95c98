"""Units divided among stages by the times that rank 0 measures: a clock of the test's own says how long each takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import megazero
from megazero.config.options import build_run
from megazero.config.source import ConfigError
from megazero.own import unit_times
from megazero.own.unit_times import unit_seconds
from tests.own.models import CASES, Batch, Trained, plainly_trained, squared
from tests.own.training import RULE, require_equal, trained_with
from tests.ranks import run_ranks

CLOCK = SimpleNamespace(now=0.0)
BATCH = {"x": torch.ones(3, 5), "y": torch.ones(3), "counts": torch.ones(3)}
HOST = torch.device("cpu")


@contextmanager
def own_clock(factor: float = 1.0) -> Iterator[None]:
    """A context in which time passes in units of `Slow` alone, by this factor."""
    with patch.object(unit_times, "time", SimpleNamespace(perf_counter=lambda: CLOCK.now * factor)):
        yield


class Passing(torch.autograd.Function):
    """Lets time pass in both directions."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        CLOCK.now += forward
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        CLOCK.now += ctx.backward_seconds
        return gradients[0], None, None


class Slow(nn.Module):
    """A linear that takes so many seconds. The first call takes 100 more, as where a kernel is made."""

    def __init__(self, inputs: int, outputs: int, forward: float, backward: float) -> None:
        super().__init__()
        self.linear, self.forward_seconds, self.backward_seconds = nn.Linear(inputs, outputs), forward, backward
        self.first = 100.0

    def forward(self, hidden: Tensor) -> Tensor:
        made = Passing.apply(self.linear(hidden), self.forward_seconds + self.first, self.backward_seconds)
        self.first = 0.0
        return made


SECONDS = [(1.0, 2.0), (2.0, 3.0), (0.5, 0.5), (4.0, 6.0), (1.0, 1.0)]
"""Of the forward and the backward of each unit."""


def slow_units() -> list[nn.Module]:
    widths = (5, 12, 12, 12, 12, 1)
    return [Slow(widths[at], widths[at + 1], *seconds) for at, seconds in enumerate(SECONDS)]


def slow_model() -> megazero.Model:
    torch.manual_seed(2)
    return megazero.Model(slow_units(), squared, input="x")


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_unit_takes_its_forward_and_backward(recomputes: bool) -> None:
    run = build_run({"precision": "fp32", **({"recompute_granularity": "full"} if recomputes else {})})
    with own_clock():
        seconds = unit_seconds(slow_model(), BATCH, run, HOST)
    assert seconds == ([4.0, 7.0, 1.5, 14.0, 2.0] if recomputes else [3.0, 5.0, 1.0, 10.0, 2.0])


def divided_on_rank(rank: int) -> list[int]:
    """Other ranks' clocks run otherwise, and do not count."""
    with own_clock(1.0 if rank == 0 else -1.0), megazero.engine(slow_model(), run={"pp": 3}, timed=BATCH) as engine:
        assert engine.run.parallel.partition is not None
        engine.step([BATCH, BATCH, BATCH])
        return [*engine.run.parallel.partition, *(len(stage.units()) for stage in engine.stages)]


def test_units_are_divided_by_the_times_of_rank_0() -> None:
    """The units take 3, 5, 1, 10 and 2 seconds: 9, 10 and 2, where parameters would say 2, 1 and 2."""
    made = run_ranks(3, divided_on_rank)
    assert [each[:3] for each in made] == [[3, 1, 1]] * 3
    assert [each[3] for each in made] == [3, 1, 1]


def looped_on_rank(rank: int) -> list[int]:
    rows = [{name: tensor[0] for name, tensor in BATCH.items()}] * 6
    run = {"pp": 3, "train_iters": 2, "micro_batch_size": 3, "global_batch_size": 6, "lr_decay_style": "constant"}
    with own_clock(), megazero.training(model=slow_model(), data=rows, timed=True, run=run) as training:
        assert len([*training.steps()]) == 2
        partition = training.engine.run.parallel.partition
        assert partition is not None
        return [*partition]


def test_the_loop_measures_with_its_first_samples() -> None:
    assert run_ranks(3, looped_on_rank) == [[3, 1, 1]] * 3


NAMES = ("mlp", "vision", "tied ends", "tuples", "frozen first", "convolutional")
plain = cache(plainly_trained)


def timed_on_rank(rank: int) -> list[Trained]:
    """With a real clock, whatever it says."""
    of_run = {**RULE, "pp": 2}
    return [trained_with(CASES[name], of_run, timed=CASES[name].micro_batch(0, 0)) for name in NAMES]


def test_what_is_measured_leaves_no_trace() -> None:
    for made in run_ranks(2, timed_on_rank):
        for name, trained in zip(NAMES, made, strict=True):
            require_equal(trained, plain(CASES[name]), name)


def contents(model: megazero.Model) -> dict[str, Any]:
    every = {name: tensor for unit in model.units for name, tensor in unit.tensors()}
    return {name: (tensor.device, tensor.dtype, tensor.grad, tensor._version) for name, tensor in every.items()}


class Counting(nn.Module):
    """A batch norm that trains, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(5), nn.Linear(5, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(nn.functional.dropout(self.norm(hidden), 0.5)).relu_()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_model_is_as_before(device: str) -> None:
    with torch.device(device):
        model = megazero.Model([nn.Linear(5, 5), Counting()], squared, input="x")
    before, drawn = contents(model), torch.get_rng_state()
    seconds = unit_seconds(model, BATCH, build_run({"precision": "fp32"}), HOST)
    assert len(seconds) == 2 and min(seconds) > 0
    assert contents(model) == before and torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_of_transformers(device: str) -> None:
    config = GPTNeoXConfig(
        vocab_size=17, hidden_size=8, num_hidden_layers=2, intermediate_size=12, num_attention_heads=2
    )
    with torch.device(device):
        whole = GPTNeoXForCausalLM(config)
    model = megazero.from_transformers(whole)
    before, ids = contents(model), torch.arange(12).reshape(2, 6)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    seconds = unit_seconds(model, batch, build_run({"precision": "fp32"}), HOST)
    assert len(seconds) == 4 and min(seconds) > 0 and contents(model) == before


def wrong(made: Tensor, batch: Batch) -> tuple[Tensor, str]:
    return made.sum(), "three"


MISTAKES: dict[str, tuple[dict[str, Any], Any, type[Exception], str]] = {
    "both": ({"pp": 2, "partition": [3, 2]}, BATCH, ConfigError, r"partition is \[3, 2\], and timed has the units"),
    "no batch": ({"pp": 2}, 3, ValueError, "micro-batch 0 is int"),
    "no tensor": ({"pp": 2}, {"x": 1}, ValueError, "micro-batch 0 has 'x', which is no tensor"),
}


def refused_on_rank(rank: int) -> list[str]:
    words = []
    for run, batch, kind, _ in MISTAKES.values():
        try:
            megazero.engine(slow_model(), run=run, timed=batch)
        except Exception as error:
            words.append(str(error) if isinstance(error, kind) or rank else f"{type(error)}: {error}")
    return words


def test_mistakes_are_errors_of_all_ranks() -> None:
    here, there = run_ranks(2, refused_on_rank)
    for (*_, expected), words in zip(MISTAKES.values(), here, strict=True):
        assert re.search(expected, words), words
    assert len(there) == len(MISTAKES)
