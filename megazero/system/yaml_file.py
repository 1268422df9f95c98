"""Reads a YAML file of settings, within bounds.

It uses PyYAML's loader in Python, since the one in C overflows the stack on deeply nested brackets. It counts the
file's nodes, with every alias expanded, before it constructs values: a few lines of aliases can stand for more values
than fit into memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megazero.system.reading import BOUNDS, Unreadable, read_text, shown

_TOO_DEEP = f"nested more than {BOUNDS.depth} deep"
_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses a repeated key in a mapping (PyYAML takes the last) and reads dates as words."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as PyYAML wants it
        first: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:timestamp"]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    depth = 0
    """Of the node that is being composed."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """A node. Raises ComposerError for one that is nested too deeply: PyYAML takes time in its depth squared."""
        if self.depth > BOUNDS.depth:
            raise yaml.composer.ComposerError(None, None, _TOO_DEEP, self.peek_event().start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if not isinstance(node, yaml.MappingNode):  # a tag on something else
            return super().construct_mapping(node, deep)
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:  # keys of a merged mapping may be there too
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str | int | float) and str(key) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.add(str(key))
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of a node. An explicit tag on text of another kind (`!!bool maybe`) raises what PyYAML happens to
        raise there.
        """
        if not isinstance(node, yaml.ScalarNode):
            return super().construct_object(node, deep)
        try:
            return super().construct_object(node, deep)
        except (LookupError, ValueError, AttributeError, TypeError, ArithmeticError) as error:
            kind = node.tag.removeprefix("tag:yaml.org,2002:")
            raise yaml.constructor.ConstructorError(
                None, None, f"{shown(node.value)} is tagged !!{kind}, and is none", node.start_mark
            ) from error

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """An integer of bounded length. Python's own bound is for decimal digits only, and its message is unclear."""
        if len(node.value) > BOUNDS.digits:
            raise yaml.constructor.ConstructorError(
                None, None, f"a number of {len(node.value):,} digits", node.start_mark
            )
        return super().construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


class _WordsLoader(_Loader):
    """The same, and numbers are words as they are written: which field takes a number is not known here. (YAML 1.1 has
    octal numbers and those to the base of 60, so that a folder called 0042 would be 34, and one called 12:30 750.)
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - as PyYAML wants it
        first: [(tag, pattern) for tag, pattern in known if tag.rpartition(":")[2] not in ("int", "float")]
        for first, known in _Loader.yaml_implicit_resolvers.items()
    }


def load_yaml(path: Path, *, numbers: bool = True) -> Any:
    """The values of a YAML file; None for an empty one. Raises Unreadable for a file that is no YAML or too large.

    numbers: whether what looks like a number is one; False: it is a word, as it is written.
    """
    text = read_text(path, BOUNDS.settings, piped=True)
    if sum(text.count(mark) for mark in "\n,:[{") > BOUNDS.settings_parts:
        raise Unreadable(
            f"{path} has more than {BOUNDS.settings_parts:,} parts, which is more than a file of settings holds"
        )
    try:
        loader = _Loader(text) if numbers else _WordsLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_bombs(node, path)
        return loader.construct_document(node)
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise (
            error if isinstance(error, Unreadable) else Unreadable(f"{path}: is no YAML: {_first_mistake(error, text)}")
        ) from error


def _first_mistake(error: Exception, text: str) -> str:
    """A YAML error as one line: the place and the problem."""
    if isinstance(error, yaml.reader.ReaderError):
        before = text[: error.position]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        return f"line {line}, column {column}: the character U+{error.character:04X} cannot be in YAML"
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
    return place + " ".join(str(problem or error).split())


def _refuse_bombs(root: yaml.Node, path: Path) -> None:
    """Raise Unreadable if the nodes are too many or nested too deeply, with every alias expanded, or if one holds
    itself.
    """
    known: dict[int, tuple[int, int]] = {}
    above: set[int] = set()

    def measure(node: yaml.Node) -> tuple[int, int]:
        """(number of nodes, levels) of a node."""
        mark = node.start_mark
        place = f"{path}: line {mark.line + 1}, column {mark.column + 1}:"
        if id(node) in above:
            raise Unreadable(f"{place} an alias stands for what holds it")
        if id(node) not in known:
            above.add(id(node))
            pairs = node.value if _holds(node) else []
            inside = [measure(part) for pair in pairs for part in (pair if isinstance(pair, tuple) else (pair,))]
            above.remove(id(node))
            known[id(node)] = (
                1 + sum(count for count, _ in inside),
                1 + max((levels for _, levels in inside), default=0),
            )
        count, levels = known[id(node)]
        if count > BOUNDS.settings_parts:
            raise Unreadable(f"{path}: its aliases stand for more than {BOUNDS.settings_parts:,} values")
        if levels > BOUNDS.depth + 1:
            raise Unreadable(f"{place} {_TOO_DEEP}")
        return known[id(node)]

    measure(root)


def _holds(node: yaml.Node) -> bool:
    return isinstance(node, yaml.CollectionNode)
