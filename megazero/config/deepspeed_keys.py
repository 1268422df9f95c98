"""DeepSpeed's keys as tables: those with a field here, those of features that are not built, and other known ones."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "train_batch_size": "global_batch_size",
        "train_micro_batch_size_per_gpu": "micro_batch_size",
        "gradient_clipping": "clip_grad",
        "steps_per_print": "log_interval",
        "optimizer.params.lr": "lr",
        "optimizer.params.eps": "adam_eps",
        "optimizer.params.weight_decay": "weight_decay",
        "optimizer.params.momentum": "sgd_momentum",
        "scheduler.params.warmup_num_steps": "lr_warmup",
        "scheduler.params.total_num_steps": "lr_decay",
        "fp16.loss_scale_window": "loss_scale_window",
        "fp16.hysteresis": "hysteresis",
        "fp16.min_loss_scale": "min_loss_scale",
        "communication_data_type": "grad_reduce_dtype",
        "zero_optimization.stage": "zero_stage",
        "zero_optimization.zero_quantized_weights": "zero_quantized_weights",
        "zero_optimization.reduce_bucket_size": "bucket_size",
        "zero_optimization.overlap_comm": "overlap",
        "zero_optimization.stage3_param_persistence_threshold": "zero3_persist_below",
    }
)
"""Key -> the field of the same meaning."""

_OPTIMIZER, _PARAM, _AIO = "zero_optimization.offload_optimizer.", "zero_optimization.offload_param.", "aio."
UNBUILT: Mapping[str, tuple[tuple[Any, ...], str]] = MappingProxyType(
    {
        "data_types.grad_accum_dtype": ((None, "fp32"), "gradients of 16-bit parameters accumulate in fp32"),
        "zero_optimization.reduce_scatter": ((True,), "sharded gradients always travel by reduce-scatter"),
        "zero_optimization.contiguous_gradients": ((True,), "gradients always lie in one piece"),
        f"{_OPTIMIZER}super_offload": ((False,), "it is not built; nearest: --late-update"),
        f"{_OPTIMIZER}cpuadam_cores_perc": ((), "use OMP_NUM_THREADS, the number of a rank's threads"),
        f"{_AIO}use_gds": ((False,), "files are read and written through host memory"),
        "zero_optimization.sub_group_size": ((), "a rank updates its whole shard at once"),
        "zero_optimization.stage3_max_live_parameters": ((), "use --zero3-gathered-bytes, in bytes"),
        "zero_optimization.stage3_prefetch_bucket_size": ((), "use --zero3-gathered-bytes, in bytes"),
        "zero_optimization.zero_quantized_gradients": ((False,), "use --zero-quantized-gradients int4"),
        "zero_optimization.zero_hpz_partition_size": (
            (1,),
            "it shards copies of parameters alone; --zero-shard-size shards all state over a few ranks",
        ),
        "activation_checkpointing.partition_activations": ((False,), "sharded activations are not built yet"),
        "activation_checkpointing.cpu_checkpointing": ((False,), "use --offload-activations cpu"),
        "activation_checkpointing.contiguous_memory_optimization": (
            (False,),
            "it is not built; recompute: --recompute-granularity",
        ),
        "activation_checkpointing.number_checkpoints": (
            (None,),
            "use --recompute-granularity full and --recompute-num-layers",
        ),
        "wandb.enabled": ((False,), "wandb is not built yet; --tensorboard-dir and --metrics-file are"),
        "csv_monitor.enabled": ((False,), "CSV is not built; --metrics-file writes JSON lines"),
        "wall_clock_breakdown": ((False,), "it is not built yet; every log line has the step's time"),
    }
)
"""Known keys without a field here -> (the values that are accepted, since they ask for nothing; why others are not)."""

TRANSLATED = (
    *(
        "gradient_accumulation_steps",
        "optimizer.type",
        "optimizer.params.betas",
        "optimizer.params.adam_w_mode",
        "scheduler.type",
    ),
    *("scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr", "scheduler.params.warmup_type"),
    *("scheduler.params.warmup_min_ratio", "scheduler.params.cos_min_ratio", "fp16.enabled", "fp16.loss_scale"),
    *("fp16.initial_scale_power", "bf16.enabled", "zero_optimization.allgather_bucket_size"),
    *(f"{_OPTIMIZER}device", f"{_OPTIMIZER}ratio", f"{_OPTIMIZER}nvme_path"),
    *(f"{_PARAM}device", f"{_PARAM}nvme_path"),
    *("tensorboard.enabled", "tensorboard.output_path", "tensorboard.job_name"),
)
"""Keys that become a field together with others or by a formula. Functions of `config.deepspeed` read them."""
_DETAILS = {
    _OPTIMIZER: ("pin_memory", "buffer_count", "fast_init", "pipeline_read", "pipeline_write"),
    _PARAM: ("pin_memory", "buffer_count", "buffer_size", "max_in_cpu"),
    _AIO: ("block_size", "queue_depth", "thread_count", "intra_op_parallelism", "single_submit", "overlap_events"),
    "wandb.": ("team", "group", "project"),
    "csv_monitor.": ("output_path", "job_name"),
}
DETAILS = tuple(f"{block}{key}" for block, keys in _DETAILS.items() for key in keys)
"""Keys that are ignored: details of a feature that is refused by the key that switches it on, and how bytes move. Here
host memory is always pinned, disks are always read and written beside the updates, and `disk` knows its own sizes.
"""
