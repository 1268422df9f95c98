"""Models whose modules are on torch's meta device: their values are made unit by unit, the same on every layout."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import megazero
from megazero.config.source import ConfigError
from tests.own.models import CASES, RATE, Batch, Begin, of_mlp, squared
from tests.own.training import RULE, share_of
from tests.ranks import config_error, run_ranks


class Normed(nn.Module):
    """Has a buffer, and values of its own."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(12), nn.Linear(12, 12)
        self.gain = nn.Parameter(torch.empty(12))
        self.register_buffer("places", torch.empty(12))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gain)
        self.places.copy_(torch.arange(12.0))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.gain * self.linear(self.norm(hidden)) + 0.01 * self.places


def units() -> list[nn.Module]:
    return [Begin().double(), Normed().double(), Normed().double(), nn.Linear(12, 1).double()]


def expected() -> dict[str, Tensor]:
    """The values by the rule that the documentation states, in plain torch."""
    values = dict[str, Tensor]()
    for number, unit in enumerate(units()):
        torch.manual_seed(11 + zlib.crc32(str(number).encode()))
        for module in unit.modules():
            if hasattr(module, "reset_parameters"):
                reset: Any = module.reset_parameters
                reset()
        values |= {f"{number}.{name}": value.clone() for name, value in unit.state_dict().items()}
    return values


def begun(rank: int, layout: dict[str, Any], folder: str) -> tuple[dict[str, Tensor], float]:
    torch.manual_seed(11)
    with torch.device("meta"):
        model = megazero.Model(units(), squared)
    with megazero.engine(model, "adamw", RATE, {**RULE, **layout}) as engine:
        engine.export(Path(folder) / "begun.safetensors")
        step = engine.step(share_of(engine, CASES["mlp"], 0))
        return engine.state_dict(), float(step.loss)


LAYOUTS: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {}),
    (2, {"pp": 2}),
    (2, {"zero_stage": 3, "late_update": True}),
    (4, {"pp": 2, "zero_stage": 3, "bucket_size": 40, "late_update": True}),
)


def test_values_are_those_of_reset_parameters_on_every_layout(tmp_path: Path) -> None:
    right, losses = expected(), list[float]()
    for number, (size, layout) in enumerate(LAYOUTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        for after, loss in run_ranks(size, begun, layout, str(folder)):
            losses.append(loss)
            assert not torch.equal(after["1.gain"], right["1.gain"]) and torch.equal(
                after["1.places"], right["1.places"]
            )
        found = load_file(folder / "begun.safetensors")
        assert {*found} == {*right}
        assert all(torch.equal(value, right[name]) for name, value in found.items()), layout
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-12)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(12))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.weight


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Plain()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden)


@pytest.mark.parametrize(
    ("unit", "told"),
    [
        (Plain, r"unit '1' \(Plain\) is on the meta device, and has no reset_parameters"),
        (Holds, r"module inner of unit '1' \(Plain\) is on the meta device"),
    ],
)
def test_a_module_that_cannot_make_its_values_is_named(unit: type[nn.Module], told: str) -> None:
    with torch.device("meta"):
        model = megazero.Model([Begin(), unit(), nn.Linear(12, 1)], squared)
    with pytest.raises(ConfigError, match=told):
        megazero.engine(model)


def other_seed(rank: int) -> str:
    torch.manual_seed(rank)
    with torch.device("meta"):
        model = megazero.Model(units(), squared)
    return config_error(lambda: megazero.engine(model).close())


def test_other_seeds_are_other_values() -> None:
    assert all("begin with other values" in words for words in run_ranks(2, other_seed))


def test_an_export_does_not_write_over_a_file(tmp_path: Path) -> None:
    path = tmp_path / "there.safetensors"
    path.write_bytes(b"mine")
    batch: Batch = of_mlp(torch.Generator().manual_seed(1))
    with megazero.engine(megazero.Model(units(), squared), run=RULE) as engine:
        with pytest.raises(FileExistsError):
            engine.export(path)
        engine.step(batch)
    assert path.read_bytes() == b"mine"
