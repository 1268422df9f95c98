"""The banner's and the report's sentences about model state that is not on the device."""

from __future__ import annotations

from collections.abc import Sequence

from megazero.config.tiers import Tier, offload_of
from megazero.plan.bytes import StageBytes, stage_bytes
from megazero.plan.offloaded import OffloadedBytes
from megazero.plan.step_lists import StageLists
from megazero.telemetry.units import size

DAY = 86_400


def offload_lines(steps: StageLists) -> list[tuple[str, str]]:
    """(name, text) of what leaves the device, of the stage where most does; empty where nothing does."""
    run, axes = steps.run, steps.axes
    if not offload_of(run.offload.offload_optimizer) or run.model.vocab_size is None:
        return []
    found = stage_bytes(run, axes)
    most = max(range(axes.pp), key=lambda stage: found[stage].elsewhere.state)
    each = axes.world_size // axes.pp
    lines = [("offload", offload_sentence(found, most))]
    if offload_of(run.offload.offload_optimizer).tier is Tier.DISK:
        every = sum(stage.elsewhere.disk for stage in found) * each
        lines.append(("disks", disk_sentence(found[most].elsewhere, every, axes.world_size, run.offload.nvme_path)))
    return lines


def offload_sentence(stages: Sequence[StageBytes], most: int) -> str:
    """What leaves the device, and what a step moves. most: the stage of which it tells."""
    found = stages[most].elsewhere
    whose = f"a rank of stage {most}" if len(stages) > 1 else "a rank"
    tiers = {"in host memory": found.host, "on disks": found.disk}
    rests = " and ".join(f"{size(held)} {where}" for where, held in tiers.items() if held)
    if not rests:
        return "nothing leaves the device: the share is of fewer than 1,024 elements"
    parts, to_host, back = f"{found.parts} part{'s' * (found.parts > 1)}", *map(size, found.moved)
    return (
        f"of {size(found.state + stages[most].optimizer)} of master weights and moments {whose} has {rests}, in "
        f"{parts}, and {size(found.slots + found.buffers)} of host memory for what is on its way; a step copies "
        f"{to_host} of gradients to the host and {back} of parameters back"
    )


def disk_sentence(found: OffloadedBytes, every: int, ranks: int, folders: Sequence[str]) -> str:
    """What a step reads and writes. every: bytes of all ranks together."""
    together = f", {size(every)} with all {ranks} ranks" if ranks > 1 else ""
    return f"a step reads {size(found.disk)} and writes as much{together}; files are in {' '.join(folders)}"


def written_sentence(written: int, seconds: float) -> str:
    """What a run has written to disks, and would write in a day. seconds: how long it has trained."""
    a_day = f", which is {size(written / seconds * DAY)} a day" if seconds else ""
    return f"{size(written)} written to disks{a_day}"
