"""Modules in evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A context in which these modules are in evaluation mode, each by itself: what is below them is not meant, and a
    module that is in evaluation mode in training, as one of a user's may be, stays so behind it.
    """
    were_training = [module for module in modules if module.training]
    for module in were_training:
        module.training = False
    try:
        yield
    finally:
        for module in were_training:
            module.training = True
