"""The families of Hugging Face models that are read and written."""

from __future__ import annotations

from collections.abc import Mapping

from megazero.convert.hf import bloom, gemma, gpt2, gpt_neox, llama, opt, phi3
from megazero.convert.hf.tables import Family

_ALL = (
    *(bloom.FAMILY, gpt2.FAMILY, llama.FAMILY, opt.FAMILY),
    *(llama.QWEN2, llama.QWEN3, llama.MISTRAL, llama.OLMO2, llama.SMOLLM3, llama.GRANITE),
    *(gemma.GEMMA2, gemma.GEMMA3, phi3.FAMILY, gpt_neox.FAMILY),
)
FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _ALL}
"""The families by model_type, in the order in which they are tried for a model of another format."""
