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


def test_the_first_token_is_no_label_where_nothing_was_asked(tmp_path: Path) -> None:
    """In a packed sample it follows the last token of another conversation."""
    path = write_lines(tmp_path / "in.jsonl", [{"prompt": "", "completion": "cd"}])
    (conversation,) = _read(path, BYTES)
    assert conversation.ids.tolist() == [*b"cd", 256]
    assert conversation.loss_mask.tolist() == [False, True, True]


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


TURNS: list[dict[str, Any]] = chat("a", "b")["messages"]
COMPLETION: dict[str, Any] = {"prompt": "a", "completion": "b"}
UNLEARNED = "there is nothing to learn"
SHAPES: tuple[dict[str, Any], ...] = (COMPLETION, {"messages": TURNS}, ALPACA, SHAREGPT)
KEYS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"weight": 0}, f"weight 0 stands for the whole record, so {UNLEARNED}"),
    ({"train": False}, f"train False stands for the whole record, so {UNLEARNED}"),
    ({"loss": 0}, f"loss 0 stands for the whole record, so {UNLEARNED}"),
    ({"weight": 0.5}, "weight 0.5 is neither 0 nor 1"),
    ({"loss": 2.75}, "loss 2.75 is neither 0 nor 1"),
    ({"mask": 1}, 'mask 1 is no key that says what is learned here: give "weight", 0 or 1'),
)


@pytest.mark.parametrize(("key", "message"), KEYS)
def test_what_a_record_says_of_its_loss_holds_for_every_shape(
    folder: Path, tmp_path: Path, key: dict[str, Any], message: str
) -> None:
    for record in SHAPES:
        path = write_lines(tmp_path / "in.jsonl", [record, record | key])
        with pytest.raises(DataError) as said:
            _read(path, build_tokenizer("hf", str(folder)))
        assert f"in.jsonl, line 2: {message}" in str(said.value)


@pytest.mark.parametrize("key", [{"weight": 1}, {"train": True, "weight": None}, {"loss": 1.0}])
def test_a_record_that_is_learned_may_say_so(folder: Path, tmp_path: Path, key: dict[str, Any]) -> None:
    for record in SHAPES:
        path = write_lines(tmp_path / "in.jsonl", [record, record | key])
        plain, told = _read(path, build_tokenizer("hf", str(folder)))
        assert (plain.ids.tolist(), plain.loss_mask.tolist()) == (told.ids.tolist(), told.loss_mask.tolist())


def test_the_loss_of_a_turn_has_three_names(folder: Path, tmp_path: Path) -> None:
    """In chats and in ShareGPT's. What else may say it is refused, since programs read it in opposite ways."""

    def told(shape: str, **more: Any) -> dict[str, Any]:
        names = ("role", "content") if shape == "messages" else ("from", "value")
        roles = ("user", "assistant") * 2
        turns = [dict(zip(names, turn, strict=True)) for turn in zip(roles, "abcd", strict=True)]
        return {shape: [turns[0], turns[1] | more, *turns[2:]]}

    tokenizer = build_tokenizer("hf", str(folder))
    for shape in ("messages", "conversations"):
        records = [told(shape, **{key: value}) for key in ("weight", "train", "loss") for value in (0, False)]
        masks = [each.loss_mask.tolist() for each in _read(write_lines(tmp_path / "in.jsonl", records), tokenizer)]
        (whole,) = _read(write_lines(tmp_path / "in.jsonl", [told(shape)]), tokenizer)
        assert all(mask == masks[0] for mask in masks) and 0 < sum(masks[0]) < whole.loss_mask.sum()
        for key, value, message in (
            ("mask", 1, "turn 2: mask 1 is no key that says what is learned here"),
            ("loss_mask", [0], r"turn 2: loss_mask \[0\] is no key that says"),
            ("loss", 0.4, "turn 2: loss 0.4 is neither 0 nor 1"),
        ):
            with pytest.raises(DataError, match=f"line 1: {message}"):
                _read(write_lines(tmp_path / "in.jsonl", [told(shape, **{key: value})]), tokenizer)


def test_a_system_key_is_a_system_turn(folder: Path, tmp_path: Path) -> None:
    tokenizer = build_tokenizer("hf", str(folder))
    given: list[dict[str, Any]] = [{"system": "S", "messages": TURNS}, {"system": None, "messages": TURNS}]
    meant = [chat("a", "b", system="S"), chat("a", "b")]
    ours, theirs = (_read(write_lines(tmp_path / "in.jsonl", records), tokenizer) for records in (given, meant))
    assert [each.ids.tolist() for each in ours] == [each.ids.tolist() for each in theirs]
    for record in (chat("a", "b", system="s") | {"system": "S"}, {**SHAREGPT, "system": "S"}):
        with pytest.raises(DataError, match=r"line 1: system is a key of the record and turn 1 too: which one counts"):
            _read(write_lines(tmp_path / "in.jsonl", [record]), tokenizer)
    with pytest.raises(DataError, match="line 1: system is no text, but int"):
        _read(write_lines(tmp_path / "in.jsonl", [{"system": 3, "messages": TURNS}]), tokenizer)


def test_a_speaker_and_a_role_that_differ(folder: Path, tmp_path: Path) -> None:
    tokenizer = build_tokenizer("hf", str(folder))
    for more, message in (
        ({"role": "assistant"}, "turn 1 is from 'human' and has the role 'assistant'"),
        ({"content": "c"}, "turn 1 has the value 'a' and the content 'c'"),
    ):
        turns = [{"from": "human", "value": "a", **more}, {"from": "gpt", "value": "b"}]
        with pytest.raises(DataError, match=f"line 1: {message}"):
            _read(write_lines(tmp_path / "in.jsonl", [{"conversations": turns}]), tokenizer)
    turns = [{"from": "human", "role": "user", "value": "a", "content": "a"}, {"from": "gpt", "value": "b"}]
    assert len(_read(write_lines(tmp_path / "in.jsonl", [{"conversations": turns}]), tokenizer)) == 1


WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}"
    "{% generation %}{{ m['content'] or '' }}{{ m['tool_calls'] | tojson if m['tool_calls'] }}{% endgeneration %}"
    "<|im_end|>{% endfor %}"
)


def test_tools_as_a_string_of_json(folder: Path, tmp_path: Path) -> None:
    tokenizer = build_tokenizer("hf", str(write_tokenizer(tmp_path / "tools", WITH_TOOLS)))
    tools = [{"type": "function", "function": {"name": "f"}}]
    shapes: tuple[dict[str, Any], ...] = ({"messages": TURNS}, SHAREGPT)
    for shape in shapes:
        records = [shape | {"tools": tools}, shape | {"tools": json.dumps(tools)}]
        ours, theirs = _read(write_lines(tmp_path / "in.jsonl", records), tokenizer)
        assert ours.ids.tolist() == theirs.ids.tolist()
        nothing: list[Any] = [None, "", "[]", []]
        records = [shape | {"tools": given} for given in nothing] + [shape]
        same = {tuple(each.ids.tolist()) for each in _read(write_lines(tmp_path / "in.jsonl", records), tokenizer)}
        assert len(same) == 1 and ours.ids.tolist() not in [list(ids) for ids in same]
        for wrong, kind in (("x", "a string that is no JSON"), ("{}", "an object"), ({"a": 1}, "an object")):
            path = write_lines(tmp_path / "in.jsonl", [shape | {"tools": wrong}])
            with pytest.raises(DataError, match=f"line 1: tools is no list of functions, but {kind}"):
                _read(path, tokenizer)


@pytest.mark.parametrize("content", [None, ""])
def test_calls_that_the_template_does_not_write_are_no_answer(folder: Path, tmp_path: Path, content: Any) -> None:
    calls = {"role": "assistant", "content": content, "tool_calls": [{"function": {"name": "f"}}]}
    path = write_lines(tmp_path / "in.jsonl", [{"messages": [TURNS[0], calls, *TURNS]}])
    with pytest.raises(
        DataError, match=r"line 1: turn 2 \(assistant\) holds tool_calls alone, which the chat template"
    ):
        _read(path, build_tokenizer("hf", str(folder)))
    assert len(_read(path, build_tokenizer("hf", str(write_tokenizer(tmp_path / "tools", WITH_TOOLS))))) == 1


def test_keys_that_nothing_reads_are_named_once_for_a_file(folder: Path, tmp_path: Path) -> None:
    """With their number and the first of them; not those that the template names, nor those without a value."""
    thought = [TURNS[0], TURNS[1] | {"reasoning_content": "hm", "refusal": None}]
    records: list[dict[str, Any]] = [
        {"messages": TURNS, "functions": [], "tools": None},
        {"messages": TURNS, "functions": [{"name": "f"}], "tools": [{"name": "f"}]},
        {"messages": thought, "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": thought * 2, "functions": [{"name": "g"}]},
        COMPLETION | {"system": "s"},
        ALPACA | {"weight": 1},
        {"conversations": [turn | {"name": "x"} for turn in SHAREGPT["conversations"]], "id": "y"},
    ]
    paths = [
        write_lines(tmp_path / name, given)
        for name, given in (("a.jsonl", records), ("b.jsonl", [SHAREGPT]), ("c.jsonl", [ALPACA]))
    ]
    tokenizer = build_tokenizer("hf", str(folder))
    encoder = ConversationEncoder(tokenizer, tokenizer.eod_id, 400)
    assert len(list(read_conversations(paths, encoder, silent))) == 9
    assert encoder.told == [
        f"warning: {paths[0]}: nothing reads functions (2 times, first in line 2), tools (1 times, first in line 2), "
        "chat_template_kwargs (1 times, first in line 3), reasoning_content of a turn (3 times, first in line 3), "
        "system (1 times, first in line 5), id (1 times, first in line 7), name of a turn (5 times, first in line 7)",
        f"warning: {paths[1]}: nothing reads id (1 times, first in line 1)",
    ]
    named = "{{ '' if functions }}" + WITH_TOOLS.replace("m['content']", "m.reasoning_content or m['content']")
    tokenizer = build_tokenizer("hf", str(write_tokenizer(tmp_path / "tools", named)))
    encoder = ConversationEncoder(tokenizer, tokenizer.eod_id, 400)
    list(read_conversations([write_lines(tmp_path / "d.jsonl", [records[1], {"messages": thought}])], encoder, silent))
    assert encoder.told == [f"warning: {tmp_path / 'd.jsonl'}: nothing reads functions (1 times, first in line 1)"], (
        "only messages, tools and documents become variables of the template"
    )


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
