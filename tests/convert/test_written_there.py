"""What DeepSpeed and Megatron-core have written is opened here, and holds what these programs say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megazero.convert.loading import model_of
from megazero.convert.megatron.registered import open_megatron
from megazero.convert.registry import open_source
from tests.convert.megatron_core import ids_of
from tests.convert.sources import made
from tests.convert.test_torch_dist import core_tensors
from tests.convert.test_universal import same
from tests.convert.written_there import (
    COMPUTED,
    POSITIONS,
    SAVED,
    UNIVERSAL,
    digest,
    recorded,
    universal_source,
    unpacked,
)

COLUMNS = {"weight": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


@pytest.mark.parametrize("name", [name for name in SAVED if name != "llama-own-layout"])
def test_state_that_megatron_core_has_saved(name: str, tmp_path: Path) -> None:
    model, held = SAVED[name].model, recorded()["held"][name]
    with open_megatron(unpacked(name, tmp_path)) as opened:
        assert opened.columns == tuple(COLUMNS) and opened.position.optimizer_steps == 2.0
        assert opened.model == model
        for ours, column in COLUMNS.items():
            found = core_tensors(opened, ours, stacked=False, fused=False)
            assert {key: digest(tensor, key, model) for key, tensor in found.items()} == held[column], column


def test_weights_beside_a_state_that_only_its_own_layout_can_read(tmp_path: Path) -> None:
    name = "llama-own-layout"
    model, held = SAVED[name].model, recorded()["held"][name]
    with open_megatron(unpacked(name, tmp_path)) as opened:
        assert opened.columns == ("weight",)
        assert any(
            "not carried over" in why for key, why in opened.report.unused.items() if key.startswith("optimizer")
        )
        found = core_tensors(opened, "weight", stacked=False, fused=False)
        assert {key: digest(tensor, key, model) for key, tensor in found.items()} == held["model"]


@pytest.mark.parametrize("name", COMPUTED)
def test_megatron_core_computes_what_we_do(name: str) -> None:
    """Of weights that are written here: `accepted.json` has what was written."""
    model = COMPUTED[name]
    with torch.no_grad():
        ours = model_of(made(model), precision="fp32")(ids_of(model))
    assert ours.std() > 0.1
    theirs = torch.tensor(recorded()["logits"][name])
    torch.testing.assert_close(ours.reshape(model.seq_length, -1)[POSITIONS], theirs, rtol=1e-5, atol=1e-5)


def test_what_deepspeed_makes_of_our_zero_files(tmp_path: Path) -> None:
    source = universal_source()
    with open_source(unpacked(UNIVERSAL, tmp_path) / "global_step7_universal", "universal") as opened:
        same(opened, source)
        assert opened.model.vocab_size == source.model.vocab_size and opened.position.optimizer_steps == 7.0
