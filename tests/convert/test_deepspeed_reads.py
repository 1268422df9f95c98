"""What is written in BLOOM's layout, read by DeepSpeed's own code: its view of a checkpoint, ds_to_universal and
zero_to_fp32. `test_accepted.py` holds that the same is written still.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megazero.convert.source import MOMENTS, WEIGHT
from tests.convert.accepted import write
from tests.convert.bloom_files import BLOCK, EMBEDDING, FINAL

NAMES = {f"tied_modules.embed.{key}": name for key, name, _ in EMBEDDING if "position" not in key}
NAMES |= {f"{number + 3}.{key}": f"blocks.{number}.{name}" for number in range(3) for key, name, _ in BLOCK}
NAMES |= {f"7.{key}": name for key, name, _ in FINAL}

SCRIPT = """
import argparse, os, sys, torch
from deepspeed.checkpoint import DeepSpeedCheckpoint, ds_to_universal
from deepspeed.utils import zero_to_fp32

parallel, universal, single, gated = sys.argv[1:]
view = DeepSpeedCheckpoint(parallel)
facts = {
    "degrees": (view.tp_degree, view.pp_degree, view.dp_degree),
    "iteration": view.get_iteration(),
    "args": vars(view.get_args()),
    "embedding": [view.get_embedding_state(t) for t in range(view.tp_degree)],
    "norm": view.get_final_norm_state(0),
}
workers = dict(num_extract_workers=1, num_merge_workers=1)
arguments = dict(**workers, keep_temp_folder=False, strict=True, inject_missing_state=False)
ds_to_universal.main(argparse.Namespace(input_folder=parallel, output_folder=universal, **arguments))
ds_to_universal.main(argparse.Namespace(input_folder=gated, output_folder=gated + "_universal", **arguments))

# zero_to_fp32 knows no pipeline: the model's files are one per tp rank, and have the (here empty) buffers in them
for file in os.listdir(single):
    if file.startswith("layer_"):
        os.remove(os.path.join(single, file))
path = os.path.join(single, "mp_rank_00_model_states.pt")
state = torch.load(path, weights_only=False)
state["module"] = {}
torch.save(state, path)
facts["fp32"] = dict(zero_to_fp32._get_fp32_state_dict_from_zero_checkpoint(single, exclude_frozen_parameters=False))
torch.save(facts, os.path.join(single, "facts.pt"))
"""


@pytest.mark.exhaustive
def test_deepspeed_reads_what_is_written(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    source, _, llama = (write(name, tmp_path / name) for name in ("parallel", "single", "gated"))
    parallel, single, gated = (tmp_path / name / "global_step7" for name in ("parallel", "single", "gated"))
    universal = tmp_path / "parallel" / "global_step7_universal"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(parallel), str(universal), str(single), str(gated)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    facts = torch.load(single / "facts.pt", weights_only=False)

    assert facts["degrees"] == (2, 2, 2) and facts["iteration"] == 7 and facts["args"]["num_attention_heads"] == 4
    rows = torch.cat([state["word_embeddings.weight"] for state in facts["embedding"]])
    assert torch.equal(rows[:97], source.read("embedding.word.weight").bfloat16())
    assert torch.equal(facts["norm"]["bias"], source.read("head.norm.bias").bfloat16())

    assert set(facts["fp32"]) == set(NAMES)
    for theirs, name in NAMES.items():
        assert torch.equal(facts["fp32"][theirs][: source.entries[name].shape[0]], source.read(name)), theirs

    assert {path.name for path in (universal / "zero").iterdir() if path.is_dir()} == set(NAMES)
    for theirs, name in NAMES.items():
        for file, column in (("fp32", WEIGHT), *((column, column) for column in MOMENTS)):
            held = torch.load(universal / "zero" / theirs / f"{file}.pt", weights_only=False)
            assert torch.equal(held["param"], source.read(name, column)), (theirs, column)
        assert torch.load(universal / "zero" / theirs / "step.pt", weights_only=False) == 7
    assert (tmp_path / "parallel" / "latest_universal").read_text() == "global_step7_universal"

    zero = tmp_path / "gated" / "global_step7_universal" / "zero"
    held = torch.load(zero / "4.mlp.dense_h_to_4h.weight" / "exp_avg.pt", weights_only=False)
    assert torch.equal(
        held["param"], torch.cat([llama.read(f"blocks.1.mlp.{half}.weight", "exp_avg") for half in ("gate", "up")])
    )
    held = torch.load(zero / "8.lm_head.weight" / "fp32.pt", weights_only=False)
    assert torch.equal(held["param"], llama.read("head.weight"))
