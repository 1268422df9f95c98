"""`Checkpoints`: save and load as all ranks of a run do them together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from megazero.checkpoint import folder as folders
from megazero.checkpoint.agreement import agree, share
from megazero.checkpoint.fence import Fence
from megazero.checkpoint.format import COLUMNS, CheckpointError, Damaged, Fragment, Held, Manifest, columns_of
from megazero.checkpoint.reader import check_files, check_inventory, read_fragments, read_manifest
from megazero.checkpoint.writer import is_written, write_fragments, write_manifest
from megazero.config.schema import CheckpointConfig
from megazero.mpu.grid import ProcessGrid


class State(Protocol):
    """The model state of this rank, as the sharded optimizer keeps it.

    fragments   this rank's share: over all ranks every element of every box once, whatever the ZeRO stage. Replicas
                over tp are given by each tp rank; they are written by the first and read by all
    after_load  makes parameters and replicated columns equal to the fragments, which have just been filled
    """

    def fragments(self) -> Iterable[Fragment]: ...
    def after_load(self) -> None: ...


@dataclass(frozen=True)
class Found:
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


def find(load: str | Path) -> Found | None:
    """The newest complete checkpoint under `--load`, or None when there never was one. Needs no process group.

    Raises Damaged, naming file and checkpoint and the one before, ValueError for a newer format.
    """
    path = folders.newest(Path(load))
    return open_checkpoint(path) if path else None


def open_checkpoint(path: Path) -> Found:
    """The checkpoint in this very folder. Raises as `find` does."""
    try:
        return Found(path, read_manifest(path))
    except Damaged as error:
        raise _with_offer(error, path) from error


def _with_offer(error: Damaged, path: Path) -> Damaged:
    """The error with the checkpoint it is about and the newest earlier one that looks whole."""
    offer = "No earlier one is there."
    for earlier in folders.before(path):
        try:
            check_files(earlier, read_manifest(earlier))
        except (Damaged, ValueError):
            continue
        offer = f"The one before it looks whole; to resume from it: --load {earlier}"
        break
    return Damaged(f"checkpoint {path} is damaged: {error}. {offer}")


class Checkpoints:
    """Where this run saves and what it loads. Every method is called by all ranks.

    cfg            folders, how many are kept, what is loaded
    run            the resolved configuration, for the record: nested dicts of numbers, strings, lists
    state          what is saved and loaded
    all_fragments  for each rank what its `state.fragments()` cover, from layout arithmetic; called on rank 0 only
    token          the run's token (`fence.new_token`), the same on all ranks
    """

    def __init__(
        self,
        cfg: CheckpointConfig,
        run: dict[str, Any],
        state: State,
        all_fragments: Callable[[], Sequence[Sequence[Held]]],
        grid: ProcessGrid,
        token: str,
    ) -> None:
        self._cfg, self._run, self._state, self._all_fragments, self._grid = cfg, run, state, all_fragments, grid
        self._root = Path(cfg.save) if cfg.save else None
        self.fence = Fence(self._root / folders.TOKEN).join(token) if self._root else None

    def claim(self) -> None:
        """Take over the save folder: what an earlier run left unfinished goes, and what is left of that run stops."""
        if self.fence is None or self._root is None:
            return
        root, fence = self._root, self.fence
        assert fence.token is not None
        token = fence.token

        def take_over() -> None:
            fence.claim(token)
            folders.sweep(root, fence)

        self._together(take_over if self._grid.rank == 0 else None)

    def save(self, iteration: int, progress: dict[str, Any]) -> Path:
        """Write the state as iter_NNNNNNN of the save folder, let `latest` name it, delete what is too old.

        Returns when it is on disk. Raises FenceLost when another run has taken over, OSError when the disk does not take
        it; then nothing with the name of a checkpoint has changed.
        """
        root, fence, rank = self._root, self.fence, self._grid.rank
        if root is None or fence is None or fence.token is None:
            raise CheckpointError("there is no folder to save in: --save DIR")
        token = fence.token
        temporary = root / folders.temporary_name(iteration, token)
        tp_index = self._grid.at.tp
        fragments = [fragment for fragment in self._state.fragments() if is_written(fragment, tp_index)]

        def begin() -> None:
            folders.discard(temporary, token)
            temporary.mkdir()

        def write() -> None:
            try:
                write_fragments(temporary, rank, self._grid.world.size, fragments)
            except FileNotFoundError as error:
                raise CheckpointError(
                    f"{temporary} is not there for rank {rank}: all ranks must share the file system of --save"
                ) from error

        def finish() -> None:
            write_manifest(temporary, self._writers(), run=self._run, progress=progress, layout=asdict(self._grid.axes))
            folders.publish(root, temporary, iteration, fence)
            folders.prune(root, iteration, self._cfg.keep_last, token)

        self._together(fence.guarding(begin) if rank == 0 else None)
        self._together(fence.guarding(write))
        self._together(fence.guarding(finish) if rank == 0 else None)
        return root / folders.folder_name(iteration)

    def find(self) -> Found | None:
        """The checkpoint to start from, or None: no --load, or nothing complete there."""
        load, grid = self._cfg.load, self._grid
        if load is None:
            return None
        paths: list[Path | None] = []
        self._together((lambda: paths.append(folders.newest(Path(load)))) if grid.rank == 0 else None)
        # Rank 0 decides: were every rank to look for itself, a leftover run that saves just now could divide them.
        name = share(grid.world, grid.device, str(paths[0]) if paths and paths[0] else None)
        if name is None:
            return None
        found: list[Found] = []
        self._together(lambda: found.append(open_checkpoint(Path(name))))
        return found[0]

    def load(self, found: Found) -> None:
        """Fill the state from a checkpoint of any layout and precision; weights only with --finetune or --no-load-optim.

        Raises Damaged (naming the file, and the checkpoint before) or ValueError (naming all tensors that do not fit).
        """
        fragments = list(self._state.fragments())
        held = {column for fragment in fragments for column in columns_of(fragment)}
        weights_only = self._cfg.finetune or self._cfg.no_load_optim
        columns = [column for column in COLUMNS if column == "weight" or (column in held and not weights_only)]

        def check() -> None:
            check_files(found.path, found.manifest)
            every = (fragment for held in self._all_fragments() for fragment in held)
            check_inventory(found.manifest, every, columns)

        def read() -> None:
            read_fragments(found.path, found.manifest, fragments, columns)

        self._together(check if self._grid.rank == 0 else None, found.path)
        self._together(read, found.path)
        self._state.after_load()

    def _writers(self) -> list[list[Held]]:
        """What each rank writes."""
        at = self._grid.axes.coordinates
        return [[held for held in every if is_written(held, at(rank).tp)] for rank, every in enumerate(self._all_fragments())]

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
