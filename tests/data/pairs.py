"""Small pairs of files for tests."""

from pathlib import Path

import numpy as np

from megazero.data.indexed import IndexedDataset
from megazero.data.writer import PairWriter


def write_pair(prefix: Path, lengths, vocab_size: int = 1000, dtype: str = "<u2", seed: int = 0) -> IndexedDataset:
    """Random ids below vocab_size in documents of these lengths."""
    tokens = np.random.RandomState(seed).randint(0, vocab_size, int(sum(lengths)))
    with PairWriter(prefix, np.dtype(dtype)) as writer:
        writer.write(tokens.astype(dtype), lengths)
    return IndexedDataset(prefix)
