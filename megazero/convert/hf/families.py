"""The families of Hugging Face models that are read and written."""

from __future__ import annotations

from collections.abc import Mapping

from megazero.convert.hf import bloom, gpt2, llama, opt
from megazero.convert.hf.tables import Family

FAMILIES: Mapping[str, Family] = {
    found.model_type: found for found in (bloom.FAMILY, gpt2.FAMILY, llama.FAMILY, opt.FAMILY)
}
"""The families by model_type, in the order in which they are tried for a model of another format."""
