"""A model of transformers, laid out as BLOOM's files are by FORMATS.md's table, gives the same logits when it is opened
from them; and goes back.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import megazero
from megazero.config.schema import ModelConfig
from megazero.convert.formats import TargetOptions
from megazero.convert.registry import format_table, open_source
from tests.convert.bloom_files import Layout, save_bloom

PLACES = {
    "word_embeddings.": "embedding.word.",
    "word_embeddings_layernorm.": "embedding.norm.",
    "ln_f.": "head.norm.",
    "input_layernorm.": "attention_norm.",
    "self_attention.query_key_value.": "attention.qkv.",
    "self_attention.dense.": "attention.output.",
    "post_attention_layernorm.": "mlp_norm.",
    "mlp.dense_h_to_4h.": "mlp.up.",
    "mlp.dense_4h_to_h.": "mlp.down.",
}
"""transformers' words -> those by which the files' builder knows a tensor."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "heads"), [(Layout(3, (1, 1), rows=768), 6), (Layout(1, (2,)), 5)], ids=["tp3", "tp1"]
)
def test_logits_are_those_of_transformers(tmp_path: Path, layout: Layout, heads: int) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BloomConfig(
        vocab_size=97, hidden_size=6 * heads, n_layer=2, n_head=heads, layer_norm_epsilon=1e-5
    )
    torch.manual_seed(3)
    theirs = transformers.BloomForCausalLM(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    values = {}
    for key, tensor in theirs.transformer.state_dict().items():
        number, _, rest = key.removeprefix("h.").partition(".") if key.startswith("h.") else ("", "", key)
        word = next(word for word in PLACES if rest.startswith(word))
        values[(f"blocks.{number}." if number else "") + PLACES[word] + rest.removeprefix(word)] = tensor
    model = ModelConfig(
        num_layers=2,
        hidden_size=6 * heads,
        num_attention_heads=heads,
        vocab_size=97,
        seq_length=16,
        embedding_layernorm=True,
    )
    save_bloom({"weight": values}, model, tmp_path / "bloom", layout, dtype=torch.float32, bf16=False)

    ids = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = theirs(ids).logits
    found = megazero.load(tmp_path / "bloom", precision="fp32")(ids)
    assert found.shape == wanted.shape and (found - wanted).abs().max() < 2e-5 * wanted.abs().max()

    write = format_table()["hf"].write
    assert write is not None
    (tmp_path / "hf").mkdir()
    with open_source(tmp_path / "bloom") as source:
        write(source, tmp_path / "hf", TargetOptions(), lambda count: None)
    again = transformers.BloomForCausalLM.from_pretrained(tmp_path / "hf")
    kept = theirs.state_dict()
    assert all(torch.equal(tensor, kept[key]) for key, tensor in again.state_dict().items())
