"""Layouts in which `megazero verify-layout` looks for a planted fault: a few for each kind of file, tried in order."""

from __future__ import annotations

from typing import NamedTuple

ANY = "--global-batch-size 24 --weight-decay 0.1"
VOCABULARY = "--vocab-size 1001"
"""Of a layout that names none: it needs padding."""


class Layout(NamedTuple):
    """The flags of a run, and the number of its ranks. adapters: on the frozen weights of a checkpoint."""

    flags: str
    ranks: int
    adapters: bool = False

    @property
    def words(self) -> list[str]:
        """The command line; _ stands for a blank in a word."""
        given = self.flags if "--vocab-size" in self.flags else f"{VOCABULARY} {self.flags}"
        return [word.replace("_", " ") for word in f"{ANY} {given}".split()]


DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
LAYOUTS = {
    "tensor": Layout(
        "--num-layers 2 --tp 2 --position-embedding alibi --num-attention-heads 6 --label-smoothing 0.1 --z-loss 1e-3 "
        f"--query-key-norm all {DROPOUT}",
        2,
    ),
    "sequence": Layout(
        "--num-layers 2 --tp 2 --sequence-parallel --position-embedding learned --document-mask --eod-id 0 "
        f"--recompute-granularity full --query-key-norm head {DROPOUT}",
        2,
    ),
    "packed": Layout(
        "--num-layers 2 --tp 2 --sequence-parallel --position-embedding learned --instruction-data talks.jsonl "
        "--tokenizer byte",
        2,
    ),
    "grid": Layout(
        "--num-layers 2 --tp 2 --pp 2 --zero-stage 1 --recompute-granularity full --shard-recompute-inputs "
        f"--optimizer adam {DROPOUT}",
        8,
    ),
    "sharded": Layout(
        "--num-layers 4 --tp 2 --sequence-parallel --pp 2 --zero-stage 2 --pipeline-schedule zb-v --virtual-stages 2", 8
    ),
    "gathered": Layout(
        "--num-layers 4 --zero-stage 3 --late-update --bucket-size 1000 --untie-embeddings-and-output-weights "
        "--vocab-size 50000",
        2,
    ),
    "late": Layout("--num-layers 2 --pp 2 --zero-stage 1 --late-update", 4),
    "hybrid": Layout("--num-layers 4 --pp 2 --virtual-stages 2 --zero-stage 2 --zero-shard-size 2 --late-update", 8),
    "tiers": Layout(
        "--num-layers 4 --tp 2 --sequence-parallel --zero-stage 2 --offload-optimizer cpu --offload-gradients cpu "
        "--offload-params cpu:0.6 --offload-activations cpu --ema-decay 0.9 --save runs/x",
        4,
    ),
    "host": Layout("--num-layers 4 --pp 2 --zero-stage 1 --offload-optimizer cpu --bucket-size 1000", 4),
    "disks": Layout(
        "--num-layers 4 --pp 2 --zero-stage 3 --offload-optimizer nvme --offload-gradients nvme:0.5 "
        "--offload-params nvme --nvme-path disk --micro-batch-order vertical --vertical-group-size 2 --late-update",
        4,
    ),
    "rotary": Layout(
        "--num-layers 4 --tp 2 --pp 2 --position-embedding rotary --layer-pattern window:5_local_x2,_full "
        "--rotary-sets local_base=50 --norm-placement both --norm-plus-one --query-key-norm head --attention-cap 2 "
        "--logits-cap 3 --embedding-multiplier 4.9 --activation swiglu --norm rmsnorm",
        4,
    ),
    "adapters": Layout(f"--num-layers 2 --tp 2 {DROPOUT}", 2, adapters=True),
    "adapters-sequence": Layout(f"--num-layers 2 --tp 2 --sequence-parallel {DROPOUT}", 2, adapters=True),
}
"""Together they have every axis of a layout, and what is cheap of a model."""
