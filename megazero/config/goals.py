"""What a person wants to do with a run, and the flags for each goal: the order of `--help` and `--help-all`.

The sections of `Run` say where a setting stands in a file. A person who looks for a flag has a goal instead, and the
flags of one goal are often fields of several sections.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """The listed flags for one goal.

    heading   the goal, in the words of a person
    fields    fields of a run, in the order of the help
    sections  sections of a run whose other listed fields serve this goal, too: a new field needs no line here
    """

    heading: str
    fields: tuple[str, ...]
    sections: tuple[str, ...] = ()

    def all_fields(self, section_of: Mapping[str, str]) -> list[str]:
        """The fields in the order of the help. section_of: the section of every listed field."""
        of_others = {name for goal in GOALS for name in goal.fields}
        left = {name: section for name, section in section_of.items() if name not in of_others}
        return [*self.fields, *(name for name, section in left.items() if section in self.sections)]


GOALS = (
    Goal(
        "the model",
        (
            *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "seq_length"),
            *("vocab_size", "make_vocab_size_divisible_by", "position_embedding", "max_position_embeddings", "norm"),
            *("activation", "embedding_layernorm", "untie_embeddings_and_output_weights", "disable_bias_linear"),
            *("hidden_dropout", "attention_dropout", "init_method_std"),
        ),
        ("model",),
    ),
    Goal(
        "the data",
        (
            *("data_path", "split", "valid_data_path", "tokenizer", "tokenizer_path", "eod_id", "data_cache_path"),
            *("num_workers", "seed"),
        ),
        ("data",),
    ),
    Goal(
        "how long it trains, and in what batches",
        (
            *("train_length", "micro_batch_size", "global_batch_size", "rampup_batch_size"),
            *("exit_interval", "exit_duration_in_mins"),
        ),
    ),
    Goal(
        "how fast it learns (lengths are all in iterations or all in samples)",
        (
            *("lr", "min_lr", "lr_decay_style", "lr_warmup", "lr_decay"),
            *("optimizer", "weight_decay", "adam_beta1", "adam_beta2"),
            *("adam_eps", "clip_grad", "label_smoothing", "z_loss"),
        ),
        ("schedule", "optimizer"),
    ),
    Goal(
        "the precision",
        ("precision", "fp8", "initial_loss_scale", "loss_scale_window", "hysteresis", "min_loss_scale"),
    ),
    Goal(
        "how ranks share the work (data parallelism, dp, is ranks / (tp x pp))",
        (
            *("tp", "pp", "zero_stage", "zero_shard_size", "sequence_parallel", "pipeline_schedule", "virtual_stages"),
            *("micro_batch_order", "device", "backend", "cuda_graphs", "distributed_timeout_minutes"),
        ),
        ("parallel",),
    ),
    Goal(
        "less memory",
        (
            *("recompute_granularity", "recompute_num_layers", "activation_memory_budget", "device_memory_budget"),
            "host_memory_budget",
        ),
    ),
    Goal(
        "state off the device",
        (
            *("offload_optimizer", "offload_params", "offload_gradients", "offload_activations", "late_update"),
            *("nvme_path", "nvme_checkpoint", "placement"),
        ),
        ("offload",),
    ),
    Goal(
        "save and resume",
        (
            *("save", "load", "save_interval", "keep_last", "async_save", "no_load_optim"),
            "override_opt_param_scheduler",
        ),
        ("checkpoint",),
    ),
    Goal(
        "fine-tune",
        (
            *("init_from", "finetune", "instruction_data", "valid_instruction_data", "lora_rank", "lora_alpha"),
            "lora_base_bits",
        ),
        ("lora",),
    ),
    Goal(
        "watch and log",
        ("eval_interval", "eval_iters", "log_interval", "metrics_file", "tensorboard_dir", "sinks"),
        ("trainer",),
    ),
)
