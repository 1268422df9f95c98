"""The process in which a chat template runs: a line of JSON for each request, and one for each answer.

A template is a program that came with a tokenizer. Jinja's sandbox keeps it from what it is not given, but not from
loops without end or strings without limit, and one product of long numbers or strings stops a whole process. So it has
a process, and the kernel holds it to its limits. This module knows nothing of megazero and is started by
`template_process`.

    {"source": ..., "limits": ...}       -> {"text": ""}
    {"variables": ..., "today": ISO}     -> {"text": ...}
    either                               -> {"wrong": message}, {"unreadable": message} of a source that is no program
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
"""Around what is generated: characters that Unicode has set aside for a program's inner use."""
_SHOWN = 400


@dataclass(frozen=True)
class Limits:
    """seconds     of the processor, for each text; real templates take milliseconds
    memory      bytes, of the whole process
    characters  that a text may have, beside `growth` times those of its request
    """

    seconds: int = 5
    memory: int = 1 << 30
    characters: int = 1 << 20
    growth: int = 16


def main() -> None:
    """Serve until the requests end."""
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
        except Exception as error:  # whatever a program of somebody else's does
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
    """The program, in a sandbox that can change nothing it is given. Its {% generation %} blocks put marks around what
    they hold.

    Raises SyntaxError for what is no program.
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
    """Jinja's own filter escapes what HTML would take for markup."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
