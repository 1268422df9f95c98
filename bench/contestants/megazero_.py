"""megazero as its program runs it: the same flags, job and loop, without checkpoints."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from bench.contestants.common import Step, own_folder
from bench.workload import Workload, random_tokens
from megazero.config.parse import parse_run
from megazero.data.indexed import dtype_for
from megazero.data.progress import silent
from megazero.data.writer import PairWriter
from megazero.launch import launch
from megazero.mpu.meeting import Environment
from megazero.telemetry.record import StepValues
from megazero.train.init_from import model_source
from megazero.train.job import Job, build_job
from megazero.train.prepare import prepare
from megazero.train.trainer import Trainer

PRECISIONS = ("bf16", "fp16", "fp32")


def flags_of(work: Workload, folder: Path, replicas: int) -> list[str]:
    """The workload as flags of the program. Flags that the workload does not determine have BLOOM's values."""
    values = {
        "--num-layers": work.layers,
        "--hidden-size": work.hidden,
        "--num-attention-heads": work.heads,
        "--seq-length": work.sequence,
        "--vocab-size": work.vocabulary,
        "--micro-batch-size": work.micro_batch,
        "--global-batch-size": work.samples * replicas,
        "--lr": work.lr,
        "--lr-decay-style": "constant",
        "--clip-grad": work.clip,
        "--adam-beta1": work.betas[0],
        "--adam-beta2": work.betas[1],
        "--adam-eps": work.eps,
        "--weight-decay": work.weight_decay,
        "--precision": work.precision,
        "--device": work.device,
        "--train-iters": 20_000,
        "--eval-iters": 0,
        "--split": "1,0,0",
        "--data-path": folder / "words",
        "--data-cache-path": folder / "cache",
    }
    return [word for name, value in values.items() for word in (name, str(value))]


def write_words(work: Workload, folder: Path) -> None:
    """Write 64 documents of random ids, each as long as a sample."""
    with PairWriter(folder / "words", dtype_for(work.vocabulary)) as writer:
        for sample in random_tokens(work, 64, seed=17).numpy():
            writer.write(sample.astype(writer.dtype), [len(sample)])


def build_megazero(work: Workload, layout: list[str], replicas: int = 1) -> Job:
    """The job of this rank. Its process groups exist until the process ends. "{folder}" in `layout` is its own one."""
    environment = Environment.read()
    folder = own_folder()
    write_words(work, folder)
    words = [*flags_of(work, folder, replicas), *(word.format(folder=folder) for word in layout)]
    run = parse_run(words, environment.world_size, model_source)
    prepared = prepare(run, environment.world_size, silent)
    return build_job(prepared, ExitStack().enter_context(launch(prepared.run, environment)))


class JobStep:
    """The step of a job, as `step_of` says. late: its updates are left to the next step."""

    def __init__(self, job: Job, late: bool) -> None:
        self.model, self.step, self.late = job.state.model, step_of(job.trainer), late

    def __call__(self) -> float | Tensor:
        return self.step()

    def finish(self) -> None:
        """Return once nothing of the steps is under way. Late updates stay owed, as others were when the first step
        began, and what has been read for them is there.
        """
        if not self.late:
            self.model.wait_parameters()
        for slot in self.model.mover.update_slots.slots:
            for end in slot.ends:
                end()


def build(work: Workload, layout: tuple[str, ...] = (), replicas: int = 1) -> JobStep:
    return JobStep(build_megazero(work, list(layout), replicas), "--late-update" in layout)


def step_of(trainer: Trainer) -> Step:
    """The trainer's step. It returns the loss that goes to the log: that of all replicas."""
    losses: list[float | Tensor] = []
    write = trainer.log.step

    def keep(values: StepValues) -> None:
        losses[:] = [values.loss]
        write(values)

    trainer.log.step = keep  # type: ignore[method-assign]

    def step() -> float | Tensor:
        trainer.train_step(stop=False)
        trainer.after_step()
        return losses[0]

    return step
