"""Checks of names of files and links, so that an untrusted file names nothing outside its folder; names of the Hub."""

from __future__ import annotations

import re
from pathlib import Path

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def is_plain_file_name(name: object) -> bool:
    """Whether this is a plain file name: text without separators, not "." or "..", and less than 256 bytes long."""
    if not isinstance(name, str) or name in ("", ".", "..") or {"/", "\\", "\0"} & set(name):
        return False
    return len(name.encode("utf-8", errors="surrogatepass")) < 256


def stays_inside(path: Path, folder: Path) -> bool:
    """Whether `path`, with links resolved, is in `folder`.

    A snapshot in the cache of Hugging Face's Hub is a folder of links to `blobs`, next to `snapshots`. The files in
    `blobs` count as inside.
    """
    home, end = folder.resolve(), path.resolve()
    blobs = home.parent.parent / "blobs"
    return end.is_relative_to(home) or (home.parent.name == "snapshots" and end.parent == blobs)


def may_be_on_the_hub(name: str) -> bool:
    """Whether a path that does not exist may be meant as a name on Hugging Face's Hub: one plain word, or two of which
    the first is no folder here.
    """
    return _HUB_NAME.fullmatch(name) is not None and not ("/" in name and Path(name).parent.exists())
