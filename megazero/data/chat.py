"""Chat templates: from the turns of a conversation to one text, with the parts that an assistant wrote.

A template is a Jinja program that comes with a tokenizer (Hugging Face's chat_template.jinja or tokenizer_config.json).
It runs in Jinja's sandbox, in a process with limits (`template_program`). Special tokens that the template writes are
tokens; those that the data spell are text. `CUT` is inserted into each special token that the data spell; the tokenizer
splits there and drops it. All other text is passed on unchanged.
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
from megazero.system.reading import BOUNDS, listed, raised_as, read_object, read_text

HERE = "\ufdd3"
"""A marker for the end of a message that the model is to continue; a noncharacter of Unicode like `special.CUT`."""
STRANGE = re.compile(f"[{OPEN}{CLOSE}{CUT}\ud800-\udfff]")
"""Characters that no turn may have: the markers, and lone surrogates."""
SURROGATE = re.compile("[\ud800-\udfff]")
NOTHING = MappingProxyType({"tools": None, "documents": None})
"""Variables that templates may read. `transformers` also passes None for them if they are not given."""
ROLES = ("system", "developer", "user", "assistant", "tool")

Message = Mapping[str, Any]
Span = tuple[int, int]


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    text   the text for the tokenizer, with `CUT`
    spans  the ranges of its characters that assistants wrote, in order
    """

    text: str
    spans: tuple[Span, ...]


class ChatTemplate:
    """A chat template.

    source     the Jinja program
    variables  variables of the program (bos_token, eos_token)
    specials   the tokenizer's special tokens

    Raises DataError where the program cannot be read, ImportError without jinja2. Only prompts have `strftime_now` (the
    date): training data must not depend on the day.
    """

    def __init__(self, source: str, variables: Mapping[str, str], specials: Sequence[str]) -> None:
        self.source, self.variables, self.specials = source, dict(variables), SpecialTokens(specials)
        self._template, self._words = TemplateProcess(source), frozenset(re.findall(r"\w+", source))
        self.marks_generation = re.search(r"\{%-?\+?\s*generation\s*[-+]?%\}", source) is not None

    def names(self, key: str) -> bool:
        """Whether the program has this word, without which it cannot read a key of that name."""
        return key in self._words or (not key.isidentifier() and key in self.source)

    def render(self, messages: Sequence[Message], **more: Any) -> Rendered:
        """A whole conversation for training. more: further variables, such as tools.

        Raises DataError where the template refuses the messages or writes what cannot be used.
        """
        given = [list(messages), *more.values()]
        plain, *others = [self._changed(value, self.specials.parted) for value in given]
        named = dict(zip(more, others, strict=True))
        rendered = self._mark(plain, named) if self.marks_generation else self._extend(plain, named)
        self._refuse_joined(given, tuple(more), rendered.text)
        return rendered

    def question(self, messages: Sequence[Message]) -> str:
        """The prompt for an answer to these messages. Special tokens that turns spell stay text, as in `render`.

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
        """The special token behind an assistant's message; None if there is none or it cannot be found."""
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": HERE}]
        try:
            text = self._text(turns, {}, today=datetime.now())  # the token is the same on any day
        except DataError:  # the template needs other turns
            return None
        behind = _unmarked(text).rpartition(HERE)[2].lstrip()
        return next((token for token in self.specials.texts if behind.startswith(token)), None)

    def _refuse_joined(self, given: list[Any], names: Sequence[str], text: str, **how: Any) -> None:
        """Raise DataError if data and template together make a special token that neither makes alone.

        names: names of the variables in `given` behind the first.
        """
        if any(self.specials.borders(string) for string in _strings(given)):
            framed, *others = [
                self._changed(value, lambda string: _framed(self.specials.parted(string))) for value in given
            ]
            apart = self._text(framed, dict(zip(names, others, strict=True)), **how)
            if self.specials.count(apart) != self.specials.count(text):
                raise DataError("text of the conversation and text of the chat template make a special token together")

    def prompt(self, messages: Sequence[Mapping[str, str]], *, answer: bool = True) -> str:
        """The prompt for an answer, or with answer=False for a continuation of the last message.

        Special tokens that messages spell are special tokens here. Raises DataError as `render` does, and where the
        template leaves out a last message that is to be continued.
        """
        given: list[Message] = list(messages)
        if not answer:
            given[-1] = {**given[-1], "content": f"{given[-1]['content']}{HERE} "}
        text = _unmarked(self._text(given, {}, prompt=answer, today=datetime.now()))
        if answer:
            return text
        before, mark, behind = text.rpartition(HERE)
        if not mark:
            raise DataError("the chat template leaves out the message that is to be continued")
        return before if behind.startswith(" ") else before.rstrip()  # else the template strips messages

    def _changed(self, value: Any, act: Callable[[str], str]) -> Any:
        """A JSON value with `act` applied to every string in it, except roles of `ROLES`, which are not data."""
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
        """The template's output, with `OPEN` and `CLOSE` around its {% generation %} blocks."""
        named = {**NOTHING, **self.variables, **more, "messages": messages, "add_generation_prompt": prompt}
        text = self._template.render(named, today)
        strange = SURROGATE.search(text)
        if strange:
            raise DataError(f"the chat template writes U+{ord(strange[0]):04X}, which is no character")
        return text

    def _mark(self, messages: list[Message], more: dict[str, Any]) -> Rendered:
        """Find the assistants' text by the template's {% generation %} blocks."""
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
        """Find an assistant's text as the difference between the text with its turn and the prompt for that turn."""
        whole, spans = self._text(messages, more), []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = self._text(messages[:number], more, prompt=True), self._text(messages[: number + 1], more)
            if not (after.startswith(before) and whole.startswith(after)):
                raise DataError(
                    "the assistant's text cannot be found: the chat template writes the beginning of a conversation "
                    "differently when "
                    f"more follows (turn {number + 1}); {{% generation %}} blocks in the template would mark it"
                )
            spans.append((len(before), self._end(after, len(before))))
        return Rendered(whole, tuple(spans))

    def _end(self, text: str, start: int) -> int:
        """The end of a turn: behind its special token, without the template's line break, which no model writes."""
        kept = text.rstrip()
        return len(kept) if len(kept) > start and kept.endswith(self.specials.texts) else len(text)


def _unmarked(text: str) -> str:
    return re.sub(f"[{OPEN}{CLOSE}]", "", text)


def _framed(text: str) -> str:
    """The text with `CUT` around it, inside leading and trailing space, which templates may strip."""
    inside = text.strip()
    return text.replace(inside, f"{CUT}{inside}{CUT}", 1) if inside else text


def _strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from (key, *_strings(item))
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def has_template(tokenizer: Tokenizer) -> bool:
    """Whether there is a chat template in the tokenizer's folder."""
    return isinstance(tokenizer, HuggingFaceTokenizer) and bool(_templates(tokenizer.path.parent))


def template_of(tokenizer: Tokenizer, *, tools: bool = False) -> ChatTemplate:
    """The chat template in the tokenizer's folder. Raises DataError if there is none. tools: as in `read_template`."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise DataError("turns of a chat need a chat template, which comes with --tokenizer hf")
    return read_template(tokenizer.path.parent, tokenizer.special_tokens.texts, tools=tools)


def read_template(folder: Path, specials: Sequence[str], *, tools: bool = False) -> ChatTemplate:
    """The chat template in a tokenizer's folder; of several the one called default. tools: for a conversation with
    tools, the one called tool_use if there is one.

    Raises DataError if there is none.
    """
    named = _templates(folder)
    if not named:
        raise DataError(f"{folder} has no chat template: neither chat_template.jinja nor one in tokenizer_config.json")
    source = named.get("tool_use" if tools and "tool_use" in named else "default")
    if not isinstance(source, str):
        raise DataError(f"{folder} has chat templates {listed(named)}, but none called default")
    files = (folder / name for name in ("tokenizer_config.json", "special_tokens_map.json"))
    return ChatTemplate(source, named_tokens(*map(_config, files)), specials)


def _templates(folder: Path) -> dict[str, Any]:
    """Name -> chat template, from files of their own or else from tokenizer_config.json. Raises DataError."""
    alone = {"default": folder / "chat_template.jinja"}
    alone |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    with raised_as(DataError):
        files = {name: read_text(path, BOUNDS.index) for name, path in alone.items() if path.is_file()}
    found = _config(folder / "tokenizer_config.json").get("chat_template")
    if files or not found:
        return files
    if isinstance(found, list):
        return {str(entry.get("name")): entry.get("template") for entry in found if isinstance(entry, dict)}
    return found if isinstance(found, dict) else {"default": found} if isinstance(found, str) else {}


def _config(path: Path) -> dict[str, Any]:
    with raised_as(DataError):
        return read_object(path, BOUNDS.index) if path.is_file() else {}
