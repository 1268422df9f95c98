"""Weights of a checkpoint as a plain `state_dict`, by the functions of `deepspeed.utils.zero_to_fp32`.

    python -m megazero.deepspeed.utils.zero_to_fp32 CHECKPOINTS OUTPUT [--tag TAG] [--safe_serialization]

Trained weights are those of the optimizer, in float32 where modules compute in 16 bits; a run in float64 has them in
float64. Frozen parameters and buffers of 16 bits become float32, too. One process reads the files alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save
from torch import Tensor, nn

from megazero.checkpoint.format import CheckpointError
from megazero.config.lengths import bytes_of
from megazero.convert.files.safetensors_file import TensorHeader, divided
from megazero.deepspeed.called import latest_tag
from megazero.own.exported import saved_state_dict
from megazero.system.unfinished import replaced_when_whole

BIN, SAFE = "pytorch_model.bin", "model.safetensors"
"""The names of the files that are written."""
ModuleType = TypeVar("ModuleType", bound=nn.Module)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: object = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """What `load_state_dict` of the module takes, in host memory.

    checkpoint_dir             the folder of `save_checkpoint`
    tag                        None: the one that the file `latest` names
    exclude_frozen_parameters  whether frozen parameters are left out. Buffers stay
    lazy_mode                  makes no difference: tensors are there, and have the `contiguous` that programs call

    Raises FileNotFoundError if there is no checkpoint, and Damaged if a file differs from what was written.
    """
    folder = _folder(checkpoint_dir, tag)
    plain = saved_state_dict(folder, frozen=not exclude_frozen_parameters)
    return {name: _wide(tensor) for name, tensor in plain.items()}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: object = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write what `get_fp32_state_dict_from_zero_checkpoint` returns into a folder, which is made: as torch does it, or
    with `safe_serialization` as safetensors does.

    max_shard_size: the most bytes of a file, as a number or in words. A larger model is in several files with an index
    as Hugging Face's. None: one file

    Raises as `get_fp32_state_dict_from_zero_checkpoint`.
    """
    plain = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    folder, name = Path(output_dir), SAFE if safe_serialization else BIN
    folder.mkdir(parents=True, exist_ok=True)
    headers = [TensorHeader(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in plain.items()]
    total = sum(header.nbytes for header in headers)
    files = divided(headers, total if max_shard_size is None else bytes_of(max_shard_size), name)
    for file, of_file in files.items():
        _write(folder / file, {header.key: plain[header.key] for header in of_file})
    if len(files) > 1:
        weight_map = {header.key: file for file, of_file in files.items() for header in of_file}
        with replaced_when_whole(folder / f"{name}.index.json") as part:
            part.write(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode())


def _write(path: Path, plain: dict[str, Tensor]) -> None:
    with replaced_when_whole(path) as part:
        if path.suffix == ".safetensors":
            part.write(save(plain, {"format": "pt"}))
        else:
            torch.save(plain, part)


def load_state_dict_from_zero_checkpoint(
    model: ModuleType, checkpoint_dir: str | os.PathLike[str], tag: object = None
) -> ModuleType:
    """The module, on the host, with the weights of a checkpoint, all of which it has to have. Raises RuntimeError with
    names that it does not share.
    """
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag))
    return model


def _folder(checkpoint_dir: str | os.PathLike[str], tag: object) -> Path:
    above = Path(checkpoint_dir)
    return above / (latest_tag(above) if tag is None else str(tag))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize <= 2 else tensor


def main() -> None:
    """The program."""
    flags = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    flags.add_argument("checkpoint_dir", help="the folder of save_checkpoint")
    flags.add_argument("output_dir", help="a folder, which is made")
    flags.add_argument("--max_shard_size", default="5GB", help="the most bytes of a file; default: 5GB")
    flags.add_argument("--safe_serialization", action="store_true", help=f"write {SAFE}, and not {BIN}")
    flags.add_argument("-t", "--tag", help="of the checkpoint; default: what the file `latest` names")
    flags.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out frozen parameters")
    args = flags.parse_args()
    try:
        convert_zero_checkpoint_to_fp32_state_dict(
            args.checkpoint_dir,
            args.output_dir,
            max_shard_size=args.max_shard_size,
            safe_serialization=args.safe_serialization,
            tag=args.tag,
            exclude_frozen_parameters=args.exclude_frozen_parameters,
        )
    except (CheckpointError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
