"""Reading Megatron-LM's torch_dist checkpoints: whole tensors of Megatron-core in a checkpoint of torch.distributed.

A parameter of all layers is stored as one tensor with the layer as first axis, or as one tensor for each layer. The
first matrix of a gated layer is [gate; up] over all ranks. The optimizer's state has the names of the model's tensors
if it was saved for any layout ("fully_sharded_model_space", which calls a master fp32_param, or "fully_reshardable",
which calls it param). Its values may be in flat shards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.window import TensorInfo
from megazero.config.dtypes import PRECISION_OF
from megazero.config.inventory import TABLES
from megazero.config.schema import ModelConfig, Run
from megazero.convert.files.torch_dist import DistributedCheckpoint, fragments, rows_of, unflattened
from megazero.convert.files.torch_file import read_torch_file
from megazero.convert.hf.config import read_json
from megazero.convert.megatron.names import MegatronTensor, theirs, why_ignored
from megazero.convert.megatron.source import KNOWN, described, note_padding, position_of, unused_of_common
from megazero.convert.megatron_args import has_qkv_bias_alone, run_from_args
from megazero.convert.megatron_deepspeed.schedule import with_schedule
from megazero.convert.report import ConversionReport
from megazero.convert.source import (
    EXP_AVG,
    EXP_AVG_SQ,
    MOMENTS,
    WEIGHT,
    ConversionError,
    Source,
    SourcePosition,
    parameter_specs,
)
from megazero.mpu.parameter import ParameterSpec
from megazero.system.reading import shown

COMMON, DESCRIPTION = "common.pt", "metadata.json"
STATES: Mapping[str, tuple[str, ...]] = {
    WEIGHT: ("fp32_param", "param"),
    EXP_AVG: ("exp_avg",),
    EXP_AVG_SQ: ("exp_avg_sq",),
}
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?:fp32_param|param|exp_avg_sq|exp_avg)\.")
_LAYER = re.compile(r"(decoder\.layers\.)(\d+)\.(.*)")
_OTHERS: Mapping[str, str] = {
    r"optimizer\..*|chained_\d+\..*": "the optimizer's state in a form that only its own layout can read: not carried "
    "over",
    r"rng_state.*": "random numbers here follow from the seed and the position",
    r"rerun_state_machine.*": "Megatron's own bookkeeping",
}


@dataclass(frozen=True)
class GlobalTensorKey:
    """Where one of our tensors is. layer: its index on the first axis, of a tensor of all layers. half: the half of the
    rows that is ours.
    """

    key: str
    layer: int | None
    half: int | None

    def inside(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the layer's tensor."""
        return shape if self.layer is None else shape[1:]


class TorchDistSource(Source):
    """A torch_dist checkpoint. With the optimizer's state the column "weight" is the fp32 master, if there is one."""

    def __init__(
        self, path: Path, run: Run, position: SourcePosition, stored: _Tensors, columns: Mapping[str, str]
    ) -> None:
        dtypes = {
            name: {column: stored.dtype(name, prefix) for column, prefix in columns.items()} for name in stored.specs
        }
        entries = {name: TensorInfo(spec.shape, dtypes[name]) for name, spec in stored.specs.items()}
        super().__init__("megatron", path, run, entries, position, report=stored.report)
        self._stored, self._prefixes = stored, columns

    def read(self, name: str, column: str = WEIGHT) -> Tensor:
        return self._stored.tensor(name, self._prefixes[column])


def open_torch_dist(folder: Path) -> TorchDistSource:
    """Open the checkpoint in the folder of an iteration. Raises ConversionError."""
    _refuse_other_backends(folder)
    if not (folder / COMMON).is_file():
        raise ConversionError(f"{folder} has no {COMMON}, whose arguments tell the model's shape")
    common = read_torch_file(folder / COMMON, KNOWN)
    args, model = described(folder, {COMMON: common})
    report = ConversionReport()
    note_padding(report, args, model)
    stored = _Tensors(DistributedCheckpoint(folder), model, report, qkv_bias_alone=has_qkv_bias_alone(args))
    columns = {WEIGHT: "", **stored.state()}
    unused_of_common(report, common)
    precision = PRECISION_OF.get(stored.dtype("blocks.0.attention.qkv.weight", ""), "fp32")
    steps = _steps(common.get("optimizer"))
    run = with_schedule(run_from_args(args, model, precision), args)
    return TorchDistSource(folder, run, position_of(args, common, model, steps), stored, columns)


def _refuse_other_backends(folder: Path) -> None:
    path = folder / DESCRIPTION
    if not path.is_file():
        return
    backend = read_json(path).get("sharded_backend")
    if backend != "torch_dist":
        raise ConversionError(f"{path}: sharded_backend {shown(backend)} is not read, torch_dist is")


class _Tensors:
    """The tensors of a model in a checkpoint.

    Raises ConversionError with everything that is missing, too much, or of another shape.
    """

    def __init__(
        self, checkpoint: DistributedCheckpoint, model: ModelConfig, report: ConversionReport, *, qkv_bias_alone: bool
    ) -> None:
        self.checkpoint, self.report = checkpoint, report
        self.specs: Mapping[str, ParameterSpec] = parameter_specs(model)
        named = theirs(model)
        self.found = {name: found for name in named if (found := self._find(name, named[name])) is not None}
        self.zeros = [
            name
            for name in named
            if qkv_bias_alone and name.endswith("attention.output.bias") and name not in self.found
        ]
        report.filled |= dict.fromkeys(self.zeros, "zeros: only query, key and value have a bias there")
        missing = [name for name in named if name not in self.found and name not in self.zeros]
        problems = [f"{name} is missing (looked for {', '.join(named[name].names[:2])})" for name in missing]
        problems += [problem for name in self.found for problem in self._misfit(name)]
        problems += self._account(model)
        if problems:
            more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
            raise ConversionError(
                f"{checkpoint.folder} does not hold the model that its arguments describe: "
                + "; ".join(problems[:20] + more)
            )

    def _find(self, name: str, named: MegatronTensor) -> GlobalTensorKey | None:
        for key in named.names:
            match = _LAYER.fullmatch(key)
            together = [] if match is None else [(f"{match[1]}{match[3]}", int(match[2]))]
            for wanted, layer in [(key, None), *together]:
                if wanted in self.checkpoint.tensors:
                    return GlobalTensorKey(wanted, layer, named.half)
                apart = "" if named.half is None else f"{wanted}_{'wv'[named.half]}"
                if apart in self.checkpoint.tensors:
                    return GlobalTensorKey(apart, layer, None)
        return None

    def tensor(self, name: str, prefix: str) -> Tensor:
        """One of our global tensors, without vocabulary padding. prefix: what stands before the model's key, for a
        state of the optimizer.
        """
        if name in self.zeros:
            return torch.zeros(self.specs[name].shape, dtype=self.dtype(name, prefix))
        found, wanted = self.found[name], self.specs[name].shape
        whole = found.inside(self.checkpoint.tensors[found.key].shape)
        stored = self.checkpoint.tensors[prefix + found.key].shape
        start = 0 if not found.half else wanted[0]
        if stored == self.checkpoint.tensors[found.key].shape:
            box = rows_of(whole, start, start + wanted[0])
            value = self.checkpoint.read(
                prefix + found.key, box if found.layer is None else ((found.layer, found.layer + 1), *box)
            )
            return value if found.layer is None else value[0]
        inner = stored if found.layer is None else stored[1:]
        box = tuple((0, n) for n in inner)
        flat = self.checkpoint.read(
            prefix + found.key, box if found.layer is None else ((found.layer, found.layer + 1), *box)
        )
        return unflattened(flat if found.layer is None else flat[0], whole)[start : start + wanted[0]]

    def dtype(self, name: str, prefix: str) -> torch.dtype:
        stands_for = name.replace("output.bias", "qkv.bias") if name in self.zeros else name
        return self.checkpoint.tensors[prefix + self.found[stands_for].key].dtype

    def state(self) -> dict[str, str]:
        """Column -> prefix of the model's keys. Empty where the optimizer's state does not cover every tensor."""
        prefixes = {match[0] for name in self.checkpoint.tensors if (match := _STATE.match(name)) is not None}
        found = {}
        for column, names in STATES.items():
            ends = tuple(f".{name}." for name in names)
            whole = [prefix for prefix in sorted(prefixes) if prefix.endswith(ends) and self._holds(prefix)]
            if whole:
                found[column] = whole[0]
        if not all(moment in found for moment in MOMENTS):
            found = {}
        for name in self.checkpoint.tensors:
            prefix = match[0] if (match := _STATE.match(name)) is not None else None
            if prefix is not None and prefix not in found.values():
                self.report.unused[name] = (
                    "the optimizer's state does not hold exp_avg and exp_avg_sq of every tensor: not carried over"
                )
            elif prefix is not None:
                self.report.mapped.append(name)
        return found

    def _holds(self, prefix: str) -> bool:
        for found in self.found.values():
            state = self.checkpoint.tensors.get(prefix + found.key)
            whole = self.checkpoint.tensors[found.key].shape
            if state is None or not (state.shape == whole or self._cut(state.shape, whole, found)):
                return False
        return True

    def _cut(self, stored: tuple[int, ...], whole: tuple[int, ...], found: GlobalTensorKey) -> bool:
        cuts = fragments(stored, whole)
        return cuts is not None and (found.layer is None or cuts[0] == whole[0])

    def _misfit(self, name: str) -> Iterator[str]:
        found, wanted = self.found[name], self.specs[name].shape
        shape = list(found.inside(self.checkpoint.tensors[found.key].shape))
        if found.half is not None and shape:
            shape[0] //= 2
        padded = name in TABLES and shape[1:] == list(wanted[1:]) and shape[0] >= wanted[0]
        if shape != list(wanted) and not padded:
            yield f"{found.key} has shape {list(self.checkpoint.tensors[found.key].shape)}, {name} is {list(wanted)}"

    def _account(self, model: ModelConfig) -> Iterator[str]:
        used = {found.key: found.layer for found in self.found.values()}
        for key, layer in used.items():
            self.report.mapped.append(key)
            layers = self.checkpoint.tensors[key].shape[0] if layer is not None else model.num_layers
            if layers != model.num_layers:
                yield f"{key} is of {layers} layers, num_layers is {model.num_layers}"
        for key in [*self.checkpoint.tensors, *self.checkpoint.objects]:
            if key in used or _STATE.match(key):
                continue
            why = why_ignored(key) or next(
                (why for pattern, why in _OTHERS.items() if re.fullmatch(pattern, key)), None
            )
            if why is None and key in self.checkpoint.tensors:
                yield f"{key} is a weight that a model with these arguments does not have"
            else:
                self.report.unused[key] = why or "nothing in a model of ours"


def _steps(optimizer: Any) -> float:
    """Adam's step count: the largest "step" of any group or state, since Megatron's optimizers differ in where they
    keep it.
    """
    found = [0.0]
    waiting = [optimizer]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            found += [
                float(value[key]) for key in ("step", "common_step") if isinstance(value.get(key), int | float | Tensor)
            ]
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return max(found)
