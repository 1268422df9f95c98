"""Which pipeline stage holds which model chunk: arithmetic without processes, the one place where it stands.

A model of p stages with V chunks each is cut into p x V model chunks, numbered in the order in which a micro-batch
passes them. In turns (the default), chunk c of stage i is model chunk c*p + i: from the last stage a micro-batch wraps
to the first. There and back, every other chunk counts from the far end, so that a micro-batch turns around on the last
stage, where it need not travel: with two chunks a V, whose both ends, embedding and head, lie on stage 0.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkMap:
    """The chunks of all stages.

    stages     p
    per_stage  V
    and_back   there and back instead of in turns
    """

    stages: int
    per_stage: int = 1
    and_back: bool = False

    @property
    def count(self) -> int:
        """Model chunks."""
        return self.stages * self.per_stage

    def model_chunk(self, stage: int, chunk: int) -> int:
        """Number in the model of a stage's own chunk."""
        return chunk * self.stages + (self.stages - 1 - stage if self.and_back and chunk % 2 else stage)

    def of(self, stage: int) -> tuple[int, ...]:
        """The model chunks of a stage, in the order of its own chunks, which is that of the model."""
        return tuple(self.model_chunk(stage, chunk) for chunk in range(self.per_stage))

    def holder(self, model_chunk: int) -> tuple[int, int]:
        """(stage, own chunk) that is this model chunk."""
        chunk, stage = divmod(model_chunk, self.stages)
        return (self.stages - 1 - stage if self.and_back and chunk % 2 else stage), chunk

    @property
    def last_stage(self) -> int:
        """The stage with the last model chunk: that of the head and the loss."""
        return self.holder(self.count - 1)[0]
