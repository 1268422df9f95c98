"""From a user's settings to the `Run` of a model of modules: of its sections the parts that know nothing of GPT."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from megazero.config.derive import whole_steps, writes_activations
from megazero.config.dtypes import PRECISION_OF, compute_dtype
from megazero.config.dump import run_dict
from megazero.config.flags import fields_for_flags
from megazero.config.lengths import Length, Measure
from megazero.config.options import build_run, run_options
from megazero.config.placement import AUTO, FLAGS, PLACEMENT, applied, with_placement
from megazero.config.schema import OptimizerConfig, Run
from megazero.config.source import ConfigError, ConfigSource
from megazero.config.validate import problems_of
from megazero.own.units.model import Units
from megazero.pipeline.partition import partition
from megazero.program.passes.leaving import LEAST_BUFFERS, PAGE, SPARE, buffer_bytes
from megazero.program.shape import RankShape
from megazero.train.api import Given, settings_of

USED = frozenset(
    """
    seed pp virtual_stages pipeline_schedule partition device backend distributed_timeout_minutes
    recompute_granularity zero_stage zero_shard_size bucket_size overlap late_update grad_reduce_dtype
    zero3_gathered_bytes zero3_regather zero3_persist_below
    zero_quantized_weights zero_quantized_gradients zero_gradient_error_feedback
    offload_optimizer offload_gradients offload_params nvme_path nvme_buffer_bytes micro_batch_order vertical_group_size
    precision optimizer weight_decay clip_grad adam_beta1 adam_beta2 adam_eps sgd_momentum
    loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis
    """.split()
)
"""Fields of a run that a model of modules reads. All others would be without effect, and are refused."""
OF_UNITS = frozenset({"offload_activations", "tp"})
"""Those that a list of units reads besides, and a module that a program calls does not."""
OF_MEASURED = frozenset({"device_memory_budget", "host_memory_budget", "placement", "placement_rates"})
"""Those that are about the measured bytes of units."""
USED_BY_LOOP = USED | frozenset(
    """
    micro_batch_size global_batch_size rampup_batch_size train_length num_workers
    lr min_lr lr_decay_style lr_warmup lr_decay lr_wsd_decay max_skipped_steps
    eval_interval eval_iters eval_at_start exit_interval exit_duration_in_mins log_interval
    metrics_file tensorboard_dir wandb wandb_group mlflow sinks
    save load save_interval keep_last save_retain_interval async_save finetune no_load_optim override_data
    nvme_checkpoint
    """.split()
)
"""Those that megazero's own loop reads."""
OF_OUR_OPTIMIZERS = frozenset("optimizer weight_decay adam_beta1 adam_beta2 adam_eps sgd_momentum".split())
"""Fields that an optimizer of torch has in its own way."""
SECTIONS = frozenset({"parallel", "optimizer", "offload"})
"""Sections of a run that a model of modules has, in its checks and in manifests of its checkpoints."""
SECTIONS_OF_LOOP = SECTIONS | {"schedule", "trainer", "checkpoint"}
"""Those whose checks megazero's own loop needs."""
OF_A_RANK = frozenset("nvme_path save load metrics_file tensorboard_dir wandb wandb_group mlflow sinks".split())
"""Fields that ranks may have otherwise: their own folders, and where rank 0 alone writes."""
AS_BY_DEFAULT = frozenset({"lora_rank", "data_path", "instruction_data"})
"""Fields of other sections that checks of the loop read: nobody has set them."""


@dataclass(frozen=True)
class UnitsConfig(OptimizerConfig):
    """The configuration of a model of modules.

    kept   the columns of an optimizer of torch, whose options are its own; None: the optimizer is one of ours
    mixed  whether each parameter keeps its dtype. Then the precision is of the state: see `precision_beside`
    """

    kept: tuple[str, ...] | None = None
    mixed: bool = False

    @property
    def moments(self) -> tuple[str, ...]:
        # exp_avg beside an optimizer without any state, which leaves it as it is
        return super().moments if self.kept is None else self.kept or ("exp_avg",)

    @property
    def has_several_dtypes(self) -> bool:
        return self.mixed


def precision_beside(dtypes: Collection[torch.dtype]) -> str:
    """The precision of a run whose parameters keep their dtypes: one whose state is as wide as the widest of them and,
    beside float16, whose loss is scaled.
    """
    wide_first = torch.float64, torch.float16, torch.bfloat16, torch.float32
    return next(PRECISION_OF[dtype] for dtype in wide_first if dtype in dtypes)


def dtype_of_all(run: Run) -> torch.dtype | None:
    """The dtype of all parameters. None: each keeps its own."""
    return None if run.optimizer.has_several_dtypes else compute_dtype(run.optimizer.precision)


@dataclass(frozen=True)
class LoopSettings:
    """What a run needs besides whose steps megazero's own loop takes.

    epoch     number of samples of the training data; None: nobody knows, and the run is not looked at further
    problems  what is wrong with the data and with functions of the program
    """

    epoch: int | None
    problems: Sequence[str] = ()

    def in_samples(self, run: Run) -> Run:
        """A run whose length is in samples if it is in epochs."""
        if self.epoch is None or run.schedule.epochs is None:
            return run
        samples = Length(int(run.schedule.epochs * self.epoch), Measure.SAMPLES)
        return replace(run, schedule=replace(run.schedule, train_length=samples))


def run_of(
    given: Given,
    optimizer: str,
    model: Units,
    world_size: int,
    kept: tuple[str, ...] | None = None,
    *,
    lr: float | None = None,
    loop: LoopSettings | None = None,
    timed: bool = False,
    measured: bool = False,
) -> Run:
    """The run of a model on so many ranks.

    given      fields, as `megazero.pretrain` takes them, or the path of a YAML file with them
    optimizer  its name
    kept       columns of an optimizer of torch; None: it is one of ours
    lr         the learning rate of the loop, if `given` has none
    loop       None: the program takes the steps
    timed      whether the times of units are measured, by which they are divided among stages (`divided_by`)
    measured   whether their bytes are

    Raises ConfigError with everything that is wrong.
    """
    source = settings_of(given)
    placing = _placed(source)
    problems = [*(() if loop is None else loop.problems), *source.problems, *source.length_problems(), *placing]
    if isinstance(given, Run):
        problems.append("run is a Run, which has fields of families: of a model of modules it is a mapping, or YAML")
        source.settings.clear()
    used, looked_at = (USED, SECTIONS) if loop is None else (USED_BY_LOOP, SECTIONS_OF_LOOP)
    used |= OF_UNITS | OF_MEASURED
    if not measured and (budgets := sorted(source.settings.keys() & OF_MEASURED)):
        problems.append(
            f"run has {' and '.join(budgets)}: what the units of a model keep of a micro-batch is not known without "
            "example=, the micro-batches of a step"
        )
    if kept is not None and (without_effect := sorted(source.settings.keys() & OF_OUR_OPTIMIZERS)):
        problems.append(f"run has {', '.join(without_effect)}: {optimizer} of torch has options of its own")
    unread = sorted(name for name in source.settings if name not in used)
    if unread:
        hint = "; lr is an argument of the engine, and of its steps" if "lr" in unread else ""
        problems.append(f"run has {', '.join(unread)}: a model of modules reads none of these{hint}")
    precision, mixed = _precision_of(model, problems) if "precision" not in source.settings else ("", False)
    like = optimizer if kept is None else "adamw"  # whose checks hold for every update of elements
    of_loop = {} if loop is None else {"lr": lr}
    settings = {"optimizer": like, "precision": precision, **of_loop, **source.settings}
    if kept is None and settings["optimizer"] != optimizer:
        problems.append(f"optimizer is {optimizer!r}, and {settings['optimizer']!r} in run")
    run = build_run({name: value for name, value in settings.items() if name not in source.bad})
    run = replace(run, optimizer=UnitsConfig(**vars(run.optimizer), kept=kept, mixed=mixed))
    if loop is not None:
        run = loop.in_samples(run)
        problems += () if source.unread or "train_length" in source.bad else _loop_problems(run)
    problems += run_problems(run, world_size, len(model.units), looked_at, source.bad)
    problems += _timing_problems(run) if timed else ()
    if problems:
        raise ConfigError([*map(fields_for_flags, problems)])
    return run


def _precision_of(model: Units, problems: list[str]) -> tuple[str, bool]:
    """The precision of a run that says none, and whether parameters keep several dtypes. problems: what is added to."""
    dtypes = model.dtypes or {torch.float32}
    if unknown := sorted(str(dtype) for dtype in dtypes - PRECISION_OF.keys()):
        problems.append(
            f"precision is not set, and the model has parameters of {' and of '.join(unknown)}: a model state has "
            f"those of {', '.join(PRECISION_OF.values())}"
        )
        return "fp32", False
    return precision_beside(dtypes), len(dtypes) > 1


def _placed(source: ConfigSource) -> list[str]:
    """What is wrong with the placement of settings, to which those of its file are added."""
    sources, problems, _ = with_placement([source])
    for file in sources[:-1]:
        problems += file.problems
        for name, value in file.settings.items():
            source.settings.setdefault(name, value)
    automatic, rates = source.settings.get(PLACEMENT) == AUTO, "placement_rates" in source.settings
    if automatic and not rates:
        problems.append("placement 'auto' needs placement_rates, a file: the rates of a machine are not measured here")
    if rates and not automatic:
        problems.append("placement_rates is without effect: it is of placement 'auto'")
    return problems


def placed_by(run: Run, settings: Mapping[str, Any]) -> Run:
    """The run with the settings of a placement that was found. They are fields of it now: it has none to look for."""
    return applied(run, {**settings, PLACEMENT: FLAGS, "placement_rates": None})


def run_problems(
    run: Run, world_size: int, units: int, sections: Collection[str] = SECTIONS, bad: Iterable[str] = ()
) -> Iterator[str]:
    """What is wrong with a run of a model of so many units, which reads these sections. bad: fields that are known to
    be wrong.
    """
    elsewhere = {name for name, known in run_options().items() if known.section not in sections} - AS_BY_DEFAULT
    yield from problems_of(run, world_size, bad={*bad, *elsewhere}, own_data=True)
    yield from _chunk_problems(run, units)
    yield from _activation_problems(run)
    if run.parallel.recompute_granularity == "selective":
        yield "recompute_granularity is 'selective': of a module nobody knows what is cheap to compute again"


def _loop_problems(run: Run) -> Iterator[str]:
    """What megazero's own loop lacks."""
    if run.schedule.train_length is None:
        yield "run has no length: train_iters, train_samples or epochs is needed"
    if run.offload.nvme_checkpoint and not whole_steps(run.offload):
        yield "nvme_checkpoint needs offload_optimizer nvme: no optimizer state rests on disks"


def _activation_problems(run: Run) -> Iterator[str]:
    """What of a model of modules cannot leave the device."""
    leaves, room = run.offload.offload_activations, run.offload.nvme_buffer_bytes
    if leaves.units:
        yield (
            f"offload_activations is '{leaves}': units of a list have no names that a flag knows. It is a tier, or a "
            f"share of the units, such as '{leaves.tier.value}:0.5'"
        )
    if leaves.in_files and room < (least := LEAST_BUFFERS * buffer_bytes(1)):
        yield (
            f"nvme_buffer_bytes {room} does not hold {LEAST_BUFFERS} buffers, through which offload_activations "
            f"'{leaves}' passes; nearest: nvme_buffer_bytes {least}"
        )


def alike(shape: RankShape, run: Run, *, begins: bool) -> RankShape:
    """The shape of a rank for its lists. Nobody knows yet what a unit keeps for its backward: a share of activations
    that leaves the device is one of the units. On their way to files each counts as the most that a unit may keep: so
    a list has as few buffers as there may be. begins: whether the rank has the first chunk of the model, whose first
    unit keeps nothing if it is computed again from the micro-batch.
    """
    in_quarter = run.offload.nvme_buffer_bytes // LEAST_BUFFERS // PAGE * PAGE - SPARE
    size = max(1, in_quarter) if writes_activations(run) else 1
    kept = [[size] * len(units) for units in shape.units]
    if begins and run.parallel.recompute_granularity == "full" and sum(map(len, kept)) > 1:
        kept[0][0] = 0
    return shape.keeping(kept)


def _timing_problems(run: Run) -> Iterator[str]:
    """What contradicts a division of units by measured times."""
    if run.parallel.partition is not None:
        yield f"partition is {list(run.parallel.partition)}, and timed has the units divided by their times: say one"
    if run.offload.nvme_checkpoint:
        yield (
            "timed with nvme_checkpoint: another run of the same command may divide the units otherwise, and a step on "
            "disks is of one division. Say partition, with the numbers of a run that was timed"
        )


def _chunk_problems(run: Run, units: int) -> Iterator[str]:
    """What is wrong with the division of the units into model chunks."""
    parallel = run.parallel
    chunks = parallel.pp * parallel.virtual_stages
    if parallel.partition is not None:
        if len(parallel.partition) != chunks or sum(parallel.partition) != units or min(parallel.partition) < 1:
            yield (
                f"partition is {list(parallel.partition)}: {chunks} numbers from 1 on are needed, one for each model "
                f"chunk (pp {parallel.pp} x virtual_stages {parallel.virtual_stages}), whose sum is the {units} units"
            )
    elif chunks > units:
        yield (
            f"pp {parallel.pp} x virtual_stages {parallel.virtual_stages} are {chunks} model chunks, of {units} units: "
            "each chunk has one at least"
        )


def chunk_units(run: Run, costs: Sequence[float]) -> tuple[range, ...]:
    """The numbers of the units of each model chunk, in model order. costs: of each unit."""
    chunks = run.parallel.pp * run.parallel.virtual_stages
    sizes = run.parallel.partition
    if sizes is None and chunks == 1:
        sizes = (len(costs),)
    elif sizes is None:  # the first and the last unit are where an embedding and a head are: no chunk is without one
        inner = partition([float(cost) for cost in costs[1:-1]], float(costs[0]), float(costs[-1]), chunks)
        sizes = (inner[0] + 1, *inner[1:-1], inner[-1] + 1)
    ends = [*accumulate(sizes)]
    return tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))


def settings_digest(run: Run, rule: str, lr: float) -> int:
    """What is equal where ranks have the same settings.

    rule: an optimizer of torch in words. lr: that of the first step.
    """
    sections = {name: dict(part) for name, part in run_dict(run).items() if name in SECTIONS_OF_LOOP}
    for section in sections.values():
        for name in OF_A_RANK & section.keys():
            del section[name]
    return zlib.crc32(repr((sections, run.data.seed, rule, lr)).encode())


def with_batches(run: Run, micro_batches: int, replicas: int) -> Run:
    """The run of a program that hands over so many micro-batches in each step, on each of its replicas: for plans."""
    rows = micro_batches * replicas
    return replace(run, schedule=replace(run.schedule, micro_batch_size=1, global_batch_size=rows))


def computed_again(run: Run, recompute: str) -> Run:
    """The run with other units that backward computes again: for plans."""
    return replace(run, parallel=replace(run.parallel, recompute_granularity=recompute))


def divided_by(run: Run, seconds: Sequence[float]) -> Run:
    """A run whose model chunks have units of about the same time. seconds: of each unit."""
    sizes = tuple(len(units) for units in chunk_units(run, seconds))
    return replace(run, parallel=replace(run.parallel, partition=sizes))
