"""A fence: a file with the token of the run that may write into its folder.

Killing a launcher with SIGKILL may leave its ranks running. When the job is started again, the new run puts its token
into the file, and a rank of the old run that finds another token there stops writing. A new run may claim the folder
between a check and the write that follows. That write is harmless: a checkpoint is built in a folder whose name has the
token in it, and becomes a checkpoint only by a rename.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import torch

from megazero.mpu.collectives import broadcast
from megazero.mpu.grid import Group
from megazero.system.durable import replace_file


class FenceLost(RuntimeError):
    """Another run has claimed the folder that this run writes to, or the folder is gone."""


def new_token(world: Group, device: torch.device | str = "cpu") -> str:
    """A token for this run, the same on all ranks: 32 hex digits. A collective: rank 0 broadcasts 16 random bytes."""
    token = torch.tensor(list(uuid.uuid4().bytes), dtype=torch.uint8).to(device)
    broadcast(token, world).wait()
    return bytes(token.tolist()).hex()


class Fence:
    """The token file at `path`. One rank claims it, the others join, and every rank checks it before writing."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.token: str | None = None

    def claim(self, token: str) -> Fence:
        """Write the token into the file, after which runs with another token fail `check`. One rank calls this."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, f"{token}\n".encode(), token)
        return self.join(token)

    def join(self, token: str) -> Fence:
        """Use this token, which another rank of the run writes into the file."""
        self.token = token
        return self

    def owner(self) -> str:
        """The token in the file, or "" if there is no file."""
        try:
            return self.path.read_text(errors="replace").strip()
        except FileNotFoundError:
            return ""

    def holds(self) -> bool:
        """Whether the file still holds this run's token."""
        assert self.token is not None, "claim or join before checking"
        return self.owner() == self.token

    def check(self) -> None:
        """Raise FenceLost unless the file still holds this run's token."""
        if self.holds():
            return
        found = self.owner()
        if found:
            raise FenceLost(
                f"{self.path} belongs to run {found}, not to this run ({self.token}). A newer job writes here now, so "
                "this one stops and writes nothing more; stop the newer one before starting this again."
            )
        gone = self.path if self.path.parent.is_dir() else self.path.parent
        raise FenceLost(
            f"{gone} is gone: it was deleted, moved or unmounted while the run went on. The run stops and writes "
            "nothing more; its state is lost, unless a checkpoint was kept elsewhere."
        )

    def guarding(self, action: Callable[[], None]) -> Callable[[], None]:
        """Wrap an action: `check` runs before it, and again if it fails.

        If a newer run has deleted the files that the action works on, the wrapper raises FenceLost instead.
        """

        def guarded() -> None:
            self.check()
            try:
                action()
            except Exception:
                self.check()
                raise

        return guarded
