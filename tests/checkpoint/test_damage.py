"""Whatever byte of a checkpoint is altered, cut off or gone: an error that names file and checkpoint and offers the one
before.
"""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from megazero.checkpoint import format as formats
from megazero.checkpoint import manager
from megazero.checkpoint.format import Damaged
from megazero.checkpoint.manager import find
from megazero.checkpoint.reader import read_manifest
from tests.checkpoint.fakes import Layout
from tests.checkpoint.runs import names, open_run, resumed_at, save_at

WRITTEN = Layout(dp=1, bucket=300)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    checkpoints, state = open_run(folder, "w", WRITTEN)
    checkpoints.claim()
    save_at(checkpoints, state, 10, 20, 30)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "saved"))


def offered(folder: Path, damaged: str, file: str, before: str | None) -> None:
    with pytest.raises(Damaged) as error:
        resumed_at(folder)
    text = str(error.value)
    assert f"checkpoint {folder / damaged} is damaged" in text
    assert file in text
    assert (f"--load {folder / before}" if before else "No earlier one is there") in text


@pytest.mark.slow
def test_every_byte_counts(folder):
    """A flip of one bit, at every tenth byte of the manifest and header and at random in the payload, is found and
    named.
    """
    rng = random.Random(3)
    assert resumed_at(folder) == 30
    newest = folder / "iter_0000030"
    files = names(newest)
    assert len(files) == 2
    for name in files:
        path = newest / name
        raw = path.read_bytes()
        head = len(raw) if name == "manifest.json" else 8 + int.from_bytes(raw[:8], "little")
        spots = [
            *range(16),
            *rng.sample(range(16, head), 60),
            *(rng.randrange(head, len(raw)) for _ in range(40 if head < len(raw) else 0)),
        ]
        for spot in spots:
            path.write_bytes(raw[:spot] + bytes([raw[spot] ^ (1 << rng.randrange(8))]) + raw[spot + 1 :])
            offered(folder, "iter_0000030", name, "iter_0000020")
        path.write_bytes(raw)
    assert resumed_at(folder) == 30


@pytest.mark.parametrize("part", [0.0, 0.001, 0.3, 0.999])
def test_truncated(folder, part):
    for name in names(folder / "iter_0000030"):
        path = folder / "iter_0000030" / name
        raw = path.read_bytes()
        path.write_bytes(raw[: int(len(raw) * part)])
        offered(folder, "iter_0000030", name, "iter_0000020")
        path.write_bytes(raw)


def test_appended_to(folder):
    path = next((folder / "iter_0000030").glob("*.safetensors"))
    path.write_bytes(path.read_bytes() + b"\0")
    offered(folder, "iter_0000030", path.name, "iter_0000020")


def test_deleted(folder):
    for name in names(folder / "iter_0000030"):
        path = folder / "iter_0000030" / name
        raw = path.read_bytes()
        path.unlink()
        offered(folder, "iter_0000030", name, "iter_0000020")
        path.write_bytes(raw)
    assert resumed_at(folder) == 30


def test_what_is_offered_loads_and_is_itself_whole(folder):
    (folder / "iter_0000030" / "manifest.json").unlink()
    next((folder / "iter_0000020").glob("*.safetensors")).unlink()
    offered(folder, "iter_0000030", "manifest.json", "iter_0000010")
    assert resumed_at(folder / "iter_0000010") == 10


def test_of_one_on_the_disks_of_several_nodes_only_the_manifest_is_known(folder, monkeypatch):
    """It would be said to look whole, without a look at any of its files."""
    (folder / "iter_0000030" / "manifest.json").unlink()
    next((folder / "iter_0000020").glob("*.safetensors")).unlink()
    scattered = replace(read_manifest(folder / "iter_0000020"), layout={"places": 2})
    monkeypatch.setattr(manager, "read_manifest", lambda path: scattered)
    with pytest.raises(Damaged) as error:
        raise manager._with_offer(Damaged("it is gone"), folder / "iter_0000030")
    seen = (
        "The one before it has a whole manifest, and files on the disks of 2 nodes, not looked at; to resume from it: "
    )
    assert f"{seen}--load {folder / 'iter_0000020'}" in str(error.value)


def test_nothing_before(folder):
    for iteration in (10, 20):
        shutil.rmtree(folder / f"iter_00000{iteration}")
    (folder / "iter_0000030" / "manifest.json").write_text("{}")
    offered(folder, "iter_0000030", "manifest.json", None)


def test_damage_is_not_passed_over_without_latest(folder):
    (folder / "latest").unlink()
    (folder / "iter_0000030" / "manifest.json").unlink()
    offered(folder, "iter_0000030", "manifest.json", "iter_0000020")


def test_an_earlier_one_can_be_named(folder):
    assert resumed_at(folder / "iter_0000020") == 20
    shutil.rmtree(folder / "iter_0000020")
    with pytest.raises(Damaged, match=r"iter_0000020 is damaged: it is not there.*--load .*iter_0000010"):
        resumed_at(folder / "iter_0000020")


def test_a_file_of_another_checkpoint_is_noticed(folder):
    """Whole in itself, but not what this manifest was written for."""
    one, other = (next((folder / name).glob("*.safetensors")) for name in ("iter_0000030", "iter_0000020"))
    shutil.copy(other, one)
    offered(folder, "iter_0000030", one.name, "iter_0000020")


def test_a_newer_format_is_refused_as_such(folder, monkeypatch):
    path = folder / "iter_0000030" / "manifest.json"
    manifest = read_manifest(path.parent)
    monkeypatch.setattr(formats, "VERSION", 2)
    path.write_bytes(manifest.encode())
    monkeypatch.undo()
    with pytest.raises(ValueError, match="format version 2; this program reads version 1"):
        find(folder)


def test_nothing_is_unpickled():
    room = Path(find.__code__.co_filename).parent
    for path in room.glob("*.py"):
        text = path.read_text()
        assert "import pickle" not in text and "torch.load" not in text and "torch.save" not in text, path
