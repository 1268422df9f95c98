"""A cache of this user's own in the system's temporary folder, for users whose home cannot be written."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


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
