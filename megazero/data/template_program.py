"""The program of the process in which a chat template runs. Requests and answers are lines of JSON.

A template is an untrusted program that comes with a tokenizer. Jinja's sandbox restricts what it can access. It does
not prevent endless loops or huge strings, and one product of long numbers or strings can block a process. So the
template runs in a process of its own with limits of the kernel. This module imports nothing of megazero;
`template_process` starts it as a file.

    {"source": ..., "limits": ...}       -> {"text": ""}
    {"variables": ..., "today": ISO}     -> {"text": ...}
    either                               -> {"wrong": message}, or {"unreadable": message} for an invalid source
"""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Markers around {% generation %} blocks: noncharacters of Unicode, for internal use."""
_SHOWN = 400


@dataclass(frozen=True)
class Limits:
    """Limits of a template. A text may have `characters` + `growth` x bytes of its request.

    seconds     processor time of each request; real templates take milliseconds
    memory      bytes of the whole process
    characters  constant part of a text's length limit
    growth      factor of the request's length in that limit
    """

    seconds: int = 5
    memory: int = 1 << 30
    characters: int = 1 << 20
    growth: int = 16


def main() -> None:
    """Answer requests until the input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    template, limits = None, Limits()
    for line in sys.stdin.buffer:
        try:
            request = json.loads(line)
            if "source" in request:
                limits = Limits(**request["limits"])
                _limit(resource.RLIMIT_AS, limits.memory)
            _limit(resource.RLIMIT_CPU, math.ceil(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])) + limits.seconds)
            if "source" in request:
                template = compiled(request["source"])
                answer = {"text": ""}
            else:
                answer = {"text": _rendered(template, request, limits.characters + limits.growth * len(line))}
        except MemoryError:
            answer = {"wrong": f"it needs more than {limits.memory >> 20:,} MiB of memory"}
        except RecursionError:
            answer = {"wrong": "it is nested too deeply, or calls itself without end"}
        except SyntaxError as error:
            answer = {"unreadable": str(error)[:_SHOWN]}
        except Exception as error:  # a template can raise anything
            answer = {"wrong": str(error)[:_SHOWN] or type(error).__name__}
        sys.stdout.buffer.write(json.dumps(answer).encode("ascii") + b"\n")
        sys.stdout.buffer.flush()


def _limit(kind: int, amount: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (amount if hard == resource.RLIM_INFINITY else min(amount, hard), hard))


def _rendered(template: Any, request: dict[str, Any], most: int) -> str:
    variables = request["variables"]
    if request["today"] is not None:
        variables["strftime_now"] = datetime.fromisoformat(request["today"]).strftime
    pieces, length = [], 0
    for piece in template.generate(variables):
        pieces.append(piece)
        length += len(piece)
        if length > most:
            raise ValueError(f"its text has more than {most:,} characters")
    return "".join(pieces)


def compiled(source: str) -> Any:
    """The compiled template, in a sandbox that cannot change its arguments. {% generation %} blocks write markers.

    Raises SyntaxError for an invalid source.
    """
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import CallBlock
    from jinja2.sandbox import ImmutableSandboxedEnvironment

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

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise SyntaxError(str(error)) from error


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Replaces Jinja's own filter, which escapes characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


if __name__ == "__main__":
    main()
