"""The cache of Hugging Face's Hub as its library lays it out, by hand: blobs by their hash, and snapshots of links."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from megazero.system import hub

COMMIT, OTHER = "3a" * 20, "7c" * 20
"""Two commits."""


def add_to_cache(cache: Path, name: str, model: Path, commit: str = COMMIT, ref: str | None = "main") -> Path:
    """Put the files of a folder into the cache as a commit of a repository; return the folder of the snapshot.

    ref: the branch that stands for this commit from now on; None: no branch does.
    """
    home = cache / f"models--{name.replace('/', '--')}"
    snapshot = home / "snapshots" / commit
    for folder in (home / "blobs", home / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        content = file.read_bytes()
        blob = hashlib.sha256(content).hexdigest()
        (home / "blobs" / blob).write_bytes(content)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob))
    if ref is not None:
        (home / "refs" / ref).write_text(commit)
    return snapshot


def use_cache(patch: pytest.MonkeyPatch, cache: Path) -> None:
    """Have this process look for names of the Hub in this cache, without a network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub._asked.cache_clear()  # an earlier test may have had the same name in another cache
