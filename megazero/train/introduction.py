"""What rank 0 prints and writes before the first step: the banner, and the resolved run in the save folder."""

from __future__ import annotations

from pathlib import Path

from megazero.checkpoint.fence import Fence
from megazero.config.dump import RUN_FILE, changed_settings, dump
from megazero.config.parse import ParsedArguments
from megazero.config.schema import Run
from megazero.mpu.grid import ProcessGrid
from megazero.plan.order import order_notes
from megazero.plan.step_lists import StageLists
from megazero.system.durable import replace_file
from megazero.train.banner import banner
from megazero.train.bodies import bodies_of, note_of_other_bodies
from megazero.train.path_checks import checkpoints_in_the_way
from megazero.train.prepare import Prepared, samples_used
from megazero.train.resume import StartPoint


def announce_kernels(grid: ProcessGrid) -> None:
    """Print on a GPU why the first step is late: compiling and trying kernels for a new GPU may take a minute."""
    if grid.rank == 0 and grid.device.type == "cuda":
        words = "kernels for this card are loaded and tried; what is not compiled yet is now, which can take a minute"
        print(f"megazero: {words}", flush=True)


def introduce(
    run: Run,
    grid: ProcessGrid,
    steps: StageLists,
    prepared: Prepared,
    start: StartPoint,
    fence: Fence | None,
    parsed: ParsedArguments | None,
) -> None:
    """Print the banner on rank 0, and write the resolved run into the save folder, as a file for `--config`.

    steps: the run's lists. fence: that of the save folder, if there is one. parsed: the user's settings; None if a
    program made the run. Raises FenceLost if another run has claimed the folder.
    """
    others = note_of_other_bodies(bodies_of(run, grid.device), grid)
    if grid.rank != 0:
        return
    changes: list[tuple[str, object, object]] = [change.words() for change in prepared.changes]
    asked = prepared.resolved.asked
    said, notes = (changed_settings(asked), ()) if parsed is None else (parsed.changed_settings(), parsed.notes)
    notes = (*notes, *order_notes(asked, run, steps.micro_batches))
    notes = (*notes, *checkpoints_in_the_way(run.checkpoint, start.position.iteration), *filter(None, [others]))
    used = samples_used(run, prepared.found)
    text = banner(run, grid, steps, prepared.text, start.text, changes, said, notes, prepared.resolved.placement, used)
    print(text, end="\n\n", flush=True)
    if run.checkpoint.save and fence is not None and fence.token is not None:
        fence.check()
        replace_file(Path(run.checkpoint.save) / RUN_FILE, dump(run).encode(), fence.token)
