"""What rank 0 prints and writes: the run's report before the first step, with the resolved run in the save folder, and
after the last step a text that the model generates and the paths of the outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fused_ops.attention.trial import choices
from fused_ops.registry import refusal
from megazero.checkpoint.agreement import attempt_on_all_ranks
from megazero.checkpoint.fence import Fence
from megazero.config.derive import uses_files
from megazero.config.dtypes import compute_dtype
from megazero.config.dump import RUN_FILE, changed_settings, dump
from megazero.config.parse import ParsedArguments
from megazero.config.schema import Run
from megazero.data.tokenizer import Tokenizer
from megazero.inference.generate import generate
from megazero.inference.pipeline import Pipeline
from megazero.inference.sampling import Sampling
from megazero.inference.terminal import escape_control
from megazero.model.stage import Stage
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.parameter import StateGroup
from megazero.pipeline.build import attention_support, attention_workloads, compiled_ops
from megazero.pipeline.stage_specs import chunks_of
from megazero.plan.budgets import order_notes
from megazero.plan.cluster.hardware import Device
from megazero.plan.cluster.own_devices import own_step
from megazero.plan.step_lists import StageLists
from megazero.report.banner import banner
from megazero.report.report_json import write_report
from megazero.report.run_report import MachineReport, PredictionReport, RunReport, gather
from megazero.report.text_blocks import pairs
from megazero.system import allocator, threads
from megazero.system import device as devices
from megazero.system.durable import replace_file
from megazero.system.words import counted
from megazero.telemetry.sinks import named_places
from megazero.train.bodies import bodies_of, note_of_other_bodies
from megazero.train.logs import as_config_error
from megazero.train.path_checks import checkpoints_in_the_way
from megazero.train.prepare import Prepared, samples_used
from megazero.train.resume import StartPoint
from megazero.zero.state import ModelState


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
        ranks, ranks_here = grid.axes.world_size, prepared.local_world_size
        predicted, unpredicted = prediction_or_why_not(run, grid.device, ranks, ranks_here)
        report = replace(
            gather(steps),
            machine=machine_of(run, grid, bodies),
            prediction=predicted,
            data=prepared.text,
            start=start.text,
            samples=samples_used(run, prepared.resumed),
            given=changed_settings(asked) if parsed is None else parsed.changed_settings(),
            decisions=prepared.resolved.decisions,
            placement=prepared.resolved.placement,
            changes=tuple(change.words() for change in prepared.changes),
            notes=(*notes, *filter(None, [other_bodies, unpredicted])),
        )
    if run.trainer.report_json is not None:
        with as_config_error("--report-json"):
            attempt_on_all_ranks(grid.world, grid.device, None if report is None else lambda: write_report(report))
    if report is not None:
        _print_and_keep(report, fence)


def _print_and_keep(report: RunReport, fence: Fence | None) -> None:
    print(banner(report), end="\n\n", flush=True)
    if report.run.checkpoint.save and fence is not None and fence.token is not None:
        fence.check()  # a run that has claimed the folder since has its own settings there
        replace_file(Path(report.run.checkpoint.save) / RUN_FILE, dump(report.run).encode(), fence.token)


def prediction_or_why_not(
    run: Run, device: torch.device, ranks: int, ranks_here: int
) -> tuple[PredictionReport | None, str]:
    """What a plan says of a step of this run, and a note: in its place if the arithmetic fails, because a run trains as
    well without it, or that it is of other threads. None without a note as for `own_step`.

    Rank 0 alone asks, while the others prepare their first step. It takes 0.1 s on a small run and up to 10 s for 48
    stages, whose bubble takes longer.
    """
    try:
        step = own_step(run, device, ranks, ranks_here)
        return (None, "") if step is None else (PredictionReport.of(step), _note_of_threads(step.cluster.device, run))
    except Exception as error:
        return None, f"no prediction of a step, for an error in its arithmetic: {type(error).__name__}: {error}"


def _note_of_threads(measured: Device, run: Run) -> str:
    """What is to be said of a rank's threads where the entry was measured with others; nothing of a GPU."""
    own = torch.get_num_threads()
    if measured.threads is None or measured.threads == own:
        return ""
    file, of_entry = run.trainer.hardware, counted(int(measured.threads), "thread")
    return (
        f"--hardware {file} was measured with {of_entry} a rank, and this run's ranks have {own} ({threads.VARIABLE}): "
        "its prediction is not of this run"
    )


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
        axis: "shared memory" if group.exchange is not None and axis != "pp" else group.backend
        for axis, group in connected.items()
    }
    # Shared memory does not overlap: a rank copies its tensors itself, between computations.
    overlaps = any(ways[axis] != "shared memory" for axis in ways if axis.startswith("dp"))
    name = devices.name(device)
    return MachineReport(
        f"{name}, {_threads()}" if device.type == "cpu" else name,
        allocator.describe(device.type, returns_large=uses_files(run)),
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
    kinds = choices(attention_workloads(run), device, attention_support(run, device))
    about = {
        f"attention with {kind}" if kind else "attention": f"{choice.body.value}: {choice.reason}"
        for kind, choice in kinds.items()
    }
    refused = refusal("weight_gradient", compute_dtype(run.optimizer.precision)) if device.type == "cpu" else ""
    if refused:
        about["weight gradient"] = f"torch's own: no C++ kernel: {refused}"
    if run.parallel.compile and not compiled_ops(run, device):
        about["--compile"] = "changes nothing: its ops have kernels here, which are faster"
    return about


def sample_text(
    run: Run, stages: Sequence[Stage], model: ModelState, grid: ProcessGrid, tokenizer: Tokenizer | None
) -> str | None:
    """The prompt of --sample-prompt and the model's continuation; None without a tokenizer or a prompt.

    A collective of all ranks. Sharded parameters are gathered unit by unit.
    """
    prompt = run.trainer.sample_prompt
    if prompt is None or tokenizer is None:
        return None
    model.wait_parameters()
    ids = tokenizer.encode(prompt)
    if not ids:
        return None
    eod_id = run.data.eod_id
    (new,) = generate(
        replace(Pipeline.of(stages, grid, chunks_of(run)), reading=model.reading),
        [ids],
        run.trainer.sample_tokens,
        Sampling(temperature=0.7, top_k=20),
        ends=lambda _, token: token == eod_id,
        vocabulary=tokenizer.vocab_size,
    )
    return tokenizer.decode([*ids, *new])


def report(run: Run, text: str | None, disks: str | None = None) -> None:
    """Print the sample, if there is one, what went to disks, and the paths of the outputs. Called by rank 0."""
    if text is not None:
        print(f"\nThe model continues {run.trainer.sample_prompt!r}:\n\n{escape_control(text)}\n", flush=True)
    sinks = {flag[2:].removesuffix("-file").removesuffix("-dir"): place for flag, place in named_places(run).items()}
    places = {
        "checkpoints": run.checkpoint.save,
        **sinks,
        "tokenizer": run.data.tokenizer_path,
        "data": " ".join(run.data.data_path or run.data.instruction_data),
    }
    print(pairs([(name, text or "") for name, text in ({"offloaded": disks} | places).items()]), flush=True)
