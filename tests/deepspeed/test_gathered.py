"""`zero.GatheredParameters`: parameters that a program reads and writes, beside plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megazero import deepspeed
from megazero.deepspeed.zero import GatheredParameters
from tests.deepspeed.grids import EXACT, SHARDED, ZERO, config_of, made_steps
from tests.deepspeed.models import CASES, MICRO_BATCHES, OPTIMIZER, Plain
from tests.ranks import run_ranks

NAMES = {
    "tied by hand": ["table.weight", "blocks.1.mix.0.weight", "blocks.1.scale", "frozen.weight", "begin"],
    "perceptron": ["unused.weight", "twice.weight", "norm.bias"],
    "handing on": ["one.weight", "head.bias"],
}
"""By module, what is written: a table that is tied, a frozen matrix, one that is never used, or twice."""


@torch.no_grad()
def write(parameter: nn.Parameter) -> None:
    """Some elements of it."""
    parameter[0] *= -0.5
    parameter.data[-1] += 0.25


def first_values(module: nn.Module) -> None:
    for parameter in module.parameters():
        with torch.no_grad():
            parameter.mul_(0.9)


def plainly(name: str) -> dict[str, Tensor]:
    case = CASES[name]
    module = case.built()
    first_values(module)
    plain = Plain(module, MICRO_BATCHES)
    for step in range(4):
        if step == 2:
            for each in NAMES[name]:
                write(module.get_parameter(each))
        plain.one_step(case, step)
    return plain.module_state_dict()


right_weights = cache(plainly)


def written(rank: int, ranks: int, name: str, zeros: list[str]) -> list[dict[str, Tensor]]:
    """The last rank writes. Others would write something else, which counts for nothing."""
    made, case = [], CASES[name]
    for zero in zeros:
        with TemporaryDirectory() as folder:
            module = case.built()
            with GatheredParameters(module.parameters(), modifier_rank=ranks - 1):
                if rank == ranks - 1:
                    first_values(module)
            config = config_of(ZERO[zero], folder, ranks, optimizer=OPTIMIZER)
            engine, _, _, _ = deepspeed.initialize(model=module, config=config)
            made_steps(engine, case, range(2))
            parameters = [module.get_parameter(each) for each in NAMES[name]]
            with GatheredParameters(parameters, modifier_rank=ranks - 1):
                for parameter in parameters:
                    write(parameter) if rank == ranks - 1 else parameter.data.zero_()
            made_steps(engine, case, range(2, 4))
            with GatheredParameters(module.parameters()):
                read = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
            state = engine.module_state_dict()
            assert all(torch.equal(value, state[name]) for name, value in read.items())
            made.append(state)
            engine.destroy()
    return made


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_trained_on_any_layout(name: str, ranks: int) -> None:
    for of_rank in run_ranks(ranks, written, ranks, name, [*ZERO]):
        for made in of_rank:
            for key, value in right_weights(name).items():
                torch.testing.assert_close(made[key], value, rtol=EXACT, atol=EXACT)


TABLE = "model.transformer.wte.weight"


def halves(rank: int, zero: dict[str, Any], way: str) -> tuple[dict[str, Tensor], float]:
    """The weights in bf16 behind steps between which nothing, the same values, or others are written."""
    case = CASES["language"]
    torch.manual_seed(3)
    module = case.make()
    with TemporaryDirectory() as folder:
        config = config_of(zero, folder, 2, optimizer=OPTIMIZER, bf16={"enabled": True})
        engine, _, _, _ = deepspeed.initialize(model=module, config=config)
        for step in range(4):
            for number in range(2):
                engine.backward(engine(*case.micro_batch(step, number)))
                engine.step()
            weight = module.get_parameter(TABLE)
            if way != "nothing":
                with GatheredParameters(weight, modifier_rank=0), torch.no_grad():
                    weight.copy_(weight.clone())
                    weight[0, 0] = 3.0 if way == "other" else weight[0, 0]
        made = engine.module_state_dict()
        engine.destroy()
    return made, float(made[TABLE][0, 0])


@pytest.mark.parametrize("zero", ["1", "3, host"])
def test_weights_keep_what_16_bits_do_not_hold(zero: str) -> None:
    """Masters of elements that are as they were stay exact."""
    nothing, same, other = (run_ranks(2, halves, ZERO[zero], way) for way in ("nothing", "same", "other"))
    for (left, _), (right, _), (_, value) in zip(nothing, same, other, strict=True):
        assert all(torch.equal(left[key], right[key]) for key in left)
        assert value == 3.0


# --- without values ------------------------------------------------------------------------------------------------


def blank(rank: int) -> list[dict[str, Tensor]]:
    """Modules of `Init`: what a rank has written, then an engine's state."""
    with deepspeed.zero.Init(dtype=torch.float64):
        module = CASES["perceptron"].make()
    values = CASES["perceptron"].built().state_dict()
    with GatheredParameters(module.parameters(), modifier_rank=0):
        if rank == 0:
            for name, parameter in module.named_parameters():
                if name != "last.bias":
                    parameter.data.copy_(values[name])
    assert [name for name, parameter in module.named_parameters() if parameter.is_meta] == ["last.bias"]
    engine = deepspeed.initialize(model=module, config=config_of(SHARDED, "", 2, optimizer=OPTIMIZER))[0]
    engine.eval()(*CASES["perceptron"].micro_batch(0, 0))
    made = engine.module_state_dict()
    engine.destroy()
    return [made, dict(values)]


def test_parameters_without_values_get_those_that_are_written() -> None:
    for made, values in run_ranks(2, blank):
        assert all(torch.equal(made[name], value) for name, value in values.items() if name != "last.bias")
        assert made["last.bias"].abs().max() > 0


def test_a_part_of_values_is_not_enough() -> None:
    with deepspeed.zero.Init():
        layer = nn.Linear(3, 2)
    words = "3 of the 6 elements of a parameter of shape"
    with pytest.raises(ValueError, match=words), GatheredParameters(layer.weight, modifier_rank=0):
        layer.weight.data[0] = 1.0


# --- mistakes ------------------------------------------------------------------------------------------------------


def in_place(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.add_(1.0)


def in_data(parameter: nn.Parameter) -> None:
    parameter.data[0] += 1.0


def in_other_memory(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data + 1.0


def mistaken(rank: int, stage: int, change: Callable[[nn.Parameter], None], writer: int | None) -> str:
    """What is said on each rank where the last one has changed a parameter."""
    module = CASES["perceptron"].built()
    zero = {**SHARDED, "stage": stage}
    engine = deepspeed.initialize(model=module, config=config_of(zero, "", 2, optimizer=OPTIMIZER))[0]
    made_steps(engine, CASES["perceptron"], range(1))
    try:
        with GatheredParameters(module.parameters(), modifier_rank=writer):
            if rank == 1:
                change(module.get_parameter("first.weight"))
    except Exception as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_write_of_nobody_is_an_error(stage: int) -> None:
    for change in (in_place, in_data):
        own, other = reversed(run_ranks(2, mistaken, stage, change, None))
        assert "parameter first.weight has been changed, and nobody has said whose values count" in own
        assert other
    assert "first.weight has got other memory" in run_ranks(2, mistaken, stage, in_other_memory, 1)[1]


def test_a_rank_that_is_none() -> None:
    words, layer = "modifier_rank 1: there are ranks from 0 to 0", nn.Linear(2, 2)
    with pytest.raises(ValueError, match=words), GatheredParameters(layer.parameters(), modifier_rank=1):
        pass
    assert "modifier_rank 2: there are ranks from 0 to 1" in run_ranks(2, mistaken, 1, in_place, 2)[0]


def test_in_the_middle_of_a_step_whole_parameters_can_be_read() -> None:
    for stage, words in ((1, None), (3, "in the middle of a step")):
        module, case = CASES["perceptron"].built(), CASES["perceptron"]
        zero = {**SHARDED, "stage": stage}
        engine = deepspeed.initialize(model=module, config=config_of(zero, "", 1, optimizer=OPTIMIZER))[0]
        engine.backward(engine(*case.micro_batch(0, 0)))
        weight = module.get_parameter("first.weight")
        with pytest.raises(RuntimeError, match="in the middle"), GatheredParameters(weight, modifier_rank=0):
            pass
        if words is None:
            with GatheredParameters(weight):
                assert float(weight.abs().sum()) > 0
        else:
            with pytest.raises(RuntimeError, match=words), GatheredParameters(weight):
                pass
        engine.destroy()


def test_a_copy_of_a_module_with_an_engine_is_free() -> None:
    module = CASES["perceptron"].built()
    engine = deepspeed.initialize(model=module, config=config_of({"stage": 1}, "", 4, optimizer=OPTIMIZER))[0]
    made_steps(engine, CASES["perceptron"], range(1))
    other = copy.deepcopy(module)
    with GatheredParameters(other.parameters(), modifier_rank=0), torch.no_grad():
        other.get_parameter("first.weight").zero_()
    assert float(module.get_parameter("first.weight").abs().sum()) > 0
    made_steps(engine, CASES["perceptron"], range(1, 2))
    engine.destroy()
    with GatheredParameters(module.parameters(), modifier_rank=0), torch.no_grad():
        module.get_parameter("first.weight").zero_()


def test_what_the_engine_has_replaced_is_named() -> None:
    with deepspeed.zero.Init(dtype=torch.float64):
        module = CASES["perceptron"].make()
    old = module.get_parameter("first.weight")
    engine = deepspeed.initialize(model=module, config=config_of(SHARDED, "", 4, optimizer=OPTIMIZER))[0]
    made_steps(engine, CASES["perceptron"], range(1))
    with pytest.raises(ValueError, match="the engine has made another one in its place"), GatheredParameters(old):
        pass
    engine.destroy()
