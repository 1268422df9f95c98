"""Caches under several processes: built once, waited for, rebuilt when the builder died or left rubbish."""

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from megazero.data.cache import build_once, cached_arrays, default_root, key_of
from megazero.data.file_array import DataError
from megazero.data.progress import silent
from tests.disks import small_disk

SPAWN = multiprocessing.get_context("spawn")
FACTS = {"a": 1}


def _build_slowly(root: str, seconds: float) -> np.ndarray:
    def build(say):
        with open(Path(root) / "builders", "a") as log:
            log.write(f"{os.getpid()}\n")
        say("half way")
        time.sleep(seconds)
        return {"x": np.arange(10), "none": np.empty((0, 2), np.int32)}

    return cached_arrays(Path(root), "slow", FACTS, build, silent)["x"][:]


@pytest.mark.slow
def test_one_of_many_builds(tmp_path):
    with SPAWN.Pool(6) as pool:
        results = pool.starmap(_build_slowly, [(str(tmp_path), 1.0)] * 6, chunksize=1)
    assert all(np.array_equal(result, np.arange(10)) for result in results)
    assert len((tmp_path / "builders").read_text().split()) == 1
    assert not list(tmp_path.glob("*unfinished*"))


def test_a_killed_builder_is_replaced(tmp_path):
    first = SPAWN.Process(target=_build_slowly, args=(str(tmp_path), 600.0))
    first.start()
    while not (tmp_path / "builders").exists():
        time.sleep(0.02)
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    assert not (tmp_path / key_of("slow", FACTS)).exists()
    assert np.array_equal(_build_slowly(str(tmp_path), 0.0), np.arange(10))


def test_waiting_ranks_say_what_they_wait_for(tmp_path, monkeypatch):
    monkeypatch.setattr("megazero.data.cache.SAY_EVERY", 0.1)
    first = SPAWN.Process(target=_build_slowly, args=(str(tmp_path), 1.5))
    first.start()
    while not (tmp_path / "builders").exists():
        time.sleep(0.02)
    said: list[str] = []
    build_once(tmp_path, key_of("slow", FACTS), lambda folder, say: None, said.append)
    first.join()
    assert any("half way" in line and f"process {first.pid}" in line for line in said)


def test_damaged_caches_are_rebuilt(tmp_path):
    def build(say):
        builds.append(1)
        return {"x": written, "none": np.empty((0, 2), np.int32)}

    written = np.random.default_rng(1).integers(0, 1 << 40, 1500)  # three pages of a sum
    builds: list[int] = []
    folder = tmp_path / key_of("w", FACTS)

    def flip(name: str, at: int) -> None:
        content = bytearray((folder / name).read_bytes())
        content[at] ^= 1
        (folder / name).write_bytes(content)

    def exchange(first: int, second: int, count: int) -> None:
        """So many bytes at two places of the array in each other's."""
        content = bytearray((folder / "x.npy").read_bytes())
        content[first : first + count], content[second : second + count] = (
            content[second : second + count],
            content[first : first + count],
        )
        (folder / "x.npy").write_bytes(content)

    def without(*names: str) -> None:
        facts = json.loads((folder / "facts.json").read_text())
        (folder / "facts.json").write_text(
            json.dumps(facts | {"arrays": {k: v for k, v in facts["arrays"].items() if k not in names}})
        )

    damages = {
        "nothing": lambda: None,
        "cut": lambda: os.truncate(folder / "x.npy", 300),
        "empty": lambda: os.truncate(folder / "x.npy", 0),
        "one bit": lambda: flip("x.npy", 400),
        "words in another order": lambda: exchange(128, 136, 8),
        "pages in another order": lambda: exchange(0, 4096, 4096),
        "header": lambda: flip("x.npy", 3),
        "header's end": lambda: exchange(10, 127, 1),
        "longer": lambda: (folder / "x.npy").write_bytes((folder / "x.npy").read_bytes() + bytes(8)),
        "without an array": lambda: without("none"),
        "without arrays": lambda: without("none", "x"),
        "gone": (folder / "none.npy").unlink,
        "no facts": (folder / "facts.json").unlink,
        "list": lambda: (folder / "facts.json").write_text("[]"),
        "other": lambda: (folder / "facts.json").write_text('{"arrays": 5}'),
        "deep": lambda: (folder / "facts.json").write_text("[" * 100_000),
    }
    said: list[str] = []
    for damage in damages.values():
        if builds:
            damage()
        for _ in range(2):
            arrays = cached_arrays(tmp_path, "w", FACTS, build, said.append)
            assert np.array_equal(arrays["x"][:], written) and arrays["none"].shape == (0, 2)
    assert len(builds) == len(damages)
    assert sum("is damaged or of another version, and is built again" in line for line in said) == len(damages) - 1
    assert not list(tmp_path.glob("*unfinished*"))


def test_a_disk_that_is_too_small_is_named(tmp_path):
    with small_disk(tmp_path / "disk", 64 << 10) as disk:
        with pytest.raises(
            DataError,
            match=rf"^order-.* cannot be written to {disk}, where .* are free \(.*\); --data-cache-path chooses",
        ):
            cached_arrays(disk, "order", FACTS, lambda say: {"x": np.arange(100_000)}, silent)
        assert [path.suffix for path in disk.iterdir()] == [".lock"], "what was begun is gone"
        assert len(cached_arrays(disk, "order", FACTS, lambda say: {"x": np.arange(1000)}, silent)["x"]) == 1000


def test_without_a_home_the_default_cache_is_a_folder_of_the_users_own(tmp_path, monkeypatch):
    """A home that is no folder is closed to root as well. A root that was asked for is never replaced."""
    (tmp_path / "home").touch()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    said: list[str] = []

    def made(root: Path, what: str = "order") -> list[int]:
        return cached_arrays(root, what, FACTS, lambda say: {"x": np.arange(3)}, said.append)["x"][:].tolist()

    own = tmp_path / "tmp" / f"megazero-{os.getuid()}"
    assert made(default_root()) == made(default_root()) == made(default_root(), "samples") == [0, 1, 2]
    assert (own / "data" / f"{key_of('order', FACTS)}").is_dir()
    told = f"{tmp_path}/home/.cache/megazero: Not a directory; {own}/data takes its place"
    assert [line.startswith(told) for line in said] == [True], "once, when the first content is built there"
    with pytest.raises(DataError, match="Not a directory; name a folder that can be written"):
        made(tmp_path / "home" / "mine")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", dict[int, object]().__getitem__)  # as for a user without an account
    assert made(default_root()) == [0, 1, 2] and len(said) == 1
    own.chmod(0o777)  # what others may write, nobody trains on
    with pytest.raises(DataError, match=r"--data-cache-path .*/megazero: Not a directory; name a folder"):
        made(default_root())


def test_keys_tell_facts_apart():
    assert len({key_of("w", {"a": 1}), key_of("w", {"a": 2}), key_of("v", {"a": 1}), key_of("w", {"b": 1})}) == 4
