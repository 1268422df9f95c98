"""Python's collector of cyclic garbage, kept still."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """No collections of cyclic garbage within the block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def last_work() -> Iterator[None]:
    """The same of a block behind which a process ends. A look at the million objects that a search leaves would take
    more than a second at the end of the process, and free nothing that does not end with it.
    """
    with without_collections():
        yield
        gc.freeze()
        gc.unfreeze()  # all of it is old now; what is young would be looked at right behind the block
    atexit.register(gc.freeze)
