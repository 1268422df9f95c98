"""Flags and keys of other programs and the corresponding flags here, for suggestions in error messages.

They are suggested and never accepted: a name that means nearly the same elsewhere (silu in a LLaMA's config.json, where
the layer is gated) needs a decision by the user.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

SHORT: Mapping[str, str] = MappingProxyType(
    {
        # the model
        "--num-layers": "n-layers layers depth num-blocks",
        "--hidden-size": "d-model dim hidden hidden-dim width embedding-size embed-dim n-embed",
        "--num-attention-heads": "nheads n-heads heads num-heads attention-heads",
        "--num-query-groups": "gqa kv-heads n-kv-heads num-kv-heads num-query-heads multi-query mqa",
        "--ffn-hidden-size": "ffn ffn-dim d-ff intermediate mlp-dim mlp-ratio ffn-hidden-dim",
        "--seq-length": "seq-len seqlen max-seq-len max-sequence-length ctx context ctx-len n-ctx max-length",
        "--vocab-size": "vocab n-vocab",
        "--position-embedding": "positions pos-emb positional-encoding position-encoding",
        "--position-embedding rotary": "rope rotary use-rope rotary-embedding use-rotary",
        "--position-embedding alibi": "alibi use-alibi",
        "--position-embedding none": "nope no-position-embedding",
        "--rotary-base": "theta rope-base",
        "--norm rmsnorm": "rmsnorm use-rmsnorm rms-norm",
        "--norm layernorm": "layernorm layer-norm",
        "--activation": "act act-fn activation-function hidden-activation",
        "--activation gelu": "gelu",
        "--hidden-dropout, and --attention-dropout": "dropout resid-pdrop embd-pdrop residual-dropout",
        "--attention-dropout": "attn-pdrop attn-dropout",
        "--untie-embeddings-and-output-weights, for a head of its own": (
            "untie tie-embeddings share-embeddings weight-tying share-embeddings-and-output-weights"
        ),
        "--disable-bias-linear, for layers without biases": "bias add-bias-linear use-bias",
        "--init-method-std": "init-std initializer-std",
        # learning
        "--lr": "max-lr peak-lr",
        "--min-lr": "end-lr lr-min final-lr learning-rate-min",
        "--lr-decay-style": "lr-scheduler scheduler lr-schedule decay-lr lr-policy",
        "--lr-decay-style cosine": "cosine",
        "--lr-warmup-iters": "warmup warmup-iterations num-warmup-steps",
        "--weight-decay": "wd decay",
        "--adam-beta1, and --adam-beta2": "betas adam-betas",
        "--adam-eps": "eps epsilon",
        "--clip-grad": "clip gradient-clip-val max-norm",
        "--global-batch-size": "gbs global-bs total-batch-size",
        "--micro-batch-size": "mbs micro-bs micro-batch micro-train-batch-size train-batch-size-per-gpu",
        "--global-batch-size, or --micro-batch-size of one rank": "batch bs bsz",
        "--global-batch-size, which is micro-batch x dp x these steps": (
            "grad-accum grad-accum-steps gradient-accumulation accumulate-grad-batches"
        ),
        "--train-iters": "max-iters steps num-steps total-steps iters iterations num-iters train-steps max-train-steps",
        "--epochs": "num-train-epochs max-epochs",
        "--seed": "random-seed manual-seed",
        "--lora-rank": "lora lora-r lora-dim peft use-lora",
        "--lora-base-bits 4": "load-in-4bit qlora",
        "--lora-base-bits 8": "load-in-8bit",
        # how it is computed
        "--precision": "dtype amp mixed-precision torch-dtype",
        "--precision fp32": "fp32",
        "--precision fp16": "half",
        "--tp": "tensor-parallel tp-size num-tp",
        "--pp": "pipeline-parallel pp-size num-stages",
        "what the number of ranks leaves of --tp x --pp": "dp ddp data-parallel data-parallel-size dp-size",
        "--ranks on one host, or a flag of torchrun: torchrun --nproc-per-node N -m megazero pretrain": (
            "gpus num-gpus n-gpus devices"
        ),
        "a flag of torchrun, in front of -m megazero pretrain": "nnodes num-nodes node-rank master-addr master-port",
        "not built here; --tp and --sequence-parallel share the activations of a long sample": (
            "cp context-parallel-size"
        ),
        "not built here: a model is dense": "moe num-experts expert-model-parallel-size",
        "--offload-optimizer cpu": "offload cpu-offload optimizer-cpu-offload zero-offload",
        "--offload-optimizer cpu:SHARE": "optimizer-offload-fraction",
        "--offload-optimizer nvme": "nvme-offload zero-infinity",
        "--nvme-path": "nvme-offload-dir offload-folder nvme swap-dir",
        "--late-update, which updates beside the next step's first passes": "overlap-cpu-optimizer-d2h-h2d",
        "--offload-activations": "cpu-offloading cpu-offloading-num-layers activation-offload",
        "--zero-stage 2, which shards gradients and optimizer state": "fsdp fsdp2 use-fsdp full-shard fsdp-config",
        "--zero-shard-size": "data-parallel-shard-degree dp-shard mics-shard-size fsdp-size hsdp",
        "--zero-shard-size, which is dp divided by their number": "num-distributed-optimizer-instances",
        "--zero-stage": "zero1 zero2 zero-1 zero-2 zero-3 zero-optimization stage",
        "--attention flash": "flash flash-attn use-flash-attention flash-attention",
        "--attention": "sdpa attn-implementation",
        "--recompute-granularity": "recompute remat activation-checkpointing gradient-checkpointing-enable",
        "--distributed-timeout-minutes": "timeout nccl-timeout",
        # data, and what is kept
        "--data-path": "data dataset data-dir train-data train-data-dir",
        "--tokenizer": "tokenizer-name",
        "--num-workers": "workers num-data-workers dataloader-workers",
        "--save": "out-dir save-dir ckpt-dir checkpoint-dir out",
        "--load": "ckpt checkpoint load-dir restart restore",
        "--init-from": "pretrained model model-name pretrained-model-name-or-path",
        "--save-interval": "save-every save-freq checkpoint-every",
        "--eval-interval": "eval-every eval-freq val-check-interval",
        "--eval-iters": "eval-batches limit-val-batches",
        "--log-interval": "log-every log-freq log-every-n-steps",
        "--tensorboard-dir, or --metrics-file for JSON lines": ("report-to tensorboard tb log-dir"),
        "--wandb": "wandb-project wandb-log project",
        "--wandb TEAM/PROJECT": "wandb-entity wandb-team",
        "the variable WANDB_NAME beside --wandb": "run-name wandb-name wandb-run-name wandb-exp-name",
        "--mlflow": "mlflow-experiment mlflow-experiment-name",
    }
)
"""Flag here -> short names that other programs, nanoGPT among them, use for it, with blanks between."""

# An entry means, for example: --max-steps of another program is --train-iters here. Underscores and case do not matter.
FLAGS: Mapping[str, str] = MappingProxyType(
    {
        # Megatron-LM and Megatron-DeepSpeed
        "attention-backend": "--attention",
        "attention-softmax-in-fp32": "--attention softmax, which always is in fp32",
        "accumulate-allreduce-grads-in-fp32": "--grad-reduce-dtype fp32, which is the default",
        "checkpoint-activations": "--recompute-granularity full",
        "deepspeed-activation-checkpointing": "--recompute-granularity full",
        "fp8-amax-history-len": "--fp8-amax-history",
        "fp8-format": "--fp8",
        "fp8-hybrid": "--fp8",
        "group-query-attention": "--num-query-groups",
        "merge-file": "--tokenizer gpt2 --tokenizer-path FOLDER",
        "mock-data": "what a run without --data-path has: text that is on every machine",
        "no-pipeline-parallel": "--pp 1",
        "num-layers-per-virtual-pipeline-stage": "--virtual-stages",
        "num-microbatches": "--global-batch-size, which is micro-batch x dp x their number",
        "overlap-grad-reduce": "--overlap, which is the default",
        "overlap-param-gather": "--overlap, which is the default",
        "pipeline-parallel-size": "--pp",
        "position-embedding-type": "--position-embedding",
        "recompute-activations": "--recompute-granularity selective",
        "rotary-percent": "--position-embedding rotary, which turns the whole head",
        "swiglu": "--activation swiglu",
        "tensor-parallel-size": "--tp",
        "tokenizer-model": "--tokenizer-path",
        "tokenizer-name-or-path": "--tokenizer-path",
        "tokenizer-type": "--tokenizer",
        "train-data-path": "--data-path",
        "use-alibi-position-embeddings": "--position-embedding alibi",
        "use-distributed-optimizer": "--zero-stage 1",
        "use-flash-attn": "--attention flash",
        "use-flash-attn-v2": "--attention flash",
        "use-rotary-position-embeddings": "--position-embedding rotary",
        "vocab-file": "--tokenizer gpt2 --tokenizer-path FOLDER",
        # transformers: training arguments
        "adam-epsilon": "--adam-eps",
        "block-size": "--seq-length",
        "dataloader-num-workers": "--num-workers",
        "dataset-name": "--data-path",
        "ddp-timeout": "--distributed-timeout-minutes",
        "deepspeed": "--deepspeed-config",
        "eval-steps": "--eval-interval",
        "gradient-accumulation-steps": "--global-batch-size, which is micro-batch x dp x these steps",
        "gradient-checkpointing": "--recompute-granularity full",
        "label-smoothing-factor": "--label-smoothing",
        "learning-rate": "--lr",
        "logging-dir": "--tensorboard-dir",
        "logging-steps": "--log-interval",
        "lr-scheduler-type": "--lr-decay-style",
        "max-grad-norm": "--clip-grad",
        "max-seq-length": "--seq-length",
        "max-steps": "--train-iters",
        "model-name-or-path": "--init-from",
        "optim": "--optimizer",
        "output-dir": "--save",
        "per-device-eval-batch-size": "--micro-batch-size",
        "per-device-train-batch-size": "--micro-batch-size",
        "resume-from-checkpoint": "--load",
        "save-steps": "--save-interval",
        "save-total-limit": "--keep-last",
        "torch-compile": "--compile",
        "train-file": "--data-path",
        "warmup-ratio": "--lr-warmup-fraction",
        "warmup-steps": "--lr-warmup-iters",
        # transformers: config.json
        "hidden-act": "--activation",
        "hidden-dropout-prob": "--hidden-dropout",
        "initializer-range": "--init-method-std",
        "intermediate-size": "--ffn-hidden-size",
        "layer-norm-epsilon": "--norm-epsilon",
        "n-embd": "--hidden-size",
        "n-head": "--num-attention-heads",
        "n-layer": "--num-layers",
        "n-positions": "--max-position-embeddings",
        "num-hidden-layers": "--num-layers",
        "num-key-value-heads": "--num-query-groups",
        "rms-norm-eps": "--norm-epsilon",
        "rope-theta": "--rotary-base",
        "tie-word-embeddings": "--untie-embeddings-and-output-weights, for a head of its own",
        # DeepSpeed's JSON
        "offload-optimizer-device": "--offload-optimizer",
        "gradient-clipping": "--clip-grad",
        "initial-scale-power": "--initial-loss-scale, which is 2 to that power",
        "reduce-bucket-size": "--bucket-size",
        "steps-per-print": "--log-interval",
        "train-batch-size": "--global-batch-size",
        "train-micro-batch-size-per-gpu": "--micro-batch-size",
        "warmup-num-steps": "--lr-warmup-iters",
        # torch and everybody
        "batch-size": "--global-batch-size, or --micro-batch-size of one rank",
        "context-length": "--seq-length",
        "grad-clip": "--clip-grad",
        "init-from-checkpoint": "--init-from",
        "local-rank": "set by torchrun in each rank's environment",
        "nproc-per-node": "--ranks on one host, or a flag of torchrun, in front of -m megazero pretrain",
        "resume": "--load",
        "zero": "--zero-stage",
    }
    | {word: ours for ours, words in SHORT.items() for word in words.split()}
)
"""Flag of another program, without leading dashes -> its name here, which begins with a flag if there is one."""

OF_COMMANDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "--load": (*("model", "model-path", "model-name-or-path", "pretrained", "checkpoint", "ckpt", "path"),),
        "--max-new-tokens": ("max-tokens", "max-length", "n-predict", "num-tokens", "max-gen-len"),
        "--num-samples": ("n", "num-return-sequences", "num-completions"),
        "--batch-size": ("bs", "bsz", "micro-batch-size"),
        "--micro-batch-size": ("bs", "bsz", "batch-size", "per-device-eval-batch-size"),
        "--prompt": ("text", "input", "query"),
        "--input": ("text", "file", "files", "data", "dataset", "train-file"),
        "--output-prefix": ("out-dir", "save"),
        "--output": ("out-dir", "save", "save-dir"),
        "--to": ("target", "output-format", "save-model-type"),
        "--append-eod": ("append-eos", "add-eos"),
        "--workers": ("num-workers", "num-proc"),
    }
)
"""Flag of a command other than pretrain -> names that other programs use for it."""

_FORMATS = MappingProxyType(
    {"transformers": "hf", "huggingface": "hf", "megatron-lm": "megatron", "deepspeed": "megatron-deepspeed"}
)
CHOICES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "position_embedding": {"rope": "rotary", "absolute": "learned", "learned-absolute": "learned", "nope": "none"},
        "activation": {
            "silu": "swiglu",
            "swish": "swiglu",
            "gelu-new": "gelu-tanh",
            "gelu-fast": "gelu-tanh",
            "gelu-pytorch-tanh": "gelu-tanh",
            "gelu-python": "gelu",
        },
        "norm": {"rms-norm": "rmsnorm", "layer-norm": "layernorm", "ln": "layernorm"},
        "lr_decay_style": {
            "constant-with-warmup": "constant",
            "inverse-sqrt": "inverse-square-root",
            "warmup-stable-decay": "wsd",
            "warmuplr": "constant",
            "warmupdecaylr": "linear",
            "warmupcosinelr": "cosine",
        },
        "tokenizer": {
            "gpt2bpetokenizer": "gpt2",
            "bpe": "gpt2",
            "huggingfacetokenizer": "hf",
            "huggingface": "hf",
            "pretrainedfromhf": "hf",
            "auto": "hf",
            "tokenizers": "hf",
            "sentencepiecetokenizer": "sentencepiece",
            "gptsentencepiecetokenizer": "sentencepiece",
            "llama2tokenizer": "sentencepiece",
            "spm": "sentencepiece",
        },
        "precision": {
            "bfloat16": "bf16",
            "bf16-mixed": "bf16",
            "float16": "fp16",
            "half": "fp16",
            "float32": "fp32",
            "float": "fp32",
            "no": "fp32",
            "float64": "fp64",
            "double": "fp64",
        },
        "fp8": {"e4m3": "current", "hybrid": "current", "tensorwise": "current"},
        "optimizer": {"adamw-torch": "adamw", "adamw-torch-fused": "adamw", "fusedadam": "adamw", "adamw-hf": "adamw"},
        "recompute_granularity": {
            "attention": "selective",
            "block": "full",
            "uniform": "full",
            "layer": "full",
            "true": "full",
        },
        "attention": {
            "flash-attention-2": "flash",
            "fused": "auto",
            "sdpa": "auto",
            "eager": "softmax",
            "unfused": "softmax",
            "local": "softmax",
            "flex-attention": "flex",
        },
        "pipeline_schedule": {
            "zero-bubble": "zb-h1",
            "interleaved1f1b": "interleaved",
            "interleavedzerobubble": "zb-v",
            "zbv": "zb-v",
            "zbvzerobubble": "zb-v",
        },
        "device": {"gpu": "cuda", "nvidia": "cuda"},
        "backend": {"ccl": "gloo", "mpich": "mpi"},
        "to": _FORMATS,
        "format": _FORMATS,
        "partition_by": {"uniform": "parameters", "type:transformer": "parameters"},
    }
)
"""Field, or `to` and `format` of checkpoints -> value of another program -> value here of the same meaning."""


def normalise_flag(word: str) -> str:
    """A word in the form in which words are compared: without leading dashes, underscores as dashes, in lower case."""
    return word.lstrip("-").replace("_", "-").lower()


def our_flag_for(word: str) -> str | None:
    """The name here of another program's flag or key; None for an unknown one."""
    return FLAGS.get(normalise_flag(word))


def our_value_for(field: str, word: str) -> str | None:
    """The value here that corresponds to another program's value of this field; None for an unknown one."""
    return CHOICES.get(field, {}).get(normalise_flag(word))
