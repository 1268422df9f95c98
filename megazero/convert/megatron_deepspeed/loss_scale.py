"""DeepSpeed's dynamic loss scaler as ours, and the other way.

DeepSpeed counts iterations and stores the last one that overflowed. With k good iterations since then it doubles at k =
window + 1, 2 window + 1, ...: one step later than ours. The counts here make up for that step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from megazero.config.schema import Run
from megazero.convert.files.unpickle import Record, record_type
from megazero.convert.source import Source, SourcePosition

_SCALER = "deepspeed.runtime.fp16.loss_scaler."
_RULES: Mapping[str, tuple[str, type]] = {
    "scale_window": ("loss_scale_window", int),
    "delayed_shift": ("hysteresis", int),
    "min_scale": ("min_loss_scale", float),
}
"""Attribute of their scaler -> field of `OptimizerConfig`."""


def loss_scale_of(scaler: Any) -> dict[str, float] | None:
    """The state of a dynamic loss scale. None for an object of DeepSpeed's that is not a dynamic loss scaler."""
    held = scaler.state if isinstance(scaler, Record) else {}
    if not {"cur_scale", "cur_iter", "last_overflow_iter", "scale_window"} <= set(held):
        return None
    good = held["cur_iter"] - held["last_overflow_iter"] - 1
    overflows = held.get("delayed_shift", 1) - held.get("cur_hysteresis", 1)
    return {
        "scale": float(held["cur_scale"]),
        "good_steps": max(0, good - 1) % int(held["scale_window"]),
        "overflows": int(overflows),
    }


def with_loss_scale(run: Run, scaler: Any) -> Run:
    """The run with the scaler's window, hysteresis and bounds. DeepSpeed takes them from its checkpoint too."""
    if loss_scale_of(scaler) is None:
        return run
    told = {ours: kind(scaler.state[theirs]) for theirs, (ours, kind) in _RULES.items() if scaler.state.get(theirs)}
    return replace(run, optimizer=replace(run.optimizer, **told))


def scaler_state(source: Source) -> dict[str, Any]:
    """DeepSpeed's loss scaler, as its optimizer for fp16 and fp32 stores it."""
    dynamic = bool(source.position.loss_scale)
    scaler = record_type(_SCALER + ("DynamicLossScaler" if dynamic else "LossScaler"))()
    scaler.fill(_scale(source.position, source) if dynamic else {"cur_scale": 1.0, "dynamic": False})
    return {"loss_scaler": scaler, "dynamic_loss_scale": dynamic, "overflow": False}


def _scale(position: SourcePosition, source: Source) -> dict[str, Any]:
    """The attributes of a DynamicLossScaler that doubles after as many good iterations as ours."""
    held, optimizer = dict(position.loss_scale or {}), source.run.optimizer
    return {
        "cur_scale": float(held["scale"]),
        "cur_iter": position.iteration,
        "last_overflow_iter": position.iteration - 2 - int(held["good_steps"]),
        "scale_factor": 2.0,
        "scale_window": optimizer.loss_scale_window,
        "min_scale": optimizer.min_loss_scale,
        "delayed_shift": optimizer.hysteresis,
        "cur_hysteresis": max(1, optimizer.hysteresis - int(held["overflows"])),
        "consecutive_hysteresis": False,
        "raise_error_at_min_scale": False,
        "dynamic": True,
        "dtype": torch.float16,
    }
