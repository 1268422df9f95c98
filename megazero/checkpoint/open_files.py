"""The fragment files of a checkpoint, opened on first use. The most recently used ones stay open."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

from megazero.checkpoint.blocks import BlockFile
from megazero.checkpoint.filesystems import host_name
from megazero.checkpoint.format import Damaged, Manifest, StoredFile

MOST = 64
"""The most files that are open at once. A reader never has reads under way in as many."""


class OpenFiles:
    """The files of a checkpoint by their number in the manifest. Opening one checks its size and header.

    A context manager that closes them.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._open: OrderedDict[int, BlockFile] = OrderedDict()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *error: object) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def __getitem__(self, number: int) -> BlockFile:
        """The open file. Raises Damaged if it is missing or differs from what was written."""
        file = self._open.pop(number, None)
        if file is None:
            file = self._opened(self.manifest.files[number])
        self._open[number] = file
        if len(self._open) > MOST:
            self._open.popitem(last=False)[1].close()
        return file

    def _opened(self, stored: StoredFile) -> BlockFile:
        try:
            file = BlockFile(self.folder / stored.name)
        except Damaged as error:
            if self.manifest.is_scattered and not (self.folder / stored.name).exists():
                raise Damaged(
                    f"{stored.name} is not in {self.folder} on {host_name()}: this checkpoint was saved on the local "
                    f"disks of {self.manifest.layout['places']} nodes, and other ranks or another layout need files "
                    "of other nodes; bring the folders of all of them together"
                ) from error
            raise
        try:
            check_header(file, stored)
        except BaseException:
            file.close()
            raise
        return file


def check_header(file: BlockFile, stored: StoredFile) -> None:
    """Raise Damaged unless the file has the size and the header that it was written with."""
    if file.size != stored.size:
        raise Damaged(f"{stored.name} has {file.size} bytes instead of {stored.size}")
    if file.header_sha256 != stored.header_sha256:
        raise Damaged(f"{stored.name} is altered: the sha256 of its header is not the recorded one")
