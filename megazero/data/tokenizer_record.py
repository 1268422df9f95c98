"""PREFIX.tokenizer next to PREFIX.bin: a record of the tokenizer that made the ids.

A tokenizer is identified by a hash of its tokens with their ids and of the ids of a sample text, not by its files. So
its files may be moved, saved again by another program, or read by another library. Pairs of other programs have no such
record and do not need one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megazero.data.file_array import DataError
from megazero.data.tokenizer import ListedTokenizer
from megazero.system.reading import BOUNDS, read_object

FORMAT = 1
SPOKEN = 1 << 15
"""Number of tokens, evenly spaced over all ids, whose spelling is part of the sample text."""
BLANKS = str.maketrans("Ġ▁", "  ")
"""Characters with which tokenizers spell a blank in a token."""
TEXT = (
    "The 12 quick brown foxes don't jump; naïve café, Straße.\n\n\tдля 日本語の文 العربية हिन्दी 👩‍👧 x = (a[0] + 1)  # "
    "ok\r\n"
)


@dataclass(frozen=True)
class TokenizerRecord:
    """The identity of a tokenizer.

    tokenizer   its kind, as in --tokenizer
    vocab_size  one more than its largest id
    hash        of its tokens and of the ids of a sample text (`tokenizer_record`)
    format      version of this record
    """

    tokenizer: str
    vocab_size: int
    hash: str
    format: int = FORMAT

    def __str__(self) -> str:
        return f"{self.tokenizer} of {self.vocab_size:,} tokens, hash {self.hash[:12]}"

    def as_flags(self, prefix: str | Path) -> str:
        """A sentence with the flags that name this tokenizer of a pair."""
        files = "" if self.tokenizer == "byte" else " --tokenizer-path and the folder or file of it"
        return f"{prefix} was made with the tokenizer {self}: --tokenizer {self.tokenizer}{files}"

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
    """The record of a pair; None if it has none. Raises DataError for a damaged one."""
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
            f"{path} is no valid record of a tokenizer; without the file, the ids of {prefix}.bin are used as they are"
        )
    return found


def recorded_flags(prefixes: Sequence[str]) -> str | None:
    """The sentence with the flags of the first pair that records its tokenizer. A damaged record says nothing here."""
    for prefix in prefixes:
        with suppress(DataError):
            if (record := read_tokenizer_record(prefix)) is not None:
                return record.as_flags(prefix)
    return None


def require_tokenizer_record(prefix: str | Path, now: TokenizerRecord) -> None:
    """Raise DataError for a pair of another tokenizer. A pair without a record passes."""
    then = read_tokenizer_record(prefix)
    if then is not None and then.hash != now.hash:
        raise DataError(
            f"{prefix}.bin was made with another tokenizer ({then}) than the run has ({now}), so its ids would be "
            "other text: give that tokenizer, "
            f"or make the data again with `megazero prepare-data`; without {path_of(prefix)} the ids are used as they "
            "are"
        )


def require_tokenizer(prefixes: Iterable[str], tokenizer: ListedTokenizer, kind: str | None) -> None:
    """Raise DataError if one of these pairs was made with another tokenizer. The tokenizer is looked at only where a
    pair has a record. kind: as in --tokenizer, if it is known.
    """
    recorded = [prefix for prefix in prefixes if path_of(prefix).exists()]
    now = tokenizer_record(tokenizer, kind or "tokenizer") if recorded else None
    for prefix in recorded:
        assert now is not None
        require_tokenizer_record(prefix, now)


def common(prefixes: Sequence[str]) -> TokenizerRecord | None:
    """The common record of pairs to be joined; None if one of them has none. Raises DataError if two differ."""
    found = {prefix: read_tokenizer_record(prefix) for prefix in prefixes}
    known = [(prefix, made) for prefix, made in found.items() if made is not None]
    for prefix, made in known[1:]:
        if made.hash != known[0][1].hash:
            raise DataError(
                f"{known[0][0]} and {prefix} were made with different tokenizers ({known[0][1]}; {made}), and cannot "
                "be one pair"
            )
    return known[0][1] if known and len(known) == len(found) else None
