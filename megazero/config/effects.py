"""Flags that would have no effect in a run, as a table: the condition of an effect, and what is missing.

Only flags of the command line are checked, and only if their value is not the default. Presets and files may contain
settings for other runs, and a flag's default takes back what a script has set. A flag without effect is an error if it
asks for a result that this run cannot have at any size. It is a line in the banner if it would have an effect with
another size, layout or data, as in a script for several runs. This table knows neither the machine nor the files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megazero.config.checks import Check, CheckContext, Found
from megazero.config.derive import pipeline_schedule, recomputes_blocks
from megazero.config.options import run_options


@dataclass(frozen=True)
class Effect:
    """One flag under one condition.

    field    the flag's field
    holds    whether the condition is met, so that the flag can have an effect
    needs    the condition in words, after "has no effect without"
    reads    further fields that `holds` reads
    refused  whether a flag without effect is an error; else it is a line in the banner
    """

    field: str
    holds: Callable[[CheckContext], bool]
    needs: str
    reads: tuple[str, ...]
    refused: bool = True

    def missed(self, context: CheckContext) -> str | None:
        """The sentence if the flag is given and has no effect; else None."""
        known = run_options()[self.field]
        value = getattr(getattr(context.run, known.section), self.field)
        if self.field not in context.given or value in (None, known.default) or self.holds(context):
            return None
        if known.kind is bool:
            return f"{known.flag if value else known.negations[0]} has no effect without {self.needs}"
        shown = (
            " ".join(map(str, value))
            if isinstance(value, tuple)
            else f"{value:g}"
            if isinstance(value, float)
            else value
        )
        return f"{known.flag} {shown} has no effect without {self.needs}"


def _fp16(f: CheckContext) -> bool:
    return f.run.optimizer.precision == "fp16"


def _dynamic(f: CheckContext) -> bool:
    return _fp16(f) and f.run.optimizer.loss_scale is None


def _adam(f: CheckContext) -> bool:
    return f.run.optimizer.optimizer != "sgd"


def _saves(f: CheckContext) -> bool:
    return f.run.checkpoint.save is not None


def _loads(f: CheckContext) -> bool:
    return f.run.checkpoint.load is not None


def _instructed(f: CheckContext) -> bool:
    return bool(f.run.data.instruction_data)


def _decays(f: CheckContext) -> bool:
    return f.run.schedule.lr_decay_style != "constant"


def _adapts(f: CheckContext) -> bool:
    return f.run.lora.lora_rank is not None


def _several(f: CheckContext) -> bool:
    return f.world_size != 1


def _reads_text(f: CheckContext) -> bool:
    return f.run.data.tokenizer is not None or not (f.run.data.data_path or f.run.data.instruction_data)


def _evaluates(f: CheckContext) -> bool:
    return f.run.trainer.eval_iters > 0


def _validates(f: CheckContext) -> bool:
    return not f.run.data.instruction_data or bool(f.run.data.valid_instruction_data)


def _shards(f: CheckContext) -> bool:
    """Whether some model state has several replicas: over dp, or a tied embedding on two stages."""
    tied = (
        not f.run.model.untie_embeddings_and_output_weights
        and f.run.parallel.pp > 1
        and pipeline_schedule(f.run.parallel) != "zb-v"
    )
    return f.dp != 1 or tied


def _reduces(f: CheckContext) -> bool:
    return _shards(f) or (f.run.parallel.sequence_parallel and f.run.parallel.tp > 1)


def _quantises(f: CheckContext) -> bool:
    return f.run.parallel.zero_quantized_gradients != "none"


def _ramps(f: CheckContext) -> bool:
    ramp = f.run.schedule.rampup_batch_size
    return ramp is None or len(ramp) != 3 or ramp[0] < f.run.schedule.global_batch_size


def _within(field: str) -> Callable[[CheckContext], bool]:
    """The condition that a run counted in iterations has at least as many as this field says."""

    def holds(f: CheckContext) -> bool:
        every, last = getattr(getattr(f.run, run_options()[field].section), field), f.run.schedule.train_iters
        return last is None or every <= last

    return holds


_DYNAMIC = ("precision", "loss_scale")
_TIED = ("tp", "pp", "pipeline_schedule", "virtual_stages", "untie_embeddings_and_output_weights")
_SHARDED = "several data-parallel ranks; here dp = ranks / (tp x pp) is 1"

EFFECTS = (
    Effect(
        "zero_quantized_weights",
        lambda f: f.run.parallel.zero_stage > 0,
        "--zero-stage 1, 2 or 3: with 0 no parameters are gathered",
        ("zero_stage",),
    ),
    Effect("zero_gradient_error_feedback", _quantises, "--zero-quantized-gradients", ("zero_quantized_gradients",)),
    Effect(
        "grad_reduce_dtype",
        lambda f: not _quantises(f),
        "--zero-quantized-gradients none: blocks are made of what is summed up",
        ("zero_quantized_gradients",),
    ),
    Effect("loss_scale", _fp16, "--precision fp16", ("precision",)),
    *(
        Effect(name, _dynamic, "--precision fp16 and a dynamic loss scale (no --loss-scale)", _DYNAMIC)
        for name in ("initial_loss_scale", "loss_scale_window", "hysteresis", "min_loss_scale")
    ),
    *(
        Effect(name, _adam, "--optimizer adam or adamw", ("optimizer",))
        for name in ("adam_beta1", "adam_beta2", "adam_eps")
    ),
    Effect("sgd_momentum", lambda f: not _adam(f), "--optimizer sgd", ("optimizer",)),
    Effect("fp8_amax_history", lambda f: f.run.optimizer.fp8 == "delayed", "--fp8 delayed", ("fp8",)),
    Effect(
        "rotary_base",
        lambda f: f.run.model.position_embedding == "rotary",
        "--position-embedding rotary",
        ("position_embedding",),
    ),
    Effect("min_lr", _decays, "a --lr-decay-style that falls, which constant does not", ("lr_decay_style",)),
    *(
        Effect(
            name,
            lambda f: _decays(f) or f.run.schedule.lr_warmup_fraction is not None,
            "a --lr-decay-style that falls, which constant does not",
            ("lr_decay_style", "lr_warmup_fraction"),
        )
        for name in ("lr_decay_iters", "lr_decay_samples")
    ),
    *(
        Effect(name, lambda f: f.run.schedule.lr_decay_style == "wsd", "--lr-decay-style wsd", ("lr_decay_style",))
        for name in ("lr_wsd_decay_iters", "lr_wsd_decay_samples")
    ),
    *(
        Effect(name, _saves, "--save DIR", ("save",))
        for name in ("save_interval", "keep_last", "save_retain_interval", "async_save")
    ),
    *(Effect(name, _loads, "--load DIR", ("load",)) for name in ("finetune", "no_load_optim")),
    *(
        Effect(name, _instructed, "--instruction-data FILE.jsonl", ("instruction_data",))
        for name in ("valid_instruction_data", "long_conversations")
    ),
    Effect("extend_vocabulary", lambda f: f.run.checkpoint.init_from is not None, "--init-from DIR", ("init_from",)),
    *(
        Effect(name, _adapts, "--lora-rank R", ("lora_rank",))
        for name in ("lora_alpha", "lora_targets", "lora_dropout")
    ),
    Effect(
        "sample_prompt",
        _reads_text,
        "--tokenizer: ids are used as they are, and nothing reads the text",
        ("data_path", "tokenizer"),
    ),
    Effect(
        "sample_tokens",
        _reads_text,
        "--tokenizer: ids are used as they are, and nothing reads a text",
        ("data_path", "tokenizer"),
    ),
    Effect(
        "shard_recompute_inputs",
        lambda f: f.run.parallel.tp > 1 and recomputes_blocks(f.run.parallel),
        "--tp above 1 and whole blocks that are recomputed (--recompute-granularity full, --activation-memory-budget)",
        ("recompute_granularity", "activation_memory_budget", "tp"),
    ),
    # From here on: lines in the banner, no errors.
    Effect(
        "sample_tokens",
        lambda f: not _reads_text(f) or f.run.trainer.sample_prompt is not None or f.run.data.tokenizer is None,
        "--sample-prompt TEXT",
        ("data_path", "tokenizer", "sample_prompt"),
        refused=False,
    ),
    Effect("sequence_parallel", lambda f: f.run.parallel.tp > 1, "--tp above 1", ("tp",), refused=False),
    Effect(
        "partition_by",
        lambda f: f.run.parallel.pp * f.run.parallel.virtual_stages > 1,
        "--pp above 1, or --virtual-stages",
        ("pp", "virtual_stages"),
        refused=False,
    ),
    Effect("zero_stage", _shards, _SHARDED, _TIED, refused=False),
    Effect("zero_shard_size", lambda f: f.dp != 1, _SHARDED, ("tp", "pp"), refused=False),
    Effect("zero_quantized_gradients", _shards, _SHARDED, _TIED, refused=False),
    *(
        Effect(name, lambda f: f.run.parallel.zero_stage == 3, "--zero-stage 3", ("zero_stage",), refused=False)
        for name in ("zero3_gathered_bytes", "zero3_regather", "zero3_persist_below")
    ),
    *(
        Effect(name, _reduces, _SHARDED, (*_TIED, "sequence_parallel"), refused=False)
        for name in ("overlap", "grad_reduce_dtype")
    ),
    *(
        Effect(name, _several, "a second rank", (), refused=False)
        for name in ("backend", "distributed_timeout_minutes")
    ),
    Effect(
        "shared_memory",
        lambda f: _several(f) and f.run.parallel.backend in ("auto", "gloo"),
        "several ranks and --backend gloo",
        ("backend",),
        refused=False,
    ),
    Effect("rampup_batch_size", _ramps, "a START below --global-batch-size", ("global_batch_size",), refused=False),
    Effect(
        "init_method_std",
        lambda f: f.run.checkpoint.init_from is None,
        "random initial weights; --init-from gives others",
        ("init_from",),
        refused=False,
    ),
    *(
        Effect(name, _evaluates, "--eval-iters above 0", ("eval_iters",), refused=False)
        for name in ("eval_interval", "valid_data_path", "valid_instruction_data")
    ),
    Effect(
        "eval_interval",
        _validates,
        "--valid-instruction-data",
        ("instruction_data", "valid_instruction_data", "eval_iters"),
        refused=False,
    ),
    Effect(
        "eval_iters",
        lambda f: _validates(f) or not _evaluates(f),
        "--valid-instruction-data",
        ("instruction_data", "valid_instruction_data"),
        refused=False,
    ),
    Effect(
        "test_iters",
        lambda f: not f.run.data.instruction_data,
        "--split, which divides --data-path",
        ("instruction_data",),
        refused=False,
    ),
    *(
        Effect(name, _within(name), "at least as many --train-iters", ("train_iters",), refused=False)
        for name in ("save_interval", "eval_interval", "exit_interval")
    ),
    Effect("ckpt_probe", lambda f: _saves(f) or _loads(f), "--save DIR or --load DIR", ("save", "load"), refused=False),
    *(
        Effect(
            name,
            lambda f: _loads(f) and not f.run.checkpoint.finetune,
            "--load DIR, to resume from it",
            ("load", "finetune"),
            refused=False,
        )
        for name in ("override_opt_param_scheduler", "override_batch", "override_data")
    ),
)
"""Flags that ask for a result (numbers, files, a way of training) are refused. A field may have several rows."""


def _check(effect: Effect) -> Check:
    def find(f: CheckContext) -> Found:
        sentence = effect.missed(f)
        if sentence is not None:
            yield sentence

    return Check(find, frozenset((effect.field, *effect.reads)))


EFFECT_CHECKS = tuple(_check(effect) for effect in EFFECTS if effect.refused)


def without_effect(context: CheckContext) -> list[str]:
    """A line for each flag that has no effect in this valid run and is not an error."""
    told = {
        effect.field: sentence
        for effect in reversed(EFFECTS)
        if not effect.refused and (sentence := effect.missed(context))
    }
    return list(reversed(told.values()))
