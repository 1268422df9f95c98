"""Converts records of instruction data in common shapes to one of two shapes.

    {"prompt": ..., "completion": ...}                                     as it is
    {"messages": [{"role": ..., "content": ...}, ...]}                     as it is
    {"instruction": ..., "input": ..., "output": ...}                      Alpaca: one question and its answer
    {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}, ...]}     ShareGPT: turns

The last two become turns of a chat. For a tokenizer without a chat template an Alpaca record becomes a prompt, with
headings, and a completion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from megazero.data.indexed import DataError

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
COUNTS = ("weight", "train")
"""Keys of a turn that say whether it is learned."""
HEADINGS = ("### Instruction:\n", "\n\n### Input:\n", "\n\n### Response:\n")


def in_one_shape(record: Record, has_template: bool) -> Record:
    """A record with messages, or with prompt and completion. has_template: whether the tokenizer has a chat template.

    Raises DataError if the record has no known shape or several.
    """
    found = [name for name, keys in SHAPES.items() if any(key in record for key in keys)]
    if len(found) != 1:
        raise DataError(
            "either prompt and completion, or messages, or instruction and output (Alpaca), or conversations "
            "(ShareGPT); it holds "
            f"{', '.join(map(str, list(record)[:20])) or 'nothing'}"
        )
    return _MAKE.get(found[0], lambda record, has_template: record)(record, has_template)


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
    turns, system = record["conversations"], _text(record, "system")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise DataError("conversations is no list of turns, each with from and value")
    messages = [_turn("system", system)] if system else []
    for number, turn in enumerate(turns, start=1):
        speaker = turn.get("from", turn.get("role"))
        if not isinstance(speaker, str) or speaker not in SPEAKERS:
            raise DataError(f"turn {number} is from {str(speaker)[:40]!r}, who is none of {', '.join(SPEAKERS)}")
        told = {key: turn[key] for key in COUNTS if key in turn}
        messages.append(_turn(SPEAKERS[speaker], turn.get("value", turn.get("content"))) | told)
    return {"messages": messages, **{key: record[key] for key in ("tools", "documents") if key in record}}


_MAKE: Mapping[str, Callable[[Record, bool], Record]] = MappingProxyType(
    {"instruction and output": _alpaca, "conversations": _sharegpt}
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
