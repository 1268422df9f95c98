"""Modules of any kind, with what hooks have to follow, and how plain torch trains them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

STEPS, MICRO_BATCHES, SAMPLES = 4, 4, 3
RATE, DECAY, CLIP = 0.02, 0.1, 0.6
OPTIMIZER = {"type": "AdamW", "params": {"lr": RATE, "betas": [0.8, 0.9], "eps": 1e-8, "weight_decay": DECAY}}


class Perceptron(nn.Module):
    """Layers in another order than that of their calls, of which one is called twice, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.unused = nn.Linear(12, 3), nn.Linear(2, 2)
        self.twice, self.norm = nn.Linear(12, 12), nn.LayerNorm(12)
        self.first = nn.Linear(6, 12)

    def forward(self, numbers: Tensor, target: Tensor) -> Tensor:
        hidden = F.relu(self.first(numbers))
        hidden = self.norm(hidden + F.gelu(self.twice(hidden)))
        return F.cross_entropy(self.last(hidden + self.twice(hidden)), target)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.scale = nn.Parameter(torch.full((width,), 0.7))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.scale * self.mix(hidden)


class TiedByHand(nn.Module):
    """A table that the forward multiplies with itself, numbers and a buffer of the module's own, frozen weights, and
    blocks that torch computes again.
    """

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList([Residual(8) for _ in range(3)])
        self.table, self.begin = nn.Embedding(11, 8), nn.Parameter(torch.linspace(-1, 1, 8))
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.weights: Tensor
        self.register_buffer("weights", torch.linspace(0.5, 1.5, 5)[:, None])

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        hidden = torch.cat([self.begin.expand(len(ids), 1, -1), self.table(ids)], 1) * self.weights
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=self.reentrant)
        hidden = hidden + torch.tanh(self.frozen(hidden))
        return F.cross_entropy((hidden @ self.table.weight.T).flatten(0, 1), target.flatten())


class Recurrent(nn.Module):
    """A module with a list of its parameters beside torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 7, num_layers=2, batch_first=True), nn.Linear(7, 3)

    def forward(self, numbers: Tensor, target: Tensor) -> Tensor:
        hidden, _ = self.rnn(numbers)
        return F.cross_entropy(self.head(hidden[:, -1]), target)


class Skips(nn.Module):
    """Blocks of which the data say which are called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(6) for _ in range(4)])
        self.head = nn.Linear(6, 3)

    def forward(self, numbers: Tensor, target: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if numbers[0, number] > -0.3 or number == 0:
                numbers = block(numbers)
        return F.cross_entropy(self.head(numbers), target)


@dataclass
class Handed:
    """What a unit returns: an object, with what the unit has got as it came."""

    hidden: Tensor
    given: Tensor


class Handing(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Handed:
        return Handed(torch.tanh(self.layer(hidden)), hidden)


class HandingOn(nn.Module):
    """Units that return objects with their own input, a layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        same = nn.Linear(6, 6)
        self.one, self.other, self.blocks = same, same, nn.ModuleList([Handing(nn.Linear(6, 6)) for _ in range(3)])
        self.head = nn.Linear(6, 3)

    def forward(self, numbers: Tensor, target: Tensor) -> Tensor:
        numbers = self.one(numbers)
        for block in self.blocks:
            handed = block(numbers)
            numbers = handed.hidden + 0.3 * handed.given.square()
        return F.cross_entropy(self.head(self.other(numbers)), target)


class Language(nn.Module):
    """A model of transformers, which takes and returns what it likes."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"n_embd": 16, "n_head": 2, "n_layer": 2, "vocab_size": 19, "n_positions": 8}
        self.model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss


Batch = tuple[Tensor, Tensor]


def _numbers(shape: tuple[int, ...], classes: int) -> Callable[[torch.Generator], Batch]:
    def make(draw: torch.Generator) -> Batch:
        numbers = torch.randn(SAMPLES, *shape, generator=draw, dtype=torch.float64)
        return numbers, torch.randint(0, classes, (SAMPLES,), generator=draw)

    return make


def _ids(length: int, vocabulary: int, targets: int) -> Callable[[torch.Generator], Batch]:
    def make(draw: torch.Generator) -> Batch:
        ids = torch.randint(0, vocabulary, (SAMPLES, length), generator=draw)
        return ids, torch.randint(0, vocabulary, (SAMPLES, targets), generator=draw)

    return make


@dataclass(frozen=True)
class Case:
    """A module of any kind. make: one without values from a seed. batch: (inputs, targets) from a generator."""

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]

    def built(self) -> nn.Module:
        torch.manual_seed(11)
        return self.make().double()

    def micro_batch(self, step: int, number: int) -> Batch:
        return self.batch(torch.Generator().manual_seed(100 * step + number))


CASES: Mapping[str, Case] = {
    "perceptron": Case(Perceptron, _numbers((6,), 3)),
    "tied by hand": Case(TiedByHand, _ids(4, 11, 5)),
    "reentrant": Case(lambda: TiedByHand(reentrant=True), _ids(4, 11, 5)),
    "recurrent": Case(Recurrent, _numbers((5, 6), 3)),
    "handing on": Case(HandingOn, _numbers((6,), 3)),
    "skips": Case(Skips, _numbers((6,), 3)),
    "language": Case(Language, _ids(6, 19, 1)),
}
Trained = tuple[list[float], list[float], float, dict[str, Tensor]]
"""Mean losses and norms of steps, the loss of an evaluation behind them, and the weights."""


class Plain:
    """An engine of plain torch. micro_batches: of a step."""

    def __init__(self, module: nn.Module, micro_batches: int = 1) -> None:
        self.module, self.micro_batches, self._made = module, micro_batches, 0
        options: dict[str, Any] = OPTIMIZER["params"]  # type: ignore[assignment]
        self.optimizer = torch.optim.AdamW(module.parameters(), **options)
        self.norms = list[float]()

    def __call__(self, *given: Tensor) -> Tensor:
        made: Tensor = self.module(*given)
        return made

    def backward(self, loss: Tensor) -> None:
        if self._made % self.micro_batches == 0:
            self.optimizer.zero_grad()
        (loss / self.micro_batches).backward()
        self._made += 1

    def step(self) -> None:
        if self._made % self.micro_batches:
            return
        for parameter in self.module.parameters():  # as a model state counts what no gradient has reached
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.norms.append(float(nn.utils.clip_grad_norm_(self.module.parameters(), CLIP)))
        self.optimizer.step()

    def one_step(self, case: Case, step: int) -> float:
        """Make all micro-batches of a step. Returns their mean loss."""
        total = 0.0
        for number in range(self.micro_batches):
            loss = self(*case.micro_batch(step, number))
            self.backward(loss)
            self.step()
            total += loss.item() / self.micro_batches
        return total

    def module_state_dict(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self.module.state_dict().items()}


def plainly_trained(case: Case, steps: int = STEPS) -> Trained:
    """By plain torch."""
    plain = Plain(case.built(), MICRO_BATCHES)
    losses = [plain.one_step(case, step) for step in range(steps)]
    with torch.no_grad():
        evaluated = float(plain.module.eval()(*case.micro_batch(99, 0)))
    return losses, plain.norms, evaluated, plain.module_state_dict()
