"""Converts records of instruction data in common shapes to one of two shapes.

    {"prompt": ..., "completion": ...}                                     as it is
    {"messages": [{"role": ..., "content": ...}, ...]}                     as it is
    {"instruction": ..., "input": ..., "output": ...}                      Alpaca: one question and its answer
    {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}, ...]}     ShareGPT: turns

`system` of a record becomes the first turn of a chat. The last two shapes become turns of a chat. For a tokenizer
without a chat template an Alpaca record becomes a prompt, with headings, and a completion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from megazero.data.indexed import DataError
from megazero.system.reading import Unreadable, json_type, listed, parse_json, shown

Record = dict[str, Any]
SHAPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "prompt and completion": ("prompt", "completion"),
        "messages": ("messages",),
        "instruction and output": ("instruction", "output"),
        "conversations": ("conversations",),
    }
)
"""Shape of a record -> the keys by which it is recognised."""
SPEAKERS: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("human", "user"), "user")
    | dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant")
    | dict.fromkeys(("tool", "observation", "function_response"), "tool")
    | {"system": "system", "developer": "developer"}
)
"""Speaker in ShareGPT-like records -> role in chat templates."""
COUNTS = ("weight", "train", "loss")
"""Keys of a record or a turn that say whether it is learned: OpenAI's, Axolotl's, and a common third."""
TURN = ("role", "content", *COUNTS)
"""Keys of a turn that are read, whatever the chat template."""
UNCLEAR = ("mask", "masked", "loss_mask", "train_detail", "training_detail")
"""Keys that change the loss in some programs: 1 means learned in one and left out in another, or they name parts."""
VARIABLES = ("tools", "documents")
"""Keys of a record that become variables of the chat template."""
READ: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "prompt and completion": ("prompt", "completion"),
        "messages": ("messages", "system", *VARIABLES),
        "instruction and output": ("instruction", "input", "output", "system", "history"),
        "conversations": ("conversations", "system", *VARIABLES),
    }
)
"""Shape of a record -> the keys that are read, beside `COUNTS`."""
HEADINGS = ("### Instruction:\n", "\n\n### Input:\n", "\n\n### Response:\n")


@dataclass
class UnusedKeys:
    """Keys with a value that nothing reads: name -> (number of times, line of the first)."""

    found: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, line: int, names: Iterable[str]) -> None:
        for name in names:
            times, first = self.found.get(name, (0, line))
            self.found[name] = times + 1, min(first, line)

    def text(self) -> str:
        """The keys in the order of the file; empty if there are none."""
        in_order = sorted(self.found.items(), key=lambda item: item[1][1])
        told = [f"{shown(name)[1:-1]} ({times:,} times, first in line {first:,})" for name, (times, first) in in_order]
        return listed(told) + f" and {len(told) - 20:,} more" * (len(told) > 20)


def shape_of(record: Record) -> str:
    """The name of a record's shape. Raises DataError if the record has no known shape or several."""
    found = [name for name, keys in SHAPES.items() if any(key in record for key in keys)]
    if len(found) != 1:
        raise DataError(
            "either prompt and completion, or messages, or instruction and output (Alpaca), or conversations "
            "(ShareGPT); it holds "
            f"{', '.join(map(str, list(record)[:20])) or 'nothing'}"
        )
    return found[0]


def in_one_shape(record: Record, has_template: bool) -> Record:
    """A record with messages, or with prompt and completion. has_template: whether the tokenizer has a chat template.

    Raises DataError if the record has no known shape or several, or says that nothing of it is learned.
    """
    shape = shape_of(record)
    require_clear_counts(record, "a record")
    for key in COUNTS:
        if record.get(key) not in (1, None):
            raise DataError(
                f"{key} {shown(record[key])} stands for the whole record, so there is nothing to learn; leave its line "
                "out"
            )
    return _MAKE[shape](record, has_template)


def unused_keys(record: Record) -> Iterator[str]:
    """Keys of a record of a known shape that have a value and are not read."""
    read = (*READ[shape_of(record)], *COUNTS)
    return (key for key in filled_keys(record) if key not in read)


def filled_keys(given: Mapping[str, Any]) -> Iterator[str]:
    """Keys with a value; null, "", [] and {} say nothing."""
    return (key for key, value in given.items() if value is not None and value not in ("", [], {}))


def require_clear_counts(given: Mapping[str, Any], what: str) -> None:
    """Raise DataError for keys of a record or a turn that do not say clearly whether it is learned."""
    for key in COUNTS:
        if given.get(key) not in (0, 1, None):
            raise DataError(f"{key} {shown(given[key])} is neither 0 nor 1; {what} is learned or is not")
    for key in UNCLEAR:
        if given.get(key) is not None:
            raise DataError(
                f'{key} {shown(given[key])} is no key that says what is learned here: give "weight", 0 or 1, and leave '
                f"{key} out"
            )


def _chat(record: Record, has_template: bool) -> Record:
    return {
        "messages": _with_system(record, record["messages"]),
        **{key: record[key] for key in VARIABLES if key in record},
        **_tools(record),
    }


def _alpaca(record: Record, has_template: bool) -> Record:
    asked, given, answer, system = (_text(record, key) for key in ("instruction", "input", "output", "system"))
    history = record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise DataError("history is no list of pairs of a question and its answer")
    if has_template:
        before = [turn for question, reply in history for turn in (_turn("user", question), _turn("assistant", reply))]
        opening = [_turn("system", system)] if system else []
        return {
            "messages": [
                *opening,
                *before,
                _turn("user", f"{asked}\n\n{given}" if given else asked),
                _turn("assistant", answer),
            ]
        }
    if system or history:
        raise DataError(
            f"{'system' if system else 'history'} makes it a chat, for which the tokenizer has no chat template"
        )
    head, middle, end = HEADINGS
    return {"prompt": f"{head}{asked}{middle * bool(given)}{given}{end}", "completion": answer}


def _sharegpt(record: Record, has_template: bool) -> Record:
    turns = record["conversations"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise DataError("conversations is no list of turns, each with from and value")
    messages = []
    for number, turn in enumerate(turns, start=1):
        speaker, content = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if not isinstance(speaker, str) or speaker not in SPEAKERS:
            raise DataError(f"turn {number} is from {str(speaker)[:40]!r}, who is none of {', '.join(SPEAKERS)}")
        role, written = turn.get("role"), turn.get("content")
        if role is not None and SPEAKERS.get(str(role)) != SPEAKERS[speaker]:
            raise DataError(f"turn {number} is from {speaker!r} and has the role {shown(role)}: which one counts?")
        if written is not None and written != content:
            raise DataError(
                f"turn {number} has the value {shown(content)} and the content {shown(written)}: which one counts?"
            )
        more = {key: value for key, value in turn.items() if key not in ("from", "value")}
        messages.append(more | _turn(SPEAKERS[speaker], content))
    return _chat(record | {"messages": messages}, has_template)


def _with_system(record: Record, turns: Any) -> Any:
    """The turns with the record's system text before them. Raises DataError if they have one of their own."""
    system = _text(record, "system")
    if not system or not isinstance(turns, list):  # the caller says what is wrong with turns that are no list
        return turns
    for number, turn in enumerate(turns, start=1):
        if isinstance(turn, dict) and turn.get("role") in ("system", "developer"):
            raise DataError(f"system is a key of the record and turn {number} too: which one counts?")
    return [_turn("system", system), *turns]


def _tools(record: Record) -> Record:
    """The tools as a list, also where they are a string of JSON. Raises DataError."""
    given = record.get("tools")
    tools, kind = given, json_type(given)
    if isinstance(given, str) and given.strip():
        try:
            tools = parse_json(given, "tools")
            kind = json_type(tools)
        except Unreadable:
            kind = "a string that is no JSON"
    elif isinstance(given, str):
        tools = None
    if tools is None:
        return {"tools": None} if "tools" in record else {}
    if not isinstance(tools, list):
        raise DataError(f"tools is no list of functions, but {kind}")
    return {"tools": tools}


_MAKE: Mapping[str, Callable[[Record, bool], Record]] = MappingProxyType(
    {
        "prompt and completion": lambda record, has_template: record,
        "messages": _chat,
        "instruction and output": _alpaca,
        "conversations": _sharegpt,
    }
)


def _turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _text(record: Record, key: str) -> str:
    """The text of a key; empty for a missing input or system. Raises DataError."""
    value = record.get(key)
    if value is None and key in ("input", "system"):
        return ""
    if not isinstance(value, str):
        raise DataError(f"{key} is {'missing' if key not in record else 'no text, but ' + type(value).__name__}")
    return value
