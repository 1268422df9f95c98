"""Files of one word beside checkpoints, such as `latest`: the name of one of them."""

from __future__ import annotations

from pathlib import Path

from megazero.convert.source import ConversionError
from megazero.system.names import is_bare
from megazero.system.reading import BOUNDS, open_file, raised_as


def word_in(tracker: Path) -> str:
    """What the file says, without the space around it; bytes that are no text are U+FFFD, which no checkpoint's name
    has.
    """
    with raised_as(ConversionError), open_file(tracker) as file:
        return file.read(BOUNDS.word).decode("utf-8", errors="replace").strip()


def named_folder(tracker: Path) -> Path:
    """The folder beside the file that it names, there or not.

    Raises ConversionError for a word that leads out of the file's folder.
    """
    word = word_in(tracker)
    if not is_bare(word):
        raise ConversionError(f"{tracker} names {word[:80]!r}, which is no folder beside it")
    return tracker.parent / word
