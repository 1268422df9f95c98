"""What is wrong with a plan of tensor parallelism, or with modules that it cuts: one error each, with the names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megazero
from tests.own.models import RATE, Batch, Case, plainly_trained
from tests.own.parallel_models import WIDTH, Attention, Block, Experts, Gated, Table, entropy, of_words, tied
from tests.own.training import RULE
from tests.ranks import run_ranks

CASE = Case(tied, entropy, of_words, steps=2)
Units = Callable[[], list[nn.Module]]


def replanned(units: list[nn.Module], kind: type[nn.Module], plan: Mapping[str, str | None]) -> list[nn.Module]:
    """Units whose modules of a class have another plan: other words, or none."""
    for module in (module for unit in units for module in unit.modules() if isinstance(module, kind)):
        merged: dict[str, str | None] = {**vars(kind)["tp_plan"], **plan}
        vars(module)["tp_plan"] = {name: word for name, word in merged.items() if word is not None}
    return units


class OverAll(Gated):
    """With a norm over what a column has cut."""

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up(hidden).chunk(2, -1)
        return self.down(F.layer_norm(gate * up, gate.shape[-1:]))


class Sharp(nn.Linear):
    """A linear module of another kind."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.tanh(), self.bias)


class OtherLinear(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.down = Sharp(self.down.in_features, WIDTH)


class Doubled(Gated):
    """Whose row is added twice."""

    def forward(self, hidden: Tensor) -> Tensor:
        gate, _ = self.gate_up(hidden).chunk(2, -1)
        return self.down(F.silu(gate)) + hidden * gate.sum(-1, keepdim=True)


class Beyond(Table):
    """Looks up what the table has not."""

    def forward(self, batch: Batch) -> Tensor:
        return self.table(batch["words"] + 53)


def with_inner(inner: type[Gated]) -> list[nn.Module]:
    units = tied()
    assert isinstance(units[1], Block)
    units[1].gated = inner()
    return units


MODELS: Mapping[str, Units] = {
    "as it is": tied,
    "no plan": lambda: [nn.Embedding(53, WIDTH), nn.Linear(WIDTH, 53)],
    "no partial": lambda: replanned(tied(), Attention, {"query_norm": None}),
    "wrong partial": lambda: replanned(tied(), Gated, {"down.bias": "partial"}),
    "no divided": lambda: replanned(tied(), Attention, {"heads": None}),
    "no dropout": lambda: replanned(tied(0.2), Attention, {"dry": None}),
    "other dropout": lambda: replanned(tied(0.2), Attention, {"dry": "cut 2"}),
    "no row": lambda: replanned(tied(), Gated, {"down": None}),
    "column 1": lambda: replanned(tied(), Attention, {"qkv": "column"}),
    "no sum": lambda: replanned(tied(), Experts, {"within": None}),
    "word": lambda: replanned(tied(), Gated, {"down": "rows"}),
    "misspelt": lambda: replanned(tied(), Gated, {"dwon": "row"}),
    "two words": lambda: replanned(tied(), Gated, {"dow*": "row split"}),
    "class": lambda: replanned(tied(), Attention, {"query_norm": "column"}),
    "over all": lambda: with_inner(OverAll),
    "other linear": lambda: with_inner(OtherLinear),
    "elementwise": lambda: with_inner(Doubled),
    "beyond": lambda: [Beyond(), *tied()[1:]],
}


def second_loss(rank: int, name: str, run: dict[str, Any], proven: bool, plan: dict[str, str], apart: bool) -> float:
    """That of the second step. apart: whether ranks get other micro-batches."""
    torch.manual_seed(5)
    units = [unit.double() for unit in MODELS[name]()]
    first = {"input": "words"} if name == "no plan" else {}
    model = megazero.Model(units, entropy, tp_plan=plan, is_proven=proven, **first)
    with megazero.engine(model, "adamw", RATE, {**RULE, **run}) as engine:
        for step in range(2):
            loss = engine.step([CASE.micro_batch(step, rank if apart else 0)]).loss
        return float(loss)


def raised_with(
    name: str, size: int = 2, *, apart: bool = False, plan: Mapping[str, str] | None = None, **run: Any
) -> str:
    with pytest.raises(Exception) as error:
        run_ranks(size, second_loss, name, {"tp": size, **run}, True, dict(plan or {}), apart)
    return str(error.value)


PLANS: Mapping[str, tuple[str, ...]] = {
    "no plan": ("tp is 2, and no plan says what of the model's modules is cut",),
    "no partial": ("the gradient of parameter 1.attention.query_norm", "has to say 'partial'", "unit '1'"),
    "wrong partial": ("the gradient of parameter 1.gated.down.bias", "off by 1 "),
    "no divided": ("unit '1'", "computes as a whole, and not with parts"),
    "no dropout": ("tensor 0 of what it returns is off by", "'cut' for a dropout", "unit '1'"),
    "other dropout": ("tensor 0 of what it returns is off by", "unit '1'"),
    "no row": ("unit '1'", "computes as a whole, and not with parts", "10x18 and 36x24"),
    "column 1": ("tensor 0 of what it returns is off by", "unit '1'"),
    "no sum": ("tensor 0 of what it returns is off by", "unit '2'"),
    "word": ("'rows' is none of column, column gathered, row",),
    "misspelt": ("tp_plan of Gated: 'dwon' names no module, parameter or number",),
    "two words": ("'row split', and another line says 'row'",),
    "class": ("LayerNorm", "'column' is not for such a module"),
    "over all": ("tensor 0 of what it returns is off by", "norms over all features"),
    "other linear": ("Sharp", "'row' is not for such a module"),
    "elementwise": ("tensor 0 of what it returns is off by", "unit '1'"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_mistake_is_one_error_with_the_names(name: str) -> None:
    text = raised_with(name)
    for words in PLANS[name]:
        assert words in text, text


@pytest.mark.parametrize("name", ["word", "misspelt", "two words", "class", "other linear"])
def test_a_mistake_of_a_plan_is_said_without_tp_ranks_too(name: str) -> None:
    text = raised_with(name, tp=1)
    for words in PLANS[name]:
        assert words in text, text


def test_what_ranks_cannot_share_is_said_with_the_numbers() -> None:
    text = raised_with("as it is", 4)
    assert "heads of Attention is 6, which 4 ranks cannot share" in text, text
    assert "parameter 1.attention.temperature [6] has 6 along dimension 0, which 4 ranks cannot share" in text, text


def test_a_pattern_names_something() -> None:
    text = raised_with("as it is", plan={"*.gated.dwon": "row"})
    assert "tp_plan: '*.gated.dwon' names no module, parameter or number of the model" in text, text


def test_tp_ranks_take_the_same_micro_batches() -> None:
    text = raised_with("as it is", apart=True)
    assert "tp ranks, or the stages of a pipeline, take other micro-batches" in text, text


def test_a_number_beyond_the_vocabulary_is_an_error() -> None:
    text = raised_with("beyond")
    assert "out of range" in text, text


@pytest.mark.parametrize(("name", "is_right"), [("as it is", True), ("no partial", False), ("over all", False)])
def test_without_the_proof_a_fault_trains_another_model(name: str, is_right: bool) -> None:
    """So the proof is what finds it."""
    expected = plainly_trained(Case(MODELS[name], entropy, of_words, steps=2, micro_batches=1)).numbers[1][0]
    made = run_ranks(2, second_loss, name, {"tp": 2}, False, {}, False)
    assert made[0] == made[1] and (abs(made[0] / expected - 1) < 1e-9) is is_right, (made, expected)
