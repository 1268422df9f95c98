"""One forward pass through a model on any grid, up to the logits of one position in each row.

s sequence, b rows, h hidden, v vocabulary, t = tp size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megazero.model.batch import MicroBatch, PastKeyValues
from megazero.model.evaluation import evaluating
from megazero.model.stage import Stage
from megazero.mpu.chunks import ChunkMap
from megazero.mpu.collectives import broadcast
from megazero.mpu.grid import ProcessGrid, single_process_grid


@dataclass(frozen=True)
class Pipeline:
    """A model for inference: this rank's model chunks in order, and which chunk is on which stage.

    reading: from a unit (embedding, block, head) to a context in which its parameters are whole. They always are,
    unless the model is being trained with sharded parameters (`zero.state.ModelState.reading`).
    """

    stages: Sequence[Stage]
    grid: ProcessGrid
    chunk_map: ChunkMap
    reading: Callable[[nn.Module], AbstractContextManager[object]] = nullcontext

    @classmethod
    def of(
        cls, stages: Sequence[Stage], grid: ProcessGrid | None = None, chunk_map: ChunkMap | None = None
    ) -> Pipeline:
        """grid None: the whole model is in this process. chunk_map None: the chunks go to the stages in turn."""
        grid = grid or single_process_grid(stages[0].layout.device)
        return cls(tuple(stages), grid, chunk_map or ChunkMap(grid.pp.size, len(stages)))

    @property
    def shards_the_sequence(self) -> bool:
        layout = self.stages[0].layout
        return layout.sequence_parallel and layout.tp.size > 1

    def logits(
        self,
        tokens: Tensor,
        positions: Tensor,
        past: PastKeyValues | None = None,
        row_lengths: Sequence[int] | None = None,
    ) -> Tensor | None:
        """The logits [b, v] after one position of each row; None on ranks without the head. A collective of pp and tp.

        tokens       int64 [b, s]
        positions    int64 [b], the position in each row
        past         the key-value cache of earlier tokens, from `KeyValueCache`
        row_lengths  how many tokens each row has by now, padding left out (`MicroBatch.row_lengths`)

        Hidden states are broadcast over pp instead of sent and received: the group's communicator exists already (one
        for a pair would have to be made), and every rank runs the same list of operations.
        """
        b, s = tokens.shape
        batch = MicroBatch(tokens, tokens, None, tokens.new_zeros(b), past=past, row_lengths=row_lengths)
        layout, last = self.stages[0].layout, self.chunk_map.count - 1
        hidden: Tensor | None = None
        for number in range(last + 1):
            stage, own = self.chunk_map.holder(number)
            mine = stage == self.grid.pp.index
            if mine and number == last:
                head = self.stages[own].head
                assert head is not None
                hidden = self._trunk(self.stages[own], hidden, batch)
                with self.reading(head):
                    return head.logits(hidden, positions)[0]
            if mine:
                hidden = self._trunk(self.stages[own], hidden, batch).contiguous()
            elif hidden is None:
                local = s // layout.tp.size if self.shards_the_sequence else s
                hidden = torch.empty(local, b, layout.model.hidden_size, dtype=layout.dtype, device=tokens.device)
            if number < last:
                assert hidden is not None
                broadcast(hidden, self.grid.pp, stage).wait()
        return None

    def _trunk(self, stage: Stage, hidden: Tensor | None, batch: MicroBatch) -> Tensor:
        """The embedding and the blocks of a chunk."""
        for number, unit in enumerate(stage.units()):
            if unit is not stage.head:
                with self.reading(unit):
                    hidden = stage(hidden, batch, (number, number + 1))
        assert hidden is not None
        return hidden

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context with the stages in evaluation mode (no dropout) and without gradients; it restores their mode."""
        with torch.no_grad(), evaluating(module for stage in self.stages for module in stage.modules()):
            yield
