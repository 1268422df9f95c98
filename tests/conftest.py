"""Data that every room's tests may use."""

from pathlib import Path

import pytest

from tests.corpus import write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of 200 documents with ids below 1003, each ended by id 0."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "words")
