"""The changes between the run that wrote a checkpoint and the run that resumes it, and which of them are allowed.

The fields are in tables, one for each group. The model's shape cannot change on resume. Learning rates and other
numbers of the optimizer, batch sizes and data change only if the user gives the group's override flag. Layout and
precision may change freely: results do not depend on them, or by rounding only. Every change is reported with the old
and the new value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megazero.checkpoint.format import MANIFEST, Damaged
from megazero.config.derive import lora_alpha, micro_batch_order, pipeline_schedule
from megazero.config.dump import run_dict
from megazero.config.inventory import adapted
from megazero.config.model_shape import SHAPE
from megazero.config.options import Option, build_run, run_options, sections
from megazero.config.schema import ModelConfig, Run
from megazero.config.tiers import FILE_TIERS
from megazero.config.validate import out_of_range
from megazero.optim.lr_schedule import LearningRate
from megazero.system.reading import shown
from megazero.system.words import value_words

_Value = Callable[[Run], Any]


@dataclass(frozen=True)
class Change:
    """One field that differs. `allowed_by` is the override flag that was given for it; None if it needs none or was
    given none.
    """

    field: str
    old: Any
    new: Any
    allowed_by: str | None = None

    def words(self) -> tuple[str, str, str]:
        """Field, old value and new value as text."""
        return self.field, value_words(self.old), value_words(self.new)

    @property
    def both(self) -> str:
        """The flag with both values, as a sentence begins."""
        return f"--{self.field}: {value_words(self.old)} in the checkpoint, {value_words(self.new)} now"

    def __str__(self) -> str:
        by = f" ({self.allowed_by})" if self.allowed_by else ""
        return f"{self.field} {value_words(self.old)} -> {value_words(self.new)}{by}"


@dataclass(frozen=True)
class Comparison:
    """problems: what forbids the resume, one sentence each. changes: every difference, for the banner."""

    problems: tuple[str, ...]
    changes: tuple[Change, ...]


def _get(section: str, name: str) -> _Value:
    return lambda run: getattr(getattr(run, section), name)


def _plain(section: str, *names: str) -> dict[str, _Value]:
    return {f"{section}.{name}": _get(section, name) for name in names}


def _of_model(value: Callable[[ModelConfig], Any]) -> _Value:
    return lambda run: value(run.model)


def _of_adam(name: str) -> _Value:
    return lambda run: getattr(run.optimizer, name) if run.optimizer.optimizer != "sgd" else None


def _lr_length(name: str, *, only: str | None = None) -> _Value:
    """A resolved length of the learning-rate schedule; a field that is left open follows from the run's length."""

    def value(run: Run) -> str | None:
        try:
            rate, style = LearningRate(run.schedule), run.schedule.lr_decay_style
        except ValueError:  # the checkpoint was converted from a format that does not store the run's length
            return None
        length = getattr(rate, name)
        if not length or (only and style != only) or (name != "warmup" and style == "constant"):
            return None
        # 15 digits: with 17 the rounding of a share shows, and 5% of 104 iterations are 5.2000000000000002.
        number = str(length) if isinstance(length, int) else f"{length:.15g}"
        return f"{number} {'samples' if rate.counts_samples else 'iterations'}"

    return value


_SHAPE: dict[str, _Value] = {f"model.{name}": _of_model(value) for name, value in SHAPE.items()}
_ADAPTERS: dict[str, _Value] = {
    "lora.lora_rank": _get("lora", "lora_rank"),
    "lora.lora_alpha": lambda run: None if run.lora.lora_rank is None else lora_alpha(run.lora),
    "lora.lora_targets": lambda run: adapted(run.lora, run.model),
    **_plain("lora", "lora_base_bits", "lora_base_qkv"),
}
"""Fields that determine the tensors of a checkpoint of adapters, their scale, and the weights that they correct."""
_RATES = {
    **_plain("schedule", "lr", "min_lr", "lr_decay_style"),
    "schedule.lr_warmup": _lr_length("warmup"),
    "schedule.lr_decay": _lr_length("decay"),
    "schedule.lr_wsd_decay": _lr_length("fall", only="wsd"),
    **_plain("optimizer", "optimizer", "weight_decay", "clip_grad", "label_smoothing", "z_loss"),
    **_plain("optimizer", "ema_decay"),
    **{f"optimizer.{name}": _of_adam(name) for name in ("adam_beta1", "adam_beta2", "adam_eps")},
    "optimizer.sgd_momentum": lambda run: run.optimizer.sgd_momentum if run.optimizer.optimizer == "sgd" else None,
    **_plain("model", "hidden_dropout", "attention_dropout"),
    **_plain("lora", "lora_dropout"),
}
_BATCH = _plain("schedule", "global_batch_size", "rampup_batch_size")
_DATA = {
    **_plain("data", "data_path", "split", "tokenizer", "tokenizer_path", "eod_id", "eod_mask_loss", "seed"),
    **_plain("data", "instruction_data", "long_conversations"),
    **_plain("model", "seq_length", "document_mask"),
}
_FREE = {
    **_plain("parallel", "tp", "pp", "zero_stage", "virtual_stages", "partition", "partition_by", "sequence_parallel"),
    **_plain("parallel", "zero3_gathered_bytes", "zero3_regather", "zero3_persist_below"),
    "parallel.micro_batch_order": lambda run: micro_batch_order(run),
    **_plain("parallel", "vertical_group_size"),
    "parallel.pipeline_schedule": lambda run: pipeline_schedule(run.parallel),
    **_plain(
        "parallel", "recompute_granularity", "recompute_num_layers", "overlap", "bucket_size", "grad_reduce_dtype"
    ),
    **_plain("parallel", "device", "backend", "shared_memory", "compile", "attention"),
    **_plain("parallel", "late_update", "early_update"),
    **_plain("parallel", "cuda_graphs", "zero_shard_size", "activation_memory_budget", "shard_recompute_inputs"),
    "optimizer.optimizer_impl": _of_adam("optimizer_impl"),
    **_plain(
        "optimizer",
        "precision",
        "loss_scale",
        "initial_loss_scale",
        "loss_scale_window",
        "hysteresis",
        "min_loss_scale",
        "max_skipped_steps",
    ),
    **_plain("optimizer", "fp8"),
    **_plain("parallel", "zero_quantized_weights", "zero_quantized_gradients", "zero_gradient_error_feedback"),
    **_plain("offload", "offload_optimizer", "offload_params", "offload_gradients", "offload_activations"),
    "optimizer.fp8_amax_history": lambda run: (
        run.optimizer.fp8_amax_history if run.optimizer.fp8 == "delayed" else None
    ),
    **_plain("schedule", "micro_batch_size", "train_length"),
    **_plain("data", "valid_data_path", "valid_instruction_data"),
    **_plain("model", "make_vocab_size_divisible_by", "init_method_std"),
}
_SILENT = frozenset(
    {
        *("parallel.distributed_timeout_minutes", "data.num_workers", "data.data_cache_path"),
        *(f"offload.{row.folders}" for row in FILE_TIERS.values()),
        *("offload.nvme_buffer_bytes", "offload.placement", "offload.placement_rates"),
        "offload.nvme_checkpoint",
        *("offload.device_memory_budget", "offload.host_memory_budget"),
    }
)
"""Fields that affect time and places only, so a change of them is not reported. (The sections `checkpoint` and
`trainer` are not compared: they describe one start of the program, not the run.)
"""
_LEFT_OPEN = {
    "model.vocab_size": None,
    "parallel.device": "auto",
    "parallel.backend": "auto",
    "parallel.bucket_size": None,
    "parallel.zero_shard_size": None,
    "parallel.vertical_group_size": None,
    "parallel.zero3_gathered_bytes": None,
    "lora.lora_base_qkv": None,
}
"""Values that mean "found out later" (from the tokenizer, the machine or the layout). A field with such a value is not
compared.
"""
_MAY_BEGIN = frozenset({"ema-decay"})
"""Fields of what may begin and end at any step, because training does not depend on it: from none to a value and back
is reported, and needs no override flag.
"""
_RUN_LENGTH = ("train_length", "global_batch_size", "rampup_batch_size")
_DECAY_FROM = ("lr_decay", *_RUN_LENGTH)
_LENGTH_FROM: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "lr-warmup": ("warm-up", ("lr_warmup", *_DECAY_FROM)),
    "lr-decay": ("decay", _DECAY_FROM),
    "lr-wsd-decay": ("fall", ("lr_wsd_decay", *_DECAY_FROM)),
}
"""Lengths of the learning-rate schedule, which follow from others where a run leaves them open: the name in messages,
and the fields that determine the length, the most direct one first.
"""
SHAPE_STAYS = "the model's shape cannot change on resume"
_OVERRIDES = (
    (_RATES, "--override-opt-param-scheduler", "override_opt_param_scheduler"),
    (_BATCH, "--override-batch", "override_batch"),
    (_DATA, "--override-data", "override_data"),
)


def run_from(record: Mapping[str, Any]) -> Run:
    """The run of a checkpoint's record: a dict of sections, as `record_of` returns it.

    A field that the record lacks (an older version wrote it) gets its default; unknown fields are ignored. Raises one
    Damaged that names the fields with impossible values.
    """
    problems: list[str] = []

    def read(known: Option, name: str, value: Any) -> Any:
        try:
            value = known.from_value(value, known.measure_of(name))
        except ValueError as error:
            if known.extended_by is not None and isinstance(value, str | list):
                return value if isinstance(value, str) else tuple(map(str, value))  # from a package not installed here
            problems.append(f"{name}: {error}")
            return known.default
        reasons = [
            reason
            for each in (value if isinstance(value, tuple) else (value,))
            if (reason := out_of_range(known.name, each))
        ]
        problems.extend(f"{name} {shown(value)}: {reason}" for reason in reasons[:1])
        return value

    written: dict[str | None, dict[str, Any]] = {}
    for section in sections():
        if isinstance(values := record.get(section, {}), dict):
            written[section] = values
        else:
            problems.append(f"{section}: {shown(values)} is no section")
    settings: dict[str, Any] = {}
    names = [(known, name) for known in run_options().values() for name in (known.name, *known.measured_keys)]
    for known, name in names:
        # A version that had the field in another section has it in no other than that one.
        values = next((written[s] for s in (known.section, known.earlier) if name in written.get(s, {})), {})
        if name in values and settings.get(known.name) is None:  # of an earlier length all names but one hold None
            settings[known.name] = read(known, name, values[name])
    run = build_run(settings)
    if problems:
        raise Damaged(f"{MANIFEST} holds a run with impossible values: " + "; ".join(problems[:20]))
    return run


def record_of(run: Run) -> dict[str, Any]:
    """The run as a checkpoint stores it: one dict for each section."""
    return run_dict(run)


def compare(
    saved: Run, now: Run, saved_axes: Mapping[str, int] | None = None, axes: Mapping[str, int] | None = None
) -> Comparison:
    """Compare the run of a checkpoint with the present one, under the present run's override flags.

    saved_axes, axes: sizes of the grid's axes; dp is compared from these, because no configuration field holds it. With
    --finetune only the model's shape and the adapters are compared, since everything else starts anew.
    """
    problems = [_problem(change, None) for change in _differences(_SHAPE, saved, now)]
    problems += _other_adapters(saved, now)
    if now.checkpoint.finetune:
        return Comparison(tuple(problems), ())
    changes: list[Change] = []
    for table, flag, name in _OVERRIDES:
        found = _differences(table, saved, now)
        if getattr(now.checkpoint, name):
            changes += [Change(change.field, change.old, change.new, flag) for change in found]
        else:
            changes += found
            refused = [change for change in found if not _begins_or_ends(change)]
            problems += _problems(refused, flag, saved, now)
    changes += _differences(_FREE, saved, now)
    if saved_axes and axes and saved_axes.get("dp", axes["dp"]) != axes["dp"]:
        changes.append(Change("dp", saved_axes["dp"], axes["dp"]))
    return Comparison(tuple(problems), tuple(changes))


def _other_adapters(saved: Run, now: Run) -> list[str]:
    """Problems of adapters: a checkpoint of adapters resumes with the same adapters, any other one without."""
    then, rank = saved.lora.lora_rank, now.lora.lora_rank
    if then is None and rank is not None:
        return [
            f"--lora-rank {rank}: the checkpoint is of a whole model; to train adapters on it: --init-from, and "
            "another --load and --save"
        ]
    if then is not None and rank is None:
        return [
            f"the checkpoint holds adapters only; to go on with them: --lora-rank {then}; to train all of the merged "
            "model: --init-from"
        ]
    found = _differences(_ADAPTERS, saved, now)
    return [f"{change.both}; the adapters cannot change on resume" for change in found]


def _differences(table: Mapping[str, _Value], saved: Run, now: Run) -> list[Change]:
    found = []
    for path, value in table.items():
        old, new = value(saved), value(now)
        if old != new and not (path in _LEFT_OPEN and _LEFT_OPEN[path] in (old, new)):
            found.append(Change(path.partition(".")[2].replace("_", "-"), old, new))
    return found


def _begins_or_ends(change: Change) -> bool:
    return change.field in _MAY_BEGIN and None in (change.old, change.new)


def _problems(found: Sequence[Change], flag: str, saved: Run, now: Run) -> list[str]:
    """A sentence for each flag that caused some of these changes: one longer run changes several lengths."""
    by_cause: dict[Change, list[Change]] = {}
    for change in found:
        by_cause.setdefault(_cause(change, saved, now), []).append(change)
    return [
        _problem(cause, flag) if changes == [cause] else _length_problem(cause, changes, flag, now)
        for cause, changes in by_cause.items()
    ]


def _cause(change: Change, saved: Run, now: Run) -> Change:
    """The changed flag that caused this change; the change itself if it is a flag's."""
    if change.field not in _LENGTH_FROM:
        return change
    _, flags = _LENGTH_FROM[change.field]
    then, today = saved.schedule, now.schedule
    name = next((name for name in flags if getattr(then, name) != getattr(today, name)), flags[0])
    return Change(name.replace("_", "-"), getattr(then, name), getattr(today, name))


def _length_problem(cause: Change, changes: Sequence[Change], flag: str, now: Run) -> str:
    """A sentence for a flag from which lengths of the learning-rate schedule follow: which schedule each way keeps."""
    lengths = [
        f"{_LENGTH_FROM[change.field][0]} ({value_words(change.old)} there, {value_words(change.new)} now)"
        for change in changes
        if change.field in _LENGTH_FROM
    ]
    if not lengths or cause.field.startswith(tuple(_LENGTH_FROM)):
        return _problem(cause, flag)
    kept = next((change.old for change in changes if change.field == "lr-decay"), None)
    keeps = ""
    if kept is not None:
        keeps = (
            f"; to keep the old schedule, whose rate is --min-lr {now.schedule.min_lr:g} after its end: "
            f"--lr-decay {kept}"
        )
    changed = f"{cause.both}, and with it the learning rate's {' and '.join(lengths)}"
    return f"{changed}; to go on with the new schedule: {flag}{keeps}"


def _problem(change: Change, flag: str | None) -> str:
    way_out = f"; to change it on resume: {flag}" if flag else f"; {SHAPE_STAYS}"
    return f"{change.both}{way_out}"
