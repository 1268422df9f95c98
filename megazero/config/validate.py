"""Validation of a run: a sentence for each mistake, with flag names, numbers and the nearest valid values.

There are two passes. `RANGES` bounds single fields. `CHECKS` check relations between fields. A check names the fields
that it reads. It is left out when one of them is already reported, so that each mistake is reported once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megazero.config.checks import CheckContext
from megazero.config.checks_layout import LAYOUT_CHECKS
from megazero.config.checks_lora import LORA_CHECKS
from megazero.config.checks_offload import OFFLOAD_CHECKS
from megazero.config.checks_recompute import RECOMPUTE_CHECKS
from megazero.config.checks_training import TRAINING_CHECKS
from megazero.config.effects import EFFECT_CHECKS
from megazero.config.lengths import Length, Measure
from megazero.config.options import run_options
from megazero.config.schema import Run
from megazero.system.reading import BOUNDS, shown


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high` (None: no upper end). The ends are included unless they are open."""

    low: float
    high: float | None = None
    low_open: bool = False
    high_open: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.low if self.low_open else value >= self.low
        return above and (self.high is None or (value < self.high if self.high_open else value <= self.high))

    def __str__(self) -> str:
        low = f"more than {self.low:g}" if self.low_open else f"at least {self.low:g}"
        return (
            low if self.high is None else f"{low} and {'less than' if self.high_open else 'at most'} {self.high:.10g}"
        )


_COUNT, _NOT_NEGATIVE, _POSITIVE = Range(1), Range(0), Range(0, low_open=True)
_SHARE = Range(0, 1, high_open=True)

RANGES: Mapping[str, Range] = MappingProxyType(
    dict.fromkeys(
        (
            *(
                "num_layers",
                "hidden_size",
                "num_attention_heads",
                "num_query_groups",
                "ffn_hidden_size",
                "vocab_size",
                "seq_length",
            ),
            *(
                "make_vocab_size_divisible_by",
                "max_position_embeddings",
                "tp",
                "pp",
                "virtual_stages",
                "recompute_num_layers",
            ),
            *(
                "bucket_size",
                "zero_shard_size",
                "vertical_group_size",
                "loss_scale_window",
                "hysteresis",
                "micro_batch_size",
                "global_batch_size",
                "train_iters",
                "train_samples",
            ),
            *(
                "lr_decay",
                "lr_wsd_decay",
                "save_interval",
                "eval_interval",
            ),
            *("zero3_gathered_bytes", "nvme_buffer_bytes"),
            *("save_retain_interval", "exit_interval", "log_interval", "fp8_amax_history", "kv_channels", "lora_rank"),
        ),
        _COUNT,
    )
    | dict.fromkeys(
        (
            *(
                "init_method_std",
                "weight_decay",
                "clip_grad",
                "z_loss",
                "lr",
                "min_lr",
                "lr_warmup",
            ),
            *(
                "num_workers",
                "keep_last",
                "eval_iters",
                "test_iters",
                "eod_id",
                "partition",
                "sample_tokens",
                "position_offset",
            ),
            "zero3_persist_below",
            "max_skipped_steps",
        ),
        _NOT_NEGATIVE,
    )
    | dict.fromkeys(
        (
            *("activation_memory_budget", "device_memory_budget", "host_memory_budget"),
            *("rotary_base", "adam_eps", "loss_scale", "initial_loss_scale", "min_loss_scale"),
            "exit_duration_in_mins",
        ),
        _POSITIVE,
    )
    | dict.fromkeys(
        (
            "hidden_dropout",
            "attention_dropout",
            "lora_dropout",
            "adam_beta1",
            "adam_beta2",
            "sgd_momentum",
            "label_smoothing",
        ),
        _SHARE,
    )
    | {"seed": Range(0, 2**32 - 1), "rampup_batch_size": _COUNT}
    | {"lora_alpha": Range(0, 10**9, low_open=True), "lora_base_bits": Range(4, 8)}
    | {"norm_epsilon": Range(0, 1, low_open=True)}  # more than the variance that a norm makes would be another function
    | {
        "epochs": Range(0, BOUNDS.epochs, low_open=True),
        "distributed_timeout_minutes": Range(0, BOUNDS.minutes, low_open=True),
    }
)


MOST: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("num_layers", "recompute_num_layers", "virtual_stages", "partition"), BOUNDS.layers),
        **dict.fromkeys(("num_attention_heads", "num_query_groups", "kv_channels", "lora_rank"), BOUNDS.heads),
        **dict.fromkeys(("hidden_size", "ffn_hidden_size"), BOUNDS.width),
        **dict.fromkeys(("vocab_size", "make_vocab_size_divisible_by", "eod_id"), BOUNDS.vocabulary),
        **dict.fromkeys(("seq_length", "max_position_embeddings", "position_offset"), BOUNDS.positions),
        **dict.fromkeys(("tp", "pp"), BOUNDS.ranks),
        **dict.fromkeys(("micro_batch_size", "global_batch_size"), BOUNDS.batch),
        "num_workers": BOUNDS.threads,
    }
)
"""Upper bounds far below `BOUNDS.count`, for fields whose value costs time or memory per unit."""


FOR_NONE: Mapping[str, str] = MappingProxyType(
    {
        "eval_interval": "no evaluation at all is --eval-iters 0",
        "save_interval": "without it a run saves at its end only",
        "exit_interval": "without it a run goes on to its end",
        "lora_rank": "without it there are no adapters",
    }
)
"""What to say of a 0 that is meant as none, where none is not 0."""


def out_of_range(name: str, value: Any) -> str | None:
    """A sentence about the allowed range if the value is outside it; else None. None and words are in range."""
    allowed, most = RANGES.get(name), MOST.get(name, BOUNDS.count)
    if isinstance(value, Length) and value.measure is Measure.SHARE:
        return None if 0 <= value.number <= 1 else f"must be {Range(0, 1) if value.by_name else '0% to 100%'}"
    value = value.number if isinstance(value, Length) else value
    if value is None or isinstance(value, str | bool):
        return None
    if allowed is not None and not allowed.holds(value):
        hint = f"; {FOR_NONE[name]}" if value == 0 and name in FOR_NONE else ""
        return f"must be {allowed}{hint}"
    return f"must be at most {most:,}" if isinstance(value, int) and value > most else None


def range_problems(values: Mapping[str, Any], bad: set[str]) -> list[str]:
    """A sentence for each field outside its range. Adds the names of these fields to `bad`."""
    found = []
    for name, value in values.items():
        if name in bad:
            continue
        wrong = [
            (v, reason)
            for v in (value if isinstance(value, tuple) else (value,))
            if (reason := out_of_range(name, v)) is not None
        ]
        if wrong:
            bad.add(name)
            flag, out = run_options()[name].flag, wrong[0][0]
            words = out.behind(flag) if isinstance(out, Length) else f"{flag} {shown(out)}"
            found.append(f"{words}: {wrong[0][1]}")
    return found


CHECKS = (*LAYOUT_CHECKS, *RECOMPUTE_CHECKS, *TRAINING_CHECKS, *LORA_CHECKS, *OFFLOAD_CHECKS, *EFFECT_CHECKS)
"""Relations between fields, in the order of the message."""


def flat(run: Run) -> dict[str, Any]:
    """Field name -> value, of all sections."""
    return {name: getattr(getattr(run, known.section), name) for name, known in run_options().items()}


def problems_of(
    run: Run,
    world_size: int | None,
    *,
    bad: set[str] | None = None,
    given: frozenset[str] = frozenset(),
    own_data: bool = False,
) -> list[str]:
    """A sentence for everything that is wrong with a run.

    world_size  number of ranks; None leaves out the checks that need it
    bad         fields that are already reported, whose values mean nothing
    given       fields that the command line itself sets. Only there is a flag without effect a problem: a preset or a
                file may contain settings for another precision or optimizer
    own_data    whether a program passes the training data
    """
    bad = set(bad or ())
    found = range_problems(flat(run), bad)
    if world_size is not None and world_size < 1:
        return [*found, f"--world-size {world_size}: must be at least 1"]
    context = CheckContext(run, world_size, given, own_data)
    for check in CHECKS:
        if bad.isdisjoint(check.reads):
            found += check.problems(context)
    return found
