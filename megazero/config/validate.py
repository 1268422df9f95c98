"""Validation of a run: a sentence for each mistake, with flag names, numbers and the nearest valid values.

`RANGES` bounds single fields, `CHECKS` check relations between fields, and `effect_checks` refuse flags without effect.
A check names the fields that it reads. A check is left out when one of its fields is already reported, so that each
mistake is reported once.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cache
from typing import Any

from megazero.config.checks import Check, CheckContext
from megazero.config.checks_layout import LAYOUT_CHECKS
from megazero.config.checks_training import TRAINING_CHECKS
from megazero.config.idle_flags import effect_checks
from megazero.config.layers.checks_model import MODEL_CHECKS
from megazero.config.lengths import Length, Measure
from megazero.config.options import Option, run_options
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
        if self.high is None:
            return low
        return f"{low} and {'less than' if self.high_open else 'at most'} {self.high:.10g}"


def _each(fields: str, bound: Any) -> dict[str, Any]:
    """The same bound for each of the fields, whose names have blanks between."""
    return dict.fromkeys(fields.split(), bound)


RANGES: Mapping[str, Range] = {
    **_each(
        """num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels vocab_size
        make_vocab_size_divisible_by seq_length max_position_embeddings lora_rank tp pp virtual_stages
        recompute_num_layers vertical_group_size zero_shard_size bucket_size zero3_gathered_bytes nvme_buffer_bytes
        loss_scale_window hysteresis fp8_amax_history micro_batch_size global_batch_size rampup_batch_size
        train_length lr_decay lr_wsd_decay
        save_interval save_retain_interval eval_interval exit_interval log_interval""",
        Range(1),
    ),
    **_each(
        """init_method_std weight_decay clip_grad z_loss lr min_lr lr_warmup num_workers
        keep_last eval_iters test_iters eod_id partition sample_tokens position_offset zero3_persist_below
        max_skipped_steps""",
        Range(0),
    ),
    **_each(
        """activation_memory_budget device_memory_budget host_memory_budget loss_scale initial_loss_scale
        min_loss_scale rotary_base adam_eps attention_scale attention_cap logits_cap logits_multiplier
        embedding_multiplier residual_multiplier exit_duration_in_mins""",
        Range(0, low_open=True),
    ),
    **_each(
        "hidden_dropout attention_dropout lora_dropout label_smoothing adam_beta1 adam_beta2 sgd_momentum",
        Range(0, 1, high_open=True),
    ),
    "seed": Range(0, 2**32 - 1),
    "rotary_share": Range(0, 1, low_open=True),
    "ema_decay": Range(0, 1, low_open=True, high_open=True),
    "lora_alpha": Range(0, 10**9, low_open=True),
    "lora_base_bits": Range(4, 8),
    "norm_epsilon": Range(0, 1, low_open=True),  # more than the variance that a norm makes: another function
    "distributed_timeout_minutes": Range(0, BOUNDS.minutes, low_open=True),
}

MOST: Mapping[str, int] = {
    **_each("num_layers recompute_num_layers virtual_stages partition", BOUNDS.layers),
    **_each("num_attention_heads num_query_groups kv_channels lora_rank", BOUNDS.heads),
    **_each("hidden_size ffn_hidden_size", BOUNDS.width),
    **_each("vocab_size make_vocab_size_divisible_by eod_id", BOUNDS.vocabulary),
    **_each("seq_length max_position_embeddings position_offset", BOUNDS.positions),
    **_each("tp pp", BOUNDS.ranks),
    **_each("micro_batch_size global_batch_size", BOUNDS.batch),
    "num_workers": BOUNDS.threads,
}
"""Upper bounds far below `BOUNDS.count`, for fields whose value costs time or memory per unit."""

FOR_NONE: Mapping[str, str] = {
    "eval_interval": "no evaluation at all is --eval-iters 0",
    "save_interval": "without it a run saves at its end only",
    "exit_interval": "without it a run goes on to its end",
    "lora_rank": "without it there are no adapters",
}
"""What to say of a 0 that is meant as none, where none is not 0."""


def out_of_range(name: str, value: Any) -> str | None:
    """A sentence about the allowed range if the value is outside it; else None. None and words are in range."""
    if isinstance(value, Length):
        if value.measure is Measure.EPOCHS:
            epochs = Range(0, BOUNDS.epochs, low_open=True)
            return None if epochs.holds(value.number) else f"must be {epochs}"
        if value.measure is Measure.SHARE:
            return None if 0 <= value.number <= 1 else f"must be {Range(0, 1) if value.by_name else '0% to 100%'}"
        value = value.number
    if value is None or isinstance(value, str | bool):
        return None
    allowed, most = RANGES.get(name), MOST.get(name, BOUNDS.count)
    if allowed is not None and not allowed.holds(value):
        hint = f"; {FOR_NONE[name]}" if value == 0 and name in FOR_NONE else ""
        return f"must be {allowed}{hint}"
    return f"must be at most {most:,}" if isinstance(value, int) and value > most else None


def _range_problem(known: Option, value: Any) -> str | None:
    """A sentence if a field is outside its range, about the first part of a list that is."""
    for part in value if isinstance(value, tuple) else (value,):
        reason = out_of_range(known.name, part)
        if reason is not None:
            setting = part.behind(known.flag) if isinstance(part, Length) else f"{known.flag} {shown(part)}"
            return f"{setting}: {reason}"
    return None


@cache
def _with_range() -> Mapping[str, Option]:
    """The fields that have a range: those of words and switches have none."""
    return {name: known for name, known in run_options().items() if known.kind not in (str, bool)}


CHECKS = (*MODEL_CHECKS, *LAYOUT_CHECKS, *TRAINING_CHECKS)
"""Relations between fields, in the order of the message. Those of flags without effect follow."""


@cache
def _checks_of(fields: frozenset[str] | None) -> tuple[Check, ...]:
    """The checks that read one of these fields, in the order of the message; None: all."""
    checks = (*CHECKS, *effect_checks())
    return checks if fields is None else tuple(check for check in checks if not fields.isdisjoint(check.reads))


def problems_of(
    run: Run,
    world_size: int | None,
    *,
    bad: set[str] | None = None,
    given: frozenset[str] = frozenset(),
    own_data: bool = False,
    decided: frozenset[str] = frozenset(),
    whole_batches: bool = False,
    looked_at: Set[str] | None = None,
) -> list[str]:
    """A sentence for everything that is wrong with a run.

    world_size  number of ranks; None leaves out the checks that need it
    bad         fields that are already reported, whose values mean nothing
    given       fields that the command line itself sets. Only there is a flag without effect a problem: a preset or a
                file may contain settings for another precision or optimizer
    own_data    whether a program passes the training data
    decided     fields whose values are not the user's, but follow from facts
    whole_batches  whether each step is to have the whole global batch: a ramp to it is not looked at
    looked_at   only what reads one of these fields is looked at: others are those of a run that was looked at before.
                None: all
    """
    bad, problems = set(bad or ()), list[str]()
    for name, known in _with_range().items():
        is_left_out = name in bad or (looked_at is not None and name not in looked_at)
        problem = None if is_left_out else _range_problem(known, known.value_in(run))
        if problem is not None:
            problems.append(problem)
            bad.add(name)  # its number means nothing to the checks below
    if world_size is not None and world_size < 1:
        return [*problems, f"--world-size {world_size}: must be at least 1"]
    context = CheckContext(run, world_size, given, own_data, decided, whole_batches)
    for check in _checks_of(None if looked_at is None else frozenset(looked_at)):
        if bad.isdisjoint(check.reads):
            problems += check.find(context)
    return problems
