"""A run that starts with another run's or program's weights: on every layout the same, and nothing about the model is
guessed.
"""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from megazero.cli.pretrain import train as run_program
from megazero.config.inventory import TABLES
from megazero.config.parse import parse_run
from megazero.config.source import ConfigError
from megazero.convert import registry
from megazero.convert.formats import Format
from megazero.convert.source import Source
from megazero.mpu.axes import Axes
from megazero.mpu.grid import build_grid
from megazero.mpu.meeting import Environment
from megazero.train.init_from import model_source, open_on_all_ranks
from tests.convert.sources import entries_of
from tests.parity.training import Outcome, data_flags, job_on_rank, small_model, train, worst
from tests.ranks import run_ranks

MODEL = small_model(3, heads=12)
UNTIED = [*MODEL, "--position-embedding", "learned", "--untie-embeddings-and-output-weights", "--norm", "rmsnorm"]
UNTIED += ["--ffn-hidden-size", "48", "--activation", "swiglu"]
NUMBERS = ["--precision", "fp64", "--global-batch-size", "12", "--lr", "1e-3", "--seed", "7"]
LAYOUTS = {
    "tp2-pp2": (4, "--tp 2 --pp 2 --zero-stage 1"),
    "tp3-sp-dp2-z2": (6, "--tp 3 --sequence-parallel --zero-stage 2 --bucket-size 700"),
    "pp2-dp2-z1-v2": (4, "--pp 2 --zero-stage 1 --virtual-stages 2 --micro-batch-size 1 --bucket-size 1500"),
    "pp2-zb-v": (2, "--pp 2 --pipeline-schedule zb-v --virtual-stages 2 --micro-batch-size 1"),
}


def flags_for(corpus: Path, base: Path, iterations: int = 2) -> list[str]:
    return [*NUMBERS, *data_flags(corpus, base / "cache"), "--train-iters", str(iterations), "--seq-length", "12"]


@pytest.fixture(scope="module", params=["tied", "untied"])
def checkpoint(request: pytest.FixtureRequest, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of a model with a seed of its own, saved."""
    folder = tmp_path_factory.mktemp(f"saved-{request.param}")
    shape = MODEL if request.param == "tied" else UNTIED
    train(2, [*shape, *flags_for(corpus, folder), "--seed", "99", "--tp", "2", "--save", str(folder / "saved")])
    return folder / "saved"


def grown(values: Tensor, rows: int) -> Tensor:
    """The table with rows that are the mean of those it has."""
    return torch.cat([values, values.double().mean(0, keepdim=True).expand(rows - len(values), -1).to(values.dtype)])


@pytest.mark.slow
def test_every_layout_starts_with_the_checkpoint(checkpoint: Path, corpus: Path, tmp_path: Path) -> None:
    """Nothing but --init-from says what the model is; the weights before the first step are the checkpoint's, bit by
    bit.
    """
    flags = [*flags_for(corpus, tmp_path), "--init-from", str(checkpoint)]
    start = train(1, [*flags, "--lr", "0", "--weight-decay", "0"])
    with registry.open_source(checkpoint) as source:
        assert all(torch.equal(source.read(name), start.weights[name]) for name in source.entries)
        assert start.weights.keys() == source.entries.keys()
    one = train(1, flags)
    # Each kind of embedding on half of the layouts.
    for name, (ranks, layout) in list(LAYOUTS.items())["untied" in str(checkpoint) :: 2]:
        outcome = train(ranks, [*flags, *layout.split()])
        assert all(value < 1e-9 for value in worst(outcome, one).values()), (name, worst(outcome, one))


@pytest.mark.slow
def test_an_extended_vocabulary_starts_as_the_mean(checkpoint: Path, corpus: Path, tmp_path: Path) -> None:
    """Padding that tp 2 adds takes no part in it."""
    more = ["--init-from", str(checkpoint), "--vocab-size", "1100", "--extend-vocabulary"]
    flags = [*flags_for(corpus, tmp_path), *more]
    still = ["--lr", "0", "--weight-decay", "0", "--train-iters", "1"]
    for ranks, layout in ((1, []), (4, ["--tp", "2", "--pp", "2", "--make-vocab-size-divisible-by", "1"])):
        start = train(ranks, [*flags, *layout, *still])
        with registry.open_source(checkpoint) as source:
            for name in source.entries:
                values = source.read(name)
                wanted = grown(values, 1100) if name in TABLES else values
                torch.testing.assert_close(start.weights[name], wanted, rtol=1e-14, atol=0)


def banner_on_rank(rank: int, flags: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as told:
        job_on_rank(rank, 1, flags)
    return told.getvalue()


@pytest.mark.slow
def test_a_resumed_run_goes_on_from_its_own_checkpoint(checkpoint: Path, corpus: Path, tmp_path: Path) -> None:
    base = [*flags_for(corpus, tmp_path, 4), "--init-from", str(checkpoint), "--precision", "bf16"]
    folder = ["--save", str(tmp_path / "mine"), "--load", str(tmp_path / "mine")]
    whole = train(1, base)
    first = train(1, [*base, *folder, "--exit-interval", "2"])
    (banner,) = run_ranks(1, banner_on_rank, [*base, *folder])
    told = "".join(banner.split())
    assert "mine/iter_0000002,iteration2;" in told and f"--init-from{checkpoint}isnotused" in told
    second = train(1, [*base, *folder])
    resumed = Outcome([*first.records, *second.records], second.losses, second.weights)
    assert [record.iteration for record in resumed.records] == [1, 2, 3, 4]
    assert worst(resumed, whole) == {"loss": 0, "grad_norm": 0, "valid": 0, "weights": 0}


def opened_on_rank(rank: int, paths: list[str]) -> str:
    with open_on_all_ranks(paths[rank], build_grid(Axes(dp=2), "cpu")) as source:
        source.read("blocks.0.mlp.up.weight")
        return source.path.name


@pytest.mark.slow
def test_all_ranks_start_with_the_checkpoint_that_rank_0_found(checkpoint: Path, tmp_path: Path) -> None:
    """Another becomes the newest while they look; what a user names stays, which may be called otherwise on a node."""
    for name in ("iter_0000002", "iter_0000004"):
        (tmp_path / name).symlink_to(checkpoint / "iter_0000002")
    (tmp_path / "node").symlink_to(tmp_path, target_is_directory=True)
    one, two = str(tmp_path / "iter_0000002"), str(tmp_path / "iter_0000004")
    assert run_ranks(2, opened_on_rank, [one, two]) == ["iter_0000002", "iter_0000004"]
    assert run_ranks(2, opened_on_rank, [one, str(tmp_path / "node")]) == ["iter_0000002"] * 2
    apart = tmp_path / "apart" / "copy"
    apart.parent.mkdir()
    apart.symlink_to(checkpoint / "iter_0000002")
    assert run_ranks(2, opened_on_rank, [one, str(apart)]) == ["iter_0000002", "copy"]


def test_only_the_blocks_that_are_needed_are_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a tensor of megazero's own format leaves the rest of the file alone."""
    with registry.open_source(checkpoint) as source:
        whole = source.read("blocks.1.mlp.down.weight")
        box = ((3, 9), (5, 17))
        assert torch.equal(source.read_box("blocks.1.mlp.down.weight", box), whole[3:9, 5:17])
        assert torch.equal(Source.read_box(source, "blocks.1.mlp.down.weight", box), whole[3:9, 5:17])


@pytest.mark.parametrize("checkpoint", ["tied"], indirect=True, scope="module")
def test_the_program_checks_it_without_starting(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--init-from", str(checkpoint), "--data-path", "x", "--print-config", "--world-size", "6"]
    run_program([*flags, "--tp", "3", "--global-batch-size", "24"], Environment(0, 0, 1, 1))
    assert yaml.safe_load(capsys.readouterr().out)["model"]["num_layers"] == 3
    with pytest.raises(ConfigError) as wrong:
        run_program([*flags, "--tp", "5", "--num-layers", "9"], Environment(0, 0, 1, 1))
    told = str(wrong.value)
    assert "--tp 5" in told and f"--num-layers 9: the model of --init-from {checkpoint} has 3" in told


def fake_level(shape: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, **data: Any) -> None:
    """Lets --init-from find a checkpoint of a run with these flags, which holds no weights."""
    run = parse_run(shape, 1)
    run = replace(run, data=replace(run.data, **data))
    source = Source("fake", folder, run, entries_of(run.model, {"weight": torch.float32}))
    monkeypatch.setattr(
        registry, "format_table", lambda: {"fake": Format("fake", lambda path: path == folder, lambda path: source)}
    )


def problems(flags: list[str]) -> str:
    with pytest.raises(ConfigError) as error:
        parse_run(flags, 1, model_source)
    return str(error.value)


def test_what_a_flag_says_against_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_level(UNTIED, tmp_path, monkeypatch)
    base = ["--init-from", str(tmp_path), "--data-path", "x"]
    run = parse_run(base, 1, model_source)
    assert run.model == replace(
        parse_run(UNTIED, 1).model,
        num_query_groups=12,
        max_position_embeddings=12,
        **{name: getattr(run.model, name) for name in ("kv_channels", "attention_bias", "mlp_bias")},
    )
    assert parse_run([*base, *UNTIED], 1, model_source) == run, "flags that say the same are no contradiction"
    wrong = {
        "--hidden-size 48": "--hidden-size 48: the model of --init-from .* has 24",
        "--num-layers 4": "--num-layers 4: .* has 3",
        "--ffn-hidden-size 96": "--ffn-hidden-size 96: .* has 48",
        "--preset gpt2-124m": "--num-layers 12: .* has 3",
        "--no-untie-embeddings-and-output-weights": "--untie-embeddings-and-output-weights off: .* has on",
        "--position-embedding rotary": "--position-embedding rotary: .* has learned",
        "--seq-length 13": "--max-position-embeddings 12 is less than --seq-length 13",
        "--max-position-embeddings 20": "--max-position-embeddings 20: .* has 12",
        "--vocab-size 1004": "--vocab-size 1004: .* has 1003 tokens; to add 1: --extend-vocabulary",
        "--vocab-size 1002 --extend-vocabulary": "--vocab-size 1002: .* has 1003 tokens, and none",
        "--extend-vocabulary": "--extend-vocabulary: .* has 1003 tokens; give the new number with a larger --vocab-s",
        "--vocab-size 1004 --extend-vocabulary --lora-rank 2": "--lora-rank 2 with --extend-vocabulary: adapters train "
        "no embedding",
        "--finetune --load y": "--finetune starts with the weights of --load y, --init-from",
    }
    for words, message in wrong.items():
        with pytest.raises(ConfigError, match=message):
            parse_run([*base, *words.split()], 1, model_source)
    assert "needs --data-path" in problems(base[:2])
    assert "no effect without --init-from" in problems(["--extend-vocabulary"])
    with pytest.raises(ConfigError, match="starts from no checkpoint"):
        parse_run(base, 1)


def test_no_checkpoint_there(tmp_path: Path) -> None:
    words = ["--init-from", str(tmp_path), "--data-path", "x", "--tp", "7", "--num-layers", "3"]
    _, only = problems(words).splitlines()
    assert f"--init-from {tmp_path}" in only and "no checkpoint of a known format" in only


def test_a_checkpoint_that_does_not_open_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "base").mkdir(parents=True)
    (tmp_path / "runs" / "bare").mkdir()
    (tmp_path / "runs" / "bare" / "config.json").write_text("{}")
    for given, told in (
        ("runs/base", "--init-from runs/base holds no checkpoint of a known format"),
        ("runs/none/", "--init-from runs/none: there is no such checkpoint"),
        ("runs/bare", "--init-from runs/bare holds no checkpoint of a known format"),
    ):
        (problem,) = model_source(given).problems
        assert problem.startswith(told), problem
        assert ("and no weights (*.safetensors" in problem) == (given == "runs/bare")
    broken = tmp_path / "runs" / "base" / "iter_0000003"
    broken.mkdir()
    (broken / "manifest.json").mkdir()
    assert model_source("runs/base").problems == [
        "--init-from runs/base/iter_0000003/manifest.json cannot be read: Is a directory"
    ]


def test_what_leads_nowhere_is_one_problem(tmp_path: Path) -> None:
    """Links that lead to each other, and a name that only YAML can hold."""
    for name, other in ("ab", "ba"):
        (tmp_path / name).symlink_to(other)
    for path in (str(tmp_path / "a"), f"{tmp_path}/a\0b"):
        (problem,) = model_source(path).problems
        assert problem.startswith(f"--init-from {path}") and len(problem) < 300


def test_the_tokenizer_comes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_level(MODEL, tmp_path, monkeypatch, tokenizer="byte", eod_id=5)
    base = ["--init-from", str(tmp_path), "--data-path", "x"]
    run = parse_run(base, 1, model_source)
    assert (run.data.tokenizer, run.data.eod_id, run.model.seq_length) == ("byte", 5, 384)
    run = parse_run([*base, "--tokenizer", "hf", "--tokenizer-path", "y"], 1, model_source)
    assert (run.data.tokenizer, run.data.tokenizer_path, run.data.eod_id) == ("hf", "y", None)
    assert parse_run([*base, "--tokenizer", "none"], 1, model_source).data.tokenizer is None


def test_two_separators_are_an_error(tmp_path: Path) -> None:
    """One of config.json, another of the tokenizer beside it: neither is taken in silence."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    kind = transformers.GPT2Config(
        vocab_size=12, n_embd=8, n_layer=1, n_head=2, n_positions=16, bos_token_id=3, eos_token_id=3
    )
    transformers.GPT2LMHeadModel(kind).save_pretrained(tmp_path)
    base = ["--init-from", str(tmp_path), "--data-path", "x"]

    def separator(*tokens: str) -> int | None:
        made = tokenizers.Tokenizer(
            tokenizers.models.BPE({f"t{number}": number for number in range(12 - len(tokens))}, [])
        )
        made.add_special_tokens(list(tokens))
        made.save(str(tmp_path / "tokenizer.json"))
        return parse_run(base, 1, model_source).data.eod_id

    assert separator() == 3, "the tokenizer names none"
    with pytest.raises(
        ConfigError, match=r"names 3 \('t3'\) as eos_token_id, and the tokenizer ends a document with 11 \('</s>'\)"
    ):
        separator("</s>")
    for given in ("3", "11", "5"):
        assert parse_run([*base, "--eod-id", given], 1, model_source).data.eod_id == int(given)
    assert parse_run([*base, "--tokenizer", "byte"], 1, model_source).data.eod_id is None
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": 11}))
    assert parse_run(base, 1, model_source).data.eod_id == 11, "both name the same"
