"""A run token in a file: who may write beside it.

Killing a launcher with -9 leaves its ranks running. When the job is started again, the new run puts its token into the
file; whoever still holds another token must not write any more. Between a check and the write that follows there is a
moment in which the file can change hands; what is written then is harmless, because a checkpoint is built under a name
that carries the token and only becomes one by a rename.
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
    """The folder that this run writes to belongs to another run now, or is gone."""


def new_token(world: Group, device: torch.device | str = "cpu") -> str:
    """A token for this run, the same on all ranks: 16 random bytes of rank 0, broadcast over the world."""
    token = torch.tensor(list(uuid.uuid4().bytes), dtype=torch.uint8).to(device)
    broadcast(token, world).wait()
    return bytes(token.tolist()).hex()


class Fence:
    """The token file at `path`. One rank claims it; the others join; all check before they write."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.token: str | None = None

    def claim(self, token: str) -> Fence:
        """Take the folder over: from now on every run with another token fails its check. One rank does this."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, f"{token}\n".encode(), token)
        return self.join(token)

    def join(self, token: str) -> Fence:
        """Be a rank of the run with this token, which another rank claims for it."""
        self.token = token
        return self

    def owner(self) -> str:
        """The token in the file, "" when there is none."""
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
        """The action, checked for before; if it fails because a newer run swept what it works on, FenceLost says so."""

        def guarded() -> None:
            self.check()
            try:
                action()
            except Exception:
                self.check()
                raise

        return guarded
