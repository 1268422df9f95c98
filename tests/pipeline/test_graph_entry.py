"""The place where a hidden state enters a graph, and its gradient arrives."""

from __future__ import annotations

import weakref

import torch

from megazero.mpu.gradient import Write
from megazero.mpu.linear import plain_linear
from megazero.mpu.parameter import Parameter, ParameterKind, shard
from megazero.pipeline.schedule_run import GraphEntry


class Late:
    """A gradient target that keeps what a split backward defers."""

    def __init__(self) -> None:
        self.writes: list[Write] = []

    def add(self, write: Write) -> None:
        self.writes.append(write)


def test_what_a_split_backward_defers_does_not_keep_the_gradient_of_the_input() -> None:
    """It keeps the layer's input, which has the graph behind it, and the graph has its entry."""
    weight = Parameter(shard("weight", (5, 3), ParameterKind.MATRIX), torch.float32, "cpu")
    with torch.no_grad():
        weight.copy_(torch.arange(15.0).view(5, 3))
    weight.gradient_target = target = Late()
    entry, hidden = GraphEntry(), torch.arange(6.0).view(2, 3)
    plain_linear(entry.enter(hidden), weight, None).sum().backward()
    (gradient,) = entry.leave()
    assert gradient is not None and gradient.tolist() == [[30.0, 35.0, 40.0]] * 2
    arrived = weakref.ref(gradient)
    del gradient
    assert arrived() is None and len(target.writes) == 1
    into = torch.zeros(5, 3)
    target.writes[0](into, True)
    assert into.tolist() == [[3.0, 5.0, 7.0]] * 5
    assert entry.leave() == (None,)
