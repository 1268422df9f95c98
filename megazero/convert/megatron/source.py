"""Reading the torch format of Megatron-LM: a file per tensor-parallel rank and pipeline stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megazero.checkpoint.window import TensorInfo
from megazero.config.dtypes import PRECISION_OF
from megazero.config.schema import ModelConfig, Run
from megazero.convert.files.torch_file import read_torch_file
from megazero.convert.files.unpickle import Record
from megazero.convert.megatron.assembly import Assembly, Ranks
from megazero.convert.megatron.chunks import chunks_of, in_model_order, misplaced, numbered
from megazero.convert.megatron.folders import rank_files
from megazero.convert.megatron.optimizer import OptimizerState, optimizer_state
from megazero.convert.megatron_args import has_qkv_bias_alone, model_from_args, run_from_args, true_vocabulary
from megazero.convert.megatron_deepspeed.schedule import with_schedule
from megazero.convert.report import ConversionReport
from megazero.convert.source import WEIGHT, ConversionError, Source, SourcePosition

KNOWN = (
    *("megatron.*", "apex.*", "transformer_engine.*", "torch.distributed.*", "torch.nn.*", "torch.optim.*"),
    *("signal.*", "enum.*", "_io.BytesIO"),
)
"""Classes whose objects stand among a checkpoint's arguments, or (bytes) as Transformer Engine's state; they are read
as records.
"""
VERSION = 3.0


class MegatronSource(Source):
    """A checkpoint of Megatron-LM in torch's format: the weights and, where its order is certain, the optimizer's
    state.
    """

    def __init__(
        self, path: Path, run: Run, position: SourcePosition, assembly: Assembly, state: OptimizerState
    ) -> None:
        self._assembly = assembly
        self._columns: Mapping[str, Ranks] = {WEIGHT: assembly.ranks, **state.columns}
        entries = {}
        for name, spec in assembly.specs.items():
            entries[name] = TensorInfo(
                spec.shape, {column: assembly.dtype(name, ranks) for column, ranks in self._columns.items()}
            )
        super().__init__("megatron", path, run, entries, position, report=assembly.report)

    def read(self, name: str, column: str = WEIGHT) -> Tensor:
        return self._assembly.tensor(name, self._columns[column])


def open_torch(folder: Path) -> MegatronSource:
    """Open the checkpoint in the folder of an iteration. Raises ConversionError."""
    files = rank_files(folder)
    states = {rank: read_torch_file(path, KNOWN) for rank, path in files.items()}
    tp, pp = (1 + max(rank[axis] for rank in states) for axis in (0, 1))
    args, model = described(
        folder, {str(files[rank].relative_to(folder)): state for rank, state in states.items()}, (tp, pp)
    )
    chunks = {rank: chunks_of(str(files[rank]), state) for rank, state in states.items()}
    if len({len(parts) for parts in chunks.values()}) > 1:
        raise ConversionError(f"{folder}: its ranks hold different numbers of model chunks ('model0', 'model1', ...)")
    ordered = [in_model_order([chunks[t, p] for p in range(pp)]) for t in range(tp)]
    strange = [f"tensor-parallel rank {t}: {problem}" for t in range(tp) for problem in misplaced(ordered[t])]
    if strange:
        raise ConversionError(f"{folder}: " + "; ".join(strange))
    ranks = [numbered(parts) for parts in ordered]
    report = ConversionReport()
    note_padding(report, args, model)
    assembly = Assembly(str(folder), model, ranks, report, qkv_bias_alone=has_qkv_bias_alone(args))
    dtype = assembly.dtype("blocks.0.attention.qkv.weight")
    run = with_schedule(run_from_args(args, model, PRECISION_OF.get(dtype, "fp32")), args)
    state = optimizer_state(states, chunks, tp, pp, folder)
    _account_for_the_rest(report, states[0, 0], state)
    return MegatronSource(folder, run, position_of(args, states[0, 0], model, state.steps), assembly, state)


def described(
    folder: Path, states: Mapping[str, Any], grid: tuple[int, int] | None = None
) -> tuple[Mapping[str, Any], ModelConfig]:
    """The arguments in the first file, and the model that they describe.

    states: file -> its content. grid: (tp, pp) of the files, where there is one per rank. Raises one ConversionError
    with every version but 3.0, every rank without a file, and every argument that is not supported.
    """
    problems = [problem for name, state in states.items() for problem in _version_problems(name, state)]
    first = next(iter(states.values()))
    if not isinstance(first, dict):
        raise ConversionError(f"{folder}: " + "; ".join(problems))
    args = args_of(folder, first)
    named = (
        {}
        if grid is None
        else dict(zip(("tensor_model_parallel_size", "pipeline_model_parallel_size"), grid, strict=True))
    )
    problems += [
        f"{name} is {args[name]}, there are files for {there}"
        for name, there in named.items()
        if args.get(name, there) != there
    ]
    try:
        model = model_from_args(args, str(folder))
    except ConversionError as error:
        raise ConversionError("; ".join([*problems, str(error)])) from error
    if problems:
        raise ConversionError(f"{folder}: " + "; ".join(problems))
    return args, model


def _version_problems(name: str, state: Any) -> Iterator[str]:
    if not isinstance(state, dict):
        yield f"{name} holds a {type(state).__name__} and no dictionary"
    elif (version := state.get("checkpoint_version", 0)) != VERSION:
        yield (
            f"{name} has checkpoint_version {version}: only {VERSION} is read, whose query, key and value rows are "
            "stored per head"
        )


def args_of(folder: Path, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments in a rank's file."""
    args = state.get("args")
    if isinstance(args, Record):
        return args.state
    if isinstance(args, dict):
        return args
    raise ConversionError(f"{folder} keeps no arguments ('args'), without which the model's shape is not known")


def note_padding(report: ConversionReport, args: Mapping[str, Any], model: ModelConfig) -> None:
    """Report what became of the rows with which Megatron pads the vocabulary."""
    padded, true = args.get("padded_vocab_size"), true_vocabulary(args)
    if not true:
        report.notes.append(
            f"the arguments know no vocab_size: all {padded} rows of the vocabulary are kept, padding included "
            "(--vocab-size cuts it)"
        )
    elif padded and true < padded:
        report.notes.append(f"{padded - true} rows that pad the vocabulary of {true} to {padded} are left out")


def position_of(args: Mapping[str, Any], state: Mapping[str, Any], model: ModelConfig, steps: float) -> SourcePosition:
    """How far the training was."""
    iteration = state.get("iteration") or args.get("iteration") or 0
    samples = int(args.get("consumed_train_samples") or 0)
    return SourcePosition(
        int(iteration), samples, samples * model.seq_length, float(steps or iteration), _loss_scale(args, state)
    )


def _loss_scale(args: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, float] | None:
    optimizer = state.get("optimizer")
    scaler = optimizer.get("grad_scaler") if isinstance(optimizer, dict) else None
    if not isinstance(scaler, dict) or not isinstance(scaler.get("scale"), Tensor):
        return None
    hysteresis = int(args.get("hysteresis") or 2)
    left = int(scaler.get("hysteresis_tracker", hysteresis))
    return {
        "scale": scaler["scale"].item(),
        "good_steps": int(scaler.get("growth_tracker", 0)),
        "overflows": hysteresis - left,
    }


_REST: Mapping[str, str] = {
    "rng_state": "random numbers here follow from the seed and the position",
    "opt_param_scheduler": "the schedule here follows from the flags and the position",
    "lr_scheduler": "the schedule here follows from the flags and the position",
    "rerun_state_machine": "Megatron's own bookkeeping",
    "num_floating_point_operations_so_far": "Megatron's own bookkeeping",
}
_TAKEN = ("args", "iteration", "checkpoint_version", "tokens", "model", "optimizer")


def _account_for_the_rest(report: ConversionReport, state: Mapping[str, Any], optimizer: OptimizerState) -> None:
    unused_of_common(report, state)
    if optimizer.why_not is not None:
        report.unused["optimizer"] = f"not carried over: {optimizer.why_not}"


def unused_of_common(report: ConversionReport, state: Mapping[str, Any]) -> None:
    """Report why values other than the model are not used."""
    for key in state:
        if key not in _TAKEN and not key.startswith("model"):
            report.unused[key] = _REST.get(key, "nothing in a checkpoint of ours")
