"""Instruction data: jsonl with a prompt and a completion, or the turns of a chat, as token ids with a loss mask.

    {"prompt": "2 + 2 = ", "completion": "4"}
    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}

`records` converts records in other shapes to these. A completion is followed by the tokenizer's separator, which has a
loss too. The tokenizer's chat template formats chats.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megazero.data.chat import ROLES, STRANGE, ChatTemplate, Rendered, has_template, template_of
from megazero.data.documents import RawDocument, documents, json_record, open_documents
from megazero.data.indexed import DataError
from megazero.data.libraries import Encoded, HuggingFaceTokenizer
from megazero.data.progress import Progress, Report
from megazero.data.records import (
    COUNTS,
    TURN,
    VARIABLES,
    UnusedKeys,
    filled_keys,
    in_one_shape,
    require_clear_counts,
    unused_keys,
)
from megazero.data.tokenizer import Tokenizer
from megazero.system.file_kinds import fault_of_text
from megazero.system.reading import json_type, listed, shown
from megazero.system.words import counted

AT_ONCE = 512
"""Number of lines that are tokenized together, on all cores."""


@dataclass(frozen=True)
class TokenizedConversation:
    """A conversation of n tokens.

    ids        int32 [n], token ids
    loss_mask  bool [n]: whether the loss on predicting this token counts. The first token is never predicted
    """

    ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]


@dataclass
class ConversationEncoder:
    """Converts lines to conversations.

    eod_id      token that ends a completion; None if the tokenizer has none
    vocab_size  the model's, which bounds the ids
    templates   with tools? -> the chat template, read when the first chat needs it
    unused      keys of the file that nothing reads
    told        a line for each file with such keys
    """

    tokenizer: Tokenizer
    eod_id: int | None
    vocab_size: int
    templates: dict[bool, ChatTemplate] = field(default_factory=dict, init=False)
    unused: UnusedKeys = field(default_factory=UnusedKeys, init=False)
    told: list[str] = field(default_factory=list, init=False)

    def encode(self, lines: Sequence[RawDocument]) -> list[TokenizedConversation]:
        """The conversations of these lines, in order. Raises DataError naming file and line."""
        records = [(raw, self._in_one_shape(raw, _record(raw))) for raw in lines]
        found: list[TokenizedConversation | None] = [
            None if "messages" in record else self._completed(raw, record) for raw, record in records
        ]
        chats = [number for number, conversation in enumerate(found) if conversation is None]
        if chats:
            raws, rendered = (
                [records[number][0] for number in chats],
                [self._rendered(*records[number]) for number in chats],
            )
            written = self._written(raws, [each.text for each in rendered])
            for number, raw, text, encoded in zip(chats, raws, rendered, written, strict=True):
                found[number] = self._mask_assistant(raw, text, encoded)
        return [conversation for conversation in found if conversation is not None]

    def _in_one_shape(self, raw: RawDocument, record: dict[str, Any]) -> dict[str, Any]:
        with _named(raw):
            made = in_one_shape(record, self._has_template)
        self.unused.add(raw.line, unused_keys(record))
        return made

    @cached_property
    def _has_template(self) -> bool:
        return has_template(self.tokenizer)

    def _completed(self, raw: RawDocument, record: dict[str, Any]) -> TokenizedConversation:
        prompt, completion = (_text(raw, record, key) for key in ("prompt", "completion"))
        if not completion:
            raise _wrong(raw, "the completion is empty, so there is nothing to learn")
        if self.eod_id is None:
            raise _wrong(raw, "a completion must end with a separator, and the tokenizer has none: give --eod-id")
        with _named(raw):
            before, after = self._parts(prompt, completion)
        if not after:
            raise _wrong(raw, f"the tokenizer gives no token for the completion {completion[:40]!r}")
        return self._conversation(
            raw, [*before, *after, self.eod_id], [False] * len(before) + [True] * (len(after) + 1)
        )

    def _parts(self, prompt: str, completion: str) -> tuple[list[int], list[int]]:
        """(tokens of the prompt, tokens of the completion), which together decode to the text of both.

        The prompt has the tokens that it has alone, as at generation. The completion has the tokens that it has behind
        the prompt, since many tokenizers would put a blank before it alone. If a token spans both, the completion is
        tokenized alone, provided that this decodes to the same text; else that token and all behind it belong to the
        completion.
        """
        before, whole = self.tokenizer.encode(prompt), self.tokenizer.encode(prompt + completion)
        shared = next(
            (place for place, (one, other) in enumerate(zip(before, whole, strict=False)) if one != other),
            min(len(before), len(whole)),
        )
        if shared < len(before):
            alone = self.tokenizer.encode(completion)
            if self.tokenizer.decode([*before, *alone]) == self.tokenizer.decode(whole):
                return before, alone
        return whole[:shared], whole[shared:]

    def _rendered(self, raw: RawDocument, record: dict[str, Any]) -> Rendered:
        messages = _messages(raw, record["messages"])
        more = {key: record[key] for key in VARIABLES if key in record}
        template = self._chat_template(raw, more.get("tools") is not None)
        self._look_at_keys(raw, messages, more, template)
        with _named(raw):
            return _counted(template.render(messages, **more), messages)

    def _look_at_keys(
        self, raw: RawDocument, messages: Sequence[Mapping[str, Any]], more: Mapping[str, Any], template: ChatTemplate
    ) -> None:
        """Count keys that the template does not read. Raise DataError where they are all that an assistant said."""
        self.unused.add(raw.line, (key for key in filled_keys(more) if not template.names(key)))
        for number, message in enumerate(messages, start=1):
            if message.get("tool_calls") and not message["content"] and not template.names("tool_calls"):
                raise _wrong(
                    raw,
                    f"turn {number} (assistant) holds tool_calls alone, which the chat template does not write, so "
                    "there is nothing to learn",
                )
            unread = (key for key in filled_keys(message) if key not in TURN and not template.names(key))
            self.unused.add(raw.line, (f"{key} of a turn" for key in unread))

    def _chat_template(self, raw: RawDocument, tools: bool) -> ChatTemplate:
        if tools not in self.templates:
            with _named(raw):
                self.templates[tools] = template_of(self.tokenizer, tools=tools)
        return self.templates[tools]

    def _written(self, raws: Sequence[RawDocument], texts: list[str]) -> list[Encoded]:
        """Tokenize all texts at once. If one fails, tokenize them one by one to find which."""
        assert isinstance(self.tokenizer, HuggingFaceTokenizer), "there was a template"
        try:
            return self.tokenizer.encode_written(texts)
        except DataError:
            for raw, text in zip(raws, texts, strict=True):
                with _named(raw):
                    self.tokenizer.encode_written([text])
            raise

    def _mask_assistant(self, raw: RawDocument, rendered: Rendered, encoded: Encoded) -> TokenizedConversation:
        """The loss counts on each token with a character that an assistant wrote, and on tokens between such."""
        starts, stops = (np.array([token[part] for token in encoded], dtype=np.int64) for part in (1, 2))
        loss_mask = np.zeros(len(encoded), dtype=np.bool_)
        for start, stop in rendered.spans:
            inside = np.flatnonzero((starts < stop) & (stops > start))
            if len(inside):
                loss_mask[inside[0] : inside[-1] + 1] = True
        if rendered.text and any(start < stop for start, stop in rendered.spans) and not loss_mask.any():
            raise _wrong(
                raw,
                f"the tokenizer gives no token for what an assistant wrote ({counted(len(encoded), 'token')} for "
                "all of the "
                "chat)",
            )
        return self._conversation(raw, [token[0] for token in encoded], loss_mask)

    def _conversation(self, raw: RawDocument, ids: list[int], loss_mask: Any) -> TokenizedConversation:
        wrong = [number for number in ids if not 0 <= number < self.vocab_size]
        if wrong:
            raise _wrong(
                raw,
                f"token id {wrong[0]} of the tokenizer is outside the model's vocabulary of {self.vocab_size}; to add "
                "tokens to a model: "
                "--vocab-size and --extend-vocabulary",
            )
        marks = np.array(loss_mask, dtype=np.bool_)
        marks[:1] = False
        if not marks.any():
            raise _wrong(raw, "no token of it is learned: the chat template says of none that an assistant wrote it")
        return TokenizedConversation(np.array(ids, dtype=np.int32), marks)


def read_conversations(
    paths: Sequence[Path], encoder: ConversationEncoder, report: Report
) -> Iterator[TokenizedConversation]:
    """All conversations of jsonl files, in order. Raises DataError naming file and line.

    `encoder.told` gets a line for each file with keys that nothing reads.
    """
    for path in paths:
        encoder.unused = UnusedKeys()
        size = path.stat().st_size
        progress = Progress(report, f"tokenizing {path}", size / 1e6, "MB")
        with open_documents(path) as reading:
            lines = documents(reading, path, True, "line")
            while batch := list(islice(lines, AT_ONCE)):
                yield from encoder.encode(batch)
                progress.reach(reading.raw.tell() / 1e6)
        if unread := encoder.unused.text():
            encoder.told.append(f"warning: {path}: nothing reads {unread}")


@contextmanager
def _named(raw: RawDocument) -> Iterator[None]:
    """Add the file and line to a DataError inside the block."""
    try:
        yield
    except DataError as error:
        raise _wrong(raw, str(error)) from error


def _wrong(raw: RawDocument, what: str) -> DataError:
    return DataError(f"{raw.path}, line {raw.line}: {what}")


def _counted(rendered: Rendered, messages: Sequence[Mapping[str, Any]]) -> Rendered:
    """Without the spans of turns that do not count. Raises DataError where they cannot be told from the others."""
    counts = [_counts(message) for message in messages if message["role"] == "assistant"]
    if all(counts):
        return rendered
    if len(counts) != len(rendered.spans):
        raise DataError(
            f"{counts.count(False)} of {len(counts)} turns of an assistant do not count ({', '.join(COUNTS)}), and the "
            f"chat template marks {len(rendered.spans)} texts as an assistant's: which are whose cannot be told"
        )
    return Rendered(rendered.text, tuple(span for span, counted in zip(rendered.spans, counts, strict=True) if counted))


def _counts(message: Mapping[str, Any]) -> bool:
    """Whether a turn is learned: not with "weight": 0 (OpenAI's), "train": false (Axolotl's) or "loss": 0."""
    return all(message.get(key) in (1, None) for key in COUNTS)


def _record(raw: RawDocument) -> dict[str, Any]:
    if fault := fault_of_text(raw.data):
        raise _wrong(raw, fault)
    record = json_record(raw.data.decode("utf-8"), f"{raw.path}, line {raw.line}")
    strange = STRANGE.search(json.dumps(record, ensure_ascii=False))
    if strange:
        raise _wrong(raw, f"holds U+{ord(strange[0]):04X}, which is no character")
    return record


def _text(raw: RawDocument, record: dict[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        if key in record:
            raise _wrong(raw, f"{key} is no text, but {json_type(value)}")
        raise _wrong(raw, f"{key} is missing; it holds {listed(record)}")
    return value


def _messages(raw: RawDocument, messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise _wrong(raw, "messages is no list of turns, each with role and content")
    for number, message in enumerate(messages, start=1):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise _wrong(raw, f"turn {number} has the role {shown(role)}, which is none of {', '.join(ROLES)}")
        if not isinstance(content, str) and not (role == "assistant" and message.get("tool_calls")):
            raise _wrong(raw, f"turn {number} ({role}) has no text as its content")
        if role == "assistant" and not content and not message.get("tool_calls"):
            raise _wrong(raw, f"turn {number} (assistant) is empty, so there is nothing to learn")
        try:
            require_clear_counts(message, "a turn")
        except DataError as error:
            raise _wrong(raw, f"turn {number}: {error}") from error
    assistants = [message for message in messages if message["role"] == "assistant"]
    if not assistants:
        raise _wrong(raw, "no turn is an assistant's, so there is nothing to learn")
    if not any(map(_counts, assistants)):
        raise _wrong(raw, f"no turn of an assistant counts ({', '.join(COUNTS)}), so there is nothing to learn")
    return messages
