"""`Checkpoints`: saving and loading as collectives of all ranks of a run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch

from megazero.checkpoint import folder as folders
from megazero.checkpoint.agreement import attempt_on_all_ranks, broadcast_text, raise_on_all_ranks
from megazero.checkpoint.background import BackgroundSave, SaveOutcome, Snapshot
from megazero.checkpoint.fence import Fence
from megazero.checkpoint.filesystems import find_filesystems, host_name
from megazero.checkpoint.format import COLUMNS, WEIGHT, CheckpointError, Damaged, FragmentSpec, Manifest
from megazero.checkpoint.open_files import OpenFiles
from megazero.checkpoint.reader import check_files, check_inventory, check_sizes, read_manifest, read_portions
from megazero.checkpoint.save_phases import SavedCheckpoint, SavePhases
from megazero.checkpoint.save_plan import fragments_to_write, stored_to_write, values_to_write
from megazero.config.schema import CheckpointConfig
from megazero.config.source import ConfigError
from megazero.mpu.collectives import all_reduce
from megazero.mpu.grid import Group, ProcessGrid
from megazero.telemetry.units import transfer
from megazero.zero.layout import Fragment, StoredFragment
from megazero.zero.sharding import AS_WEIGHTS


class CheckpointedState(Protocol):
    """The model state of this rank, which may rest where its values cannot all be in memory.

    resident    whether all values are in memory, so that portions are views
    stored      this rank's fragments without values, by portion. The replicas' fragments together cover every element
                of a box once, at every ZeRO stage. A fragment that is too large for a portion comes in parts, one
                behind the other in the portions that follow each other. A parameter that is replicated over tp is
                listed by each tp rank: each writes a part of it and reads all of it
    portions    the same fragments with values. A portion is valid until the next one is asked for, and nobody holds it
                then. Columns of `fill` come with any content: the caller writes all of it, and it is stored when the
                next portion, or the end, is asked for. The other columns are read only. What has to be communicated
                comes with the call itself: between portions ranks do not wait for each other
    after_load  called when a load has filled all portions on all ranks, with the columns that it has filled; makes
                parameters and replicated columns equal to them, bucket by bucket. A collective
    """

    @property
    def resident(self) -> bool: ...
    def stored(self) -> Sequence[Sequence[StoredFragment]]: ...
    def portions(self, fill: Collection[str] = ()) -> Generator[Sequence[Fragment], None, None]: ...
    def after_load(self, filled: Collection[str] = (WEIGHT,)) -> None: ...


@dataclass(frozen=True)
class FoundCheckpoint:
    """The path of a checkpoint and its manifest, which has been read and checked."""

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
    """The newest complete checkpoint under `--load`, or None if there never was one. Needs no process group.

    Raises Damaged, whose message names the file, the checkpoint and an earlier intact one, if there is any. Raises
    ValueError for another format version.
    """
    path = folders.newest_checkpoint(Path(load))
    return open_checkpoint(path) if path else None


def open_checkpoint(path: Path) -> FoundCheckpoint:
    """The checkpoint in exactly this folder. Raises as `find` does."""
    try:
        return FoundCheckpoint(path, read_manifest(path))
    except Damaged as error:
        raise _with_offer(error, path) from error


def require_sizes(found: FoundCheckpoint) -> None:
    """Raise Damaged, as `find` does, if a file is missing or has another size than it was written with. The files of
    several nodes' disks are not looked at.
    """
    if found.manifest.is_scattered:
        return
    try:
        check_sizes(found.path, found.manifest)
    except Damaged as error:
        raise _with_offer(error, found.path) from error


def _with_offer(error: Damaged, path: Path) -> Damaged:
    """The error, extended by the path of its checkpoint, the newest earlier one without visible damage, and what is
    known of that one.
    """
    offer = "No earlier one is there."
    for earlier in folders.earlier_checkpoints(path):
        seen = "looks whole"
        try:
            manifest = read_manifest(earlier)
            if manifest.is_scattered:  # this node has a part of the files
                seen = (
                    f"has a whole manifest, and files on the disks of {manifest.layout['places']} nodes, not looked at"
                )
            else:
                check_files(earlier, manifest)
        except (Damaged, ValueError):
            continue
        offer = f"The one before it {seen}; to resume from it: --load {earlier}"
        break
    return Damaged(f"checkpoint {path} is damaged: {error}. {offer}")


_ALL_NODES = "every node needs all of the folder, or its own files of it: bring the folders of all nodes together"


@dataclass(frozen=True)
class LoadStatistics:
    """bytes: read from files by all ranks together. seconds: wall time of the load on this rank. notes: on columns that
    the checkpoint and the state do not both have.
    """

    bytes: int
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """What the load has done, for the banner."""
        return [f"{transfer(self.bytes, self.seconds)} read", *self.notes]


def _require_as_on_rank_0(load: Path, newest: Path | None, rank: int) -> None:
    """Raise ConfigError if rank 0 finds a checkpoint that this rank does not see, or if this rank alone sees one.

    The run would otherwise start from scratch on some ranks. load: the folder. newest: what rank 0 finds in it.
    """
    here = folders.newest_checkpoint(load) if newest is None else newest
    if here is None or (newest is not None and newest.is_dir()):
        return
    sees = (
        f"finds {here.name} there, and rank 0 none" if newest is None else f"does not see {here.name}, as rank 0 does"
    )
    raise ConfigError([f"--load {load}: rank {rank} on {host_name()} {sees}; {_ALL_NODES}"])


def _columns_to_read(
    manifest: Manifest, held: Collection[str], *, weights_only: bool
) -> tuple[list[str], tuple[str, ...]]:
    """The columns that a state takes from a checkpoint, and a note for each average that it does not take or find.

    Without the moments no run can go on, so they must be there (`check_inventory`). An average may begin at any step.
    """
    columns = [column for column in COLUMNS if column == WEIGHT or (column in held and not weights_only)]
    stored, notes = {column for tensor in manifest.tensors.values() for column in tensor.columns}, list[str]()
    for name in (column.value for column in AS_WEIGHTS):
        if name in held and not (name in columns and name in stored):
            columns = [column for column in columns if column != name]
            notes.append(f"{name} begins as these weights")
        elif name in stored and name not in held and not weights_only:
            notes.append(f"its {name} is left out: this run keeps none")
    return columns, tuple(notes)


def find_on_all_ranks(folder: Path, grid: ProcessGrid) -> FoundCheckpoint | None:
    """The newest complete checkpoint in a folder, or the one that the folder is; None if there is none. A collective of
    the world.

    Rank 0 lists the candidates and broadcasts their paths: if every rank looked, one could miss a checkpoint that an
    older run is just publishing. On local disks, a crash may have left the newest checkpoint on some nodes only; the
    result then is the newest one that all ranks have. Raises Damaged, ValueError for another format version, and
    ConfigError if only some ranks see a checkpoint, on all ranks.
    """
    mine: list[Path] = []

    def look() -> None:
        newest = folders.newest_checkpoint(folder)
        if newest is not None:
            mine.extend([newest, *(folders.earlier_checkpoints(newest) if newest.parent == folder else ())])

    attempt_on_all_ranks(grid.world, grid.device, look if grid.rank == 0 else None)
    # Relative to the folder, which may have another name on each node: "." is a checkpoint that the folder itself is,
    # and one that has stepped aside is beside that.
    names = broadcast_text(grid.world, grid.device, json.dumps([os.path.relpath(path, folder) for path in mine]))
    assert names is not None
    paths = [Path(os.path.normpath(folder / name)) for name in json.loads(names)]
    path = next((path for path in paths if _all_have(path, grid)), None)
    if path is None:
        newest = paths[0] if paths else None

        def agree() -> None:
            if newest is not None and grid.rank == 0:
                open_checkpoint(newest)  # it may be damaged, or named and not there
            else:
                _require_as_on_rank_0(folder, newest, grid.rank)

        attempt_on_all_ranks(grid.world, grid.device, agree)
        return None
    opened: FoundCheckpoint = attempt_on_all_ranks(grid.world, grid.device, lambda: open_checkpoint(path))
    return opened


def _all_have(path: Path, grid: ProcessGrid) -> bool:
    """Whether this folder exists on every rank. A collective: an all-reduce of one int64."""
    is_here = torch.tensor([int(path.is_dir())], dtype=torch.int64, device=grid.device)
    all_reduce(is_here, grid.world, "min").wait()
    return bool(is_here.item())


class Checkpoints:
    """Saves and loads the checkpoints of a run. `claim`, `save`, `start`, `find` and `load` are collectives.

    cfg            the folders, how many checkpoints are kept, and what is loaded
    run            the resolved configuration, stored in the manifest: nested dicts of numbers, strings, lists
    state          the model state that is saved and loaded
    all_fragments  returns for each rank what its `state.stored()` covers, by layout arithmetic; called on rank 0 only
    token          the run's token (`fence.new_token`), the same on all ranks
    background     the group for background saves (`grid.background_group`); with None, `start` must not be called
    write_extra    writes further files into a checkpoint's folder (`SavePhases.write_extra`)
    weights        saves have only the weights, rounded to this dtype (--no-save-optim); None: all of the state as it is
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
        weights: torch.dtype | None = None,
    ) -> None:
        self._cfg, self._run, self._state, self._all_fragments, self._grid = cfg, run, state, all_fragments, grid
        self._root = Path(cfg.save) if cfg.save else None
        self.fence = Fence(self._root / folders.TOKEN).join(token) if self._root else None
        self._saving: SavePhases | None = None
        self._write_extra, self._weights = write_extra, weights
        self._background_group, self._background, self._snapshot = background, BackgroundSave(), Snapshot(grid.device)

    def claim(self) -> None:
        """Claim the save folder: delete what an earlier run left unfinished, and stop ranks of it that still run.

        Finds out which ranks share the folder; the leader of each file system claims it there. A collective of the
        world; does nothing without --save. A failure of one rank is raised on all (`agreement.raise_on_all_ranks`).
        """
        if self.fence is None or self._root is None:
            return
        root, fence, grid = self._root, self.fence, self._grid
        assert fence.token is not None
        token = fence.token
        filesystems = find_filesystems(root, token, grid.world, grid.device, self._attempt_on_all_ranks)

        def take_over() -> None:
            fence.claim(token)
            folders.remove_leftovers(root, fence)

        self._attempt_on_all_ranks(take_over if filesystems.leads else None)
        cfg = self._cfg
        kept = cfg.keep_last, cfg.save_retain_interval
        self._saving = SavePhases(
            root, fence, filesystems, self._writers, self._run, grid.axes.sizes, *kept, self._write_extra
        )

    def reserve(self) -> int:
        """Allocate the host memory that `start` copies into; return this rank's bytes."""
        return self._snapshot.reserve(self._written())

    def save(self, iteration: int, progress: dict[str, Any]) -> SavedCheckpoint:
        """Write the state as iter_NNNNNNN of the save folder, point `latest` to it, delete old checkpoints.

        A collective of the world. Returns when the checkpoint is on disk. Memory: a portion of the state and a block.
        Raises as `SavePhases.write` does.
        """
        saving, written, grid = self._claimed(), self._written(), self._grid
        with closing(self._state.portions()) as portions:
            values = values_to_write(portions, written)
            return saving.write(written, values, iteration, progress, grid.world, grid.device)

    def start(self, iteration: int, progress: dict[str, Any]) -> None:
        """Save in the background: return once the state is copied to host memory, in which it must be resident.

        The thread's collectives run over the group `background`. The outcome of the previous save must have been taken.
        """
        saving, group = self._claimed(), self._background_group
        assert group is not None, "made without a group for saves in the background"
        assert self._state.resident, "a copy of this state may not fit into memory"
        written, device = self._written(), torch.device("cpu")
        values = self._snapshot.take(list(chain.from_iterable(values_to_write(self._state.portions(), written))))
        self._background.start(iteration, lambda: saving.write(written, [values], iteration, progress, group, device))

    @property
    def busy(self) -> bool:
        """Whether there is a background save whose outcome neither `poll` nor `wait` has returned."""
        return self._background.busy

    def poll(self) -> SaveOutcome | None:
        """The outcome of a background save that has ended on this rank, once; else None.

        Communicates nothing, so ranks may get the outcome at different steps.
        """
        return self._background.poll()

    def wait(self) -> SaveOutcome | None:
        """Wait for the background save and return its outcome, once; it failed on all ranks or on none."""
        return self._background.wait()

    def find(self) -> FoundCheckpoint | None:
        """The checkpoint to start from; None without --load. As `find_on_all_ranks`."""
        return None if self._cfg.load is None else find_on_all_ranks(Path(self._cfg.load), self._grid)

    def load(self, found: FoundCheckpoint) -> LoadStatistics:
        """Fill the state from a checkpoint of any layout and precision; with --finetune or --no-load-optim the weights
        only.

        A collective of the world: ranks agree on errors and sum the bytes read; each reads for itself. Memory: a
        portion of the state and a few blocks. Raises Damaged (the message names the file and an earlier checkpoint) or
        ValueError (it names all tensors that do not fit).
        """
        began = time.perf_counter()
        stored = self._state.stored()
        held = {column for fragment in chain.from_iterable(stored) for column in fragment.dtypes}
        weights_only = self._cfg.finetune or self._cfg.no_load_optim
        columns, notes = _columns_to_read(found.manifest, held, weights_only=weights_only)
        amount = torch.zeros(1, dtype=torch.float64, device=self._grid.device)

        def check() -> None:
            if not found.manifest.is_scattered:  # otherwise files that no rank here needs may be on other nodes
                check_files(found.path, found.manifest)
            every = (fragment for held in self._all_fragments() for fragment in held)
            check_inventory(found.manifest, every, columns)

        def read() -> None:
            with OpenFiles(found.path, found.manifest) as files:
                amount.fill_(read_portions(files, stored, portions, columns))

        self._attempt_on_all_ranks(check if self._grid.rank == 0 else None, found.path)
        with closing(self._state.portions(columns)) as given:
            portions: Iterator[Sequence[Fragment]] = given
            if self._state.resident:  # views of all of it as one portion, so that no file is opened twice
                stored, portions = [list(chain.from_iterable(stored))], iter([list(chain.from_iterable(given))])
            self._attempt_on_all_ranks(read, found.path)
        self._state.after_load(columns)
        all_reduce(amount, self._grid.world).wait()
        return LoadStatistics(int(amount.item()), time.perf_counter() - began, notes)

    def _claimed(self) -> SavePhases:
        if self._root is None:
            raise CheckpointError("there is no folder to save in: --save DIR")
        assert self._saving is not None, "claim comes before the first save"
        return self._saving

    def _written(self) -> list[StoredFragment]:
        """The fragments that this rank writes."""
        return stored_to_write(self._state.stored(), self._grid.at.tp, self._grid.axes.tp, self._weights)

    def _writers(self) -> list[list[FragmentSpec]]:
        """The fragments that each rank writes."""
        axes = self._grid.axes
        tp = [axes.coordinates(rank).tp for rank in range(axes.world_size)]
        return [fragments_to_write(held, index, axes.tp) for index, held in zip(tp, self._all_fragments(), strict=True)]

    def _attempt_on_all_ranks(self, action: Callable[[], Any] | None, path: Path | None = None) -> None:
        """As `agreement.attempt_on_all_ranks`; an error Damaged gets the checkpoint's path and an earlier
        checkpoint."""
        failure: Exception | None = None
        try:
            if action is not None:
                action()
        except Damaged as error:
            failure = _with_offer(error, path) if path else error
        except Exception as error:
            failure = error
        raise_on_all_ranks(self._grid.world, self._grid.device, failure)
