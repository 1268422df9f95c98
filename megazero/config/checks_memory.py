"""Relations of the flags on memory: what leaves the device, what is computed again, and budgets."""

from __future__ import annotations

import os

from megazero.config.checks import CheckContext, Problems, reads
from megazero.config.derive import leaving, moves_in_parts, tiers
from megazero.config.options import run_options
from megazero.config.schema import Run
from megazero.config.tiers import ALIGNMENT, SLOTS, Offload, all_units, unknown_units

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


def _leaving(run: Run) -> dict[str, Offload]:
    """Flag -> what of the column of model state, or of the activations, leaves the device."""
    return {run_options()[field].flag: offload for field, offload in leaving(run).items()}


@reads("recompute_num_layers recompute_granularity num_layers activation_memory_budget")
def _recompute(context: CheckContext) -> Problems:
    p, layers = context.run.parallel, context.run.model.num_layers
    if p.activation_memory_budget is not None:
        return  # the budget chooses what is computed again: `_activation_budget` refuses these flags
    if p.recompute_num_layers != 1 and p.recompute_granularity != "full":
        yield (
            f"--recompute-num-layers {p.recompute_num_layers} needs --recompute-granularity full, not "
            f"{p.recompute_granularity}"
        )
    elif p.recompute_num_layers > layers:
        yield (
            f"--recompute-num-layers {p.recompute_num_layers}: --num-layers is {layers}, so nothing would be recomputed"
        )


@reads("activation_memory_budget recompute_granularity recompute_num_layers")
def _activation_budget(context: CheckContext) -> Problems:
    p = context.run.parallel
    budget = p.activation_memory_budget
    if budget is None:
        return
    chooses = f"--activation-memory-budget {budget} chooses what is computed again, and"
    if p.recompute_granularity != "none" or "recompute_granularity" in context.given:
        yield f"{chooses} --recompute-granularity {p.recompute_granularity} says it: drop one of them"
    if p.recompute_num_layers != 1:
        yield (f"{chooses} --recompute-num-layers {p.recompute_num_layers} says how often: drop --recompute-num-layers")


@reads("activation_memory_budget device_memory_budget")
def _device_budget(context: CheckContext) -> Problems:
    whole, part = context.run.offload.device_memory_budget, context.run.parallel.activation_memory_budget
    if whole is not None and part is not None and part > whole:
        yield (
            f"--activation-memory-budget {part} is a part of --device-memory-budget {whole}: nearest: "
            f"--activation-memory-budget {whole}"
        )


@reads("shard_recompute_inputs sequence_parallel tp")
def _shard_recompute_inputs(context: CheckContext) -> Problems:
    p = context.run.parallel
    if p.shard_recompute_inputs and p.sequence_parallel and p.tp > 1:
        yield (
            "--shard-recompute-inputs shares out what all tp ranks keep alike, and with --sequence-parallel each rank "
            f"keeps only its own 1/{p.tp} of it: drop --shard-recompute-inputs"
        )


@reads("offload_optimizer offload_params offload_gradients offload_activations nvme_path")
def _disks(context: CheckContext) -> Problems:
    for flag, offload in _leaving(context.run).items():
        if offload.on_disks and not context.run.offload.nvme_path:
            yield f"{flag} {offload} needs --nvme-path DIR, a folder for swap files on each disk that it may use"


@reads("nvme_path")
def _folders(context: CheckContext) -> Problems:
    folders = context.run.offload.nvme_path
    places = [os.path.realpath(folder) for folder in folders]
    twice = [folder for number, folder in enumerate(folders) if places[number] in places[:number]]
    if twice:
        yield f"--nvme-path {' '.join(folders)}: {twice[0]} is there twice; name each folder once"


@reads("offload_optimizer offload_params offload_gradients nvme_buffer_bytes precision optimizer")
def _buffer(context: CheckContext) -> Problems:
    run, least = context.run, least_buffer(context.run)
    if moves_in_parts(run) and run.offload.nvme_buffer_bytes < least:
        leaving = " ".join(f"{run_options()[field].flag} {offload}" for field, offload in tiers(run).items() if offload)
        yield (
            f"--nvme-buffer-bytes {run.offload.nvme_buffer_bytes} does not hold {SLOTS} parts of {ALIGNMENT} elements, "
            f"which with {leaving} are on their way at a time; nearest: --nvme-buffer-bytes {least}"
        )


@reads("offload_optimizer offload_params offload_gradients offload_activations num_layers")
def _units(context: CheckContext) -> Problems:
    layers = context.run.model.num_layers
    for flag, offload in _leaving(context.run).items():
        unknown = unknown_units(offload.units, layers)
        if unknown:
            yield (
                f"{flag} {offload}: there is no {', no '.join(unknown)}; the units of this model are "
                f"{all_units(layers)}, and a share is a number, such as {offload.tier.value}:0.5"
            )


@reads("offload_params offload_gradients offload_activations cuda_graphs")
def _graphs(context: CheckContext) -> Problems:
    off = context.run.offload
    if not context.run.parallel.cuda_graphs:
        return
    columns = {"parameters": ("--offload-params", off.offload_params)}
    columns |= {"gradients": ("--offload-gradients", off.offload_gradients)}
    for column, (flag, offload) in columns.items():
        if offload:
            yield (
                f"--cuda-graphs needs {column} at fixed addresses, which {flag} {offload} does not have: drop one of "
                "them"
            )
    if off.offload_activations:
        yield (
            f"--offload-activations {off.offload_activations} copies between the units of a micro-batch, which "
            "--cuda-graphs launches as one graph: drop one of them"
        )


@reads("optimizer_impl offload_optimizer")
def _apex(context: CheckContext) -> Problems:
    offload = context.run.offload.offload_optimizer
    if context.run.optimizer.optimizer_impl == "apex" and offload:
        yield (
            f"--optimizer-impl apex has kernels for CUDA only, and --offload-optimizer {offload} updates in host "
            "memory; nearest: --optimizer-impl megazero"
        )


@reads("nvme_checkpoint no_save_optim offload_optimizer")
def _whole_steps(context: CheckContext) -> Problems:
    off = context.run.offload
    if off.nvme_checkpoint and off.offload_optimizer.on_disks and context.run.checkpoint.no_save_optim:
        yield (
            "--nvme-checkpoint removes its files once the last step is in a checkpoint of --save, which with "
            "--no-save-optim has no optimizer state to go on from: drop one of them"
        )


MEMORY_CHECKS = (
    *(_recompute, _activation_budget, _device_budget, _shard_recompute_inputs),
    *(_disks, _folders, _buffer, _units, _graphs, _apex, _whole_steps),
)
