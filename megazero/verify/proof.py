"""A layout against one process: the legs of a proof, and its result.

one process   step 1, step 2, evaluation and save, step 3, which clips
ranks         step 1, step 2, evaluation and save
ranks         step 3, begun from the ranks' checkpoint
ranks         step 3, begun from the checkpoint of the one process
one process   step 3, begun from the ranks' checkpoint
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megazero.config.schema import LoraConfig, OffloadConfig, ParallelConfig, Run
from megazero.config.source import ConfigError
from megazero.mpu.axes import Axes
from megazero.verify.compare import Errors, FirstDifference, Whole, compared, wholes
from megazero.verify.lanes import Late
from megazero.verify.probe import Found, Probe, Recorded
from megazero.verify.session import CLIPPED, EVERY_STEP, SAVED, SPOILED, Leg, Values, run_leg
from megazero.verify.shrink import Shrunk, shrunk
from megazero.verify.slopes import Slopes
from megazero.verify.turns import RankFailed, Standstill


class CannotRun(ValueError):
    """The run, or its small form, cannot be run, and so nothing is proven."""


@dataclass(frozen=True)
class Proof:
    """What has been found.

    small       the run that was run
    difference  the first difference; None: all is equal
    failure     in words, where ranks do not come to an end and one process does: their error, and who had it
    errors      the largest relative error by column and number, of ranks against one process
    slope_error the largest relative error of one process's gradients, against slopes of its loss
    """

    small: Shrunk
    difference: FirstDifference | None
    failure: str | None
    errors: Errors
    slope_error: float

    @property
    def equal(self) -> bool:
        return self.difference is None and self.failure is None


def prove(run: Run, world_size: int) -> Proof:
    """Run the small form of a run on its ranks, and on one process, and compare.

    Raises CannotRun where one process does not run it, or the small form is refused.
    """
    try:
        small = shrunk(run, world_size)
    except ValueError as error:
        raise CannotRun(str(error)) from error
    with tempfile.TemporaryDirectory(prefix="megazero-verify-") as folder, _one_thread():
        return _Legs(small, Path(folder), as_nccl=takes_nccl(run)).prove()


def takes_nccl(run: Run) -> bool:
    """Whether the run is one for GPUs: its flags name neither a CPU nor a backend of the host."""
    return run.parallel.device != "cpu" and run.parallel.backend in ("auto", "nccl")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Tensors of a proof are too small for several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Legs:
    def __init__(self, small: Shrunk, folder: Path, *, as_nccl: bool) -> None:
        self.small, self.folder, self.as_nccl = small, folder, as_nccl
        run = small.run
        files = {
            "nvme_path": tuple(str(folder / f"disk {n}") for n in range(len(run.offload.nvme_path))),
            "files_path": None if run.offload.files_path is None else str(folder / "files"),
        }
        for place in (*files["nvme_path"], files["files_path"]):  # type: ignore[misc]
            if place is not None:
                Path(place).mkdir()
        self.many = replace(run, offload=replace(run.offload, **files))  # type: ignore[arg-type]
        self.one = on_one_process(run)
        optimizer = run.optimizer
        self.decay = -optimizer.sgd_momentum if optimizer.optimizer == "sgd" else optimizer.adam_beta1
        # A look makes owed updates at once, and the next step would have none of another one's.
        self.looks = frozenset((SAVED,) if run.parallel.late_update else (1, SAVED))
        self.errors: Errors = {}
        self.slope_error = 0.0

    def prove(self) -> Proof:
        base = self._base()
        start = Leg("from the seed", last=SPOILED, save=self.folder / "one", base=base, packed=self.small.packed)
        slopes = Slopes()
        numbers = self._alone(start, slopes)
        losses = [each.loss for each in numbers[:CLIPPED]]  # that of the last step is spoiled on purpose
        if not all(map(math.isfinite, losses)):
            words = ", ".join(map("{:g}".format, losses))
            raise CannotRun(f"one process has no finite loss (its steps have {words}), so nothing can be compared")
        true = wholes(numbers, self.decay)
        wrong, self.slope_error = slopes.compared(true[1])
        if wrong is not None:
            return self._proof(wrong)
        clip = numbers[CLIPPED - 1].clip
        ours = replace(
            start, last=SAVED, looks=self.looks, save=self.folder / "many", late=Late(copies=True, updates=False)
        )
        of_one = Leg(
            "resumed from the checkpoint of one process",
            last=SPOILED,
            clip=clip,
            load=start.save,
            base=base,
            replica=True,
            packed=self.small.packed,
        )
        # A look waits for all that is on its way, so without one each step meets what the one before has begun. The
        # last step is skipped and changes nothing: behind it are the values of the step before.
        later = replace(
            of_one,
            name="resumed from its own checkpoint",
            load=ours.save,
            replica=False,
            looks=frozenset((SPOILED,)),
            late=Late(copies=False, updates=True),
        )
        for leg in (ours, later, of_one):
            ended = self._compared(leg, true)
            if ended is not None:
                return ended
        back = replace(
            of_one, last=CLIPPED, load=ours.save, name="resumed on one process from the checkpoint of the ranks"
        )
        try:
            found = compared([self._alone(back)], true, back.name, self.decay, self.errors)
        except CannotRun as error:
            return self._proof(None, f"{back.name}: {error}")
        return self._proof(found, None)

    def _proof(self, difference: FirstDifference | None, failure: str | None = None) -> Proof:
        if difference is not None and not difference.instruction:
            difference = difference._replace(instruction="resume")
        return Proof(self.small, difference, failure, self.errors, self.slope_error)

    def _base(self) -> Path | None:
        """A checkpoint of the model beneath adapters, from the seed; None without adapters."""
        if self.small.run.lora.lora_rank is None:
            return None
        folder = self.folder / "base"
        one, self.one = self.one, replace(self.one, lora=LoraConfig())
        self._alone(Leg("the model beneath adapters", last=0, save=folder))
        self.one = one
        return folder

    def _alone(self, leg: Leg, prober: Probe | Slopes | None = None) -> list[Values]:
        """A leg on one process: with whole batches at once, or, for a probe, micro-batch by micro-batch."""
        run = self.one
        if not isinstance(prober, Probe):
            schedule = replace(run.schedule, micro_batch_size=run.schedule.global_batch_size)
            run = replace(run, schedule=schedule)
        collected = list[list[Values]]()
        try:
            run_leg(run, Axes(), leg, collected, as_nccl=False, prober=prober)
            return collected[0]
        except ConfigError as error:
            raise CannotRun(f"the small run on one process: {error}") from error
        except RankFailed as error:
            raise CannotRun(f"one process does not run it: {_in_a_line(error)}") from error

    def _compared(self, leg: Leg, true: dict[int, Whole]) -> Proof | None:
        """Run a leg on all ranks; a proof if it differs."""
        failed, ranks = self._together(leg)
        if isinstance(failed, ConfigError) and leg.load is None:
            raise CannotRun(f"the small run on {self.small.axes.world_size} ranks: {failed}") from failed
        found = compared(ranks, true, leg.name, self.decay, self.errors)
        if found is None and failed is None:
            return None
        try:
            recorded = self._recorded(leg)
        except CannotRun:  # what differs may be in the way of one process too, as of a checkpoint that it cannot read
            return self._proof(found, None if failed is None else _words(leg, failed, Probe(leg.name)))
        first, probe = self._watched(leg, true, recorded, found)
        if leg.looks < EVERY_STEP and (first is None or not first.column):  # a look at each step may see what it is of
            closer, by = self._watched(replace(leg, looks=EVERY_STEP), true, recorded)
            if closer is not None and (first is None or closer.step <= first.step):
                first, probe = closer, by
        if first is not None:
            first = first._replace(instruction=probe.instruction_of(first))
        return self._proof(first, None if failed is None else _words(leg, failed, probe))

    def _watched(
        self, leg: Leg, true: dict[int, Whole], recorded: Recorded, found: FirstDifference | None = None
    ) -> tuple[FirstDifference | None, Probe]:
        """Run a leg on all ranks again, and compare what each instruction makes. found: behind the steps before, where
        ranks may have ended more of them.
        """
        probe = Probe(leg.name, recorded)
        # The folder that it saves into has a checkpoint of the same run, which this pass must not meet.
        failed, ranks = self._together(replace(leg, save=None), probe)
        first = compared(ranks, true, leg.name, self.decay, {}) or found
        if isinstance(failed, RankFailed) and isinstance(failed.error, Found):
            event = failed.error.difference
            first = event if first is None or event.step <= first.step else first
        return first, probe

    def _together(self, leg: Leg, prober: Probe | None = None) -> tuple[Exception | None, list[list[Values]]]:
        """Run a leg on all ranks. Returns its error, and what they had by then."""
        collected = list[list[Values]]()
        try:
            run_leg(self.many, self.small.axes, leg, collected, as_nccl=self.as_nccl, prober=prober)
        except (ConfigError, RankFailed, Standstill) as error:
            return error, collected
        return None, collected

    def _recorded(self, leg: Leg) -> Recorded:
        """What one process makes of the same micro-batches."""
        load = None if leg.load is None else self.folder / "one"
        probe = Probe(leg.name)
        self._alone(replace(leg, load=load, save=None, looks=frozenset[int]()), prober=probe)
        return probe.recorded


def on_one_process(run: Run) -> Run:
    """The same model, optimizer and samples on one process, in the plainest way."""
    parallel = ParallelConfig(device="cpu", attention="softmax")
    return replace(run, parallel=parallel, offload=OffloadConfig())


def _in_a_line(error: Exception) -> str:
    """An error in one line, with the first line of a list that it announces."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def _words(leg: Leg, error: Exception, probe: Probe) -> str:
    """The error with which a leg has ended, with the rank and its instruction, in one line."""
    ranks = [rank for rank, _ in error.waits] if isinstance(error, Standstill) else []
    ranks += [error.rank] if isinstance(error, RankFailed) else []
    at = probe.under_way(ranks[0]) if ranks else ""
    return f"{leg.name}: {_in_a_line(error)}{f' ({at})' if at else ''}"
