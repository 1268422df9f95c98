"""Sources that wrap another source and change its tensors as they are read, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from megazero.checkpoint.narrowing import narrowed
from megazero.checkpoint.window import TensorInfo
from megazero.config.dtypes import PRECISION_OF
from megazero.config.inventory import TABLES
from megazero.convert.hf.config import CONFIG, GENERATION, NAMED_IDS, ids_of, read_json
from megazero.convert.source import WEIGHT, ConversionError, Source
from megazero.system.words import counted


class _Changed(Source):
    """Another source with some of its fields replaced. It shares that source's report and open files."""

    def __init__(self, source: Source, **facts: object) -> None:
        kept = {
            name: getattr(source, name)
            for name in ("format", "path", "run", "entries", "position", "companions", "report", "closing")
        }
        super().__init__(**(kept | facts))
        self.under = source

    def read(self, name: str, column: str = WEIGHT) -> Tensor:
        return self.under.read(name, column)


class Rounded(_Changed):
    """The weights alone, rounded to a dtype."""

    def __init__(self, source: Source, dtype: torch.dtype) -> None:
        optimizer = replace(source.run.optimizer, precision=PRECISION_OF[dtype])
        entries = {name: TensorInfo(entry.shape, {WEIGHT: dtype}) for name, entry in source.entries.items()}
        super().__init__(source, run=replace(source.run, optimizer=optimizer), entries=entries)
        self.dtype = dtype

    def read(self, name: str, column: str = WEIGHT) -> Tensor:
        return narrowed(super().read(name, column), self.dtype, name)


class Reaching(_Changed):
    """The same weights of a model whose longest context is `length`."""

    def __init__(self, source: Source, length: int) -> None:
        model = replace(source.model, seq_length=length, max_position_embeddings=None)
        super().__init__(source, run=replace(source.run, model=model))


def _named_tokens(source: Source) -> Iterator[tuple[str, int]]:
    """(where the source names it, id) of each token with a special role, such as the end of a document."""
    if source.run.data.eod_id is not None:
        yield "end of document", source.run.data.eod_id
    for file in (CONFIG, GENERATION):
        try:
            said = read_json(source.companions[file])
        except (KeyError, ConversionError):
            continue
        yield from ((f"{key} in {file}", token) for key in NAMED_IDS for token in ids_of(said, key))


class Trimmed(_Changed):
    """The first `vocabulary` rows of the embedding and of an untied head. The rows after them are another program's
    padding.
    """

    def __init__(self, source: Source, vocabulary: int) -> None:
        rows = source.model.vocab_size
        assert rows is not None
        if not 0 < vocabulary <= rows:
            raise ConversionError(
                f"--vocab-size {vocabulary}: the checkpoint has {counted(rows, 'row')}; rows can be left out, not made"
            )
        lost = [(what, token) for what, token in _named_tokens(source) if vocabulary <= token < rows]
        if lost:
            listed, most = ", ".join(f"{what} {token}" for what, token in lost), max(token for _, token in lost)
            raise ConversionError(
                f"--vocab-size {vocabulary} leaves out tokens that the model names: {listed}; nearest: {most + 1}"
            )
        self.names = [name for name in TABLES if name in source.entries]
        shorter = {
            name: TensorInfo((vocabulary, *source.entries[name].shape[1:]), source.entries[name].columns)
            for name in self.names
        }
        run = replace(source.run, model=replace(source.model, vocab_size=vocabulary))
        super().__init__(source, run=run, entries={**source.entries, **shorter})
        if vocabulary < rows:
            self.report.notes.append(
                f"{counted(rows - vocabulary, 'row')} of the vocabulary left out (--vocab-size {vocabulary})"
            )

    def read(self, name: str, column: str = WEIGHT) -> Tensor:
        whole = super().read(name, column)
        return whole[: self.entries[name].shape[0]] if name in self.names else whole
