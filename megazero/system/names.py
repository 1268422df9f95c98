"""Checks of file names and links, so that an untrusted file cannot name files outside its folder."""

from __future__ import annotations

from pathlib import Path


def is_plain_file_name(name: object) -> bool:
    """Whether this is a plain file name: text without separators, not "." or "..", and less than 256 bytes long."""
    if not isinstance(name, str) or name in ("", ".", "..") or {"/", "\\", "\0"} & set(name):
        return False
    return len(name.encode("utf-8", errors="surrogatepass")) < 256


def stays_inside(path: Path, folder: Path) -> bool:
    """Whether `path`, with links resolved, is in `folder`.

    A snapshot in the cache of Hugging Face's Hub is a folder of links to `blobs`, next to `snapshots`. These count as
    inside.
    """
    home = folder.resolve()
    if home.parent.name == "snapshots" and (home.parent.parent / "blobs").is_dir():
        home = home.parent.parent
    return path.resolve().is_relative_to(home)
