"""Values of other programs and the corresponding values here. They are suggested in messages and never accepted."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

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
