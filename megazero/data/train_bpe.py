"""Trains a byte-level BPE with the `tokenizers` library and stores it as GPT-2 does: vocab.json and merges.txt."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from megazero.data.gpt2 import END_OF_TEXT
from megazero.data.indexed import DataError
from megazero.data.progress import Report

SMALLEST = 257


def train_bpe(texts: Iterable[str], vocab_size: int, folder: Path, report: Report) -> None:
    """Id 0 is the separator, then the 256 bytes, then merges. Deterministic. Each file is written whole or not at all."""
    if vocab_size < SMALLEST:
        raise DataError(f"--vocab-size {vocab_size}: 256 bytes and a separator need at least {SMALLEST}")
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ImportError("training a tokenizer needs the package tokenizers: pip install tokenizers") from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    report(f"training a byte-level BPE of {vocab_size} tokens")
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    prefix = f"unfinished-{os.getpid()}"
    tokenizer.model.save(str(folder), prefix)
    for name in ("merges.txt", "vocab.json"):
        os.replace(folder / f"{prefix}-{name}", folder / name)
    report(f"{tokenizer.get_vocab_size()} tokens in {folder / 'vocab.json'} and {folder / 'merges.txt'}")
