"""The training data."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.fields import option


@dataclass(frozen=True)
class DataConfig:
    """The training data, and how they become samples."""

    data_path: tuple[str, ...] = option(
        (), many=True, metavar="PREFIX", common=True, derived="the source of Python's standard library"
    )
    "Prefix of .bin/.idx files; a blend: WEIGHT PREFIX ..."
    split: str = option("969,30,1", metavar="SHARES")
    "Shares of training, validation and test data."
    valid_data_path: tuple[str, ...] = option(
        (), many=True, metavar="NAME PREFIX", derived="none", idle_without="--eval-iters above 0"
    )
    "Named validation sets in addition to the split's: NAME PREFIX NAME PREFIX ... Each gets a loss of its own."
    instruction_data: tuple[str, ...] = option((), many=True, metavar="FILE.jsonl", derived="none", common=True)
    """Prompts with completions, or chats, instead of --data-path. The tokenizer's chat template formats chats. Several
    conversations are packed into a sample. The loss is on completions only."""
    valid_instruction_data: tuple[str, ...] = option(
        (),
        many=True,
        metavar="FILE.jsonl",
        derived="none",
        idle_without="--eval-iters above 0",
        needs="--instruction-data FILE.jsonl",
    )
    "Prompts with completions, or chats, for validation."
    long_conversations: str = option(
        "refuse", choices=("refuse", "truncate", "drop"), needs="--instruction-data FILE.jsonl", expert=True
    )
    "What happens to a conversation longer than a sample: refuse is an error, truncate cuts it off, drop leaves it out."
    tokenizer: str | None = option(
        None, choices=("byte", "gpt2", "sentencepiece", "hf"), common=True, derived="none, the data are ids"
    )
    "Kind of tokenizer."
    tokenizer_path: str | None = option(None, metavar="PATH", common=True, derived="none")
    "Folder or file of the tokenizer, or its ORG/NAME."
    eod_id: int | None = option(None, derived="that of the tokenizer")
    "Token that ends a document."
    eod_mask_loss: bool = option(False, expert=True)
    "Leave the prediction made at an end-of-document token out of the loss."
    data_cache_path: str | None = option(None, metavar="DIR", derived="~/.cache/megazero")
    "Folder for index caches and the default corpus."
    num_workers: int = option(1)
    "Background threads that prepare micro-batches. With 0 they are prepared within the step."
    seed: int = option(1234)
    "Seed of weights, dropout and sample order."
