"""What is written as a universal checkpoint, read by DeepSpeed: its engine, and its slices for tensor-parallel ranks.

And what DeepSpeed makes, read here. `test_accepted.py` holds that the same is written still.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megazero.convert.registry import open_source
from tests.convert.accepted import write
from tests.convert.test_universal import COLUMNS, same

PARTS = {
    "input_layernorm": "attention_norm",
    "self_attention.query_key_value": "attention.qkv",
    "self_attention.dense": "attention.output",
    "post_attention_layernorm": "mlp_norm",
    "mlp.dense_4h_to_h": "mlp.down",
}
BY_COLUMNS = ("self_attention.dense.weight", "mlp.dense_4h_to_h.weight")
BY_ROWS = tuple(f"{layer}.{kind}" for layer in ("query_key_value", "dense_h_to_4h") for kind in ("weight", "bias"))
BY_ROWS += ("embeddings.weight", "lm_head.weight")
PADDED = 104


def wholes(source, column):
    """Every parameter under BLOOM's name, the vocabulary padded with zeros."""
    found = {}
    for name in source.entries:
        kind = name.rsplit(".", 1)[1]
        value = source.read(name, column)
        if name.startswith("blocks."):
            _, number, rest = name.split(".", 2)
            if rest.startswith("mlp.gate"):
                value = torch.cat([value, source.read(name.replace("gate", "up"), column)])
                rest = "mlp.up"
            elif rest.startswith("mlp.up") and source.model.activation == "swiglu":
                continue
            part = {ours: theirs for theirs, ours in PARTS.items()}.get(rest.rsplit(".", 1)[0], "mlp.dense_h_to_4h")
            found[f"{int(number) + 3}.{part}.{kind}"] = value
        elif name.startswith("head.norm"):
            found[f"{source.model.num_layers + 4}.{kind}"] = value
        elif name in ("embedding.word.weight", "head.weight"):
            value = torch.cat([value, torch.zeros(PADDED - 97, value.shape[1])])
            tied = not source.model.untie_embeddings_and_output_weights
            key = "tied_modules.embed.word_embeddings.weight" if tied else "1.word_embeddings.weight"
            found[f"{source.model.num_layers + 5}.lm_head.weight" if name == "head.weight" else key] = value
        else:
            found[f"tied_modules.embed.word_embeddings.norm.{kind}"] = value
    return found


def slices(name, whole, world, gated):
    """What each of `world` tp ranks has in memory."""
    if name.endswith(BY_COLUMNS):
        return whole.chunk(world, 1)
    if not name.endswith(BY_ROWS):
        return [whole] * world
    if gated and "h_to_4h" in name:
        gate, up = whole.chunk(2)
        return [torch.cat(pair) for pair in zip(gate.chunk(world), up.chunk(world), strict=True)]
    return whole.chunk(world)


@pytest.mark.exhaustive
def test_deepspeed_reads_and_is_read(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    names = ("universal", "llama", "consolidated", "zero-files")
    bloom, llama, *_ = (write(name, tmp_path / name) for name in names)
    folders = {"universal/global_step7_universal/zero": bloom, "llama/global_step7_universal/zero": llama}
    expected = {folder: {column: wholes(source, column) for column in COLUMNS} for folder, source in folders.items()}
    gated = {folder: source.model.activation == "swiglu" for folder, source in folders.items()}

    def shapes(folder: str) -> dict[str, dict[int, tuple[int, ...]]]:
        weights = expected[folder]["weight"]
        return {
            n: {world: tuple(slices(n, w, world, gated[folder])[0].shape) for world in (1, 2)}
            for n, w in weights.items()
        }

    in_memory = {name: tuple(value.shape) for name, value in expected[next(iter(folders))]["weight"].items()}
    # the state dictionary has no padding: an engine that is to take it strictly has none either
    in_memory["tied_modules.embed.word_embeddings.weight"] = (97, 24)
    torch.save({"shapes": in_memory, "slices": {folder: shapes(folder) for folder in folders}}, tmp_path / "job.pt")
    script = Path(__file__).with_name("deepspeed_universal.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    read = torch.load(tmp_path / "read.pt", weights_only=False)

    engine = read["engine"]
    assert engine["steps"] == 7 and engine["args"]["num_attention_heads"] == 4
    assert set(engine["weight"]) == set(in_memory)
    for name, shape in in_memory.items():
        for column in COLUMNS:
            assert torch.equal(engine[column][name], expected[next(iter(folders))][column][name][: shape[0]]), (
                name,
                column,
            )
        rounded = expected[next(iter(folders))]["weight"][name][: shape[0]].bfloat16()
        assert torch.equal(engine["bf16"][name], rounded) and torch.equal(engine["consolidated"][name], rounded), name
    first, second = engine["groups"]
    optimizer = bloom.run.optimizer
    assert (first["weight_decay"], second["weight_decay"]) == (optimizer.weight_decay, 0.0)
    assert (
        first["betas"] == second["betas"] == (optimizer.adam_beta1, optimizer.adam_beta2)
        and first["lr"] == bloom.run.schedule.lr
    )
    assert [float(step) for step in engine["adam steps"]] == [7.0, 7.0]

    for folder in folders:
        found = read["slices"][folder]
        assert set(found) == set(expected[folder]["weight"])
        for name, worlds in found.items():
            for world, ranks in worlds.items():
                for rank, values in enumerate(ranks):
                    assert float(values["step"]) == 7.0
                    for column in COLUMNS:
                        wanted = slices(name, expected[folder][column][name], world, gated[folder])[rank]
                        assert torch.equal(values[column], wanted), (name, world, rank, column)

    with open_source(tmp_path / "zero-files" / "global_step7_universal", "universal") as opened:
        same(opened, bloom)
        assert opened.model.vocab_size == 97 and opened.position.optimizer_steps == 7.0
