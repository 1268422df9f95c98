"""DeepSpeed's keys as tables: those with a field here, those of features that are not built, other known ones, and the
defaults of those that a file leaves out.

Defaults are there where they change the result of training. In a block that the file has (optimizer, scheduler, fp16),
missing values are DeepSpeed's. If the whole optimizer or scheduler is missing, DeepSpeed uses that of the calling
program, which here means this program's flags. Settings that do not change the result (buckets, overlap, the dtype of
reductions) keep this program's defaults. Anything that the user sets, a preset included, has precedence over the
defaults of DeepSpeed, which have precedence over this program's.

Sources of the defaults in DeepSpeed 0.19.8: runtime/constants.py, runtime/lr_schedules.py, runtime/precision_config.py,
ops/adam/fused_adam.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megazero.config.lengths import Length, Measure
from megazero.config.options import run_options
from megazero.config.source import ConfigSource

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
        f"{_OPTIMIZER}super_offload": (
            (False,),
            "it is not built for host memory; nearest: --late-update, or --early-update with state on disks",
        ),
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
        "csv_monitor.enabled": ((False,), "CSV is not built; --metrics-file writes JSON lines"),
        "wall_clock_breakdown": ((False,), "it is not built yet; every log line has the step's time"),
    }
)
"""Known keys without a field here -> (the values that are accepted, since they ask for nothing; why others are not)."""

TRANSLATED = (
    *"gradient_accumulation_steps optimizer.type optimizer.params.betas optimizer.params.adam_w_mode".split(),
    *"fp16.enabled fp16.loss_scale fp16.initial_scale_power bf16.enabled scheduler.type".split(),
    *(
        f"scheduler.params.{key}"
        for key in "warmup_min_lr warmup_max_lr warmup_type warmup_min_ratio cos_min_ratio".split()
    ),
    *("zero_optimization.allgather_bucket_size", f"{_PARAM}device", f"{_PARAM}nvme_path"),
    *(f"{_OPTIMIZER}device", f"{_OPTIMIZER}ratio", f"{_OPTIMIZER}nvme_path"),
    *(f"tensorboard.{key}" for key in ("enabled", "output_path", "job_name")),
    *(f"wandb.{key}" for key in ("enabled", "project", "team", "group")),
)
"""Keys that become a field together with others or by a formula. Functions of `config.deepspeed` read them."""
_DETAILS = {
    _OPTIMIZER: ("pin_memory", "buffer_count", "fast_init", "pipeline_read", "pipeline_write"),
    _PARAM: ("pin_memory", "buffer_count", "buffer_size", "max_in_cpu"),
    _AIO: ("block_size", "queue_depth", "thread_count", "intra_op_parallelism", "single_submit", "overlap_events"),
    "csv_monitor.": ("output_path", "job_name"),
}
DETAILS = tuple(f"{block}{key}" for block, keys in _DETAILS.items() for key in keys)
"""Keys that are ignored: details of a feature that is refused by the key that switches it on, and how bytes move. Here
host memory is always pinned, disks are always read and written beside the updates, and `disk` knows its own sizes.
"""

_TYPES = ("adam", "adamw", "sgd")
DECAY_PEAK = 1e-3
"""WarmupDecayLR's default peak, which ignores the optimizer's lr. (WarmupLR and WarmupCosineLR use the optimizer's.)"""


@dataclass(frozen=True)
class Missing:
    """A key that a file may leave out.

    key      the key as the file spells it
    field    the field of a run that it sets
    value    DeepSpeed's default, as a value of that field
    applies  whether DeepSpeed reads the key, given the keys of the file
    remark   a further remark for the user
    """

    key: str
    field: str
    value: Any
    applies: Callable[[Mapping[str, Any]], bool]
    remark: str = ""


def _optimizes_by(*kinds: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda keys: str(keys.get("optimizer.type", "")).lower() in kinds


def _fp16(keys: Mapping[str, Any]) -> bool:
    return keys.get("fp16.enabled") is True


def _no_precision(keys: Mapping[str, Any]) -> bool:
    return not any(f"{precision}.enabled" in keys for precision in ("fp16", "bf16"))


def _no_scheduler(keys: Mapping[str, Any]) -> bool:
    return _optimizes_by(*_TYPES)(keys) and not any(key.startswith("scheduler.") for key in keys)


def _warms_up(keys: Mapping[str, Any]) -> bool:
    return keys.get("scheduler.type") in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


def _decays(keys: Mapping[str, Any]) -> bool:
    return keys.get("scheduler.type") == "WarmupDecayLR"


MISSING = (
    Missing("fp16 and bf16", "precision", "fp32", _no_precision),
    Missing(
        "gradient_clipping", "clip_grad", 1.0, lambda keys: True, "versions before the default was 1.0 did not clip"
    ),
    Missing("scheduler.params.warmup_max_lr", "lr", DECAY_PEAK, _decays),
    Missing("optimizer.params.lr", "lr", 1e-3, _optimizes_by(*_TYPES)),
    Missing("optimizer.params.weight_decay", "weight_decay", 0.0, _optimizes_by(*_TYPES)),
    Missing("optimizer.params.betas", "adam_beta1", 0.9, _optimizes_by("adam", "adamw")),
    Missing("optimizer.params.betas", "adam_beta2", 0.999, _optimizes_by("adam", "adamw")),
    Missing("optimizer.params.eps", "adam_eps", 1e-8, _optimizes_by("adam", "adamw")),
    Missing("optimizer.params.momentum", "sgd_momentum", 0.0, _optimizes_by("sgd")),
    Missing("scheduler", "lr_decay_style", "constant", _no_scheduler, "the rate stays as it is"),
    Missing("scheduler.params.warmup_num_steps", "lr_warmup", Length(1000, Measure.ITERATIONS), _warms_up),
    Missing("fp16.initial_scale_power", "initial_loss_scale", 2.0**16, _fp16),
    Missing("fp16.loss_scale_window", "loss_scale_window", 1000, _fp16),
    Missing("fp16.hysteresis", "hysteresis", 2, _fp16),
    Missing("fp16.min_loss_scale", "min_loss_scale", 1.0, _fp16),
)
"""In the order of the message. Of two rows for one field the first that applies counts."""


def missing_keys(name: str, keys: Mapping[str, Any], settings: Iterable[str]) -> tuple[ConfigSource, dict[str, str]]:
    """The defaults that apply to a file, and a sentence about each by field.

    name      name of the file
    keys      all keys of the file, with those whose value is "auto" (they are left to the flags, not to a default)
    settings  fields that the file sets
    """
    source = ConfigSource(f"DeepSpeed's defaults under {name}", resolved=True)
    sentences: dict[str, str] = {}
    for row in MISSING:
        if row.key in keys or row.field in {*settings, *sentences} or not row.applies(keys):
            continue
        source.put(row.field, row.value, f"{name} without {row.key}")
        remark = f" ({row.remark})" if row.remark else ""
        sentences[row.field] = f"{row.key}: {_shown(run_options()[row.field].flag, row.value)}{remark}"
    return source, sentences


def other_peak(name: str, keys: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """A sentence if the file has an lr that DeepSpeed would not reach. It is refused: the user surely means that lr."""
    lr = settings.get("lr")
    if not _decays(keys) or "scheduler.params.warmup_max_lr" in keys or lr in (None, DECAY_PEAK):
        return []
    return [
        f"{name}: scheduler.params.warmup_max_lr is left out, and DeepSpeed's WarmupDecayLR then warms up to "
        f"{DECAY_PEAK:g}, not to optimizer.params.lr {lr:g}: write the one that is meant"
    ]


def _shown(flag: str, value: Any) -> str:
    if isinstance(value, Length):
        return value.behind(flag)
    return f"{flag} {value:g}" if isinstance(value, float) else f"{flag} {value}"
