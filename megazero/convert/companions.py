"""Files of a model that are no tensors (config.json, a tokenizer), where a format has no place for them: a folder beside it.

So they travel through any chain of formats, and a model that came from Hugging Face goes back there with its tokenizer.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

FOLDER = "model_files"


def write_companions(files: Mapping[str, Path], folder: Path) -> None:
    """Copy them into the folder's own folder for them; none for none."""
    if files:
        (folder / FOLDER).mkdir()
        for name, path in files.items():
            shutil.copyfile(path, folder / FOLDER / name)


def companions(*folders: Path) -> dict[str, Path]:
    """Those of the first folder that has any, by name."""
    for folder in folders:
        if (folder / FOLDER).is_dir():
            return {path.name: path for path in sorted((folder / FOLDER).iterdir()) if path.is_file()}
    return {}
