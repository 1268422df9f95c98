"""From a `Run` and a grid to the stages and the engine of a rank. This file only assembles parts of other rooms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fused_ops.attention.reach import Reach
from fused_ops.attention.selection import NOTHING_TRIED, AttentionSupport
from fused_ops.attention.trial import AttentionWorkload, find_supports
from fused_ops.fp8 import refusal
from fused_ops.registry import compiled
from megazero.config.derive import (
    RecomputeTable,
    gathers_parameters,
    micro_batch_order,
    pipeline_schedule,
    recompute_by_flags,
    updates_early,
    whole_steps,
)
from megazero.config.dtypes import compute_dtype
from megazero.config.inventory import fp8_layers
from megazero.config.layers.kinds import Layer, kinds, layers
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.model.layout import ModelLayout
from megazero.model.stage import Stage, StageSpec
from megazero.mpu.bundle import MessageSpec
from megazero.mpu.fp8 import Fp8
from megazero.mpu.grid import Group, ProcessGrid
from megazero.mpu.lora import low_rank
from megazero.mpu.p2p import Channels
from megazero.pipeline.actions import ActivationActions, StateActions
from megazero.pipeline.engine import PipelineEngine
from megazero.pipeline.graphs import GraphedEngine, ReplayedGradients
from megazero.pipeline.kept import HostActivations
from megazero.pipeline.kept_disks import ActivationDisks, GrowingDisks
from megazero.pipeline.schedule import forward_only, is_breadth_first, stage_schedule
from megazero.pipeline.stage_specs import chunks_of, specs_of_stage
from megazero.program.instruction import Instruction
from megazero.program.passes.leaving import ActivationFiles
from megazero.program.passes.vertical import VerticalOrder
from megazero.program.shape import RankShape
from megazero.program.step import Lists, StepOptions
from megazero.system.streams import GraphCapture


def build_stages(
    run: Run, grid: ProcessGrid, recompute: RecomputeTable | None = None, *, allocate: bool = True
) -> list[Stage]:
    """The model chunks of this rank, uninitialised: `zero.portions` or a checkpoint sets their values.

    recompute: what backward computes again; default: what the flags say. allocate: whether parameters have memory
    (`ModelLayout.allocate`); a model state needs none.
    Communicates nothing. Raises ConfigError where --attention or --fp8 asks for what this device cannot do.
    """
    return stages_of(
        run,
        grid.at.pp,
        grid.tp,
        grid.device,
        attention_support(run, grid.device),
        _fp8_of(run, grid),
        recompute=recompute,
        allocate=allocate,
    )


def _fp8_of(run: Run, grid: ProcessGrid) -> Fp8 | None:
    """`fp8_state` of this rank. Raises ConfigError where its device has no FP8 products."""
    on_card = run.optimizer.fp8 != "off" and grid.device.type == "cuda"
    if on_card and (reason := refusal("cuda")):  # needs the GPU, so validation could not tell
        raise ConfigError([f"--fp8 {run.optimizer.fp8}: {reason}"])
    return fp8_state(run, grid.tp, grid.world, grid.device)


def fp8_state(run: Run, tp: Group, world: Group, device: torch.device) -> Fp8 | None:
    """The FP8 state that all FP8 layers of a rank share; None without --fp8."""
    if run.optimizer.fp8 == "off":
        return None
    history = run.optimizer.fp8_amax_history if run.optimizer.fp8 == "delayed" else 0
    return Fp8(fp8_layers(run), history, tp, world, device, keeps_weights=not gathers_parameters(run))


def stages_of(
    run: Run,
    pp_index: int,
    tp: Group,
    device: torch.device,
    attention: AttentionSupport = NOTHING_TRIED,
    fp8: Fp8 | None = None,
    *,
    recompute: RecomputeTable | None = None,
    allocate: bool = True,
    specs: Sequence[StageSpec] | None = None,
) -> list[Stage]:
    """The model chunks of any pipeline rank, uninitialised. On the device "meta" they take no memory.

    tp         the group of the tensor-parallel ranks; only its size and index are read
    recompute  what backward computes again; default: what the flags say
    allocate   as in `build_stages`
    specs      the layers of each chunk; default: those that the run gives this rank

    Communicates nothing.
    """
    stages: list[Stage] = []
    layout = layout_of(run, tp, device, attention, fp8, recompute=recompute, allocate=allocate)
    tied = not run.model.untie_embeddings_and_output_weights
    together = chunks_of(run).last_stage == 0
    """Whether embedding and head are on the same pipeline rank."""
    for spec in specs_of_stage(run, pp_index) if specs is None else specs:
        first = stages[0].embedding if tied and together and spec.has_head and stages else None
        shared = None if first is None else first.word
        stages.append(Stage(layout, spec, tied_across_stages=tied and not together, shared_embedding=shared))
    return stages


def layout_of(
    run: Run,
    tp: Group,
    device: torch.device,
    attention: AttentionSupport,
    fp8: Fp8 | None,
    *,
    recompute: RecomputeTable | None = None,
    allocate: bool = True,
) -> ModelLayout:
    """The layout of a run's model on a rank; arguments as in `stages_of`."""
    return ModelLayout(
        run.model,
        tp,
        compute_dtype(run.optimizer.precision),
        device=device,
        allocate=allocate,
        sequence_parallel=run.parallel.sequence_parallel,
        recompute=recompute_by_flags(run) if recompute is None else recompute,
        shard_recompute_inputs=run.parallel.shard_recompute_inputs,
        seed=run.data.seed,
        label_smoothing=run.optimizer.label_smoothing,
        z_loss=run.optimizer.z_loss,
        compile=run.parallel.compile,
        attention=attention,
        fp8=fp8,
        lora=low_rank(run.lora, run.model, run.data.seed),
    )


def attention_workload(run: Run, layer: Layer | None = None) -> AttentionWorkload:
    """The shapes, dtype and features of attention in this run's training on one rank. layer: None: the first one."""
    model, mixer = run.model, (layers(run.model)[0] if layer is None else layer).mixer
    return AttentionWorkload(
        compute_dtype(run.optimizer.precision),
        model.seq_length,
        run.schedule.micro_batch_size,
        mixer.groups // run.parallel.tp,
        mixer.heads // mixer.groups,
        mixer.size,
        alibi=mixer.alibi,
        documents=model.document_mask,
        dropout=model.attention_dropout > 0,
        reach=Reach(mixer.window, mixer.chunk),
        cap=mixer.cap,
    )


def attention_workloads(run: Run) -> tuple[AttentionWorkload, ...]:
    """`attention_workload` of every kind of layers that the model has."""
    return tuple(dict.fromkeys(attention_workload(run, layer) for layer in kinds(run.model)))


def attention_support(run: Run, device: torch.device) -> AttentionSupport:
    """The ways in which this rank can compute the run's attention. On a GPU each is tried once.

    Raises ConfigError where the one that --attention names does not work.
    """
    try:
        return find_supports(run.parallel.attention, attention_workloads(run), device)
    except ValueError as error:
        raise ConfigError([str(error)]) from error


def compiled_ops(run: Run, device: torch.device | str) -> tuple[str, ...]:
    """The ops that --compile compiles on this device: those without a kernel here. None without the flag."""
    if not run.parallel.compile:
        return ()
    return compiled(device, compute_dtype(run.optimizer.precision), fp8=bool(fp8_layers(run)))


def reduces_every_micro_batch(run: Run) -> bool:
    """Whether gradients are reduced at every micro-batch: from ZeRO-2 on, unless the schedule is breadth-first. Where
    their sums leave the device, always: a chunk's whole gradients would stay for several micro-batches otherwise.
    """
    parallel = run.parallel
    breadth_first = is_breadth_first(pipeline_schedule(parallel), parallel.virtual_stages)
    return bool(run.offload.offload_gradients) or (parallel.zero_stage >= 2 and not breadth_first)


def schedules(run: Run, pp_index: int) -> Callable[[int], tuple[Instruction, ...]]:
    """A function from a number of micro-batches to computations and transfers of a training step on this stage; in
    vertical order those of groups of micro-batches.
    """
    name, parallel, options = pipeline_schedule(run.parallel), run.parallel, step_options(run)

    def schedule(micro_batches: int) -> tuple[Instruction, ...]:
        groups = options.groups(micro_batches)
        number = micro_batches if groups is None else len(groups)
        return stage_schedule(name, parallel.pp, number, parallel.virtual_stages, pp_index)

    return schedule


def step_lists(run: Run, pp_index: int, shape: RankShape) -> Lists:
    """The lists of a rank of this stage. shape: its model state."""
    schedule_of = schedules(run, pp_index)
    return Lists(schedule_of, lambda m: forward_only(schedule_of(m)), shape, step_options(run), chunks_of(run).count)


def step_options(run: Run) -> StepOptions:
    """How the passes place a run's instructions."""
    leaves = run.offload.offload_activations
    return StepOptions(
        reduce_every=reduces_every_micro_batch(run),
        overlap=run.parallel.overlap,
        gathered_bytes=run.parallel.zero3_gathered_bytes,
        regather=run.parallel.zero3_regather,
        late=run.parallel.late_update,
        vertical=vertical_order(run),
        leaving=leaves.share if leaves else 0.0,
        files=ActivationFiles(leaves.tier, run.offload.nvme_buffer_bytes) if leaves.in_files else None,
        ahead=reads_ahead(run),
        early=updates_early(run.parallel, run.offload),
    )


def reads_ahead(run: Run) -> bool:
    """Whether the first optimizer state is read from disks before the norm is known. Where each step becomes whole on
    disks, a late one is recorded at its norm, and nothing may be under way then.
    """
    return run.parallel.overlap and not (run.parallel.late_update and whole_steps(run.offload))


def vertical_order(run: Run) -> VerticalOrder | None:
    """How micro-batches pass units together; None in horizontal order."""
    return VerticalOrder(run.parallel.vertical_group_size) if micro_batch_order(run) == "vertical" else None


def build_engine(
    run: Run,
    grid: ProcessGrid,
    stages: Sequence[Stage],
    channels: Channels,
    lists: Lists,
    state: StateActions | None,
    host: ActivationActions | None = None,
    micro_batch_size: int | None = None,
    computed: Callable[[], None] | None = None,
) -> PipelineEngine:
    """The engine that runs these stages. Its messages are [s(/t), b, h] of the compute dtype. host, computed: as
    there.
    """
    rows = run.model.seq_length // (run.parallel.tp if run.parallel.sequence_parallel else 1)
    shape = (rows, micro_batch_size or run.schedule.micro_batch_size, run.model.hidden_size)
    hidden = MessageSpec.single(shape, compute_dtype(run.optimizer.precision))
    messages = (hidden,) * (chunks_of(run).count - 1)
    return PipelineEngine(list(stages), grid, lists, messages, channels, state, host, computed)


def host_activations(
    run: Run, device: torch.device, disks: ActivationDisks | GrowingDisks | None = None
) -> HostActivations | None:
    """Where the activations of a run wait for their backward (--offload-activations); None: on the device. disks: where
    they go on from host memory.
    """
    return HostActivations(device, disks=disks) if run.offload.offload_activations else None


def with_graphs(
    engine: PipelineEngine, gradients: ReplayedGradients, run: Run, grid: ProcessGrid
) -> PipelineEngine | GraphedEngine:
    """The engine for training: with --cuda-graphs a `GraphedEngine` around it, else itself."""
    if not run.parallel.cuda_graphs:
        return engine
    # Early updates read gradients beside the last backward, as messages do.
    travels = grid.replicas.handle is not None or updates_early(run.parallel, run.offload)
    return GraphedEngine(engine, gradients, GraphCapture(grid.device), travels=travels)
