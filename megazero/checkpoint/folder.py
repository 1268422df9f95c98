"""The folder of checkpoints: list, publish, prune and sweep. These are file operations of one rank.

A folder named iter_NNNNNNN was complete when it got that name. The remains of a crash have names that start with a dot,
with one exception: when iteration N is saved again, the old folder is renamed to iter_N.replaced before the new one
gets its name. Between the two renames it counts as iter_N. (An atomic exchange of two folders is a Linux call that
network file systems refuse.)
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from megazero.checkpoint.fence import Fence
from megazero.checkpoint.format import MANIFEST, Damaged
from megazero.system.durable import replace_file, sync_folder
from megazero.system.reading import BOUNDS, Unreadable, read_bytes

LATEST = "latest"
TOKEN = "run_token"
_NAME = re.compile(r"iter_(\d{7,})(\.replaced)?")
_LEFTOVER = re.compile(r"\.(tmp|trash|latest|run_token)-.*")


def folder_name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def temporary_name(iteration: int, token: str) -> str:
    """The folder in which a run builds a checkpoint. Other runs have other tokens, and readers ignore the name."""
    return f".tmp-{folder_name(iteration)}-{token}"


def list_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a folder as (iteration, path), ascending. Does not check whether they are intact."""
    found: dict[int, Path] = {}
    for path in sorted(root.iterdir(), reverse=True) if root.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            found[int(match[1])] = path  # iter_N sorts before iter_N.replaced, so it comes later here and wins
    return sorted(found.items())


def latest_name(root: Path) -> str | None:
    """The content of `latest`, whether it is a checkpoint's name or not; None if there is no such file.

    Raises Damaged if it cannot be read, and NotADirectoryError if `root` is a file.
    """
    try:
        return read_bytes(root / LATEST, BOUNDS.word).decode(errors="replace").strip()
    except Unreadable as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise error.__cause__ if isinstance(error.__cause__, NotADirectoryError) else Damaged(str(error)) from error


def newest_checkpoint(load: Path) -> Path | None:
    """The checkpoint to load from `--load`.

    This is the folder itself if it is a checkpoint; otherwise the checkpoint that `latest` names; without `latest`, the
    one of the highest iteration. None if there never was a complete one. A path named like a checkpoint is taken as
    one, whether it exists or not. Raises Damaged if `latest` names a checkpoint that does not exist.
    """
    if _NAME.fullmatch(load.name) or (load / MANIFEST).exists():
        aside = load.with_name(f"{load.name}.replaced")
        return aside if aside.is_dir() and not load.exists() else load
    there = list_checkpoints(load)
    name = latest_name(load)
    if name is None:
        return there[-1][1] if there else None
    for _, path in there:
        if path.name.removesuffix(".replaced") == name:
            return path
    others = (
        f"The newest that is: --load {there[-1][1]}"
        if there
        else f"No other is; remove {load / LATEST} to start from scratch."
    )
    raise Damaged(f"{load / LATEST} names the checkpoint {name[:80]!r}, which is not there. {others}")


def is_checkpoint(path: Path) -> bool:
    """Whether a checkpoint of ours is in exactly this folder, which may have been renamed."""
    named = _NAME.fullmatch(path.name) is not None
    return os.path.isfile(path / MANIFEST) and (named or any(path.glob("fragments-*-of-*.safetensors")))


def enclosing_checkpoint(path: Path) -> Path | None:
    """The checkpoint that a place is, would be by its name, or lies in; None if it is in none."""
    if _NAME.fullmatch(path.name):
        return path
    return next((each for each in (path, *path.parents) if is_checkpoint(each)), None)


def enclosing_run(path: Path) -> Path | None:
    """The folder of checkpoints, or the checkpoint, that a place is or lies in; None if it is in none."""
    return next((each for each in (path, *path.parents) if is_checkpoint(each) or _is_of_a_run(each)), None)


def _is_of_a_run(path: Path) -> bool:
    return os.path.isfile(path / TOKEN) or (os.path.isfile(path / LATEST) and bool(list_checkpoints(path)))


def earlier_checkpoints(checkpoint: Path) -> list[Path]:
    """The checkpoints of lower iterations in the same folder, newest first."""
    match = _NAME.fullmatch(checkpoint.name)
    limit = int(match[1]) if match else 0
    return [path for iteration, path in reversed(list_checkpoints(checkpoint.parent)) if iteration < limit]


def publish(root: Path, temporary: Path, iteration: int, fence: Fence) -> Path:
    """Rename a complete temporary folder to its final name, then point `latest` to it; return the final path.

    The fence is checked before each of the two steps. Raises FenceLost and OSError.
    """
    assert fence.token is not None
    final = root / folder_name(iteration)
    aside = final.with_name(f"{final.name}.replaced")
    fence.check()
    if final.exists():
        discard(aside, fence.token)
        final.rename(aside)
    temporary.rename(final)
    sync_folder(root)
    fence.check()
    replace_file(root / LATEST, f"{final.name}\n".encode(), fence.token)
    discard(aside, fence.token)
    return final


def prune(root: Path, iteration: int, keep: int, token: str, retain_interval: int | None = None) -> None:
    """Delete all but the newest `keep` checkpoints up to this iteration; keep = 0 deletes nothing.

    Kept in any case: multiples of `retain_interval`; later iterations, which a run leaves behind when it restarts from
    an earlier checkpoint; and folders without a manifest, which do not count as checkpoints.
    """
    complete = [(i, path) for i, path in list_checkpoints(root) if i <= iteration and (path / MANIFEST).exists()]
    for i, path in complete[:-keep] if keep else ():
        if retain_interval is None or i % retain_interval:
            discard(path, token)


def discard(path: Path, token: str) -> None:
    """Delete a folder that may be a checkpoint. It is renamed first, so that no checkpoint is ever half deleted.

    Two runs may delete the same folder at once: the run that built it, and a newer one that sweeps.
    """
    if path.exists():
        trash = path.with_name(f".trash-{path.name.removeprefix('.')}-{token}")
        shutil.rmtree(trash, ignore_errors=True)
        with suppress(FileNotFoundError):
            path.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)


def remove_leftovers(root: Path, fence: Fence) -> None:
    """Remove what crashed runs left. Raises FenceLost unless this run owns the folder."""
    fence.check()
    assert fence.token is not None
    for path in sorted(root.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match and match[2]:
            final = path.with_name(path.name.removesuffix(".replaced"))
            discard(path, fence.token) if final.exists() else path.rename(final)
        elif _LEFTOVER.fullmatch(path.name):
            # `discard` renames first, so that an old rank that still writes by path fails and cannot fill it again.
            discard(path, fence.token) if path.is_dir() else path.unlink(missing_ok=True)
