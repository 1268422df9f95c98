"""A job on this rank: the parts of a run put together, resumed where there is something to resume, and run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from megazero.checkpoint.fence import new_token
from megazero.checkpoint.manager import Checkpoints
from megazero.checkpoint.resume_changes import record_of
from megazero.config.dump import RUN_FILE, dump
from megazero.config.parse import Asked
from megazero.config.schema import Run
from megazero.convert.model_files import model_files
from megazero.data.dataset import Samples
from megazero.data.loader import TrainLoader
from megazero.inference.generate import generate
from megazero.inference.pipeline import Pipeline
from megazero.inference.sampling import Sampling
from megazero.inference.terminal import harmless
from megazero.model.stage import Stage
from megazero.mpu.grid import Coordinates, ProcessGrid, background_group
from megazero.mpu.p2p import Channels
from megazero.optim.loss_scale import LossScaler
from megazero.pipeline.build import build_engine, build_stages, with_graphs
from megazero.pipeline.division import chunks_of
from megazero.pipeline.engine import PipelineEngine
from megazero.pipeline.graphs import GraphedEngine
from megazero.plan.places import places_of
from megazero.system.durable import replace_file
from megazero.telemetry.units import size, transfer
from megazero.telemetry.watchdog import StopSignals
from megazero.train.adapters import load_base, peft_files
from megazero.train.banner import banner
from megazero.train.banner_parts import pairs
from megazero.train.init_from import load_weights
from megazero.train.logs import refused, sinks_of, step_log
from megazero.train.prepare import Prepared, validation_samples
from megazero.train.presence import in_the_way
from megazero.train.probe import check_probe, stored_probe
from megazero.train.saves import Saves
from megazero.train.trainer import Position, Trainer
from megazero.zero.layout import owned_pieces
from megazero.zero.optimizer import ShardedOptimizer
from megazero.zero.state import ModelState


@dataclass
class Job:
    """What `build_job` puts together. `fit` is the run, `sample` a text from the model at the end."""

    run: Run
    prepared: Prepared
    grid: ProcessGrid
    stages: list[Stage]
    state: ModelState
    optimizer: ShardedOptimizer
    scaler: LossScaler
    checkpoints: Checkpoints
    probe_engine: PipelineEngine
    trainer: Trainer

    def fit(self) -> None:
        """Train, evaluate, save."""
        try:
            self.trainer.fit()
        finally:
            if isinstance(self.trainer.engine, GraphedEngine):
                self.trainer.engine.release()

    def record(self, position: Position) -> dict[str, Any]:
        """What a checkpoint of this position says beside the state. Called by all ranks."""
        return {
            "iteration": position.iteration,
            "consumed_samples": position.consumed_samples,
            "consumed_tokens": position.consumed_tokens,
            "optimizer_steps": float(self.optimizer.step_count.item()),
            "loss_scale": self.scaler.state_dict(),
            "fp8": None if self.trainer.fp8 is None else self.trainer.fp8.state_dict(),
            "data_plans": [list(plan) for plan in self.prepared.datasets.train.plans],
            "probe": stored_probe(self.run, self.probe_engine, self.grid),
        }

    def resume(self) -> str:
        """Load what `--load` names, if anything; where the run starts from, in words. Called by all ranks."""
        load, init_from = self.run.checkpoint.load, self.run.checkpoint.init_from
        found = self.checkpoints.find()
        beneath = self.load_base()
        if found is None:
            return self.begin() + (f" (no complete checkpoint in {load})" if load else "")
        loaded = self.checkpoints.load(found)
        read = f"{transfer(loaded.bytes, loaded.seconds)} read"
        told = check_probe(found.progress.get("probe"), self.run, self.probe_engine, self.grid)
        if self.run.checkpoint.finetune:
            return "; ".join([f"weights of {found.path} (--finetune: everything else anew)", read, *beneath])
        progress = found.progress
        self.trainer.position = Position(
            *(int(progress[key]) for key in ("iteration", "consumed_samples", "consumed_tokens"))
        )
        if self.trainer.saves is not None and load == self.run.checkpoint.save:
            self.trainer.saves.saved_at = self.trainer.position.iteration
        if not self.run.checkpoint.no_load_optim:
            self.optimizer.step_count.fill_(progress["optimizer_steps"])
            self.scaler.load_state_dict(progress["loss_scale"])
            if self.trainer.fp8 is not None:
                self.trainer.fp8.load_state_dict(progress.get("fp8"))
        unused = beneath or ([f"--init-from {init_from} is not used"] if init_from else [])
        return "; ".join(
            [f"{found.path}, iteration {self.trainer.position.iteration}", read, *([told] if told else []), *unused]
        )

    def load_base(self) -> list[str]:
        """The frozen weights beneath adapters, which no checkpoint of the run holds; where they are from, in words, if
        there are any.
        """
        base = self.run.checkpoint.init_from
        if self.run.lora.lora_rank is None or base is None:
            return []
        return [f"adapters on the weights of {base} ({load_base(base, self.state.frozen, self.grid)})"]

    def begin(self) -> str:
        """The weights of a run's first step: drawn, or those of `--init-from`; in words. Called by all ranks."""
        init_from = self.run.checkpoint.init_from
        if self.run.lora.lora_rank is not None:
            self.state.initialise(self.run.data.seed)
            return f"new adapters on the weights of {init_from}"
        if init_from is None:
            self.state.initialise(self.run.data.seed)
            return "from scratch"
        return load_weights(init_from, self.optimizer, self.grid)

    def report(self) -> None:
        """At the end: close the log, show a sample, and where everything lies. Called by all ranks."""
        self.trainer.log.close()
        text = self.sample()
        if self.grid.rank != 0:
            return
        if text is not None:
            print(f"\nThe model continues {self.run.trainer.sample_prompt!r}:\n\n{harmless(text)}\n", flush=True)
        places = {
            "checkpoints": self.run.checkpoint.save,
            "metrics": self.run.trainer.metrics_file,
            "tensorboard": self.run.trainer.tensorboard_dir,
            "tokenizer": self.run.data.tokenizer_path,
            "data": " ".join(self.run.data.data_path or self.run.data.instruction_data),
        }
        print(pairs([(name, place) for name, place in places.items() if place]), flush=True)

    def sample(self) -> str | None:
        """How the model continues the prompt, with the prompt; None without a tokenizer or a prompt.

        Called by all ranks.
        """
        prompt, tokenizer = self.run.trainer.sample_prompt, self.prepared.tokenizer
        if prompt is None or tokenizer is None:
            return None
        ids = tokenizer.encode(prompt)
        if not ids:
            return None
        self.state.wait_parameters()
        pipeline = Pipeline.of(self.stages, self.grid, chunks_of(self.run))
        sampling, eod_id = Sampling(temperature=0.7, top_k=20), self.run.data.eod_id
        (new,) = generate(
            pipeline,
            [ids],
            self.run.trainer.sample_tokens,
            sampling,
            ends=lambda _, token: token == eod_id,
            vocabulary=tokenizer.vocab_size,
        )
        return tokenizer.decode([*ids, *new])


def build_job(
    prepared: Prepared, grid: ProcessGrid, signals: StopSignals | None = None, asked: Asked | None = None
) -> Job:
    """Everything this rank needs, resumed. Called by all ranks; rank 0 prints the banner.

    signals: what asks the run to stop. asked: what its user said, and should know before it starts; None for a run that
    a program made.
    """
    run = _with_device(prepared.run, grid)
    if grid.rank == 0 and grid.device.type == "cuda":
        print(
            "megazero: kernels for this card are loaded and tried; what is not compiled yet is now, which can take a "
            "minute",
            flush=True,
        )
    stages = build_stages(run, grid)
    state = ModelState(stages, grid, run.optimizer, run.parallel)
    optimizer = ShardedOptimizer(state, run.optimizer, grid)
    channels = Channels(grid, and_back=chunks_of(run).and_back)
    engine = with_graphs(build_engine(run, grid, stages, channels), run, grid)
    probe_engine = build_engine(run, grid, stages, channels, micro_batch_size=1)
    token = new_token(grid.world, grid.device)
    aside = background_group(grid.world) if run.checkpoint.async_save else None
    beside = (peft_files(run), model_files(run, prepared.found)) if grid.rank == 0 and run.checkpoint.save else ()
    checkpoints = Checkpoints(
        run.checkpoint, record_of(run), optimizer, _fragments_of_all(run, grid), grid, token, aside, _each(beside)
    )
    with refused(f"--save {run.checkpoint.save}"):
        checkpoints.claim()
    scaler = LossScaler(run.optimizer, grid.device)
    minutes = run.trainer.exit_duration_in_mins
    trainer = Trainer(
        run,
        grid,
        engine,
        state,
        optimizer,
        scaler,
        train_batches=_loader(run, grid, prepared.datasets.train),
        valid_batches=_validation(run, grid, prepared),
        test_batches={"test_loss": _loader(run, grid, prepared.datasets.test, workers=0)}
        if run.trainer.test_iters
        else {},
        log=step_log(run, grid, []),
        saves=None,
        position=Position(),
        deadline=None if minutes is None else time.monotonic() + 60 * minutes,
        fp8=stages[0].layout.fp8,
        signals=signals or StopSignals(),
    )
    job = Job(run, prepared, grid, stages, state, optimizer, scaler, checkpoints, probe_engine, trainer)
    if run.checkpoint.save:
        saves = Saves(
            checkpoints, job.record, lambda text: trainer.log.note(text), in_background=run.checkpoint.async_save
        )
        trainer.saves = saves
    start = job.resume()
    if grid.rank == 0:
        _introduce(job, start, asked)
    trainer.log = step_log(run, grid, sinks_of(run, grid, trainer.position, checkpoints.fence))
    if run.checkpoint.async_save:
        trainer.log.note(
            f"--async-save: {size(checkpoints.reserve())} of host memory on this rank hold the copy that is written"
        )
    return job


def _each(writers: Sequence[Callable[[Path], None] | None]) -> Callable[[Path], None] | None:
    """One that runs all that are there; None where none is."""
    there = [write for write in writers if write is not None]

    def write_all(folder: Path) -> None:
        for write in there:
            write(folder)

    return write_all if there else None


def _introduce(job: Job, start: str, asked: Asked | None) -> None:
    """Print the banner; write the resolved run beside the checkpoints, where `--config` can take it from."""
    run, fence = job.run, job.checkpoints.fence
    changes: list[tuple[str, object, object]] = [change.words() for change in job.prepared.changes]
    said, notes = (None, ()) if asked is None else (asked.departures(), asked.notes)
    notes = (*notes, *in_the_way(run.checkpoint, job.trainer.position.iteration))
    print(banner(run, job.grid, job.prepared.text, start, changes, said, notes), end="\n\n", flush=True)
    if run.checkpoint.save and fence is not None and fence.token is not None:
        fence.check()
        replace_file(Path(run.checkpoint.save) / RUN_FILE, dump(run).encode(), fence.token)


def _with_device(run: Run, grid: ProcessGrid) -> Run:
    return replace(run, parallel=replace(run.parallel, device=grid.device.type))


def _fragments_of_all(run: Run, grid: ProcessGrid) -> Callable[[], Sequence[Sequence[Any]]]:
    """What every rank's fragments cover, by arithmetic; ranks with equal pp and tp indices hold the same parameters."""

    @cache
    def places(pp_index: int, tp_index: int) -> Any:
        return places_of(run, pp_index, tp_index)

    def held_by(at: Coordinates) -> list[Any]:
        return [piece for _, piece in owned_pieces(places(at.pp, at.tp), grid.axes, at, run.parallel.bucket_size)]

    return lambda: [held_by(grid.axes.coordinates(rank)) for rank in range(grid.axes.world_size)]


def _loader(run: Run, grid: ProcessGrid, dataset: Samples, workers: int | None = None) -> TrainLoader:
    return TrainLoader(
        dataset,
        dp_rank=grid.at.dp,
        dp_size=grid.axes.dp,
        micro_batch_size=run.schedule.micro_batch_size,
        seq_length=run.model.seq_length,
        eod_id=run.data.eod_id,
        eod_mask_loss=run.data.eod_mask_loss,
        document_mask=run.model.document_mask and not run.data.instruction_data,
        restart_positions=run.model.position_embedding == "learned",
        num_workers=run.data.num_workers if workers is None else workers,
        device=grid.device,
    )


def _validation(run: Run, grid: ProcessGrid, prepared: Prepared) -> dict[str, TrainLoader]:
    """Loaders of the validation sets that have the samples, by metric name."""
    if run.trainer.eval_iters == 0:
        return {}
    sets = {"valid_loss": prepared.datasets.valid}
    sets |= {f"valid_loss/{name}": dataset for name, dataset in prepared.datasets.named_valid.items()}
    return {
        name: _loader(run, grid, dataset, workers=0)
        for name, dataset in sets.items()
        if len(dataset) >= validation_samples(run)
    }
