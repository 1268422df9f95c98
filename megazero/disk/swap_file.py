"""A swap file: made, locked while its process lives, sized from the start, removed by whoever finds it left over; and
what goes wrong with one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from megazero.disk.buffers import own_pages
from megazero.disk.layout import HEADER_BYTES
from megazero.system.durable import sync_folder
from megazero.system.names import is_plain_file_name

PREFIX = "megazero-swap-"
NAME = re.compile(rf"\.?({PREFIX}(.+)-\d{{5,}})\.(bin|json)(-\w+)?")
"""What a folder may hold of ours. Groups: the stem, the job."""
MAGIC = "megazero swap 1"
CHECKPOINT = "checkpoint"
"""The job whose files outlive its processes, because a run may go on from them. Other jobs have names of their own."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What a file system without file locks says."""
NO_PREALLOCATION = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
RELEASE_SECONDS = 10.0
"""How long the lock of a process that has ended may still be held."""
O_DIRECT = getattr(os, "O_DIRECT", 0)


class DiskError(OSError):
    """A swap file cannot be made, read or written. The message names path, piece and bytes.

    code  errno of the system's error; None where there is none
    """

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)  # without the errno, which would become a part of its text
        self.code = code

    @classmethod
    def of(cls, message: str, error: OSError) -> DiskError:
        """The message, and what the system says."""
        return cls(f"{message}: {reason(error.errno or 0)}", error.errno)


class SwapDamaged(DiskError):
    """What is on disk is not what was written there: a file that is missing or ends early, a checksum that differs."""


ADVICE = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota of this user is used up",
    errno.EFBIG: "a limit on the size of files (ulimit -f, or the file system's own) ends there",
    errno.EROFS: "the file system is read-only",
    errno.EIO: "the disk reports an error",
}


def reason(code: int) -> str:
    """An errno in words."""
    system_words = f"{os.strerror(code)} (errno {code})"
    return f"{ADVICE[code]}: {system_words}" if code in ADVICE else system_words


def stem_of(job: str, rank: int) -> str:
    """The name of a rank's files without the ending."""
    stem = f"{PREFIX}{job}-{rank:05d}"
    if not job or not is_plain_file_name(stem + ".json"):
        raise ValueError(f"{job!r} is no name of a job: it becomes a part of a file's name")
    return stem


class SwapFile:
    """An open swap file of this process.

    path      of the file
    id        random name of its content, new whenever the file is started anew
    handle    its descriptor, with O_DIRECT where the file system takes it
    buffered  why it is without O_DIRECT; empty: it is with
    """

    def __init__(self, path: Path, size: int, *, adopt: bool = False, stale: Sequence[Path] = ()) -> None:
        """adopt: keep the content of an earlier process. Raises SwapDamaged if there is none of this size.

        Otherwise the file is started anew, and the files `stale`, which tell of its old content, are removed. All
        of its bytes are allocated now: a full disk is an error before the first step. Raises DiskError.
        """
        self.path, self.size, self.id, self.buffered = path, size, secrets.token_hex(8), ""
        try:
            self.handle = _locked_soon(path, create=not adopt)
        except FileNotFoundError as error:
            raise _missing(path) from error
        except DiskError:
            raise
        except OSError as error:
            raise DiskError.of(f"{path}: cannot be opened", error) from error
        try:
            self._adopt() if adopt else self._start(stale)
        except BaseException:
            os.close(self.handle)
            raise

    def _start(self, stale: Sequence[Path]) -> None:
        try:
            for path in stale:  # first: no record may tell of bytes that are gone
                path.unlink(missing_ok=True)
            os.ftruncate(self.handle, 0)
            _allocate(self.handle, self.size)
            self._use_direct()
            self._write_header()
            os.fsync(self.handle)
            sync_folder(self.path.parent)
        except OSError as error:
            free = free_bytes(self.path.parent)
            with suppress(OSError):
                self.path.unlink()
            raise DiskError.of(f"{self.path}: {self.size:,} bytes are needed, {free:,} are free", error) from error

    def _adopt(self) -> None:
        size = os.fstat(self.handle).st_size
        if size != self.size:
            raise SwapDamaged(f"{self.path}: has {size:,} bytes, not the {self.size:,} with which it was made")
        content_id = _content_id(self.path)
        if content_id is None:
            raise SwapDamaged(f"{self.path}: its first {HEADER_BYTES:,} bytes are no header of a swap file")
        self.id = content_id
        self._use_direct()

    def _use_direct(self) -> None:
        """Set O_DIRECT, and try it with a read of the header."""
        flags = fcntl.fcntl(self.handle, fcntl.F_GETFL)
        if not O_DIRECT:
            self.buffered = "this system has no O_DIRECT"
        try:
            fcntl.fcntl(self.handle, fcntl.F_SETFL, flags | O_DIRECT)
            with own_pages(HEADER_BYTES) as page:  # some file systems take the flag and refuse the read
                os.preadv(self.handle, [page], 0)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
                raise
            fcntl.fcntl(self.handle, fcntl.F_SETFL, flags)
            self.buffered = f"the file system of {self.path.parent} refuses O_DIRECT"

    def _write_header(self) -> None:
        with own_pages(HEADER_BYTES) as page:
            page.write(json.dumps({"magic": MAGIC, "id": self.id}).encode())
            os.pwrite(self.handle, page, 0)

    def sync(self) -> None:
        """Return when all that was written survives a power failure. Raises DiskError."""
        try:
            getattr(os, "fdatasync", os.fsync)(self.handle)
        except OSError as error:
            raise DiskError.of(f"{self.path}: its writes cannot be made durable", error) from error

    def close(self, remove: bool) -> None:
        """Close the file, which releases its lock."""
        if remove:
            self.path.unlink(missing_ok=True)
        os.close(self.handle)


def remove_leftovers(folder: Path, keep: str | None = None, jobs: str = "") -> list[str]:
    """Remove the files of processes that have ended without doing so, and return the names of what was removed.

    keep  a job whose files stay
    jobs  what the names of the others begin with. Files of CHECKPOINT stay unless this is its name

    A living process holds the lock of its file, whatever host or container it runs in. Where the file system has no
    locks nothing is removed.
    """
    removed: list[str] = []
    kept_jobs = {keep} if jobs == CHECKPOINT else {keep, CHECKPOINT}
    with suppress(OSError), _alone_in(folder):
        files = [(match[1], match[2], name) for name in os.listdir(folder) if (match := NAME.fullmatch(name))]
        for stem in sorted({stem for stem, job, _ in files if job not in kept_jobs and job.startswith(jobs)}):
            with suppress(OSError):  # in use, another user's, or gone by now
                # A record without its file is left over too; the file is made, so that there is a lock.
                handle = _locked(folder / f"{stem}.bin", create=True, must_lock=True)
                try:
                    for name in [name for other, _, name in files if other == stem and not name.endswith(".bin")]:
                        (folder / name).unlink(missing_ok=True)
                    (folder / f"{stem}.bin").unlink()
                    removed.append(f"{stem}.bin")
                finally:
                    os.close(handle)
    return removed


def leftover_bytes(folder: Path, *, checkpoints: bool = False) -> int:
    """Bytes of the swap files in a folder that `remove_leftovers` would remove. Several processes may ask at once.

    checkpoints: count those of CHECKPOINT too, of a run that takes them over or replaces them.
    """
    total = 0
    with suppress(OSError), _alone_in(folder):
        for entry in os.scandir(folder):
            match = NAME.fullmatch(entry.name)
            if match is None or match[3] != "bin" or (match[2] == CHECKPOINT and not checkpoints):
                continue
            with suppress(OSError):  # in use, another user's, or gone by now
                handle = os.open(entry.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    total += os.fstat(handle).st_blocks * 512
                finally:
                    os.close(handle)
    return total


def _content_id(path: Path) -> str | None:
    """The id in the header of a swap file; None if it is no header."""
    with suppress(OSError, ValueError), path.open("rb") as file:
        header = json.loads(file.read(HEADER_BYTES).rstrip(b"\0"))
        if isinstance(header, dict) and header.get("magic") == MAGIC and isinstance(header.get("id"), str):
            return str(header["id"])
    return None


def _locked_soon(path: Path, *, create: bool) -> int:
    """As `_locked`, of a process that may just have been killed: what the kernel still writes for it holds the lock.

    Raises DiskError if a living process has the lock, or if it is not free after some seconds.
    """
    end = time.monotonic() + RELEASE_SECONDS
    while True:
        try:
            with _alone_in(path.parent):
                return _locked(path, create=create)
        except BlockingIOError as error:
            owner = owner_of(path)
            if (owner is not None and Path(f"/proc/{owner}").exists()) or time.monotonic() > end:
                user = "another process" if owner is None else f"process {owner}"
                raise DiskError(f"{path}: {user} uses it", error.errno) from error
        time.sleep(0.005)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """A context without other processes that look into this folder or make their files there. Whoever looks for
    left-over files locks them for a moment. So a file that is locked now is in use.

    Where the file system has no locks of folders, nobody is kept out. Raises OSError.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (*NO_LOCKS, errno.EBADF):  # EBADF: NFS locks only what is open for writing
                raise
        yield
    finally:
        os.close(handle)


def _locked(path: Path, *, create: bool, must_lock: bool = False) -> int:
    """Open and lock a file; the lock ends with the descriptor. Raises OSError, BlockingIOError if another has it.

    Between opening and locking, another process may have removed the file as left over; then it is made again.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    while True:
        handle = os.open(path, flags, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if must_lock or error.errno not in NO_LOCKS:
                    raise
            opened = os.fstat(handle)
            with suppress(FileNotFoundError):
                named = os.stat(path, follow_symlinks=False)
                if (opened.st_dev, opened.st_ino) == (named.st_dev, named.st_ino):
                    if not stat.S_ISREG(opened.st_mode):
                        raise DiskError(f"{path}: is no plain file")
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def owner_of(path: Path) -> int | None:
    """The process that has locked the file; None if this host's kernel does not say."""
    with suppress(OSError, ValueError):
        inode = path.stat().st_ino
        for line in Path("/proc/locks").read_text().splitlines():
            # "1: FLOCK  ADVISORY  WRITE 4711 fe:00:INODE 0 EOF"
            _, kind, _, _, process, file, *_ = line.split()
            if kind == "FLOCK" and file.rpartition(":")[2] == str(inode):
                return int(process)
    return None


def _missing(path: Path) -> DiskError:
    if path.parent.is_dir():
        return SwapDamaged(f"{path}: is missing")
    return DiskError(f"{path.parent}: there is no such folder", errno.ENOENT)


def _allocate(handle: int, size: int) -> None:
    """Allocate all bytes, or only set the size where the file system cannot."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)
    except OSError as error:
        if error.errno not in NO_PREALLOCATION:
            raise
    os.ftruncate(handle, size)


def free_bytes(folder: Path | str) -> int:
    """Bytes that this user may still write to the file system of a folder; 0 if it does not say."""
    try:
        file_system = os.statvfs(folder)
    except OSError:
        return 0
    return file_system.f_bavail * file_system.f_frsize
