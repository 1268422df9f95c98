"""Names that a file may give to others beside it, and links that stay in their folder."""

from __future__ import annotations

from pathlib import Path


def is_bare(name: object) -> bool:
    """Whether this is the name of something in a folder: text without a way out of it, and of a length that a file
    system takes.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or {"/", "\\", "\0"} & set(name):
        return False
    return len(name.encode("utf-8", errors="surrogatepass")) < 256


def stays_inside(path: Path, folder: Path) -> bool:
    """Whether what `path` leads to lies in `folder`.

    A snapshot in the cache of Hugging Face's Hub is a folder of links into the `blobs` beside `snapshots`: these stay
    inside.
    """
    home = folder.resolve()
    if home.parent.name == "snapshots" and (home.parent.parent / "blobs").is_dir():
        home = home.parent.parent
    return path.resolve().is_relative_to(home)
