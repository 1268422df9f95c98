"""Folders that `transformers` and megazero both open: a small random model with a small real tokenizer."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.convert.hf_models import Case, saved

VOCABULARY, CONTEXT = 320, 48
_TEXT = (
    "the cat sat on a mat and the dog ran to see what was there in the old house by the sea where no one had been for "
    "a long time because it rained all day and night until the river rose over the road that led up the hill"
)
WORDS = _TEXT.split()
SPECIALS = {"bloom": ("<s>", "</s>"), "llama": ("<s>", "</s>"), "gpt2": ("<|endoftext|>", "<|endoftext|>")}
_GPT2 = {"n_layer": 3, "n_embd": 24, "n_head": 4, "vocab_size": VOCABULARY}
_LLAMA = {"num_hidden_layers": 3, "hidden_size": 24, "intermediate_size": 40, "vocab_size": VOCABULARY}
_LLAMA |= {"eos_token_id": 2, "num_attention_heads": 4}
CASES = {
    "bloom": Case(
        "bloom", (), {"n_layer": 3, "hidden_size": 24, "n_head": 6, "vocab_size": VOCABULARY, "eos_token_id": 2}, 1e-8
    ),
    "gpt2": Case("gpt2", (), _GPT2 | {"n_positions": CONTEXT, "eos_token_id": 1, "bos_token_id": 1}, 1e-11),
    "llama": Case("llama", (), _LLAMA | {"num_key_value_heads": 2, "max_position_embeddings": CONTEXT}, 1e-11),
}


def folder_of(family: str, folder: Path) -> Path:
    """Model and tokenizer, saved."""
    saved(CASES[family], folder)
    write_tokenizer(family, folder)
    return folder


def write_tokenizer(family: str, folder: Path) -> None:
    """A byte-level BPE trained on a few words; LLaMA's puts its begin token before every text."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    begin, end = SPECIALS[family]
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = list(dict.fromkeys(["<unk>", begin, end]))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    if family == "llama":
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(kind | {"bos_token": begin, "eos_token": end, "pad_token": end})
    )


def text(words: int, seed: int) -> str:
    """Some of the words, with a line break now and then."""
    random_ = random.Random(seed)
    return " ".join(random_.choice(WORDS) + ("\n" if random_.random() < 0.1 else "") for _ in range(words))
