"""Tensors in nested lists, tuples and dicts, such as what a module gets or returns, by the places at which they are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Place = tuple[int | str, ...]
"""The indices and keys that lead to a tensor. Of a tensor that is in nothing: none."""


def mapped(tree: Any, change: Callable[[Place, Tensor], Any], place: Place = ()) -> Any:
    """The same tree with something else in the place of each tensor. Other objects stay."""
    if isinstance(tree, Tensor):
        return change(place, tree)
    if isinstance(tree, Mapping):
        made: Any = dict(tree) if type(tree) is dict else copy.copy(tree)
        for name in tree:
            made[name] = mapped(tree[name], change, (*place, name))
        return made
    if isinstance(tree, list | tuple):
        each = [mapped(value, change, (*place, number)) for number, value in enumerate(tree)]
        make: Callable[[list[Any]], Any] = getattr(type(tree), "_make", type(tree))
        return make(each)
    return tree


def tensors_at(tree: Any) -> dict[Place, Tensor]:
    """The tensors in a tree by their places, in order."""
    found = dict[Place, Tensor]()

    def note(place: Place, tensor: Tensor) -> Tensor:
        found[place] = tensor
        return tensor

    mapped(tree, note)
    return found


def filled(tree: Any, tensors: Mapping[Place, Tensor]) -> Any:
    """The same tree with other tensors at some places."""
    return mapped(tree, lambda place, tensor: tensors.get(place, tensor))


def without_numbers(tree: Any) -> Any:
    """What is equal for trees of the same structure, whose tensors have equal shapes and dtypes: it can be a key."""
    if isinstance(tree, Tensor):
        return tuple(tree.shape), tree.dtype, tree.requires_grad
    if isinstance(tree, Mapping):
        return type(tree).__name__, tuple((name, without_numbers(value)) for name, value in tree.items())
    if isinstance(tree, list | tuple):
        return type(tree).__name__, tuple(map(without_numbers, tree))
    return tree if isinstance(tree, int | float | str | bool | None) else type(tree).__name__


def alike(one: Any, other: Any) -> bool:
    """Whether trees are alike: tensors by their values, numbers and words too, other objects by their classes."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return not isinstance(one, int | float | str | bool) or bool(one == other)
