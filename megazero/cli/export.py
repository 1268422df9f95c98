"""`megazero export`: the weights of a saved model of a program's own modules as one file of safetensors."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megazero.cli.exit_status import status_of
from megazero.cli.parser import command_parser, given_path
from megazero.cli.shared_flags import PRECISIONS

DESCRIPTION = """
Write the weights of a model of your own modules, which megazero.engine, megazero.training or megazero.deepspeed has
saved, as one file of safetensors: what load_state_dict of the modules takes. It reads the files alone, on one process,
a tensor at a time. Trained weights are as the optimizer has them, in float32 where modules compute in 16 bits.

`megazero convert` exports checkpoints of megazero's own families.

Status: 0; 1 if a checkpoint is damaged or the file cannot be written; 2 for a mistake in the arguments.
"""
EXAMPLES = (
    "megazero export out/checkpoints model.safetensors",
    "python tools/export_model.py out/checkpoints/iter_0000100 model.safetensors --dtype bf16",
)


def parser() -> argparse.ArgumentParser:
    flags = command_parser("export", DESCRIPTION, EXAMPLES)
    add = flags.add_argument
    add("folder", type=given_path, metavar="FOLDER", help="a checkpoint, or a folder of them: the newest is taken")
    add("file", type=given_path, metavar="FILE", help="a file that is not there yet")
    add("--dtype", choices=PRECISIONS, help="of parameters and buffers of floats; default: as they are saved")
    return flags


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    from megazero.checkpoint.format import CheckpointError

    return status_of(lambda: run(args), (CheckpointError, FileNotFoundError, FileExistsError))


def run(args: argparse.Namespace) -> int:
    """Write the file and say what is in it. Raises CheckpointError and OSError."""
    from megazero.checkpoint.format import CheckpointError
    from megazero.checkpoint.narrowing import OutOfRange
    from megazero.config.dtypes import compute_dtype
    from megazero.own.exported import export_saved
    from megazero.system.words import counted
    from megazero.telemetry.units import size

    folder, file = args.folder.expanduser(), args.file.expanduser()
    if file.exists():
        raise FileExistsError(f"{args.file} is there already: FILE has to be a new one")
    try:
        saved = export_saved(folder, file, compute_dtype(args.dtype) if args.dtype else None)
    except OutOfRange as error:
        raise CheckpointError(error.nearest("--dtype")) from error
    headers = saved.headers
    total = sum(header.nbytes for header in headers)
    print(f"{saved.path} -> {args.file}: {counted(len(headers), 'tensor')}, {size(total)}")
    return 0
