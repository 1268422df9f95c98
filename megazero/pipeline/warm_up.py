"""A pass over a stage's list without messages, before the first message.

At the first launch of a kernel CUDA loads its module, libraries choose algorithms, and the allocator asks the driver
for memory. Each of these may wait until the device has run all that was queued on it. With NCCL a posted receive is
queued on the device until its message comes. Receives are posted one computation ahead. So a first launch would wait
for a message, and the stage that is to send the message would wait for this one. `tests/pipeline/test_warm_up.py` has a
model of it: most schedules would hang in their first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from megazero.pipeline.schedule_run import ScheduleRun
from megazero.program.instruction import STATE_READS, Instruction, Op


class LonePass(ScheduleRun):
    """A pass whose messages are made up or dropped. It computes what `ScheduleRun` does, in as much memory.

    It ends before the norm, and reads nothing for updates behind it. Gradients and losses are meaningless: the model
    state has to forget them. Communicates what layers and the model state do within the stage, so all ranks of a stage
    make it together.
    """

    def execute(self, instructions: Sequence[Instruction]) -> None:
        """See `ScheduleRun.execute`."""
        of_all = Instruction(Op.REDUCE_PARTIAL)
        before = takewhile(lambda i: i.op is not Op.NORM and i != of_all, instructions)
        super().execute([i for i in before if i.op not in STATE_READS])

    def _send(self, i: Instruction) -> None:
        del self.leaving[i.is_backward, (i.micro_batch, i.chunk)]

    def _receive(self, i: Instruction) -> None:
        message = self._message(i)
        made_up = message.parts(message.buffer(self.parts.device))
        for tensor in made_up:
            # of whole numbers zeros, which are indices of anything
            tensor.fill_(1 if tensor.is_floating_point() else 0)
        self.arriving[i.is_backward, (i.micro_batch, i.chunk)] = made_up, None
