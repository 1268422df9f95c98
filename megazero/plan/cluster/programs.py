"""What other programs hold on a rank beside what a step of ours does, for tables of their runs.

A rank of another program has what ours has of the same layout. What it has more of is a number for each parameter, for
each score of attention, and for what stages send. Each is here with its reason. Whose run a row is says
`plan.cluster.table_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """What another program holds on a rank beside what a step of ours does.

    parameter  bytes for each parameter of the rank
    mask       bytes for each score of attention that waits for its backward, where scores are dropped
    outputs    how often it keeps what a stage sends of a micro-batch until the micro-batch's backward
    """

    parameter: float = 0.0
    mask: float = 0.0
    outputs: int = 0

    def more(self, parameters: int, scores: int, sent: int) -> int:
        """The bytes of a rank with so many parameters and scores. sent: bytes of what its stage sends of all
        micro-batches between forward and backward.
        """
        return round(self.parameter * parameters + self.mask * scores + self.outputs * sent)


MEGATRON = Program(mask=1.0)
"""Megatron-LM: 18 bytes for each parameter, as ours. It stores which scores were dropped (arXiv 2205.05198, section
4.1), where ours draws them again. The masks of hidden states, which are small beside these, are left out. What a stage
has sent is freed at once.
"""
DEEPSPEED_BF16 = Program(parameter=4.7, mask=1.0, outputs=1)
"""Megatron-DeepSpeed with DeepSpeed's optimizer for bf16, which BLOOM was trained with.

A backward makes 16-bit gradients, 2 bytes, which are then added to fp32 sums. DeepSpeed's pipeline has no counterpart
of Megatron-LM's freeing of outputs. 2.7 bytes more are fitted (`bench/plan_memory.py`), and no part of the program is
known to take them. The likely cause: the 16-bit gradients are freed behind each micro-batch, activations are then cut
out of their blocks, and the allocator reserves new blocks for the next.
"""
