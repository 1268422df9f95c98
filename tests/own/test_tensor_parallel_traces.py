"""What the comparison of cut units with whole ones sees beside a step, and that it leaves no trace."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megazero
from megazero.own.engine import Engine
from tests.own.models import RATE, Batch, Case, Trained, plainly_trained
from tests.own.parallel_models import WIDTH, WORDS, Block, Gated, Table, entropy, of_words
from tests.own.training import RULE, require_equal, trained_with
from tests.ranks import run_ranks


class Counting(Gated):
    """Each call of it is louder."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(hidden) * (1 + 0.01 * self.calls)


class Skipping(Gated):
    """Which Python's generator leaves out at times."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) if random.random() < 0.6 else hidden * 0.5


class Stateful(Gated):
    """Which reads and changes a buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.rand(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        made = super().forward(hidden) + self.mean
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * hidden.mean((0, 1)))
        return made


class Observing(Gated):
    """Whose buffer has the largest number of what a column has cut."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up(hidden).chunk(2, -1)
        if self.training:
            self.largest.copy_(gate.detach().abs().amax())
        return self.down(F.silu(gate) * up)


class OverAll(Gated):
    """With a norm over what a column has cut, in evaluations or everywhere."""

    def __init__(self, *, everywhere: bool) -> None:
        super().__init__()
        self.everywhere = everywhere

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up(hidden).chunk(2, -1)
        inner = gate * up
        return self.down(F.layer_norm(inner, inner.shape[-1:]) if self.everywhere or not self.training else inner)


def around(inner: nn.Module) -> list[nn.Module]:
    return [Table(), inner, nn.Linear(WIDTH, WORDS)]


def encoder() -> list[nn.Module]:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 36, dropout=0.0, batch_first=True)
    vars(layer)["tp_plan"] = {"linear1": "column", "linear2": "row"}
    return around(layer)


def drying_later() -> list[nn.Module]:
    """A dropout of what is cut, which the plan does not name."""
    block = Block()
    vars(block.attention)["tp_plan"] = {name: word for name, word in block.attention.tp_plan.items() if name != "dry"}
    return around(block)


def trained(rank: int, name: str, run: dict[str, Any], is_measured: bool) -> Trained:
    random.seed(3)
    case = RIGHT[name]
    first = [case.micro_batch(0, number) for number in range(case.micro_batches)] if is_measured else None
    return trained_with(case, {**RULE, **run}, timed=None if first is None else first[0], example=first)


RIGHT: Mapping[str, Case] = {
    name: Case(units, entropy, of_words, steps=4)
    for name, units in {
        "a layer that takes weights in evaluations": encoder,
        "a counter": lambda: around(Counting()),
        "draws of Python": lambda: around(Skipping()),
        "a buffer that is read and changed": lambda: around(Stateful()),
    }.items()
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_comparison_leaves_no_trace(name: str) -> None:
    random.seed(3)
    expected = plainly_trained(RIGHT[name])
    for rank, made in enumerate(run_ranks(2, trained, name, {"tp": 2}, False)):
        require_equal(made, expected, f"{name}, rank {rank}")


@pytest.mark.parametrize("is_measured", [False, True])
@pytest.mark.parametrize("name", ["a counter", "draws of Python"])
def test_a_look_at_units_leaves_no_trace(name: str, is_measured: bool) -> None:
    """Neither that of stages, which find out what they send each other, nor a measurement of time and memory."""
    random.seed(3)
    expected = plainly_trained(RIGHT[name])
    for rank, made in enumerate(run_ranks(2, trained, name, {"pp": 2}, is_measured)):
        require_equal(made, expected, f"{name}, rank {rank}")


# --- what is seen beside the first micro-batch -----------------------------------------------------------------------


def steps(engine: Engine, number: int = 1) -> None:
    for step in range(number):
        engine.step([of_words(torch.Generator().manual_seed(step))])


def evaluated(engine: Engine) -> None:
    engine.evaluate([of_words(torch.Generator().manual_seed(1))])


def evaluated_behind(engine: Engine) -> None:
    steps(engine)
    evaluated(engine)


def masked_first(engine: Engine) -> None:
    """Of the first micro-batch no answer counts."""
    batches = [of_words(torch.Generator().manual_seed(step)) for step in range(2)]
    batches[0]["answers"] = torch.full_like(batches[0]["answers"], -100)
    engine.step(batches)


def dry_later(engine: Engine) -> None:
    steps(engine)
    for module in engine.stages[0].modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    steps(engine)


def written_whole(engine: Engine) -> None:
    with engine.parameters_whole() as parameters:
        parameters["1.gate_up.weight"].mul_(0.5)


def counted(scores: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    answers = batch["answers"].flatten()
    return F.cross_entropy(scores.flatten(0, 1), answers, reduction="sum"), (answers != -100).sum()


class NormedHead(nn.Module):
    """A last unit with a norm over what a column has cut."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = OverAll(everywhere=True), nn.Linear(WIDTH, WORDS)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(self.inner(hidden))


WRONG: Mapping[str, tuple[Callable[[], list[nn.Module]], Callable[[Engine], None], str]] = {
    "an evaluation comes first": (lambda: around(OverAll(everywhere=True)), evaluated, "tensor 0 of what it returns"),
    "evaluations are otherwise": (lambda: around(OverAll(everywhere=False)), evaluated_behind, "tensor 0 of what it"),
    "a buffer of a part": (lambda: around(Observing()), steps, "tensor 0 of its buffers is off by"),
    "the first loss counts nothing": (
        lambda: [Table(), NormedHead()],
        masked_first,
        "unit '1' computes something else",
    ),
    "a dropout begins to drop": (drying_later, dry_later, "'cut' for a dropout"),
    "a copy is written": (
        lambda: around(Gated()),
        written_whole,
        "1.gate_up.weight has been written into",
    ),
}


def used(rank: int, name: str) -> Any:
    units, use, _ = WRONG[name]
    torch.manual_seed(5)
    model = megazero.Model([unit.double() for unit in units()], counted)
    with megazero.engine(model, "adamw", RATE, {**RULE, "tp": 2}) as engine:
        use(engine)


@pytest.mark.parametrize("name", WRONG)
def test_it_is_seen(name: str) -> None:
    with pytest.raises(Exception) as error:
        run_ranks(2, used, name)
    assert WRONG[name][2] in str(error.value), str(error.value)
