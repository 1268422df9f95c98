"""The batches of a run on this rank: loaders of its training, validation and test data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megazero.config.schema import Run
from megazero.data.build import Datasets
from megazero.data.dataset import Samples
from megazero.data.loader import TrainLoader
from megazero.mpu.grid import ProcessGrid
from megazero.train.prepare import validation_samples


@dataclass(frozen=True)
class Batches:
    """The loaders of this rank. Those of evaluations are keyed by metric: valid_loss, valid_loss/NAME, test_loss."""

    train: TrainLoader
    valid: Mapping[str, TrainLoader]
    test: Mapping[str, TrainLoader]

    def close(self) -> None:
        """Stop the loaders' threads."""
        for loader in (self.train, *self.valid.values(), *self.test.values()):
            loader.close()


def batches_of(run: Run, datasets: Datasets, grid: ProcessGrid) -> Batches:
    """Make the loaders. Raises DataError if a mask needs the separator token and the run has no --eod-id."""
    test = {"test_loss": _loader(run, grid, datasets.test, workers=0)} if run.trainer.test_iters else {}
    return Batches(_loader(run, grid, datasets.train, run.data.num_workers), _validation(run, datasets, grid), test)


def _validation(run: Run, datasets: Datasets, grid: ProcessGrid) -> dict[str, TrainLoader]:
    """Loaders of the validation sets that have enough samples for an evaluation."""
    if run.trainer.eval_iters == 0:
        return {}
    sets = {"valid_loss": datasets.valid}
    sets |= {f"valid_loss/{name}": dataset for name, dataset in datasets.named_valid.items()}
    return {
        name: _loader(run, grid, dataset, workers=0)
        for name, dataset in sets.items()
        if len(dataset) >= validation_samples(run)
    }


def _loader(run: Run, grid: ProcessGrid, dataset: Samples, workers: int) -> TrainLoader:
    return TrainLoader(
        dataset,
        dp_rank=grid.at.dp,
        dp_size=grid.axes.dp,
        micro_batch_size=run.schedule.micro_batch_size,
        seq_length=run.model.seq_length,
        eod_id=run.data.eod_id,
        eod_mask_loss=run.data.eod_mask_loss,
        # Conversations are packed with a mask of their own, by their places in the sample.
        document_mask=run.model.document_mask and not run.data.instruction_data,
        # ALiBi and rotary angles are differences of positions, which are the same from any start.
        restart_positions=run.model.position_embedding == "learned",
        num_workers=workers,
        device=grid.device,
    )
