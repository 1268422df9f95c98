"""Names that other programs have for what is called otherwise here: a mistake in them gets the right suggestion.

They are suggested and never accepted: a value that means nearly the same elsewhere (silu in a LLaMA's config.json, where the layer
is gated) should be read by the person who asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# Read --max-steps as "--max-steps of another program is our --train-iters". Underscores and case do not matter.
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
        "max-length": "--seq-length",
        "max-seq-length": "--seq-length",
        "max-steps": "--train-iters",
        "model-name-or-path": "--init-from",
        "optim": "--optimizer",
        "output-dir": "--save",
        "per-device-eval-batch-size": "--micro-batch-size",
        "per-device-train-batch-size": "--micro-batch-size",
        "resume-from-checkpoint": "--load",
        "save-steps": "--save-interval",
        "save-total-limit": "--keep-last-k",
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
        "local-rank": "what torchrun tells each rank in its environment",
        "nproc-per-node": "a flag of torchrun: torchrun --nproc-per-node N pretrain_gpt.py ...",
        "resume": "--load",
        "zero": "--zero-stage",
    }
)
"""Flag of another program, without its dashes -> what it is here, a flag first where there is one."""

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
        "recompute_granularity": {"attention": "selective", "block": "full", "uniform": "full", "layer": "full", "true": "full"},
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
        "partition_by": {"uniform": "parameters", "type:transformer": "parameters"},
    }
)
"""Field -> value of another program -> ours of the same meaning."""


def spelled(word: str) -> str:
    """How words are compared: without dashes before them, underscores as dashes, in small letters."""
    return word.lstrip("-").replace("_", "-").lower()


def flag_elsewhere(word: str) -> str | None:
    """What a flag (or a file's key) of another program is here; None for one that is not known."""
    return FLAGS.get(spelled(word))


def choice_elsewhere(field: str, word: str) -> str | None:
    """Our value for one that another program has for this field."""
    return CHOICES.get(field, {}).get(spelled(word))
