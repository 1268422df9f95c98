"""What leaves the device, where it rests, and the memory that a rank may take."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.fields import Section, option
from megazero.config.tiers import TierShare

_TIERS = "{none,cpu,nvme,files}[:SHARE]"


@dataclass(frozen=True)
class OffloadConfig(Section):
    """Where model state and activations rest, and budgets of memory."""

    offload_optimizer: TierShare = option(TierShare(), metavar=_TIERS)
    """Where master weights and moments rest: on the device (none), in host memory (cpu), in files on disks (nvme, with
    --nvme-path), or in plain files (files, with --files-path). cpu:0.6 moves that share of them,
    cpu:embedding,blocks 0-5 those of these units, as for the other columns too. What has left the device is updated by
    the host's processor. The results are the same either way, but with --zero-quantized-weights and ZeRO stage 1 or
    2."""
    offload_params: TierShare = option(TierShare(), metavar=_TIERS, earlier="parallel")
    """Where parameters rest between their uses: on the device (none), in host memory (cpu), in files on disks (nvme,
    with --nvme-path), or in plain files (files, with --files-path). cpu:0.6 moves that share of them,
    by whole buckets. They are brought for each use, as those of other ranks are with --zero-stage 3; where optimizer
    state is sharded, they are too. The results are the same."""
    offload_gradients: TierShare = option(TierShare(), metavar=_TIERS, earlier="parallel")
    """Where gradients are summed, and wait for their update: on the device (none), in host memory (cpu), in files on
    disks (nvme, with --nvme-path), or in plain files (files, with --files-path). cpu:0.6 moves that share
    of them, by whole buckets. Those of a unit are on the device while its backward computes them; then they are
    reduced, and leave. So they are reduced for each micro-batch, as with --zero-stage 2, or once for all that pass a
    unit together (--micro-batch-order vertical)."""
    offload_activations: TierShare = option(TierShare(), metavar=_TIERS, earlier="parallel")
    """Where activations wait for their backward: none leaves them on the device, cpu copies them to host memory and
    back, beside the computations, nvme goes on from there to files in --nvme-path, and files to plain files in
    --files-path. SHARE: of the bytes that have time to leave, 1 without it; those whose backward is furthest away
    leave. The results are the same, to the bit."""
    nvme_path: tuple[str, ...] = option((), many=True, metavar="DIR", derived="no folder")
    """Folders for the files of --offload-optimizer, --offload-params, --offload-gradients and --offload-activations
    nvme, which are removed at the end. Each rank has one file in each folder, and they share its bytes in proportion to
    their speed, which is measured at the start."""
    files_path: str | None = option(None, metavar="DIR", derived="no folder")
    """A folder for --offload-optimizer, --offload-params, --offload-gradients and --offload-activations files, which
    another host may own, mounted by NFS or the like: each piece is a plain file, without locks and direct access, with
    a checksum in the rank that has written it. The files are removed at the end."""
    nvme_checkpoint: bool = option(False, needs="--offload-optimizer nvme: no optimizer state rests on disks")
    """Make each optimizer step durable in the files of --nvme-path, which take twice the space: a kill at any instant
    leaves a whole step, and the same command goes on from it. The files then stay until the run is finished or its last
    step is saved."""
    nvme_buffer_bytes: int = option(256 * 2**20, size=True, metavar="BYTES", expert=True)
    """Host memory of a rank for what is on its way: gradients and parameters of what has left the device, and what is
    read from files and written back; and as much again, at most, for --offload-activations nvme or files. Buffers of
    swap files come on top. Half as much means twice as many requests, half as large."""
    device_memory_budget: int | None = option(None, metavar="BYTES", size=True, derived="no budget", earlier="parallel")
    """Bytes on the device that a rank may take in a step: model state, activations and what is on its way. A run that
    would take more is refused before it starts, with the change that makes it fit. On a CPU without
    --host-memory-budget it counts what has left the device for host memory too, which is the same memory. On CUDA it is
    also the limit of the process's allocator."""
    host_memory_budget: int | None = option(None, metavar="BYTES", size=True, derived="no budget", earlier="parallel")
    """Bytes of host memory that a rank may take for what --offload-optimizer, --offload-params,
    --offload-gradients and --offload-activations bring there, buffers included; all ranks of a host take as many times
    as much. A run that would take more is refused."""
    placement: str = option("flags", metavar="flags|auto|FILE.yaml")
    """What lies where, and when it moves: as the flags say (flags), as a table in a file says, or the choice that a
    simulation finds fastest under --device-memory-budget and --host-memory-budget (auto). The banner says what was
    chosen, and what the next best would take."""
    placement_rates: str | None = option(
        None,
        metavar="FILE.yaml",
        derived="measured at the start",
        needs="--placement auto or --memory-trace",
        expert=True,
    )
    """For --placement auto: how fast the ranks compute, copy, update, read and write, from a file instead of a
    measurement. With it the choice is the same in every start. The page of --memory-trace has its times from it too."""
