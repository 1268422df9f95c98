"""A save in phases. Each phase ends on all ranks before the next begins.

The phases run on the main thread, or on a thread in the background (`background.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint import folder as folders
from megazero.checkpoint.agreement import attempt_on_all_ranks, broadcast_text
from megazero.checkpoint.fence import Fence
from megazero.checkpoint.filesystems import Filesystems
from megazero.checkpoint.format import CheckpointError, FragmentSpec, file_name
from megazero.checkpoint.writer import Header, headers_of, make_manifest, put_manifest, write_fragments
from megazero.mpu.grid import Group
from megazero.zero.layout import Fragment, StoredFragment


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that is on disk. bytes: size of all ranks' files together (0 on ranks other than 0). seconds: wall
    time of the save.
    """

    path: Path
    bytes: int
    seconds: float


@dataclass(frozen=True)
class SavePhases:
    """The settings that all saves of a run share.

    root             the save folder
    fence            this run's claim of the folder
    filesystems      which ranks share the folder
    writers          returns for each rank the fragments that it writes, by layout arithmetic; called on rank 0 only
    run, layout      stored in the manifest
    keep_last        number of checkpoints to keep; 0 keeps all
    retain_interval  iterations that are multiples of this are kept in any case
    write_extra      adds further files; rank 0 calls it with the temporary folder, which holds the whole checkpoint.
                     It is not called where ranks write into several folders
    """

    root: Path
    fence: Fence
    filesystems: Filesystems
    writers: Callable[[], Sequence[Sequence[FragmentSpec]]]
    run: dict[str, Any]
    layout: dict[str, int]
    keep_last: int
    retain_interval: int | None
    write_extra: Callable[[Path], None] | None = None

    def write(
        self,
        fragments: Sequence[StoredFragment],
        portions: Iterable[Sequence[Fragment]],
        iteration: int,
        progress: dict[str, Any],
        world: Group,
        device: torch.device,
    ) -> SavedCheckpoint:
        """Write the fragments of all ranks as iter_NNNNNNN, point `latest` to it, delete old checkpoints.

        fragments: what this rank writes; portions: its values (`writer.write_fragments`). world: the group of all
        ranks, over which the phases agree. device: the device of the messages' tensors. A collective of the world; no
        tensor values are communicated. Returns when the checkpoint is on disk on every file system. A failure of
        one rank is raised on all (`raise_on_all_ranks`): FenceLost if another run has claimed the folder, OSError if a
        file operation fails, CheckpointError if the files do not match the layout. After an error either no checkpoint
        has changed, or the new one is complete.
        """
        began = time.perf_counter()
        token = self.fence.token
        assert token is not None
        temporary = self.root / folders.temporary_name(iteration, token)
        try:
            size = self._write(temporary, fragments, portions, iteration, progress, world, device)
        except Exception:
            with suppress(OSError):  # makes room for the next save, in case the disk was full
                if self.filesystems.leads:
                    folders.discard(temporary, token)  # ours even if the fence is lost: its name contains our token
            raise
        return SavedCheckpoint(self.root / folders.folder_name(iteration), size, time.perf_counter() - began)

    def _write(
        self,
        temporary: Path,
        fragments: Sequence[StoredFragment],
        portions: Iterable[Sequence[Fragment]],
        iteration: int,
        progress: dict[str, Any],
        world: Group,
        device: torch.device,
    ) -> int:
        """Run the phases; return the bytes of all files on rank 0, and 0 elsewhere."""
        token, leads, rank = self.fence.token, self.filesystems.leads, world.index
        assert token is not None
        done = partial(attempt_on_all_ranks, world, device)

        def begin() -> None:
            folders.discard(temporary, token)
            temporary.mkdir()

        def write() -> None:
            try:
                write_fragments(temporary, rank, world.size, fragments, portions)
            except FileNotFoundError as error:
                leader = self.filesystems.leaders[rank]
                raise CheckpointError(
                    f"{temporary} is not there for rank {rank}, which shared the folder with rank {leader} when the "
                    "run began"
                ) from error

        done(self.fence.guarding(begin) if leads else None)
        done(self.fence.guarding(write))
        content, size = self._manifest(temporary, progress, world, device)

        def publish() -> None:
            put_manifest(temporary, content)
            if self.write_extra is not None and rank == 0 and len(self.filesystems.all_leaders) == 1:
                self.write_extra(temporary)
            folders.publish(self.root, temporary, iteration, self.fence)

        def prune() -> None:
            folders.prune(self.root, iteration, self.keep_last, token, self.retain_interval)

        done(self.fence.guarding(publish) if leads else None)
        # Delete only when every file system has the new one, so that all always have a checkpoint in common.
        done(self.fence.guarding(prune) if leads else None)
        return size

    def _manifest(
        self, temporary: Path, progress: dict[str, Any], world: Group, device: torch.device
    ) -> tuple[bytes, int]:
        """The manifest's content for the leaders, and the bytes of all files for rank 0.

        Rank 0 makes the manifest from the headers of all files. It reads the headers on its own file system. With
        several file systems each other leader broadcasts its headers, and rank 0 broadcasts the manifest.
        """
        rank, leaders = world.index, self.filesystems.all_leaders
        headers: dict[str, Header] = {}
        content: list[bytes] = []

        def read() -> None:
            names = [file_name(member, world.size) for member in self.filesystems.members(rank)]
            headers.update(headers_of(temporary, [name for name in names if (temporary / name).exists()]))

        def make() -> None:
            manifest = make_manifest(self.writers(), headers, run=self.run, progress=progress, layout=self._layout())
            content.append(manifest.encode())

        attempt_on_all_ranks(world, device, self.fence.guarding(read) if self.filesystems.leads else None)
        for leader in leaders[1:]:
            text = json.dumps({name: asdict(header) for name, header in headers.items()}) if rank == leader else None
            told = broadcast_text(world, device, text, leader)
            if rank == 0 and told is not None:
                headers.update({name: Header(**header) for name, header in json.loads(told).items()})
        attempt_on_all_ranks(world, device, make if rank == 0 else None)
        if len(leaders) > 1:
            whole = broadcast_text(world, device, content[0].decode() if rank == 0 else None)
            assert whole is not None
            content = [whole.encode()]
        return content[0] if content else b"", sum(header.size for header in headers.values()) if rank == 0 else 0

    def _layout(self) -> dict[str, int]:
        """The manifest's `layout`: sizes of the axes, and the number of folders if it is more than one."""
        count = len(self.filesystems.all_leaders)
        return self.layout | ({"places": count} if count > 1 else {})
