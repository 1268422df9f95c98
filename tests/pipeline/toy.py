"""A small model in float64 for the engine's tests: embedding, linear + tanh blocks, head; any cut into chunks.

Weights depend on their global name only, so every cut holds the same numbers.
"""

from __future__ import annotations

import time
import weakref
import zlib

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megazero.model.batch import MicroBatch

HIDDEN, VOCAB, SEQUENCE, LAYERS = 5, 11, 3, 11


def _weight(name: str, *shape: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return nn.Parameter(torch.randn(*shape, dtype=torch.float64, generator=generator) * 0.5)


class _Copy(torch.autograd.Function):
    """A copy in memory whose lifetime can be watched: a weak reference to it goes into `watch`."""

    @staticmethod
    def forward(ctx, x: Tensor, watch: list) -> Tensor:
        array = np.empty(tuple(x.shape))
        watch.append(weakref.ref(array))
        return torch.from_numpy(array).copy_(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, None


class _Linear(torch.autograd.Function):
    """x [s, b, k] times a weight [n, k]. If the weight has a `target`, it is called with a function that computes the
    weight's gradient.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.target = getattr(weight, "target", None)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors

        @torch.no_grad()
        def make() -> Tensor:
            return grad.flatten(0, 1).t() @ x.flatten(0, 1)

        if ctx.target is None:
            return grad @ weight, make()
        ctx.target(make)
        return grad @ weight, None


class ToyStage(nn.Module):
    """Blocks `blocks` of the model, with embedding or head where asked. tied: the head's weight is the embedding's.

    outputs, inputs  weak references to the hidden states that each forward gave and got, in order
    jitter           a generator of sleeps, to shake the order in which ranks get ahead
    """

    def __init__(
        self, blocks: range, embedding: bool, head: bool, tied: bool = False, jitter: np.random.Generator | None = None
    ) -> None:
        super().__init__()
        self.blocks, self.embedding, self.head, self.jitter = blocks, embedding, head, jitter
        self.weights = nn.ParameterDict()
        for i in blocks:
            self.weights[f"block{i}_weight"] = _weight(f"block{i}_weight", HIDDEN, HIDDEN)
            self.weights[f"block{i}_bias"] = _weight(f"block{i}_bias", HIDDEN)
        self.head_name = "embedding" if tied else "head"
        names = ["embedding"] * embedding + [self.head_name] * head
        for name in dict.fromkeys(names):
            self.weights[name] = _weight(name, VOCAB, HIDDEN)
        self.outputs: list = []
        self.inputs: list = []

    def names(self) -> list[list[str]]:
        """The names of the weights of each unit: embedding, blocks, head."""
        blocks = [[f"block{i}_weight", f"block{i}_bias"] for i in self.blocks]
        return [["embedding"]] * self.embedding + blocks + [[self.head_name]] * self.head

    def forward(self, hidden: Tensor | None, batch: MicroBatch, units: tuple[int, int] | None = None) -> Tensor:
        if self.jitter is not None:
            time.sleep(self.jitter.uniform(0, 0.004))
        names = self.names()
        start, stop = units or (0, len(names))
        if start == 0 and not self.embedding:
            assert hidden is not None
            self.inputs.append(weakref.ref(hidden))
        for number in range(start, stop):
            hidden = self._unit(number, [self.weights[name] for name in names[number]], hidden, batch)
        assert hidden is not None
        return hidden if self.head or stop < len(names) else _Copy.apply(hidden, self.outputs)

    def _unit(self, number: int, weights: list[Tensor], hidden: Tensor | None, batch: MicroBatch) -> Tensor:
        if self.embedding and number == 0:
            assert hidden is None
            (table,) = weights
            return F.embedding(batch.tokens, table).transpose(0, 1)
        assert hidden is not None
        if number < self.embedding + len(self.blocks):
            weight, bias = weights
            return hidden + torch.tanh(_Linear.apply(hidden, weight) + bias)
        logits = _Linear.apply(hidden, *weights).transpose(0, 1)
        losses = F.cross_entropy(logits.reshape(-1, VOCAB), batch.labels.reshape(-1), reduction="none")
        mask = 1.0 if batch.loss_mask is None else batch.loss_mask.reshape(-1)
        return (losses * mask).sum()


def micro_batch(number: int, size: int = 2) -> MicroBatch:
    """Tokens, labels and mask that differ from those of every other number."""
    generator = torch.Generator().manual_seed(1000 + number)
    tokens, labels = (torch.randint(VOCAB, (size, SEQUENCE), generator=generator) for _ in range(2))
    mask = torch.rand(size, SEQUENCE, generator=generator) < 0.7
    return MicroBatch(tokens, labels, mask, torch.arange(number * size, (number + 1) * size))


def split_batch(samples: int, micro_batches: int) -> list[MicroBatch]:
    """The same `samples` samples, cut into micro-batches."""
    singles = [micro_batch(i, 1) for i in range(samples)]
    size = samples // micro_batches

    def join(group: list[MicroBatch]) -> MicroBatch:
        masks = [batch.loss_mask for batch in group if batch.loss_mask is not None]
        every = [(batch.tokens, batch.labels, mask, batch.samples) for batch, mask in zip(group, masks, strict=True)]
        tokens, labels, mask, numbers = map(torch.cat, zip(*every, strict=True))
        return MicroBatch(tokens, labels, mask, numbers)

    return [join(singles[i : i + size]) for i in range(0, samples, size)]


def sequential(batches: list[MicroBatch], factor: float, tied: bool = False) -> tuple[float, dict[str, Tensor]]:
    """Sum of token losses and every gradient, by plain autograd over the whole model."""
    model = ToyStage(range(LAYERS), True, True, tied)
    total = 0.0
    for batch in batches:
        loss = model(None, batch)
        (loss * factor).backward()
        total += loss.item()
    return total, gradients([model])


def gradients(stages: list[ToyStage]) -> dict[str, Tensor]:
    """By global name; a weight held twice here (tied) has the sum."""
    found: dict[str, Tensor] = {}
    for stage in stages:
        for name, weight in stage.weights.items():
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            found[name] = found[name] + gradient if name in found else gradient
    return found
