"""What a command line makes the program build and do, as facets. Two command lines are compared by their facets.

A facet is never a field of the configuration or a word of the command line, so a flag that is parsed and then ignored
changes no facet. The facets are in the order of causes: the first one that differs shows where a flag has its effect.
"""

from __future__ import annotations

import hashlib
import io
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fused_ops.attention
import fused_ops.compiled
from fused_ops.attention.selection import AttentionCase, AttentionChoice, AttentionSupport
from megazero.checkpoint.manager import find
from megazero.config.parse import ConfigError, parse_arguments
from megazero.data.progress import silent
from megazero.launch import launch
from megazero.model.batch import MicroBatch
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.meeting import Environment
from megazero.mpu.parameter import spec_of
from megazero.system import threads
from megazero.telemetry.record import StepRecord
from megazero.train.init_from import model_source
from megazero.train.job import Job, build_job
from megazero.train.prepare import prepare
from megazero.zero.portions import looking, parts_at_rest
from megazero.zero.sharding import Column
from megazero.zero.state import ModelState
from tests.ranks import be_deterministic

FACETS = {
    "refused": "the problems that the program ends with",
    "process": "what the process allows itself: kernels that vary",
    "world": "backend and timeout of the process groups that are made",
    "carrier": "whether ranks exchange tensors through shared memory",
    "parameters": "name, shape, local shape and dtype of what the model consists of, and whether it is trained",
    "history": "steps that FP8 scales look back on",
    "buckets": "elements of each bucket",
    "memory": "bytes of each column of the model state",
    "schedule": "instructions of a step of four micro-batches",
    "start": "weights before the first step",
    "moments": "the optimizer's state before the first step",
    "samples": "tokens and numbers of the samples of every micro-batch of every step",
    "masks": "which predictions count, documents, positions",
    "threads": "threads that prepare micro-batches",
    "compiled": "whether bodies of ops are run compiled",
    "attention": "the body that computes attention, each time that it is called in training",
    "rates": "the learning rate of each step",
    "scales": "the loss scale of each step",
    "launches": "when buckets are reduced: while a backward runs or after it",
    "traffic": "bytes by group, operation and dtype",
    "loss": "of the first step",
    "norm": "of the first step's gradients",
    "weights": "after the last step",
    "averages": "of the weights, after the last step",
    "evaluations": "losses by iteration and name",
    "saves": "how and when checkpoints are written",
    "kept": "in the newest checkpoint: whether there is a probe, and the columns with their dtypes",
    "logged": "iterations that have a line in the log",
    "text": "what the model says at the end",
    "files": "what lies in the run's own folder at the end",
    "services": "project, team, group and experiment that services of metrics are asked for",
}
Seen = dict[str, Any]


class Recorder:
    """A sink that keeps all records and losses."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.evaluations: list[tuple[int, dict[str, float]]] = []

    def step(self, record: StepRecord) -> None:
        self.records.append(record)

    def evaluation(self, iteration: int, losses: dict[str, float]) -> None:
        self.evaluations.append((iteration, losses))

    def note(self, text: str) -> None: ...
    def flush(self, durable: bool) -> None: ...
    def close(self) -> None: ...


def first_difference(one: Seen, other: Seen) -> str | None:
    """The first facet in which two command lines differ; None if there is none."""
    return next((facet for facet in FACETS if one.get(facet) != other.get(facet)), None)


def look(words: Sequence[str], out: Path, rank: int = 0, size: int = 1) -> Seen:
    """What `pretrain_gpt.py WORDS` builds and does on this rank. out: the run's own folder.

    Called by all ranks of a gloo world.
    """
    seen: Seen = {"refused": []}
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as said, _as_before():
        _on_a_machine_without_card(patch, seen)
        wandb, mlflow = (_module_in_place_of(name, patch) for name in ("wandb", "mlflow"))
        try:
            parsed = parse_arguments(list(words), size, model_source)
            prepared = prepare(parsed.run, size, silent)
            with launch(prepared.run, Environment(rank, rank, size, size)) as grid:
                _watch(build_job(prepared, grid), grid, seen, patch)
        except ConfigError as error:
            seen["refused"] = [problem.replace(str(out), "OUT") for problem in error.problems]
            return seen
    begun = [tuple(call.kwargs[key] for key in ("project", "entity", "group")) for call in wandb.init.call_args_list]
    asked = mlflow.MlflowClient.return_value.get_experiment_by_name.call_args_list
    seen["services"] = [*begun, *(call.args for call in asked)]
    told = said.getvalue()
    seen["logged"] = re.findall(r"^ *(\d+)/", told, re.MULTILINE)
    seen["text"] = re.findall(r"The model continues .*?:\n\n(.*)\n\n", told, re.DOTALL)
    seen["files"] = sorted(
        {re.sub(r"(events\.out).*|-[0-9a-f]{24}", r"\1", str(path.relative_to(out))) for path in out.rglob("*")}
    )
    return seen


def _module_in_place_of(name: str, patch: pytest.MonkeyPatch) -> MagicMock:
    """A package that takes everything and does nothing: the real ones take seconds, and are in tests/telemetry."""
    patch.setenv("MLFLOW_TRACKING_URI", "http://nowhere")
    module = MagicMock(__spec__=ModuleSpec(name, None))
    patch.setitem(sys.modules, name, module)
    return module


@contextmanager
def _as_before() -> Iterator[None]:
    """The settings that a run makes for its whole process."""
    settings: Any = torch.utils.deterministic
    number, strict, filled = (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        settings.fill_uninitialized_memory,
    )
    try:
        yield
    finally:
        torch.set_num_threads(number)
        be_deterministic(strict)
        settings.fill_uninitialized_memory = filled


def _on_a_machine_without_card(patch: pytest.MonkeyPatch, seen: Seen) -> None:
    """The same on every machine: no card, no compiler at work, and a world that is there already (tests/ranks.py)."""
    patch.setenv("MEGAZERO_FUSED", "auto")
    patch.setenv(threads.VARIABLE, "1")  # models are so small that a second thread only waits
    patch.setattr("megazero.system.device.cuda_available", lambda: False)
    patch.setattr(dist, "is_backend_available", lambda backend: backend == "gloo")
    patch.setattr("megazero.train.requirements.try_compiler", lambda kind: None)
    patch.setattr("megazero.launch.die_with_parent", lambda: None)
    patch.setattr(dist, "destroy_process_group", lambda: None)

    def begin(backend: str, timeout: Any, pg_options: Any, **meeting: Any) -> None:
        seen["world"] = backend, timeout

    patch.setattr(dist, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 0, 0)]))
    patch.setattr(dist, "init_process_group", begin)


def _watch(job: Job, grid: ProcessGrid, seen: Seen, patch: pytest.MonkeyPatch) -> None:
    """Run the job to its end, and record its facets."""
    before = set(threading.enumerate())
    seen |= _built(job, grid)
    recorder = Recorder()
    job.trainer.log._sinks += (recorder,)
    _spy_on_batches(job, seen)
    _spy_on_ops(seen, patch)
    _spy_on_reduction(job, seen)
    _spy_on_saves(job, seen)
    job.fit()
    job.state.model.wait_parameters()
    seen["threads"] = sum(thread.name.startswith("loader") for thread in set(threading.enumerate()) - before)
    job.trainer.batches.train.close()
    job.report()
    first = recorder.records[0] if recorder.records else None
    seen["rates"], seen["scales"] = [r.lr for r in recorder.records], [r.loss_scale for r in recorder.records]
    seen["loss"], seen["norm"] = (first.loss, first.grad_norm) if first else (None, None)
    groups = {"world": grid.world, "tp": grid.tp, "dp": grid.dp, "pp": grid.pp}
    seen["traffic"] = {
        name: {f"{op} {dtype}": n for (op, dtype), n in group.traffic.items()} for name, group in groups.items()
    }
    with job.state.model.reading():
        seen["weights"] = _digest(nn.ModuleList(job.stages).parameters())
    seen["averages"] = _digest(_optimizer_state(job.state.model, Column.EMA))
    seen["evaluations"] = recorder.evaluations
    save = job.run.checkpoint.save
    found = find(save) if save else None
    seen["kept"] = found and (
        found.progress.get("probe") is not None,
        [stored.columns for stored in found.manifest.tensors.values()],
    )


def _built(job: Job, grid: ProcessGrid) -> Seen:
    parameters = [(spec_of(parameter), parameter) for parameter in nn.ModuleList(job.stages).parameters()]
    with job.state.model.reading():
        start = _digest(parameter for _, parameter in parameters)
    return {
        "process": torch.are_deterministic_algorithms_enabled(),
        "carrier": grid.world.exchange is not None,
        "parameters": [
            (spec.name, spec.shape, tuple(p.shape), str(p.dtype), p.requires_grad) for spec, p in parameters
        ],
        "history": None if job.trainer.state.fp8 is None else len(job.trainer.state.fp8.history),
        "buckets": [bucket.layout.numel for bucket in job.state.model.buckets],
        "memory": job.state.model.bytes(),
        "schedule": job.probe_engine.lists.training(4),
        "start": start,
        "moments": _digest(_optimizer_state(job.state.model, Column.EXP_AVG, Column.EXP_AVG_SQ)),
    }


def _optimizer_state(model: ModelState, *columns: Column) -> Iterator[Tensor]:
    """Bucket by bucket, and part by part where one has parts."""
    names = [name for name in columns if name in model.columns]
    for index in range(len(model.buckets)):
        for number, _ in parts_at_rest(model, index):
            with looking(model, (index, number)) as state:
                yield from (state[name] for name in names)


def _digest(tensors: Iterable[Tensor]) -> list[str]:
    return [
        hashlib.sha256(
            tensor.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for tensor in tensors
    ]


def _numbers(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.tolist()


def _spy_on_batches(job: Job, seen: Seen) -> None:
    loader: Any = job.trainer.batches.train
    load, samples, masks = loader.micro_batches, list[Any](), list[Any]()

    def micro_batches(consumed: int, size: int) -> list[MicroBatch]:
        batches: list[MicroBatch] = load(consumed, size)
        samples.append([(_numbers(batch.tokens), _numbers(batch.samples)) for batch in batches])
        masks.append(
            [[_numbers(marks) for marks in (batch.loss_mask, batch.documents, batch.positions)] for batch in batches]
        )
        return batches

    loader.micro_batches, seen["samples"], seen["masks"] = micro_batches, samples, masks


def _spy_on_ops(seen: Seen, patch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled: that compiled bodies compute the same is tests/parity/test_compile.py's."""
    choose, runs_compiled = fused_ops.attention.choose, fused_ops.compiled.runs_compiled
    bodies, compiled = list[str](), set[bool]()

    def chosen(case: AttentionCase, support: AttentionSupport) -> AttentionChoice:
        choice = choose(case, support)
        if case.recorded:
            bodies.append(choice.body.value)
        return choice

    def parsed() -> bool:
        compiled.add(runs_compiled())
        return False

    patch.setattr(fused_ops.attention, "choose", chosen)
    patch.setattr(fused_ops.compiled, "runs_compiled", parsed)
    seen["attention"], seen["compiled"] = bodies, compiled


def _spy_on_reduction(job: Job, seen: Seen) -> None:
    reducer: Any = job.state.model.reducer
    launch, after, order = reducer.reduce, reducer.after_backward, list[Any]()

    def launched(index: int) -> None:
        order.append(index)
        launch(index)

    def over() -> None:
        order.append("backward is over")
        after()

    reducer.reduce, reducer.after_backward, seen["launches"] = launched, over, order


def _spy_on_saves(job: Job, seen: Seen) -> None:
    checkpoints: Any = job.checkpoints
    save, start, how = checkpoints.save, checkpoints.start, list[Any]()

    def saved(iteration: int, record: Any) -> Any:
        how.append(("at once", iteration))
        return save(iteration, record)

    def started(iteration: int, record: Any) -> None:
        how.append(("beside the run", iteration))
        start(iteration, record)

    checkpoints.save, checkpoints.start, seen["saves"] = saved, started, how
