"""Mistakes in a model, its data and its settings: each is one error that names the unit."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megazero
from megazero.config.source import ConfigError
from tests.own.models import Batch, Begin, Layer, mlp, of_mlp, squared
from tests.ranks import config_error, run_ranks

ENDS = nn.Linear(12, 1)


def batch(seed: int = 1) -> Batch:
    return {name: value.float() for name, value in of_mlp(torch.Generator().manual_seed(seed)).items()}


def one_step(units: list[nn.Module], loss: Any = squared, run: dict[str, Any] | None = None, **other: Any) -> None:
    with megazero.engine(megazero.Model(units, loss, **other), run={"precision": "fp32", **(run or {})}) as engine:
        engine.step(batch())


class Returns(nn.Module):
    """A unit that returns what a function makes of its input."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make, self.layer = make, nn.Linear(12, 12)

    def forward(self, hidden: Tensor) -> Any:
        return self.make(self.layer(hidden))


def test_two_parameters_of_one_name_are_named() -> None:
    with pytest.raises(ValueError, match=r"units '1' and '2' both have a parameter layer\.weight"):
        megazero.Model([Begin(), Returns(torch.relu), Returns(torch.relu)], squared, named_by_unit=False)


def between(make: Callable[[Tensor], Any]) -> list[nn.Module]:
    return [Begin(), Returns(make), nn.Linear(12, 1)]


RETURNED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a list of strings": (lambda _: ["a", "b"], r"unit '1' returns a list: a tensor, or a tuple or dict of tensors"),
    "nothing": (lambda _: None, "unit '1' returns a NoneType: a tensor"),
    "a number in a tuple": (lambda x: (x, 3), "unit '1' returns tuple with a int at 1: a tensor"),
    "a word in a dict": (lambda x: {"x": x, "y": "z"}, "unit '1' returns dict with a str at 'y': a tensor"),
    "a dict of another class": (lambda x: OrderedDict(x=x), "unit '1' returns a OrderedDict: another stage would get"),
    "an empty tuple": (lambda _: (), "unit '1' returns an empty tuple: nothing reaches the next unit"),
}


@pytest.mark.parametrize("name", RETURNED)
def test_what_a_unit_returns_is_named(name: str) -> None:
    make, told = RETURNED[name]
    with pytest.raises(ValueError, match=told):
        one_step(between(make))


LOSSES: dict[str, tuple[Callable[..., Any], str]] = {
    "a mean alone": (
        lambda made, batch: (made - batch["y"]).square().mean(),
        r"the loss behind unit '2' returns a tensor \[\] of float32: the sum of the losses and their number",
    ),
    "no sum": (lambda made: (made, 3), r"returns a tensor \[3, 1\] of float32 as the sum of the losses: a 0-dim"),
    "no number": (lambda made: (made.sum(), "3"), "returns a str as the number of the losses: a number is needed"),
    "a whole number as the sum": (lambda made: (made.sum().long(), 3), r"returns a tensor \[\] of int64 as the sum"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_loss_returns_is_named(name: str) -> None:
    loss, told = LOSSES[name]
    with pytest.raises(ValueError, match=told):
        one_step([Begin(), Layer(), nn.Linear(12, 1)], loss)


class Takes(nn.Module):
    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden * mask


class TakesNothing(nn.Module):
    def forward(self, batch: Batch) -> Tensor:
        return batch["x"]


class Counting(nn.Module):
    """A parameter of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


MODELS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no units": (lambda: megazero.Model([]), ValueError, "units is empty"),
    "a function": (lambda: megazero.Model([torch.tanh]), TypeError, "unit '0' is builtin_function_or_method: a module"),
    "a name with a dot": (lambda: megazero.Model({"a.b": Begin()}), ValueError, "unit 'a.b': the name of a unit is"),
    "two inputs": (
        lambda: megazero.Model([Begin(), Takes()]),
        ValueError,
        "unit '1' needs hidden, mask, and there is only the micro-batch, as 'batch', and what the unit before returns",
    ),
    "no input": (lambda: megazero.Model([Begin(), TakesNothing()]), ValueError, "unit '1' takes nothing of what"),
    "a first unit that takes a tensor": (
        lambda: megazero.Model([nn.Linear(5, 12), Layer()]),
        ValueError,
        "unit '0' needs input, and there is only the micro-batch, as 'batch'; or say input= of the model",
    ),
    "no shapes": (lambda: megazero.Model([nn.LazyLinear(3)], squared, input="x"), ValueError, "0.weight has no shape"),
    "no list": (
        lambda: megazero.engine(nn.Sequential(nn.Linear(2, 2))),
        TypeError,
        "model is Sequential: a megazero.Model is needed",
    ),
    "a loss with parameters": (lambda: megazero.Model([Begin()], nn.Linear(1, 1)), ValueError, "loss has parameters"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be_called_is_refused_when_it_is_made(name: str) -> None:
    make, kind, told = MODELS[name]
    with pytest.raises(kind, match=told):
        make()


def test_the_first_unit_may_take_one_tensor_of_the_micro_batch() -> None:
    one_step([nn.Linear(5, 12), Layer(), nn.Linear(12, 1)], input="x")


def test_the_children_of_a_sequential_module_are_units() -> None:
    def sequential() -> nn.Sequential:
        tanh = nn.Tanh()
        return nn.Sequential(nn.Linear(5, 12), tanh, nn.Linear(12, 12), tanh, nn.Linear(12, 1))

    made = sequential()
    with megazero.engine(megazero.from_sequential(made, squared, input="x"), lr=0.0) as engine:
        before = float(engine.evaluate(batch()))
        torch.manual_seed(1)
        values = engine.state_dict()
    plain = sequential()
    plain.load_state_dict(values)
    total, number = squared(plain(batch()["x"]), batch())
    assert before == pytest.approx(float((total / number).detach()), rel=1e-6)
    with pytest.raises(TypeError, match=r"an nn\.Sequential is needed, and not a ModuleList"):
        megazero.from_sequential(nn.ModuleList(mlp()), squared)


class Spoils(nn.Module):
    """Changes what a function chooses in place."""

    seen: Tensor

    def __init__(self, spoil: Callable[[Spoils, Tensor, Batch], Any]) -> None:
        super().__init__()
        self.spoil = spoil
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, hidden: Tensor, batch: Batch) -> Tensor:
        self.spoil(self, hidden, batch)
        return hidden + 1.0


SPOILED: dict[str, tuple[Callable[[Spoils, Tensor, Batch], Any], str]] = {
    "input": (lambda _, hidden, __: hidden.add_(1.0), "unit '1' changes tensor 0 of its input in place"),
    "micro-batch": (
        lambda _, __, batch: batch["y"].add_(1.0),
        "unit '1' changes tensor 'y' of the micro-batch in",
    ),
    "buffer": (lambda unit, _, __: unit.seen.add_(1.0), "unit '1' changes its buffer seen in place"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_what_a_second_forward_needs_as_it_was_may_not_be_changed(name: str) -> None:
    spoil, told = SPOILED[name]
    with pytest.raises(ValueError, match=told):
        one_step([Begin(), Spoils(spoil), nn.Linear(12, 1)], run={"recompute_granularity": "full"})


def test_an_input_may_be_changed_where_no_forward_is_made_again() -> None:
    one_step([Begin(), nn.Linear(12, 12), nn.ReLU(inplace=True), nn.Linear(12, 1)])


def test_a_parameter_without_influence_is_named() -> None:
    layer = Layer()
    layer.idle = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="no gradient reaches parameter idle of unit '1': the loss does not depend"):
        one_step([Begin(), layer, nn.Linear(12, 1)])


def test_what_is_trained_stays_trained() -> None:
    units = mlp()
    with megazero.engine(megazero.Model(units, squared), run={"precision": "fp32"}) as engine:
        engine.step(batch())
        next(units[2].parameters()).requires_grad_(False)
        with pytest.raises(ValueError, match=r"requires_grad of 2\.gain is False now"):
            engine.step(batch())


def test_micro_batches_of_a_step_have_one_shape() -> None:
    with megazero.engine(megazero.Model(mlp(), squared), run={"precision": "fp32"}) as engine:
        short = {name: value[:2] for name, value in batch().items()}
        with pytest.raises(ValueError, match="micro-batch 1 has other names, shapes or dtypes than the first"):
            engine.step([batch(), short])
        with pytest.raises(ValueError, match="batches is empty"):
            engine.step([])
        with pytest.raises(ValueError, match="micro-batch 0 has 'n', which is no tensor"):
            engine.step({**batch(), "n": 3})
        engine.step(short)  # another step may have others


def test_an_engine_has_a_model_alone() -> None:
    model = megazero.Model(mlp(), squared)
    with megazero.engine(model, run={"precision": "fp32"}):
        pass
    with pytest.raises(ConfigError, match="the model is an engine's already"):
        megazero.engine(model, run={"precision": "fp32"})


RUNS: dict[str, tuple[dict[str, Any], str]] = {
    "a field of GPT": ({"hidden_size": 64}, "run has hidden_size: a model of modules reads none of these"),
    "lr": ({"lr": 0.1}, "run has lr: a model of modules reads none of these; lr is an argument of the engine"),
    "sequence parallelism": ({"sequence_parallel": True}, "run has sequence_parallel: a model of modules reads none"),
    "too many stages": ({"pp": 9}, "pp 9 x virtual_stages 1 are 9 model chunks, of 5 units"),
    "a partition of others": ({"partition": [2, 2]}, r"partition is \[2, 2\]: 1 numbers from 1 on are needed"),
    "selective": ({"recompute_granularity": "selective"}, "recompute_granularity is 'selective': of a module nobody"),
    "two optimizers": ({"optimizer": {"optimizer": "sgd"}}, "optimizer is 'adamw', and 'sgd' in run"),
    "another stage": ({"zero_stage": 4}, "zero_stage 4"),
    "a misspelt field": ({"zero_stag": 1}, "zero_stag"),
}


def test_a_run_without_a_precision_has_that_of_the_parameters() -> None:
    with megazero.engine(megazero.Model(mlp(), squared)) as engine:
        assert engine.dtype == torch.float32


@pytest.mark.parametrize("name", RUNS)
def test_settings_that_are_wrong_are_refused(name: str) -> None:
    run, told = RUNS[name]
    with pytest.raises(ConfigError, match=told):
        megazero.engine(megazero.Model(mlp(), squared), run=run)


class Unmade(Layer):
    """Nothing makes the values of its gain."""


def other_model(rank: int, what: str, folder: str) -> tuple[str, list[str]]:
    """(what is said, the files that are there when it is said)."""
    torch.manual_seed(rank if what == "seed" else 1)
    units = mlp()
    if what == "units" and rank:
        units[2] = Layer(12).double()
    if what == "no values":
        with torch.device("meta"):
            units[4:] = [Unmade(), nn.Linear(12, 1)]
    model = megazero.Model(units, squared)
    if what == "taken" and rank:
        model.is_taken = True
    # the last unit is on rank 1 alone where its values are missing
    layout = {"pp": 2} if what == "no values" else {"zero_stage": 1}
    disk = {"offload_optimizer": "nvme", "nvme_path": [folder]}
    words = config_error(lambda: megazero.engine(model, run={"precision": "fp32", **layout, **disk}).close())
    left = [path.name for path in Path(folder).rglob("*") if path.is_file()]
    torch.manual_seed(1)
    megazero.engine(megazero.Model(mlp(), squared)).close()  # the error has ended its groups, and others can be made
    return words, left


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("seed", "begin with other values: seed torch alike"),
        ("units", "have other models"),
        ("no values", "unit '4' (Unmade) is on the meta device"),
        ("taken", "the model is an engine's already"),
    ],
)
def test_ranks_with_other_models_are_refused_on_all(what: str, told: str, tmp_path: Path) -> None:
    for words, left in run_ranks(2, other_model, what, str(tmp_path)):
        assert told in words and not left


def more_on_one(rank: int) -> list[str]:
    torch.manual_seed(1)
    with megazero.engine(megazero.Model(mlp(), squared)) as engine:
        engine.step([batch(), batch()])
        calls = engine.step, engine.evaluate
        return [config_error(lambda call=call: call([batch()] * (3 + rank))) for call in calls]  # type: ignore[misc]


def test_ranks_take_as_many_micro_batches() -> None:
    for of_rank in run_ranks(2, more_on_one):
        assert all("take other numbers of micro-batches" in words for words in of_rank)


def others_on_one(rank: int) -> list[str]:
    """After steps with one micro-batch and with two: rank 0 takes one, and rank 1 two; then other shapes."""
    torch.manual_seed(1)
    with megazero.engine(megazero.Model(mlp(), squared), run={"pp": 2}) as engine:
        engine.step([batch()])
        engine.step([batch()] * 2)
        longer = {name: torch.cat([tensor, tensor]) for name, tensor in batch().items()}
        return [
            config_error(lambda: engine.step([batch()] * (1 + rank))),
            config_error(lambda: engine.step([longer if rank else batch()])),
        ]


def test_stages_take_the_same_micro_batches() -> None:
    for number, shapes in run_ranks(2, others_on_one):
        assert "other numbers of micro-batches in a step: from 1 to 2" in number
        assert "the stages of a pipeline take micro-batches of other names, shapes or dtypes" in shapes


def test_modules_of_an_engine_are_its_own() -> None:
    units = mlp()
    megazero.engine(megazero.Model(units, squared)).close()
    with pytest.raises(ValueError, match="unit '0' is an engine's already, with its parameters: make another one"):
        megazero.Model(units, squared)


class Extra(Layer):
    def get_extra_state(self) -> str:
        return "words"


def test_a_unit_with_state_that_is_no_tensor_is_named() -> None:
    with pytest.raises(ValueError, match="unit '1' has _extra_state in its state_dict, which is no tensor"):
        megazero.Model([Begin(), Extra()])


def test_what_is_no_micro_batch_is_named() -> None:
    with megazero.engine(megazero.Model(mlp(), squared), run={"precision": "fp32"}) as engine:
        with pytest.raises(ValueError, match="micro-batch 0 is Tensor: a mapping from names to tensors is needed"):
            engine.step(torch.zeros(3))
        with pytest.raises(ValueError, match="lr is 'fast': a number from 0 on is needed"):
            engine.step(batch(), lr="fast")
        with pytest.raises(TypeError, match="about holds what JSON does not hold"):
            engine.save("nowhere", {"at": torch.zeros(1)})
        with pytest.raises(KeyError) as raised:
            engine.step({"y": torch.zeros(3, 1)})
        assert "in unit '0' of the model" in raised.value.__notes__


def test_a_tensor_that_the_micro_batch_lacks_is_named() -> None:
    model = megazero.from_sequential(nn.Sequential(nn.Linear(5, 1)), squared, input="points")
    wrong = pytest.raises(ValueError, match="no 'points', which input= names: it has x, y")
    with wrong, megazero.engine(model) as engine:
        engine.step(batch())


UNTRAINABLE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "whole numbers": (Counting, "parameter 0.calls is of torch.int64: numbers that are no floats are a buffer"),
    "sparse": (lambda: nn.Embedding(3, 2, sparse=True), "module 0. has sparse=True"),
}


@pytest.mark.parametrize("name", UNTRAINABLE)
def test_a_parameter_of_another_kind_is_named(name: str) -> None:
    make, words = UNTRAINABLE[name]
    model = megazero.from_sequential(nn.Sequential(make(), nn.Linear(3, 1)), squared, input="x")
    with pytest.raises(ConfigError, match=words):
        megazero.engine(model, run={"precision": "fp32"})


def test_parameters_stay_the_same_objects() -> None:
    """What a program has made of them before, such as a list for a mean of weights, is of the engine's parameters."""
    units = mlp()
    before = [parameter for unit in units for parameter in unit.parameters()]
    with megazero.engine(megazero.Model(units, squared), run={"precision": "fp32"}) as engine:
        values = [parameter.detach().clone() for parameter in before]
        engine.step(batch())
        assert all(old is new for old, new in zip(before, engine_parameters(units), strict=True))
        assert not any(torch.equal(old, new) for old, new in zip(values, before, strict=True))


def engine_parameters(units: list[nn.Module]) -> list[nn.Parameter]:
    return [parameter for unit in units for parameter in unit.parameters()]


USES: dict[str, Callable[[Tensor], object]] = {
    "square": lambda away: away.square(),
    "a list": lambda away: torch.cat([away, away]),
    "by name": lambda away: torch.sum(input=away),
    "data": lambda away: away.data,
    "a copy": copy.deepcopy,
}


@pytest.mark.parametrize("use", USES)
def test_a_parameter_that_is_away_is_named(use: str) -> None:
    """Its memory is freed between computations of its unit: whatever reads it there would read anything."""
    units = mlp()
    run = {"precision": "fp32", "zero_stage": 3, "zero3_persist_below": 0, "offload_params": "cpu"}
    with megazero.engine(megazero.Model(units, squared), run=run) as engine:
        engine.step(batch())
        name, parameter = next((name, each) for name, each in units[1].named_parameters() if each.dim() > 1)
        with pytest.raises(RuntimeError, match=r"parameter (1\.\S+|of the module) is not here: with ZeRO-3"):
            USES[use](parameter)
        with engine.parameters_whole() as whole:
            USES[use](parameter)
            assert torch.equal(parameter.square(), whole[f"1.{name}"].square())
        engine.step(batch())


CHANGES: dict[str, tuple[Callable[[nn.Linear], object], str]] = {
    "another": (
        lambda layer: setattr(layer, "weight", nn.Parameter(torch.ones_like(layer.weight))),
        r"parameter 0\.weight has been replaced since the engine was made",
    ),
    "other data": (
        lambda layer: setattr(layer.weight, "data", torch.ones_like(layer.weight)),
        r"parameter 0\.weight has been replaced since the engine was made",
    ),
    "other numbers": (
        lambda layer: layer.load_state_dict({name: torch.ones_like(each) for name, each in layer.named_parameters()}),
        r"parameter 0\.weight has been changed outside of a step",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_that_a_program_changes_is_named(change: str) -> None:
    """The optimizer would not know, and train something else."""
    layer = nn.Linear(5, 1)
    model = megazero.from_sequential(nn.Sequential(layer), squared, input="x")
    given = {**batch(), "x": batch()["x"].bfloat16()}
    with megazero.engine(model, run={"precision": "bf16"}) as engine:
        engine.step(given)
        assert copy.deepcopy(layer).weight.tolist() == layer.weight.tolist()
        make, words = CHANGES[change]
        with torch.no_grad():
            make(layer)
        with pytest.raises(ValueError, match=words):
            engine.step(given)


def test_a_parameter_that_its_unit_changes_is_named() -> None:
    """An optimizer has its numbers, and would put them back."""
    units = nn.Sequential(nn.Embedding(5, 4, max_norm=0.1), nn.Flatten(), nn.Linear(8, 1))
    model = megazero.from_sequential(units, squared, input="ids")
    given = {"ids": torch.ones(3, 2, dtype=torch.long), "y": torch.zeros(3, 1)}
    wrong = pytest.raises(ValueError, match="unit '0' changes its parameter weight in place")
    with wrong, megazero.engine(model, run={"precision": "fp32"}) as engine:
        engine.step(given)
