"""Which pipeline stage holds which model chunk: arithmetic without processes.

A model of p stages with V chunks each is cut into p x V model chunks. They are numbered in the order in which a
micro-batch passes them. There are two ways to assign them:

- In turns (the default, interleaved 1F1B): chunk c of stage i is model chunk c*p + i. A micro-batch goes from the last
  stage back to the first.
- There and back (`and_back`): every second chunk is assigned from the last stage to the first. A micro-batch turns
  around on the last stage and is not sent there. With two chunks per stage this is the V of ZB-V: stage 0 holds both
  the embedding and the head.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkMap:
    """The chunks of all stages.

    stages     p, the number of pipeline stages
    per_stage  V, the number of model chunks on each stage
    and_back   assign them there and back instead of in turns
    """

    stages: int
    per_stage: int = 1
    and_back: bool = False

    @property
    def count(self) -> int:
        """Number of model chunks: p x V."""
        return self.stages * self.per_stage

    def model_chunk(self, stage: int, chunk: int) -> int:
        """The model chunk that is chunk `chunk` of this stage."""
        return chunk * self.stages + (self.stages - 1 - stage if self.and_back and chunk % 2 else stage)

    def of(self, stage: int) -> tuple[int, ...]:
        """The model chunks of a stage, in ascending order."""
        return tuple(self.model_chunk(stage, chunk) for chunk in range(self.per_stage))

    def holder(self, model_chunk: int) -> tuple[int, int]:
        """(stage, number of the chunk on that stage) of a model chunk."""
        chunk, stage = divmod(model_chunk, self.stages)
        return (self.stages - 1 - stage if self.and_back and chunk % 2 else stage), chunk

    @property
    def last_stage(self) -> int:
        """The stage that holds the last model chunk, hence the head and the loss."""
        return self.holder(self.count - 1)[0]
