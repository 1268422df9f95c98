"""Flags that would have no effect in a run: the condition of an effect, and what is missing.

Only flags of the command line are checked, and only if their value is not the default. A flag without effect is an
error if it asks for a result that this run cannot have at any size. It is a line in the banner if it would have an
effect with another size, layout or data, as in a script for several runs. Neither the machine nor the files are known.

What a flag needs is said beside its field (`needs`, an error, and `idle_without`, a line), in the words of the message:

    --save DIR                                  the field is set: it is not its default
    --optimizer adam or adamw                   the field has one of these values
    --tp above 1                                the field has a larger number
    --zero-stage 3 or --offload-params          one of the conditions holds
    --optimizer sgd: others have no momentum    what follows the colon is the reason, for the reader alone

`REFUSED` and `TOLD` have the conditions that are more than this.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from megazero.config.checks import Check, CheckContext, Problems
from megazero.config.derive import ffn_width, leaving, micro_batch_order, moves_in_parts, recomputes_blocks
from megazero.config.layers.kinds import ROTARY, ffn_widths, uses_positions
from megazero.config.lengths import Length, Measure
from megazero.config.options import Option, run_options
from megazero.config.placement import AUTO
from megazero.config.rotary import OF_MODEL
from megazero.config.tiers import FILE_TIERS, Tier, TierShare


@dataclass(frozen=True)
class Effect:
    """One flag under one condition.

    holds    whether the condition is met, so that the flag can have an effect
    needs    the condition in words, after "has no effect without"
    reads    of an error: further fields that `holds` reads, with blanks between. Lines are about valid runs only
    refused  whether a flag without effect is an error; else it is a line in the banner
    """

    field: str
    holds: Callable[[CheckContext], bool]
    needs: str
    reads: str = ""
    refused: bool = True

    def find(self, context: CheckContext) -> Problems:
        """The sentence if the flag is given and has no effect."""
        known = run_options()[self.field]
        value = known.value_in(context.run)
        # a preset or a file may have settings for other runs, and a default takes back what a script has set
        if self.field not in context.given or value in (None, known.default) or self.holds(context):
            return
        if known.kind is bool:
            setting = known.flag if value else known.negations[0]
        elif isinstance(value, Length):
            setting = value.behind(known.flag)
        else:
            parts = value if isinstance(value, tuple) else (value,)
            shown = (f"{part:g}" if isinstance(part, float) else str(part) for part in parts)
            setting = " ".join((known.flag, *shown))
        yield f"{setting} has no effect without {self.needs}"


def needing(field: str, needs: str, *, refused: bool) -> Effect:
    """The effect of a field that says beside it what it needs. Raises for a phrase that names no flag or value."""
    conditions = [_condition(phrase) for phrase in re.split(r", (?=--)| or (?=--)", needs.partition(": ")[0])]

    def holds(context: CheckContext) -> bool:
        return any(meets(known.value_in(context.run)) for known, meets in conditions)

    return Effect(field, holds, needs, " ".join(known.name for known, _ in conditions), refused)


def _condition(phrase: str) -> tuple[Option, Callable[[Any], bool]]:
    """The option of a phrase such as "--optimizer adam or adamw", and whether a value of it meets the phrase."""
    flag, _, rest = phrase.partition(" ")
    known = run_options()[flag.removeprefix("--").replace("-", "_")]
    if rest in ("", known.metavar):
        return known, lambda value: value not in (None, known.default)
    if rest.startswith("above "):
        return known, lambda value: value > int(rest.removeprefix("above "))
    values = re.split(", | or ", rest)
    for text in values:
        known.from_words([text])  # a ValueError: the phrase names a value that the field cannot have
    return known, lambda value: (value.tier.value if isinstance(value, TierShare) else str(value)) in values


def _of_all(fields: str, holds: Callable[[CheckContext], bool], needs: str, reads: str = "") -> tuple[Effect, ...]:
    """The same effect of several fields."""
    return tuple(Effect(field, holds, needs, reads) for field in fields.split())


def _may_leave(context: CheckContext, leaves: Callable[[TierShare], bool]) -> bool:
    """Whether something leaves the device in this way, or might, since a search chooses what leaves."""
    return context.run.offload.placement == AUTO or any(map(leaves, leaving(context.run).values()))


def _reads_text(context: CheckContext) -> bool:
    data = context.run.data
    return data.tokenizer is not None or not (data.data_path or data.instruction_data)


def _validates(context: CheckContext) -> bool:
    """Whether there is something to evaluate on: a split of --data-path, or a file of conversations."""
    return not context.run.data.instruction_data or bool(context.run.data.valid_instruction_data)


def _decays(context: CheckContext) -> bool:
    return context.run.schedule.lr_decay_style != "constant"


def _falls_or_warms_up_by_a_share(context: CheckContext) -> bool:
    """Whether the rate follows the length of its decay; a warm-up that is a share is a share of that length."""
    warmup = context.run.schedule.lr_warmup
    return _decays(context) or (warmup is not None and warmup.measure is Measure.SHARE)


def _ramps(context: CheckContext) -> bool:
    ramp = context.run.schedule.rampup_batch_size
    return ramp is None or ramp[0] < context.run.schedule.global_batch_size


def _within(field: str) -> Effect:
    """Of a number of iterations between two events, which needs as many in the run."""

    def holds(context: CheckContext) -> bool:
        iterations = context.run.schedule.train_iters
        return iterations is None or run_options()[field].value_in(context.run) <= iterations

    return Effect(field, holds, "at least as many --train-iters")


def _has_folders(tier: Tier) -> Effect:
    """The folders of a tier in files. A search chooses among disks."""
    row = FILE_TIERS[tier]
    return Effect(
        row.folders,
        lambda context: (
            any(offload.tier is tier for offload in leaving(context.run).values())
            or (tier is Tier.DISK and context.run.offload.placement == AUTO)
        ),
        f"--offload-optimizer {tier.value}, or the same of params, gradients or activations: nothing rests {row.place}",
        _OFFLOAD,
    )


_OFFLOAD = "offload_optimizer offload_params offload_gradients offload_activations placement"
_SHARDED = "several data-parallel ranks; here dp = ranks / (tp x pp) is 1"
_FALLS = "a --lr-decay-style that falls, which constant does not"
_IDS = "--tokenizer: ids are used as they are, and nothing reads"

_IN_FILES = "/".join(tier.value for tier in FILE_TIERS)

REFUSED = (
    *_of_all(
        " ".join(OF_MODEL),
        lambda context: uses_positions(context.run.model, ROTARY),
        "rotary positions: --position-embedding rotary, or --layer-pattern with the word rotary",
        "position_embedding layer_pattern rotary_sets num_layers",
    ),
    Effect(
        "ffn_hidden_size",
        lambda context: ffn_width(context.run.model) in ffn_widths(context.run.model),
        "a layer of that width: every item of --layer-pattern says ffn:F",
        "layer_pattern num_layers hidden_size activation",
    ),
    Effect(
        "zero_quantized_weights",
        lambda context: context.run.parallel.zero_stage > 0,
        "--zero-stage 1, 2 or 3: with 0 no parameters are gathered",
        "zero_stage",
    ),
    *_of_all(
        "initial_loss_scale loss_scale_window hysteresis min_loss_scale",
        lambda context: context.run.optimizer.precision == "fp16" and context.run.optimizer.loss_scale is None,
        "--precision fp16 and a dynamic loss scale (no --loss-scale)",
        "precision loss_scale",
    ),
    Effect(
        "ema_decay",
        lambda context: not context.run.checkpoint.no_save_optim,
        "the optimizer's state in checkpoints, to which the average belongs (no --no-save-optim)",
        "no_save_optim",
    ),
    Effect("min_lr", _decays, _FALLS, "lr_decay_style"),
    Effect("lr_decay", _falls_or_warms_up_by_a_share, _FALLS, "lr_decay_style lr_warmup"),
    Effect("sample_prompt", _reads_text, f"{_IDS} the text", "data_path tokenizer"),
    Effect("sample_tokens", _reads_text, f"{_IDS} a text", "data_path tokenizer"),
    Effect(
        "shard_recompute_inputs",
        lambda context: context.run.parallel.tp > 1 and recomputes_blocks(context.run.parallel),
        "--tp above 1 and whole blocks that are recomputed (--recompute-granularity full, --activation-memory-budget)",
        "recompute_granularity activation_memory_budget tp",
    ),
    *map(_has_folders, FILE_TIERS),
    Effect(
        "nvme_buffer_bytes",
        lambda context: moves_in_parts(context.run) or _may_leave(context, lambda offload: offload.in_files),
        "--offload-optimizer or --offload-gradients, "
        f"--offload-params {_IN_FILES} or --offload-activations {_IN_FILES}",
        _OFFLOAD,
    ),
)
"""Flags that ask for a result: numbers, files, a way of training. Without effect they are errors."""

TOLD = (
    Effect(
        "host_memory_budget",
        lambda context: _may_leave(context, bool),
        "--offload-optimizer, or the same of params, gradients or activations: nothing rests in host memory",
    ),
    Effect(
        "sample_tokens",
        lambda context: context.run.trainer.sample_prompt is not None or context.run.data.tokenizer is None,
        "--sample-prompt TEXT",
    ),
    Effect(
        "partition_by",
        lambda context: context.run.parallel.pp * context.run.parallel.virtual_stages > 1,
        "--pp above 1, or --virtual-stages",
    ),
    *_of_all("zero_stage zero_quantized_gradients", lambda context: context.shards, _SHARDED),
    Effect("zero_shard_size", lambda context: context.dp != 1, _SHARDED),
    Effect(
        "micro_batch_order",
        lambda context: context.accumulates,
        "several micro-batches in a step: --global-batch-size above --micro-batch-size x dp",
    ),
    Effect(
        "vertical_group_size",
        lambda context: micro_batch_order(context.run) == "vertical",
        "--micro-batch-order vertical",
    ),
    *_of_all("overlap grad_reduce_dtype", lambda context: context.reduces, _SHARDED),
    *_of_all("backend distributed_timeout_minutes", lambda context: context.several, "a second rank"),
    Effect(
        "shared_memory",
        lambda context: context.several and context.run.parallel.backend in ("auto", "gloo"),
        "several ranks and --backend gloo",
    ),
    Effect("rampup_batch_size", _ramps, "a START below --global-batch-size"),
    Effect(
        "init_method_std",
        lambda context: context.run.checkpoint.init_from is None,
        "random initial weights; --init-from gives others",
    ),
    Effect("eval_interval", _validates, "--valid-instruction-data"),
    Effect(
        "eval_iters",
        lambda context: _validates(context) or context.run.trainer.eval_iters == 0,
        "--valid-instruction-data",
    ),
    Effect("test_iters", lambda context: not context.run.data.instruction_data, "--split, which divides --data-path"),
    *map(_within, ("save_interval", "eval_interval", "exit_interval")),
    *_of_all(
        "override_opt_param_scheduler override_batch override_data",
        lambda context: context.run.checkpoint.load is not None and not context.run.checkpoint.finetune,
        "--load DIR, to resume from it",
    ),
)
"""Flags of a script for several runs, which would have an effect in another one. Here they are lines in the banner."""


@cache
def effects() -> tuple[Effect, ...]:
    """All conditions under which flags have effects. A field may have several."""
    made = [
        needing(known.name, needs, refused=refused)
        for known in run_options().values()
        for needs, refused in ((known.needs, True), (known.idle_without, False))
        if needs is not None
    ]
    return (*made, *REFUSED, *(replace(effect, refused=False) for effect in TOLD))


@cache
def effect_checks() -> tuple[Check, ...]:
    """The checks of flags whose lack of an effect is an error."""
    return tuple(
        Check(effect.find, frozenset((effect.field, *effect.reads.split()))) for effect in effects() if effect.refused
    )


def without_effect(context: CheckContext) -> list[str]:
    """A line for each flag that has no effect in this valid run and is not an error."""
    idle = [effect for effect in effects() if not effect.refused]
    # backwards, so that the first condition of a field that is not met has the last word
    lines = {effect.field: sentence for effect in reversed(idle) for sentence in effect.find(context)}
    return list(reversed(lines.values()))
