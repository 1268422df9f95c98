"""The generators of random numbers that are one for the process: of torch on the host, of NumPy, and of Python."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def generator_states() -> tuple[object, ...]:
    """Their states, which compare."""
    name, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    return torch.get_rng_state().numpy().tobytes(), name, np.asarray(keys).tobytes(), tuple(rest), random.getstate()


def seed_generators(seed: int) -> None:
    """Seed all of them. seed: from 0 to 2^32 - 1."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """A context behind which they are as they were."""
    of_torch, of_numpy, of_python = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)  # noqa: NPY002
        random.setstate(of_python)
