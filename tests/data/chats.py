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
PLAIN = """{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
WORDS = "the quick brown fox asked a lazy dog what two and two make; it said four, naturally. Grüße, 你好 \U0001f600!"


def write_tokenizer(folder: Path, template: str | None = CHATML, vocabulary: int = 300) -> Path:
    """A byte-level BPE of this vocabulary, as Hugging Face saves one."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False)
    model.train_from_iterator([WORDS] * 4, trainer)
    model.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    folder.mkdir(parents=True, exist_ok=True)
    model.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": SPECIALS[0]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def chat(*turns: str, system: str | None = None) -> dict[str, Any]:
    """User and assistant in turns."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    return {"messages": messages + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]}


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path
