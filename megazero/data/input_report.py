"""What became of the input: counts for the report at its end, and a warning on the way."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.data.documents import RawDocument
from megazero.data.indexed import DataError
from megazero.data.input_files import ReaderOptions
from megazero.data.progress import Report, silent
from megazero.system.reading import parse_json
from megazero.system.words import counted


@dataclass
class InputReport:
    """Counts of the input, which are reported at the end.

    skipped     documents that were left out because they are no UTF-8
    first       place of the first of them
    replaced    characters that replace bytes that are no UTF-8
    characters  characters of text
    tokens      tokens of text, without separators
    suspects    files of text that look like JSON lines
    report      gets a line at the first of them
    """

    skipped: int = 0
    first: str = ""
    replaced: int = 0
    characters: int = 0
    tokens: int = 0
    suspects: int = 0
    report: Report = silent

    def look_at(self, raw: RawDocument, reader: ReaderOptions) -> None:
        """Count a file of text, by its first document, if a line of it is a JSON object with the key of the text."""
        if raw.data.lstrip()[:1] == b"{" and _has_key(raw.data, reader.json_key):
            if not self.suspects:
                self.report(
                    f"warning: {raw.path} is read as text and looks like JSON lines; --format jsonl reads their "
                    f"{reader.json_key!r} (--json-key)"
                )
            self.suspects += 1

    def skip(self, where: str) -> None:
        self.skipped += 1
        self.first = self.first or where

    def lines(self, reader: ReaderOptions) -> list[str]:
        told = [
            f"--skip-undecodable: {counted(self.skipped, 'document')} left out"
            + f", the first of them {self.first}" * bool(self.first)
        ]
        suspects = [f"warning: {self.suspects:,} files that are read as text look like JSON lines: --format jsonl"]
        replaced = [
            f"--encoding-errors replace: {counted(self.replaced, 'character stands', 'characters stand')} for "
            "bytes that are no UTF-8"
        ]
        return (
            told * reader.skip_undecodable
            + replaced * (reader.encoding_errors == "replace")
            + suspects * (self.suspects > 1)
        )

    def require_text(self, inputs: str, tokenizer: str = "") -> None:
        """Raise DataError if there was no text, or no token for it. inputs: what was read, in words."""
        if not self.characters:
            skipped = (
                f"; {counted(self.skipped, 'document that is', 'documents that are')} no UTF-8 "
                f"{'was' if self.skipped == 1 else 'were'} left out"
                if self.skipped
                else ""
            )
            raise DataError(f"no text in {inputs}{skipped}")
        if tokenizer and not self.tokens:
            raise DataError(
                f"{tokenizer} gives no token for any of {counted(self.characters, 'character')} of text: it does "
                "not know them"
            )


def _has_key(data: bytes, key: str) -> bool:
    """Whether the first line of the data is a JSON object with this key. A line of more than a MiB is not looked at."""
    line = data.lstrip()[: 1 << 20].split(b"\n", 1)[0]
    try:
        record = parse_json(line.decode("utf-8"), "")
    except ValueError:
        return False
    return isinstance(record, dict) and key in record
