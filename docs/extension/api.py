"""Python's names as Markdown: a heading, the signature, the docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any

from docs.extension.docstrings import markdown

WIDTH = 100
"""Columns of a signature on one line."""


def described(path: str, *members: str) -> str:
    """A function, class or module by its dotted path.

    members: names of a class that are described as well; `all` stands for its public ones, and `call` for how the class
    itself is called, which is left out where users do not make objects of it.
    """
    value = _named(path)
    if isinstance(value, ModuleType):
        return _text(value)
    listed = [name for name in members if name not in ("all", "call")]
    if "all" in members:
        listed += [name for name, member in vars(value).items() if not name.startswith("_") and _has_docs(member)]
    called = not inspect.isclass(value) or "call" in members
    parts = [f"### `{value.__name__}`", _signature(value.__name__, value) if called else "", _text(value)]
    for name in listed:
        member = inspect.getattr_static(value, name)
        signed = inspect.isroutine(member)
        shown = f"{value.__name__}.{name}"
        parts += [f"#### `{shown}`", _signature(shown, getattr(value, name)) if signed else "", _text(_inner(member))]
    return "\n\n".join(part for part in parts if part)


def _named(path: str) -> Any:
    """What the dotted path names: a module, or something of one."""
    try:
        return import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(import_module(module), name)


def _has_docs(member: Any) -> bool:
    described = inspect.isroutine(member) or isinstance(member, property | cached_property | classmethod | staticmethod)
    return described and bool(_inner(member).__doc__)


def _inner(member: Any) -> Any:
    """The function behind a property, class method or static method."""
    if isinstance(member, property):
        return member.fget
    if isinstance(member, cached_property):
        return member.func
    return getattr(member, "__func__", member)


def _text(value: Any) -> str:
    return "\n".join(markdown((inspect.getdoc(value) or "").splitlines())).strip()


def _signature(shown: str, value: Any) -> str:
    """How it is called, as in the source: on one line, or on one for each parameter."""
    signature = inspect.signature(value)
    parameters = [p for name, p in signature.parameters.items() if name != "self"]
    returned = signature.replace(parameters=[])
    line = f"{shown}{signature.replace(parameters=parameters)}"
    if len(line) > WIDTH:
        ends = str(returned).removeprefix("()")
        line = "\n".join([f"{shown}(", *(f"    {item}," for item in _items(parameters)), f"){ends}"])
    return f"```python\n{_unquoted(line)}\n```"


def _items(parameters: list[inspect.Parameter]) -> Iterator[str]:
    starred = False
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            starred = True
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        yield str(parameter)


def _unquoted(signature: str) -> str:
    """Annotations are texts in the modules of this project, which named tuples wrap: what is around the texts goes."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", re.sub(r"ForwardRef\(('[^']*')\)", r"\1", signature))
