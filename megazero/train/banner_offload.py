"""The banner's and the report's sentences about model state that is not on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megazero.config.derive import tiers, uses_disks, whole_steps
from megazero.config.schema import OffloadConfig
from megazero.plan.bytes import StageBytes, stage_bytes
from megazero.plan.offloaded import moved_in_step
from megazero.plan.step_lists import StageLists
from megazero.program.instruction import Lane
from megazero.telemetry.units import size

DAY = 86_400


def offload_lines(steps: StageLists) -> list[tuple[str, str]]:
    """(name, text) of what leaves the device, of the stage where most does; empty where nothing does."""
    run, axes = steps.run, steps.axes
    if not any(tiers(run).values()) or run.model.vocab_size is None:
        return []
    found = stage_bytes(run, axes)
    most = max(range(axes.pp), key=lambda stage: found[stage].elsewhere.host + found[stage].elsewhere.disk)
    moved = [_moved(steps, stage, found[stage]) for stage in range(axes.pp)]
    lines = [("offload", offload_sentence(found, most, moved[most]))]
    if uses_disks(run):
        each = axes.world_size // axes.pp
        every = {lane: each * sum(of_stage[lane] for of_stage in moved) for lane in (Lane.FROM_DISK, Lane.TO_DISK)}
        lines.append(("disks", disk_sentence(moved[most], every, axes.world_size, run.offload)))
    return lines


def offload_sentence(stages: Sequence[StageBytes], most: int, moved: Mapping[Lane, int]) -> str:
    """What leaves the device, and what a step moves. most: the stage of which it tells."""
    own, found = stages[most], stages[most].elsewhere
    whose = f"a rank of stage {most}" if len(stages) > 1 else "a rank"
    columns = {
        "master weights and moments": (found.optimizer, own.optimizer),
        "weights": (found.parameters, own.weights),
        "gradients": (found.gradients, own.gradients),
    }
    parts = [
        f"of {size(sum(rest) + on_device)} of {name} {whose} has {_places(*rest)}"
        for name, (rest, on_device) in columns.items()
        if any(rest)
    ]
    if not parts:
        return "nothing leaves the device: the share is of fewer than 1,024 elements"
    return (
        f"{', and '.join(parts)}; {size(found.slots + found.buffers)} of host memory for what is on its way; a step "
        f"copies {size(moved[Lane.TO_HOST])} to the host and {size(moved[Lane.TO_DEVICE])} to the device"
    )


def _places(host: int, disk: int) -> str:
    return " and ".join(
        f"{size(held)} {where}" for held, where in ((host, "in host memory"), (disk, "on disks")) if held
    )


def _moved(steps: StageLists, stage: int, state: StageBytes) -> dict[Lane, int]:
    """Bytes that a step moves. With --nvme-checkpoint what stays on the device is written too."""
    moved = moved_in_step(steps.of(stage).instructions, steps.of(stage).shape)
    return moved | {Lane.TO_DISK: moved[Lane.TO_DISK] + state.elsewhere.copied}


def disk_sentence(moved: Mapping[Lane, int], every: Mapping[Lane, int], ranks: int, cfg: OffloadConfig) -> str:
    """What a step reads and writes. every: bytes of all ranks together."""
    read, written = (size(moved[lane]) for lane in (Lane.FROM_DISK, Lane.TO_DISK))
    whose = f"; all {ranks} ranks read {size(every[Lane.FROM_DISK])} and write {size(every[Lane.TO_DISK])}"
    whole = "; each step is whole on disks, which takes twice the space" if whole_steps(cfg) else ""
    files = f"files are in {' '.join(cfg.nvme_path)}"
    return f"a step reads {read} and writes {written}{whose * (ranks > 1)}; {files}{whole}"


def written_sentence(written: int, seconds: float) -> str:
    """What a run has written to disks, and would write in a day. seconds: how long it has trained."""
    a_day = f", which is {size(written / seconds * DAY)} a day" if seconds else ""
    return f"{size(written)} written to disks{a_day}"
