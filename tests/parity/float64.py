"""Keep another program's model in float64 throughout, for comparisons to the last digits.

`transformers` computes parts of a float64 model in float32 (softmax, rotary angles, ALiBi's slopes, RMSNorm). Under
`in_float64()` every request for float32, whatever way it is made, is a request for float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_NARROW = (torch.float32, torch.float16, torch.bfloat16)


def _widened(value: Any) -> Any:
    """The argument with every narrower floating dtype in it replaced; dtypes may also be named
    ("torch.FloatTensor").
    """
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _NARROW else value
    if value in ("torch.FloatTensor", "torch.HalfTensor", "torch.BFloat16Tensor") if isinstance(value, str) else False:
        return "torch.DoubleTensor"
    if isinstance(value, (tuple, list)) and any(isinstance(item, torch.dtype) for item in value):
        return type(value)(_widened(item) for item in value)
    return value


class Float64Mode(TorchFunctionMode):
    """Every call of a torch function or tensor method that asks for a narrower floating dtype gets float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
            func, args = torch.Tensor.double, args[:1]
        arguments = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*(_widened(value) for value in args), **arguments)


@contextmanager
def in_float64() -> Iterator[None]:
    """float64 as the default dtype, and no way to a narrower one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Float64Mode():
            yield
    finally:
        torch.set_default_dtype(before)
