"""What of a run takes no part in its proof, and why: flags by flags, in the order in which a reader meets them.

All other settings are those of the small run too, but for `MADE_SMALL`, of which `shrink` keeps the structure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from megazero.config.lengths import Length, measured_name
from megazero.config.options import Option, run_options
from megazero.config.schema import Run

MADE_SMALL = frozenset(
    "num_layers hidden_size num_attention_heads num_query_groups kv_channels layer_pattern ffn_hidden_size vocab_size "
    "make_vocab_size_divisible_by seq_length max_position_embeddings zero_shard_size zero3_gathered_bytes "
    "zero3_persist_below recompute_num_layers vertical_group_size partition partition_by bucket_size micro_batch_size "
    "global_batch_size train_length lr_wsd_decay offload_optimizer offload_params offload_gradients "
    "offload_activations nvme_path files_path nvme_buffer_bytes".split()
)
"""Sizes, and folders. What they make differ between layers, stages and ranks is there in the small run."""


class LeftOut(NamedTuple):
    """Settings that take no part. names: of fields, one blank between two."""

    names: str
    why: str


LEFT_OUT = (
    LeftOut("precision", "the small run is in float64, where a fault is no rounding"),
    LeftOut("fp8 fp8_amax_history", "8-bit products round; in fp64 nothing does"),
    LeftOut(
        "loss_scale initial_loss_scale loss_scale_window hysteresis min_loss_scale", "float64 has no scale of the loss"
    ),
    LeftOut("grad_reduce_dtype", "gradients are reduced in float64"),
    LeftOut("zero_quantized_weights", "blocks of int8 round, other ones on each layout"),
    LeftOut(
        "zero_quantized_gradients zero_gradient_error_feedback", "blocks of integers round, other ones on each layout"
    ),
    LeftOut("lr_warmup", "its first step has the rate 0, which would hide what an update does"),
    LeftOut(
        "lr min_lr lr_decay", "the rate begins at 0.003 and falls over five steps, so that few steps show an update"
    ),
    LeftOut("rampup_batch_size", "each step has a whole batch"),
    LeftOut("clip_grad", "the third step is clipped to half of its norm, and no other"),
    LeftOut("adam_eps", "it is 0.001, since less would make a whole step of what is rounded"),
    LeftOut("init_method_std", "weights begin larger, so that each layer counts in the loss"),
    LeftOut("max_skipped_steps", "one step is skipped"),
    LeftOut("optimizer_impl", "it computes in fp32"),
    LeftOut("compile", "what torch.compile makes is for the device"),
    LeftOut("cuda_graphs", "there is no card"),
    LeftOut("attention", "there is no card"),
    LeftOut("device", "the CPU computes what the card would"),
    LeftOut("backend shared_memory distributed_timeout_minutes", "the ranks are threads of one process"),
    LeftOut("deterministic", "kernels of the CPU are the same in each run"),
    LeftOut("activation_memory_budget", "every second block is computed again as a whole instead"),
    LeftOut("placement placement_rates", "what lies where is as the other flags say"),
    LeftOut("device_memory_budget host_memory_budget", "they refuse a run, and change no number"),
    LeftOut("nvme_checkpoint", "no process is killed"),
    LeftOut(
        "data_path split valid_data_path instruction_data valid_instruction_data long_conversations tokenizer "
        "tokenizer_path eod_id eod_mask_loss data_cache_path num_workers",
        "the proof makes samples of its own, some of whose tokens do not count",
    ),
    LeftOut("async_save", "checkpoints are written while the step waits"),
    LeftOut(
        "save save_interval keep_last save_retain_interval no_save_optim ckpt_probe",
        "the small run is saved once, behind its second step, with all that it has",
    ),
    LeftOut(
        "load init_from extend_vocabulary finetune no_load_optim override_opt_param_scheduler override_batch "
        "override_data",
        "the small run begins with random weights, and goes on from its own checkpoints",
    ),
    LeftOut(
        "eval_interval eval_iters eval_at_start test_iters exit_interval exit_duration_in_mins",
        "the proof makes four steps, and evaluates one batch behind the second",
    ),
    LeftOut(
        "log_interval metrics_file tensorboard_dir wandb wandb_group mlflow memory_trace report_json hardware "
        "sinks sample_prompt sample_tokens",
        "nothing is printed or recorded of the small run",
    ),
)

_TAKES_PART: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        "precision": lambda value: value == "fp64",
        "attention": lambda value: value not in ("flash-attn", "flex"),
        "device": lambda value: value != "cuda",  # the CPU is what computes, and auto names no device
        "backend": lambda value: value in ("auto", "gloo", "nccl"),  # which says whether the ways of NCCL are taken
    }
)
"""Of settings of the table whose default alone does not say it: whether a value takes part."""


def notes(run: Run) -> tuple[str, ...]:
    """What of a run takes no part in its proof: flags with a reason, a sentence each."""
    made = list[str]()
    for row in LEFT_OUT:
        known = [run_options()[name] for name in row.names.split()]
        flags = [_flag(option, option.value_in(run)) for option in known if _is_left_out(option, run)]
        made += [f"{', '.join(flags)}: {row.why}"] if flags else []
    return tuple(made)


def _is_left_out(option: Option, run: Run) -> bool:
    value = option.value_in(run)
    takes_part = _TAKES_PART.get(option.name, lambda value: value == option.default)
    return not takes_part(value)


def _flag(option: Option, value: Any) -> str:
    """The flag that gives a field this value."""
    if isinstance(value, Length):
        return "--" + measured_name(option.name, value.measure).replace("_", "-")
    if option.name == "precision":
        return f"--precision {value}"  # the default too is none that is proven
    return option.negations[0] if value is False and option.default is True else option.flag
