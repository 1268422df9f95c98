"""`transformers`: BLOOM and GPT-2 with the architecture of the workload, no dropout.

precision "master" is bf16 parameters with fp32 masters beside them, "autocast" fp32 parameters cast by torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BloomConfig, GPT2Config
from transformers.models.bloom.modeling_bloom import BloomForCausalLM
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

from bench.contestants.common import AutocastAdamW, MasterAdamW, compiled, loss_of
from bench.workload import Batches, Workload


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
    return bloom(work) if shape == "bloom" else gpt2(work, attention)


def build(
    work: Workload, shape: str = "bloom", attention: str = "sdpa", compile: bool = False, precision: str = "autocast"
) -> Callable[[], float]:
    model, batches = model_of(work, shape, attention), Batches(work)
    optimizer: Any
    if precision == "master":
        model = model.to(torch.bfloat16)
        optimizer = MasterAdamW(model.parameters(), work)
    else:
        optimizer = AutocastAdamW(model.parameters(), work)
    model.train()

    def forward(tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            logits = model(input_ids=tokens, use_cache=False).logits
        return loss_of(logits, labels)

    run = compiled(forward, compile)

    def step() -> float:
        loss = run(*batches())
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step
