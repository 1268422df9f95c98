"""Relations that the flags of recomputation must satisfy."""

from __future__ import annotations

from megazero.config.checks import CheckContext, Found, check


def _recompute(f: CheckContext) -> Found:
    p, layers = f.run.parallel, f.run.model.num_layers
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


def _shard_recompute_inputs(f: CheckContext) -> Found:
    p = f.run.parallel
    if p.shard_recompute_inputs and p.sequence_parallel and p.tp > 1:
        yield (
            "--shard-recompute-inputs shares out what all tp ranks keep alike, and with --sequence-parallel each rank "
            f"keeps only its own 1/{p.tp} of it: drop --shard-recompute-inputs"
        )


RECOMPUTE_CHECKS = (
    check(_recompute, "recompute_num_layers", "recompute_granularity", "num_layers"),
    check(_activation_budget, "activation_memory_budget", "recompute_granularity"),
    check(_shard_recompute_inputs, "shard_recompute_inputs", "sequence_parallel", "tp"),
)
