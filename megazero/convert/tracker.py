"""Tracker files: `latest` and the like, which hold the name of one of the checkpoints in their folder."""

from __future__ import annotations

from pathlib import Path

from megazero.convert.source import ConversionError
from megazero.system.names import is_plain_file_name
from megazero.system.reading import BOUNDS, open_file, raised_as


def read_word(tracker: Path) -> str:
    """The word in the file, without space around it. Bytes that are not text become U+FFFD, which no checkpoint's name
    has.
    """
    with raised_as(ConversionError), open_file(tracker) as file:
        return file.read(BOUNDS.word).decode("utf-8", errors="replace").strip()


def named_folder(tracker: Path) -> Path:
    """The folder that the file names, in the file's own folder. It need not exist.

    Raises ConversionError for a word that leads out of the file's folder.
    """
    word = read_word(tracker)
    if not is_plain_file_name(word):
        raise ConversionError(f"{tracker} names {word[:80]!r}, which is no folder beside it")
    return tracker.parent / word
