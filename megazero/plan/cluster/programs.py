"""What other programs do and hold otherwise than ours, for tables of their runs and for plans of them.

A rank of another program has what ours has of the same layout. What it has more of is a number for each parameter, for
each score of attention, and for what stages send. Its stages may send otherwise, and wait for what they send, and its
loss may move more bytes. Each is here with its reason. Whose run a row is says `plan.cluster.table_rows`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Program:
    """What a program holds on a rank beside what a step of ours does, and how its stages send.

    name       as `megazero plan --program` takes it
    only       values of a run's settings that it has, by field, where it has not all of ours: a search goes over these
    parameter  bytes for each parameter of the rank
    mask       bytes for each score of attention that waits for its backward, where scores are dropped
    outputs    how often it keeps what a stage sends of a micro-batch until the micro-batch's backward
    scatters   of forward and of backward, whether each tp rank sends a part of what all of them have, which is gathered
               behind its way
    waits      whether both stages wait for a message between them
    launch     seconds of the host for each kernel; None: as the device's entry says, which is of ours
    logits     bytes that the loss moves more than ours for each logit of a rank, in forward and in backward
    """

    name: str
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    parameter: float = 0.0
    mask: float = 0.0
    outputs: int = 0
    scatters: tuple[bool, bool] = (False, False)
    waits: bool = False
    launch: float | None = None
    logits: tuple[float, float] = (0.0, 0.0)

    def has(self, setting: str, value: object) -> bool:
        """Whether it has this value of a run's field."""
        return value in self.only.get(setting, (value,))

    def more(self, parameters: int, scores: int, sent: int) -> int:
        """The bytes of a rank with so many parameters and scores. sent: bytes of what its stage sends of all
        micro-batches between forward and backward.
        """
        return round(self.parameter * parameters + self.mask * scores + self.outputs * sent)


OURS = Program("megazero")
"""Every tp rank sends what it has, beside computations."""
UNFUSED = 38.0 - 2.0, 14.0 - 4.0
"""Of Megatron-LM's loss, which is a kernel for each operation. Forward: logits to fp32 (6), their largest (4), the
difference (8), its exponential (8), their sum (4), the quotient (8). Backward: times the gradient (8), to 16 bits (6).
Ours reads what the product made, and in backward writes over it.
"""
MEGATRON_LAUNCH = 1.32e-5
"""Seconds of the host for each kernel, as fitted (`bench/fit_plan.py`)."""
MEGATRON = Program(
    "megatron-lm",
    MappingProxyType(
        {"pipeline_schedule": ("1f1b", "interleaved"), "zero_stage": (1, 0), "offload_gradients": ("none",)}
    ),
    launch=MEGATRON_LAUNCH,
    mask=1.0,
    scatters=(True, True),
    waits=True,
    logits=UNFUSED,
)
"""Megatron-LM: 18 bytes for each parameter, as ours. It stores which scores were dropped (arXiv 2205.05198, section
4.1), where ours draws them again. The masks of hidden states, which are small beside these, are left out. What a stage
has sent is freed at once. Hidden states are scattered and gathered (arXiv 2104.04473, section 4.1), and a stage goes on
when its message has arrived. Its distributed optimizer is ZeRO-1; of what shards more nothing was fitted.
"""
DEEPSPEED_BF16 = Program(
    "megatron-deepspeed",
    MappingProxyType(
        {
            "pipeline_schedule": ("1f1b",),
            "sequence_parallel": (False,),
            "zero_stage": (1, 0),
            "zero_shard_size": (None,),
            "offload_optimizer": ("none",),
        }
    ),
    parameter=4.7,
    mask=1.0,
    outputs=1,
    scatters=(True, False),
    waits=True,
    launch=MEGATRON_LAUNCH,
    logits=UNFUSED,
)
"""Megatron-DeepSpeed with DeepSpeed's optimizer for bf16, which BLOOM was trained with.

A backward makes 16-bit gradients, 2 bytes, which are then added to fp32 sums. DeepSpeed's pipeline has no counterpart
of Megatron-LM's freeing of outputs. 2.7 bytes more are fitted (`bench/plan_memory.py`), and no part of the program is
known to take them. The likely cause: the 16-bit gradients are freed behind each micro-batch, activations are then cut
out of their blocks, and the allocator reserves new blocks for the next.

DeepSpeed's pipeline partitions what goes forward over tp ranks. What goes back is partitioned in some of its versions.
That it was not in BLOOM's is an assumption, with which its measured steps are met to 5% in the mean.
"""

PROGRAMS: Mapping[str, Program] = MappingProxyType({each.name: each for each in (OURS, MEGATRON, DEEPSPEED_BF16)})
