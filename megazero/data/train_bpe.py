"""Trains a byte-level BPE with the `tokenizers` library.

It is stored in GPT-2's format, vocab.json and merges.txt; for chats in Hugging Face's, with a chat template.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from megazero.data.gpt2 import END_OF_TEXT
from megazero.data.indexed import DataError
from megazero.data.output_places import require_folder
from megazero.data.progress import Report
from megazero.system.unfinished import ended_in_order, replaced_when_whole

TURN, END_OF_TURN = "<|im_start|>", "<|im_end|>"
"""The special tokens around a turn in ChatML."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + "
    "'<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}

PLAIN_FILES = ("merges.txt", "vocab.json")
CHAT_FILES = ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")


def require_no_tokenizer(given: str, *, chat: bool, overwrite: bool) -> None:
    """Raise DataError if a tokenizer cannot be written into a folder, or would take another's place.

    overwrite: one of the same kind may be replaced. Files of the other kind would stay, and be read as the new one's.
    """
    folder = Path(given)
    require_folder("--output", given, folder)
    there = [name for name in (*CHAT_FILES, *PLAIN_FILES) if os.path.lexists(folder / name)]
    others = [name for name in there if name not in (CHAT_FILES if chat else PLAIN_FILES)]
    if others:
        raise DataError(
            f"--output {given}: has a tokenizer of another kind ({', '.join(others)}), whose files would stay; name "
            "another folder"
        )
    if there and not overwrite:
        raise DataError(
            f"--output {given}: has a tokenizer already ({', '.join(there)}); name another folder, or replace it with "
            "--overwrite"
        )


def train_bpe(texts: Iterable[str], vocab_size: int, folder: Path, report: Report, *, chat: bool = False) -> None:
    """Train a tokenizer on `texts` and write it into `folder`. The result is deterministic.

    Id 0 is the separator; then come (for chats) the tokens around a turn, the 256 bytes, and the merges. Each file is
    written atomically, the one by which the tokenizer is opened last. Messages do not name the folder, which the caller
    may rename. Raises DataError for a vocab_size that is too small, ImportError without the package.
    """
    specials = [END_OF_TEXT, *([TURN, END_OF_TURN] if chat else [])]
    if vocab_size < 256 + len(specials):
        raise DataError(
            f"--vocab-size {vocab_size}: 256 bytes and {', '.join(specials)} need at least {256 + len(specials)}"
        )
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ImportError("training a tokenizer needs the package tokenizers: pip install tokenizers") from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    folder.mkdir(parents=True, exist_ok=True)  # before training, which would be lost if this failed
    report(f"training a byte-level BPE of {vocab_size} tokens")
    tokenizer.train_from_iterator(texts, trainer)
    if chat:
        written = {
            "tokenizer_config.json": json.dumps(CONFIG, indent=2),
            "chat_template.jinja": CHAT_TEMPLATE,
            "tokenizer.json": tokenizer.to_str(),
        }
    else:  # as the library writes them; it refuses a folder whose name is not UTF-8
        model = json.loads(tokenizer.to_str())["model"]
        vocab = dict(sorted(model["vocab"].items(), key=lambda piece: piece[1]))
        written = {
            "merges.txt": "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in model["merges"]),
            "vocab.json": json.dumps(vocab, ensure_ascii=False, separators=(",", ":")),
        }
    with ended_in_order():  # not before: training would not hear a signal until its end
        for name, content in written.items():
            with replaced_when_whole(folder / name) as file:
                file.write(content.encode("utf-8"))
    files = "tokenizer.json, with a chat template beside it" if chat else "vocab.json and merges.txt"
    size = tokenizer.get_vocab_size()
    fewer = f", fewer than {vocab_size}: with them each word of the text is a token of its own" * (size < vocab_size)
    report(f"{size} tokens{fewer}: {files}")
