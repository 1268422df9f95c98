"""Relations that a run with low-rank adapters must satisfy."""

from __future__ import annotations

from megazero.config.checks import CheckContext, Found, check, nearest
from megazero.config.lora import BASE_BITS, TARGETS, layers_of


def _lora(f: CheckContext) -> Found:
    lora, model, start = f.run.lora, f.run.model, f.run.checkpoint
    rank = lora.lora_rank
    if rank is None:
        return
    if start.init_from is None and start.load is None:
        yield f"--lora-rank {rank} needs --init-from DIR: adapters are trained on the frozen weights of a model"
    if start.extend_vocabulary:
        yield (
            f"--lora-rank {rank} with --extend-vocabulary: adapters train no embedding, so what is added would stay "
            "what it starts as; "
            "train these rows first, or leave it out"
        )
    unknown = [name for name in lora.lora_targets if name not in TARGETS]
    if unknown:
        yield f"--lora-targets {' '.join(unknown)}: known are {', '.join(TARGETS)}"
    absent = [name for name in lora.lora_targets if name in TARGETS and name not in layers_of(model)]
    if absent:
        yield (
            f"--lora-targets {' '.join(absent)}: with --activation {model.activation} there are "
            f"{', '.join(layers_of(model))}"
        )


def _base_bits(f: CheckContext) -> Found:
    bits = f.run.lora.lora_base_bits
    if bits not in (None, *BASE_BITS):
        assert bits is not None
        valid = " or ".join(map(str, BASE_BITS))
        yield f"--lora-base-bits {bits} is not {valid}; nearest: {nearest(bits, BASE_BITS)}"
    if bits is not None and f.run.parallel.cuda_graphs:
        yield (
            f"--cuda-graphs needs weights at fixed addresses, and --lora-base-bits {bits} decodes them into new memory "
            "for each use; leave one out"
        )


LORA_CHECKS = (
    check(_lora, "lora_rank", "lora_targets", "init_from", "load", "extend_vocabulary", "activation"),
    check(_base_bits, "lora_base_bits", "cuda_graphs"),
)
