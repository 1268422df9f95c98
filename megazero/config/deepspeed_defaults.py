"""DeepSpeed's own defaults for keys that its JSON leaves out, where they change the result of training.

In a block that the file has (optimizer, scheduler, fp16), missing values are DeepSpeed's. If the whole optimizer or
scheduler is missing, DeepSpeed uses that of the calling program, which here means this program's flags. Settings that
do not change the result (buckets, overlap, the dtype of reductions) keep this program's defaults. Anything that the
user sets, a preset included, has precedence over these values. They have precedence over this program's defaults.

Sources in DeepSpeed 0.19.8: runtime/constants.py, runtime/lr_schedules.py, runtime/precision_config.py,
ops/adam/fused_adam.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megazero.config.lengths import Length, Measure
from megazero.config.options import run_options
from megazero.config.source import ConfigSource

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


def _always(keys: Mapping[str, Any]) -> bool:
    return True


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
    Missing("gradient_clipping", "clip_grad", 1.0, _always, "versions before the default was 1.0 did not clip"),
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
    told: dict[str, str] = {}
    for row in MISSING:
        if row.key in keys or row.field in {*settings, *told} or not row.applies(keys):
            continue
        source.put(row.field, row.value, f"{name} without {row.key}")
        remark = f" ({row.remark})" if row.remark else ""
        told[row.field] = f"{row.key}: {_shown(run_options()[row.field].flag, row.value)}{remark}"
    return source, told


def other_peak(name: str, keys: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """A sentence if the file has an lr that DeepSpeed would not reach. It is refused: the user surely means that lr."""
    lr = settings.get("lr")
    if not _decays(keys) or "scheduler.params.warmup_max_lr" in keys or lr in (None, DECAY_PEAK):
        return []
    return [
        f"{name}: scheduler.params.warmup_max_lr is left out, and DeepSpeed's WarmupDecayLR then warms up to "
        f"{DECAY_PEAK:g}, not to "
        f"optimizer.params.lr {lr:g}: write the one that is meant"
    ]


def _shown(flag: str, value: Any) -> str:
    if isinstance(value, Length):
        return value.behind(flag)
    return f"{flag} {value:g}" if isinstance(value, float) else f"{flag} {value}"
