"""Hints for a --data-path that is not the prefix of a pair."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from megazero.system.names import may_be_on_the_hub

ENDINGS = (".bin", ".idx", ".tokenizer")
SHOWN = 5


def advice_for(given: str) -> str | None:
    """A sentence on what `given` is and what to write instead; None if that is not clear."""
    place = Path(given).expanduser()
    if place.suffix in ENDINGS and place.with_suffix(".idx").is_file():
        return f"{given}: a pair is named without its endings: {given.removesuffix(place.suffix)}"
    if place.is_dir():
        return _folder(given, place)
    if place.is_file():
        return f"{given} is no pair of .bin and .idx, but a file; {_preparing(given)}"
    words = re.split(r"[,;]", given)
    if len(words) > 1 and len(words) % 2 == 0 and all(_is_number(word) for word in words[::2]):
        return f"{given}: weights and prefixes of a blend are words of their own: {' '.join(words)}"
    if "/" in given and may_be_on_the_hub(given):
        return (
            f"{given}: there is no such pair here; if it is a data set of Hugging Face's Hub, "
            f"{_preparing(given, '--dataset')}"
        )
    return None


def _folder(given: str, place: Path) -> str:
    pairs = sorted(str(file.with_suffix("")) for file in place.glob("*.idx") if file.with_suffix(".bin").is_file())
    if not pairs:
        return f"{given} is a folder without pairs of .bin and .idx; {_preparing(given)}"
    shown = ", ".join(pairs[:SHOWN]) + f" and {len(pairs) - SHOWN} more" * (len(pairs) > SHOWN)
    return f"{given} is a folder; name a pair in it without its endings, of which it has {len(pairs)}: {shown}"


def _preparing(given: str, flag: str = "--input") -> str:
    command = f"megazero prepare-data {flag} {shlex.quote(given)} --output-prefix my-data --tokenizer ... --append-eod"
    return f"make a pair from text by {command}, then use --data-path my-data"


def _is_number(word: str) -> bool:
    return re.fullmatch(r"\s*\d*\.?\d+\s*", word) is not None
