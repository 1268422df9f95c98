"""What a run asks of the machine is said before it starts; allocator settings are taken, or left as
the user has them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megazero.config.parse import parse_run
from megazero.config.schema import OptimizerConfig, ParallelConfig, Run, TrainerConfig
from megazero.config.source import ConfigError
from megazero.data.progress import silent
from megazero.launch import launch
from megazero.mpu import grid
from megazero.mpu.meeting import Environment
from megazero.system import allocator
from megazero.system import device as devices
from megazero.train import requirements
from megazero.train.prepare import prepare
from tests.data.chats import write_tokenizer
from tests.parity.training import data_flags

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=[True, False], ids=["card", "no card"])
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(devices, "cuda_available", lambda: request.param)
    return bool(request.param)


def test_nothing_is_asked_by_default(card: bool) -> None:
    assert requirements.unmet_requirements(Run()) == []


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("tensorboard", ["--tensorboard-dir", "curves"]),
        ("wandb", ["--wandb", "poems"]),
        ("mlflow", ["--mlflow", "poems"]),
        ("sentencepiece", ["--tokenizer", "sentencepiece", "--tokenizer-path", "t.model"]),
        ("zstandard", ["--tokenizer", "byte", "--instruction-data", "chats.jsonl.zst"]),
    ],
)
def test_a_package_that_is_asked_for_and_not_installed_is_an_error_of_the_configuration(
    package: str, words: list[str], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is prepared, with the other problems; where it is not asked for, nobody misses it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://somewhere")
    data = [] if "--instruction-data" in words else data_flags(corpus, tmp_path / "cache")
    flags = ["--vocab-size", "1003", "--seq-length", "16", "--train-iters", "2", *data]
    asks, does_not = (parse_run([*flags, *more], 1) if more or data else Run() for more in (words, []))
    assert requirements.missing_packages(asks) == []
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ConfigError, match=f"needs the package {package}, which is not installed: pip install .*{package}"
    ) as wrong:
        prepare(asks, 1, silent)
    assert sum(package in problem for problem in wrong.value.problems) == 1, wrong.value.problems
    assert requirements.missing_packages(does_not) == [] and not (tmp_path / "cache").exists()


def test_mlflow_without_a_server_needs_a_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda name: None if name == "alembic" else object())
    run = Run(trainer=TrainerConfig(mlflow="poems"))
    for address, missing in (("", 1), ("sqlite:///a.db", 1), ("http://a", 0), ("databricks", 0), ("file:///a", 0)):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        problems = requirements.missing_packages(run)
        assert len(problems) == missing and all("pip install 'megazero[mlflow]'" in problem for problem in problems)


def test_chats_without_jinja2_are_an_error_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether there are any shows in the data only."""
    write_tokenizer(tmp_path / "tokenizer", "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    data = ["--tokenizer-path", tmp_path / "tokenizer", "--instruction-data", tmp_path / "chats.jsonl"]
    sizes = "--tokenizer hf --seq-length 16 --train-iters 1 --global-batch-size 1 --micro-batch-size 1 --eval-iters 0"
    run = parse_run([*sizes.split(), *map(str, [*data, "--data-cache-path", tmp_path / "c"])], 1)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigError, match="chat templates need the package jinja2: pip install jinja2"):
        prepare(run, 1, silent)


def test_graphs_need_a_card(card: bool) -> None:
    found = requirements.unmet_requirements(Run(parallel=ParallelConfig(cuda_graphs=True)))
    assert len(found) == (0 if card else 1) and all("--cuda-graphs" in line for line in found)


def test_apex_has_to_be_there(card: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(optimizer=OptimizerConfig(optimizer_impl="apex"))
    monkeypatch.setitem(sys.modules, "amp_C", None)
    (found,) = requirements.unmet_requirements(run)
    assert found.startswith("--optimizer-impl apex: ") and ("github.com/NVIDIA/apex" in found) == card
    monkeypatch.setitem(sys.modules, "amp_C", SimpleNamespace(multi_tensor_adam_capturable=print))
    assert len(requirements.unmet_requirements(run)) == (0 if card else 1)


@pytest.mark.parametrize(("value", "problems"), [(None, 0), (":4096:8", 0), (":16:8", 0), (":0:0", 1)])
def test_a_workspace_that_is_not_deterministic_is_refused(
    value: str | None, problems: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "cuda_available", lambda: True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if value is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", value)
    found = requirements.unmet_requirements(Run(trainer=TrainerConfig(deterministic=True)))
    assert len(found) == problems and all(f"CUBLAS_WORKSPACE_CONFIG={value}" in line for line in found)


def test_deterministic_is_set_up_before_anything_computes(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "unset")  # so that what prepare sets is taken back
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    sizes = ["--vocab-size", "1003", "--seq-length", "16", "--train-iters", "2"]
    flags = [*sizes, "--deterministic", *data_flags(corpus, tmp_path / "cache")]
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        prepare(parse_run(flags, 1), 1, silent)
        assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def group_asked_for(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What a process group is asked for with on two ranks of a host with one card. None is made: InterruptedError."""
    asked: dict[str, object] = {}

    def started(*_: object, **settings: object) -> None:
        asked.update(settings)
        raise InterruptedError

    monkeypatch.setattr(devices, "resolve", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(devices, "device_count", lambda _: 1)
    monkeypatch.setattr("megazero.launch.die_with_parent", lambda: None)
    monkeypatch.setattr("megazero.launch.stream_options", lambda *_: None)
    monkeypatch.setattr("torch.distributed.is_backend_available", lambda _: True)
    monkeypatch.setattr("megazero.mpu.meeting.meet", lambda *_: dist.HashStore())
    monkeypatch.setattr("torch.distributed.init_process_group", started)
    return asked


def launched(parallel: ParallelConfig) -> None:
    with launch(Run(parallel=parallel), Environment(0, 0, 2, 2)):
        pass


def test_graphs_with_collectives_on_the_host_are_refused_before_any_group(group_asked_for: dict[str, object]) -> None:
    """--backend auto, and more ranks than cards: gloo."""
    with pytest.raises(ConfigError, match="--cuda-graphs with --tp 2 captures its collectives, which gloo cannot"):
        launched(ParallelConfig(tp=2, cuda_graphs=True))


@pytest.mark.parametrize(("given", "kept"), [(None, "0"), ("1", "1")])
@pytest.mark.usefixtures("group_asked_for")
def test_nccl_does_not_register_memory_that_grows(
    given: str | None, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With captured collectives; what the user has set stays."""
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "unset")  # so that what the test sets is taken back
    monkeypatch.delenv("NCCL_GRAPH_REGISTER") if given is None else monkeypatch.setenv("NCCL_GRAPH_REGISTER", given)
    with pytest.raises(InterruptedError):
        launched(ParallelConfig(tp=2, backend="nccl", cuda_graphs=True))
    assert os.environ["NCCL_GRAPH_REGISTER"] == kept


SHOW = """
import os, sys
from megazero.system.allocator import restart_with_settings, describe
restart_with_settings()
assert "torch" not in sys.modules
print(os.environ.get("PYTORCH_ALLOC_CONF"), "|", os.environ.get("PYTORCH_CUDA_ALLOC_CONF"), "|", describe("cuda"))
"""


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({}, "expandable_segments:True | None | segments that grow"),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, "backend:native | None | torch with backend:native"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "None | backend:native | torch with backend:native"),
        ({"MEGAZERO_ALLOCATOR": "system"}, "None | None | torch's own settings"),
    ],
    ids=str,
)
def test_cuda_memory_grows_in_place_unless_the_user_says_otherwise(given: dict[str, str], shown: str) -> None:
    ours = (*allocator.CUDA_VARIABLES, allocator.VARIABLE, allocator.CHOICE)
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    words: Sequence[str] = (sys.executable, "-c", SHOW)
    done = subprocess.run(words, env={**environment, **given}, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == shown


def test_the_banner_says_how_the_hosts_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(allocator.VARIABLE, allocator.settings())
    assert "glibc keeps" in allocator.describe("cpu")


def test_nccl_makes_communicators_of_their_own(group_asked_for: dict[str, object]) -> None:
    """A bound device would have torch split the world's for each group, which waits for ranks that make none."""
    with pytest.raises(InterruptedError):
        launched(ParallelConfig(pp=2, backend="nccl"))
    assert group_asked_for["timeout"] and group_asked_for.get("device_id") is None


def test_groups_of_nccl_run_before_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their streams have priority, and the options carry the group's timeout, which torch would warn
    about otherwise.
    """
    nccl = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace(max_ctas=-1)))
    monkeypatch.setattr("torch.distributed.ProcessGroupNCCL", nccl, raising=False)
    made = grid.stream_options("nccl", timedelta(seconds=5))
    assert made.is_high_priority_stream is True and made._timeout == timedelta(seconds=5)
    assert grid.stream_options("nccl", None) is not grid.stream_options("nccl", None)  # torch writes into them
    assert grid.stream_options("gloo", None) is None and grid.stream_options("gloo", None, 4) is None
    assert made.config.max_ctas == -1 and grid.stream_options("nccl", None, 4).config.max_ctas == 4
