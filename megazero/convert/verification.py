"""Checks that a conversion kept the model. Every tensor is compared, and where the model fits into memory, the logits
of both sides.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.config.derive import max_positions
from megazero.convert.changed import Rounded
from megazero.convert.files.safetensors_file import flat_pieces
from megazero.convert.hf.reader import HfSource
from megazero.convert.loading import model_of
from megazero.convert.lora.merged import AdaptedSource, Unrounded
from megazero.convert.registry import open_source
from megazero.convert.source import MOMENTS, WEIGHT, Source, SourcePosition
from megazero.data.progress import Progress, Report
from megazero.system import host_memory
from megazero.system.words import counted

POSITIONS = 32
TOLERANCE = 1e-4
"""The allowed difference of logits over the largest logit (at least 1). Two programs that multiply the same float32
weights in another order differ by less.
"""
_UNPROVEN = "not compared: what megazero has read, and what the program computes that wrote"


@dataclass(frozen=True)
class Verdict:
    """lines: what was compared and found, as text. holds: whether the two are the same model."""

    lines: tuple[str, ...]
    holds: bool


def verify(source: Source, output: Path, format: str, report: Report) -> Verdict:
    """Compare a source with the checkpoint in `output` that was written from it.

    report: called with lines about progress. Memory: two tensors, and the model in float32 if that fits. Raises
    ConversionError if the output cannot be read.
    """
    with open_source(output, format) as written:
        tensors = _compare_tensors(source, written, report)
        if not tensors.holds:
            return tensors
        logits = _compare_logits(source, written)
    return Verdict(tensors.lines + logits.lines, logits.holds)


def _compare_tensors(source: Source, written: Source, report: Report) -> Verdict:
    """Compare every column that was written with the source, rounded to the dtype in which it was written."""
    columns = [column for column in source.columns if column in written.columns]
    progress = Progress(report, "comparing", written.nbytes / 1e9, "GB")
    unequal, compared = [], 0
    for name, entry in written.entries.items():
        for column in columns:
            if name not in source.entries or not _equal(name, source.read(name, column), written.read(name, column)):
                unequal.append(f"{name} {column}")
            compared += 1
            progress.reach(progress.done + entry.nbytes(column) / 1e9)
    missing = [name for name in source.entries if name not in written.entries]
    if unequal or missing:
        return Verdict(
            (
                f"NOT the same: {len(unequal)} of {compared} tensors differ, {len(missing)} are missing: "
                f"{(unequal + missing)[:8]}",
            ),
            False,
        )
    wrong = [
        *_contradictions(written),
        *(_moved(source.position, written.position) if set(MOMENTS) <= set(columns) else ()),
    ]
    if wrong:
        return Verdict((f"NOT the same: {'; '.join(wrong[:8])}",), False)
    dtypes = sorted({str(entry.columns[WEIGHT]).removeprefix("torch.") for entry in written.entries.values()})
    lost = [column for column in source.columns if column not in columns]
    said = [f"{', '.join(lost)} of the source: not in what was written"] if lost else []
    return Verdict(
        (f"{counted(compared, 'tensor')} bit-equal ({', '.join(columns)}; weights in {', '.join(dtypes)})", *said), True
    )


def _contradictions(written: Source) -> list[str]:
    """Where the written files contradict each other: copies of a tensor that differ, a 16-bit weight that is not its
    rounded master.
    """
    report = written.report
    return [
        f"{replica.key}: its {replica.copies} copies differ by up to {replica.largest:.3g}"
        for replica in report.replicas
    ] + report.apart


def _moved(was: SourcePosition, found: SourcePosition) -> list[str]:
    """Differences in how far the training was. It is compared where the optimizer's moments are."""
    counted = ("iteration", "consumed_samples", "optimizer_steps")
    pairs = [(name, getattr(was, name), getattr(found, name)) for name in counted]
    return [f"{name} was {ours}, is {theirs}" for name, ours, theirs in pairs if ours != theirs]


def _equal(name: str, ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape:
        return False
    pieces = zip(flat_pieces(ours, theirs.dtype, name), flat_pieces(theirs, theirs.dtype, name), strict=True)
    return all(_same_bits(a, b) for a, b in pieces)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _compare_logits(source: Source, written: Source) -> Verdict:
    needed = 6 * sum(entry.numel for entry in source.entries.values())
    free = host_memory.available_bytes()
    if free is None or needed > free:
        room = "unknown" if free is None else f"{free / 1e9:.1f} GB"
        return Verdict(
            (f"logits not compared: the model takes about {needed / 1e9:.1f} GB in float32, free are {room}",), True
        )
    dtype = next(iter(written.entries.values())).columns[WEIGHT]
    ids = _fixed_input(source)
    foreign, mine = _sides(source, written)
    ours = _logits(_unrounded(mine) if foreign.format == "peft" else Rounded(mine, dtype), ids)
    who, outsider = _outsider(foreign)
    try:
        theirs = outsider(ids)
    except Exception as error:
        if foreign is written:
            raise
        who, theirs = (
            f"megazero reading back, as {who} does not open {source.path} ({type(error).__name__})",
            _logits(source, ids),
        )
    distance, largest = (ours - theirs).abs().max().item(), ours.abs().max().item()
    holds = distance <= TOLERANCE * max(largest, 1.0)
    said = (
        f"logits of {ids.shape[1]} positions differ by at most {distance:.2g} (largest {largest:.2g}; {who} against "
        "megazero, float32)"
    )
    if not holds:
        return Verdict((f"NOT the same: {said}",), False)
    judged = source.format == "megazero" or (foreign is source and "megazero" not in who)
    return Verdict((said,) if judged else (said, f"{_UNPROVEN} {source.path}"), True)


def _sides(source: Source, written: Source) -> tuple[Source, Source]:
    """The two sides of the comparison of logits. The first is computed by another program where possible: what was
    written, or the source where its files are used as they are.
    """
    unchanged = isinstance(source, HfSource) and all(
        source.entries[name].columns[WEIGHT] == entry.columns[WEIGHT] for name, entry in written.entries.items()
    )
    return (source, written) if unchanged and written.format != source.format else (written, source)


def _fixed_input(source: Source) -> Tensor:
    """Ids spread over the vocabulary, [1, s]."""
    model = source.model
    assert model.vocab_size is not None
    length = min(POSITIONS, max_positions(model)) if model.position_embedding == "learned" else POSITIONS
    return (torch.arange(length) * 7919 % model.vocab_size).unsqueeze(0)


def _logits(source: Source, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model_of(source, precision="fp32")(ids)


def _unrounded(source: Source) -> Source:
    """The source, and of adapters on a model one that rounds no sums, as PEFT."""
    return Unrounded(source) if isinstance(source, AdaptedSource) else source


def _outsider(side: Source) -> tuple[str, Callable[[Tensor], Tensor]]:
    """The program that computes this side: transformers for its own format, and PEFT for adapters of one, where they
    are installed; otherwise megazero, from what it reads there.
    """
    if side.format == "peft" and isinstance(side, AdaptedSource) and side.base.format == "hf":
        return _peft(side)
    if side.format == "hf":
        try:
            import transformers
        except ImportError:
            return "megazero reading back", lambda ids: _logits(side, ids)
        path = str(side.path)

        def of_transformers(ids: Tensor) -> Tensor:
            with _quiet(), torch.no_grad():
                model = _in_transformers(path)
                with suppress(ImportError, ValueError):  # without PEFT, and without adapters in the folder
                    model.disable_adapters()
                return model.eval()(ids).logits

        return f"transformers {transformers.__version__}", of_transformers
    return "megazero reading back", lambda ids: _logits(_unrounded(side) if side.format == "peft" else side, ids)


def _in_transformers(path: str) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers and PEFT tell of their own work: bars of progress, and words that are out of date."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _peft(side: AdaptedSource) -> tuple[str, Callable[[Tensor], Tensor]]:
    """PEFT's logits of adapters on a model of transformers."""
    try:
        import peft
        import transformers  # noqa: F401
    except ImportError:
        return "megazero reading back", lambda ids: _logits(Unrounded(side), ids)
    path, base = str(side.adapters.path), str(side.base.path)

    def of_peft(ids: Tensor) -> Tensor:
        with _quiet(), torch.no_grad():
            model = _in_transformers(base)
            with_adapters = path == base  # transformers has added them
            adapted = model if with_adapters else peft.PeftModel.from_pretrained(model, path, local_files_only=True)
            return adapted.eval()(ids).logits

    return f"PEFT {peft.__version__}", of_peft
