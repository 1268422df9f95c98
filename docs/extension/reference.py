"""Parts of the reference as Markdown: the flags of a section, the commands and their help, kernels, programs."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from unittest import mock

from bench.kernel_table import kernel_table
from docs.extension import options
from megazero.cli.main import SUBCOMMANDS, main
from megazero.config.options import Option

ROOT = Path(__file__).resolve().parents[2]
"""The project's folder."""
COLUMNS = 96
"""The width of the terminal whose --help stands in the pages."""


def flags(section: str) -> str:
    """Every option of a section: its spellings, its sentence, what it takes, its default, its place in a file."""
    entries = [_entry(option) for option in options.options_in(section)]
    return "\n\n".join([options.about(section), *entries])


def settings() -> str:
    """Every setting for a file: its key first, and what `flags` says of an option."""
    return "\n\n".join(_entry(option) for option in options.settings_for_a_file())


def _entry(option: Option) -> str:
    """One paragraph of three lines. The anchor is where a flag in another page's code font leads."""
    key = [f"{option.section}.{option.name}"] if option.expert else []
    first, *others = (f"`{word}`" for word in (*key, *option.flags))
    spelled = f'<a id="{options.anchor(option)}"></a> ' + " ".join([f"**{first}**", *others])
    sentence = re.sub(r"(--[a-z][\w-]*)", r"`\1`", _plain(option.sentence))
    lines = [spelled + " · common" * option.common, sentence, " · ".join(_facts(option))]
    return "\\\n".join(lines)


def _plain(text: str) -> str:
    """The text with what Markdown would take for marks of its own escaped."""
    return re.sub(r"([\\*_`|<>\[\]])", r"\\\1", text)


def _facts(option: Option) -> Iterator[str]:
    yield f"takes {_plain(options.takes(option))}"
    yield f"default `{option.shown_default}`"
    if option.kind is bool and option.section != options.COMMAND:
        yield "off with " + ", ".join(f"`{flag}`" for flag in option.negations)
    if option.section != options.COMMAND and not option.expert:
        yield f"in a file `{option.section}.{option.name}`"


def commands() -> str:
    """A table of the words behind `megazero`, with their scripts."""
    rows = [f"| `megazero {name}` | `{known.script}` | {known.sentence} |" for name, known in SUBCOMMANDS.items()]
    return "\n".join(["| command | in a clone | what it does |", "|---|---|---|", *rows])


def helps() -> str:
    """A heading for each command, with what its --help prints."""
    return "\n\n".join(f"## {name}\n\n```text\n{_help(name)}\n```" for name in SUBCOMMANDS)


def _help(name: str) -> str:
    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": str(COLUMNS)}),
        redirect_stdout(printed),
        suppress(SystemExit),  # argparse ends its command behind the help
    ):
        main([name, "--help"])
    return printed.getvalue().rstrip()


def kernels() -> str:
    """A table of what each hot CUDA kernel costs, and of the rate that was measured."""
    headings, *rows = kernel_table()
    return "\n".join(f"| {' | '.join(line)} |" for line in [headings, ("---",) * len(headings), *rows])


def program(path: str) -> str:
    """A Python program of the project, by its path."""
    return f"```python\n{(ROOT / path).read_text().rstrip()}\n```"
