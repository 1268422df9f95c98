"""A small .bin/.idx pair of random documents with enough structure for a model to learn."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megazero.data.indexed import dtype_for
from megazero.data.writer import PairWriter


def write_corpus(
    prefix: Path, *, documents: int = 200, vocabulary: int = 1003, longest: int = 120, seed: int = 5
) -> Path:
    """Documents of 3 to `longest` tokens: a walk over ids 1 .. vocabulary - 1 in small steps, ended by id 0."""
    random = np.random.default_rng(seed)
    with PairWriter(prefix, dtype_for(vocabulary)) as writer:
        for _ in range(documents):
            steps = random.integers(-3, 4, random.integers(3, longest))
            ids = 1 + (random.integers(1, vocabulary) + np.cumsum(steps)) % (vocabulary - 1)
            writer.write(np.append(ids, 0).astype(writer.dtype), [len(ids) + 1])
    return prefix
