"""PREFIX.tokenizer beside PREFIX.bin: which tokenizer its ids are of.

A tokenizer is known by what it does, not by its files: its tokens with their ids, and the ids of a text. So it may have
moved, have been saved again by another program, or be read by another library. Pairs of other programs have no such
file, and none is asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megazero.data.file_array import DataError
from megazero.data.tokenizer import ListedTokenizer
from megazero.system.reading import BOUNDS, read_object

FORMAT = 1
SPOKEN = 1 << 15
"""Tokens, evenly spread over all, whose spelling is part of the text."""
BLANKS = str.maketrans("Ġ▁", "  ")
"""How tokenizers spell a blank in a token."""
TEXT = (
    "The 12 quick brown foxes don't jump; naïve café, Straße.\n\n\tдля 日本語の文 العربية हिन्दी 👩‍👧 x = (a[0] + 1)  # "
    "ok\r\n"
)


@dataclass(frozen=True)
class TokenizerRecord:
    """tokenizer: its kind, as --tokenizer has it. hash: of what it does (`tokenizer_record`)."""

    tokenizer: str
    vocab_size: int
    hash: str
    format: int = FORMAT

    def __str__(self) -> str:
        return f"{self.tokenizer} of {self.vocab_size:,} tokens, hash {self.hash[:12]}"

    def written(self) -> bytes:
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


def tokenizer_record(tokenizer: ListedTokenizer, kind: str) -> TokenizerRecord:
    pieces = sorted(tokenizer.pieces().items(), key=lambda piece: (piece[1], piece[0]))
    spoken = "\n".join(piece.translate(BLANKS) for piece, _ in pieces[:: max(1, len(pieces) // SPOKEN)])
    does = json.dumps([pieces, tokenizer.encode(TEXT + spoken)])
    return TokenizerRecord(kind, tokenizer.vocab_size, hashlib.sha256(does.encode()).hexdigest())


def path_of(prefix: str | Path) -> Path:
    return Path(f"{prefix}.tokenizer")


def read_tokenizer_record(prefix: str | Path) -> TokenizerRecord | None:
    """What the file beside a pair says; None without one. Raises DataError where it is damaged."""
    path = path_of(prefix)
    try:
        if not path.exists():
            return None
        found = TokenizerRecord(**read_object(path, BOUNDS.description))
        sound = isinstance(found.hash, str) and isinstance(found.tokenizer, str) and isinstance(found.vocab_size, int)
    except (ValueError, TypeError):
        sound = False
    if not sound or found.format != FORMAT:
        raise DataError(
            f"{path} is not what a tokenizer is known by; without the file, the ids of {prefix}.bin are taken as they "
            "are"
        )
    return found


def require_tokenizer_record(prefix: str | Path, now: TokenizerRecord) -> None:
    """Raises DataError for a pair of another tokenizer; one that says nothing passes."""
    then = read_tokenizer_record(prefix)
    if then is not None and then.hash != now.hash:
        raise DataError(
            f"{prefix}.bin was made with another tokenizer ({then}) than the run has ({now}), so its ids would be "
            "other text: give that tokenizer, "
            f"or make the data anew with `megazero prepare-data`; without {path_of(prefix)} the ids are taken as they "
            "are"
        )


def common(prefixes: Sequence[str]) -> TokenizerRecord | None:
    """What pairs that are to be joined were made with; None where one does not say.

    Raises DataError where two differ.
    """
    found = {prefix: read_tokenizer_record(prefix) for prefix in prefixes}
    known = [(prefix, made) for prefix, made in found.items() if made is not None]
    for prefix, made in known[1:]:
        if made.hash != known[0][1].hash:
            raise DataError(
                f"{known[0][0]} and {prefix} were made with different tokenizers ({known[0][1]}; {made}), and cannot "
                "be one pair"
            )
    return known[0][1] if known and len(known) == len(found) else None
