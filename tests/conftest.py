"""Data that every room's tests may use."""

from pathlib import Path

import numpy as np
import pytest

from megazero.data.indexed import write_indexed


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a small .bin/.idx pair: 200 documents of random length, ids below 1003, each ended by id 0."""
    random = np.random.default_rng(5)
    prefix = tmp_path_factory.mktemp("corpus") / "words"
    documents = [np.append(random.integers(1, 1003, random.integers(3, 120)), 0) for _ in range(200)]
    write_indexed(prefix, documents, vocab_size=1003)
    return prefix
