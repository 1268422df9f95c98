"""DeepSpeed ZeRO-1, 2 and 3 with transformers' BLOOM: its bf16 engine with fp32 masters or its fp32 one, and its CPU
Adam if that can be built. With state in host memory or on disks it needs that Adam, and for disks libaio's headers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch

from bench.contestants.common import decayed, loss_of, own_folder, rank
from bench.contestants.transformers_ import model_of
from bench.workload import Batches, Workload

PRECISIONS = ("bf16", "fp32")


def optimizer_of(kind: str, parameters: Any, work: Workload) -> Any:
    """kind: "deepspeed" is its CPU Adam, "torch" the fused AdamW."""
    groups = decayed(parameters, work.weight_decay)
    if kind == "torch":
        return torch.optim.AdamW(groups, lr=work.lr, betas=work.betas, eps=work.eps, fused=True)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(groups, lr=work.lr, betas=work.betas, eps=work.eps, adamw_mode=True)


def on_disks(zero: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """`zero_optimization` with a folder of its own for each kind of state that it has on disks."""

    def placed(name: str, value: Any) -> Any:
        if not isinstance(value, Mapping) or value.get("device") != "nvme":
            return value
        (folder / name).mkdir()
        return {**value, "nvme_path": str(folder / name)}

    return {name: placed(name, value) for name, value in zero.items()}


def build(
    work: Workload,
    stage: int,
    compile: bool = False,
    adam: str = "deepspeed",
    reduce: str = "",
    zero: Mapping[str, Any] | None = None,
    aio: Mapping[str, Any] | None = None,
) -> Callable[[], float]:
    """reduce: the dtype in which gradients are reduced, as DeepSpeed's `communication_data_type`; "": its default.
    zero: further entries of its `zero_optimization`. aio: how it reads and writes disks.

    Gradients of several micro-batches are summed in fp32, as megazero does.
    """
    torch.manual_seed(1234)
    model, batches = model_of(work, "bloom", "eager"), Batches(work, rank())
    config = {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_accumulation_steps": work.micro_batches,
        "gradient_clipping": work.clip,
        "bf16": {"enabled": work.precision == "bf16"},
        "zero_optimization": {"stage": stage, "overlap_comm": False, **on_disks(zero or {}, own_folder())},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        **({"communication_data_type": reduce} if reduce else {}),
        **({"data_types": {"grad_accum_dtype": "fp32"}} if work.micro_batches > 1 else {}),
        **({"aio": dict(aio)} if aio else {}),
    }
    if compile:
        for block in model.get_submodule("transformer.h").children():
            block.compile(dynamic=False)
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer_of(adam, model.parameters(), work), config=config
    )

    def step() -> float:
        total = 0.0
        for _ in range(work.micro_batches):
            tokens, labels = batches()
            loss = loss_of(engine(input_ids=tokens, use_cache=False).logits, labels)
            engine.backward(loss)
            engine.step()  # updates after the last micro-batch
            total += float(loss.detach())
        return total / work.micro_batches

    return step
