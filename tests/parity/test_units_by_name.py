"""Units that a table of --placement names leave the device, and no others; and a run equals one process without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megazero.config.parse import parse_run
from megazero.config.tiers import Tier, offload_of
from megazero.mpu.axes import Coordinates, axes_of
from megazero.plan.kept import with_kept
from megazero.plan.shapes import shape_of, updated_layouts
from megazero.train.init_from import model_source
from tests.parity.training import data_flags, small_model, train, worst

MODEL = [*small_model(5, heads=4), "--ffn-hidden-size", "48", "--make-vocab-size-divisible-by", "1"]
TRAINS = ["--precision", "fp64", "--lr", "1e-2", "--clip-grad", "0.5", "--train-iters", "5", "--global-batch-size", "8"]
TABLES = {
    "ends": "optimizer: {tier: cpu, units: [the embedding, blocks 1-2]}\nlate_update: true\n",
    "blocks": (
        "optimizer: {tier: nvme, units: blocks 0-3}\nparams: {tier: nvme, units: [block 1, blocks 3-4]}\n"
        "gradients: {tier: cpu, units: [embedding, block 1]}\n"
    ),
    "kept": "activations: {tier: cpu, units: [block 0, block 2]}\ngradients: {tier: cpu, units: [blocks 0-4]}\n",
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


def table_flags(name: str, folder: Path) -> list[str]:
    (folder / "table.yaml").write_text(TABLES[name])
    disks = ["--nvme-path", str(folder)] if "nvme" in TABLES[name] else []
    return ["--placement", str(folder / "table.yaml"), *disks, "--nvme-buffer-bytes", "400KB"]


@pytest.mark.parametrize(("name", "ranks", "words"), LAYOUTS, ids=[f"{name} {words}" for name, _, words in LAYOUTS])
@pytest.mark.sampled(cases=3)
def test_a_run_with_named_units_equals_one_process(
    name: str, ranks: int, words: str, corpus: Path, tmp_path: Path
) -> None:
    untied = [word for word in words.split() if word.startswith("--untie")]
    data = data_flags(corpus, tmp_path / "cache")
    alone = train(1, [*MODEL, *TRAINS, *data, *untied, "--micro-batch-size", "8"])
    found = train(ranks, [*MODEL, *TRAINS, *data, *words.split(), *table_flags(name, tmp_path)])
    differences = worst(found, alone)
    assert all(value < 1e-9 for value in differences.values()), differences
    assert found.run is not None and ":" in f"{vars(found.run.parallel)} {vars(found.run.offload)}"


@pytest.mark.parametrize(("name", "ranks", "words"), LAYOUTS, ids=[f"{name} {words}" for name, _, words in LAYOUTS])
def test_what_leaves_is_what_is_named(name: str, ranks: int, words: str, tmp_path: Path) -> None:
    """On every stage: each bucket is of one unit, and a named one leaves as a whole."""
    flags = [*MODEL, *TRAINS, *words.split(), *table_flags(name, tmp_path), "--data-path", "x"]
    run = parse_run(flags, ranks, model_source)
    axes, left = axes_of(run.parallel, ranks), dict[str, set[str]]()
    columns = ("optimizer", "params", "gradients", "activations")
    for stage in range(axes.pp):
        at = Coordinates(stage, 0, 0, 0)
        shape, (layouts, _) = shape_of(run, axes, at, nccl=False), updated_layouts(run, axes, at, nccl=False)
        for layout, bucket in zip(layouts, shape.buckets, strict=True):
            tiers = {part.tier for part in bucket.parts} or {Tier.DEVICE}
            if layout.kept_whole:  # small parameters of several units, of which some have no name here
                assert (tiers, bucket.rests, bucket.sums) == ({Tier.DEVICE}, Tier.DEVICE, Tier.DEVICE)
                continue
            (unit,) = layout.units
            assert len(tiers) == 1, "a part of a unit has left"
            for column, tier in zip(columns, (*tiers, bucket.rests, bucket.sums), strict=False):
                if tier is not Tier.DEVICE:
                    left.setdefault(column, set()).add(unit)
                    assert tier is offload_of({**vars(run.parallel), **vars(run.offload)}[f"offload_{column}"]).tier
        for units in with_kept(shape, run, axes, stage).kept:
            if any(units):
                left.setdefault("activations", set()).update(str(number) for number, size in enumerate(units) if size)
    blocks = {number: f"block {number}" for number in range(5)}
    expected = {
        "ends": {"optimizer": {"embedding", blocks[1], blocks[2]}},
        "blocks": {
            "optimizer": {blocks[number] for number in range(4)},
            "params": {blocks[1], blocks[3], blocks[4]},
            "gradients": {"embedding", blocks[1]},
        },
        "kept": {"activations": {"1", "3"}, "gradients": {*blocks.values()}},  # behind the embedding
    }
    assert left == expected[name]
