"""The directives: flags of a section, what each command's --help says, a drawing, the costs of kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from bench.kernel_table import kernel_table
from docs.extension import drawings, options
from megazero.cli.main import SUBCOMMANDS
from megazero.config.options import Option


class Flags(SphinxDirective):
    """Every option of a section: its spellings, what it takes, its default, its place in a file, its sentence."""

    required_arguments = 1

    def run(self) -> Sequence[nodes.Node]:
        section = self.arguments[0]
        try:
            listed = options.options_in(section)
        except ValueError as problem:
            raise self.error(str(problem)) from None
        entries = [self._entry(option) for option in listed]
        return [nodes.paragraph("", options.about(section)), nodes.definition_list("", *entries, classes=["flags"])]

    def _entry(self, option: Option) -> nodes.definition_list_item:
        anchor = options.anchor(option)
        term = nodes.term("", "", ids=[anchor])
        for number, flag in enumerate(option.flags):
            term.extend([nodes.Text(" "), nodes.literal(flag, flag, classes=["alias"] * (number > 0))])
        if option.common:
            term.extend([nodes.Text(" "), nodes.inline("", "common", classes=["common"])])
        facts = nodes.paragraph(classes=["facts"])
        for word, value in self._facts(option):
            facts.extend([nodes.inline(word, word + " "), nodes.literal(value, value), nodes.Text("  ")])
        return nodes.definition_list_item("", term, nodes.definition("", self._text(option), facts))

    def _facts(self, option: Option) -> Sequence[tuple[str, str]]:
        facts = [("takes", options.takes(option)), ("default", option.shown_default)]
        if option.kind is bool and option.section != options.COMMAND and option.default is True:
            facts.append(("off with", option.negations[0]))
        if option.section != options.COMMAND:
            facts.append(("in a file", f"{option.section}.{option.name}"))
        return facts

    def _text(self, option: Option) -> nodes.paragraph:
        """The sentence, with flags in code font."""
        text = nodes.paragraph()
        for part in re.split(r"(--[a-z][\w-]*)", option.sentence):
            text += nodes.literal(part, part) if part.startswith("--") else nodes.Text(part)
        return text


class Commands(SphinxDirective):
    """A table of the words behind `megazero`, with their scripts."""

    def run(self) -> Sequence[nodes.Node]:
        rows = [f"| `megazero {name}` | `{known.script}` | {known.sentence} |" for name, known in SUBCOMMANDS.items()]
        table = "\n".join(["| command | in a clone | what it does |", "|---|---|---|", *rows])
        return self.parse_text_to_nodes(table)


class KernelBudgets(SphinxDirective):
    """A table of what each hot CUDA kernel costs, and of the rate that was measured."""

    def run(self) -> Sequence[nodes.Node]:
        headings, *rows = kernel_table()
        lines = [headings, ("---",) * len(headings), *rows]
        return self.parse_text_to_nodes("\n".join(f"| {' | '.join(line)} |" for line in lines))


class CommandHelps(SphinxDirective):
    """A section for each command, with what its --help prints in a terminal of 96 columns."""

    def run(self) -> Sequence[nodes.Node]:
        return [self._section(name) for name in SUBCOMMANDS]

    def _section(self, name: str) -> nodes.section:
        done = subprocess.run(
            [sys.executable, "-m", "megazero", name, "--help"],
            env=os.environ | {"COLUMNS": "96"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise self.error(f"megazero {name} --help: {done.stderr}")
        said = nodes.literal_block(done.stdout, done.stdout, language="text", classes=["help"])
        return nodes.section("", nodes.title(name, name), said, ids=[name], names=[name])


class Drawing(SphinxDirective):
    """A drawing by its name, with `name=number` for each of its arguments; below it stands what it shows."""

    required_arguments = 1
    optional_arguments = 12
    has_content = True

    def run(self) -> Sequence[nodes.Node]:
        name, *given = self.arguments
        try:
            picture = drawings.DRAWINGS[name](**dict(drawings.argument(word) for word in given))
        except (KeyError, TypeError, ValueError) as problem:
            raise self.error(f"drawing {' '.join(self.arguments)}: {problem}") from None
        figure = nodes.figure("", nodes.raw("", picture, format="html"), classes=["drawing"])
        if self.content:
            (caption, *others) = self.parse_content_to_nodes()
            figure += nodes.caption("", "", *caption.children)
            figure.extend([nodes.legend("", *others)] if others else [])
        return [figure]
