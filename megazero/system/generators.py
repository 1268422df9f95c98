"""The generators of random numbers that are one for the process: of torch, of NumPy, and of Python."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from megazero.system.device import generators


def generator_states() -> tuple[object, ...]:
    """The states of those of the host, which compare."""
    name, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    return torch.get_rng_state().numpy().tobytes(), name, np.asarray(keys).tobytes(), tuple(rest), random.getstate()


def seed_generators(seed: int) -> None:
    """Seed all of the host. seed: from 0 to 2^32 - 1."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)


@contextmanager
def host_generators_kept() -> Iterator[None]:
    """A context behind which all of the host are as they were."""
    of_numpy, of_python = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        with torch_generators_kept(torch.device("cpu")):
            yield
    finally:
        np.random.set_state(of_numpy)  # noqa: NPY002
        random.setstate(of_python)


@contextmanager
def torch_generators_kept(device: torch.device) -> Iterator[None]:
    """A context behind which torch's, of the host and of a device, are as they were."""
    kept = [(generator, generator.get_state()) for generator in generators(device)]
    try:
        yield
    finally:
        for generator, state in kept:
            generator.set_state(state)


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's, of the host and of a device: those draw what they draw behind `torch.manual_seed`. That formats the
    stack at each call for each kind of device that has not begun, which takes longer than a small unit.
    """
    for generator in generators(device):
        generator.manual_seed(seed)


DRAWING = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like normal bernoulli multinomial poisson uniform_ "
    "normal_ bernoulli_ random_ exponential_ geometric_ log_normal_ cauchy_ dropout dropout_ alpha_dropout "
    "feature_dropout feature_alpha_dropout rrelu rrelu_ gumbel_softmax trunc_normal_".split()
)
"""Functions of torch that draw by its generator where no other one is named."""


class NoDraws(TorchFunctionMode):
    """A context of this thread in which a draw by torch's generator is an error. words: of what draws."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self._words = words

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in DRAWING and kwargs.get("generator") is None:
            raise DrawnUnseen(
                f"{self._words} draws by torch's generator ({func.__name__}), and those that were looked at do not: "
                "threads that read ahead would disturb other draws. With num_workers 0 samples are read, and seeded, "
                "between steps"
            )
        return func(*args, **kwargs)


class DrawnUnseen(RuntimeError):
    """Something draws that nobody has expected to."""
