"""Relations that the flags on the memory of activations must satisfy."""

from __future__ import annotations

from megazero.config.checks import CheckContext, Found, check


def _recompute(f: CheckContext) -> Found:
    p, layers = f.run.parallel, f.run.model.num_layers
    if p.activation_memory_budget is not None:
        return  # _activation_budget has the word
    if p.recompute_num_layers != 1 and p.recompute_granularity != "full":
        yield (
            f"--recompute-num-layers {p.recompute_num_layers} needs --recompute-granularity full, not "
            f"{p.recompute_granularity}"
        )
    elif p.recompute_num_layers > layers:
        yield (
            f"--recompute-num-layers {p.recompute_num_layers}: --num-layers is {layers}, so nothing would be recomputed"
        )


def _activation_budget(f: CheckContext) -> Found:
    p = f.run.parallel
    if p.activation_memory_budget is None:
        return
    if p.recompute_granularity != "none" or "recompute_granularity" in f.given:
        yield (
            f"--activation-memory-budget {p.activation_memory_budget} chooses what is computed again, and "
            f"--recompute-granularity {p.recompute_granularity} says it: drop one of them"
        )
    if p.recompute_num_layers != 1:
        yield (
            f"--activation-memory-budget {p.activation_memory_budget} chooses what is computed again, and "
            f"--recompute-num-layers {p.recompute_num_layers} says how often: drop --recompute-num-layers"
        )


def _device_budget(f: CheckContext) -> Found:
    whole, part = f.run.offload.device_memory_budget, f.run.parallel.activation_memory_budget
    if whole is not None and part is not None and part > whole:
        yield (
            f"--activation-memory-budget {part} is a part of --device-memory-budget {whole}: nearest: "
            f"--activation-memory-budget {whole}"
        )


def _shard_recompute_inputs(f: CheckContext) -> Found:
    p = f.run.parallel
    if p.shard_recompute_inputs and p.sequence_parallel and p.tp > 1:
        yield (
            "--shard-recompute-inputs shares out what all tp ranks keep alike, and with --sequence-parallel each rank "
            f"keeps only its own 1/{p.tp} of it: drop --shard-recompute-inputs"
        )


def _offload_activations(f: CheckContext) -> Found:
    off = f.run.offload
    if off.offload_activations.on_disks and not off.nvme_path:
        yield (
            f"--offload-activations {off.offload_activations} needs --nvme-path DIR, a folder for swap files on each "
            "disk that it may use"
        )
    if off.offload_activations and f.run.parallel.cuda_graphs:
        yield (
            f"--offload-activations {off.offload_activations} copies between the units of a micro-batch, which "
            "--cuda-graphs launches as one graph: drop one of them"
        )


RECOMPUTE_CHECKS = (
    check(_recompute, "recompute_num_layers", "recompute_granularity", "num_layers"),
    check(_activation_budget, "activation_memory_budget", "recompute_granularity", "recompute_num_layers"),
    check(_device_budget, "activation_memory_budget", "device_memory_budget"),
    check(_shard_recompute_inputs, "shard_recompute_inputs", "sequence_parallel", "tp"),
    check(_offload_activations, "offload_activations", "cuda_graphs", "nvme_path"),
)
