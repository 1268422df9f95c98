"""Files of a model that are no tensors (config.json, a tokenizer), where a format has no place for them: a folder
beside it.

So they travel through any chain of formats, and a model that came from Hugging Face goes back there with its tokenizer.

They are copied, and what is copied may be published. A link that leads out of the model's folder is therefore left
behind: it may lead to any file that its user can read, and who made the folder chose which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from megazero.system.names import stays_inside

FOLDER = "model_files"


def is_own(path: Path) -> bool:
    """Whether a file beside a model is the model's: no link that leads out of its folder."""
    return stays_inside(path, path.parent.parent if path.parent.name == FOLDER else path.parent)


def own(files: Mapping[str, Path], told: Callable[[str], None]) -> dict[str, Path]:
    """Those that may be copied. told: gets a sentence for each of the others."""
    for path in files.values():
        if not is_own(path):
            told(f"{path} is a link to {path.resolve()}, outside of its folder: it is not copied")
    return {name: path for name, path in files.items() if is_own(path)}


def contents_of(files: Mapping[str, Path], told: Callable[[str], None]) -> dict[str, bytes]:
    """What is in those that may be copied, by name: the files may be gone when they are to be written. told: as of
    `own`.
    """
    return {name: path.read_bytes() for name, path in own(files, told).items()}


def write_companions(contents: Mapping[str, bytes], folder: Path) -> None:
    """Put them into the folder's own folder for them; none for none."""
    if contents:
        (folder / FOLDER).mkdir()
        for name, content in contents.items():
            (folder / FOLDER / name).write_bytes(content)


def companions(*folders: Path) -> dict[str, Path]:
    """Those of the first folder that has any, by name."""
    for folder in folders:
        if (folder / FOLDER).is_dir():
            return {path.name: path for path in sorted((folder / FOLDER).iterdir()) if path.is_file()}
    return {}
