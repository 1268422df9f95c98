"""Megatron-core's own program opens what is written here, and what it writes is opened here.

In `make test`, which does not install it, `test_accepted.py` holds that the same is written still, and
`test_written_there.py` opens what it has written.
"""

from __future__ import annotations

from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import torch

from megazero.config.schema import ModelConfig
from megazero.convert.loading import model_of
from megazero.convert.megatron.registered import open_megatron
from megazero.convert.source import Source
from tests.convert.accepted import write
from tests.convert.megatron_core import ids_of, load_and_tell, open_ours, train_and_save
from tests.convert.test_megatron import GPT, LLAMA, same
from tests.convert.test_torch_dist import core_tensors
from tests.ranks import run_ranks

# Looked for and not imported: it takes seconds, and only ranks need it.
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not any(packages_distributions().get("megatron", ())), reason="megatron-core is not installed"),
]
COLUMNS = {"weight": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def as_they_are_there(opened: Source, theirs: dict[str, dict[str, torch.Tensor]], columns: dict[str, str]) -> None:
    """Bit for bit; of a table the rows that stand for tokens."""
    for ours, column in columns.items():
        found = core_tensors(opened, ours, stacked=False, fused=False)
        assert set(found) == set(theirs[column])
        for name, expected in theirs[column].items():
            rows = opened.model.vocab_size if "word_embeddings" in name or "output_layer" in name else expected.shape[0]
            assert expected.float().std() > 0 or "norm" in name or "bias" in name
            assert torch.equal(found[name][:rows], expected[:rows]), (column, name)


@pytest.mark.parametrize(
    ("model", "tp", "pp"), [(GPT, 2, 1), (LLAMA, 1, 2), (LLAMA, 2, 1)], ids=["gpt-tp2", "llama-pp2", "llama-tp2"]
)
def test_what_it_saves_by_name_is_what_it_loads(tmp_path: Path, model: ModelConfig, tp: int, pp: int) -> None:
    """Saved by two ranks; loaded by Megatron-core on one, and by us."""
    run_ranks(2, train_and_save, str(tmp_path), model, tp, pp, "plain")
    (theirs,) = run_ranks(1, load_and_tell, str(tmp_path), model)
    with open_megatron(tmp_path) as opened:
        assert opened.columns == tuple(COLUMNS) and opened.position.optimizer_steps == 2.0
        assert opened.model == model
        as_they_are_there(opened, theirs, COLUMNS)


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_its_distributed_optimizer(tmp_path: Path, model: ModelConfig) -> None:
    """Two data-parallel ranks with half the state each, against one rank that has taken the same
    steps with the whole.
    """
    run_ranks(2, train_and_save, str(tmp_path / "two"), model, 1, 1, "distributed")
    (theirs,) = run_ranks(1, train_and_save, str(tmp_path / "one"), model, 1, 1, "plain")
    with open_megatron(tmp_path / "two") as opened:
        assert opened.columns == tuple(COLUMNS) and opened.position.optimizer_steps == 2.0
        as_they_are_there(opened, theirs, COLUMNS)


def test_a_state_that_only_its_own_layout_can_read(tmp_path: Path) -> None:
    (weights,) = run_ranks(1, train_and_save, str(tmp_path), LLAMA, 1, 1, "distributed", "dp_reshardable")
    with open_megatron(tmp_path) as opened:
        assert opened.columns == ("weight",)
        assert any(
            "not carried over" in why for key, why in opened.report.unused.items() if key.startswith("optimizer")
        )
        as_they_are_there(opened, {"model": weights["model"]}, {"weight": "model"})


@pytest.mark.slow
def test_its_torch_format_keeps_the_optimizer_in_our_order(tmp_path: Path) -> None:
    """Nothing in such a file says which state is whose; the optimizer that wrote it does."""
    (theirs,) = run_ranks(1, train_and_save, str(tmp_path), GPT, 1, 1, "torch")
    with open_megatron(tmp_path) as opened:
        assert opened.columns == tuple(COLUMNS) and opened.position.optimizer_steps == 2.0
        as_they_are_there(opened, theirs, COLUMNS)


@pytest.mark.parametrize(
    ("name", "model", "tp", "pp"), [("megatron-gpt-tp2-pp2", GPT, 2, 2), ("megatron-llama-tp2", LLAMA, 2, 1)]
)
def test_what_is_written_here_is_loaded_there(tmp_path: Path, name: str, model: ModelConfig, tp: int, pp: int) -> None:
    """Strictly, by the ranks that it is written for; what they then save is what was written."""
    source = write(name, tmp_path / "ours")
    run_ranks(tp * pp, open_ours, str(tmp_path / "ours"), model, tp, pp, str(tmp_path / "theirs"))
    with open_megatron(tmp_path / "theirs") as opened:
        same(opened, source)
        assert opened.model == model


@pytest.mark.parametrize(("name", "model"), [("megatron-gpt", GPT), ("megatron-llama", LLAMA)])
def test_its_model_computes_what_ours_does(tmp_path: Path, name: str, model: ModelConfig) -> None:
    source = write(name, tmp_path / "ours")
    (theirs,) = run_ranks(1, open_ours, str(tmp_path / "ours"), model, 1, 1, str(tmp_path / "theirs"))
    with torch.no_grad():
        ours = model_of(source, precision="fp32")(ids_of(model))
    assert ours.std() > 0.1
    torch.testing.assert_close(theirs[..., : model.vocab_size].reshape(ours.shape), ours, rtol=1e-5, atol=1e-5)
