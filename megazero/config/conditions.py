"""Conditions under which flags have an effect, for the table in `effects`."""

from __future__ import annotations

from collections.abc import Callable

from megazero.config.checks import CheckContext
from megazero.config.derive import micro_batch_order, moves_in_parts, pipeline_schedule, tiers, uses_disks
from megazero.config.lengths import Measure
from megazero.config.options import run_options
from megazero.config.placement import AUTO


def fp16(f: CheckContext) -> bool:
    return f.run.optimizer.precision == "fp16"


def dynamic(f: CheckContext) -> bool:
    return fp16(f) and f.run.optimizer.loss_scale is None


def adam(f: CheckContext) -> bool:
    return f.run.optimizer.optimizer != "sgd"


def saves(f: CheckContext) -> bool:
    return f.run.checkpoint.save is not None


def loads(f: CheckContext) -> bool:
    return f.run.checkpoint.load is not None


def instructed(f: CheckContext) -> bool:
    return bool(f.run.data.instruction_data)


def decays(f: CheckContext) -> bool:
    return f.run.schedule.lr_decay_style != "constant"


def warms_up_by_a_share(f: CheckContext) -> bool:
    return f.run.schedule.lr_warmup is not None and f.run.schedule.lr_warmup.measure is Measure.SHARE


def adapts(f: CheckContext) -> bool:
    return f.run.lora.lora_rank is not None


def rests_on_disks(f: CheckContext) -> bool:
    """Whether some of the model state or of the activations does."""
    return uses_disks(f.run) or f.run.offload.offload_activations.on_disks


def state_on_disks(f: CheckContext) -> bool:
    """Whether some optimizer state rests on disks."""
    return f.run.offload.offload_optimizer.on_disks


def leaves_device(f: CheckContext) -> bool:
    """Whether some model state or activations wait in host memory or on disks."""
    return any(tiers(f.run).values()) or bool(f.run.offload.offload_activations)


def moves_parts(f: CheckContext) -> bool:
    """Whether some model state moves in parts of buckets, or activations go to disks."""
    return moves_in_parts(f.run) or f.run.offload.offload_activations.on_disks


def vertical(f: CheckContext) -> bool:
    """Whether micro-batches pass layers together."""
    return micro_batch_order(f.run) == "vertical"


def searches(f: CheckContext) -> bool:
    return f.run.offload.placement == AUTO


def several(f: CheckContext) -> bool:
    return f.world_size != 1


def reads_text(f: CheckContext) -> bool:
    return f.run.data.tokenizer is not None or not (f.run.data.data_path or f.run.data.instruction_data)


def evaluates(f: CheckContext) -> bool:
    return f.run.trainer.eval_iters > 0


def validates(f: CheckContext) -> bool:
    return not f.run.data.instruction_data or bool(f.run.data.valid_instruction_data)


def shards(f: CheckContext) -> bool:
    """Whether some model state has several replicas: over dp, or a tied embedding on two stages."""
    tied = (
        not f.run.model.untie_embeddings_and_output_weights
        and f.run.parallel.pp > 1
        and pipeline_schedule(f.run.parallel) != "zb-v"
    )
    return f.dp != 1 or tied


def accumulates(f: CheckContext) -> bool:
    """Whether a step may have several micro-batches."""
    return f.dp is None or f.run.schedule.global_batch_size > f.run.schedule.micro_batch_size * f.dp


def reduces(f: CheckContext) -> bool:
    return shards(f) or (f.run.parallel.sequence_parallel and f.run.parallel.tp > 1)


def quantises(f: CheckContext) -> bool:
    return f.run.parallel.zero_quantized_gradients != "none"


def ramps(f: CheckContext) -> bool:
    ramp = f.run.schedule.rampup_batch_size
    return ramp is None or len(ramp) != 3 or ramp[0] < f.run.schedule.global_batch_size


def within(field: str) -> Callable[[CheckContext], bool]:
    """The condition that a run counted in iterations has at least as many as this field says."""

    def holds(f: CheckContext) -> bool:
        every, last = getattr(getattr(f.run, run_options()[field].section), field), f.run.schedule.train_iters
        return last is None or every <= last

    return holds
