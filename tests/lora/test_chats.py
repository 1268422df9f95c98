"""Adapters learn from conversations as the whole model does: packed samples, masks and learned
positions on any layout.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.data.chats import chat, write_lines, write_tokenizer
from tests.lora.families import saved_base
from tests.parity.training import train, worst

TURNS = ["what two and two make", "four, naturally", "asked a lazy dog", "the quick brown fox said it", "and", "a fox"]


@pytest.mark.slow
def test_conversations_on_any_layout(tmp_path: Path) -> None:
    base = saved_base("opt", tmp_path, vocab_size=300, max_position_embeddings=96, eos_token_id=0)
    write_tokenizer(base)
    records = [chat(TURNS[i % 6], TURNS[(i + 1) % 6], *(TURNS[2:4] if i % 3 else [])) for i in range(20)]
    chats = write_lines(tmp_path / "chats.jsonl", records)
    numbers = (
        "--precision fp64 --seq-length 96 --global-batch-size 8 --train-iters 3 --lr 1e-2 --eval-iters 0 "
        "--sample-tokens 1 --lora-rank 2 --lora-dropout 0.1 --lora-targets qkv down"
    )
    files = f"--init-from {base} --instruction-data {chats} --data-cache-path {tmp_path / 'cache'}"
    flags = [*files.split(), *numbers.split()]
    one = train(1, flags)
    assert len(one.records) == 3 and one.records[2].loss < one.records[0].loss
    layout = "--tp 2 --sequence-parallel --pp 2 --micro-batch-size 1 --pipeline-schedule zb-h1"
    outcome = train(4, [*flags, *layout.split()])
    assert all(value < 1e-9 for value in worst(outcome, one).values()), worst(outcome, one)
    assert all(
        torch.equal(values, one.weights[name]) for name, values in outcome.weights.items() if ".lora_" not in name
    )
