"""Scoring windows on a grid: they are sorted by length into micro-batches, divided among the dp replicas and run
through the pipeline. An all-reduce gives all ranks the scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor, nn

from megazero.config.derive import max_positions, pipeline_schedule
from megazero.config.dtypes import compute_dtype
from megazero.config.schema import ModelConfig, Run
from megazero.data.indexed import DataError
from megazero.evaluation.losses import token_losses
from megazero.evaluation.windows import Window
from megazero.model.batch import MicroBatch
from megazero.model.stage import Stage
from megazero.mpu.bundle import MessageSpec
from megazero.mpu.collectives import all_reduce
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.p2p import Channels
from megazero.pipeline.engine import PipelineEngine
from megazero.pipeline.schedule import chunk_map, forward_only, stage_schedule
from megazero.program.instruction import Instruction
from megazero.program.shape import without_state
from megazero.program.step import Lists, StepOptions

PADDING = 64
"""Lengths are padded to a multiple of this, so that there are few: micro-batches of one shape go through the pipeline
together.
"""
_PER_STAGE = 4
"""Micro-batches that go through the pipeline together, for each stage."""


@dataclass(frozen=True)
class Score:
    """The score of a window. loss: the sum over its scored tokens, in nats. greedy: whether each of them was the
    likeliest; None if it was not computed.
    """

    loss: float
    greedy: bool | None


def longest_context(model: ModelConfig) -> int | None:
    """The most tokens that the model can read: the rows of its position table; None if it has no table."""
    return max_positions(model) if model.position_embedding == "learned" else None


class _Scored(nn.Module):
    """The last stage, with the loss of each window instead of their sum.

    found: for each micro-batch a float64 tensor [b, 3]: the window's number, its loss, whether greedy.
    """

    def __init__(self, stage: Stage, greedy: bool) -> None:
        super().__init__()
        self.stage, self.greedy = stage, greedy
        self.found: list[Tensor] = []
        self.train(stage.training)

    def forward(self, hidden: Tensor | None, batch: MicroBatch, units: tuple[int, int] | None = None) -> Tensor:
        assert units is None, "a list for whole parameters cuts no chunk"
        head, counted = self.stage.head, batch.loss_mask
        assert head is not None and counted is not None
        losses, hits = token_losses(head, self.stage.trunk(hidden, batch), batch.labels, counted, greedy=self.greedy)
        greedy = torch.zeros_like(losses[:, 0]) if hits is None else hits.all(dim=1).double()
        self.found.append(torch.stack([batch.samples.double(), losses.sum(dim=1), greedy], dim=1))
        return losses.new_zeros(())


class Scorer:
    """A model on a grid that scores windows. Every rank of the grid makes one and calls `score` with the same windows.

    stages            this rank's model chunks, with their weights
    micro_batch_size  the most windows of a forward pass
    """

    def __init__(self, run: Run, stages: Sequence[Stage], grid: ProcessGrid, micro_batch_size: int = 8) -> None:
        assert micro_batch_size >= 1
        self.run, self.stages, self.grid, self.micro_batch_size = run, list(stages), grid, micro_batch_size
        self._schedule = pipeline_schedule(run.parallel)
        self.chunk_map = chunk_map(self._schedule, grid.pp.size, len(self.stages))
        self._channels = Channels(grid, and_back=self.chunk_map.and_back) if grid.pp.size > 1 else None
        whole = without_state(len(stage.units()) for stage in self.stages)
        self._lists = Lists(
            self._schedule_of,
            lambda m: forward_only(self._schedule_of(m)),
            whole,
            StepOptions(),
            self.chunk_map.count,
        )
        self._warm: set[tuple[tuple[int, ...], bool]] = set()
        """Shapes of messages, with and without `greedy`, that have run without messages (`pipeline.warm_up`)."""
        self.device_tokens = 0
        """Tokens that went through this rank's chunks so far, padding included."""

    @property
    def has_head(self) -> bool:
        return self.chunk_map.last_stage == self.grid.pp.index

    def score(self, windows: Sequence[Window], *, greedy: bool = False) -> list[Score]:
        """The score of every window, in their order, the same on every rank. A collective of the world.

        Communicates the messages of forward passes between stages and within tp, and an all-reduce over the world of 24
        bytes for each window. Raises DataError as `check` does.
        """
        self.check(windows)
        size = self.micro_batch_size
        order = sorted(range(len(windows)), key=lambda number: (-windows[number].length, number))
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        mine = batches[self.grid.dp.index :: self.grid.dp.size]
        table = torch.zeros(len(windows), 3, dtype=torch.float64, device=self.grid.device)
        for _, alike in groupby(mine, key=lambda batch: (len(batch), self._padded(windows[batch[0]].length))):
            group = list(alike)
            for start in range(0, len(group), _PER_STAGE * self.grid.pp.size):
                self._run(
                    [self._batch(windows, batch) for batch in group[start : start + _PER_STAGE * self.grid.pp.size]],
                    greedy,
                    table,
                )
        all_reduce(table, self.grid.world).wait()
        rows = table.tolist()
        assert all(seen == 1.0 for _, _, seen in rows), "each window is scored by exactly one replica"
        return [Score(loss, bool(hit) if greedy else None) for loss, hit, _ in rows]

    def check(self, windows: Sequence[Window]) -> None:
        """Raise DataError for a token outside the vocabulary, or a window that is longer than the position table."""
        vocabulary = self.run.model.vocab_size
        assert vocabulary is not None
        for window in windows:
            least, largest = int(np.min(window.ids)), int(np.max(window.ids))
            if least < 0 or largest >= vocabulary:
                raise DataError(
                    f"token {least if least < 0 else largest} is not in the model's vocabulary of {vocabulary}"
                )
        most, longest = longest_context(self.run.model), max((window.length for window in windows), default=0)
        if most is not None and longest > most:
            raise DataError(f"a window of {longest} tokens is longer than the model's {most} learned positions")

    def _padded(self, length: int) -> int:
        """The padded length of a window: the least length in use that has room for it."""
        most = longest_context(self.run.model)
        padded = -(-length // PADDING) * PADDING
        if most is not None:
            padded = min(padded, most)
        layout = self.stages[0].layout
        multiple = layout.tp.size if layout.sequence_parallel else 1
        return -(-padded // multiple) * multiple

    def _batch(self, windows: Sequence[Window], numbers: Sequence[int]) -> MicroBatch:
        """Windows as the rows of a micro-batch, padded on the right, where a causal model does not look."""
        length = self._padded(max(windows[number].length for number in numbers))
        tokens = torch.zeros(len(numbers), length, dtype=torch.int64)
        labels, counted = torch.zeros_like(tokens), torch.zeros(tokens.shape, dtype=torch.bool)
        for row, number in enumerate(numbers):
            window = windows[number]
            ids = torch.from_numpy(np.array(window.ids, dtype=np.int64))
            tokens[row, : window.length], labels[row, : window.length] = ids[:-1], ids[1:]
            counted[row, window.length - window.scored : window.length] = True
        device = self.grid.device
        samples = torch.tensor(numbers, dtype=torch.int64)
        return MicroBatch(tokens.to(device), labels.to(device), counted.to(device), samples.to(device))

    def _run(self, batches: Sequence[MicroBatch], greedy: bool, table: Tensor) -> None:
        """Run micro-batches of one shape through the pipeline. Row i of `table` gets window i's loss, its greedy flag,
        and 1 because it was scored.
        """
        rows, length = batches[0].tokens.shape
        layout = self.stages[0].layout
        local = length // layout.tp.size if layout.sequence_parallel else length
        shape = (local, rows, self.run.model.hidden_size)
        stages: list[nn.Module] = list(self.stages)
        last = _Scored(self.stages[-1], greedy) if self.has_head else None
        if last is not None:
            stages[-1] = last
        hidden = MessageSpec.single(shape, compute_dtype(self.run.optimizer.precision))
        messages = (hidden,) * (self.grid.pp.size * len(stages) - 1)
        engine = PipelineEngine(stages, self.grid, self._lists, messages, self._channels)
        if (shape, greedy) in self._warm:
            engine.is_warm[False] = True
        elif not engine.is_warm[False]:
            engine.warm_up_evaluation(batches)
            self._warm.add((shape, greedy))
            if last is not None:
                last.found.clear()  # of hidden states that were made up
        engine.evaluate(batches)
        self.device_tokens += rows * length * len(batches)
        if last is not None and self.grid.at.tp == 0:
            found = torch.cat(last.found)
            table[found[:, 0].long()] = torch.cat([found[:, 1:], torch.ones_like(found[:, :1])], dim=1)

    def _schedule_of(self, micro_batches: int) -> Sequence[Instruction]:
        parallel, grid = self.run.parallel, self.grid
        return stage_schedule(self._schedule, grid.pp.size, micro_batches, parallel.virtual_stages, grid.pp.index)
