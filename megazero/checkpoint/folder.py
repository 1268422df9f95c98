"""The folder of checkpoints: what is in it, how one is added, which go. File operations of one rank, no values.

Whatever is named iter_NNNNNNN was complete when it got that name; a crash leaves only names that start with a dot, and
one exception: when iteration N is saved again, the old one steps aside as iter_N.replaced for the moment between two
renames, and counts as iter_N until the new one is there. (Exchanging two folders atomically is a Linux call that
network file systems refuse.)
"""

from __future__ import annotations

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
    """Where a run builds a checkpoint: no other run builds there, and no reader looks."""
    return f".tmp-{folder_name(iteration)}-{token}"


def listing(root: Path) -> list[tuple[int, Path]]:
    """Checkpoints of a folder by iteration, ascending; whether they are undamaged is not looked at."""
    found: dict[int, Path] = {}
    for path in sorted(root.iterdir(), reverse=True) if root.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            found[int(match[1])] = path  # iter_N sorts before iter_N.replaced, so it comes later here and wins
    return sorted(found.items())


def named(root: Path) -> str | None:
    """What `latest` says, be it a checkpoint's name or not; None where there is no such file.

    Raises Damaged where it cannot be read.
    """
    try:
        return read_bytes(root / LATEST, BOUNDS.word).decode(errors="replace").strip()
    except Unreadable as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise error.__cause__ if isinstance(error.__cause__, NotADirectoryError) else Damaged(str(error)) from error


def newest(load: Path) -> Path | None:
    """The checkpoint to load from `--load`: the folder itself when it is one, else the one that `latest` names, else,
    without `latest`, the one of the highest iteration. None when there never was a complete one.

    A folder named like a checkpoint is one, be it there or not. Raises Damaged when `latest` names none that is there.
    """
    if _NAME.fullmatch(load.name) or (load / MANIFEST).exists():
        aside = load.with_name(f"{load.name}.replaced")
        return aside if aside.is_dir() and not load.exists() else load
    there = listing(load)
    name = named(load)
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


def before(checkpoint: Path) -> list[Path]:
    """The checkpoints beside this one of lower iterations, newest first."""
    match = _NAME.fullmatch(checkpoint.name)
    limit = int(match[1]) if match else 0
    return [path for iteration, path in reversed(listing(checkpoint.parent)) if iteration < limit]


def publish(root: Path, temporary: Path, iteration: int, fence: Fence) -> Path:
    """Give a complete temporary folder its name, then let `latest` name it. The fence is checked before each."""
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
    """Delete all but the newest `keep` checkpoints up to this iteration; 0 keeps all.

    Iterations that are multiples of `retain_interval` stay. So do later ones, from before the run was taken back to an
    earlier checkpoint, which are left to the user, and damaged ones without a manifest, which do not count either.
    """
    complete = [(i, path) for i, path in listing(root) if i <= iteration and (path / MANIFEST).exists()]
    for i, path in complete[:-keep] if keep else ():
        if retain_interval is None or i % retain_interval:
            discard(path, token)


def discard(path: Path, token: str) -> None:
    """Delete a folder that may be a checkpoint: it loses its name first, so that none is ever half there.

    Where two runs delete the same (one what it had begun, one sweeping), either may come first.
    """
    if path.exists():
        trash = path.with_name(f".trash-{path.name.removeprefix('.')}-{token}")
        shutil.rmtree(trash, ignore_errors=True)
        with suppress(FileNotFoundError):
            path.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)


def sweep(root: Path, fence: Fence) -> None:
    """Remove what crashed runs left. Only the run that owns the folder may: a run that still writes
    there has lost it.
    """
    fence.check()
    assert fence.token is not None
    for path in sorted(root.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match and match[2]:
            final = path.with_name(path.name.removesuffix(".replaced"))
            discard(path, fence.token) if final.exists() else path.rename(final)
        elif _LEFTOVER.fullmatch(path.name):
            # Renamed first, so that a rank still writing there by path fails instead of filling it again.
            discard(path, fence.token) if path.is_dir() else path.unlink(missing_ok=True)
