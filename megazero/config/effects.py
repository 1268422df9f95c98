"""Flags that would have no effect in a run, as a table: the condition of an effect, and what is missing.

Only flags of the command line are checked, and only if their value is not the default. Presets and files may contain
settings for other runs, and a flag's default takes back what a script has set. A flag without effect is an error if it
asks for a result that this run cannot have at any size. It is a line in the banner if it would have an effect with
another size, layout or data, as in a script for several runs. This table knows neither the machine nor the files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megazero.config import conditions as when
from megazero.config.checks import Check, CheckContext, Found
from megazero.config.derive import gathers_parameters, recomputes_blocks, shards_parameters
from megazero.config.lengths import Length
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
        if isinstance(value, Length):
            return f"{value.behind(known.flag)} has no effect without {self.needs}"
        words = value if isinstance(value, tuple) else (value,)
        shown = " ".join(f"{word:g}" if isinstance(word, float) else str(word) for word in words)
        return f"{known.flag} {shown} has no effect without {self.needs}"


_DYNAMIC = ("precision", "loss_scale")
_TIED = ("tp", "pp", "pipeline_schedule", "virtual_stages", "untie_embeddings_and_output_weights")
_GATHERS = "--zero-stage 3, --offload-params or --lora-base-bits"
_BROUGHT = "zero_stage", "offload_params", "lora_base_bits"
_OFFLOAD = "offload_optimizer", "offload_params", "offload_gradients", "offload_activations"
_SHARDED = "several data-parallel ranks; here dp = ranks / (tp x pp) is 1"

EFFECTS = (
    Effect(
        "zero_quantized_weights",
        lambda f: f.run.parallel.zero_stage > 0,
        "--zero-stage 1, 2 or 3: with 0 no parameters are gathered",
        ("zero_stage",),
    ),
    Effect("zero_gradient_error_feedback", when.quantises, "--zero-quantized-gradients", ("zero_quantized_gradients",)),
    Effect(
        "grad_reduce_dtype",
        lambda f: not when.quantises(f),
        "--zero-quantized-gradients none: blocks are made of what is summed up",
        ("zero_quantized_gradients",),
    ),
    Effect("loss_scale", when.fp16, "--precision fp16", ("precision",)),
    *(
        Effect(name, when.dynamic, "--precision fp16 and a dynamic loss scale (no --loss-scale)", _DYNAMIC)
        for name in ("initial_loss_scale", "loss_scale_window", "hysteresis", "min_loss_scale")
    ),
    *(
        Effect(name, when.adam, "--optimizer adam or adamw", ("optimizer",))
        for name in ("adam_beta1", "adam_beta2", "adam_eps")
    ),
    Effect("sgd_momentum", lambda f: not when.adam(f), "--optimizer sgd", ("optimizer",)),
    Effect("fp8_amax_history", lambda f: f.run.optimizer.fp8 == "delayed", "--fp8 delayed", ("fp8",)),
    Effect(
        "rotary_base",
        lambda f: f.run.model.position_embedding == "rotary",
        "--position-embedding rotary",
        ("position_embedding",),
    ),
    Effect("min_lr", when.decays, "a --lr-decay-style that falls, which constant does not", ("lr_decay_style",)),
    Effect(
        "lr_decay",
        lambda f: when.decays(f) or when.warms_up_by_a_share(f),
        "a --lr-decay-style that falls, which constant does not",
        ("lr_decay_style", "lr_warmup"),
    ),
    Effect(
        "lr_wsd_decay", lambda f: f.run.schedule.lr_decay_style == "wsd", "--lr-decay-style wsd", ("lr_decay_style",)
    ),
    *(
        Effect(name, when.saves, "--save DIR", ("save",))
        for name in ("save_interval", "keep_last", "save_retain_interval", "async_save", "no_save_optim")
    ),
    *(Effect(name, when.loads, "--load DIR", ("load",)) for name in ("finetune", "no_load_optim")),
    *(
        Effect(name, when.instructed, "--instruction-data FILE.jsonl", ("instruction_data",))
        for name in ("valid_instruction_data", "long_conversations")
    ),
    Effect("extend_vocabulary", lambda f: f.run.checkpoint.init_from is not None, "--init-from DIR", ("init_from",)),
    *(
        Effect(name, when.adapts, "--lora-rank R", ("lora_rank",))
        for name in ("lora_alpha", "lora_targets", "lora_dropout", "lora_base_bits")
    ),
    Effect("lora_base_qkv", lambda f: f.run.lora.lora_base_bits is not None, "--lora-base-bits", ("lora_base_bits",)),
    Effect(
        "sample_prompt",
        when.reads_text,
        "--tokenizer: ids are used as they are, and nothing reads the text",
        ("data_path", "tokenizer"),
    ),
    Effect(
        "sample_tokens",
        when.reads_text,
        "--tokenizer: ids are used as they are, and nothing reads a text",
        ("data_path", "tokenizer"),
    ),
    Effect(
        "shard_recompute_inputs",
        lambda f: f.run.parallel.tp > 1 and recomputes_blocks(f.run.parallel),
        "--tp above 1 and whole blocks that are recomputed (--recompute-granularity full, --activation-memory-budget)",
        ("recompute_granularity", "activation_memory_budget", "tp"),
    ),
    Effect(
        "nvme_path",
        lambda f: when.rests_on_disks(f) or when.searches(f),
        "--offload-optimizer nvme, or the same of params, gradients or activations: nothing rests on disks",
        (*_OFFLOAD, "placement"),
    ),
    Effect(
        "nvme_checkpoint",
        when.state_on_disks,
        "--offload-optimizer nvme: no optimizer state rests on disks",
        ("offload_optimizer",),
    ),
    Effect(
        "placement_rates",
        lambda f: when.searches(f) or f.run.trainer.memory_trace is not None,
        "--placement auto or --memory-trace",
        ("placement", "memory_trace"),
    ),
    Effect(
        "nvme_buffer_bytes",
        lambda f: when.moves_parts(f) or when.searches(f),
        "--offload-optimizer or --offload-gradients, --offload-params nvme or --offload-activations nvme",
        (*_OFFLOAD, "placement"),
    ),
    # From here on: lines in the banner, no errors.
    Effect(
        "host_memory_budget",
        lambda f: when.leaves_device(f) or when.searches(f),
        "--offload-optimizer, or the same of params, gradients or activations: nothing rests in host memory",
        (*_OFFLOAD, "placement"),
        refused=False,
    ),
    Effect(
        "sample_tokens",
        lambda f: not when.reads_text(f) or f.run.trainer.sample_prompt is not None or f.run.data.tokenizer is None,
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
    Effect("zero_stage", when.shards, _SHARDED, _TIED, refused=False),
    Effect("zero_shard_size", lambda f: f.dp != 1, _SHARDED, ("tp", "pp"), refused=False),
    Effect("zero_quantized_gradients", when.shards, _SHARDED, _TIED, refused=False),
    *(
        Effect(name, lambda f: gathers_parameters(f.run), _GATHERS, _BROUGHT, refused=False)
        for name in ("zero3_gathered_bytes", "zero3_regather")
    ),
    Effect(
        "micro_batch_order",
        when.accumulates,
        "several micro-batches in a step: --global-batch-size above --micro-batch-size x dp",
        ("global_batch_size", "micro_batch_size", "tp", "pp"),
        refused=False,
    ),
    Effect(
        "vertical_group_size",
        when.vertical,
        "--micro-batch-order vertical",
        ("micro_batch_order", "offload_params"),
        refused=False,
    ),
    Effect(
        "zero3_persist_below",
        lambda f: shards_parameters(f.run.parallel, f.run.offload) or bool(f.run.offload.offload_params),
        "--zero-stage 3 or --offload-params",
        ("zero_stage", "offload_params"),
        refused=False,
    ),
    *(
        Effect(name, when.reduces, _SHARDED, (*_TIED, "sequence_parallel"), refused=False)
        for name in ("overlap", "grad_reduce_dtype")
    ),
    *(
        Effect(name, when.several, "a second rank", (), refused=False)
        for name in ("backend", "distributed_timeout_minutes")
    ),
    Effect(
        "shared_memory",
        lambda f: when.several(f) and f.run.parallel.backend in ("auto", "gloo"),
        "several ranks and --backend gloo",
        ("backend",),
        refused=False,
    ),
    Effect("rampup_batch_size", when.ramps, "a START below --global-batch-size", ("global_batch_size",), refused=False),
    Effect(
        "init_method_std",
        lambda f: f.run.checkpoint.init_from is None,
        "random initial weights; --init-from gives others",
        ("init_from",),
        refused=False,
    ),
    *(
        Effect(name, when.evaluates, "--eval-iters above 0", ("eval_iters",), refused=False)
        for name in ("eval_interval", "valid_data_path", "valid_instruction_data")
    ),
    Effect(
        "eval_interval",
        when.validates,
        "--valid-instruction-data",
        ("instruction_data", "valid_instruction_data", "eval_iters"),
        refused=False,
    ),
    Effect(
        "eval_iters",
        lambda f: when.validates(f) or not when.evaluates(f),
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
        Effect(name, when.within(name), "at least as many --train-iters", ("train_iters",), refused=False)
        for name in ("save_interval", "eval_interval", "exit_interval")
    ),
    Effect(
        "ckpt_probe",
        lambda f: when.saves(f) or when.loads(f),
        "--save DIR or --load DIR",
        ("save", "load"),
        refused=False,
    ),
    *(
        Effect(
            name,
            lambda f: when.loads(f) and not f.run.checkpoint.finetune,
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
