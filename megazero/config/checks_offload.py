"""Relations that a run must satisfy whose model state does not rest on the device alone."""

from __future__ import annotations

import os

from megazero.config.checks import CheckContext, Found, check
from megazero.config.schema import Run
from megazero.config.tiers import ALIGNMENT, SLOTS, Offload, Tier, offload_of

_BYTES = {"fp64": (8, 8), "fp32": (4, 4), "bf16": (4, 2), "fp16": (4, 2)}
"""Of an element of a gradient or of a column of the optimizer's, and of a parameter, by --precision."""


def least_buffer(run: Run, offload: Offload) -> int:
    """The bytes of --nvme-buffer-bytes that hold the smallest parts: their gradients and parameters, and the optimizer
    state of those that rest on disks.
    """
    state, parameter = _BYTES[run.optimizer.precision]
    columns = 2 if run.optimizer.optimizer == "sgd" else 3
    on_disk = columns * state if offload.tier is Tier.DISK else 0
    return SLOTS * ALIGNMENT * (state + parameter + on_disk)


def _offload(f: CheckContext) -> Found:
    cfg, text = f.run.offload, f.run.offload.offload_optimizer
    try:
        offload = offload_of(text)
    except ValueError as reason:
        yield f"--offload-optimizer {text}: {reason}"
        return
    if not offload:
        return
    if offload.tier is Tier.DISK and not cfg.nvme_path:
        yield f"--offload-optimizer {text} needs --nvme-path DIR, a folder for swap files on each disk that it may use"
    least = least_buffer(f.run, offload)
    if cfg.nvme_buffer_bytes < least:
        yield (
            f"--nvme-buffer-bytes {cfg.nvme_buffer_bytes} does not hold {SLOTS} parts of {ALIGNMENT} elements, which "
            f"with --offload-optimizer {text} are on their way at a time; nearest: --nvme-buffer-bytes {least}"
        )


def _folders(f: CheckContext) -> Found:
    folders = f.run.offload.nvme_path
    where = [os.path.realpath(folder) for folder in folders]
    twice = [folder for number, folder in enumerate(folders) if where[number] in where[:number]]
    if twice:
        yield f"--nvme-path {' '.join(folders)}: {twice[0]} is there twice; name each folder once"


def _apex(f: CheckContext) -> Found:
    o, text = f.run.optimizer, f.run.offload.offload_optimizer
    if o.optimizer_impl == "apex" and text != Tier.DEVICE.value:
        yield (
            f"--optimizer-impl apex has kernels for CUDA only, and --offload-optimizer {text} updates in host memory; "
            "nearest: --optimizer-impl megazero"
        )


OFFLOAD_CHECKS = (
    check(_offload, "offload_optimizer", "nvme_path", "nvme_buffer_bytes", "precision", "optimizer"),
    check(_folders, "nvme_path"),
    check(_apex, "optimizer_impl", "offload_optimizer"),
)
