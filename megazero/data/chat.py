"""Chat templates: turns of a conversation to one text, and which parts of it an assistant has written.

A template is a Jinja program that comes with a tokenizer (Hugging Face's chat_template.jinja or tokenizer_config.json);
it runs in Jinja's sandbox, in a process with limits (`template_program`). Its special tokens are tokens, those that
stand in the data are text: where a data string spells one it is parted by `CUT`, which the tokenizer takes for a border
and drops. All other text reaches the template, and the tokenizer, as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megazero.data.indexed import DataError
from megazero.data.libraries import HuggingFaceTokenizer
from megazero.data.special import CUT, SpecialTokens, named_tokens
from megazero.data.template_process import TemplateProcess
from megazero.data.template_program import CLOSE, OPEN
from megazero.data.tokenizer import Tokenizer
from megazero.system.reading import BOUNDS, raised_as, read_object, read_text

HERE = "\ufdd3"
"""A mark of our own, such a character as `special.CUT` is: where a message is to be gone on with."""
STRANGE = re.compile(f"[{OPEN}{CLOSE}{CUT}\ud800-\udfff]")
"""What no turn may hold: our marks, and lone surrogates."""
SURROGATE = re.compile("[\ud800-\udfff]")
NOTHING = MappingProxyType({"tools": None, "documents": None})
"""What templates may ask for, and get as `transformers` gives it where there is none."""
ROLES = ("system", "developer", "user", "assistant", "tool")

Message = Mapping[str, Any]
Span = tuple[int, int]


@dataclass(frozen=True)
class Rendered:
    """text: as the tokenizer gets it, `CUT` included. spans: what assistants wrote, ranges of its
    characters in order.
    """

    text: str
    spans: tuple[Span, ...]


class ChatTemplate:
    """source: the Jinja program. variables: what it may name (bos_token, eos_token). specials: the tokenizer's special
    tokens.

    Raises DataError where the program cannot be read, ImportError without jinja2. `strftime_now`, which tells the day,
    is there for prompts only: what a model is trained on must not depend on it.
    """

    def __init__(self, source: str, variables: Mapping[str, str], specials: Sequence[str]) -> None:
        self.source, self.variables, self.specials = source, dict(variables), SpecialTokens(specials)
        self._template = TemplateProcess(source)
        self.marks_generation = re.search(r"\{%-?\+?\s*generation\s*[-+]?%\}", source) is not None

    def render(self, messages: Sequence[Message], **more: Any) -> Rendered:
        """more: further variables, such as tools. Raises DataError where template and messages do not go together."""
        given = [list(messages), *more.values()]
        plain, *others = [self._changed(value, self.specials.parted) for value in given]
        named = dict(zip(more, others, strict=True))
        rendered = self._mark(plain, named) if self.marks_generation else self._extend(plain, named)
        self._refuse_joined(given, tuple(more), rendered.text)
        return rendered

    def question(self, messages: Sequence[Message]) -> str:
        """The text that a model is to answer, as `render` has it: what turns spell like a special token is parted by
        `CUT`, and stays text.

        Raises DataError as `render` does, and for messages that are no turns.
        """
        try:
            given, today = json.loads(json.dumps(list(messages))), datetime.now()
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"a conversation is turns that JSON can hold: {error}") from error
        if not given or not all(
            isinstance(turn, Mapping) and isinstance(turn.get("role"), str) and "content" in turn for turn in given
        ):
            raise DataError("a conversation is a list of turns, each with role and content")
        strange = next((found for text in _strings(given) if (found := STRANGE.search(text))), None)
        if strange:
            raise DataError(f"a turn holds U+{ord(strange[0]):04X}, which is no character")
        text = _unmarked(self._text(self._changed(given, self.specials.parted), {}, prompt=True, today=today))
        self._refuse_joined([given], (), text, prompt=True, today=today)
        return text

    def end_of_turn(self) -> str | None:
        """The special token that stands behind an assistant's words; None where there is none, or it does not show."""
        try:
            text = self._text([{"role": "user", "content": "?"}, {"role": "assistant", "content": HERE}], {})
        except DataError:  # it wants other turns
            return None
        behind = _unmarked(text).rpartition(HERE)[2].lstrip()
        return next((token for token in self.specials.texts if behind.startswith(token)), None)

    def _refuse_joined(self, given: list[Any], names: Sequence[str], text: str, **how: Any) -> None:
        """Raises DataError where the text has a special token that neither data nor template has alone. names: of all
        given but the first.
        """
        if any(self.specials.borders(string) for string in _strings(given)):
            framed, *others = [
                self._changed(value, lambda string: _framed(self.specials.parted(string))) for value in given
            ]
            apart = self._text(framed, dict(zip(names, others, strict=True)), **how)
            if self.specials.count(apart) != self.specials.count(text):
                raise DataError("text of the conversation and text of the chat template make a special token together")

    def prompt(self, messages: Sequence[Mapping[str, str]], *, answer: bool = True) -> str:
        """The text that a model gets: to answer, or to go on with the last message. What data spells like a special
        token is one here.

        Raises DataError as `render` does, and where the template leaves the last message out that is to be gone on
        with.
        """
        given: list[Message] = list(messages)
        if not answer:
            given[-1] = {**given[-1], "content": f"{given[-1]['content']}{HERE} "}
        text = _unmarked(self._text(given, {}, prompt=answer, today=datetime.now()))
        if answer:
            return text
        before, mark, behind = text.rpartition(HERE)
        if not mark:
            raise DataError("the chat template leaves out the message that is to be gone on with")
        return before if behind.startswith(" ") else before.rstrip()  # else it strips messages, but for the mark

    def _changed(self, value: Any, act: Callable[[str], str]) -> Any:
        """A value of JSON kind with `act` on every string in it. A role is not the data's: it is one of `ROLES`."""
        if isinstance(value, str):
            return act(value)
        if isinstance(value, Mapping):
            return {
                self.specials.parted(key): item if key == "role" and item in ROLES else self._changed(item, act)
                for key, item in value.items()
            }
        return [self._changed(item, act) for item in value] if isinstance(value, list) else value

    def _text(
        self, messages: list[Any], more: dict[str, Any], prompt: bool = False, today: datetime | None = None
    ) -> str:
        """The template's output, with `OPEN` and `CLOSE` around what it marks as generated."""
        named = {**NOTHING, **self.variables, **more, "messages": messages, "add_generation_prompt": prompt}
        text = self._template.render(named, today)
        strange = SURROGATE.search(text)
        if strange:
            raise DataError(f"the chat template writes U+{ord(strange[0]):04X}, which is no character")
        return text

    def _mark(self, messages: list[Message], more: dict[str, Any]) -> Rendered:
        """By the template's own {% generation %} blocks."""
        parts, spans, length, start = [], [], 0, None
        for part in re.split(f"([{OPEN}{CLOSE}])", self._text(messages, more)):
            if part in (OPEN, CLOSE):
                if (start is None) == (part == CLOSE):
                    break
                if start is not None:
                    spans.append((start, length))
                start = length if start is None else None
            else:
                parts.append(part)
                length += len(part)
        else:
            if start is None:
                return Rendered("".join(parts), tuple(spans))
        raise DataError("the chat template has marks of what is generated inside each other, or alone")

    def _extend(self, messages: list[Message], more: dict[str, Any]) -> Rendered:
        """An assistant's turn is what the text grows by, from the one that asks for a turn to the one that has it."""
        whole, spans = self._text(messages, more), []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = self._text(messages[:number], more, prompt=True), self._text(messages[: number + 1], more)
            if not (after.startswith(before) and whole.startswith(after)):
                raise DataError(
                    "which text is the assistant's does not show: the chat template writes the beginning of a "
                    "conversation otherwise when "
                    f"more follows (turn {number + 1}); {{% generation %}} blocks in the template would say it"
                )
            spans.append((len(before), self._end(after, len(before))))
        return Rendered(whole, tuple(spans))

    def _end(self, text: str, start: int) -> int:
        """Where a turn ends: with the special token that ends it; the line break behind that is the template's, not the
        model's.
        """
        kept = text.rstrip()
        return len(kept) if len(kept) > start and kept.endswith(self.specials.texts) else len(text)


def _unmarked(text: str) -> str:
    return re.sub(f"[{OPEN}{CLOSE}]", "", text)


def _framed(text: str) -> str:
    """With borders around what is not space, which templates may strip."""
    inside = text.strip()
    return text.replace(inside, f"{CUT}{inside}{CUT}", 1) if inside else text


def _strings(value: Any) -> Iterator[str]:
    """Every string in a value of JSON kind."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from (key, *_strings(item))
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def has_template(tokenizer: Tokenizer) -> bool:
    """Whether a chat template lies beside this tokenizer."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return False
    folder = tokenizer.path.parent
    return (folder / "chat_template.jinja").is_file() or bool(
        _config(folder / "tokenizer_config.json").get("chat_template")
    )


def template_of(tokenizer: Tokenizer) -> ChatTemplate:
    """The one beside this tokenizer. Raises DataError where there is none."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise DataError("turns of a chat need a chat template, which comes with --tokenizer hf")
    return read_template(tokenizer.path.parent, tokenizer.special_tokens.texts)


def read_template(folder: Path, specials: Sequence[str]) -> ChatTemplate:
    """The chat template beside a tokenizer: chat_template.jinja, or the one in tokenizer_config.json.

    Raises DataError where there is none.
    """
    config = _config(folder / "tokenizer_config.json")
    alone = folder / "chat_template.jinja"
    with raised_as(DataError):
        source = read_text(alone, BOUNDS.index) if alone.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {str(entry.get("name")): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
        if source is None:
            raise DataError(
                f"{folder / 'tokenizer_config.json'} has chat templates {', '.join(map(str, named))}, but none called "
                "default"
            )
    if not isinstance(source, str):
        raise DataError(f"{folder} has no chat template: neither chat_template.jinja nor one in tokenizer_config.json")
    return ChatTemplate(source, named_tokens(config, _config(folder / "special_tokens_map.json")), specials)


def _config(path: Path) -> dict[str, Any]:
    with raised_as(DataError):
        return read_object(path, BOUNDS.index) if path.is_file() else {}
