"""`--deepspeed-config FILE.json`: maps DeepSpeed's keys to fields of a run and refuses the others by name.

A key with the value "auto" is left to the flags. A key of a feature that is not built is refused, unless its value says
what is so anyway ("device": "none", "contiguous_gradients": true). Keys that the file leaves out have DeepSpeed's
defaults (`config.deepspeed_keys`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any

from megazero.config.deepspeed_keys import DETAILS, FIELDS, TRANSLATED, UNBUILT, missing_keys, other_peak
from megazero.config.lengths import Length
from megazero.config.options import did_you_mean, run_options
from megazero.config.source import ConfigSource
from megazero.config.tiers import Tier, TierShare
from megazero.system.reading import BOUNDS, Unreadable, json_type, read_json, shown

_OFFLOADED = {"offload_optimizer": "offload_optimizer", "offload_param": "offload_params"}
"""The groups of keys on what leaves the device, and the fields of the same meaning."""


@dataclass
class DeepSpeedSource(ConfigSource):
    """Settings of a DeepSpeed file.

    accumulation   its gradient_accumulation_steps, which is no field of a run; None if it is "auto" or left out
    assumes_one    the file gives neither that nor a global batch. DeepSpeed then uses 1, unless something else gives a
                   global batch
    defaults       DeepSpeed's defaults for keys that the file leaves out
    default_notes  field of `defaults` -> the sentence about it
    """

    accumulation: int | None = None
    assumes_one: bool = False
    defaults: ConfigSource = dataclass_field(default_factory=lambda: ConfigSource("DeepSpeed's defaults"))
    default_notes: dict[str, str] = dataclass_field(default_factory=dict)

    def notes_on_defaults(self, above: Sequence[ConfigSource]) -> list[str]:
        """A sentence with those of DeepSpeed's defaults that apply, since no source above sets their fields."""
        given = {name for source in above for name in source.settings}
        applied = [sentence for name, sentence in self.default_notes.items() if name not in given]
        return [f"{self.name} leaves these to DeepSpeed's own defaults: {'; '.join(applied)}"] if applied else []

    def contradictions(self, flags: ConfigSource) -> list[str]:
        """A sentence for each key that contradicts a flag of the command line."""
        problems = []
        for name, value in self.settings.items():
            if flags.settings.get(name) not in (None, value):
                problems.append(
                    f"{flags.written[name]} {_as_given(flags.settings[name])} contradicts {self.written[name]} "
                    f"{value.number if isinstance(value, Length) else value}: "
                    'drop one of them, or write "auto" in the file'
                )
        return problems

    def accumulate(self, settings: dict[str, Any], world_size: int | None) -> list[str]:
        """Enforce global batch = micro-batch x dp x accumulation; return what is wrong with it.

        As in DeepSpeed, a batch size that no source sets is computed from the others and put into `settings`.
        """
        steps = 1 if self.assumes_one and "global_batch_size" not in settings else self.accumulation
        ranks = settings.get("tp", 1) * settings.get("pp", 1)
        if steps is None or world_size is None or ranks < 1 or world_size % ranks:
            return []
        dp = world_size // ranks
        each, left = divmod(settings.get("global_batch_size", 0), dp * steps)
        if each and not left:
            settings.setdefault("micro_batch_size", each)
        micro = settings.get("micro_batch_size", run_options()["micro_batch_size"].default)
        if micro < 1:  # the range check reports it
            return []
        product = micro * dp * steps
        given = settings.setdefault("global_batch_size", product)
        if given == product:
            return []
        other, left = divmod(given, micro * dp)
        flag = "train_batch_size" if "global_batch_size" in self.settings else "--global-batch-size"
        nearest = [f"gradient_accumulation_steps {other}"] * (not left) + [f"{flag} {product}"]
        return [
            f"{self.name}: gradient_accumulation_steps {steps} x micro-batch {micro} x dp {dp} = {product} is not "
            f"{flag} {given}; nearest: {' or '.join(nearest)}"
        ]


def read_deepspeed(path: str | Path) -> DeepSpeedSource:
    """The settings of a DeepSpeed file. Mistakes in it are collected in the source's `problems`."""
    source = DeepSpeedSource(str(path))
    try:
        content = read_json(Path(path), BOUNDS.description, piped=True)
    except Unreadable as reason:
        source.problems.append(f"--deepspeed-config {reason}")
        source.unread = True
        return source
    if not isinstance(content, dict):
        source.problems.append(f"--deepspeed-config {path}: holds no settings, but {json_type(content)}")
        source.unread = True
        return source
    return deepspeed_source(str(path), content)


def deepspeed_source(name: str, content: Mapping[str, Any]) -> DeepSpeedSource:
    """The settings of the content of a DeepSpeed file. name: of the file, for messages."""
    source, every = DeepSpeedSource(name), _flattened(content, "")
    keys = {key: value for key, value in every.items() if value != "auto"}
    for key, value in keys.items():
        if key in FIELDS:
            _put(source, key, FIELDS[key], value)
        elif key in UNBUILT:
            holds, why = UNBUILT[key]
            if value not in holds or isinstance(value, bool) not in {isinstance(h, bool) for h in holds}:
                source.refuse(f"{key} {json.dumps(value)[:200]} is refused: {why}")
        elif key not in (*TRANSLATED, *DETAILS):
            known = (*FIELDS, *UNBUILT, *TRANSLATED, *DETAILS)
            if any(name.startswith(f"{key}.") for name in known):
                if value is not None:  # null: without the group, as in DeepSpeed
                    source.refuse(f"{key}: {shown(value)} is not a group of settings: {{...}}")
                continue
            hint = did_you_mean(key, known)
            source.refuse(f"there is no {key}{hint}")
    for translate in (_precision, _optimizer, _scheduler, _buckets, _offload, _tensorboard, _wandb, _accumulation):
        translate(source, keys)
    source.assumes_one = (
        not {"gradient_accumulation_steps", "train_batch_size"} & {*every} and "micro_batch_size" in source.settings
    )
    source.problems += other_peak(source.name, every, source.settings)
    source.defaults, source.default_notes = missing_keys(source.name, every, source.settings)
    return source


def _as_given(value: object) -> object:
    return value.as_given if isinstance(value, Length) else value


def _flattened(content: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """{"fp16": {"enabled": true}} -> {"fp16.enabled": true}."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            flat |= _flattened(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _put(source: ConfigSource, key: str, name: str, value: object) -> None:
    try:
        source.put(name, run_options()[name].from_value(value), f"{source.name}: {key}")
    except ValueError as reason:
        source.refuse(f"{key}: {reason}", name)


def _precision(source: ConfigSource, keys: Mapping[str, Any]) -> None:
    switches = {p: keys[f"{p}.enabled"] for p in ("fp16", "bf16") if f"{p}.enabled" in keys}
    wrong = [
        f"{source.name}: {p}.enabled: {value!r} is not true or false"
        for p, value in switches.items()
        if not isinstance(value, bool)
    ]
    on = [p for p, value in switches.items() if value is True]
    if len(on) == 2:
        wrong.append(f"{source.name}: fp16.enabled and bf16.enabled contradict each other: a run has one precision")
    source.problems += wrong
    if switches and not wrong:
        # If one is switched off and none is on, DeepSpeed trains in fp32.
        _put(
            source,
            f"{on[0]}.enabled" if on else f"{next(iter(switches))}.enabled",
            "precision",
            on[0] if on else "fp32",
        )
    if keys.get("fp16.loss_scale"):
        _put(source, "fp16.loss_scale", "loss_scale", keys["fp16.loss_scale"])
    power = keys.get("fp16.initial_scale_power")
    if power is not None:
        _computed(source, "fp16.initial_scale_power", "initial_loss_scale", power, lambda p: 2.0**p)


def _computed(source: ConfigSource, key: str, name: str, value: object, formula: Callable[[float], float]) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1000:
        source.refuse(f"{key}: {shown(value)} is not a number that makes sense here", name)
    else:
        _put(source, key, name, formula(value))


def _optimizer(source: ConfigSource, keys: Mapping[str, Any]) -> None:
    kind, decoupled = keys.get("optimizer.type"), keys.get("optimizer.params.adam_w_mode", True)
    # DeepSpeed's "Adam" has decoupled weight decay unless adam_w_mode is false.
    table = {"adamw": "adamw", "adam": "adamw" if decoupled else "adam", "sgd": "sgd"}
    if kind is not None:
        if str(kind).lower() in table:
            _put(source, "optimizer.type", "optimizer", table[str(kind).lower()])
        else:
            source.refuse(f"optimizer.type {shown(kind)} is not built; valid: Adam, AdamW, SGD")
    betas = keys.get("optimizer.params.betas")
    if isinstance(betas, list) and len(betas) == 2:
        for name, value in zip(("adam_beta1", "adam_beta2"), betas, strict=True):
            _put(source, "optimizer.params.betas", name, value)
    elif betas is not None:
        source.refuse(f"optimizer.params.betas: {shown(betas)} is not a list of two numbers")


def _scheduler(source: ConfigSource, keys: Mapping[str, Any]) -> None:
    kind = keys.get("scheduler.type")
    if kind is None:
        given = [key for key in keys if key.startswith("scheduler.params.")]
        source.problems += [f"{source.name}: {key} needs scheduler.type" for key in given]
        return
    styles = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if not isinstance(kind, str) or kind not in styles:
        source.refuse(
            f"scheduler.type {shown(kind)} is not built; valid: {', '.join(styles)}{did_you_mean(str(kind), styles)}"
        )
        return
    _put(source, "scheduler.type", "lr_decay_style", styles[kind])
    if keys.get("scheduler.params.warmup_type", "log") != "linear":
        source.refuse(
            "scheduler.params.warmup_type: warm-up is linear here, DeepSpeed's default is logarithmic; "
            'write "warmup_type": "linear"'
        )
    for key in ("scheduler.params.warmup_min_lr", "scheduler.params.warmup_min_ratio"):
        if keys.get(key):
            source.refuse(f"{key} {keys[key]}: warm-up starts at 0 here; nearest: 0")
    if kind == "WarmupDecayLR":
        source.put("min_lr", 0.0, f"{source.name}: scheduler.type")
    peak = keys.get("scheduler.params.warmup_max_lr")
    if peak is not None:
        if source.settings.get("lr") not in (None, peak):
            source.refuse(f"scheduler.params.warmup_max_lr {peak} is not optimizer.params.lr {source.settings['lr']}")
        _put(source, "scheduler.params.warmup_max_lr", "lr", peak)
    if kind == "WarmupCosineLR":
        ratio, lr = keys.get("scheduler.params.cos_min_ratio", 1e-4), source.settings.get("lr")
        if lr is None:
            source.refuse("scheduler.type WarmupCosineLR ends at cos_min_ratio x lr: give optimizer.params.lr too")
        else:
            _computed(source, "scheduler.params.cos_min_ratio", "min_lr", ratio, lambda share: share * lr)


def _buckets(source: ConfigSource, keys: Mapping[str, Any]) -> None:
    key = "zero_optimization.allgather_bucket_size"
    if key not in keys:
        return
    reduce = keys.get("zero_optimization.reduce_bucket_size")
    if reduce is not None and reduce != keys[key]:
        source.refuse(
            f"{key} {keys[key]}: one size serves reduction and gather here; nearest: reduce_bucket_size {reduce}"
        )
    else:
        _put(source, key, "bucket_size", keys[key])


def _offload(source: ConfigSource, keys: Mapping[str, Any]) -> None:
    """What leaves the device. nvme_path counts with the device nvme only, as in DeepSpeed. Both groups share them."""
    paths: dict[str, str] = {}
    for group, field in _OFFLOADED.items():
        name = f"zero_optimization.{group}"
        _offload_group(source, keys, name, field)
        path = keys.get(f"{name}.nvme_path")
        if keys.get(f"{name}.device") != Tier.DISK.value or path is None:
            continue
        if isinstance(path, str):
            paths.setdefault(path, f"{name}.nvme_path")
        else:
            source.refuse(f"{name}.nvme_path: {shown(path)} is not a word: the path of one folder", "nvme_path")
    if paths:
        _put(source, next(iter(paths.values())), "nvme_path", list(paths))


_DEVICES = Tier.DEVICE, Tier.HOST, Tier.DISK
"""Where DeepSpeed has state: the words are the same."""


def _offload_group(source: ConfigSource, keys: Mapping[str, Any], group: str, field: str) -> None:
    """device and ratio are one flag here."""
    device, ratio = (keys.get(f"{group}.{key}") for key in ("device", "ratio"))
    key = f"{group}.device"
    if key not in keys:
        return
    if device not in (None, *(tier.value for tier in _DEVICES)):
        source.refuse(f"{key} {shown(device)} is not one of none, cpu, nvme", field)
        return
    if device in (None, Tier.DEVICE.value) or ratio == 0:
        _put(source, key, field, TierShare())
        return
    try:
        offload = TierShare.of_table(device, None if ratio == 1 else ratio)
    except ValueError as reason:
        source.refuse(f"{group}.ratio: {reason}", field)
        return
    _put(source, key, field, offload)


def _tensorboard(source: ConfigSource, keys: Mapping[str, Any]) -> None:
    if keys.get("tensorboard.enabled"):
        folder = Path(str(keys.get("tensorboard.output_path") or "runs")) / str(
            keys.get("tensorboard.job_name") or "DeepSpeedJobName"
        )
        _put(source, "tensorboard.output_path", "tensorboard_dir", str(folder))


def _wandb(source: ConfigSource, keys: Mapping[str, Any]) -> None:
    if keys.get("wandb.enabled"):
        team, project = keys.get("wandb.team"), str(keys.get("wandb.project") or "deepspeed")
        _put(source, "wandb.project", "wandb", f"{team}/{project}" if team else project)
        if keys.get("wandb.group") is not None:
            _put(source, "wandb.group", "wandb_group", keys["wandb.group"])


def _accumulation(source: DeepSpeedSource, keys: Mapping[str, Any]) -> None:
    steps = keys.get("gradient_accumulation_steps")
    if steps is None:
        return
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        source.refuse(f"gradient_accumulation_steps: {steps!r} is not a whole number of at least 1")
    else:
        source.accumulation = steps
