"""The results of models on one process, with which generated layouts are compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parity.layouts import BATCH, Model
from tests.parity.training import Outcome, data_flags, train
from tests.parity.ways import Way

Reference = Callable[[Model, list[str]], Outcome]


@pytest.fixture(scope="session")
def flags_of(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Model, str, list[str]], list[str]]:
    """Flags of a model in a precision on the words, whatever the layout."""
    data = data_flags(corpus, tmp_path_factory.getbasetemp() / "cache")
    return lambda model, precision, more: [*model.flags(precision), *data, *more]


@pytest.fixture(scope="session")
def reference(flags_of: Callable[[Model, str, list[str]], list[str]]) -> Reference:
    """The run on one process in float64 with the whole batch at once and the plain products of attention, made once for
    all layouts of a model.
    """
    kept: dict[tuple[str, ...], Outcome] = {}

    def run(model: Model, more: list[str]) -> Outcome:
        flags = [*flags_of(model, "fp64", more), "--micro-batch-size", str(BATCH), "--attention", "softmax"]
        if tuple(flags) not in kept:
            kept[tuple(flags)] = train(1, flags, way=Way(masked=model.masked))
        return kept[tuple(flags)]

    return run
