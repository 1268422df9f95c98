"""The learning-rate schedule and the batch sizes in Megatron's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megazero.config.schema import Run

_STYLES = ("constant", "linear", "cosine", "inverse-square-root")
_RATES = ("lr_warmup_fraction",)
_BY_SAMPLES = ("train_samples", "lr_decay_samples", "lr_warmup_samples")
_BY_ITERATIONS = ("train_iters", "lr_decay_iters", "lr_warmup_iters")


def with_schedule(run: Run, args: Mapping[str, Any]) -> Run:
    """The run with the schedule of the arguments. The rate is constant where they do not say how long the run is.

    A run that counts samples also has numbers of iterations in its arguments, which Megatron derives. They are not
    used.
    """
    lengths = _BY_SAMPLES if args.get("train_samples") else _BY_ITERATIONS
    found: dict[str, Any] = {name: int(args[name]) for name in lengths if args.get(name)}
    found |= {name: float(args[name]) for name in _RATES if args.get(name) is not None}
    style = str(args.get("lr_decay_style") or "").replace("_", "-").lower()
    known = style in _STYLES and ("train_samples" in found or "train_iters" in found)
    found["lr_decay_style"] = style if known else "constant"
    if not known:
        found.pop("lr_warmup_fraction", None)
    ramp = args.get("rampup_batch_size")
    if isinstance(ramp, list | tuple) and len(ramp) == 3:
        found["rampup_batch_size"] = tuple(int(word) for word in ramp)
    return replace(run, schedule=replace(run.schedule, **found))
