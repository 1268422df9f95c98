"""What is inside a checkpoint, and how two differ.

    python tools/inspect_checkpoint.py runs/bloom                  the folder's checkpoints, and what is in the newest
    python tools/inspect_checkpoint.py runs/bloom/iter_0001000 --verify --all
    python tools/inspect_checkpoint.py runs/bloom --tensor 'blocks.*.mlp.up.weight'
    python tools/inspect_checkpoint.py runs/bloom/iter_0001000 runs/other --exit-code

With two PATHs what differs is shown. PATH is a checkpoint of megazero, a folder of them, or one of any other format
that tools/convert_checkpoint.py reads. One of adapters (--lora-rank) is shown as it is, and compared with a model as
the model that it makes of its base. Values are read in pieces: memory does not grow with the model. Status: 0; 1 where
a checkpoint is damaged, or with --exit-code where two differ; 2 for a mistake in the arguments; 141 where nobody reads
the output any more.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megazero.checkpoint.format import CheckpointError
from megazero.cli.checkpoint_flags import add_checkpoint_flags, named_checkpoints
from megazero.cli.inspection_text import shown, shown_difference
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

DAMAGED, WRONG_ARGUMENTS = 1, 2


class Mistake(Exception):
    """In the arguments."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_checkpoint_flags(parser, metavar="PATH")
    parser.add_argument(
        "--verify", action="store_true", help="check every hash (other programs' formats have none: read everything)"
    )
    parser.add_argument(
        "--tensor",
        metavar="NAME",
        help="statistics of a tensor, or of all whose names match a pattern (blocks.*.weight)",
    )
    parser.add_argument(
        "--all", action="store_true", help="show every field of the configuration, equal tensors and all files too"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument(
        "--exit-code", action="store_true", help="with OTHER: status 1 where tensors or the model's shape differ"
    )
    parser.add_argument(
        "--threads", type=int, default=cores(), help="that hash at once (default: the cores, %(default)s)"
    )
    args = parser.parse_args(argv)
    named = named_checkpoints(args)
    if len(named) not in (1, 2):
        parser.error(
            f"{len(named)} checkpoints: name one to look at, or two to compare, as they are or the first by --load"
        )
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
                raise Mistake(
                    f"--tensor {args.tensor}: no tensor is called so; there are {', '.join(inspected.tensors.shapes)}"
                )
            record["statistics"] = {name: tensor_statistics(inspected, name) for name in names}
        if args.verify:
            reading = counting(f"reading {inspected.path}", inspected.nbytes)
            found = inspected.verify(args.threads, reading)
            record["verified"] = {"bytes": reading.done, "hashes": inspected.manifest is not None, "problems": found}
            problems += found
            if inspected.source is not None:
                record["report"] = inspected.source.report.lines()
    return record, problems


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
            first, second = (
                stack.enter_context(open_merged(each)) if holds_adapters(each) else each for each in (first, second)
            )
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
