"""A folder with the files that the pages' commands name: models, data, conversations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from megazero.cli.main import main
from tests.docs.pages import text_of

TEMPLATE = "{% for turn in messages %}{{ turn['content'] }}{{ eos_token }}{% endfor %}"
"""A chat template: each turn as it is, with the token that ends it."""
TOKENS = 300


def furnish(folder: Path) -> None:
    """models/: bloom, tuned, gpt2 and llama with one tokenizer, the last three with a chat template. my-data: text in
    its tokens. chats.jsonl, held-out.jsonl: conversations. notes.txt.
    """
    import transformers

    torch.manual_seed(0)
    shape = {"vocab_size": TOKENS, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    ends = {"bos_token_id": None, "eos_token_id": 0}
    llama = transformers.LlamaConfig(**shape, **ends, intermediate_size=64, max_position_embeddings=2048)
    gpt2 = transformers.GPT2Config(**ends, vocab_size=TOKENS, n_embd=32, n_head=4, n_layer=2, n_positions=64)
    bloom = transformers.BloomConfig(**ends, vocab_size=TOKENS, hidden_size=32, n_layer=2, n_head=4)
    models = folder / "models"
    transformers.BloomForCausalLM(bloom).save_pretrained(models / "bloom")
    transformers.GPT2LMHeadModel(gpt2).save_pretrained(models / "gpt2")
    transformers.LlamaForCausalLM(llama).save_pretrained(models / "llama")
    _tokenizer().save_pretrained(models / "bloom")
    shutil.copytree(models / "bloom", models / "tuned")
    for model in ("gpt2", "llama"):
        for path in models.glob("bloom/*token*"):
            shutil.copy(path, models / model)
    for model in ("tuned", "llama"):
        (models / model / "chat_template.jinja").write_text(TEMPLATE)
    write_texts(folder)
    (folder / "notes.txt").write_text(text_of("docs/testing.md"))
    for name in ("chats.jsonl", "held-out.jsonl"):
        write_chats(folder / name)
    text = ["--input", str(folder / "texts"), "--include", "*.txt", "--output-prefix", str(folder / "my-data")]
    tokenizer = ["--tokenizer", "hf", "--tokenizer-path", str(models / "bloom"), "--append-eod"]
    assert main(["prepare-data", *text, *tokenizer]) == 0


def _tokenizer():
    """A byte-level BPE of a page."""
    import tokenizers
    import transformers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=TOKENS - 1, initial_alphabet=alphabet, special_tokens=["</s>"])
    made.train_from_iterator([text_of("docs/testing.md")], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")


def write_texts(folder: Path) -> None:
    """texts/: twenty text files, and a picture that no pattern matches."""
    (folder / "texts").mkdir()
    for number in range(20):
        (folder / "texts" / f"{number}.txt").write_text(f"Text {number} is about the {number} times table. " * 20)
    (folder / "texts" / "photo.jpg").write_bytes(b"\xff\xd8\xff")


def write_chats(path: Path) -> None:
    """Forty questions with their answers."""
    records = [{"instruction": f"Say {number}.", "input": "", "output": f"{number}!"} for number in range(40)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
