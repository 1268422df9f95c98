"""Where what is compiled and computed once is kept: in the user's cache folder, else in the system's temporary one."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def user_cache_folder() -> Path:
    """The folder megazero of $XDG_CACHE_HOME or ~/.cache. It may be closed to this user.

    A user without a home and without an account, as containers have, gets a path that nobody can write:
    `own_temporary_folder` takes its place as that of any other home that is closed.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "megazero"
    except RuntimeError:  # pathlib's words for a user whom the system does not know
        return Path(os.devnull) / "megazero"


def own_temporary_folder() -> Path | None:
    """The folder megazero-UID in the system's temporary one, made if it is missing; None if it cannot be trusted.

    What is cached there is run and trained on, so nobody else may write it: the folder belongs to this user, is no
    link, and is open to no other user.
    """
    folder = Path(tempfile.gettempdir()) / f"megazero-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        state = folder.lstat()
    except OSError:
        return None
    others = state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return folder if stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not others else None
