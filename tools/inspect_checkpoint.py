"""What is inside a checkpoint, and how two differ.

    python tools/inspect_checkpoint.py runs/bloom                     the folder's checkpoints, and what is in the newest
    python tools/inspect_checkpoint.py runs/bloom/iter_0001000 --verify --all
    python tools/inspect_checkpoint.py runs/bloom --tensor 'blocks.*.mlp.up.weight'
    python tools/inspect_checkpoint.py runs/bloom/iter_0001000 runs/other --exit-code

With two PATHs what differs is shown. PATH is a checkpoint of megazero, a folder of them, or one of any other format that tools/convert_checkpoint.py reads. One of adapters
(--lora-rank) is shown as it is, and compared with a model as the model that it makes of its base. Values are read in pieces: memory does
not grow with the model. Status: 0; 1 where a checkpoint is damaged, or with --exit-code where two differ; 2 for a
mistake in the arguments; 141 where nobody reads the output any more.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megazero.checkpoint.format import CheckpointError
from megazero.cli.checkpoint_flags import add_checkpoint_flags, named_checkpoints
from megazero.config.dump import run_dict
from megazero.config.schema import Run
from megazero.convert.inspection import (
    Inspected,
    Record,
    checkpoints_in,
    compare,
    compared_bytes,
    contents,
    holds_adapters,
    is_ours,
    open_for_inspection,
    open_merged,
    tensor_statistics,
)
from megazero.convert.registry import not_there
from megazero.data.progress import Progress, to_stderr
from megazero.data.tool import cores, reader_left
from megazero.telemetry.units import count, size
from megazero.train.banner_parts import pairs, table

DAMAGED, WRONG_ARGUMENTS = 1, 2


class Mistake(Exception):
    """In the arguments."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_checkpoint_flags(parser, metavar="PATH")
    parser.add_argument("--verify", action="store_true", help="check every hash (other programs' formats have none: read everything)")
    parser.add_argument("--tensor", metavar="NAME", help="statistics of a tensor, or of all whose names match a pattern (blocks.*.weight)")
    parser.add_argument("--all", action="store_true", help="show every field of the configuration, equal tensors and all files too")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--exit-code", action="store_true", help="with OTHER: status 1 where tensors or the model's shape differ")
    parser.add_argument("--threads", type=int, default=cores(), help="that hash at once (default: the cores, %(default)s)")
    args = parser.parse_args(argv)
    named = named_checkpoints(args)
    if len(named) not in (1, 2):
        parser.error(f"{len(named)} checkpoints: name one to look at, or two to compare, as they are or the first by --load")
    args.path, args.other = named[0], named[1] if len(named) == 2 else None
    if args.other is not None and (args.verify or args.tensor):
        parser.error("--verify and --tensor look at one checkpoint: leave OTHER out")
    if args.exit_code and args.other is None:
        parser.error("--exit-code is about two checkpoints: give OTHER too")
    if args.threads < 1:
        parser.error(f"--threads {args.threads}: must be at least 1")
    return args


@dataclass
class Counter:
    """Bytes that have been read, reported now and then."""

    progress: Progress
    done: int = 0

    def __call__(self, more: int) -> None:
        self.done += more
        self.progress.reach(self.done / 1e6)


def counting(what: str, total: int) -> Counter:
    return Counter(Progress(to_stderr, what, total / 1e6, "MB"))


def opened(path: Path, format: str | None) -> Inspected:
    if not path.exists():
        raise Mistake(not_there(path))
    if format is None and path.is_dir() and not any(path.iterdir()):
        raise Mistake(f"{path} is empty")
    return open_for_inspection(path, format)


def described(args: argparse.Namespace) -> tuple[Record, list[str]]:
    """(all that was asked about one checkpoint, what is wrong)."""
    inside = checkpoints_in(args.path) if is_ours(args.path) else []
    problems = [f"{entry['name']}: {entry['problem']}" for entry in inside if entry["problem"]]
    record: Record = {"checkpoints": inside}
    try:
        inspected = opened(args.path, args.format)
    except (CheckpointError, ValueError) as error:
        if not inside:
            raise
        return record, [*problems, str(error)]
    with inspected:
        record |= contents(inspected)
        if args.tensor:
            names = [name for name in inspected.tensors.shapes if name == args.tensor or fnmatchcase(name, args.tensor)]
            if not names:
                raise Mistake(f"--tensor {args.tensor}: no tensor is called so; there are {', '.join(inspected.tensors.shapes)}")
            record["statistics"] = {name: tensor_statistics(inspected, name) for name in names}
        if args.verify:
            reading = counting(f"reading {inspected.path}", inspected.nbytes)
            found = inspected.verify(args.threads, reading)
            record["verified"] = {"bytes": reading.done, "hashes": inspected.manifest is not None, "problems": found}
            problems += found
            if inspected.source is not None:
                record["report"] = inspected.source.report.lines()
    return record, problems


def shown(record: Record, everything: bool) -> str:
    """A description as text."""
    parts = []
    if record["checkpoints"]:
        rows = [
            [entry["name"], "latest" if entry["latest"] else "", size(entry["bytes"]), "damaged" if entry["problem"] else "whole"]
            for entry in record["checkpoints"]
        ]
        parts.append(table(["checkpoint", "", "bytes", "manifest and headers"], rows, left=2))
    if "path" in record:
        parts += [_summary(record), _config(record["config"], everything), _tensors(record["tensors"]), _files(record["files"], everything)]
        if record["elsewhere"]:
            parts.append(
                f"{len(record['elsewhere'])} of these files are not here: the checkpoint was saved on the local disks of"
                f" {record['layout']['places']} nodes, each of which has its own"
            )
    if "statistics" in record:
        parts.append(_statistics(record["statistics"]))
    if "verified" in record:
        how = "every hash fits" if record["verified"]["hashes"] else "every tensor was read (this format records no hashes)"
        wrong = record["verified"]["problems"]
        parts.append(f"verified: {len(wrong)} problems" if wrong else f"verified: {size(record['verified']['bytes'])}, {how}")
        parts += ["\n".join(record["report"])] if "report" in record else []
    return "\n\n".join(parts)


def _summary(record: Record) -> str:
    position = [(key.replace("_", " "), _plain(value)) for key, value in record["position"].items() if value is not None]
    layout = " ".join(f"{axis} {number}" for axis, number in sorted((record["layout"] or {}).items(), reverse=True))
    totals = record["totals"]
    bytes_ = f"{size(totals['bytes'])} in tensors, {size(totals['file_bytes'])} in {len(record['files'])} files"
    about = [("format", record["format"]), *position, *([("written by", layout)] if layout else [])]
    return f"{record['path']}\n" + pairs(
        [
            *about,
            ("parameters", f"{totals['parameters']:,} ({count(totals['parameters'])}) in {totals['tensors']} tensors"),
            ("bytes", bytes_),
        ]
    )


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list):
        return " ".join(_plain(item) for item in value) or "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _config(config: Record, everything: bool) -> str:
    defaults = run_dict(Run())
    fields = [
        (f"{section}.{name}", str(value))
        for section, values in config.items()
        for name, value in values.items()
        if everything or value != defaults[section][name]
    ]
    title = "configuration" if everything else "configuration, where it is not the default (--all: everything)"
    return f"{title}\n" + pairs(fields)


def _tensors(tensors: Record) -> str:
    rows = [
        [name, "x".join(map(str, tensor["shape"])), _columns(tensor["columns"]), f"{tensor['elements']:,}", size(tensor["bytes"])]
        for name, tensor in tensors.items()
    ]
    return table(["tensor", "shape", "columns", "elements", "bytes"], rows, left=3)


def _columns(columns: dict[str, str]) -> str:
    """`float32 weight exp_avg exp_avg_sq`, dtypes that follow each other alike written once."""
    words: list[str] = []
    before = None
    for column, dtype in columns.items():
        words += [dtype] * (dtype != before) + [column]
        before = dtype
    return " ".join(words)


def _files(files: dict[str, int], everything: bool) -> str:
    most = len(files) if everything else 16
    rest = [f"and {len(files) - most} more (--all)"] if len(files) > most else []
    return "\n".join([table(["file", "bytes"], [[name, f"{number:,}"] for name, number in list(files.items())[:most]]), *rest])


def _statistics(statistics: Record) -> str:
    keys = ["min", "max", "mean", "std", "norm", "zeros", "nan", "inf"]
    rows = [
        [f"{name} {column}", *(("-" if numbers[key] is None else f"{numbers[key]:.6g}") for key in keys)]
        for name, columns in statistics.items()
        for column, numbers in columns.items()
    ]
    return table(["statistics", *keys], rows)


def shown_difference(record: Record, everything: bool) -> str:
    """A comparison as text."""
    first, second = record["paths"]
    parts = [f"< {first} ({record['formats'][0]})\n> {second} ({record['formats'][1]})"]
    fields = [(f"{section}.{name}", values) for section, found in record["config"].items() for name, values in found.items()]
    fields += [(f"position.{name}", values) for name, values in record["position"].items()]
    fields += [("layout", record["layout"])] * (record["layout"] is not None)
    if fields:
        parts.append("differs\n" + pairs([(name, f"{_plain(old)} -> {_plain(new)}") for name, (old, new) in fields]))
    for key, title in (("only_in_first", "only in the first"), ("only_in_second", "only in the second")):
        if record[key]:
            parts.append(f"{title} ({len(record[key])})\n" + "\n".join(f"  {name}" for name in record[key]))
    for key in ("shapes", "columns"):
        if record[key]:
            parts.append(f"other {key}\n" + pairs([(f"  {name}", f"{_plain(a)} -> {_plain(b)}") for name, (a, b) in record[key].items()]))
    parts.append(_values(record["tensors"], everything))
    parts.append("the models are the same to the bit" if record["identical"] else "the models differ")
    return "\n\n".join(parts)


def _values(tensors: Record, everything: bool) -> str:
    rows, equal = [], 0
    for name, columns in tensors.items():
        for column, found in columns.items():
            equal += found["bit_equal"] == found["elements"]
            if everything or found["bit_equal"] != found["elements"]:
                numbers = ["not finite" if found[key] is None else f"{found[key]:.3g}" for key in ("largest", "relative")]
                rows.append([f"{name} {column}", *numbers, f"{found['bit_equal']:,} of {found['elements']:,}"])
    total = sum(len(columns) for columns in tensors.values())
    told = f"{equal} of {total} columns of tensors are equal to the bit"
    return told if not rows else f"{told}\n\n" + table(["tensor", "largest difference", "relative", "equal elements"], rows)


def run(args: argparse.Namespace) -> int:
    if args.other is None:
        record, problems = described(args)
        if args.json:
            print(json.dumps(record | {"problems": problems}))
        else:
            print(shown(record, args.all))
        for problem in problems:
            print(f"damaged: {problem}", file=sys.stderr)
        return DAMAGED if problems else 0
    with ExitStack() as stack:
        first, second = (stack.enter_context(opened(path, args.format)) for path in (args.path, args.other))
        if holds_adapters(first) != holds_adapters(second):
            first, second = (stack.enter_context(open_merged(each)) if holds_adapters(each) else each for each in (first, second))
        record = compare(first, second, counting("comparing", compared_bytes(first, second)))
    print(json.dumps(record) if args.json else shown_difference(record, args.all))
    return DAMAGED if args.exit_code and not record["identical"] else 0


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    try:
        status = run(args)
        sys.stdout.flush()
        return status
    except Mistake as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return WRONG_ARGUMENTS
    except BrokenPipeError:
        return reader_left()
    except (CheckpointError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return DAMAGED


if __name__ == "__main__":
    sys.exit(main())
