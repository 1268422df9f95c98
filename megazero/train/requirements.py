"""What a run requires of the machine and the installation, checked before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch

from fused_ops import apex, fp8
from fused_ops.attention.trial import problem
from fused_ops.compiled import try_compiler
from fused_ops.native import library
from megazero.config.placement import AUTO
from megazero.config.schema import Run
from megazero.mpu.axes import axes_of
from megazero.optim.lr_schedule import style_of
from megazero.pipeline.build import attention_workload, compiled_ops
from megazero.plan.budgets import HostRoom, host_problems, memory_problems
from megazero.plan.gathered import unit_problems
from megazero.system import device as devices
from megazero.system import host_memory
from megazero.telemetry.sinks import sink_factory


class Package(NamedTuple):
    """An optional package, which a plain installation does not have.

    name    its name in Python and on PyPI
    serves  the flag or feature that needs it
    asked   whether the flags of a run need it
    """

    name: str
    serves: str
    asked: Callable[[Run], bool] = lambda run: False


PACKAGES = (
    Package("tensorboard", "--tensorboard-dir", lambda run: bool(run.trainer.tensorboard_dir)),
    Package("sentencepiece", "--tokenizer sentencepiece", lambda run: run.data.tokenizer == "sentencepiece"),
    Package(
        "zstandard", "data in .zst files", lambda run: any(name.endswith(".zst") for name in _instruction_files(run))
    ),
    Package("jinja2", "chats, which a template writes"),
    Package("transformers", "logits compared when a checkpoint is converted with --verify"),
)


def _instruction_files(run: Run) -> tuple[str, ...]:
    return (*run.data.instruction_data, *run.data.valid_instruction_data)


def missing_packages(run: Run) -> list[str]:
    """Packages that this run's flags need and that are not installed, each with what to install."""
    return [
        f"{package.serves} needs the package {package.name}, which is not installed: pip install {package.name}"
        for package in PACKAGES
        if package.asked(run) and find_spec(package.name) is None
    ]


def unmet_requirements(run: Run) -> list[str]:
    """Flags that this machine cannot serve, each with the reason."""
    kind = devices.kind(run.parallel.device)
    on_cuda = kind == "cuda"
    problems = []
    if run.parallel.cuda_graphs and not on_cuda:
        problems.append("--cuda-graphs: torch finds no CUDA device here, and --device auto is the CPU")
    if run.optimizer.optimizer_impl == "apex":
        missing = (
            apex.unavailable_reason()
            if on_cuda
            else "torch finds no CUDA device here, and it has kernels for nothing else"
        )
        problems += [] if missing is None else [f"--optimizer-impl apex: {missing}"]
    if run.optimizer.fp8 != "off":
        missing = fp8.unavailable_reason(kind)
        problems += (
            []
            if missing is None
            else [f"--fp8 {run.optimizer.fp8}: {missing}; the same run without it computes in bf16"]
        )
    if run.trainer.deterministic and on_cuda:
        wrong = devices.why_not_deterministic()
        problems += [] if wrong is None else [f"--deterministic: {wrong}"]
    return problems


def machine_problems(run: Run) -> list[str]:
    """Why this run cannot run on this machine, one sentence for each reason; empty if it can."""
    kernels = _unknown_kernels() or [*_uncompilable(run), *_impossible_attention(run)]
    return [*missing_packages(run), *kernels, *unmet_requirements(run), *_unusable_extensions(run)]


def _unusable_extensions(run: Run) -> Iterator[str]:
    """Schedules and sinks of other packages that cannot be loaded. This imports those packages, on every rank."""
    wanted: list[tuple[str, Callable[[], object]]]
    wanted = [(f"--lr-decay-style {run.schedule.lr_decay_style}", lambda: style_of(run.schedule.lr_decay_style))]
    wanted += [(f"--sinks {name}", partial(sink_factory, name)) for name in run.trainer.sinks]
    for flag, find in wanted:
        try:
            find()
        except ValueError as error:
            yield f"{flag}: {error}"


def _uncompilable(run: Run) -> list[str]:
    """Why --compile would fail in the first step. Empty if every op has a kernel, since nothing is compiled then."""
    kind = devices.kind(run.parallel.device)
    reason = try_compiler(kind) if compiled_ops(run, kind) else None
    return [] if reason is None else [f"--compile: {reason}; without the flag the same run needs no compiler"]


def _impossible_attention(run: Run) -> list[str]:
    """Why the body of --attention cannot be used on this machine, as far as can be said without running it.

    On a GPU, building the model runs it.
    """
    device = torch.device(devices.kind(run.parallel.device))
    if device.type == "cuda" and not devices.cuda_available():  # reported elsewhere
        return []
    against = problem(run.parallel.attention, attention_workload(run), device)
    return (
        []
        if against is None
        else [f"--attention {run.parallel.attention} on {device.type}: {against}; nearest: --attention auto"]
    )


def _unknown_kernels() -> list[str]:
    try:
        library.choice()
    except ValueError as error:
        return [str(error)]
    return []


def budget_problems(run: Run, world_size: int, *, tries_cards: bool, here: range | None = None) -> list[str]:
    """A sentence for each budget of the run that does not hold what a rank needs, and one if the host's memory does not
    hold the model state of its ranks. Nothing if the vocabulary is not known.

    tries_cards: whether this process may try bodies of attention on a card. A rank may not before it has a card of its
    own; there `train.predicted_memory.keep_budgets` looks at the budgets of memory. here: the ranks of this host, empty
    where the run is meant for others; None: all ranks.
    """
    kind = devices.kind(run.parallel.device)
    if run.model.vocab_size is None:
        return []
    found = unit_problems(run, axes_of(run, world_size))
    if run.offload.placement == AUTO:  # the search keeps to them
        return found
    found = found or (memory_problems(run, world_size, kind) if tries_cards or kind == "cpu" else [])
    here, limit = range(world_size) if here is None else here, host_memory.limit_bytes()
    if found or not here or limit is None:
        return found
    memory = HostRoom(limit, devices.memory_bytes(torch.device("cpu")))
    return host_problems(run, world_size, kind, here, memory)
