"""The table of formats."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from megazero.convert import native
from megazero.convert.companions import companions
from megazero.convert.formats import Format
from megazero.convert.gguf.registered import FORMAT as GGUF
from megazero.convert.hf.files import weight_files
from megazero.convert.hf.registered import FORMAT as HF
from megazero.convert.lora.merged import adapted_source
from megazero.convert.lora.peft_reader import adapter_file
from megazero.convert.lora.registered import FORMAT as PEFT
from megazero.convert.megatron.registered import FORMAT as MEGATRON
from megazero.convert.megatron_deepspeed.registered import FORMAT as MEGATRON_DEEPSPEED
from megazero.convert.names import missing_path_message
from megazero.convert.source import ConversionError, NoCheckpoint, Source
from megazero.convert.universal.registered import FORMATS as UNIVERSAL
from megazero.system.hub import HubError, folder_of
from megazero.system.reading import BOUNDS, Unreadable


def format_table() -> Mapping[str, Format]:
    """The formats by name, in the order in which they are tried on a folder."""
    found: list[Format] = [MEGATRON, MEGATRON_DEEPSPEED, native.FORMAT, PEFT, HF, *UNIVERSAL]
    return {known.name: known for known in found}


def target_table() -> Mapping[str, Format]:
    """The formats that are written, by name: those that are read too, and GGUF."""
    return {**format_table(), GGUF.name: GGUF}


_ONE_CHECKPOINT = {MEGATRON_DEEPSPEED.name, *(known.name for known in UNIVERSAL)}
"""Formats that DeepSpeed's tools write into the folder of one run. The first in the table counts."""


def recognise(path: Path) -> str:
    """The name of a checkpoint's format. Raises NoCheckpoint that says what was looked for, and ConversionError for a
    folder that can be read as two things.
    """
    names = [name for name, known in format_table().items() if _recognises(known, path)]
    other = next((name for name in names[1:] if not {names[0], name} <= _ONE_CHECKPOINT), None)
    if other is not None:
        raise ConversionError(_two_things(path, names[0], other))
    if names:
        return names[0]
    if not path.exists():
        raise NoCheckpoint(missing_path_message(path))
    described = (path / "config.json").is_file()
    lacks = "; it has config.json, and no weights (*.safetensors, pytorch_model*.bin) beside it" * described
    raise NoCheckpoint(f"{path} holds no checkpoint of a known format ({', '.join(format_table())}){lacks}")


def _recognises(known: Format, path: Path) -> bool:
    with _readable(path, known.name):
        return known.recognises(path)


def _two_things(path: Path, first: str, second: str) -> str:
    adapted = {first, second} == {PEFT.name, HF.name}
    meanings = (
        f"; {HF.name} is the model alone ({', '.join(file.name for file in weight_files(path)[:1])}), {PEFT.name} the "
        f"model with the adapters added ({adapter_file(path).name}), as transformers reads the folder where PEFT is "
        "installed"
    )
    command = f"megazero convert {shlex.quote(str(path))} --from {first} --to hf --output FOLDER"
    return (
        f"{path} can be read as two things: {first} and {second}{meanings * adapted}. Say which: --from {first} or "
        f"--from {second} (format={first} or format={second} where a program asks). A command without --from needs a "
        f"folder of one thing, as `{command}` writes it"
    )


_MISSHAPEN = (
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
    ValueError,
    AssertionError,
)


@contextmanager
def _readable(path: Path, format: str) -> Iterator[None]:
    """Turn errors of a reader into ConversionError. A file that does not hold what its format has is the file's fault,
    and a reader cannot expect every such case.
    """
    try:
        yield
    except ConversionError:
        raise
    except Unreadable as error:
        raise ConversionError(str(error)) from error
    except _MISSHAPEN as error:
        raise ConversionError(
            f"{path} cannot be read as a checkpoint of the format {format}: something in its files is not what that "
            f"format has there ({type(error).__name__}: {str(error)[:200]})"
        ) from error


def open_source(path: Path, name: str | None = None) -> Source:
    """Open a checkpoint for reading. path: also a name of the Hub. name: its format, where that is known. Adapters come
    merged with the model that they belong to.

    Raises ConversionError.
    """
    return _opened(_folder(path), name, ())


def _opened(path: Path, name: str | None, above: tuple[Path, ...]) -> Source:
    """above: the checkpoints of adapters whose base model this is."""
    itself = _resolved(path)
    if len(above) >= BOUNDS.adapters or itself in above:
        raise ConversionError(f"{path} is the model beneath {len(above)} checkpoints of adapters, or beneath itself")
    table = format_table()
    if name is not None and name not in table:
        raise ConversionError(f"--from {name}: known are {', '.join(table)}")
    format = name or recognise(path)
    with _readable(path, format):
        source = table[format].open(path)
        source.companions = {**companions(source.path, source.path.parent), **source.companions}
        if source.run.lora.lora_rank is None:
            return source
        if format == PEFT.name and HF.recognises(path):  # transformers too prefers the folder's own model
            return adapted_source(source, path, lambda beneath: _opened(beneath, HF.name, above))
        named = source.run.checkpoint.init_from
        return adapted_source(
            source,
            None if named is None else _folder(Path(named), f"{path} holds adapters of the model {named}: "),
            lambda beneath: _opened(beneath, None, (*above, itself)),
        )


def _folder(path: Path, before: str = "") -> Path:
    """The folder of a path or of a name of the Hub. Raises NoCheckpoint, with `before` in front of its text."""
    try:
        return folder_of(path)
    except HubError as error:
        raise NoCheckpoint(f"{before}{error}") from error


def _resolved(path: Path) -> Path:
    """The path without links. Raises ConversionError for links in a circle, and for a string that cannot be a path."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise ConversionError(f"{path} cannot be opened: {error}") from error
