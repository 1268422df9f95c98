"""Alpaca's and ShareGPT's records are the chats, or the prompts and completions, that they mean;
wrong ones are named.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megazero.data.conversations import ConversationEncoder, TokenizedConversation, read_conversations
from megazero.data.indexed import DataError
from megazero.data.progress import silent
from megazero.data.tokenizer import build_tokenizer
from tests.data.chats import CHATML, chat, write_lines, write_tokenizer

BYTES = build_tokenizer("byte", None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("marked"), CHATML)


def _read(path: Path, tokenizer: Any) -> list[TokenizedConversation]:
    return list(read_conversations([path], ConversationEncoder(tokenizer, tokenizer.eod_id, 400), silent))


def _plain(conversation: TokenizedConversation) -> tuple[str, str]:
    """Text, and the part of it that is learned, of bytes."""
    ids, loss_mask = conversation.ids, conversation.loss_mask
    return BYTES.decode(ids[~loss_mask].tolist()), BYTES.decode(ids[loss_mask].tolist())


ALPACA: dict[str, Any] = {"instruction": "Add.", "input": "2 and 2", "output": "4"}
SHAREGPT: dict[str, Any] = {
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "two?"},
        {"from": "gpt", "value": "two"},
        {"from": "user", "value": "and?"},
        {"from": "assistant", "value": "four"},
    ],
    "id": "x",
}


def test_they_are_the_chats_that_they_mean(folder: Path, tmp_path: Path) -> None:
    given: list[dict[str, Any]] = [
        ALPACA,
        {"instruction": "Say x.", "output": "x", "input": None},
        ALPACA | {"input": "", "system": "Be brief.", "history": [["hello", "hi"]]},
        SHAREGPT,
        {"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "system": "s"},
    ]
    meant = [
        chat("Add.\n\n2 and 2", "4"),
        chat("Say x.", "x"),
        chat("hello", "hi", "Add.", "4", system="Be brief."),
        chat("two?", "two", "and?", "four", system="Be brief."),
        chat("a", "b", system="s"),
    ]
    tokenizer = build_tokenizer("hf", str(folder))
    ours, theirs = (
        _read(write_lines(tmp_path / f"{name}.jsonl", records), tokenizer)
        for name, records in (("given", given), ("meant", meant))
    )
    assert [each.ids.tolist() for each in ours] == [each.ids.tolist() for each in theirs]
    assert [each.loss_mask.tolist() for each in ours] == [each.loss_mask.tolist() for each in theirs]
    assert all(each.loss_mask.any() and not each.loss_mask.all() for each in ours)


def test_without_a_template_headings_part_question_and_answer(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [ALPACA, ALPACA | {"input": ""}])
    first, second = map(_plain, _read(path, BYTES))
    assert first == ("### Instruction:\nAdd.\n\n### Input:\n2 and 2\n\n### Response:\n", "4<|endoftext|>")
    assert second == ("### Instruction:\nAdd.\n\n### Response:\n", "4<|endoftext|>")


WRONG = {
    "two shapes": (ALPACA | {"messages": []}, "either prompt and completion, or messages, or instruction and output"),
    "none": ({"question": "x"}, r"or conversations \(ShareGPT\); it holds question"),
    "no output": ({"instruction": "x"}, "output is missing"),
    "number": ({"instruction": "x", "output": 4}, "output is no text, but int"),
    "empty output": ({"instruction": "x", "output": ""}, "there is nothing to learn"),
    "history": (ALPACA | {"history": ["a"]}, "history is no list of pairs"),
    "speaker": (
        {"conversations": [{"from": "narrator", "value": "x"}]},
        "turn 1 is from 'narrator', who is none of human, user, gpt",
    ),
    "no turns": ({"conversations": []}, "conversations is no list of turns"),
    "no value": ({"conversations": [{"from": "human"}, {"from": "gpt", "value": "x"}]}, r"turn 1 \(user\) has no text"),
    "no answer": ({"conversations": [{"from": "human", "value": "x"}]}, "no turn is an assistant's"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_records_are_named(folder: Path, tmp_path: Path, name: str) -> None:
    record, message = WRONG[name]
    path = write_lines(tmp_path / "in.jsonl", [ALPACA, record])
    with pytest.raises(DataError, match=rf"in\.jsonl, line 2: .*{message}"):
        _read(path, build_tokenizer("hf", str(folder)))


@pytest.mark.parametrize("record", [ALPACA | {"system": "s"}, SHAREGPT])
def test_a_chat_needs_a_template(tmp_path: Path, record: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"line 1: .*chat template"):
        _read(write_lines(tmp_path / "in.jsonl", [record]), BYTES)


@pytest.mark.parametrize("record", [{"prompt": "a", "completion": "b"}, chat("what?", "that")])
def test_a_tokenizer_that_gives_no_tokens_is_named(tmp_path: Path, record: dict[str, Any]) -> None:
    """Not the chat template, which says very well what an assistant wrote."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE({"z": 0}, []))
    model.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    model.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}<|im_end|>{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(DataError, match="line 1: the tokenizer gives no token for"):
        _read(write_lines(tmp_path / "in.jsonl", [record]), build_tokenizer("hf", str(tmp_path)))
