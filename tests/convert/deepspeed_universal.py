"""DeepSpeed's own code reads a universal checkpoint and consolidated weights, as a program of its own in one process.

    python deepspeed_universal.py FOLDER

FOLDER holds job.pt: {"shapes": of the parameters in memory, "slices": {folder: {parameter: {tp: shape of a rank's
part}}}}; what DeepSpeed read goes into FOLDER/read.pt.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


def tree(shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    """A module whose parameters have these names, dots included."""
    root = nn.Module()
    for name, shape in shapes.items():
        module = root
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(leaf, nn.Parameter(torch.full(shape, 0.5)))
    return root


def deepspeed_as_it_comes() -> Any:
    """The package, without the kernels for collectives that it would compile and that are not used here."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def engine_for(module: nn.Module, **more: Any) -> Any:
    """ZeRO-1 in bf16 over torch's AdamW; groups as Megatron makes them. more: of DeepSpeed's configuration."""
    groups = [[p for p in module.parameters() if (p.dim() > 1) == decays] for decays in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.3}, {"params": groups[1], "weight_decay": 0.0}], lr=1.0
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True},
        **more,
    }
    engine, *_ = deepspeed_as_it_comes().initialize(model=module, optimizer=optimizer, config=config)
    return engine


def held_by(engine: Any) -> dict[str, Any]:
    """Steps, and by parameter its 16-bit values, master and moments, put together over the ranks that share them."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    named = list(engine.module.named_parameters())
    held: dict[str, Any] = {"steps": engine.global_steps}
    held["bf16"] = {name: parameter.detach().clone() for name, parameter in named}
    held["weight"] = {name: safe_get_full_fp32_param(parameter) for name, parameter in named}
    for moment in ("exp_avg", "exp_avg_sq"):
        held[moment] = {name: safe_get_full_optimizer_state(parameter, moment) for name, parameter in named}
    return held


def read_by_engine(folder: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """What the engine's optimizer holds after loading."""
    engine = engine_for(tree(shapes), checkpoint={"load_universal": True})
    path, client = engine.load_checkpoint(str(folder / "universal"))
    state = held_by(engine) | {"path": path, "args": vars(client["args"])}
    inner = engine.optimizer.optimizer
    state["groups"] = [{k: v for k, v in group.items() if k != "params"} for group in inner.param_groups]
    state["adam steps"] = [inner.state[group["params"][0]]["step"] for group in inner.param_groups]
    engine.load_module_state_dict({"module": torch.load(folder / "consolidated" / "pytorch_model.bin")}, strict=True)
    state["consolidated"] = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    return state


def read_slices(zero: Path, parts: dict[str, dict[int, tuple[int, ...]]]) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """What each tp rank gets of each parameter: parameter -> tp -> per rank the values."""
    from deepspeed.checkpoint.universal_checkpoint import load_hp_checkpoint_state

    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for name, worlds in parts.items():
        for world, shape in worlds.items():
            for rank in range(world):
                parameter: Any = nn.Parameter(torch.zeros(shape))
                master = torch.zeros(parameter.numel())
                address = SimpleNamespace(start=0, numel=parameter.numel())
                parameter._hp_mapping = SimpleNamespace(
                    lp_fragment_address=address, get_hp_fragment=lambda master=master: master
                )
                step = load_hp_checkpoint_state(parameter, str(zero / name), rank, world)
                values = {"weight": master.view(shape), "step": step}
                values |= {key: value.view(shape) for key, value in parameter._hp_mapping.optim_fragment.items()}
                found.setdefault(name, {}).setdefault(world, []).append(values)
    return found


def main(folder: Path) -> None:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    from deepspeed.checkpoint import ds_to_universal

    job = torch.load(folder / "job.pt", weights_only=False)
    read: dict[str, Any] = {"engine": read_by_engine(folder, job["shapes"])}
    read["slices"] = {name: read_slices(folder / name, parts) for name, parts in job["slices"].items()}
    arguments = {
        "num_extract_workers": 1,
        "num_merge_workers": 1,
        "keep_temp_folder": False,
        "strict": True,
        "inject_missing_state": False,
    }
    step = str(folder / "zero-files" / "global_step7")
    ds_to_universal.main(argparse.Namespace(input_folder=step, output_folder=f"{step}_universal", **arguments))
    torch.save(read, folder / "read.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
