"""The families of Hugging Face models that are read and written: those of this folder, and those of installed packages
(`system.extensions.FAMILIES`).
"""

from __future__ import annotations

from collections.abc import Mapping

from megazero.convert.hf import bloom, gemma, gpt2, gpt_neox, llama, opt, phi3
from megazero.convert.hf.tables import Family
from megazero.system import extensions
from megazero.system.reading import shown

_ALL = (
    *(bloom.FAMILY, gpt2.FAMILY, llama.FAMILY, opt.FAMILY),
    *(llama.QWEN2, llama.QWEN3, llama.MISTRAL, llama.OLMO2, llama.SMOLLM3, llama.GRANITE),
    *(gemma.GEMMA2, gemma.GEMMA3, phi3.FAMILY, gpt_neox.FAMILY),
)
FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _ALL}
"""The families of this folder by model_type, in the order in which they are tried for a model of another format."""


def known_families() -> tuple[str, ...]:
    """The model_types that are known here. No package's code is imported."""
    return *FAMILIES, *(name for name in extensions.names(extensions.FAMILIES) if name not in FAMILIES)


def family_called(model_type: str) -> Family:
    """The family of a known model_type. Raises ValueError where a package has it too, or what the package gives is no
    family.
    """
    if model_type in FAMILIES:
        extensions.refuse_twin(extensions.FAMILIES, model_type)
        return FAMILIES[model_type]
    family = extensions.load(extensions.FAMILIES, model_type)(model_type)
    if not isinstance(family, Family) or family.model_type != model_type:
        raise ValueError(f"{model_type} of {extensions.FAMILIES}: {shown(str(family))} is no Family of that model_type")
    return family
