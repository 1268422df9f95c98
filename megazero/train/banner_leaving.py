"""The banner's line about activations that leave the device."""

from __future__ import annotations

from megazero.plan.leaving_disks import activation_pieces
from megazero.plan.step_lists import StageLists
from megazero.plan.step_memory import host_bytes
from megazero.program.instruction import Op
from megazero.program.passes.kept_graphs import kept_graphs
from megazero.program.traffic import moved_bytes
from megazero.system import device as devices
from megazero.telemetry.units import size


def leaving_sentences(steps: StageLists) -> list[str]:
    """A sentence on what leaves, on the stage with most of it on the host; none where nothing does, or in a dry run
    without a vocabulary.
    """
    run, pp = steps.run, steps.axes.pp
    if not run.offload.offload_activations or run.model.vocab_size is None:
        return []
    host = [host_bytes(steps, stage, devices.kind(run.parallel.device)) for stage in range(pp)]
    stage = host.index(max(host))
    step = steps.of(stage)
    kept = sum(graph.nbytes for graph in kept_graphs(step.instructions, step.shape))
    moved = sum(moved_bytes(i, step.shape) for i in step.instructions if i.op is Op.LEAVE)
    where, on_disk = f" of stage {stage}" * (pp > 1), activation_pieces(step)
    told = f"{size(moved)} of the {size(kept)} that a step keeps leave the device and come back; they"
    if not on_disk.count:
        return [f"{told} wait in {size(host[stage])} of host memory on a rank{where}"]
    files, written = on_disk.file_bytes(len(run.offload.nvme_path)), on_disk.step_bytes
    return [
        f"{told} go through {size(host[stage] + on_disk.buffers)} of host memory to {size(files)} of files on a "
        f"rank{where}; a step writes {size(written)} there and reads as much"
    ]
