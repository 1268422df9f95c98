"""Reference bodies under torch.compile, where a run asks for that and an op has no kernel.

Only bodies are compiled: pure functions of tensors and numbers, each traced whole or not at all. What stands between
them in a block is never seen by the compiler: the backward of a linear layer writes weight gradients into the reducer's
sums, now or later, and starts collectives, and a graph that held it could drop, repeat or move that. Nothing is lost by
it: a graph would have to break at every product anyway, and the ops between two products are each one body already.

Every layer calls the same bodies with the same shapes, so a body is compiled once in a process, however many layers
there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from fused_ops.known import known
from fused_ops.native.compile import CompileError, compiler

P = ParamSpec("P")
R = TypeVar("R")

_ASKED: ContextVar[bool] = ContextVar("compiled_bodies", default=False)


@contextmanager
def compiled_bodies(asked: bool) -> Iterator[None]:
    """While the block runs, bodies without a kernel run compiled if `asked`. Their backward is then compiled too,
    wherever it runs.

    Only where gradients are recorded: evaluation, a checkpoint's probe and sampling run plain bodies. Their shapes
    vary, and the probe's number must not depend on how the run that checks it was started.
    """
    token = _ASKED.set(asked)
    try:
        yield
    finally:
        _ASKED.reset(token)


def runs_compiled() -> bool:
    """Whether a body that starts now runs compiled."""
    return _ASKED.get() and torch.is_grad_enabled()


def compilable(body: Callable[P, R]) -> Callable[P, R]:
    """`body`, which runs compiled inside `compiled_bodies(True)`."""

    @cache
    def compiled() -> Callable[P, R]:
        # Importing the compiler takes a second and 70 MB, which a run that does not ask for it need not pay. fullgraph:
        # a body that cannot be traced as a whole, or is traced again and again, is an error and no silent fall back.
        return torch.compile(body, dynamic=False, fullgraph=True)

    @wraps(body)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if runs_compiled():
            return compiled()(*args, **kwargs)
        return body(*args, **kwargs)

    return call


def try_compiler(kind: str) -> str | None:
    """Why torch.compile can make no code for this kind of device on this machine; None: it can, on
    the CPU it just has.
    """
    if kind == "cuda":
        return None if find_spec("triton") else "torch.compile makes code for CUDA with triton, which is not installed"
    try:
        compiler()
        x = known(37, seed=1, dtype=torch.float32)
        if not torch.equal(torch.compile(_trial, dynamic=False, fullgraph=True)(x), _trial(x)):
            return "what torch.compile makes on this machine gives other numbers than the code that it was made of"
    except CompileError as error:
        return str(error)
    except Exception as error:  # whatever the machine lacks: a compiler that it takes, headers, a folder to write in
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"torch.compile fails on this machine: {' '.join(lines[:2])[:300]}"
    return None


def _trial(x: Tensor) -> Tensor:
    return x * 2 + 1
