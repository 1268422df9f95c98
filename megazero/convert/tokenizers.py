"""The tokenizer of a checkpoint: from its own files, or the one with which its run was trained."""

from __future__ import annotations

from pathlib import Path

from megazero.convert.report import ConversionReport
from megazero.convert.source import Source
from megazero.data.chat import template_of
from megazero.data.indexed import DataError
from megazero.data.libraries import HuggingFaceTokenizer
from megazero.data.tokenizer import ListedTokenizer, build_tokenizer

TOKENIZERS = (("tokenizer.json", "hf"), ("tokenizer.model", "sentencepiece"), ("vocab.json", "gpt2"))
"""A file of a model and the kind of tokenizer that it stands for. The first file that exists counts."""
_NOT_OPENED = "the tokenizer cannot be opened"


def tokenizer_files(source: Source) -> tuple[str, str | None] | None:
    """A source's --tokenizer and --tokenizer-path, from its companions, or else from its run if those files still
    exist. None otherwise.
    """
    for name, kind in TOKENIZERS:
        if name in source.companions:
            return kind, str(source.companions[name])
    trained_with, path = source.run.data.tokenizer, source.run.data.tokenizer_path
    if trained_with is None or (path is not None and not _still_there(Path(path).expanduser())):
        return None
    return trained_with, path


def tokenizer_of(source: Source) -> ListedTokenizer | None:
    """The model's tokenizer. None where there is none, or where it cannot be opened here."""
    found = tokenizer_files(source)
    try:
        return build_tokenizer(*found) if found else None
    except (DataError, ImportError) as error:
        source.report.notes.append(f"{_NOT_OPENED}: {error}")
        return None


def no_tokenizer(report: ConversionReport) -> str:
    """That a checkpoint leads to no tokenizer, with the reason where it has one that cannot be opened."""
    reason = next((note for note in report.notes if note.startswith(_NOT_OPENED)), None)
    return "leads to no tokenizer" + ("" if reason is None else f" ({reason})")


def end_of_turn(source: Source) -> int | None:
    """The token with which the model's chat template ends an assistant's turn. None where there is no template, or
    where it does not show.
    """
    tokenizer = tokenizer_of(source)
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return None
    try:
        end = template_of(tokenizer).end_of_turn()
    except (DataError, ImportError):
        return None
    found = None if end is None else tokenizer.id_of(end)
    return found if found is None or found < (source.model.vocab_size or 0) else None


def missing_tokenizer(source: Source) -> str | None:
    """What is missing, where a source names a tokenizer that is not there; else None."""
    data = source.run.data
    if data.tokenizer is None or tokenizer_files(source) is not None:
        return None
    return f"{source.path} was trained with --tokenizer {data.tokenizer} --tokenizer-path {data.tokenizer_path}"


def _still_there(path: Path) -> bool:
    return path.exists() or any(path.parent.glob(f"{path.name}-*"))
