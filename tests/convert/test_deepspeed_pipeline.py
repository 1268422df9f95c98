"""What is written in BLOOM's layout, opened by DeepSpeed's pipeline engine itself: stages, ZeRO partitions and
tensor-parallel parts. `test_accepted.py` holds that the same is written still.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megazero.config.derive import padded_vocab
from megazero.convert.formats import TargetOptions
from megazero.convert.megatron_deepspeed.writer import write_megatron_deepspeed
from megazero.convert.source import MOMENTS, WEIGHT, ConversionError
from tests.convert.accepted import TIED, UNTIED, balances, begins, trained, write
from tests.convert.bloom_files import Layout, layer_tensors, stage_parameters
from tests.convert.sources import Made, made

UNREAD = "tied_modules.embed.word_embeddings.norm."
"""Of the last stage's copy of the embedding DeepSpeed reads no layer file and shares the table only; the copy's norm is
not used there.
"""
COLUMNS = (WEIGHT, *MOMENTS)
SCRIPT = Path(__file__).with_name("deepspeed_pipeline.py")


@dataclass(frozen=True)
class Case:
    source: Made
    wanted: TargetOptions
    layout: Layout

    @property
    def tied(self) -> bool:
        return not self.source.model.untie_embeddings_and_output_weights

    def held(self, rank: int) -> dict[str, dict[str, Tensor]]:
        """column -> parameter -> what this rank has of it, in the order pipeline, data, tensor of DeepSpeed's ranks."""
        stage, t = rank // (self.wanted.dp * self.wanted.tp), rank % self.wanted.tp
        model = self.source.model
        columns = {column: {name: self.source.read(name, column) for name in self.source.entries} for column in COLUMNS}
        return {
            column: stage_parameters(layer_tensors(values, model, self.layout, t), model, self.layout, stage)
            for column, values in columns.items()
        }

    def specs(self) -> list[dict[str, tuple[int, ...]] | None]:
        """For each layer of the pipeline the shapes of what a tp rank holds; a tied embedding stands at the end once
        more.
        """
        model = self.source.model
        values = {name: self.source.read(name) for name in self.source.entries}
        layers = layer_tensors(values, model, self.layout, 0)
        shapes = {number: {key: tuple(tensor.shape) for key, tensor in held.items()} for number, held in layers.items()}
        if self.tied:
            shapes[model.num_layers + 5] = shapes[1]
        return [shapes.get(number) for number in range(model.num_layers + 6)]


CASES = {
    "tied-tp2-pp2": Case(trained(TIED), TargetOptions(tp=2, pp=2), Layout(2, (1, 1), rows=256)),
    "untied-pp2-dp2": Case(trained(UNTIED), TargetOptions(pp=2, dp=2), Layout(1, (2, 1), 2, rows=256)),
}


def ranks(folder: Path, size: int) -> list[dict[str, Any]]:
    """What each rank's engine read."""
    root = str(Path(__file__).resolve().parents[2])
    fixed = os.environ | {"WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder)],
            env=fixed | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
        )
        for rank in range(size)
    ]
    told = [process.communicate(timeout=300)[0] for process in started]
    assert all(process.returncode == 0 for process in started), "\n".join(text[-3000:] for text in told)
    return [torch.load(folder / f"read-{rank}.pt", weights_only=False) for rank in range(size)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_the_pipeline_engine_opens_it(name: str, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    case = CASES[name]
    wanted = case.wanted
    assert padded_vocab(case.source.model, wanted.tp) == case.layout.rows
    write(name, tmp_path / "checkpoint")
    weights = balances(int(case.tied))
    sizes = {"tp": wanted.tp, "pp": wanted.pp, "dp": wanted.dp}
    torch.save({**sizes, "tied": case.tied, "specs": case.specs(), "to balance": list(weights)}, tmp_path / "job.pt")
    for rank, read in enumerate(ranks(tmp_path, wanted.tp * wanted.pp * wanted.dp)):
        held = case.held(rank)
        assert read["steps"] == 7 and read["args"]["num_attention_heads"] == 4
        for column in COLUMNS:
            assert set(read[column]) == set(held[column])
            for name, value in held[column].items():
                assert torch.equal(read[column][name], value), (rank, column, name)
        for name, value in held[WEIGHT].items():
            if rank < wanted.tp * wanted.dp or not name.startswith(UNREAD):
                assert torch.equal(read["bf16"][name], value.bfloat16()), (rank, name)
        for (counted, pp), parts in read["balanced"].items():
            ours = begins(replace(case.source.model, num_layers=weights[counted, pp]), counted, pp)
            assert ours == [sum(counted[:start]) for start in parts[:-1]], (weights[counted, pp], pp)


def test_no_stage_without_a_block_where_the_head_is_untied(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"--pp 4 with --num-layers 3 and a head of its own: .* nearest: --pp 3"):
        write_megatron_deepspeed(made(UNTIED), tmp_path, TargetOptions(pp=4), lambda count: None)
