"""Reading Megatron-DeepSpeed's checkpoints: weights for any tp, and the state of ZeRO-1 and ZeRO-2 for any tp, pp and
dp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.window import TensorInfo
from megazero.config.dtypes import PRECISION_OF
from megazero.config.schema import Run
from megazero.convert.companions import companions
from megazero.convert.files.unpickle import Record
from megazero.convert.hf.config import read_json
from megazero.convert.megatron_args import model_from_args, run_from_args
from megazero.convert.megatron_deepspeed.columns import Columns
from megazero.convert.megatron_deepspeed.folders import STEP, Files, Listing, checkpoint_folder, listing
from megazero.convert.megatron_deepspeed.loss_scale import loss_scale_of, with_loss_scale
from megazero.convert.megatron_deepspeed.names import found_layers
from megazero.convert.megatron_deepspeed.schedule import with_schedule
from megazero.convert.megatron_deepspeed.shapes import args_from_shapes
from megazero.convert.megatron_deepspeed.weights import Weights, label, stored_layers
from megazero.convert.megatron_deepspeed.zero import ZeroContents, read_zero
from megazero.convert.report import ConversionReport
from megazero.convert.source import WEIGHT, ConversionError, Source, SourcePosition


class MegatronDeepSpeedSource(Source):
    """A checkpoint of Megatron-DeepSpeed. With optimizer files the column "weight" is the fp32 master."""

    def __init__(
        self,
        path: Path,
        run: Run,
        position: SourcePosition,
        weights: Weights,
        columns: Columns | None,
        report: ConversionReport,
        companions: dict[str, Path],
    ) -> None:
        dtypes = columns.zero.dtypes if columns else {}
        entries = {
            name: TensorInfo(shape, {WEIGHT: weights.dtype(name), **dtypes}) for name, shape in weights.shapes.items()
        }
        super().__init__("megatron-deepspeed", path, run, entries, position, companions, report)
        self.weights, self.columns_of = weights, columns
        self._compared: set[str] = set()
        self.closing.callback(weights.files.close)

    def read(self, name: str, column: str = WEIGHT) -> Tensor:
        if self.columns_of is None:
            return self.weights.read(name)
        whole = self.columns_of.read(name, column)
        if column == WEIGHT and name not in self._compared:
            self._compare(name, whole)
        return whole

    def _compare(self, name: str, master: Tensor) -> None:
        """Report a layer file's weight that is not the rounded master: the files are of different steps, or one was
        changed.

        Raises ConversionError where the two are far apart, as weights and masters of different ranks or partitions are.
        """
        parts = [
            list(zip(whole.split(_ROWS), kept.split(_ROWS), strict=True))
            for whole, kept in self.weights.pair_with_weights(name, master)
        ]
        counts = [sum(_unequal(mine, theirs) for mine, theirs in pairs) for pairs in parts]
        off, shown = sum(counts), label(self.weights.theirs[name])
        averaged = any(replica.key == shown or replica.key.startswith(f"{shown} ") for replica in self.report.replicas)
        if off and not averaged:  # a mean of rounded replicas is not the rounded mean
            for t, (pairs, count) in enumerate(zip(parts, counts, strict=True)):
                numel = sum(mine.numel() for mine, _ in pairs)
                if count > numel / 2 and (distance := _distance(pairs)) > _FAR:
                    raise ConversionError(
                        f"{self.path}: {shown} of the layer files (tp rank {t}) and its masters in the optimizer's "
                        f"files are not one tensor: {count} of "
                        f"{numel} elements differ, by {distance:.2g} of its norm. Files of other ranks, partitions or "
                        "steps are among them. To convert "
                        f"the weights of the layer files alone, move the *_optim_states.pt files elsewhere"
                    )
            note = (
                f"{name}: {off} of {master.numel()} master weights, rounded, are not what the "
                "layer files hold; the masters are taken"
            )
            self.report.apart.append(note)
        self._compared.add(name)


_ROWS = 1 << 10
"""Rows of a table that are compared at once."""
_FAR = 0.5
"""Of a tensor's norm. Unrelated weights are 1.4 of it apart, those of neighbouring steps a hundredth."""


def _unequal(master: Tensor, stored: Tensor) -> int:
    rounded = master.to(stored.dtype)
    return int((rounded != stored).logical_and(~(rounded.isnan() & stored.isnan())).sum())


def _distance(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The norm of (rounded master - stored weight), divided by the norm of the stored weight."""
    squares = [
        (
            (master.to(stored.dtype).double() - stored.double()).square().sum().item(),
            stored.double().square().sum().item(),
        )
        for master, stored in pairs
    ]
    apart, norm = (math.fsum(values) for values in zip(*squares, strict=True))
    return math.sqrt(apart / max(norm, 1e-20))  # of zeros


def open_megatron_deepspeed(path: Path) -> MegatronDeepSpeedSource:
    """Open the checkpoint in a folder, or the one that its `latest` names. Raises ConversionError.

    Arguments that the mp_rank files do not have follow from the shapes of the tensors. What the shapes do not
    show (the number of heads) is taken from a config.json in the same folder, if there is one.
    """
    folder = checkpoint_folder(path)
    there = listing(folder)
    files, report = Files(), ConversionReport()
    stored = stored_layers(files, there)
    layers = found_layers({layer: tuple(ranks[0]) for layer, ranks in stored.items()}, str(folder))
    state = files[there.ranks[0]] if there.ranks else {}
    around = (
        folder.absolute().parent if STEP.fullmatch(folder.name) else path
    )  # files next to a step's folder belong to it, whether the path names the folder or its parent
    beside = {file.name: file for file in (folder / "config.json", around / "config.json") if file.is_file()}
    model_files = companions(folder, around) | beside
    said = _told(model_files) | _args(state)
    _refuse_other_version(folder, state)
    _refuse_other_grid(folder, said, there)
    args = args_from_shapes(said, stored, layers, str(folder), report)
    model = model_from_args(args, str(folder))
    weights = Weights(files, there, stored, layers, model, report)
    precision = PRECISION_OF.get(weights.dtype("blocks.0.attention.qkv.weight"), "fp32")
    zero = read_zero(files, there) if there.zero else None
    columns = Columns(files, there, weights, zero, report) if zero else None
    _note(report, zero, there, args, model.vocab_size)
    run = with_schedule(run_from_args(_with_hyper(args, zero), model, precision), args)
    run = with_loss_scale(run, zero.scaler if zero else None)
    return MegatronDeepSpeedSource(
        folder, run, _position(state, args, zero, there), weights, columns, report, model_files
    )


def _args(state: Any) -> dict[str, Any]:
    """The arguments of the run that wrote the checkpoint: a namespace, a dictionary, or nothing.

    Members of enumerations become their values.
    """
    args = state.get("args") if isinstance(state, dict) else None
    found = args.state if isinstance(args, Record) else args if isinstance(args, dict) else {}
    return {name: value.args[0] if isinstance(value, Record) and value.args else value for name, value in found.items()}


_CONFIG = {
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "num_layers": ("num_layers", "num_hidden_layers", "n_layer"),
    "seq_length": ("seq_length", "max_position_embeddings", "n_positions"),
    "layernorm_epsilon": ("layer_norm_epsilon", "layernorm_epsilon", "rms_norm_eps"),
    "vocab_size": ("vocab_size",),
    "num_key_value_heads": ("num_key_value_heads",),
    "rotary_base": ("rope_theta",),
}
"""Argument -> what a config.json may call it."""


def _told(companions: Mapping[str, Path]) -> dict[str, Any]:
    path = companions.get("config.json")
    if path is None:
        return {}
    config = read_json(path)
    return {name: config[key] for name, keys in _CONFIG.items() for key in keys[::-1] if config.get(key) is not None}


def _refuse_other_version(folder: Path, state: Any) -> None:
    """Refuse versions other than 3.0, in which the rows of query, key and value are [heads, 3, head size].

    Files may lack the number of the version.
    """
    version = state.get("checkpoint_version") if isinstance(state, dict) else None
    if version not in (None, 3, 3.0):
        raise ConversionError(
            f"{folder} has checkpoint_version {version}: only 3.0 is read, whose rows of query, key and value are "
            "stored head by head"
        )


def _refuse_other_grid(folder: Path, args: Mapping[str, Any], there: Listing) -> None:
    """Refuse layer files of fewer tp ranks than the arguments name: the files of the last ranks are missing."""
    tp, pp = args.get("tensor_model_parallel_size"), args.get("pipeline_model_parallel_size")
    wrong = []
    if tp and tp != there.tp:
        wrong.append(f"tensor_model_parallel_size is {tp}, there are layer files of {there.tp} tp ranks")
    if pp and there.ranks and len(there.ranks) != pp * there.tp:
        wrong.append(
            f"pipeline_model_parallel_size is {pp}, there are mp_rank files of {len(there.ranks)} ranks ({there.tp} "
            "per stage)"
        )
    if wrong:
        raise ConversionError(f"{folder} is not whole: " + "; ".join(wrong))


def _with_hyper(args: Mapping[str, Any], zero: ZeroContents | None) -> Mapping[str, Any]:
    """The arguments. Values that they lack come from the optimizer's files."""
    if zero is None:
        return args
    first, second = (
        (*zero.hyper["betas"], None)[:2] if isinstance(zero.hyper.get("betas"), list | tuple) else (None, None)
    )
    known = {
        "adam_beta1": first,
        "adam_beta2": second,
        "adam_eps": zero.hyper.get("eps"),
        "weight_decay": zero.hyper.get("weight_decay"),
    }
    return {
        **{name: value for name, value in known.items() if value is not None},
        **{k: v for k, v in args.items() if v is not None},
    }


def _position(state: Any, args: Mapping[str, Any], zero: ZeroContents | None, there: Listing) -> SourcePosition:
    held: Mapping[str, Any] = state if isinstance(state, dict) else {}
    iteration = int(held.get("iteration") or args.get("iteration") or held.get("global_steps") or there.iteration)
    samples = int(args.get("consumed_train_samples") or held.get("global_samples") or 0)
    tokens = int(held.get("tokens") or args.get("consumed_train_tokens") or 0)
    steps = zero.steps if zero and zero.steps else float(iteration)
    return SourcePosition(
        iteration,
        samples,
        tokens or samples * int(args["seq_length"]),
        steps,
        loss_scale_of(zero.scaler if zero else None),
    )


def _note(
    report: ConversionReport, zero: ZeroContents | None, there: Listing, args: Mapping[str, Any], vocabulary: int | None
) -> None:
    padded, true = args.get("padded_vocab_size"), args.get("vocab_size")
    if true and padded and true < padded:
        report.notes.append(f"{padded - true} rows that pad the vocabulary of {true} to {padded} are left out")
    elif not true:
        report.notes.append(
            f"the arguments know no vocab_size: all {vocabulary} rows of the vocabulary are kept, padding included"
        )
    if zero is None:
        report.notes.append("there are no optimizer files (*_optim_states.pt): weights only")
    else:
        report.notes += zero.notes
        if zero.dtypes[WEIGHT] != torch.float32:
            report.notes.append(f"master weights are stored in {zero.dtypes[WEIGHT]}")
    if not there.ranks:
        report.notes.append(
            "there are no mp_rank files: the model is told by its tensors, and its position by the folder's name"
        )
