"""What a model brings beside its tensors stays with it through training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megazero.checkpoint.manager import find
from megazero.config.schema import CheckpointConfig, DataConfig, Run
from megazero.convert.formats import TargetOptions
from megazero.convert.model_files import model_files
from megazero.convert.native import write_native
from megazero.convert.registry import open_source
from tests.convert.sources import BLOOM, made


def written(run: Run, found, folder: Path) -> set[str]:
    write = model_files(run, found)
    if write is None:
        return set()
    folder.mkdir()
    write(folder)
    return {path.name for path in (folder / "model_files").iterdir()}


def test_files_of_the_start_and_of_what_is_resumed(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text(f'"{name}"')
    files = {name: tmp_path / name for name in ("config.json", "tokenizer.json")}
    write_native(made(companions=files), tmp_path / "start", TargetOptions(), lambda count: None)
    with open_source(tmp_path / "start") as source:
        path = str(source.companions["tokenizer.json"])
    run = Run(
        model=BLOOM,
        checkpoint=CheckpointConfig(init_from=str(tmp_path / "start")),
        data=DataConfig(tokenizer="hf", tokenizer_path=path),
    )
    assert written(run, None, tmp_path / "a") == {"config.json", "tokenizer.json"}
    other = replace(run, data=DataConfig(tokenizer="byte"))
    assert written(other, None, tmp_path / "b") == {"config.json"}, (
        "a tokenizer that the run does not use would be wrong there"
    )
    scratch = replace(run, checkpoint=CheckpointConfig())
    assert written(scratch, None, tmp_path / "c") == {"tokenizer.json"}, "its own"
    assert written(replace(scratch, data=DataConfig(tokenizer="byte")), None, tmp_path / "e") == set()
    assert written(scratch, find(tmp_path / "start"), tmp_path / "d") == {"config.json", "tokenizer.json"}


def test_they_are_read_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    write_native(
        made(companions={"config.json": tmp_path / "config.json"}),
        tmp_path / "start",
        TargetOptions(),
        lambda count: None,
    )
    write = model_files(Run(model=BLOOM), find(tmp_path / "start"))
    (tmp_path / "start" / "iter_0000007" / "model_files" / "config.json").unlink()
    (tmp_path / "new").mkdir()
    assert write is not None
    write(tmp_path / "new")
    assert (tmp_path / "new" / "model_files" / "config.json").read_text() == "{}"
