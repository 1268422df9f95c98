"""Relations that a run must satisfy whose model state does not rest on the device alone."""

from __future__ import annotations

import os

from megazero.config.checks import CheckContext, Found, check
from megazero.config.derive import moves_in_parts, tiers
from megazero.config.options import run_options
from megazero.config.schema import Run
from megazero.config.tiers import ALIGNMENT, SLOTS
from megazero.config.units import all_units, unknown_units

_BYTES = {"fp64": (8, 8), "fp32": (4, 4), "bf16": (4, 2), "fp16": (4, 2)}
"""Of an element of a gradient or of a column of the optimizer's, and of a parameter, by --precision."""


def least_buffer(run: Run) -> int:
    """The bytes of --nvme-buffer-bytes that hold the smallest parts: their gradients and parameters, the optimizer
    state and sums of gradients of those that rest on disks, and the parameters that are read from there.
    """
    state, parameter = _BYTES[run.optimizer.precision]
    columns = 2 if run.optimizer.optimizer == "sgd" else 3
    on_disk = columns * state * run.offload.offload_optimizer.on_disks
    read = parameter * run.offload.offload_params.on_disks
    sums = state * run.offload.offload_gradients.on_disks
    return SLOTS * ALIGNMENT * (state + parameter + on_disk + read + sums)


def _offload(f: CheckContext) -> Found:
    cfg, columns = f.run.offload, {run_options()[field].flag: offload for field, offload in tiers(f.run).items()}
    for flag, offload in columns.items():
        if offload.on_disks and not cfg.nvme_path:
            yield f"{flag} {offload} needs --nvme-path DIR, a folder for swap files on each disk that it may use"
    if not moves_in_parts(f.run):
        return
    least = least_buffer(f.run)
    if cfg.nvme_buffer_bytes < least:
        leaving = " ".join(f"{flag} {offload}" for flag, offload in columns.items() if offload)
        yield (
            f"--nvme-buffer-bytes {cfg.nvme_buffer_bytes} does not hold {SLOTS} parts of {ALIGNMENT} elements, which "
            f"with {leaving} are on their way at a time; nearest: --nvme-buffer-bytes {least}"
        )


def _units(f: CheckContext) -> Found:
    layers = f.run.model.num_layers
    for field, offload in {**tiers(f.run), "offload_activations": f.run.offload.offload_activations}.items():
        unknown = unknown_units(offload.units, layers)
        if unknown:
            yield (
                f"{run_options()[field].flag} {offload}: there is no {', no '.join(unknown)}; the units of this model "
                f"are {all_units(layers)}, and a share is a number, such as {offload.tier.value}:0.5"
            )


def _graphs(f: CheckContext) -> Found:
    off = f.run.offload
    if f.run.parallel.cuda_graphs and off.offload_params:
        yield (
            "--cuda-graphs needs parameters at fixed addresses, which "
            f"--offload-params {off.offload_params} does not have: drop one of them"
        )
    if f.run.parallel.cuda_graphs and off.offload_gradients:
        yield (
            "--cuda-graphs needs gradients at fixed addresses, which "
            f"--offload-gradients {off.offload_gradients} does not have: drop one of them"
        )


def _folders(f: CheckContext) -> Found:
    folders = f.run.offload.nvme_path
    where = [os.path.realpath(folder) for folder in folders]
    twice = [folder for number, folder in enumerate(folders) if where[number] in where[:number]]
    if twice:
        yield f"--nvme-path {' '.join(folders)}: {twice[0]} is there twice; name each folder once"


def _apex(f: CheckContext) -> Found:
    o, offload = f.run.optimizer, f.run.offload.offload_optimizer
    if o.optimizer_impl == "apex" and offload:
        yield (
            f"--optimizer-impl apex has kernels for CUDA only, and --offload-optimizer {offload} updates in host "
            "memory; nearest: --optimizer-impl megazero"
        )


def _whole_steps(f: CheckContext) -> Found:
    if f.run.offload.nvme_checkpoint and f.run.offload.offload_optimizer.on_disks and f.run.checkpoint.no_save_optim:
        yield (
            "--nvme-checkpoint removes its files once the last step is in a checkpoint of --save, which with "
            "--no-save-optim has no optimizer state to go on from: drop one of them"
        )


OFFLOAD_CHECKS = (
    check(
        _offload,
        *("offload_optimizer", "offload_params", "offload_gradients"),
        *("nvme_path", "nvme_buffer_bytes", "precision", "optimizer"),
    ),
    check(_units, "offload_optimizer", "offload_params", "offload_gradients", "offload_activations", "num_layers"),
    check(_graphs, "offload_params", "offload_gradients", "cuda_graphs"),
    check(_folders, "nvme_path"),
    check(_apex, "optimizer_impl", "offload_optimizer"),
    check(_whole_steps, "nvme_checkpoint", "no_save_optim"),
)
