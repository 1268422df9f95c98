"""`Checkpoints`: save and load as all ranks of a run do them together."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from megazero.checkpoint import folder as folders
from megazero.checkpoint.agreement import agree, share
from megazero.checkpoint.background import Background, Outcome, Snapshot
from megazero.checkpoint.fence import Fence
from megazero.checkpoint.filesystems import find_filesystems, host_name
from megazero.checkpoint.format import COLUMNS, CheckpointError, Damaged, Fragment, FragmentSpec, Manifest, columns_of
from megazero.checkpoint.open_files import OpenFiles
from megazero.checkpoint.reader import check_files, check_inventory, read_fragments, read_manifest
from megazero.checkpoint.save_phases import SavedCheckpoint, SavePhases
from megazero.checkpoint.save_plan import fragments_to_write, views_to_write
from megazero.config.schema import CheckpointConfig
from megazero.mpu.collectives import all_reduce
from megazero.mpu.grid import Group, ProcessGrid


class CheckpointedState(Protocol):
    """The model state of this rank, as the sharded optimizer keeps it.

    fragments   this rank's share: over all ranks every element of every box once, whatever the ZeRO stage. Replicas
                over tp are given by each tp rank: each writes a part of them, all read the whole
    after_load  makes parameters and replicated columns equal to the fragments, which have just been filled
    """

    def fragments(self) -> Iterable[Fragment]: ...
    def after_load(self) -> None: ...


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint whose manifest has been read: where it is, and what it says of its run."""

    path: Path
    manifest: Manifest

    @property
    def run(self) -> dict[str, Any]:
        return self.manifest.run

    @property
    def progress(self) -> dict[str, Any]:
        return self.manifest.progress

    @property
    def layout(self) -> dict[str, int]:
        return self.manifest.layout


def find(load: str | Path) -> FoundCheckpoint | None:
    """The newest complete checkpoint under `--load`, or None when there never was one. Needs no process group.

    Raises Damaged, naming file and checkpoint and the one before, ValueError for a newer format.
    """
    path = folders.newest(Path(load))
    return open_checkpoint(path) if path else None


def open_checkpoint(path: Path) -> FoundCheckpoint:
    """The checkpoint in this very folder. Raises as `find` does."""
    try:
        return FoundCheckpoint(path, read_manifest(path))
    except Damaged as error:
        raise _with_offer(error, path) from error


def _with_offer(error: Damaged, path: Path) -> Damaged:
    """The error with the checkpoint it is about and the newest earlier one that looks whole."""
    offer = "No earlier one is there."
    for earlier in folders.before(path):
        try:
            manifest = read_manifest(earlier)
            if not manifest.is_scattered:
                check_files(earlier, manifest)
        except (Damaged, ValueError):
            continue
        offer = f"The one before it looks whole; to resume from it: --load {earlier}"
        break
    return Damaged(f"checkpoint {path} is damaged: {error}. {offer}")


@dataclass(frozen=True)
class LoadStatistics:
    """bytes: read from files by all ranks together. seconds: until the state was filled."""

    bytes: int
    seconds: float


def _nothing_here(load: Path) -> None:
    """Raises Damaged where a run that would start from scratch has checkpoints after all, on the
    disks of some nodes.
    """
    path = folders.newest(load)
    if path is not None:
        raise Damaged(
            f"{path} is there on {host_name()}, but rank 0 finds no checkpoint: bring the folders of all nodes together"
        )


class Checkpoints:
    """Where this run saves and what it loads. Every method but `poll` is called by all ranks.

    cfg            folders, how many are kept, what is loaded
    run            the resolved configuration, for the record: nested dicts of numbers, strings, lists
    state          what is saved and loaded
    all_fragments  for each rank what its `state.fragments()` cover, from layout arithmetic; called on rank 0 only
    token          the run's token (`fence.new_token`), the same on all ranks
    background     the group for saves in the background (`grid.background_group`); None: `start` is not called
    write_extra    writes what else goes into a checkpoint's folder (`SavePhases.write_extra`)
    """

    def __init__(
        self,
        cfg: CheckpointConfig,
        run: dict[str, Any],
        state: CheckpointedState,
        all_fragments: Callable[[], Sequence[Sequence[FragmentSpec]]],
        grid: ProcessGrid,
        token: str,
        background: Group | None = None,
        write_extra: Callable[[Path], None] | None = None,
    ) -> None:
        self._cfg, self._run, self._state, self._all_fragments, self._grid = cfg, run, state, all_fragments, grid
        self._root = Path(cfg.save) if cfg.save else None
        self.fence = Fence(self._root / folders.TOKEN).join(token) if self._root else None
        self._saving: SavePhases | None = None
        self._write_extra = write_extra
        self._background_group, self._background, self._snapshot = background, Background(), Snapshot(grid.device)

    def claim(self) -> None:
        """Take over the save folder: what an earlier run left unfinished goes, and what is left of that run stops.

        Finds out which ranks share the folder; each of the folders is taken over by one of them.
        """
        if self.fence is None or self._root is None:
            return
        root, fence, grid = self._root, self.fence, self._grid
        assert fence.token is not None
        token = fence.token
        filesystems = find_filesystems(root, token, grid.world, grid.device, self._together)

        def take_over() -> None:
            fence.claim(token)
            folders.sweep(root, fence)

        self._together(take_over if filesystems.leads else None)
        cfg = self._cfg
        kept = cfg.keep_last, cfg.save_retain_interval
        self._saving = SavePhases(
            root, fence, filesystems, self._writers, self._run, asdict(grid.axes), *kept, self._write_extra
        )

    def reserve(self) -> int:
        """Have the host memory that `start` copies to; bytes of this rank."""
        return self._snapshot.reserve(self._written())

    def save(self, iteration: int, progress: dict[str, Any]) -> SavedCheckpoint:
        """Write the state as iter_NNNNNNN of the save folder, let `latest` name it, delete what is too old.

        Returns when it is on disk. Raises as `SavePhases.write` does.
        """
        saving = self._claimed()
        return saving.write(self._written(), iteration, progress, self._grid.world, self._grid.device)

    def start(self, iteration: int, progress: dict[str, Any]) -> None:
        """The same in the background: returns when the state is copied to host memory.

        `wait` must have come between two of these.
        """
        saving, group = self._claimed(), self._background_group
        assert group is not None, "made without a group for saves in the background"
        values = self._snapshot.take(self._written())
        self._background.start(iteration, lambda: saving.write(values, iteration, progress, group, torch.device("cpu")))

    @property
    def busy(self) -> bool:
        """Whether a save is under way that neither `poll` nor `wait` has told the outcome of."""
        return self._background.busy

    def poll(self) -> Outcome | None:
        """The outcome of a save in the background that has ended on this rank, once.

        Communicates nothing; ranks may learn at different steps.
        """
        return self._background.poll()

    def wait(self) -> Outcome | None:
        """Wait for the save in the background, and give its outcome, once: failed on all ranks or on none."""
        return self._background.wait()

    def find(self) -> FoundCheckpoint | None:
        """The checkpoint to start from, or None: no --load, or nothing complete there.

        Rank 0 decides: were every rank to look for itself, a leftover run that saves just now could divide them. Where
        folders are on local disks, a crash may have left the newest in some of them only: then it is the newest of rank
        0's that all ranks have.
        """
        load, grid = self._cfg.load, self._grid
        if load is None:
            return None
        mine: list[Path] = []

        def look() -> None:
            newest = folders.newest(Path(load))
            if newest is not None:
                mine.extend([newest, *(folders.before(newest) if newest.parent == Path(load) else ())])

        self._together(look if grid.rank == 0 else None)
        names = share(grid.world, grid.device, json.dumps([str(path) for path in mine]))
        assert names is not None
        paths = [Path(name) for name in json.loads(names)]
        if not paths:
            self._together(lambda: _nothing_here(Path(load)))
            return None
        path = next((path for path in paths if self._all_have(path)), paths[0])
        found: list[FoundCheckpoint] = []
        self._together(lambda: found.append(open_checkpoint(path)))
        return found[0]

    def load(self, found: FoundCheckpoint) -> LoadStatistics:
        """Fill the state from a checkpoint of any layout and precision; weights only with --finetune or
        --no-load-optim.

        Raises Damaged (naming the file, and the checkpoint before) or ValueError (naming all tensors that do not fit).
        """
        began = time.perf_counter()
        fragments = list(self._state.fragments())
        held = {column for fragment in fragments for column in columns_of(fragment)}
        weights_only = self._cfg.finetune or self._cfg.no_load_optim
        columns = [column for column in COLUMNS if column == "weight" or (column in held and not weights_only)]
        amount = torch.zeros(1, dtype=torch.float64, device=self._grid.device)

        def check() -> None:
            if not found.manifest.is_scattered:  # else what a rank does not read may lie elsewhere
                check_files(found.path, found.manifest)
            every = (fragment for held in self._all_fragments() for fragment in held)
            check_inventory(found.manifest, every, columns)

        def read() -> None:
            with OpenFiles(found.path, found.manifest) as files:
                amount.fill_(read_fragments(files, fragments, columns))

        self._together(check if self._grid.rank == 0 else None, found.path)
        self._together(read, found.path)
        self._state.after_load()
        all_reduce(amount, self._grid.world).wait()
        return LoadStatistics(int(amount.item()), time.perf_counter() - began)

    def _claimed(self) -> SavePhases:
        if self._root is None:
            raise CheckpointError("there is no folder to save in: --save DIR")
        assert self._saving is not None, "claim comes before the first save"
        return self._saving

    def _written(self) -> list[Fragment]:
        """What this rank writes, as views of the state."""
        return views_to_write(list(self._state.fragments()), self._grid.at.tp, self._grid.axes.tp)

    def _writers(self) -> list[list[FragmentSpec]]:
        """What each rank writes."""
        axes = self._grid.axes
        tp = [axes.coordinates(rank).tp for rank in range(axes.world_size)]
        return [fragments_to_write(held, index, axes.tp) for index, held in zip(tp, self._all_fragments(), strict=True)]

    def _all_have(self, path: Path) -> bool:
        """Whether this folder is there on every rank. Travels: one int64."""
        there = torch.tensor([int(path.is_dir())], dtype=torch.int64, device=self._grid.device)
        all_reduce(there, self._grid.world, "min").wait()
        return bool(there.item())

    def _together(self, action: Callable[[], Any] | None, path: Path | None = None) -> None:
        """Do this rank's part, if it has one, and go on only when no rank has failed."""
        failure: Exception | None = None
        try:
            if action is not None:
                action()
        except Damaged as error:
            failure = _with_offer(error, path) if path else error
        except Exception as error:
            failure = error
        agree(self._grid.world, self._grid.device, failure)
