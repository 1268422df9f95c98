"""Which files are read as text: of a folder all that are visible, through links too. What is left out is said."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megazero.data.indexed import DataError
from megazero.data.progress import Report, silent
from megazero.system.words import counted

JSON_ENDINGS = (".jsonl", ".json", ".ndjson", ".jl", ".jsonlines")
"""Endings of JSON lines, in any case of letters."""
PACKED = (".gz", ".zst")
"""Endings of packed files, in any case of letters."""
NAMED = 3
"""Number of paths that a line names of each kind that is not read."""
HIDDEN, BROKEN, NO_FILE, CIRCLE, UNREADABLE = (
    "hidden",
    "links that lead nowhere",
    "pipes, sockets or devices",
    "links to a folder above",
    "folders that cannot be opened",
)


@dataclass(frozen=True)
class ReaderOptions:
    """How documents are read from files."""

    json_key: str = "text"
    "Key of the text in a jsonl record."
    format: str = "auto"
    "auto: by the file's ending; jsonl and text override it."
    document: str = "file"
    "A document of plain text: the whole file, or each line."
    encoding_errors: str = "strict"
    "strict or replace, for bytes that are no UTF-8."
    include: tuple[str, ...] = ()
    "Patterns of the files that are read in folders; none: all."
    skip_undecodable: bool = False
    "Leave out documents that are no UTF-8."


def packing(path: Path) -> str:
    """.gz, .zst, or nothing for a file that is not packed."""
    ending = path.suffix.lower()
    return ending if ending in PACKED else ""


def is_json(path: Path) -> bool:
    """Whether the file is JSON lines by its ending, before .gz or .zst."""
    return Path(path.stem if packing(path) else path.name).suffix.lower() in JSON_ENDINGS


@dataclass
class _Folder:
    """What is in a folder, by its path within: the files that are read, and what is not, by the reason."""

    root: Path
    include: Sequence[str]
    files: list[Path] = field(default_factory=list)
    left: dict[str, list[Path]] = field(default_factory=dict)

    def walk(self, inside: Path = Path(), above: tuple[str, ...] = ()) -> None:
        """Take in what a folder holds. above: the folders that led there, without links. Raises DataError."""
        above = (*above, os.path.realpath(self.root / inside))
        try:
            names = sorted(os.listdir(self.root / inside))
        except OSError as error:
            if len(above) == 1:
                raise DataError(f"{self.root} cannot be opened: {error.strerror}") from error
            self._leave(UNREADABLE, inside)
            return
        for path in (inside / name for name in names):
            place = self.root / path
            if path.name.startswith("."):
                self._leave(HIDDEN, path)
            elif place.is_file():
                self._add(path)
            elif not place.is_dir():
                self._leave(NO_FILE if place.exists() else BROKEN, path)
            elif os.path.realpath(place) in above:
                self._leave(CIRCLE, path)
            else:
                self.walk(path, above)

    def _add(self, path: Path) -> None:
        if not self.include or any(path.match(pattern) for pattern in self.include):
            self.files.append(path)
        else:
            self._leave(f"that match no --include {' '.join(self.include)}", path)

    def _leave(self, why: str, path: Path) -> None:
        self.left.setdefault(why, []).append(path)

    def line(self) -> str:
        """How many files are read, and what is not."""
        kinds = []
        for why, paths in self.left.items():
            names = [str(path)[:80] for path in paths[:NAMED]] + ["..."] * (len(paths) > NAMED)
            kinds.append(f"{len(paths):,} {why} ({', '.join(names)})")
        told = f"{self.root}: {counted(len(self.files), 'file is', 'files are')} read"
        return f"{told}; not read: {'; '.join(kinds)}" if kinds else told


def find_files(inputs: Sequence[str | Path], include: Sequence[str] = (), report: Report = silent) -> list[Path]:
    """The files in `inputs`, and all files in its folders (recursively, without hidden ones), each folder sorted.

    Links to files and folders are followed. include: patterns (`*.txt`). A file in a folder must match one of them by
    its name or its path within the folder. report: gets a line for each folder: how many files are read, what is not
    and why. Raises DataError for a missing input or if there is no file.
    """
    found: list[Path] = []
    told: list[str] = []
    for name in inputs:
        if not str(name):  # as a variable of a shell gives it that is not set; a Path would be the working folder
            raise DataError("an input has no name: '' is no file or folder")
        place = Path(name).expanduser()
        if os.path.isfile(place):  # not Path's own, which raises for a name that is too long
            found.append(place)
        elif os.path.isdir(place):
            folder = _Folder(place, include)
            folder.walk()
            found += [place / path for path in sorted(folder.files)]
            told.append(folder.line())
        else:
            raise DataError(f"no file or folder {place}" + _what_it_is(place))
    if not found:
        raise DataError(
            f"no files in {', '.join(map(str, inputs))}"
            + (f" that match --include {' '.join(include)}" if include else "")
            + "".join(f"; {line}" for line in told if "not read" in line)
        )
    for line in told:
        report(line)
    return found


def _what_it_is(place: Path) -> str:
    if place.exists():
        return " (it is a pipe or a device)"
    return f" (it is a link to {os.readlink(place)}, which is not there)" if place.is_symlink() else ""
