"""Files of a model that are no tensors (config.json, a tokenizer), where a format has no place for them: a folder beside it.

So they travel through any chain of formats, and a model that came from Hugging Face goes back there with its tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

FOLDER = "model_files"


def contents_of(files: Mapping[str, Path]) -> dict[str, bytes]:
    """What is in them, by name: the files may be gone when they are to be written."""
    return {name: path.read_bytes() for name, path in files.items()}


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
