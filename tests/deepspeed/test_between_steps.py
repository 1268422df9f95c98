"""What a program does with its module and its optimizer around the calls of an engine, beside plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megazero import deepspeed
from tests.deepspeed.models import CASES, CLIP, OPTIMIZER, SAMPLES, Plain
from tests.ranks import run_ranks

EXACT = 1e-9
CASE = CASES["skips"]
CONFIG = {"train_micro_batch_size_per_gpu": SAMPLES, "optimizer": OPTIMIZER, "gradient_clipping": CLIP}


def penalised(engine: Any, step: int, kept: list[nn.Parameter]) -> None:
    """The loss has a term of the parameters, made in front of the module's call, of a list from before the engine."""
    term = sum((parameter.square().sum() for parameter in kept), torch.zeros(()))
    engine.backward(engine(*CASE.micro_batch(step, 0)) + 0.01 * term)
    engine.step()


def adversary(engine: Any, step: int, kept: list[nn.Parameter]) -> None:
    """Another loss has its backward through the module in front of a step."""
    numbers, target = CASE.micro_batch(step, 1)
    (-engine.module(numbers, target)).backward()
    engine.backward(engine(*CASE.micro_batch(step, 0)))
    engine.step()


def slower(engine: Any, step: int, kept: list[nn.Parameter]) -> None:
    """The rate is set between the forward and the step."""
    loss = engine(*CASE.micro_batch(step, 0))
    engine.optimizer.param_groups[0]["lr"] = 0.02 / (step + 2)
    engine.backward(loss)
    engine.step()


WAYS = {"penalised": penalised, "adversary": adversary, "slower": slower}


def used(engine: Any, module: nn.Module, way: str) -> dict[str, Tensor]:
    """The weights behind three steps, behind each of which the program reads them in the module itself."""
    kept = list(module.parameters())
    mean = [torch.zeros_like(parameter) for parameter in kept]
    for step in range(3):
        WAYS[way](engine, step, kept)
        for place, parameter in zip(mean, kept, strict=True):
            place.add_(parameter.detach(), alpha=0.3)
    return engine.module_state_dict() | {f"mean {number}": each for number, each in enumerate(mean)}


def used_on_rank(rank: int, way: str, stage: int) -> dict[str, Tensor]:
    module = CASE.built()
    zero = {"stage": stage}
    engine, _, _, _ = deepspeed.initialize(model=module, config={**CONFIG, "zero_optimization": zero})
    made = used(engine, module, way)
    engine.destroy()
    return made


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_the_module_can_be_used_outside(way: str, ranks: int) -> None:
    """Ranks have the same samples here, so that each is as plain torch on one process."""
    module = CASE.built()
    right = used(Plain(module), module, way)
    for stage in (0, 1, 2):
        for made in run_ranks(ranks, used_on_rank, way, stage):
            assert made.keys() == right.keys()
            for name, value in right.items():
                torch.testing.assert_close(made[name], value, rtol=EXACT, atol=EXACT)


class Remembering(nn.Module):
    """A buffer that the module replaces with another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, numbers: Tensor) -> Tensor:
        self.seen = 0.5 * self.seen + numbers.detach().mean(0)
        loss: Tensor = self.layer(numbers).square().mean()
        return loss


def remembered(rank: int) -> str | Tensor:
    """The buffer behind two calls, or what is wrong with it."""
    torch.manual_seed(1)
    engine, _, _, _ = deepspeed.initialize(model=Remembering(), config=CONFIG)
    try:
        for step in range(2):
            engine.backward(engine(torch.full((SAMPLES, 6), 1.0 + step)))
            engine.step()
    except ValueError as error:
        return str(error)
    return engine.module_state_dict()["seen"]


def test_a_buffer_that_the_module_replaces_is_in_its_state() -> None:
    made = remembered(0)
    assert isinstance(made, Tensor) and made.tolist() == [2.5] * 6


def test_a_buffer_that_ranks_would_have_otherwise_is_named() -> None:
    for words in run_ranks(2, remembered):
        assert isinstance(words, str) and "unit '(outside of units)' changes its seen" in words
