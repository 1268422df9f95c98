"""Reference bodies under torch.compile, for ops without a kernel, if the run asks for it (--compile).

Only bodies are compiled: pure functions of tensors and numbers, each traced as a whole. The compiler does not see the
code between them. The backward of a linear layer writes weight gradients into the reducer's buffers, now or later, and
starts collectives; a compiled graph could drop, repeat or reorder these side effects. This costs nothing: a graph would
break at every product anyway, and the ops between two products are one body each.

All layers call the same bodies with the same shapes, so each body is compiled once per process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from importlib.util import find_spec
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from fused_ops.known import known_numbers
from fused_ops.native.compile import CompileError, compiler

P = ParamSpec("P")
R = TypeVar("R")

_ASKED: ContextVar[bool] = ContextVar("compiled_bodies", default=False)


@contextmanager
def compiled_bodies(asked: bool) -> Iterator[None]:
    """Within the block, bodies without a kernel run compiled if `asked`. Their backward is compiled too.

    This applies only where autograd records. Evaluation, a checkpoint's probe and generation run plain bodies: their
    shapes vary, and the probe's loss must not depend on --compile.
    """
    token = _ASKED.set(asked)
    try:
        yield
    finally:
        _ASKED.reset(token)


def runs_compiled() -> bool:
    """Whether bodies run compiled now."""
    return _ASKED.get() and torch.is_grad_enabled()


def compilable(body: Callable[P, R]) -> Callable[P, R]:
    """A decorator: `body` runs compiled inside `compiled_bodies(True)`."""

    @cache
    def compiled() -> Callable[P, R]:
        # Importing the compiler takes a second and 70 MB, so it is imported only if it is used. fullgraph: a body that
        # cannot be traced as a whole, or is recompiled too often, is an error instead of a silent fallback.
        return torch.compile(body, dynamic=False, fullgraph=True)

    @wraps(body)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if runs_compiled():
            return compiled()(*args, **kwargs)
        return body(*args, **kwargs)

    return call


def compiled_for(function: Callable[..., R], *signature: Any) -> Callable[..., R]:
    """A function compiled for calls of one signature: shapes, dtypes, and all else that it is specialised to.

    torch counts compilations by code object, and refuses the ninth (`recompile_limit`). A program has prompts of more
    lengths than that, so each signature gets a copy of the code. signature: hashable values. What the signature leaves
    out, such as whether a gradient is asked for, may still lead to eight compilations.
    """
    assert isinstance(function, FunctionType)
    return _compiled_copy(function, signature)


@cache
def _compiled_copy(function: FunctionType, signature: tuple[Any, ...]) -> Callable[..., Any]:
    code = function.__code__.replace()  # equal, and another object: torch tells code objects apart by identity
    copied = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return torch.compile(copied, dynamic=False, fullgraph=True)


def try_compiler(kind: str) -> str | None:
    """Why torch.compile does not work for this kind of device here; None if it does. On the CPU it is tried."""
    if kind == "cuda":
        return None if find_spec("triton") else "torch.compile makes code for GPUs with triton, which is not installed"
    try:
        compiler()
        x = known_numbers(37, seed=1, dtype=torch.float32)
        if not torch.equal(torch.compile(_trial, dynamic=False, fullgraph=True)(x), _trial(x)):
            return "what torch.compile makes on this machine gives other numbers than the code that it was made of"
    except CompileError as error:
        return str(error)
    except Exception as error:  # a missing compiler, missing headers, a folder that cannot be written
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"torch.compile fails on this machine: {' '.join(lines[:2])[:300]}"
    return None


def _trial(x: Tensor) -> Tensor:
    return x * 2 + 1
