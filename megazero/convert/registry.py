"""The table of formats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from megazero.convert import native
from megazero.convert.companions import companions
from megazero.convert.formats import Format
from megazero.convert.hf.registered import FORMAT as HF
from megazero.convert.lora.merged import adapted_source
from megazero.convert.lora.registered import FORMAT as PEFT
from megazero.convert.megatron.registered import FORMAT as MEGATRON
from megazero.convert.megatron_deepspeed.registered import FORMAT as MEGATRON_DEEPSPEED
from megazero.convert.names import missing_path_message
from megazero.convert.source import ConversionError, NoCheckpoint, Source
from megazero.convert.universal.registered import FORMATS as UNIVERSAL
from megazero.system.reading import BOUNDS, Unreadable


def format_table() -> Mapping[str, Format]:
    """The formats by name, in the order in which they are tried on a folder."""
    found: list[Format] = [MEGATRON, MEGATRON_DEEPSPEED, native.FORMAT, PEFT, HF, *UNIVERSAL]
    return {known.name: known for known in found}


def recognise(path: Path) -> str:
    """The name of a checkpoint's format. Raises NoCheckpoint that says what was looked for, ConversionError."""
    for name, known in format_table().items():
        with _readable(path, name):
            if known.recognises(path):
                return name
    if not path.exists():
        raise NoCheckpoint(missing_path_message(path))
    described = (path / "config.json").is_file()
    lacks = "; it has config.json, and no weights (*.safetensors, pytorch_model*.bin) beside it" * described
    raise NoCheckpoint(f"{path} holds no checkpoint of a known format ({', '.join(format_table())}){lacks}")


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
    """Open a checkpoint for reading. name: its format, where that is known. Adapters come merged with the model that
    they belong to.

    Raises ConversionError.
    """
    return _opened(path, name, ())


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
        return adapted_source(source, lambda beneath: _opened(beneath, None, (*above, itself)))


def _resolved(path: Path) -> Path:
    """The path without links. Raises ConversionError for links in a circle, and for a string that cannot be a path."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise ConversionError(f"{path} cannot be opened: {error}") from error
