"""Chat templates: turns of a conversation to one text, and which parts of it an assistant has written.

A template is a Jinja program that comes with a tokenizer (Hugging Face's chat_template.jinja or tokenizer_config.json); it runs in Jinja's
sandbox. Its special tokens are tokens, those that stand in the data are text: where a data string spells one it is parted by `CUT`, which
the tokenizer takes for a border and drops. All other text reaches the template, and the tokenizer, as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megazero.data.indexed import DataError
from megazero.data.libraries import HuggingFaceTokenizer
from megazero.data.special import CUT, SpecialTokens, named_tokens
from megazero.data.tokenizer import Tokenizer

OPEN, CLOSE, HERE = "\ufdd0", "\ufdd1", "\ufdd3"
"""Marks of our own, such characters as `special.CUT` is: around what is generated, and where a message is to be gone on with."""
NOTHING = MappingProxyType({"tools": None, "documents": None})
"""What templates may ask for, and get as `transformers` gives it where there is none."""
ROLES = ("system", "developer", "user", "assistant", "tool")
OLDEST_JINJA = (3, 1, 6)
"""Earlier sandboxes could be left."""

Message = Mapping[str, Any]
Span = tuple[int, int]


@dataclass(frozen=True)
class Rendered:
    """text: as the tokenizer gets it, `CUT` included. spans: what assistants wrote, ranges of its characters in order."""

    text: str
    spans: tuple[Span, ...]


class ChatTemplate:
    """source: the Jinja program. variables: what it may name (bos_token, eos_token). specials: the tokenizer's special tokens.

    Raises DataError where the program cannot be read, ImportError without jinja2. There is no `strftime_now` in it: what a model is
    trained on must not depend on the day.
    """

    def __init__(self, source: str, variables: Mapping[str, str], specials: Sequence[str]) -> None:
        self.source, self.variables, self.specials = source, dict(variables), SpecialTokens(specials)
        self._template = _compiled(source)
        self.marks_generation = re.search(r"\{%-?\+?\s*generation\s*[-+]?%\}", source) is not None

    def render(self, messages: Sequence[Message], **more: Any) -> Rendered:
        """more: further variables, such as tools. Raises DataError where template and messages do not go together."""
        given = [list(messages), *more.values()]
        plain, *others = [self._changed(value, self.specials.parted) for value in given]
        named = dict(zip(more, others, strict=True))
        rendered = self._mark(plain, named) if self.marks_generation else self._extend(plain, named)
        if any(self.specials.borders(text) for text in _strings(given)):
            framed, *others = [self._changed(value, lambda text: _framed(self.specials.parted(text))) for value in given]
            apart = self._text(framed, dict(zip(more, others, strict=True)))
            if self.specials.count(apart) != self.specials.count(rendered.text):
                raise DataError("text of the conversation and text of the chat template make a special token together")
        return rendered

    def prompt(self, messages: Sequence[Mapping[str, str]], *, answer: bool = True) -> str:
        """The text that a model gets: to answer, or to go on with the last message. What data spells like a special token is one here.

        Raises DataError as `render` does, and where the template leaves the last message out that is to be gone on with.
        """
        given: list[Message] = list(messages)
        if not answer:
            given[-1] = {**given[-1], "content": f"{given[-1]['content']}{HERE} "}
        text = re.sub(f"[{OPEN}{CLOSE}]", "", self._text(given, {}, prompt=answer))
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

    def _text(self, messages: list[Message], more: dict[str, Any], prompt: bool = False) -> str:
        """The template's output, with `OPEN` and `CLOSE` around what it marks as generated."""
        from jinja2 import TemplateError

        try:
            found = self._template.render({**NOTHING, **self.variables, **more, "messages": messages, "add_generation_prompt": prompt})
        except (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError, ZeroDivisionError) as error:
            raise DataError(f"the chat template fails: {error}") from error
        return str(found)

    def _mark(self, messages: list[Message], more: dict[str, Any]) -> Rendered:
        """By the template's own {% generation %} blocks."""
        parts, spans, length, start = [], [], 0, None
        for part in re.split(f"([{OPEN}{CLOSE}])", self._text(messages, more)):
            if part == OPEN:
                start = length
            elif part == CLOSE:
                assert start is not None, "blocks are closed after they were opened"
                spans.append((start, length))
            else:
                parts.append(part)
                length += len(part)
        return Rendered("".join(parts), tuple(spans))

    def _extend(self, messages: list[Message], more: dict[str, Any]) -> Rendered:
        """An assistant's turn is what the text grows by, from the one that asks for a turn to the one that has it."""
        whole, spans = self._text(messages, more), []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = self._text(messages[:number], more, prompt=True), self._text(messages[: number + 1], more)
            if not (after.startswith(before) and whole.startswith(after)):
                raise DataError(
                    f"which text is the assistant's does not show: the chat template writes the beginning of a conversation otherwise when "
                    f"more follows (turn {number + 1}); {{% generation %}} blocks in the template would say it"
                )
            spans.append((len(before), self._end(after, len(before))))
        return Rendered(whole, tuple(spans))

    def _end(self, text: str, start: int) -> int:
        """Where a turn ends: with the special token that ends it; the line break behind that is the template's, not the model's."""
        kept = text.rstrip()
        return len(kept) if len(kept) > start and kept.endswith(self.specials.texts) else len(text)


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


def _compiled(source: str) -> Any:
    """The program, in a sandbox that can change nothing it is given. Its {% generation %} blocks put marks around what they hold."""
    try:
        import jinja2
        from jinja2.ext import Extension, loopcontrols
        from jinja2.nodes import CallBlock
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ImportError("chat templates need the package jinja2: pip install jinja2") from error
    if tuple(int(part) for part in re.findall(r"\d+", jinja2.__version__)[:3]) < OLDEST_JINJA:
        raise ImportError(f"chat templates need jinja2 {'.'.join(map(str, OLDEST_JINJA))} or later, not {jinja2.__version__}")

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - as jinja2 wants it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

        def marked(self, caller: Callable[[], str]) -> str:
            return f"{OPEN}{caller()}{CLOSE}"

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise DataError(f"the chat template is no program that jinja2 understands: {error}") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Jinja's own filter escapes what HTML would take for markup."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def template_of(tokenizer: Tokenizer) -> ChatTemplate:
    """The one beside this tokenizer. Raises DataError where there is none."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise DataError("turns of a chat need a chat template, which comes with --tokenizer hf")
    return read_template(tokenizer.path.parent, tokenizer.special_tokens.texts)


def read_template(folder: Path, specials: Sequence[str]) -> ChatTemplate:
    """The chat template beside a tokenizer: chat_template.jinja, or the one in tokenizer_config.json. Raises DataError where there is none."""
    config = _config(folder / "tokenizer_config.json")
    alone = folder / "chat_template.jinja"
    source = alone.read_text(encoding="utf-8") if alone.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
        if source is None:
            raise DataError(f"{folder / 'tokenizer_config.json'} has chat templates {', '.join(map(str, named))}, but none called default")
    if not isinstance(source, str):
        raise DataError(f"{folder} has no chat template: neither chat_template.jinja nor one in tokenizer_config.json")
    return ChatTemplate(source, named_tokens(config, _config(folder / "special_tokens_map.json")), specials)


def _config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise DataError(f"{path} is no JSON: {error}") from error
    return found if isinstance(found, dict) else {}
