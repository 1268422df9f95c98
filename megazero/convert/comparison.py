"""The differences between two checkpoints of any formats: configuration, layout, and every element of every tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megazero.checkpoint.statistics import difference
from megazero.config.dump import run_dict
from megazero.config.model_shape import SHAPE
from megazero.config.schema import Run
from megazero.convert.inspection import Inspected, Record, dtype_names


def compare(a: Inspected, b: Inspected, advance: Callable[[int], None]) -> Record:
    """The differences between two checkpoints of any formats and layouts.

    config     fields that differ: [a's value, b's], with derived values filled in in the model's shape. If one of the
               two is of another format, only that and the precision are compared: the other fields are megazero's own
    tensors    by name and column: elements, bit_equal, largest and relative difference (None: not finite)
    identical  whether tensors and the model's shape are the same: names, shapes, columns, dtypes and every bit

    advance: called with the bytes compared since its last call. Memory: a few windows, or a tensor of another format.
    """
    ours, theirs = a.tensors.shapes, b.tensors.shapes
    both = [name for name in ours if name in theirs]
    shapes = {
        name: [list(ours[name].shape), list(theirs[name].shape)]
        for name in both
        if ours[name].shape != theirs[name].shape
    }
    columns = {
        name: [dtype_names(ours[name]), dtype_names(theirs[name])]
        for name in both
        if dict(ours[name].columns) != dict(theirs[name].columns)
    }
    tensors: dict[str, Record] = {}
    same = True
    for name in (name for name in both if name not in shapes):
        for column in (column for column in ours[name].columns if column in theirs[name].columns):
            found = difference(a.tensors, b.tensors, name, column)
            same = same and found.same
            tensors.setdefault(name, {})[column] = found.record()
            advance(ours[name].numel * (ours[name].columns[column].itemsize + theirs[name].columns[column].itemsize))
    config = _config_difference(a, b)
    only = [[name for name in mine if name not in other] for mine, other in ((ours, theirs), (theirs, ours))]
    return {
        "paths": [str(a.path), str(b.path)],
        "formats": [a.format, b.format],
        "identical": same and not (only[0] or only[1] or shapes or columns) and _shape(a.run) == _shape(b.run),
        "config": config,
        "position": _differing(a.position, b.position) if a.format == b.format else {},
        "layout": [a.layout, b.layout] if a.layout != b.layout else None,
        "only_in_first": only[0],
        "only_in_second": only[1],
        "shapes": shapes,
        "columns": columns,
        "tensors": tensors,
    }


def compared_bytes(a: Inspected, b: Inspected) -> int:
    """The number of bytes that `compare` reads."""
    total = 0
    for name, shape in a.tensors.shapes.items():
        other = b.tensors.shapes.get(name)
        if other is not None and other.shape == shape.shape:
            common = [column for column in shape.columns if column in other.columns]
            total += shape.numel * sum(
                shape.columns[column].itemsize + other.columns[column].itemsize for column in common
            )
    return total


def _config_difference(a: Inspected, b: Inspected) -> dict[str, dict[str, list[Any]]]:
    mine, other = run_dict(a.run), run_dict(b.run)
    if a.manifest is None or b.manifest is None:
        mine, other = (
            {"model": _shape(each.run), "optimizer": {"precision": each.run.optimizer.precision}} for each in (a, b)
        )
    sections = {section: _differing(mine[section], other[section]) for section in mine}
    sections["model"] = _derived(sections["model"], _shape(a.run), _shape(b.run))
    return {section: fields for section, fields in sections.items() if fields}


def _derived(fields: dict[str, list[Any]], mine: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Differing fields of a model with the values that it derives where none is given, and without those that then are
    the same.
    """
    values = {name: [mine[name], other[name]] if name in mine else given for name, given in fields.items()}
    return {name: pair for name, pair in values.items() if pair[0] != pair[1]}


def _shape(run: Run) -> dict[str, Any]:
    """The settings of a model that its weights determine, without settings of training such as the sequence length."""
    return {name: value(run.model) for name, value in SHAPE.items()}


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {key: [a.get(key), b.get(key)] for key in sorted({*a, *b}) if a.get(key) != b.get(key)}
