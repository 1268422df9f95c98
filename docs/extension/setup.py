"""A sphinx extension: reference pages from the dataclasses and parsers, drawings from the code, plain docstrings.

    ```{flags} parallel         a section of the configuration, an entry per field
    ```{commands}               the words behind `megazero`
    ```{command-helps}          what each of their --help says
    ```{drawing} grid tp=2      a picture that `docs.extension.drawings` makes
    ```{kernel-budgets}         what the hot CUDA kernels cost

A flag in a page's code font leads to its entry.
"""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx

from docs.extension.directives import CommandHelps, Commands, Drawing, Flags, KernelBudgets
from docs.extension.docstrings import restructured
from docs.extension.links import FlagLinks


def setup(app: Sphinx) -> dict[str, Any]:
    """What sphinx calls."""
    app.add_directive("flags", Flags)
    app.add_directive("commands", Commands)
    app.add_directive("command-helps", CommandHelps)
    app.add_directive("drawing", Drawing)
    app.add_directive("kernel-budgets", KernelBudgets)
    app.add_post_transform(FlagLinks)
    app.connect("autodoc-process-docstring", in_place)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def in_place(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings here are plain text; sphinx reads reStructuredText."""
    lines[:] = restructured(lines)
