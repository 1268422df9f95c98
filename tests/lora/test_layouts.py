"""Adapters trained on any layout are those of one process: losses, norms and adapters in float64; the weights beneath
never move.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megazero.convert.registry import open_source
from tests.parity.training import Outcome, data_flags, train, worst
from tests.tables import rows

STEPS = 4
SHAPES = {
    "tied": "--num-attention-heads 12 --position-embedding alibi --embedding-layernorm",
    "gated": "--num-attention-heads 8 --num-query-groups 4 --position-embedding rotary --norm rmsnorm --activation "
    "swiglu --ffn-hidden-size 48"
    " --disable-bias-linear --untie-embeddings-and-output-weights --hidden-size 32",
}
MODEL = (
    "--num-layers 4 --hidden-size 24 --seq-length 12 --vocab-size 1003 --init-method-std 0.1 "
    "--make-vocab-size-divisible-by 1"
)
NUMBERS = (
    f"--precision fp64 --global-batch-size 12 --lr 1e-2 --clip-grad 0.05 --lora-rank 3 --lora-dropout 0.2 "
    f"--hidden-dropout 0.1 --seq-length 12 --train-iters {STEPS}"
)
LAYOUTS = {
    name: (shape, int(ranks), words)
    for name, shape, ranks, words in rows("""
tp4-sp | gated | 4 | --tp 4 --sequence-parallel --micro-batch-size 4 --recompute-granularity full
tp2-sp-pp2-zb-h1 | tied | 4 | --tp 2 --sequence-parallel --pp 2 --pipeline-schedule zb-h1 --recompute-granularity full
tp2-dp2-z2 | gated | 4 | --tp 2 --zero-stage 2 --bucket-size 300
pp2-dp2-z1-interleaved | tied | 4 | --pp 2 --zero-stage 1 --virtual-stages 2 --micro-batch-size 1 --bucket-size 500
pp2-dp2-zb-v-z2 | tied | 4 |
    --pp 2 --zero-stage 2 --pipeline-schedule zb-v --virtual-stages 2 --recompute-granularity selective
ends-alone-zb-h1 | tied | 4 | --pp 4 --partition 0 2 2 0 --micro-batch-size 4 --pipeline-schedule zb-h1
""")
}


def flags_for(corpus: Path, base: Path, folder: Path) -> list[str]:
    return [*NUMBERS.split(), *data_flags(corpus, folder), "--init-from", str(base)]


@pytest.fixture(scope="session")
def bases(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A step of each shape of model, saved."""
    folder = tmp_path_factory.mktemp("bases")
    for name, shape in SHAPES.items():
        words = f"{MODEL} {shape} --precision fp64 --global-batch-size 2 --train-iters 1 --seed 3"
        train(1, [*words.split(), *data_flags(corpus, folder / "cache"), "--save", str(folder / name)])
    return {name: folder / name for name in SHAPES}


@pytest.fixture(scope="module")
def alone(corpus: Path, bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """On one process, in one micro-batch."""
    folder = tmp_path_factory.mktemp("alone")
    return {
        name: train(1, [*flags_for(corpus, base, folder), "--micro-batch-size", "12"]) for name, base in bases.items()
    }


def is_adapter(name: str) -> bool:
    return name.endswith((".lora_a", ".lora_b"))


@pytest.mark.slow
@pytest.mark.sampled(cases=3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_trains_the_adapters_of_one_process(
    layout: str, alone: dict[str, Outcome], bases: dict[str, Path], corpus: Path, tmp_path: Path
) -> None:
    shape, ranks, words = LAYOUTS[layout]
    found = train(ranks, [*flags_for(corpus, bases[shape], tmp_path), *words.split()])
    assert len(found.records) == STEPS and all(record.grad_norm > 0.05 for record in found.records), (
        "clipping is to bind"
    )
    assert all(value < 1e-9 for value in worst(found, alone[shape]).values()), worst(found, alone[shape])
    with open_source(bases[shape]) as source:
        assert {name for name in found.weights if not is_adapter(name)} == source.entries.keys()
        assert all(torch.equal(found.weights[name], source.read(name)) for name in source.entries)
    adapters = {name: values for name, values in found.weights.items() if is_adapter(name)}
    assert len(adapters) == 2 * 4 * (5 if shape == "gated" else 4)
    assert all(values.abs().max() > 0 for values in adapters.values()), "every B has left 0"
