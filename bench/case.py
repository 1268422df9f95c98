"""The input of an op that is timed, by `bench/ops.py` on a CPU and `bench/gpu_ops.py` on a GPU: sizes, tensors, and the
bytes to move.

b micro-batch, s sequence, n heads, d head dim, h hidden, f ffn width, v vocabulary, N = b*s tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Sizes:
    """The sizes of W1 with the vocabulary of W2. dtype: of all tensors except those that an optimizer keeps in fp32."""

    b: int = 4
    s: int = 512
    n: int = 8
    d: int = 64
    f: int = 2048
    v: int = 50304
    parameters: int = 50_000_000
    dtype: torch.dtype = BF16

    @classmethod
    def tiny(cls) -> Sizes:
        return cls(2, 16, 2, 8, 64, 128, 4096)

    @property
    def h(self) -> int:
        return self.n * self.d

    @property
    def tokens(self) -> int:
        return self.b * self.s

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape) * scale).to(self.dtype)


class BothWays:
    """An op's forward, and its backward. The last argument is the gradient of the result."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        self.forward = forward

    def __call__(self, *tensors: Tensor) -> None:
        out = self.forward(*tensors[:-1])
        out.backward(tensors[-1].view(out.shape).to(out.dtype))


@dataclass(frozen=True)
class Case:
    """An op to time.

    prepare        makes the tensors of one repetition
    bytes, flops   the least that forward and backward together need
    forward_bytes  the least that forward alone needs, for an op that is `BothWays`
    moves          a description of the bytes
    to_compile     the function for torch.compile instead of `theirs`, if that cannot be compiled
    """

    name: str
    shape: str
    prepare: Callable[[], tuple[Tensor, ...]]
    ours: Callable[..., object]
    theirs: Callable[..., object]
    bytes: float = 0.0
    flops: float = 0.0
    dtype: str = "bfloat16"
    forward_bytes: float = 0.0
    moves: str = ""
    to_compile: Callable[..., object] | None = None


def fresh(*tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """A function that clones the tensors, with gradients required. An op may overwrite the clones."""
    return lambda: tuple(tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in tensors)


def with_gradient(result: int, *tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """As `fresh`, followed by a gradient for a result of `result` elements, so that making it is not timed."""
    return lambda: (*fresh(*tensors)(), torch.ones(result, dtype=tensors[0].dtype, device=tensors[0].device))
