"""What a program does beside the engine's steps, and what units hand to each other beside what they return: an error
with a name, or nothing that differs from plain torch. Each was silent once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megazero
from megazero.config.source import ConfigError
from tests.own.models import Batch, Begin, Layer, mlp, squared
from tests.own.training import RULE
from tests.ranks import last_words, run_ranks

HOST = {"offload_optimizer": "cpu"}


def batch(seed: int = 1) -> Batch:
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {"x": x, "y": x.sum(1).sin(), "counts": torch.ones(3, dtype=torch.float64)}


def model(units: Callable[[], list[nn.Module]] = mlp) -> megazero.Model:
    torch.manual_seed(5)
    made = [unit.double() for unit in units()]
    torch.manual_seed(5)
    return megazero.Model(made, squared)


def engine_of(run: dict[str, Any], units: Callable[[], list[nn.Module]] = mlp, **more: Any) -> megazero.Engine:
    return megazero.engine(model(units), run={**RULE, **run}, **more)


# --- beside what units return ----------------------------------------------------------------------------------------


class Keeping(Layer):
    def forward(self, hidden: Tensor) -> Tensor:
        self.kept = hidden
        return super().forward(hidden)


class Using(Layer):
    """Takes a tensor of another unit by its attribute."""

    def __init__(self, other: Keeping) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + self.others[0].kept


def skipping() -> list[nn.Module]:
    first, *_, last = mlp()
    keeping = Keeping()
    return [first, keeping, Layer(), Using(keeping), last]


def skipped_on_rank(rank: int, run: dict[str, Any]) -> str:
    with engine_of(run, skipping) as engine, pytest.raises(RuntimeError) as raised:
        engine.step([batch(), batch(2)])
    return str(raised.value)


@pytest.mark.parametrize(("ranks", "run"), [(1, HOST), (1, {"zero_stage": 3, "offload_params": "cpu"}), (2, {})])
def test_a_tensor_that_goes_beside_the_units_is_named(ranks: int, run: dict[str, Any]) -> None:
    told = "a gradient reaches unit '1' beside what the unit returns"
    for words in run_ranks(ranks, skipped_on_rank, run) if ranks > 1 else [skipped_on_rank(0, run)]:
        assert told in words


def test_where_units_are_one_graph_it_goes_beside_them() -> None:
    """And is right, which one step of plain torch says."""
    torch.manual_seed(5)
    plain = nn.ModuleList([unit.double() for unit in skipping()])
    hidden: Any = batch()
    for unit in plain:
        hidden = unit(hidden)
    total, number = squared(hidden, batch())
    (total / number).backward()
    norm = torch.nn.utils.get_total_norm([each.grad for each in plain.parameters() if each.grad is not None])
    with engine_of({}, skipping) as engine:
        assert engine.step(batch()).grad_norm.item() == pytest.approx(norm.item(), rel=1e-9)


class Borrowing(Begin):
    """The first unit, which has another unit's weight in a list."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weights = [weight]

    def forward(self, batch: Batch) -> Tensor:
        return super().forward(batch) @ self.weights[0]


def borrowing() -> list[nn.Module]:
    _, layer, *_, last = mlp()
    assert isinstance(layer, Layer)
    return [Borrowing(layer.linear.weight), Layer(), layer, last]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


def counting_twice() -> list[nn.Module]:
    first, layer, *_, last = mlp()
    counting = Counting()
    return [first, counting, layer, counting, last]


def stepped_on_rank(rank: int, run: dict[str, Any], units: Callable[[], list[nn.Module]]) -> None:
    with engine_of(run, units) as engine:
        engine.step([batch(), batch(2)])


def test_a_parameter_of_another_stage_is_named() -> None:
    told = last_words(2, stepped_on_rank, {"pp": 2, "partition": [2, 2]}, borrowing)
    assert "parameter 2.linear.weight is that of a unit on another stage" in told


def test_statistics_of_two_units_are_those_of_one_process() -> None:
    assert "unit '1' changes its buffer norm." in last_words(2, stepped_on_rank, {"pp": 2}, counting_twice)
    stepped_on_rank(0, {}, counting_twice)  # in one process units change them in the order of the model


@pytest.mark.parametrize("of_buffer", [True, False])
def test_two_tensors_in_one_memory_are_named(of_buffer: bool) -> None:
    told = "1.gain and 2.(beside|gain) are two tensors in one memory"
    units = [unit.double() for unit in mlp()]
    first, last = units[1], units[2]
    assert isinstance(first, Layer) and isinstance(last, Layer)
    if of_buffer:
        last.register_buffer("beside", first.gain.detach()[2:])
    else:
        last.gain.data = first.gain.data
    with pytest.raises(ConfigError, match=told):
        megazero.engine(megazero.Model(units, squared), run=RULE)


# --- between steps ---------------------------------------------------------------------------------------------------


def written_on_rank(rank: int, run: dict[str, Any]) -> str:
    own = model()
    with megazero.engine(own, run={**RULE, **run}) as engine:
        engine.step(batch())
        with torch.no_grad():
            next(own.units[1].parameters()).clamp_(-0.1, 0.1)
        try:
            engine.step(batch())
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("ranks", "run"), [(1, HOST), (1, {"late_update": True}), (2, {"zero_stage": 1}), (2, {"zero_stage": 2})]
)
def test_a_write_between_steps_is_named(ranks: int, run: dict[str, Any]) -> None:
    for words in run_ranks(ranks, written_on_rank, run) if ranks > 1 else [written_on_rank(0, run)]:
        assert "parameter 1.gain has been changed outside of a step" in words


@pytest.mark.parametrize("run", [HOST, {"late_update": True}, {**HOST, "late_update": True}])
def test_behind_an_engine_the_modules_have_the_last_update(run: dict[str, Any]) -> None:
    own = model()
    with megazero.engine(own, run={**RULE, **run}) as engine:
        for seed in range(3):
            engine.step(batch(seed))
    plain = model()
    with megazero.engine(plain, run=RULE) as engine:
        for seed in range(3):
            engine.step(batch(seed))
        kept = engine.state_dict()
    made = {name: tensor for unit in own.units for name, tensor in unit.tensors()}
    assert all(torch.allclose(made[name], value, rtol=0, atol=1e-12) for name, value in kept.items())


def test_a_step_behind_an_error_is_refused() -> None:
    with engine_of({}) as engine:
        with pytest.raises(KeyError, match="counts"):
            engine.step({name: tensor for name, tensor in batch().items() if name != "counts"})
        with pytest.raises(RuntimeError, match="has raised an error: its gradients"):
            engine.step(batch())


def test_a_backward_of_the_programs_own_is_named() -> None:
    own = model()
    with megazero.engine(own, run=RULE) as engine:
        engine.step(batch())
        own.units[2].module(torch.ones(2, 12, dtype=torch.float64)).sum().backward()
        with pytest.raises(RuntimeError, match="in a backward that is not the engine's"):
            engine.step(batch())


def test_weights_alone_are_loaded_into_a_new_engine(tmp_path: Path) -> None:
    with engine_of({}) as engine:
        engine.step(batch())
        engine.save(tmp_path)
        with pytest.raises(RuntimeError, match="this engine has made 1 steps"):
            engine.load(tmp_path, weights_only=True)


# --- ranks that differ -----------------------------------------------------------------------------------------------


def other_rate(rank: int) -> None:
    with engine_of({}) as engine:
        engine.step(batch(), lr=0.1 * (rank + 1))


def other_first_rate(rank: int) -> None:
    engine_of({}, lr=0.1 * (rank + 1)).close()


def other_options(rank: int) -> None:
    run = {"precision": "fp64", "clip_grad": 1.0}
    make = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1 * rank)
    megazero.engine(model(), make, run=run).close()


def other_settings(rank: int) -> None:
    engine_of({"clip_grad": 0.5 + rank}).close()


def other_batches(rank: int) -> None:
    with engine_of({"pp": 2}) as engine:
        engine.step(batch(seed=rank))


def other_evaluation(rank: int) -> None:
    with engine_of({"pp": 2}) as engine:
        engine.step(batch())
        engine.evaluate(batch(seed=rank))


DIFFERING: dict[str, tuple[Callable[[int], None], str]] = {
    "rate": (other_rate, "the ranks have other learning rates in a step: from 0.1 to 0.2"),
    "first rate": (other_first_rate, "the ranks have other settings, or options of the optimizer"),
    "options": (other_options, "the ranks have other settings, or options of the optimizer"),
    "settings": (other_settings, "the ranks have other settings, or options of the optimizer"),
    "batches": (other_batches, "the stages of a pipeline take other micro-batches"),
    "evaluation": (other_evaluation, "the stages of a pipeline take other micro-batches"),
}


def differing_on_rank(rank: int) -> list[str]:
    told = []
    for act, _ in DIFFERING.values():
        try:
            act(rank)
        except ConfigError as error:
            told.append(str(error))
    return told


def test_ranks_that_differ_are_refused_on_all() -> None:
    for told in run_ranks(2, differing_on_rank):
        assert len(told) == len(DIFFERING)
        for (_, expected), words in zip(DIFFERING.values(), told, strict=True):
            assert expected in words
