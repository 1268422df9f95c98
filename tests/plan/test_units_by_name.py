"""Units that a table of --placement names leave the device, and no others, on every stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from megazero.config.parse import parse_run
from megazero.config.tiers import Tier
from megazero.mpu.axes import Coordinates, axes_of
from megazero.plan.planned_model import with_kept
from megazero.plan.rank_state import RankState
from megazero.train.init_from import model_source
from tests.parity.training import small_model

MODEL = [*small_model(5, heads=4), "--ffn-hidden-size", "48", "--make-vocab-size-divisible-by", "1", "--data-path", "x"]
TABLES = {
    "ends": "optimizer: {tier: cpu, units: [the embedding, blocks 1-2]}\nlate_update: true\n",
    "blocks": (
        "optimizer: {tier: nvme, units: blocks 0-3}\nparams: {tier: nvme, units: [block 1, blocks 3-4]}\n"
        "gradients: {tier: cpu, units: [embedding, block 1]}\n"
    ),
    "kept": "activations: {tier: cpu, units: [block 0, block 2]}\ngradients: {tier: cpu, units: [blocks 0-4]}\n",
}
BLOCKS = [f"block {number}" for number in range(5)]
NAMED = {
    "ends": {"optimizer": {"embedding", *BLOCKS[1:3]}},
    "blocks": {"optimizer": {*BLOCKS[:4]}, "params": {BLOCKS[1], *BLOCKS[3:]}, "gradients": {"embedding", BLOCKS[1]}},
    "kept": {"activations": {"1", "3"}, "gradients": {*BLOCKS}},  # activations: by number, behind the embedding
}
LAYOUTS = (
    ("ends", 1, "--micro-batch-size 4 --bucket-size 2000"),
    ("ends", 2, "--micro-batch-size 2 --zero-stage 2"),
    ("ends", 4, "--micro-batch-size 2 --zero-stage 1 --pp 2 --partition 3 2"),
    ("blocks", 2, "--micro-batch-size 1 --zero-stage 3 --zero3-persist-below 100"),
    ("blocks", 4, "--micro-batch-size 2 --zero-stage 1 --pp 2 --partition 2 3 --tp 2 --micro-batch-order horizontal"),
    ("kept", 2, "--micro-batch-size 2 --zero-stage 1 --tp 2"),
    ("kept", 2, "--micro-batch-size 2 --zero-stage 2 --untie-embeddings-and-output-weights"),
)


@pytest.mark.parametrize(("name", "ranks", "words"), LAYOUTS, ids=[f"{name} {words}" for name, _, words in LAYOUTS])
def test_what_leaves_is_what_is_named(name: str, ranks: int, words: str, tmp_path: Path) -> None:
    """Each bucket is of one unit, and a named one leaves as a whole."""
    (tmp_path / "table.yaml").write_text(TABLES[name])
    disks = ["--nvme-path", str(tmp_path)] if "nvme" in TABLES[name] else []
    placed = ["--placement", str(tmp_path / "table.yaml"), *disks, "--nvme-buffer-bytes", "400KB"]
    run = parse_run([*MODEL, "--global-batch-size", "8", *words.split(), *placed], ranks, model_source)
    axes, left, settings = axes_of(run, ranks), dict[str, set[str]](), vars(run.parallel) | vars(run.offload)
    for stage in range(axes.pp):
        at = Coordinates(stage, 0, 0, 0)
        state = RankState(run, axes, at, nccl=False)
        for layout, bucket in zip(state.layouts, state.shape.buckets, strict=True):
            tiers = {part.tier for part in bucket.parts} or {Tier.DEVICE}
            if layout.kept_whole:  # small parameters of several units, of which some have no name here
                assert (tiers, bucket.rests, bucket.sums) == ({Tier.DEVICE}, Tier.DEVICE, Tier.DEVICE)
                continue
            (unit,) = layout.units
            assert len(tiers) == 1, "a part of a unit has left"
            columns = zip(("optimizer", "params", "gradients"), (*tiers, bucket.rests, bucket.sums), strict=True)
            for column, tier in columns:
                if tier is not Tier.DEVICE:
                    left.setdefault(column, set()).add(unit)
                    assert tier is settings[f"offload_{column}"].tier
        for units in with_kept(state.shape, run, axes, stage).kept:
            if any(units):
                left.setdefault("activations", set()).update(str(number) for number, size in enumerate(units) if size)
    assert left == NAMED[name]
