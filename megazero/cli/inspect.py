"""`megazero inspect`: the contents of a checkpoint, or the differences of two, as text or JSON."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megazero.cli.exit_status import status_of
from megazero.cli.parser import command_parser, not_positive
from megazero.cli.shared_flags import add_checkpoint_flags, cores, named_checkpoints
from megazero.config.options import did_you_mean
from megazero.convert.names import missing_path_message
from megazero.data.progress import Progress, to_stderr
from megazero.report.text_blocks import pairs, table
from megazero.system.hub import HubError, folder_of
from megazero.system.status import FAILED
from megazero.system.words import counted
from megazero.telemetry.units import count, size

if TYPE_CHECKING:
    from megazero.convert.inspection import Inspected, Record

DESCRIPTION = """
The contents of a checkpoint, or the differences of two.

PATH is a checkpoint of megazero, a folder of them (its checkpoints are listed, and the newest is shown), or a
checkpoint of any other format that `megazero convert` reads. With two PATHs the differences are shown. A checkpoint of
adapters (--lora-rank) is shown as it is; for a comparison with a model, the adapters are merged with their base. Values
are read in pieces, so memory does not grow with the model.

Status: 0; 1 if a checkpoint is damaged, or with --exit-code if two differ; 2 for a mistake in the arguments; 141 if
nobody reads the output any more.
"""
EXAMPLES = (
    "megazero inspect runs/bloom",
    "megazero inspect runs/bloom/iter_0001000 --verify --all",
    "megazero inspect runs/bloom --tensor 'blocks.*.mlp.up.weight'",
    "python tools/inspect_checkpoint.py runs/bloom/iter_0001000 runs/other --exit-code",
)
MOST_SIMILAR = 3
"""The most similar names that the error for an unknown tensor offers."""
MOST_FILES = 16
"""The most files that are listed without --all."""


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = command_parser("inspect", DESCRIPTION, EXAMPLES)
    add_checkpoint_flags(parser, metavar="PATH")
    add = parser.add_argument
    add("--verify", action="store_true", help="check every hash (other programs' formats have none: read everything)")
    pattern = "statistics of a tensor, or of all whose names match a pattern (blocks.*.weight)"
    add("--tensor", metavar="NAME", help=pattern)
    add("--all", action="store_true", help="show every field of the configuration, equal tensors and all files too")
    add("--json", action="store_true", help="one JSON object instead of text")
    add("--exit-code", action="store_true", help="with OTHER: status 1 where tensors or the model's shape differ")
    add("--threads", type=int, default=cores(), help="that hash at once (default: the cores, %(default)s)")
    args = parser.parse_args(argv)
    checkpoints = named_checkpoints(args)
    if len(checkpoints) not in (1, 2):
        either = "name one to look at, or two to compare, as they are or the first by --load"
        parser.error(f"{len(checkpoints)} checkpoints: {either}")
    args.path, args.other = checkpoints[0], checkpoints[1] if len(checkpoints) == 2 else None
    if args.other is not None and (args.verify or args.tensor):
        parser.error("--verify and --tensor look at one checkpoint: leave OTHER out")
    if args.exit_code and args.other is None:
        parser.error("--exit-code is about two checkpoints: give OTHER too")
    for problem in not_positive(args, "threads"):
        parser.error(problem)
    return args


def main(argv: Sequence[str]) -> int:
    args = arguments(argv)
    from megazero.checkpoint.format import CheckpointError
    from megazero.convert.source import ConversionError

    show = show_one if args.other is None else show_difference
    # ConversionError is a ValueError and a user's mistake; the other ValueErrors say what is damaged.
    return status_of(lambda: show(args), (ConversionError,), failures=(CheckpointError, ValueError))


def show_one(args: argparse.Namespace) -> int:
    """Print one checkpoint and return the status. Raises ConversionError, CheckpointError, ValueError, OSError."""
    record, problems = describe(args)
    print(json.dumps(record | {"problems": problems}) if args.json else format_description(record, args.all))
    for problem in problems:
        print(f"damaged: {problem}", file=sys.stderr)
    return FAILED if problems else 0


def show_difference(args: argparse.Namespace) -> int:
    """Print how two checkpoints differ and return the status. Raises as `show_one`."""
    from megazero.convert.comparison import compare, compared_bytes
    from megazero.convert.inspection import holds_adapters, open_merged

    with ExitStack() as stack:
        opened = [stack.enter_context(open_inspected(path, args.format)) for path in (args.path, args.other)]
        # Adapters have other tensors than a model, so that a comparison needs the model that they make of their base.
        if holds_adapters(opened[0]) != holds_adapters(opened[1]):
            opened = [stack.enter_context(open_merged(each)) if holds_adapters(each) else each for each in opened]
        first, second = opened
        record = compare(first, second, ByteProgress("comparing", compared_bytes(first, second)))
    print(json.dumps(record) if args.json else format_difference(record, args.all))
    return FAILED if args.exit_code and not record["identical"] else 0


class ByteProgress(Progress):
    """Counts bytes that have been read, and reports them as megabytes."""

    def __init__(self, what: str, total: int) -> None:
        super().__init__(to_stderr, what, total / 1e6, "MB")
        self.bytes = 0

    def __call__(self, more: int) -> None:
        self.bytes += more
        self.reach(self.bytes / 1e6)


def open_inspected(path: Path, format: str | None) -> Inspected:
    """Open a checkpoint of any format. Raises ConversionError, CheckpointError, ValueError, OSError."""
    from megazero.convert.inspection import open_for_inspection
    from megazero.convert.source import ConversionError

    try:
        path = folder_of(path)
    except HubError as error:
        raise ConversionError(str(error)) from error
    if not os.path.exists(path):
        raise ConversionError(missing_path_message(path))
    if format is None and path.is_dir() and not any(path.iterdir()):
        raise ConversionError(f"{path} is empty")
    return open_for_inspection(path, format)


def describe(args: argparse.Namespace) -> tuple[Record, list[str]]:
    """(the record of one checkpoint, its problems)."""
    from megazero.checkpoint.format import CheckpointError
    from megazero.convert.inspection import checkpoints_in, contents, is_ours, tensor_statistics

    # In a folder of checkpoints the newest is shown. The others are listed, and their problems count as well.
    siblings = checkpoints_in(args.path) if is_ours(args.path) else []
    record: Record = {"checkpoints": siblings}
    try:
        inspected = open_inspected(args.path, args.format)
    except (CheckpointError, ValueError) as error:
        if not siblings:
            raise
        message = str(error)
        return record, [*_problems(siblings, lambda name, problem: name in message and problem in message), message]
    problems: list[str] = []
    with inspected:
        record |= contents(inspected)
        if args.tensor:
            chosen = _tensors_named(args, inspected)
            record["statistics"] = {name: tensor_statistics(inspected, name) for name in chosen}
        if args.verify:
            reading = ByteProgress(f"reading {inspected.path}", inspected.nbytes)
            problems = inspected.verify(args.threads, reading)
            hashes = inspected.manifest is not None
            record["verified"] = {"bytes": reading.bytes, "hashes": hashes, "problems": problems}
            if inspected.source is not None:
                record["report"] = inspected.source.report.lines()
        newest = inspected.path.name
    return record, _problems(siblings, lambda name, problem: name == newest and problem in problems) + problems


def _tensors_named(args: argparse.Namespace, inspected: Inspected) -> list[str]:
    """The tensors that --tensor names. Raises ConversionError if there are none."""
    from megazero.convert.source import ConversionError

    shapes = inspected.tensors.shapes
    names = [name for name in shapes if name == args.tensor or fnmatchcase(name, args.tensor)]
    if not names:
        hint = did_you_mean(args.tensor, shapes, MOST_SIMILAR)
        raise ConversionError(
            f"--tensor {args.tensor}: none of the {len(shapes)} tensors is called so{hint} "
            f"(megazero inspect {args.path} lists them)"
        )
    return names


def _problems(siblings: list[Record], is_repeated: Callable[[str, str], bool]) -> list[str]:
    """The problems of a folder's checkpoints, by name.

    is_repeated: whether a problem (a checkpoint's name, the problem) is one that is reported of the shown checkpoint.
    """
    problems = ((entry["name"], entry["problem"]) for entry in siblings if entry["problem"])
    return [f"{name}: {problem}" for name, problem in problems if not is_repeated(name, problem)]


def format_description(record: Record, everything: bool) -> str:
    """The record of a checkpoint as text. everything: include fields at their defaults and all files."""
    parts = [_siblings(record["checkpoints"])] if record["checkpoints"] else []
    if "path" in record:
        parts += [_summary(record), _config(record["config"], everything), _tensors(record["tensors"])]
        parts.append(_files(record["files"], everything))
        if record["elsewhere"]:
            parts.append(
                f"{len(record['elsewhere'])} of these files are not here: the checkpoint was saved on the local disks "
                f"of {record['layout']['places']} nodes, each of which has its own"
            )
    if "statistics" in record:
        parts.append(_statistics(record["statistics"]))
    if "verified" in record:
        parts.append(_verdict(record["verified"]))
    if "report" in record:
        parts.append("\n".join(record["report"]))
    return "\n\n".join(parts)


def _siblings(checkpoints: list[Record]) -> str:
    rows = [
        [
            checkpoint["name"],
            "latest" if checkpoint["latest"] else "",
            size(checkpoint["bytes"]),
            "damaged" if checkpoint["problem"] else "whole",
        ]
        for checkpoint in checkpoints
    ]
    return table(["checkpoint", "", "bytes", "manifest and headers"], rows, left=2)


def _verdict(verified: Record) -> str:
    if verified["problems"]:
        return f"verified: {counted(len(verified['problems']), 'problem')}"
    # Without hashes, damage shows only where a file cannot be read at all.
    unhashed = "every tensor was read (this format records no hashes)"
    return f"verified: {size(verified['bytes'])}, {'every hash fits' if verified['hashes'] else unhashed}"


def _summary(record: Record) -> str:
    layout, totals, plans = record["layout"], record["totals"], record["position"].get("data_plans")
    position = [
        (key.replace("_", " "), _plain(int(value) if key == "optimizer_steps" else value))
        for key, value in record["position"].items()
        if value is not None and key != "data_plans"
    ]
    parameters, tensors = totals["parameters"], counted(totals["tensors"], "tensor")
    files = counted(len(record["files"]), "file")
    entries = [
        ("format", record["format"]),
        *position,
        ("data order", _order(plans, record["config"]) if plans else ""),
        ("written by", _ranks(layout) if layout is not None else ""),
        ("parameters", f"{parameters:,} ({count(parameters)}) in {tensors}"),
        ("bytes", f"{size(totals['bytes'])} in tensors, {size(totals['file_bytes'])} in {files}"),
    ]
    return f"{record['path']}\n{pairs(entries)}"


def _order(plans: list[list[int]], config: Record) -> str:
    """What determines the order of samples. The numbers of a plan depend on the data: see `data.dataset.Samples`."""
    if config["data"]["instruction_data"]:
        sentences = (f"{counted(samples, 'sample')} an epoch, checksum {crc:08x}" for samples, crc in plans)
    elif config["data"]["data_path"]:
        sentences = (f"{counted(epochs, 'epoch')}, shuffled together up to sample {last:,}" for epochs, last in plans)
    else:
        sentences = (f"numbers {first} and {second} of the program's or the default data" for first, second in plans)
    return "; ".join(sentences)


def _ranks(layout: dict[str, int]) -> str:
    """The ranks that wrote a checkpoint: 12 ranks, tp 3 x pp 2 x dp 2."""
    sizes = {axis: layout.get(axis, 1) for axis in ("tp", "pp", "dp", "cp")}
    axes = " x ".join(f"{axis} {ranks}" for axis, ranks in sizes.items() if axis != "cp" or ranks > 1)
    places = f", on the disks of {layout['places']} nodes" if layout.get("places", 1) > 1 else ""
    return f"{counted(math.prod(sizes.values()), 'rank')}, {axes}{places}"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items()) or "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _flat(nested: Record, separator: str) -> Record:
    """The values of a record of records, by both names."""
    return {f"{outer}{separator}{name}": value for outer, values in nested.items() for name, value in values.items()}


def _config(config: Record, everything: bool) -> str:
    from megazero.config.dump import run_dict
    from megazero.config.schema import Run

    defaults = _flat(run_dict(Run()), ".")
    fields = [(name, str(value)) for name, value in _flat(config, ".").items() if everything or value != defaults[name]]
    title = "configuration" if everything else "configuration, where it is not the default (--all: everything)"
    return f"{title}\n{pairs(fields)}"


def _tensors(tensors: Record) -> str:
    rows = []
    for name, tensor in tensors.items():
        shape = "x".join(map(str, tensor["shape"]))
        rows.append([name, shape, _columns(tensor["columns"]), f"{tensor['elements']:,}", size(tensor["bytes"])])
    return table(["tensor", "shape", "columns", "elements", "bytes"], rows, left=3)


def _columns(columns: dict[str, str]) -> str:
    """`float32 weight exp_avg exp_avg_sq`; a dtype that repeats is written once."""
    groups = groupby(columns, key=columns.__getitem__)
    return " ".join(f"{dtype} {' '.join(names)}" for dtype, names in groups)


def _files(files: dict[str, int], everything: bool) -> str:
    rows = [[name, f"{number:,}"] for name, number in files.items()]
    listed_rows = rows if everything else rows[:MOST_FILES]
    left_out = f"\nand {len(rows) - len(listed_rows)} more (--all)" if len(listed_rows) < len(rows) else ""
    return table(["file", "bytes"], listed_rows) + left_out


def _statistics(statistics: Record) -> str:
    keys = ["min", "max", "mean", "std", "norm", "zeros", "nan", "inf"]
    rows = [
        [column, *("-" if numbers[key] is None else f"{numbers[key]:.6g}" for key in keys)]
        for column, numbers in _flat(statistics, " ").items()
    ]
    return table(["statistics", *keys], rows)


def format_difference(record: Record, everything: bool) -> str:
    """The record of a comparison as text. everything: include equal tensors."""
    marked = zip("<>", record["paths"], record["formats"], strict=True)
    parts = ["\n".join(f"{mark} {path} ({name})" for mark, path, name in marked)]
    fields = _flat({**record["config"], "position": record["position"]}, ".")
    if record["layout"] is not None:
        fields["layout"] = record["layout"]
    if fields:
        parts.append(f"differs\n{_changes(fields)}")
    for key, title in (("only_in_first", "only in the first"), ("only_in_second", "only in the second")):
        if record[key]:
            parts.append(f"{title} ({len(record[key])})\n" + "\n".join(f"  {name}" for name in record[key]))
    for key in ("shapes", "columns"):
        if record[key]:
            parts.append(f"other {key}\n{_changes({f'  {name}': two for name, two in record[key].items()})}")
    parts.append(_values(record["tensors"], everything))
    parts.append("the models are the same to the bit" if record["identical"] else _how_they_differ(record))
    return "\n\n".join(parts)


def _changes(fields: Record) -> str:
    """Lines of `name  first's value -> second's value`."""
    return pairs([(name, f"{_plain(first)} -> {_plain(second)}") for name, (first, second) in fields.items()])


def _differs(numbers: Record) -> bool:
    return bool(numbers["bit_equal"] != numbers["elements"])


def _how_they_differ(record: Record) -> str:
    """The last line of two models that differ. Where the columns of both are equal, it says why they still do."""
    unshared = {column for stored in record["columns"].values() for column in {*stored[0]} ^ {*stored[1]}}
    models_differ = any(record[key] for key in ("only_in_first", "only_in_second", "shapes"))
    values_differ = any(map(_differs, _flat(record["tensors"], " ").values()))
    if not unshared or models_differ or values_differ or "model" in record["config"]:
        return "the models differ"
    return f"the models differ: what both have is the same to the bit, and only one has {', '.join(sorted(unshared))}"


def _values(tensors: Record, everything: bool) -> str:
    """How far the columns are apart that both models have."""
    compared = _flat(tensors, " ")
    differing = {name: numbers for name, numbers in compared.items() if _differs(numbers)}
    equal = len(compared) - len(differing)
    summary = f"{equal} of {len(compared)} columns of tensors that both have are equal to the bit"
    rows = []
    for name, numbers in (compared if everything else differing).items():
        apart = ["not finite" if numbers[key] is None else f"{numbers[key]:.3g}" for key in ("largest", "relative")]
        rows.append([name, *apart, f"{numbers['bit_equal']:,} of {numbers['elements']:,}"])
    headings = ["tensor", "largest difference", "relative", "equal elements"]
    return f"{summary}\n\n{table(headings, rows)}" if rows else summary
