"""A small tokenizer with a chat template, and conversations for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHATML = """{{ bos_token }}{% for message in messages %}
<|im_start|>{{ message['role'] }}
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] | trim }}<|im_end|>{% endgeneration %}
{% else %}{{ message['content'] | trim }}<|im_end|>{% endif %}

{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""With the blocks that say what is generated."""
PLAIN = """{{ bos_token }}{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
WORDS = "the quick brown fox asked a lazy dog what two and two make; it said four, naturally. Grüße, 你好 \U0001f600!"


HEADERS = """{% for message in messages %}
{%- set content = '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|im_end|>' %}
{%- if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n\\n' }}{% endif %}"""
INSTRUCT = """{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}{% endif %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"""


def _bytes() -> tuple[Any, Any]:
    """GPT-2's and LLaMA-3's kind."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return model, trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )


def _metaspace() -> tuple[Any, Any]:
    """LLaMA-2's kind: blanks are symbols, and a character without a token becomes bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    model.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    symbols = ["<unk>", *SPECIALS, *(f"<0x{value:02X}>" for value in range(256))]
    return model, trainers.BpeTrainer(vocab_size=340, special_tokens=symbols, show_progress=False)


def _unigram() -> tuple[Any, Any]:
    """T5's kind: special tokens are pieces like any other, and the text is normalised."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    model = Tokenizer(models.Unigram())
    model.normalizer = normalizers.NFKC()
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    model.decoder = decoders.Metaspace()
    return model, trainers.UnigramTrainer(
        vocab_size=80, special_tokens=["<unk>", *SPECIALS], unk_token="<unk>", show_progress=False
    )


KINDS = {"bytes": _bytes, "metaspace": _metaspace, "unigram": _unigram}


def write_tokenizer(folder: Path, template: str | None = CHATML, kind: str = "bytes") -> Path:
    """A small tokenizer, as Hugging Face saves one."""
    from tokenizers import AddedToken

    model, trainer = KINDS[kind]()
    model.train_from_iterator([WORDS] * 4, trainer)
    model.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    folder.mkdir(parents=True, exist_ok=True)
    model.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | {"eos_token": {"__type": "AddedToken", "content": SPECIALS[0]}})
    )
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def chat(*turns: str, system: str | None = None) -> dict[str, Any]:
    """User and assistant in turns."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    return {
        "messages": messages + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    }


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path
