"""What a folder may lead to: links of a model's files that leave it are not copied, and names in manifests and trackers
are bare.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megazero.checkpoint.format import MANIFEST, Damaged
from megazero.checkpoint.reader import read_manifest
from megazero.config.schema import CheckpointConfig, DataConfig, Run
from megazero.convert.companions import companions
from megazero.convert.convert import convert
from megazero.convert.files import torch_dist
from megazero.convert.files.torch_dist import DistributedCheckpoint
from megazero.convert.formats import TargetOptions
from megazero.convert.hf.files import weight_files
from megazero.convert.hf.writer import write_hf
from megazero.convert.megatron_deepspeed.folders import checkpoint_folder as deepspeed_folder
from megazero.convert.model_files import model_files
from megazero.convert.native import write_native
from megazero.convert.registry import format_table
from megazero.convert.source import ConversionError
from megazero.convert.universal.consolidated import _told_by
from megazero.convert.universal.folders import checkpoint_folder as universal_folder
from megazero.data.progress import silent
from megazero.data.train_bpe import train_bpe
from megazero.system.names import is_plain_file_name
from tests.convert.sources import BLOOM, made

SECRET = "the key to everything"
LINKED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def linked(tmp_path: Path) -> dict[str, Path]:
    """A model's folder whose files are links to a secret, but for one that is a link to another of its own."""
    (tmp_path / "home").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "home" / "key").write_text(json.dumps({"secret": SECRET}))
    for name in LINKED:
        (tmp_path / "model" / name).symlink_to(tmp_path / "home" / "key")
    (tmp_path / "model" / "own").write_text("mine")
    (tmp_path / "model" / "merges.txt").symlink_to("own")
    return {name: tmp_path / "model" / name for name in (*LINKED, "merges.txt")}


def holds_the_secret(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


@pytest.mark.parametrize("target", ["hf", "megazero", "universal"])
def test_a_link_that_leaves_the_model_is_not_copied(target: str, tmp_path: Path) -> None:
    source = made(companions=linked(tmp_path))
    convert(source, format_table()[target], tmp_path / "new", TargetOptions(), silent)
    assert not holds_the_secret(tmp_path / "new")
    assert [path.read_text() for path in (tmp_path / "new").rglob("merges.txt")] == ["mine"]
    told = "\n".join(source.report.notes)
    assert all(f"{name} is a link to {tmp_path / 'home' / 'key'}" in told for name in LINKED)


def test_nor_into_the_checkpoints_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the folder of such files is itself a link, too."""
    linked(tmp_path)
    write_native(made(), tmp_path / "start", TargetOptions(), lambda count: None)
    (checkpoint,) = (tmp_path / "start").glob("iter_*")
    (checkpoint / "model_files").symlink_to(tmp_path / "home")
    assert companions(checkpoint)["key"].read_text().count(SECRET) == 1
    write = model_files(Run(model=BLOOM, checkpoint=CheckpointConfig(init_from=str(tmp_path / "start"))), None)
    assert write is None and "key is a link to" in capsys.readouterr().err


def test_nor_as_the_tokenizer_of_a_run(tmp_path: Path) -> None:
    linked(tmp_path)
    train_bpe(["a word and another word"], 258, tmp_path / "home" / "bpe", silent)
    (tmp_path / "gpt2").mkdir()
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / "gpt2" / name).symlink_to(tmp_path / "home" / "bpe" / name)
    for kind, path in (("hf", tmp_path / "model"), ("gpt2", tmp_path / "gpt2")):
        source, folder = made(), tmp_path / f"new-{kind}"
        source.run = replace(source.run, data=DataConfig(tokenizer=kind, tokenizer_path=str(path)))
        folder.mkdir()
        write_hf(source, folder, TargetOptions(), lambda count: None)
        assert not list(folder.glob("tokenizer*")) and not list(folder.glob("*.txt"))
        assert any(
            note.startswith("no tokenizer was written") and "is a link to" in note for note in source.report.notes
        )


def test_a_snapshot_in_the_hubs_cache_is_links_of_its_own(tmp_path: Path) -> None:
    home = tmp_path / "models--someone--model"
    for folder in ("blobs", "snapshots/abc"):
        (home / folder).mkdir(parents=True)
    (home / "blobs" / "123").write_text("{}")
    (tmp_path / "key").write_text(json.dumps({"secret": SECRET}))
    (home / "snapshots/abc/tokenizer.json").symlink_to("../../blobs/123")
    (home / "snapshots/abc/vocab.json").symlink_to(tmp_path / "key")
    source = made(companions={name: home / "snapshots/abc" / name for name in ("tokenizer.json", "vocab.json")})
    convert(source, format_table()["universal"], tmp_path / "new", TargetOptions(), silent)
    assert [path.name for path in (tmp_path / "new" / "model_files").iterdir()] == ["tokenizer.json"]


def _latest(name: str, word: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_text(word + "\n")

    return write


def _index(word: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": word}}))

    return write


@pytest.mark.parametrize("word", ["../outside", "/etc", "..", ".", "a/../../outside", "a\\b"])
@pytest.mark.parametrize(
    ("write", "read"),
    [
        (lambda word: _latest("latest", word), deepspeed_folder),
        (lambda word: _latest("latest_universal", word), universal_folder),
        (lambda word: _latest("latest", word), _told_by),
        (_index, weight_files),
    ],
    ids=["latest", "latest_universal", "latest of consolidated", "index of safetensors"],
)
def test_names_in_other_programs_files_are_bare(write, read, word: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write(word)(folder)
    with pytest.raises(ConversionError, match="names '" + re.escape(word.replace("\\", "\\\\"))):
        read(folder)


def test_a_word_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "latest_universal").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConversionError, match="names "):
        universal_folder(tmp_path)


@pytest.mark.parametrize("name", ["../fragments", "/etc/passwd", "sub/fragments", ""])
def test_names_in_our_manifest_are_bare(name: str, tmp_path: Path) -> None:
    """Its hash does not help: who writes the name writes the hash."""
    write_native(made(), tmp_path / "run", TargetOptions(), lambda count: None)
    (folder,) = (tmp_path / "run").glob("iter_*")
    manifest = read_manifest(folder)
    manifest.files[0] = replace(manifest.files[0], name=name)
    (folder / MANIFEST).write_bytes(manifest.encode())
    with pytest.raises(Damaged, match=f"names '{name}'"):
        read_manifest(folder)


@pytest.mark.parametrize("name", ["../outside", "sub/outside", "/etc/passwd"])
def test_names_in_a_distributed_checkpoint_are_bare(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.convert.distributed import save

    save({"a": torch.ones(3)}, tmp_path / "dist", {})
    assert DistributedCheckpoint(tmp_path / "dist").read("a").sum() == 3
    read = torch_dist.unpickle

    def renamed(*words):
        metadata = read(*words)
        for info in metadata.get("storage_data").values():
            info.state["relative_path"] = name
        return metadata

    monkeypatch.setattr(torch_dist, "unpickle", renamed)
    with pytest.raises(ConversionError, match="which is no file of the checkpoint's folder"):
        DistributedCheckpoint(tmp_path / "dist")


def test_bare_names() -> None:
    assert all(map(is_plain_file_name, ("a", "model-00001-of-00002.safetensors", ".metadata", "...", "Größe")))
    assert not any(map(is_plain_file_name, ("", ".", "..", "a/b", "/a", "a\0", "a" * 256, None, 3)))
