"""What rank 0 prints and writes before the first step: the run's report, and the resolved run in the save folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from fused_ops.attention.selection import choose
from fused_ops.registry import refusal
from megazero.checkpoint.fence import Fence
from megazero.config.derive import uses_disks
from megazero.config.dtypes import compute_dtype
from megazero.config.dump import RUN_FILE, changed_settings, dump
from megazero.config.parse import ParsedArguments
from megazero.config.schema import Run
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.parameter import StateGroup
from megazero.pipeline.build import attention_support, attention_workload, compiled_ops
from megazero.plan.order import order_notes
from megazero.plan.step_lists import StageLists
from megazero.system import allocator, threads
from megazero.system import device as devices
from megazero.system.durable import replace_file
from megazero.system.words import counted
from megazero.train.banner import banner
from megazero.train.bodies import bodies_of, note_of_other_bodies
from megazero.train.path_checks import checkpoints_in_the_way
from megazero.train.prepare import Prepared, samples_used
from megazero.train.report_json import write_report_of_run
from megazero.train.resume import StartPoint
from megazero.train.run_report import MachineReport, RunReport, gather


def announce_kernels(grid: ProcessGrid) -> None:
    """Print on a GPU why the first step is late: compiling and trying kernels for a new GPU may take a minute."""
    if grid.rank == 0 and grid.device.type == "cuda":
        compiling = (
            "kernels for this card are loaded and tried; what is not compiled yet is now, which can take a minute"
        )
        print(f"megazero: {compiling}", flush=True)


def introduce(
    run: Run,
    grid: ProcessGrid,
    steps: StageLists,
    prepared: Prepared,
    start: StartPoint,
    fence: Fence | None,
    parsed: ParsedArguments | None,
) -> None:
    """Print the banner on rank 0, write the file of --report-json, and write the resolved run into the save folder, as
    a file for `--config`. A collective of all ranks.

    steps: the run's lists. fence: that of the save folder, if there is one. parsed: the user's settings; None if a
    program made the run. Raises FenceLost if another run has claimed the folder,
    and ConfigError on all ranks if the report cannot be written.
    """
    bodies = bodies_of(run, grid.device)
    other_bodies = note_of_other_bodies(bodies, grid)
    report = None
    if grid.rank == 0:
        asked = prepared.resolved.asked
        notes = [] if parsed is None else [*parsed.notes]
        notes += order_notes(asked, run, steps.micro_batches)
        notes += checkpoints_in_the_way(run.checkpoint, start.position.iteration)
        report = replace(
            gather(steps),
            machine=machine_of(run, grid, bodies),
            data=prepared.text,
            start=start.text,
            samples=samples_used(run, prepared.found),
            given=changed_settings(asked) if parsed is None else parsed.changed_settings(),
            decisions=prepared.resolved.decisions,
            placement=prepared.resolved.placement,
            changes=tuple(change.words() for change in prepared.changes),
            notes=(*notes, *filter(None, [other_bodies])),
        )
    write_report_of_run(report, run, grid)
    if report is not None:
        _print_and_keep(report, fence)


def _print_and_keep(report: RunReport, fence: Fence | None) -> None:
    print(banner(report), end="\n\n", flush=True)
    if report.run.checkpoint.save and fence is not None and fence.token is not None:
        fence.check()
        replace_file(Path(report.run.checkpoint.save) / RUN_FILE, dump(report.run).encode(), fence.token)


def machine_of(run: Run, grid: ProcessGrid, bodies: Mapping[str, str]) -> MachineReport:
    """What this rank knows of its device, its groups and its ops. bodies: as `bodies_of` has them."""
    device, state = grid.device, grid.state_groups(StateGroup.REPLICAS)
    groups = {
        "tp": grid.tp,
        "dp in sets" if state.across.size > 1 else "dp": state.inner,
        "dp across sets": state.across,
        "pp": grid.pp,
    }
    connected = {axis: group for axis, group in groups.items() if group.handle is not None}
    ways = {
        # Messages between stages go through the backend even where collectives go through shared memory.
        axis: "shared memory" if group.exchange is not None and axis != "pp" else dist.get_backend(group.handle)
        for axis, group in connected.items()
    }
    # Shared memory does not overlap: a rank copies its tensors itself, between computations.
    overlaps = any(ways[axis] != "shared memory" for axis in ways if axis.startswith("dp"))
    name = devices.name(device)
    return MachineReport(
        f"{name}, {_threads()}" if device.type == "cpu" else name,
        allocator.describe(device.type, returns_large=uses_disks(run)),
        ways,
        run.parallel.overlap and overlaps,
        bodies,
        _about_ops(run, device),
    )


def _threads() -> str:
    given = threads.threads_set_by_user()
    why = f", as {threads.VARIABLE} says" if given else " (the host's cores, divided among its ranks)"
    return f"{counted(torch.get_num_threads(), 'thread')} a rank{why}"


def _about_ops(run: Run, device: torch.device) -> dict[str, str]:
    """Why ops have their bodies."""
    attention = choose(attention_workload(run).case(device), attention_support(run, device))
    about = {"attention": f"{attention.body.value}: {attention.reason}"}
    refused = refusal("weight_gradient", compute_dtype(run.optimizer.precision)) if device.type == "cpu" else ""
    if refused:
        about["weight gradient"] = f"torch's own: no C++ kernel: {refused}"
    if run.parallel.compile and not compiled_ops(run, device):
        about["--compile"] = "changes nothing: its ops have kernels here, which are faster"
    return about
