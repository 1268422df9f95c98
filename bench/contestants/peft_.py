"""PEFT's adapters on BLOOM of `transformers`, whose blocks have linear layers of bitsandbytes in NF4: QLoRA
(arXiv:2305.14314), with double quantisation as its authors have it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bench.contestants.common import Step, in_one_process
from bench.contestants.transformers_ import logits_of, model_of
from bench.workload import Workload

PRECISIONS = ("bf16",)


def in_four_bits(blocks: nn.Module, dtype: torch.dtype) -> None:
    """Put bitsandbytes' layers in the place of the linear layers of these blocks. They multiply in `dtype`."""
    import bitsandbytes

    for module in list(blocks.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear):
                sizes = layer.in_features, layer.out_features, layer.bias is not None
                coded = bitsandbytes.nn.Linear4bit(*sizes, compute_dtype=dtype, quant_type="nf4")
                coded.load_state_dict(layer.state_dict())
                setattr(module, name, coded.to("cpu"))


def build(work: Workload, rank: int = 16, compile: bool | str = False) -> Step:
    """rank: of the adapters of all linear layers of a block."""
    import peft

    model: Any = model_of(work, "bloom", "eager").to(torch.bfloat16)
    in_four_bits(model.transformer.h, torch.bfloat16)
    targets = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]
    settings = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM")
    tuned = peft.get_peft_model(model, settings)
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # as PEFT has them under autocast
    return in_one_process(tuned.train(), logits_of, work, compile, "autocast")
