"""The banner, which a run prints before its first step: layout, model, memory, schedule, data.

This module only makes text; it decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from fused_ops.attention.selection import choose
from fused_ops.registry import refusal
from megazero.config.derive import padded_vocab, pipeline_schedule, uses_disks
from megazero.config.dtypes import compute_dtype, state_dtype
from megazero.config.dump import RUN_FILE
from megazero.config.inventory import parameters
from megazero.config.layer_choices import adapted, fp8_exceptions, lora_alpha
from megazero.config.schema import ModelConfig, Run
from megazero.mpu.axes import Axes
from megazero.mpu.grid import Group, ProcessGrid
from megazero.mpu.parameter import StateGroup
from megazero.optim.step_plan import StepPlan
from megazero.pipeline.build import attention_support, attention_workload, compiled_ops, step_options
from megazero.pipeline.graphs import replayed
from megazero.plan.bytes import stage_bytes
from megazero.plan.flops import recompute_step_flops, step_flops, trained_parameters
from megazero.plan.recompute import activation_peaks, gathered_inputs, recompute_choice
from megazero.plan.step_lists import StageLists
from megazero.plan.times import chunk_times
from megazero.program.simulate import simulate
from megazero.system import allocator, threads
from megazero.system import device as devices
from megazero.system.words import counted
from megazero.telemetry.units import count
from megazero.train import banner_parts as parts
from megazero.train import text_blocks as blocks
from megazero.train.banner_leaving import leaving_sentences
from megazero.train.banner_zero import zero_lines
from megazero.train.bodies import bodies_of
from megazero.train.memory_budgets import budget_sentences


def banner(
    run: Run,
    grid: ProcessGrid,
    steps: StageLists,
    text: str,
    start: str,
    changes: list[tuple[str, object, object]],
    said: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    notes: Sequence[str] = (),
    placed: Sequence[str] = (),
    samples: int | None = None,
) -> str:
    """The banner of a run on this grid.

    steps    the run's lists
    text     describes the data
    start    describes what the run starts from
    changes  (field, old, new) of what differs from the checkpoint's run
    said     settings that the user changed from the defaults, by section
    notes    sentences that the user should read before the run
    placed   sentences about a placement that was searched for
    samples  that are consumed at the run's end; None: of a run that does not resume
    """
    axes, zero = grid.axes, parts.zero(run.parallel.zero_stage, grid.axes)
    sections = [
        (f"megazero: {parts.ranks(axes.tp, axes.pp, axes.dp)}", parts.draw_grid(axes.pp, axes.dp, axes.tp)),
        ("Model", blocks.pairs([*_model(run), *_padding(run)])),
        (f"Memory of the model state, {zero}", parts.stage_table(stage_bytes(run, axes))),
        ("Schedule", blocks.pairs([*placement_lines(placed), *schedule_lines(steps), *_communication(run, grid)])),
        ("Run", blocks.pairs([*_training(run, text, samples), ("start", start)])),
        ("Changed since the checkpoint", parts.changes_table(changes)),
        ("Ops", _ops(run, grid.device)),
        ("Other than the defaults", _departures(run, said)),
        ("Worth knowing", blocks.bullets(notes)),
    ]
    return blocks.sections(sections)


def placement_lines(placed: Sequence[str]) -> list[tuple[str, str]]:
    """(name, text) of the sentences about a placement that was searched for; empty where none was."""
    return [("placement", "\n".join(placed))] * bool(placed)


def _ops(run: Run, device: torch.device) -> str:
    ops, bodies = compiled_ops(run, device), bodies_of(run, device)
    attention = choose(attention_workload(run).case(device), attention_support(run, device))
    lines = [("attention", f"{attention.body.value}: {attention.reason}")]
    if device.type == "cpu" and (why := refusal("weight_gradient", compute_dtype(run.optimizer.precision))):
        lines.append(("weight gradient", f"torch's own: no C++ kernel: {why}"))
    if run.parallel.compile and not ops:
        lines.append(("--compile", "changes nothing: its ops have kernels here, which are faster"))
    return f"{parts.fused_ops_table(bodies)}\n{blocks.pairs(lines)}"


def _model(run: Run) -> list[tuple[str, str]]:
    model = run.model
    head = "untied" if model.untie_embeddings_and_output_weights else "tied"
    layers = counted(model.num_layers, "layer")
    shape = f"{layers}, hidden {model.hidden_size}, {_heads(model)}, sequence {model.seq_length}"
    return [
        ("parameters", f"{count(parameters(run.model))} ({parameters(run.model):,})"),
        ("shape", f"{shape}, vocabulary {model.vocab_size}"),
        ("kind", f"{model.position_embedding} positions, {model.norm}, {model.activation}, {head} head"),
        (
            "precision",
            f"{run.optimizer.precision}; state and gradients "
            f"{str(state_dtype(run.optimizer.precision)).removeprefix('torch.')}",
        ),
        *_fp8(run),
        *_adapters(run),
    ]


def _padding(run: Run) -> list[tuple[str, str]]:
    """Why the table of stages may count more parameters than the model has."""
    rows = padded_vocab(run.model, run.parallel.tp)
    told = f"the vocabulary takes {rows:,} rows in memory, which the table below counts"
    return [] if rows == run.model.vocab_size else [("padding", told)]


def _heads(model: ModelConfig) -> str:
    heads = counted(model.num_attention_heads, "head")
    return heads if model.kv_channels is None else f"{heads} of {model.kv_channels}"


def _adapters(run: Run) -> list[tuple[str, str]]:
    if run.lora.lora_rank is None:
        return []
    trained = trained_parameters(run)
    layers = " ".join(adapted(run.lora, run.model))
    words = (
        f"{count(trained)} ({trained:,}) in adapters of rank {run.lora.lora_rank}, alpha {lora_alpha(run.lora):g}, on "
        f"{layers}"
    )
    return [("trained", f"{words}; all else is frozen, and has no gradients and no optimizer state")]


def _fp8(run: Run) -> list[tuple[str, str]]:
    o, left = run.optimizer, fp8_exceptions(run)
    if o.fp8 == "off":
        return []
    scaling = "current scaling" if o.fp8 == "current" else f"delayed scaling over {o.fp8_amax_history} steps"
    words = (
        f"products of the blocks' linear layers in training, {scaling}; copies of weights take 2 "
        "bytes each beside the model state"
    )
    return [("fp8", words), *([(f"still {o.precision}", "; ".join(left))] if left else [])]


def schedule_lines(steps: StageLists) -> list[tuple[str, str]]:
    """(name, text) of the schedule with its bubble, traffic of ZeRO and hybrid shards, recompute, CUDA graphs,
    activations that leave, and budgets of memory.
    """
    run, axes, micro_batches = steps.run, steps.axes, steps.micro_batches
    name, virtual = pipeline_schedule(run.parallel), run.parallel.virtual_stages
    lists, shapes = steps.schedule()
    report = simulate(lists, chunk_times(run), shapes)
    live, groups = max(report.peak_activations), step_options(run).groups(micro_batches)
    words = parts.schedule_sentence(name, axes.pp, micro_batches, virtual, report.bubble, live)
    lines = [("pipeline", words if groups is None else parts.vertical_sentence(words, [*map(len, groups)], axes.pp))]
    graphs = (
        parts.graphs_sentence(len(replayed(micro_batches, axes.dp > 1)), micro_batches)
        if run.parallel.cuda_graphs
        else ""
    )
    lines += [("cuda graphs", graphs)] * bool(graphs)
    lines += zero_lines(steps) + [("recompute", words) for words in _recompute(run, axes)]
    lines += [("activations", words) for words in leaving_sentences(steps)]
    return lines + [("budgets", words) for words in budget_sentences(run, axes, devices.kind(run.parallel.device))]


def _recompute(run: Run, axes: Axes) -> list[str]:
    """What backward computes again and what it costs; under a budget also what the activations then take."""
    budget, kind = run.parallel.activation_memory_budget, devices.kind(run.parallel.device)
    unknown = run.model.vocab_size is None or (kind == "cuda" and not devices.cuda_available())
    if budget is not None and unknown:  # in a dry run: the tokenizer is not read, or the card is elsewhere
        return []
    choice = recompute_choice(run, axes, kind)
    cost = f"{recompute_step_flops(run, choice.table) / step_flops(run):.0%} on top of the model's operations"
    if choice.missed:
        cost += f" (at most {choice.missed:.1%} of that more than the least)"
    gathered = max(gathered_inputs(run, axes, kind)) if run.parallel.shard_recompute_inputs else 0
    cost += f"; {parts.inputs_sentence(run.parallel.tp, gathered)}" if gathered else ""
    if budget is not None:
        peaks = activation_peaks(run, axes, kind)
        return [parts.budget_sentence(budget, Counter(choice.table), cost, peaks)]
    return [f"{run.parallel.recompute_granularity}, {cost}"] * (run.parallel.recompute_granularity != "none")


def _communication(run: Run, grid: ProcessGrid) -> list[tuple[str, str]]:
    """The transport of each axis (shared memory or the backend); empty for one rank."""
    of_state = grid.state_groups(StateGroup.REPLICAS)
    apart = of_state.across.size > 1
    ways = [
        ("tp", grid.tp, False),
        ("dp in sets" if apart else "dp", of_state.inner, False),
        ("dp across sets", of_state.across, False),
        ("pp", grid.pp, True),
    ]
    words = [f"{name} through {_way(group, messages)}" for name, group, messages in ways if group.handle is not None]
    if words:
        # Shared memory does not overlap: a rank copies its tensors itself, between computations.
        overlapped = run.parallel.overlap and any(
            group.handle is not None and group.exchange is None for group in (of_state.inner, of_state.across)
        )
        words += [
            word
            for word, on in (("sequence parallel", run.parallel.sequence_parallel), ("dp overlapped", overlapped))
            if on
        ]
    return [("communication", ", ".join(words))] * bool(words)


def _way(group: Group, messages: bool) -> str:
    return "shared memory" if group.exchange is not None and not messages else dist.get_backend(group.handle)


def _departures(run: Run, said: Mapping[str, Mapping[str, Any]]) -> str:
    """The settings that differ from the defaults, a paragraph for each section, and where the whole run is written."""
    shown = [
        (section, ", ".join(f"{name}={_word(value)}" for name, value in fields.items()))
        for section, fields in said.items()
    ]
    save = run.checkpoint.save
    everything = (
        f"{save}/{RUN_FILE}, which --config takes" if save else "--print-config prints it; with --save it is kept"
    )
    return blocks.pairs([*((section, words) for section, words in shown if words), ("(all of it)", everything)])


def _word(value: object) -> str:
    if isinstance(value, list):
        return "[" + " ".join(map(str, value)) + "]"
    if isinstance(value, str) and (not value or any(letter.isspace() for letter in value)):
        return repr(value)
    return "-" if value is None else str(value)


def _threads() -> str:
    number = torch.get_num_threads()
    said = f"{number} thread{'s' * (number != 1)} a rank"
    return (
        f"{said}, as {threads.VARIABLE} says"
        if threads.threads_set_by_user()
        else f"{said} (the host's cores, divided among its ranks)"
    )


def _length(run: Run, samples: int | None) -> str:
    """The length of a run. samples: as in `banner`; a rest of --train-samples that fills no batch is not trained."""
    schedule = run.schedule
    if schedule.train_samples is None:
        length = counted(schedule.train_iters or 0, "iteration")
    else:
        used = StepPlan(schedule).consumed_at_end() if samples is None else samples
        asked = schedule.train_samples  # a longer run may have gone beyond them
        length = f"{used:,} of {asked:,} samples, in whole batches" if used < asked else counted(asked, "sample")
    if run.trainer.exit_duration_in_mins:
        length += f" or {run.trainer.exit_duration_in_mins:g} minutes, whichever ends first"
    return length


def _training(run: Run, text: str, samples: int | None) -> list[tuple[str, str]]:
    schedule, device = run.schedule, torch.device("cpu" if run.parallel.device == "auto" else run.parallel.device)
    batch = f"{counted(schedule.global_batch_size, 'sample')} in micro-batches of {schedule.micro_batch_size}"
    if schedule.rampup_batch_size:
        start, step, samples = schedule.rampup_batch_size
        batch = f"{start} samples, {step} more at a time over {samples:,} samples, then {batch}"
    by = " by NVIDIA apex" * (run.optimizer.optimizer_impl == "apex")
    rate = f"{schedule.lr:g} to {schedule.min_lr:g}, {schedule.lr_decay_style}"
    return [
        ("data", text),
        ("length", _length(run, samples)),
        ("global batch", batch),
        ("learning rate", rate),
        (
            "optimizer",
            f"{run.optimizer.optimizer}{by}, weight decay {run.optimizer.weight_decay:g}, clip "
            f"{run.optimizer.clip_grad:g}",
        ),
        ("device", devices.name(device) + (f", {_threads()}" if device.type == "cpu" else "")),
        ("allocator", allocator.describe(device.type, returns_large=uses_disks(run))),
    ]
