"""`transformers`: BLOOM and GPT-2 with the architecture of the workload, no dropout.

precision "master" means bf16 parameters with fp32 masters, "autocast" fp32 parameters that torch casts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import BloomConfig, GPT2Config
from transformers.models.bloom.modeling_bloom import BloomForCausalLM
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

from bench.contestants.common import Step, in_one_process
from bench.workload import Workload

PRECISIONS = ("bf16", "fp32")


def bloom(work: Workload) -> nn.Module:
    """transformers has one attention for BLOOM, the eager one."""
    config = BloomConfig(
        vocab_size=work.vocabulary,
        hidden_size=work.hidden,
        n_layer=work.layers,
        n_head=work.heads,
        use_cache=False,
    )
    return BloomForCausalLM(config)


def gpt2(work: Workload, attention: str) -> nn.Module:
    """attention: "sdpa" or "eager"."""
    config = GPT2Config(
        vocab_size=work.vocabulary,
        n_positions=work.sequence,
        n_embd=work.hidden,
        n_layer=work.layers,
        n_head=work.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    config._attn_implementation = attention
    return GPT2LMHeadModel(config)


def model_of(work: Workload, shape: str, attention: str) -> nn.Module:
    torch.manual_seed(1234)
    with torch.device(work.device):
        return bloom(work) if shape == "bloom" else gpt2(work, attention)


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The logits [b, s, v] of tokens [b, s]."""
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


def build(
    work: Workload,
    shape: str = "bloom",
    attention: str = "sdpa",
    compile: bool | str = False,
    precision: str = "autocast",
) -> Step:
    return in_one_process(model_of(work, shape, attention).train(), logits_of, work, compile, precision)
