"""The banner's lines about model state: what travels in a step, when it is updated, what is gathered, which buffers
exist.
"""

from __future__ import annotations

from fused_ops import coded
from fused_ops.quantise import bytes_each
from megazero.config.derive import pipeline_schedule, shards_parameters
from megazero.config.dtypes import compute_dtype, grad_reduce_dtype
from megazero.config.schema import Run
from megazero.mpu.axes import Axes
from megazero.pipeline.build import step_options
from megazero.pipeline.schedule import is_breadth_first
from megazero.plan.gathered import gathered_bytes
from megazero.plan.step_lists import StageLists
from megazero.plan.step_memory import spare_bytes
from megazero.plan.traffic import Traffic, state_traffic
from megazero.train import banner_parts as parts
from megazero.train.banner_offload import offload_lines
from megazero.zero.messages import BITS


def zero_lines(steps: StageLists) -> list[tuple[str, str]]:
    """(name, text) of the traffic of gradients, hybrid shards and quantised messages, of late updates, of what leaves
    the device, of gathers, and of buffers.
    """
    run, axes = steps.run, steps.axes
    groups = step_options(run).groups(steps.micro_batches)
    micro_batches = steps.micro_batches if groups is None else len(groups)  # a group is gathered and reduced as one
    traffic, of_zero_1 = (
        _traffic(run, axes, micro_batches, stage, leaves=leaves)
        for stage, leaves in ((run.parallel.zero_stage, bool(run.offload.offload_gradients)), (1, False))
    )
    gradients = parts.traffic_sentence(
        run.parallel.zero_stage,
        micro_batches if axes.dp > 1 else 1,
        traffic.total / (of_zero_1.total or 1.0),
        breadth_first=is_breadth_first(pipeline_schedule(run.parallel), run.parallel.virtual_stages),
        what="micro-batches" if groups is None else "groups of micro-batches",
        leaves=bool(run.offload.offload_gradients),
    )
    messages = _messages(run, axes) if axes.dp * axes.cp > 1 else ""
    return (
        [("gradients", gradients)] * bool(gradients)
        + [("hybrid shards", parts.sets_sentence(run.parallel.zero_stage, traffic))] * axes.is_hybrid
        + [("messages", messages)] * bool(messages)
        + [("updates", parts.late_sentence(steps.axes.pp))] * run.parallel.late_update
        + offload_lines(steps)
        + [("base", sentence) for sentence in _base(steps)]
        + [("parameters", sentence) for sentence in _gathers(steps)]
        + [("buffers", sentence) for sentence in _buffers(steps)]
    )


def _traffic(run: Run, axes: Axes, micro_batches: int, zero_stage: int, *, leaves: bool) -> Traffic:
    """What the run would send per parameter under this ZeRO stage. leaves: whether gradients are summed elsewhere."""
    p, precision, replicas = run.parallel, run.optimizer.precision, axes.dp * axes.cp
    size = axes.shard_size or replicas
    once = is_breadth_first(pipeline_schedule(p), p.virtual_stages)
    bits, reduced = BITS[p.zero_quantized_gradients], grad_reduce_dtype(precision, p.grad_reduce_dtype).itemsize
    return state_traffic(
        zero_stage,
        size,
        replicas // size,
        micro_batches=micro_batches,
        reductions=1 if once and not leaves else micro_batches,
        gradient_bytes=reduced if bits is None else bytes_each(bits),
        parameter_bytes=bytes_each(8) if p.zero_quantized_weights else compute_dtype(precision).itemsize,
        summed_bytes=None if bits is None else bytes_each(8),
        shards_parameters=zero_stage == p.zero_stage and shards_parameters(p, run.offload),
        sums_leave=leaves,
    )


def _messages(run: Run, axes: Axes) -> str:
    p, precision = run.parallel, run.optimizer.precision
    bits, reduced = BITS[p.zero_quantized_gradients], grad_reduce_dtype(precision, p.grad_reduce_dtype).itemsize
    gathers = p.zero_quantized_weights and axes.shard_size != 1
    return parts.messages_sentence(
        (bytes_each(8), compute_dtype(precision).itemsize) if gathers else None,
        None if bits is None else (bytes_each(bits), reduced),
        kept=p.zero_gradient_error_feedback,
    )


def _base(steps: StageLists) -> list[str]:
    """A sentence on a base that is stored as codes."""
    bits = steps.run.lora.lora_base_bits
    if bits is None or steps.run.model.vocab_size is None:
        return []
    budget = max(steps.of(stage).budget for stage in range(steps.axes.pp))
    return [parts.base_sentence(bits, coded.bytes_each(bits), budget)]


def _gathers(steps: StageLists) -> list[str]:
    """Sentences on what the first and the last stage gather under ZeRO-3. Of codes the least possible is not known."""
    run, pp = steps.run, steps.axes.pp
    if (
        not shards_parameters(run.parallel, run.offload)
        or run.model.vocab_size is None
        or run.lora.lora_base_bits is not None
    ):
        return []
    found = [gathered_bytes(steps, stage) for stage in sorted({0, pp - 1})]
    return [
        parts.gathers_sentence(each.stage, pp, run.parallel.zero3_regather, each.budget, each.step, each.least)
        for each in found
        if each is not None
    ]


def _buffers(steps: StageLists) -> list[str]:
    """A sentence on the pool of buffers for whole gradients, where a rank keeps a shard of them (ZeRO-2 and 3)."""
    if steps.run.model.vocab_size is None:
        return []
    found = [spare_bytes(steps, stage) for stage in range(steps.axes.pp)]
    most = max(found)
    return [parts.buffers_sentence(most, found.index(most), len(found))] * bool(most)
