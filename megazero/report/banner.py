"""A run's report as text: the banner before the first step, and the verdict of --validate-only.

A line is a heading and a sentence; an empty sentence is not shown. The text is ASCII, so that any locale prints it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby, starmap

from fused_ops import coded
from megazero.config.derive import folders_of, lora_alpha, query_groups, tiers, updates_early, whole_steps
from megazero.config.dtypes import state_dtype
from megazero.config.dump import RUN_FILE
from megazero.config.inventory import adapted, fp8_exceptions
from megazero.config.layers.kinds import pattern_items
from megazero.config.placement import PLACEMENT, ROWS
from megazero.config.schema import ModelConfig, ParallelConfig, Run
from megazero.config.tiers import FILE_TIERS, Tier
from megazero.mpu.axes import Axes
from megazero.optim.step_plan import StepPlan
from megazero.pipeline.schedule import is_breadth_first
from megazero.plan.budgets import budgets_of, fullest
from megazero.plan.rank_state import StageBytes
from megazero.plan.step_memory import rank_of, rank_words
from megazero.plan.traffic import GatheredBytes, Traffic
from megazero.program.instruction import Lane, lanes_of_files
from megazero.report import text_blocks as blocks
from megazero.report.run_report import (
    LeavingReport,
    MachineReport,
    PredictionReport,
    RecomputeReport,
    RunReport,
    StateMessages,
)
from megazero.system.words import counted
from megazero.telemetry.units import count, size

Line = tuple[str, str]
_RECOMPUTED = {"full": "whole", "selective": "attention cores"}
_PLACES = ("in host memory", *(files.place for files in FILE_TIERS.values()))  # those of `OFF_DEVICE`


def banner(report: RunReport) -> str:
    """What a run prints before its first step: layout, model, memory, schedule, data, ops, and the user's settings."""
    axes, zero = report.axes, zero_words(report.run.parallel.zero_stage, report.axes)
    return blocks.sections(
        (f"megazero: {ranks_words(axes)}", blocks.draw_grid(axes.pp, axes.dp, axes.tp)),
        ("Model", blocks.pairs(model_lines(report))),
        (f"Memory of the model state, {zero}", stage_table(report.memory.stages)),
        ("Schedule", blocks.pairs(schedule_lines(report))),
        ("Run", blocks.pairs(_run_lines(report))),
        ("Changed since the checkpoint", blocks.table(["changed", "saved", "now"], report.changes, left=3)),
        ("Ops", ops_table(report.machine) if report.machine else ""),
        ("Left open, and decided", blocks.bullets(decided_lines(report))),
        ("Other than the defaults", _departures(report)),
        ("Worth knowing", blocks.bullets(report.notes)),
    )


def ranks_words(axes: Axes) -> str:
    """`4 ranks, tp 2 x pp 2 x dp 1`."""
    return f"{counted(axes.tp * axes.pp * axes.dp, 'rank')}, tp {axes.tp} x pp {axes.pp} x dp {axes.dp}"


def zero_words(zero_stage: int, axes: Axes) -> str:
    """`ZeRO-1`, or `ZeRO-1 in sets of 2 of 4 replicas`."""
    return f"ZeRO-{zero_stage}" + f" in sets of {axes.shard_size} of {axes.dp * axes.cp} replicas" * axes.is_hybrid


def decided_lines(report: RunReport) -> list[str]:
    """What the user left open, by what it follows from. A placement has lines of its own."""
    rows = {row.field for row in ROWS.values()} | {PLACEMENT, "placement_rates"}
    by_reason: dict[str, list[str]] = {}
    for decision in report.decisions:
        if not (report.placement and decision.field in rows):
            by_reason.setdefault(decision.why, []).append(_setting(decision.field, decision.value))
    return [f"{why}: {', '.join(settings)}" for why, settings in by_reason.items()]


def model_lines(report: RunReport) -> list[Line]:
    run, model, o = report.run, report.run.model, report.run.optimizer
    width = "" if model.kv_channels is None else f" of {model.kv_channels}"
    shape = f"{counted(model.num_layers, 'layer')}, hidden {model.hidden_size}, "
    groups, heads = query_groups(model), model.num_attention_heads
    shared = f", {counted(groups, 'key-value head')}" if groups != heads else ""
    shape += f"{counted(heads, 'head')}{width}{shared}, sequence {model.seq_length}"
    head = "untied" if model.untie_embeddings_and_output_weights else "tied"
    scaling = "current scaling" if o.fp8 == "current" else f"delayed scaling over {o.fp8_amax_history} steps"
    fp8 = f"products of the blocks' linear layers in training, {scaling}; copies of weights take 2 bytes each beside "
    padding = f"the vocabulary takes {report.vocabulary_rows:,} rows in memory, which the table below counts"
    return [
        ("parameters", f"{count(report.parameters)} ({report.parameters:,})"),
        ("shape", f"{shape}, vocabulary {model.vocab_size}"),
        ("kind", f"{model.position_embedding} positions, {model.norm}, {model.activation}, {head} head"),
        ("layers", layers_words(model)),
        ("precision", f"{o.precision}; state and gradients {str(state_dtype(o.precision)).removeprefix('torch.')}"),
        ("fp8", f"{fp8}the model state" if o.fp8 != "off" else ""),
        (f"still {o.precision}", "; ".join(fp8_exceptions(run)) if o.fp8 != "off" else ""),
        ("trained", "" if report.trained is None else _adapters(report.run, report.trained)),
        ("padding", padding if report.vocabulary_rows != model.vocab_size else ""),
    ]


def layers_words(model: ModelConfig) -> str:
    """How many layers are what the pattern says; empty where all are alike."""
    counts = Counter(str(item) for item in pattern_items(model))
    return "" if model.layer_pattern is None else ", ".join(f"{number} of {text}" for text, number in counts.items())


def _adapters(run: Run, trained: int) -> str:
    rank, layers = f"rank {run.lora.lora_rank}, alpha {lora_alpha(run.lora):g}", " ".join(adapted(run.lora, run.model))
    adapters = f"{count(trained)} ({trained:,}) in adapters of {rank}, on {layers}"
    return f"{adapters}; all else is frozen, and has no gradients and no optimizer state"


def stage_table(stages: Sequence[StageBytes], layer: str = "block") -> str:
    """Parameters and bytes of one rank of each stage; consecutive equal stages share a line. Where something leaves the
    device, the first table tells of the device and a second one of the rest. layer: what a stage has several of.
    """
    on_device, elsewhere = list[list[str]](), list[list[str]]()
    for state, members in groupby(enumerate(stages), key=lambda pair: pair[1]):
        name = blocks.span([number for number, _ in members])
        chunks = f" in {state.chunks} chunks" if state.chunks > 1 else ""
        parts = ["embedding"] * state.embedding + [counted(state.blocks, layer) + chunks] + ["head"] * state.head
        amounts = state.weights, state.gradients, state.optimizer, state.total
        on_device.append([name, " + ".join(parts), count(state.parameters), *map(size, amounts)])
        off = state.elsewhere
        in_memory = (column[0] for column in (off.parameters, off.gradients, off.optimizer))
        elsewhere.append([name, *map(size, (*in_memory, off.slots + off.buffers, off.memory, off.files))])
    leaves = any(state.elsewhere for state in stages)
    headings = ["stage", "holds", "parameters", "weights", "gradients", "optimizer", "device" if leaves else "total"]
    table = blocks.table(headings, on_device, left=2)
    files = [files.name for tier, files in FILE_TIERS.items() if any(state.elsewhere.on(tier) for state in stages)]
    in_files = " and ".join(files) or "disks"
    headings = ["stage", "host: weights", "gradients", "optimizer", "on its way", "host memory", in_files]
    return f"{table}\n\n{blocks.table(headings, elsewhere)}" if leaves else table


def schedule_lines(report: RunReport) -> list[Line]:
    """How a step is computed, what it moves and what it takes. A line without a sentence is about what it has not."""
    p, axes, memory, sent = report.run.parallel, report.axes, report.memory, report.state_messages
    replayed, bits, decoded = report.schedule.replayed, report.run.lora.lora_base_bits, memory.decoded
    late = "late: a unit is updated in the next step, just before its first forward"
    late += "; a stage that waits for its first hidden states updates meanwhile" * (axes.pp > 1)
    return [
        ("placement", "\n".join(report.placement)),
        ("pipeline", _pipeline(report)),
        ("cuda graphs", "" if replayed is None else graphs_sentence(replayed, report.schedule.micro_batches)),
        ("gradients", reductions_sentence(report)),
        ("hybrid shards", sets_sentence(p.zero_stage, sent.traffic) if axes.is_hybrid else ""),
        ("messages", _element_bytes(sent, kept=p.zero_gradient_error_feedback)),
        ("updates", f"{late}. Evaluations and saves update first" if p.late_update else early_sentence(report)),
        *(_offload(report) if memory.moved else ()),
        ("base", _codes(bits, decoded) if bits and decoded is not None else ""),
        *(("parameters", gathers_sentence(gathered, axes.pp, p.zero3_regather)) for gathered in memory.gathered),
        ("buffers", _spare_buffers(memory.spare) if any(memory.spare) else ""),
        ("recompute", _recompute(report.recompute, p) if report.recompute else ""),
        ("activations", _leaving(memory.leaving, axes.pp) if memory.leaving else ""),
        ("budgets", budgets_sentence(report)),
        ("communication", _communication(report.machine, p) if report.machine and report.machine.ways else ""),
    ]


def _pipeline(report: RunReport) -> str:
    """The schedule and its bubble; in vertical order the groups of micro-batches that pass layers together."""
    p, pp, schedule = report.run.parallel, report.axes.pp, report.schedule
    number, groups = schedule.micro_batches, schedule.groups
    chunks = f", {p.virtual_stages} model chunks per rank" if p.virtual_stages > 1 else ""
    staged = (
        f"{schedule.name}{chunks}: {number} micro-batches over {pp} stages, bubble {100 * schedule.bubble:.1f}% "
        f"of the step, at most {schedule.live} micro-batch activations alive on a rank"
    )
    if groups is None:
        in_turn = counted(number, "micro-batch", "micro-batches") + " one after the other" * (number > 1)
        return staged if pp > 1 else f"one stage: {in_turn}, no bubble"
    together = f"all {groups[0]} micro-batches" if len(groups) == 1 else f"{len(groups)} groups of {groups[0]} at most"
    advice = "; --vertical-group-size makes the bubble smaller" * (len(groups) == 1)
    passes = f"Vertical order: {together} pass a layer before the next one, forward and backward"
    return f"{staged + advice if pp > 1 else 'one stage, no bubble'}. {passes}"


def graphs_sentence(replayed: int, micro_batches: int) -> str:
    """The effect of --cuda-graphs: how many of a rank's micro-batches are replayed in a step."""
    nothing = "with dp the first and the last of a rank's micro-batches, which gather and reduce, are never replayed"
    some = f"replay {replayed} of a rank's {micro_batches} micro-batches a step"
    return some if replayed else f"change nothing: {nothing}, and there are {micro_batches}"


def reductions_sentence(report: RunReport) -> str:
    """The extra traffic of gradients that are reduced several times in a step; empty if there is none. gpipe with
    virtual stages runs a chunk's micro-batches one after the other, so it reduces once unless gradients leave.
    """
    p, groups, replicas = report.run.parallel, report.schedule.groups, report.axes.dp
    leaves = bool(report.run.offload.offload_gradients)
    number = report.schedule.micro_batches if groups is None else len(groups)
    if replicas == 1 or number == 1 or not (p.zero_stage == 2 or (leaves and p.zero_stage < 2)):
        return ""
    if is_breadth_first(report.schedule.name, p.virtual_stages) and not leaves:
        after = "each chunk's gradients are reduced once, after its last micro-batch"
        return f"{after}; at most two chunks' full gradients are held"
    if (ratio := report.state_messages.of_zero_1) == 1:
        return ""
    what = "micro-batches" if groups is None else "groups of micro-batches"
    once = "--micro-batch-order vertical reduces once" if groups is None else "one group is reduced once"
    result = "they can leave the device" if leaves else "only the own shard is kept"
    times = f"{ratio:.2f} times the data-parallel traffic of --zero-stage 1 ({once})"
    return f"gradients are reduced at each of the {number} {what}, so that {result}: {times}"


def sets_sentence(zero_stage: int, traffic: Traffic) -> str:
    """The traffic of hybrid shards."""
    across = f"{traffic.across:.3g}"
    if not traffic.inside:
        whole = "none: in a set of one rank each keeps the whole state, as with --zero-stage 0"
        return f"{whole}; a rank sends {across} bytes per parameter across the sets in a step"
    sends = "sends at most" if zero_stage == 3 else "sends"
    inside = f"a rank {sends} {traffic.inside:.3g} bytes per parameter inside its set in a step"
    return f"{inside}, and {across} across the sets"


def _element_bytes(sent: StateMessages, *, kept: bool) -> str:
    """What travels in blocks of small integers. kept: whether what blocks lose of gradients is added to the next."""
    weights = "parameters are gathered in blocks of int8: {:.3f} bytes each, not {}"
    gradients = "gradients are sent in blocks: {:.3f} bytes each, not {}" + ", with error feedback" * kept
    each = (weights, sent.parameter), (gradients, sent.gradient)
    return "; ".join(sentence.format(*amounts) for sentence, amounts in each if amounts is not None)


def _offload(report: RunReport) -> list[Line]:
    """What of the model state leaves the device, and what a step moves, on the stage where most leaves."""
    moved, stages = report.memory.moved, report.memory.stages
    stage = max(range(len(stages)), key=lambda stage: stages[stage].elsewhere.host + stages[stage].elsewhere.in_files)
    state, lanes, off = stages[stage], moved[stage], stages[stage].elsewhere
    columns = (
        ("master weights and moments", off.optimizer, state.optimizer),
        ("weights", off.parameters, state.weights),
        ("gradients", off.gradients, state.gradients),
    )
    rank, parts = rank_of(stage, len(stages)), list[str]()
    for name, off_device, on_device in columns:
        places = [f"{size(amount)} {place}" for place, amount in zip(_PLACES, off_device, strict=True) if amount]
        parts += [f"of {size(sum(off_device) + on_device)} of {name} {rank} has {' and '.join(places)}"] * bool(places)
    copies = f"{size(lanes[Lane.TO_HOST.value])} to the host and {size(lanes[Lane.TO_DEVICE.value])} to the device"
    on_way = f"{size(off.slots + off.buffers)} of host memory for what is on its way; a step copies {copies}"
    nothing = "nothing leaves the device: the share is of fewer than 1,024 elements"
    used = {column.tier for column in tiers(report.run).values()}
    files = (_file_line(report, tier, stage) for tier in FILE_TIERS if tier in used)
    return [("offload", f"{', and '.join(parts)}; {on_way}" if parts else nothing), *files]


def early_sentence(report: RunReport) -> str:
    """When the optimizer state on disks is updated, if that is early."""
    if not updates_early(report.run.parallel, report.run.offload):
        return ""
    return (
        "early: state on disks is updated beside the backward, and again where a step is clipped or skipped after all"
    )


def _file_line(report: RunReport, tier: Tier, stage: int) -> Line:
    """What a step moves to and from a tier in files, on this stage."""
    moved, ranks, offload = report.memory.moved, report.axes.world_size, report.run.offload
    lanes = [[step[lane.value] for step in moved] for lane in lanes_of_files(tier)]
    step = "a step reads {} and writes {}".format(*(size(lane[stage]) for lane in lanes))
    if ranks > 1:
        of_all = (size(ranks // len(moved) * sum(lane)) for lane in lanes)
        step += "; all {} ranks read {} and write {}".format(ranks, *of_all)
    whole = "; each step is whole on disks, which takes twice the space" * (tier is Tier.DISK and whole_steps(offload))
    early = tier.goes_back and updates_early(report.run.parallel, offload)
    back = "; optimizer state takes a slot more, to go back to after an early update" * early
    files = f"files are in {' '.join(folders_of(offload, tier))}{whole}{back}"
    return FILE_TIERS[tier].name, f"{step}; {files}"


def _codes(bits: int, decoded: int) -> str:
    """How the frozen matrices of adapters are stored. decoded: most bytes of a rank that are gathered and decoded."""
    return (
        f"matrices of the blocks are codes of {bits} bits, {coded.bytes_each(bits):.3f} bytes an element with their "
        f"scales, and are decoded for each use: a rank holds {size(decoded)} of gathered and decoded parameters at most"
    )


def gathers_sentence(gathered: GatheredBytes, stages: int, regather: str) -> str:
    """What a rank of a stage gathers under ZeRO-3. regather: --zero3-regather."""
    step, least, rank = gathered.step, gathered.least, rank_of(gathered.stage, stages)
    when = "for each use" if regather == "micro-batch" else "where they do not fit from use to use"
    beside = f" (with --zero3-regather step at least {size(least)})"
    if step <= least:
        beside = ", the least possible under this budget"
    elif regather == "step":
        beside = f", {step / least:.2f} times the least possible under this budget"
    return f"gathered {when}: {rank} gathers {size(step)} a step{beside}, and holds {size(gathered.budget)} at most"


def _spare_buffers(spare: Sequence[int]) -> str:
    """The pool of buffers for whole gradients, where a rank keeps a shard of them (ZeRO-2 and 3)."""
    rank = f" on a rank of stage {spare.index(max(spare))}" * (len(spare) > 1)
    return f"whole gradients on their way take {size(max(spare))}{rank} from the second step on, beside the model state"


def _recompute(again: RecomputeReport, p: ParallelConfig) -> str:
    """What backward computes again and what it costs; under a budget also what the activations then take."""
    cost = f"{again.cost:.0%} on top of the model's operations"
    cost += f" (at most {again.missed:.1%} of that more than the least)" if again.missed else ""
    if again.gathered:
        inputs = f"each of the {p.tp} tp ranks keeps a part of their inputs"
        cost += f"; {inputs}, and gathers {size(again.gathered)} of them in a step"
    if p.activation_memory_budget is None:
        return f"{p.recompute_granularity}, {cost}"
    kinds = [f"{again.blocks[kind]} {words}" for kind, words in _RECOMPUTED.items() if again.blocks.get(kind)]
    chosen = f"{' and '.join(kinds)} of {sum(again.blocks.values())} blocks, {cost}" if kinds else "nothing"
    number = len(again.peaks)
    stages = f"the activations of the fullest of {number} stages take" if number > 1 else "the activations take"
    budget = size(p.activation_memory_budget)
    return f"{chosen}; {stages} {size(max(again.peaks))} of --activation-memory-budget {budget}"


def _leaving(leaving: LeavingReport, stages: int) -> str:
    """Activations that leave the device."""
    rank = rank_of(leaving.stage, stages)
    leave = f"{size(leaving.moved)} of the {size(leaving.kept)} that a step keeps leave the device and come back; they"
    if not leaving.files:
        return f"{leave} wait in {size(leaving.host)} of host memory on {rank}"
    files = f"{size(leaving.files)} of files on {rank}; a step writes {size(leaving.written)} there and reads as much"
    return f"{leave} go through {size(leaving.host)} of host memory to {files}"


def budgets_sentence(report: RunReport) -> str:
    """What a step takes of each budget, on the rank that takes most; empty where no card is here to be tried."""
    budgets = budgets_of(report.run, report.device_kind)
    return "; ".join(
        f"{rank_words(tier.stage, report.axes)} takes {size(tier.most)} {tier.name} at most by arithmetic, of "
        f"{tier.flag} {size(tier.budget)}"
        for tier in ([] if report.memory.assumed else fullest(report.memory.peaks, budgets))
    )


def _run_lines(report: RunReport) -> list[Line]:
    schedule, o, machine = report.run.schedule, report.run.optimizer, report.machine
    batch = f"{counted(schedule.global_batch_size, 'sample')} in micro-batches of {schedule.micro_batch_size}"
    if schedule.rampup_batch_size:
        first, more, over = schedule.rampup_batch_size
        batch = f"{first} samples, {more} more at a time over {over:,} samples, then {batch}"
    by = " by NVIDIA apex" * (o.optimizer_impl == "apex")
    return [
        ("data", report.data),
        ("length", length_words(report.run, report.samples)),
        ("global batch", batch),
        ("learning rate", f"{schedule.lr:g} to {schedule.min_lr:g}, {schedule.lr_decay_style}"),
        ("optimizer", f"{o.optimizer}{by}, weight decay {o.weight_decay:g}, clip {o.clip_grad:g}"),
        ("device", machine.device if machine else ""),
        ("allocator", machine.allocator if machine else ""),
        ("predicted", prediction_sentence(report.prediction) if report.prediction else ""),
        ("start", report.start),
    ]


def prediction_sentence(predicted: PredictionReport) -> str:
    """What a plan says of a step of this run, and of which devices."""
    speed = f"{predicted.seconds:.4g} s a step, {count(predicted.tokens_per_second)} tokens a second"
    speed += "" if predicted.mfu is None else f" ({predicted.mfu:.1%} MFU)"
    short = ", which is too much" * (predicted.memory > predicted.room)
    memory = f"the fullest rank takes {size(predicted.memory)} of {size(predicted.room)}{short}"
    return f"{speed}; {memory}; as `megazero plan` says of {predicted.cluster}"


def length_words(run: Run, samples: int | None) -> str:
    """The length of a run. samples: consumed at its end; None: of a run that does not resume. A rest of
    --train-samples that fills no batch is not trained.
    """
    schedule = run.schedule
    if (asked := schedule.train_samples) is None:
        length = counted(schedule.train_iters or 0, "iteration")
    else:
        used = StepPlan(schedule).consumed_at_end() if samples is None else samples
        # A run that was longer before may have gone beyond the samples that are asked for now.
        length = f"{used:,} of {asked:,} samples, in whole batches" if used < asked else counted(asked, "sample")
    minutes = run.trainer.exit_duration_in_mins
    return f"{length} or {minutes:g} minutes, whichever ends first" if minutes else length


def _communication(machine: MachineReport, p: ParallelConfig) -> str:
    """The transport of each axis (shared memory or the backend)."""
    ways = [f"{axis} through {way}" for axis, way in machine.ways.items()]
    return ", ".join(ways + ["sequence parallel"] * p.sequence_parallel + ["dp overlapped"] * machine.overlapped)


def ops_table(machine: MachineReport) -> str:
    """The body that computes each op, and why; ops of one body share a line."""
    ops = {body: ", ".join(op for op in machine.ops if machine.ops[op] == body) for body in machine.ops.values()}
    return f"{blocks.pairs([*ops.items()])}\n{blocks.pairs([*machine.about_ops.items()])}"


def _departures(report: RunReport) -> str:
    """The user's settings that differ from the defaults, by section, and where the whole run is written."""
    lines = [(section, ", ".join(starmap(_setting, settings.items()))) for section, settings in report.given.items()]
    save = report.run.checkpoint.save
    kept = f"{save}/{RUN_FILE}, which --config takes" if save else "--print-config prints it; with --save it is kept"
    return blocks.pairs([*lines, ("(all of it)", kept)])


def _setting(name: str, value: object) -> str:
    """`name=value`, with quotation marks or brackets where a value has several words and does not show its end."""
    words = str(value)
    if isinstance(value, tuple | list):
        words = " ".join(map(str, value))
        words = words if isinstance(value, tuple) else f"[{words}]"
    elif isinstance(value, str) and (not value or any(letter.isspace() for letter in value)):
        words = repr(value)
    return f"{name}={'-' if value is None else words}"
