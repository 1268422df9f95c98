"""The learning-rate schedule and the batch sizes in Megatron's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megazero.config.lengths import Length, Measure, measured_name
from megazero.config.schema import Run

_STYLES = ("constant", "linear", "cosine", "inverse-square-root")
_LENGTHS = ("train_length", "lr_decay", "lr_warmup")


def with_schedule(run: Run, args: Mapping[str, Any]) -> Run:
    """The run with the schedule of the arguments. The rate is constant where they do not say how long the run is.

    A run that counts samples also has numbers of iterations in its arguments, which Megatron derives. They are not
    used.
    """
    measure = Measure.SAMPLES if args.get("train_samples") else Measure.ITERATIONS
    found: dict[str, Any] = {
        name: Length(int(args[key]), measure) for name in _LENGTHS if args.get(key := measured_name(name, measure))
    }
    share = args.get("lr_warmup_fraction")
    style = str(args.get("lr_decay_style") or "").replace("_", "-").lower()
    known = style in _STYLES and "train_length" in found
    found["lr_decay_style"] = style if known else "constant"
    if share is not None and known:
        found["lr_warmup"] = Length(float(share), Measure.SHARE)
    ramp = args.get("rampup_batch_size")
    if isinstance(ramp, list | tuple) and len(ramp) == 3:
        found["rampup_batch_size"] = tuple(int(word) for word in ramp)
    return replace(run, schedule=replace(run.schedule, **found))
