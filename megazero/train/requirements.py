"""What a run requires of the machine, the installation and the folders for files, before anything is started."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import torch

from fused_ops import apex, fp8
from fused_ops.attention.trial import problem
from fused_ops.compiled import try_compiler
from fused_ops.native import library
from megazero.config.derive import file_tiers, folders_of, tiers, whole_steps
from megazero.config.options import run_options
from megazero.config.placement import AUTO, applied, as_flags
from megazero.config.schema import OffloadConfig, Run
from megazero.config.tiers import FILE_TIERS, Tier, TierShare
from megazero.disk import plain_files
from megazero.disk.swap_file import free_bytes, leftover_bytes
from megazero.mpu.axes import Axes, axes_of
from megazero.optim.lr_schedule import style_of
from megazero.pipeline.build import attention_workloads, compiled_ops
from megazero.plan.budgets import HostRoom, host_problems, memory_problems
from megazero.plan.cluster.own_devices import hardware_problems
from megazero.plan.rank_state import RankState, has_nccl
from megazero.plan.step_lists import StageLists, buffer_problems
from megazero.plan.traffic import unit_problems
from megazero.system import device as devices
from megazero.system import host_memory
from megazero.telemetry.mlflow import needs_database
from megazero.telemetry.sinks import sink_factory


class Package(NamedTuple):
    """An optional package, which a plain installation does not have.

    name    its name in Python and on PyPI
    serves  the flag or feature that needs it
    asked   whether the flags of a run need it
    source  what pip installs, if that is not the name
    """

    name: str
    serves: str
    asked: Callable[[Run], bool] = lambda run: False
    source: str = ""


PACKAGES = (
    Package("tensorboard", "--tensorboard-dir", lambda run: bool(run.trainer.tensorboard_dir)),
    Package("wandb", "--wandb", lambda run: bool(run.trainer.wandb)),
    Package("mlflow", "--mlflow", lambda run: bool(run.trainer.mlflow), "'megazero[mlflow]'"),
    Package(
        "alembic",
        "--mlflow with a database, which is the default of MLFLOW_TRACKING_URI,",
        lambda run: bool(run.trainer.mlflow) and needs_database(),
        "'megazero[mlflow]'",
    ),
    Package("sentencepiece", "--tokenizer sentencepiece", lambda run: run.data.tokenizer == "sentencepiece"),
    Package(
        "zstandard",
        "data in .zst files",
        lambda run: any(
            name.endswith(".zst") for name in (*run.data.instruction_data, *run.data.valid_instruction_data)
        ),
    ),
    Package("jinja2", "chats, which a template writes"),
    Package("transformers", "logits compared when a checkpoint is converted with --verify"),
)


def machine_problems(run: Run) -> list[str]:
    """Why this run cannot run on this machine, one sentence for each reason; empty if it can."""
    needed = [*missing_packages(run), *_unusable_bodies(run), *unmet_requirements(run), *_unusable_extensions(run)]
    return [*needed, *hardware_problems(run)]


def missing_packages(run: Run) -> list[str]:
    """Packages that this run's flags need and that are not installed, each with what to install."""
    return [
        f"{package.serves} needs the package {package.name}, which is not installed: "
        f"pip install {package.source or package.name}"
        for package in PACKAGES
        if package.asked(run) and find_spec(package.name) is None
    ]


def _unusable_bodies(run: Run) -> Iterator[str]:
    """Why ops cannot be computed as the flags say, as far as can be said without running the body of --attention. On a
    GPU, building the model runs it.
    """
    try:
        library.choice()
    except ValueError as error:
        yield str(error)
        return  # the choice of kernels decides what is compiled, and which bodies there are
    device = torch.device(devices.kind(run.parallel.device))
    if compiled_ops(run, device.type) and (reason := try_compiler(device.type)) is not None:
        yield f"--compile: {reason}; without the flag the same run needs no compiler"
    if device.type == "cuda" and not devices.cuda_available():  # reported elsewhere
        return
    reasons = (problem(run.parallel.attention, workload, device) for workload in attention_workloads(run))
    for reason in dict.fromkeys(filter(None, reasons)):
        yield f"--attention {run.parallel.attention} on {device.type}: {reason}; nearest: --attention auto"


def unmet_requirements(run: Run) -> list[str]:
    """Flags that this machine cannot serve, each with the reason."""
    kind = devices.kind(run.parallel.device)
    on_cuda, no_cuda = kind == "cuda", "torch finds no CUDA device here"
    reasons = dict[str, str | None]()
    if run.parallel.cuda_graphs and not on_cuda:
        reasons["--cuda-graphs"] = f"{no_cuda}, and --device auto is the CPU"
    if run.optimizer.optimizer_impl == "apex":
        elsewhere = f"{no_cuda}, and it has kernels for nothing else"
        reasons["--optimizer-impl apex"] = apex.unavailable_reason() if on_cuda else elsewhere
    if run.optimizer.fp8 != "off" and (reason := fp8.unavailable_reason(kind)) is not None:
        reasons[f"--fp8 {run.optimizer.fp8}"] = f"{reason}; the same run without it computes in bf16"
    if run.trainer.deterministic and on_cuda:
        reasons["--deterministic"] = devices.why_not_deterministic()
    return [f"{flag}: {reason}" for flag, reason in reasons.items() if reason is not None]


def _unusable_extensions(run: Run) -> Iterator[str]:
    """Schedules and sinks of other packages that cannot be loaded. This imports those packages, on every rank."""
    style = run.schedule.lr_decay_style
    loads: list[tuple[str, Callable[[], object]]] = [(f"--lr-decay-style {style}", partial(style_of, style))]
    loads += [(f"--sinks {name}", partial(sink_factory, name)) for name in run.trainer.sinks]
    for flag, load in loads:
        try:
            load()
        except ValueError as error:
            yield f"{flag}: {error}"


def budget_problems(run: Run, world_size: int, *, tries_cards: bool, local_ranks: range | None = None) -> list[str]:
    """A sentence for each budget of the run that does not hold what a rank needs, and one if the host's memory does not
    hold the model state of its ranks. Nothing if the vocabulary is not known.

    tries_cards: whether this process may try bodies of attention on a card. A rank may not before it has a card of its
    own; there `train.run_memory.keep_budgets` looks at the budgets of memory. local_ranks: the ranks of this host,
    empty where the run is meant for others; None: all ranks.
    """
    kind = devices.kind(run.parallel.device)
    if run.model.vocab_size is None:
        return []
    problems = unit_problems(run, axes_of(run, world_size))
    if problems or run.offload.placement == AUTO:  # the search keeps to them
        return problems
    if (tries_cards or kind == "cpu") and (problems := memory_problems(run, world_size, kind)):
        return problems
    local_ranks, limit = range(world_size) if local_ranks is None else local_ranks, host_memory.limit_bytes()
    if not local_ranks or limit is None:
        return []
    memory = HostRoom(limit, devices.memory_bytes(torch.device("cpu")))
    return host_problems(run, world_size, kind, local_ranks, memory)


def path_problems(offload: OffloadConfig) -> list[str]:
    """Why files cannot be made in one of the folders of any tier, one sentence for each."""
    return [problem for tier in FILE_TIERS for problem in folder_problems(folders_of(offload, tier), flag_of(tier))]


def flag_of(tier: Tier) -> str:
    """The flag that names the folders of a tier in files."""
    return run_options()[FILE_TIERS[tier].folders].flag


def folder_problems(folders: Sequence[str], flag: str = "--nvme-path") -> list[str]:
    """Why files cannot be made in one of these folders, one sentence for each. flag: which names them."""
    checks: dict[str, Callable[[str], bool]] = {
        "there is no such folder": os.path.lexists,
        "is no folder": os.path.isdir,
        "may not be written in": lambda folder: os.access(folder, os.R_OK | os.W_OK | os.X_OK),
    }
    problems = []
    for folder in folders:
        failures = [failure for failure, holds in checks.items() if not holds(folder)]
        problems += [f"{flag} {folder}: {failure}" for failure in failures[:1]]  # the others follow from the first
    return problems


def room_problems(run: Run, world_size: int, local_ranks: range) -> list[str]:
    """A sentence for each tier whose files of `local_ranks` do not fit into its folders, which these ranks share.
    Nothing if the vocabulary is not known.

    Files that ended processes have left there count as free: opening removes them. That the folders together have
    enough does not say that each has enough for its share, which their speed decides; opening its files says so.
    run: resolved, since the order of micro-batches decides how many activations are away at a time.
    """
    if run.model.vocab_size is None:
        return []
    axes = axes_of(run, world_size)
    needed = {tier: swap_bytes(run, axes, local_ranks, tier) for tier in file_tiers(run)}
    problems = [
        _room_problem(run, axes, local_ranks, tier, count, free)
        for tier, count in needed.items()
        if count > (free := free_on(run.offload, [tier]))
    ]
    return problems or [*_shared_room_problems(run.offload, needed)]


def _room_problem(run: Run, axes: Axes, local_ranks: range, tier: Tier, needed: int, free: int) -> str:
    folders, row = folders_of(run.offload, tier), FILE_TIERS[tier]
    ranks = f"the {len(local_ranks)} ranks" if len(local_ranks) > 1 else "the rank"
    fitting = _largest_that_fits(run, axes, local_ranks, free, tier)
    nearest = f"; nearest: {as_flags(fitting)}, or" if fitting else ":"
    return (
        f"{flag_of(tier)} {' '.join(folders)}: the {row.files} of {ranks} here need {needed:,} bytes, and {free:,} are "
        f"free{nearest} {row.more}"
    )


def _shared_room_problems(offload: OffloadConfig, needed: Mapping[Tier, int]) -> Iterator[str]:
    """A sentence for two tiers on one file system, each of which has room there without the other."""
    for pair in combinations(needed, 2):
        first, second = (_file_systems(offload, [tier]).keys() for tier in pair)
        free = free_on(offload, pair)
        if first & second and sum(needed[tier] for tier in pair) > free:
            flags = " and ".join(f"{flag_of(tier)} {' '.join(folders_of(offload, tier))}" for tier in pair)
            files = " and ".join(f"{needed[tier]:,} bytes of {FILE_TIERS[tier].files}" for tier in pair)
            yield f"{flags} share a file system: {files} are needed, and {free:,} are free; name a folder on another"


def free_on(offload: OffloadConfig, used: Sequence[Tier]) -> int:
    """Free bytes of the file systems of these tiers, each counted once, and bytes of files in the tiers' folders that
    ended processes have left and a new run removes or takes over.
    """
    leftover_of: Mapping[Tier, Callable[[Path], int]] = {
        Tier.DISK: partial(leftover_bytes, checkpoints=whole_steps(offload)),
        Tier.FILES: plain_files.leftover_bytes,
    }
    leftover = sum(leftover_of[tier](Path(folder)) for tier in used for folder in folders_of(offload, tier))
    return sum(map(free_bytes, _file_systems(offload, used).values())) + leftover


def _file_systems(offload: OffloadConfig, used: Sequence[Tier]) -> dict[int, str]:
    """The file systems of these tiers, by number, each with a folder there."""
    return {os.stat(folder).st_dev: folder for tier in used for folder in folders_of(offload, tier)}


def _largest_that_fits(run: Run, axes: Axes, ranks: range, free: int, tier: Tier) -> dict[str, TierShare]:
    """By field the largest shares on a tier in files that fit into `free` bytes, in hundredths, all reduced alike;
    none: even the smallest do not, or units are named. A share of parameters is of whole buckets, so the bytes do not
    grow evenly with it.
    """
    off = tiers(run)
    if any(offload.units for offload in off.values()):
        return {}  # what is named leaves as a whole
    there = {field: offload.share for field, offload in off.items() if offload.tier is tier}

    def reduced(percent: int) -> dict[str, TierShare]:
        return {field: TierShare(tier, int(percent * share) / 100) for field, share in there.items()}

    def needed(percent: int) -> int:
        return swap_bytes(applied(run, reduced(percent)), axes, ranks, tier)

    shares = [percent for percent in range(1, 100) if all(int(percent * share) for share in there.values())]
    fitting = bisect_right(shares, free, key=needed)
    return reduced(shares[fitting - 1]) if fitting else {}


def swap_bytes(run: Run, axes: Axes, ranks: Iterable[int], tier: Tier = Tier.DISK) -> int:
    """The bytes of the files of these ranks on a tier."""
    kind, nccl = devices.kind(run.parallel.device), has_nccl(run.parallel, axes)
    places, by_stage = [axes.coordinates(rank) for rank in ranks], dict[int, int]()
    for place in places:
        if place.pp in by_stage:  # the ranks of a stage have as much
            continue
        by_stage[place.pp] = RankState(run, axes, place, nccl=nccl).files.get(tier, 0)
        # On a card activations are not known before its bodies of attention are tried: opening says so.
        written = run.offload.offload_activations.tier is tier
        if written and kind == "cpu" and not buffer_problems(run, axes, kind):
            by_stage[place.pp] += StageLists(run, axes, nccl=nccl).activations(place.pp).files
    return sum(by_stage[place.pp] for place in places)
