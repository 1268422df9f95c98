"""A model of Hugging Face's Hub by its name: every command opens it from the cache, a run records its commit, and what
it has written says where the model is.
"""

from __future__ import annotations

import io
import json
from argparse import Namespace
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import megazero
from megazero.cli import convert, data_commands, evaluate, generate, inspect
from megazero.cli.pretrain import train as run_program
from megazero.config.schema import DataConfig
from megazero.config.source import ConfigError
from megazero.convert.formats import TargetOptions
from megazero.convert.hf.writer import write_hf
from megazero.convert.lora.merged import AdaptedSource
from megazero.convert.native import open_native
from megazero.convert.registry import open_source
from megazero.convert.source import ConversionError
from megazero.data.indexed import DataError
from megazero.data.tokenizer import build_tokenizer
from megazero.mpu.axes import Axes
from megazero.mpu.grid import build_grid, single_process_grid
from megazero.mpu.meeting import Environment
from megazero.system import hub
from megazero.train.init_from import open_on_all_ranks
from tests.convert.hub_cache import COMMIT, OTHER, add_to_cache, use_cache
from tests.convert.sources import BLOOM, made
from tests.parity.training import data_flags, job_on_rank
from tests.ranks import run_ranks

TEXT = "The names of the Hub are names of folders, too.\n"
ALONE = Environment(0, 0, 1, 1)


def write_model(folder: Path, vocab_size: int = 1003, layers: int = 2) -> Path:
    """A small BLOOM with the tokenizer of bytes, as transformers has it, and a template beside it."""
    model = made(replace(BLOOM, vocab_size=vocab_size, num_layers=layers))
    model.run = replace(model.run, data=DataConfig(tokenizer="byte"))
    folder.mkdir()
    write_hf(model, folder, TargetOptions(), lambda count: None)
    (folder / "chat_template.json").write_text('{"chat_template": "unused"}')
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def snapshot(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of org/tiny in the only cache."""
    monkeypatch.chdir(tmp_path)
    use_cache(monkeypatch, tmp_path / "cache")
    return add_to_cache(tmp_path / "cache", "org/tiny", model)


def answered(work: Any, *words: str) -> str:
    """What a command that ranks share writes on the standard output, as one rank."""
    args: Namespace = work.parser().parse_args(words)
    out, act = io.StringIO(), generate.generate_on if work is generate else evaluate.evaluate
    with redirect_stdout(out), redirect_stderr(io.StringIO()):
        work.check(args, 1)
        act(args, single_process_grid("cpu"))
    return out.getvalue()


def test_commands_open_a_name(model: Path, snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prompt", "The", "--greedy", "--max-new-tokens", "4"]
    assert answered(generate, "org/tiny", *words) == answered(generate, str(model), *words)
    (tmp_path / "text.txt").write_text(TEXT)
    words = ["--input", "text.txt", "--json"]
    by_name, by_path = (json.loads(answered(evaluate, path, *words)) for path in ("org/tiny", str(model)))
    assert by_name["loss"] == by_path["loss"]
    capsys.readouterr()
    assert inspect.main(["org/tiny", str(model)]) == 0
    assert "the models are the same to the bit" in capsys.readouterr().out
    weights = dict(megazero.load("org/tiny").named_parameters())
    assert all(torch.equal(weights[name], value) for name, value in megazero.load(model).named_parameters())


def test_files_behind_links_of_the_cache_are_copied(model: Path, snapshot: Path, tmp_path: Path) -> None:
    """Into another folder, by the name and by the path in the cache; a link to anything else is not followed."""
    names = {"tokenizer.json", "config.json"}
    (tmp_path / "secret").write_text("{}")
    (snapshot / "vocab.json").symlink_to(tmp_path / "secret")
    (snapshot / "added_tokens.json").symlink_to("../../refs/main")
    for number, path in enumerate(("org/tiny", str(snapshot))):
        assert convert.main([path, "--to", "megazero", "--output", f"new-{number}"]) == 0
        (folder,) = Path(f"new-{number}").rglob("model_files")
        files = {file.name: file.read_bytes() for file in folder.iterdir()}
        assert names <= files.keys() and not {"vocab.json", "added_tokens.json"} & files.keys()
        assert all(files[name] == (model / name).read_bytes() for name in names)


def test_a_tokenizer_by_name(model: Path, snapshot: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    words = ["--input", "text.txt", "--tokenizer", "hf", "--workers", "2", "--append-eod"]
    for prefix, path in (("named", "org/tiny"), ("there", str(model))):
        made_of = [*words, "--output-prefix", prefix, "--tokenizer-path", path]
        assert data_commands.main("prepare-data", made_of) == 0
    for ending in ("bin", "idx"):
        assert Path(f"named.{ending}").read_bytes() == Path(f"there.{ending}").read_bytes()
    assert build_tokenizer("hf", "org/tiny").encode("Zürich") == list("Zürich".encode())
    with pytest.raises(DataError, match="--tokenizer-path: org/none is no folder here, and is not in the cache"):
        build_tokenizer("hf", "org/none")


def test_a_run_records_the_commit(snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--init-from org/tiny --tokenizer hf --tokenizer-path org/tiny@main --eod-id 256 --data-path x"
    run_program([*words.split(), "--print-config"], ALONE)
    settings = yaml.safe_load(capsys.readouterr().out)
    assert settings["checkpoint"]["init_from"] == settings["data"]["tokenizer_path"] == f"org/tiny@{COMMIT}"
    assert settings["model"]["num_layers"] == 2
    run_program("--init-from org/tiny --data-path x --print-config".split(), ALONE)
    data = yaml.safe_load(capsys.readouterr().out)["data"]
    assert (data["tokenizer"], data["tokenizer_path"]) == ("hf", f"org/tiny@{COMMIT}")


def test_what_is_not_there_is_one_error(snapshot: Path, tmp_path: Path) -> None:
    told = f"is no folder here, and is not in the cache of Hugging Face's Hub ({tmp_path / 'cache'}); the Hub was not"
    with pytest.raises(ConfigError) as wrong:
        run_program(["--init-from", "org/none", "--data-path", "x", "--print-config"], ALONE)
    assert wrong.value.problems[0].startswith(f"--init-from org/none {told}")
    assert len([problem for problem in wrong.value.problems if "org/none" in problem]) == 1
    with pytest.raises(ConversionError) as failed:
        megazero.load("org/none")
    assert str(failed.value).startswith(f"org/none {told}")
    for work in (generate, evaluate):
        with pytest.raises(ConfigError) as wrong:
            answered(work, "org/none", *(["--prompt", "a"] if work is generate else ["--data-path", "x"]))
        assert [problem for problem in wrong.value.problems if problem.startswith(f"org/none {told}")]
    assert inspect.main(["org/none"]) == convert.main(["org/none", "--to", "hf", "--output", "new"]) == 2


def test_a_shard_that_is_missing_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    use_cache(monkeypatch, tmp_path / "cache")
    folder = write_model(tmp_path / "sharded")
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    files = {key: names[number % 2] for number, key in enumerate(whole)}
    for name in names:
        save_file({key: whole[key] for key, file in files.items() if file == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    snapshot = add_to_cache(tmp_path / "cache", "org/sharded", folder)
    with open_source(Path("org/sharded")) as source:
        assert source.model.num_layers == 2
    (snapshot / names[1]).unlink()
    with pytest.raises(ConversionError, match=rf"{snapshot} lacks 1 of its 2 files: {names[1]}"):
        megazero.load("org/sharded")


def opened_on_rank(rank: int, cache: Path, words: list[str]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        use_cache(patch, cache)
        with open_on_all_ranks(words[rank], build_grid(Axes(dp=2), "cpu")) as source:
            return source.path.name


def test_of_two_commits_on_a_host_that_of_rank_0_counts(model: Path, snapshot: Path, tmp_path: Path) -> None:
    """As where `main` has moved between the questions of two ranks."""
    add_to_cache(tmp_path / "cache", "org/tiny", model, OTHER, "next")
    for words, commit in ((["org/tiny@next", "org/tiny"], OTHER), (["org/tiny", "org/tiny@next"], COMMIT)):
        assert run_ranks(2, opened_on_rank, tmp_path / "cache", words) == [commit] * 2


def trained_on_rank(rank: int, size: int, cache: Path, flags: list[str]) -> str | None:
    """A run to its end: the name of its start as it is recorded."""
    with pytest.MonkeyPatch.context() as patch:
        use_cache(patch, cache)
        job, _ = job_on_rank(rank, size, flags)
        job.fit()
        job.close()
        return job.run.checkpoint.init_from


@pytest.mark.slow
def test_adapters_say_on_which_commit_they_belong(model: Path, snapshot: Path, corpus: Path, tmp_path: Path) -> None:
    """The run records it, PEFT's file has it, and a resumed run keeps it when `main` moves."""
    words = f"--lora-rank 2 --seq-length 12 --global-batch-size 4 --save {tmp_path}/saved --init-from org/tiny"
    flags = [*words.split(), *data_flags(corpus, tmp_path / "index"), "--train-iters"]
    cache = tmp_path / "cache"
    assert run_ranks(2, trained_on_rank, 2, cache, [*flags, "2"]) == [f"org/tiny@{COMMIT}"] * 2
    with open_native(Path("saved")) as adapters:
        assert {"config.json", "tokenizer.json", "chat_template.json"} <= adapters.companions.keys()
        written = json.loads((adapters.path / "peft" / "adapter_config.json").read_text())
        assert adapters.run.checkpoint.init_from == f"org/tiny@{COMMIT}"
    assert (written["base_model_name_or_path"], written["revision"]) == ("org/tiny", COMMIT)
    add_to_cache(cache, "org/adapters", adapters.path / "peft")
    other = write_model(tmp_path / "other")
    (other / "generation_config.json").write_text('{"max_new_tokens": 3}')
    add_to_cache(cache, "org/tiny", other, OTHER)
    hub._asked.cache_clear()
    resumed = [*flags, "4", "--load", str(tmp_path / "saved"), "--override-opt-param-scheduler"]
    assert run_ranks(1, trained_on_rank, 1, cache, resumed) == [f"org/tiny@{COMMIT}"]
    for path in (Path("saved"), adapters.path / "peft", Path("org/adapters")):
        with open_source(path) as merged:
            assert isinstance(merged, AdaptedSource) and merged.base.path == snapshot
