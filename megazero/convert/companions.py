"""The files of a model that are not tensors: config.json, a tokenizer.

A format that has no place for them keeps them in a folder next to the checkpoint. So they survive any chain of
formats, and a model that came from Hugging Face goes back there with its tokenizer.

They are copied, and copies may be published. A link that leads out of the model's folder is therefore not followed: it
may lead to any file that the user can read, and the folder may come from somebody else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from megazero.system.names import stays_inside

FOLDER = "model_files"


def is_copyable(path: Path) -> bool:
    """Whether a file of a model may be copied: it is in the model's folder, and is not a link that leads out of
    it.
    """
    return stays_inside(path, path.parent.parent if path.parent.name == FOLDER else path.parent)


def copyable(files: Mapping[str, Path], told: Callable[[str], None]) -> dict[str, Path]:
    """The files that may be copied. told: called with one sentence for each of the others."""
    for path in files.values():
        if not is_copyable(path):
            told(f"{path} is a link to {path.resolve()}, outside of its folder: it is not copied")
    return {name: path for name, path in files.items() if is_copyable(path)}


def read_contents(files: Mapping[str, Path], told: Callable[[str], None]) -> dict[str, bytes]:
    """The contents of the files that may be copied, by name. They are read now, because the files may be gone later.
    told: as in `copyable`.
    """
    return {name: path.read_bytes() for name, path in copyable(files, told).items()}


def write_companions(contents: Mapping[str, bytes], folder: Path) -> None:
    """Write the files into the companions' folder of `folder`. Without files no folder is made."""
    if contents:
        (folder / FOLDER).mkdir()
        for name, content in contents.items():
            (folder / FOLDER / name).write_bytes(content)


def companions(*folders: Path) -> dict[str, Path]:
    """The companions of the first of the folders that has any, by name."""
    for folder in folders:
        if (folder / FOLDER).is_dir():
            return {path.name: path for path in sorted((folder / FOLDER).iterdir()) if path.is_file()}
    return {}
