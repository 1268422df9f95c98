"""FLOPs by formula, against the line of BLOOM's log and against a count of the products one by one."""

from dataclasses import replace
from typing import Any

import pytest

from megazero.config.derive import every_kth
from megazero.config.schema import ModelConfig
from megazero.plan.flops import model_flops, recomputed_flops
from megazero.telemetry.units import teraflops_per_rank

BLOOM = ModelConfig(num_layers=70, hidden_size=14336, num_attention_heads=112, vocab_size=250880, seq_length=2048)


def test_blooms_log_line() -> None:
    """105.22 s per iteration of 2048 samples on 384 GPUs: the log says 149.02 TFLOP/s, counted with recompute."""
    hardware = model_flops(BLOOM, 2048) + recomputed_flops(BLOOM, 2048, ("full",) * 70)
    assert f"{teraflops_per_rank(hardware, 105.22, 384):.2f}" == "149.02"
    assert f"{teraflops_per_rank(model_flops(BLOOM, 2048), 105.22, 384):.2f}" == "112.33"


@pytest.mark.parametrize(
    ("layers", "hidden", "vocabulary", "sequence", "samples"),
    [(70, 14336, 250880, 2048, 2048), (12, 768, 50257, 1024, 3), (1, 64, 1003, 7, 1)],
)
def test_a_standard_model_has_the_published_formula(
    layers: int, hidden: int, vocabulary: int, sequence: int, samples: int
) -> None:
    model = ModelConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=4, vocab_size=vocabulary, seq_length=sequence
    )
    common = samples * sequence * layers * hidden**2
    attention = sequence / (6 * hidden)
    head = vocabulary / (layers * hidden)
    assert model_flops(model, samples) == pytest.approx(72 * common * (1 + attention + head / 12), rel=1e-15)
    hardware = model_flops(model, samples) + recomputed_flops(model, samples, ("full",) * layers)
    assert hardware == pytest.approx(96 * common * (1 + attention + head / 16), rel=1e-15)
    assert recomputed_flops(model, samples, ("none",) * layers) == 0
    assert recomputed_flops(model, samples, ("selective",) * layers) == samples * layers * 4 * sequence**2 * hidden


def test_grouped_query_and_swiglu_product_by_product() -> None:
    shape: dict[str, Any] = {"num_attention_heads": 6, "num_query_groups": 2, "ffn_hidden_size": 160}
    model = ModelConfig(num_layers=3, hidden_size=96, activation="swiglu", seq_length=32, vocab_size=500, **shape)
    s, h, d = 32, 96, 16
    products = [(s, h, 6 * d), (s, h, 2 * d), (s, h, 2 * d), (s, 6 * d, h)]  # query, key, value, output
    products += [(s, d, s), (s, s, d)] * 6  # scores and weighted values of each head
    products += [(s, h, 160), (s, h, 160), (s, 160, h)]  # gate, up, down
    forward = 3 * sum(2 * a * b * c for a, b, c in products) + 2 * s * h * 500
    assert model_flops(model, 5) == 3 * 5 * forward


def test_every_kth_block_recomputed() -> None:
    model = replace(BLOOM, num_layers=7)
    block = recomputed_flops(replace(model, num_layers=1), 1, ("full",))
    for k, count in ((1, 7), (2, 4), (3, 3), (7, 1), (8, 1)):
        assert recomputed_flops(model, 1, every_kth(7, "full", k)) == count * block


def test_a_table_counts_block_by_block() -> None:
    core, block = (recomputed_flops(replace(BLOOM, num_layers=1), 1, (kind,)) for kind in ("selective", "full"))
    four = replace(BLOOM, num_layers=4)
    assert recomputed_flops(four, 3, ("full", "none", "selective", "full")) == 3 * (2 * block + core)


def test_unknown_recompute_is_refused() -> None:
    with pytest.raises(ValueError, match="--recompute-granularity some"):
        every_kth(4, "some")
    with pytest.raises(ValueError, match="--recompute-num-layers 0"):
        every_kth(4, "full", 0)


def test_narrow_ffn_and_wide_heads() -> None:
    heads: dict[str, Any] = {"num_attention_heads": 2, "kv_channels": 8}
    narrow = ModelConfig(num_layers=2, hidden_size=8, ffn_hidden_size=16, vocab_size=10, seq_length=4, **heads)
    assert model_flops(narrow, 1) == 3 * (2 * (2 * 4 * (4 * 8 * 16 + 2 * 8 * 16) + 4 * 16 * 16) + 2 * 4 * 8 * 10)
