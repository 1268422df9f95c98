"""What a process takes of a device beside the tensors of our step: what the driver and communicators take, and what the
allocator cannot use; and what another program holds, for a table of its runs.

Of a device of `hardware.yaml` its constants say it: `context` are bytes of the driver's context with the kernels that
are loaded into it, `communicators` bytes of all communicators of a rank, and `fragmentation` is the share of tensors
that the allocator cannot use between them. An entry without them takes nothing: a CPU has neither a context nor NCCL.
"""

from __future__ import annotations

from dataclasses import dataclass

from megazero.plan.cluster.hardware import Cluster

BESIDE = "driver and communicators"
"""What a process takes beside tensors, in a table of what is alive."""


@dataclass(frozen=True)
class Allowance:
    """What a process takes of a device beside the tensors of its step.

    fixed  bytes of the driver's context and of communicators
    share  of the tensors: what the allocator cannot use between them
    """

    fixed: float
    share: float

    def of(self, tensors: float) -> int:
        """The bytes of a device with so many bytes of tensors."""
        return round(tensors * (1 + self.share) + self.fixed)

    def room(self, memory: float) -> int:
        """The bytes of tensors for which a device with so many bytes has room."""
        return max(0, int((memory - self.fixed) / (1 + self.share)))


def allowance_of(cluster: Cluster) -> Allowance:
    """That of a device of a cluster. One device alone has no communicators."""
    constants = cluster.device.constants
    between = constants.get("communicators", 0.0) if cluster.gpus > 1 else 0.0
    return Allowance(constants.get("context", 0.0) + between, constants.get("fragmentation", 0.0))


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
