"""Adapters go on from their checkpoint on any layout, on the weights they were trained on and no others; and what they
cost in memory.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megazero.config.parse import parse_run
from megazero.config.source import ConfigError
from megazero.convert.native import open_native
from megazero.convert.registry import open_source
from megazero.plan.rank_state import stage_bytes
from megazero.report.banner import banner
from megazero.train.init_from import model_source
from tests.parameters import held_fragments
from tests.parity.training import Outcome, data_flags, job_on_rank, report_of, small_model, train, worst
from tests.ranks import run_ranks

MODEL = [*small_model(4, heads=4), "--init-method-std", "0.1"]
NUMBERS = "--global-batch-size 4 --lr 1e-2 --lora-rank 3 --train-iters 4 --seq-length 12"
SMALL = "--seq-length 12 --precision fp32 --global-batch-size 2"


@pytest.fixture(scope="module")
def base(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    flags = [*MODEL, *SMALL.split(), "--train-iters", "1", *data_flags(corpus, folder)]
    train(1, [*flags, "--save", str(folder / "saved")])
    return folder / "saved"


def flags_for(base: Path, corpus: Path, folder: Path, precision: str) -> list[str]:
    return [*NUMBERS.split(), "--precision", precision, "--init-from", str(base), *data_flags(corpus, folder / "cache")]


@pytest.mark.slow
def test_any_layout_goes_on(base: Path, corpus: Path, tmp_path: Path) -> None:
    flags = flags_for(base, corpus, tmp_path, "fp64")
    whole = train(1, flags)
    train(2, [*flags, "--tp", "2", "--save", str(tmp_path / "saved"), "--exit-interval", "2"])
    load = ["--load", str(tmp_path / "saved")]
    sequence = ["--tp", "2", "--pp", "2", "--sequence-parallel", "--pipeline-schedule", "zb-h1"]
    unnamed = [*MODEL, *(word for word in flags if word not in ("--init-from", str(base)))]
    for ranks, words in (
        (4, [*flags, *sequence, "--async-save", "--save", str(tmp_path / "more")]),
        (2, [*unnamed, "--zero-stage", "2"]),
    ):
        found = train(ranks, [*words, *load])
        rest = Outcome(whole.records[2:], whole.losses, whole.weights)
        assert [record.iteration for record in found.records] == [3, 4]
        assert all(value < 1e-9 for value in worst(found, rest).values()), worst(found, rest)
    with open_native(tmp_path / "more") as one, open_source(tmp_path / "more") as merged, open_source(base) as under:
        assert len(one.entries) == 2 * 4 * 4 and merged.entries.keys() == under.entries.keys()
        files = sorted(path.name for path in (one.path / "peft").iterdir())
        assert files == ["adapter_config.json", "adapter_model.safetensors"], "written beside the run as well"


@pytest.mark.slow
def test_bf16_on_fp32_masters_resumes_to_the_bit(base: Path, corpus: Path, tmp_path: Path) -> None:
    flags = [*flags_for(base, corpus, tmp_path, "bf16"), "--tp", "2"]
    whole, exact = train(2, flags), train(1, flags_for(base, corpus, tmp_path, "fp64"))
    assert worst(whole, exact)["loss"] < 1e-2
    train(2, [*flags, "--save", str(tmp_path / "saved"), "--exit-interval", "2"])
    last = train(2, [*flags, "--load", str(tmp_path / "saved")])
    assert [(r.loss, r.grad_norm) for r in last.records] == [(r.loss, r.grad_norm) for r in whole.records[2:]]
    assert all(torch.equal(values, last.weights[name]) for name, values in whole.weights.items())
    with open_source(base) as source, open_native(tmp_path / "saved") as adapters:
        assert all(torch.equal(source.read(name).bfloat16(), whole.weights[name]) for name in source.entries)
        assert {entry.columns["weight"] for entry in adapters.entries.values()} == {torch.float32}


@pytest.mark.slow
def test_another_base_is_noticed(base: Path, corpus: Path, tmp_path: Path) -> None:
    flags = flags_for(base, corpus, tmp_path, "fp32")
    train(1, [*flags, "--save", str(tmp_path / "saved"), "--exit-interval", "1"])
    other = tmp_path / "other"
    plain = [*MODEL, *data_flags(corpus, tmp_path), "--seed", "8", *SMALL.split()]
    train(1, [*plain, "--train-iters", "1", "--save", str(other)])
    words = [str(other) if word == str(base) else word for word in flags]
    with pytest.raises(RuntimeError, match="the model loaded is not the model saved"):
        train(1, [*words, "--load", str(tmp_path / "saved")])
    with pytest.raises(RuntimeError, match="the checkpoint holds adapters only; to go on with them: --lora-rank 3"):
        train(1, [*plain, "--train-iters", "4", "--load", str(tmp_path / "saved")])
    with pytest.raises(RuntimeError, match="--lora-rank: 3 in the checkpoint, 4 now"):
        train(1, [*flags, "--lora-rank", "4", "--load", str(tmp_path / "saved")])
    with pytest.raises(RuntimeError, match="the checkpoint is of a whole model"):
        train(1, [*flags, "--load", str(other)])


def held(rank: int, size: int, flags: list[str]) -> tuple[dict[str, int], int, str, Tensor]:
    job, _ = job_on_rank(rank, size, flags)
    told = stage_bytes(job.run, job.grid.axes)[job.grid.at.pp]
    trained = torch.tensor([p.numel() for stage in job.stages for p in stage.parameters() if p.requires_grad])
    return (
        job.state.model.bytes(),
        told.total,
        banner(report_of(job)),
        trained,
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["--pp 2 --zero-stage 1", "--tp 2"])
def test_only_adapters_cost_gradients_and_optimizer_state(
    layout: str, base: Path, corpus: Path, tmp_path: Path
) -> None:
    for held_here, told, text, trained in run_ranks(
        2, held, 2, [*flags_for(base, corpus, tmp_path, "bf16"), *layout.split()]
    ):
        adapters = int(trained.sum())
        frozen = held_here.pop("frozen")
        assert frozen > 18 * adapters, "the model is what takes memory"
        # bf16 weights, fp32 gradients, masters and two moments; ZeRO pads a bucket at its end.
        assert 18 * adapters <= sum(held_here.values()) < 18 * (adapters + 64)
        assert told == frozen + sum(held_here.values())
        assert "in adapters of rank 3, alpha 6, on qkv output up down" in " ".join(text.split())


@pytest.mark.slow
def test_a_model_of_no_family_is_saved_without_peft(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    numbers = [*SMALL.split(), "--train-iters", "1", *data_flags(corpus, tmp_path)]
    shape = ["--position-embedding", "alibi", "--norm", "rmsnorm"]
    job_on_rank(0, 1, [*MODEL, *shape, *numbers, "--save", str(tmp_path / "base")])[0].fit()
    job_on_rank(
        0, 1, [*numbers, "--init-from", str(tmp_path / "base"), "--lora-rank", "2", "--save", str(tmp_path / "saved")]
    )[0].fit()
    assert (
        "checkpoints hold no peft/, PEFT's form of the adapters: no model of Hugging Face's" in capfd.readouterr().out
    )
    with open_native(tmp_path / "saved") as adapters:
        assert len(adapters.entries) == 2 * 4 * 4 and not (adapters.path / "peft").exists()


@pytest.mark.slow
def test_a_base_that_is_trained_on_stays_what_it_was(corpus: Path, tmp_path: Path) -> None:
    """Of a folder of checkpoints the adapters belong to the one that was its newest when they began."""
    plain = [*MODEL, *SMALL.split(), *data_flags(corpus, tmp_path)]
    base, saved = str(tmp_path / "base"), str(tmp_path / "saved")
    job_on_rank(0, 1, [*plain, "--train-iters", "2", "--exit-interval", "1", "--save", base])[0].fit()
    tuning = [*flags_for(tmp_path / "base", corpus, tmp_path, "fp32"), "--train-iters", "1"]
    job_on_rank(0, 1, [*tuning, "--save", saved])[0].fit()
    with open_source(Path(saved)) as source:
        before = {name: source.read(name) for name in source.entries}
    job_on_rank(0, 1, [*plain, "--train-iters", "2", "--load", base, "--save", base])[0].fit()
    with open_source(Path(saved)) as source:
        assert all(torch.equal(source.read(name), values) for name, values in before.items())
    again, _ = job_on_rank(0, 1, [*tuning, "--load", saved])
    assert again.run.checkpoint.init_from == str(tmp_path / "base" / "iter_0000001"), (
        "the same command goes on with the same base"
    )
    with pytest.raises(ConfigError, match=f"--save {base}: holds checkpoints up to iter_0000002 of another run"):
        job_on_rank(0, 1, [*tuning, "--save", base])


def test_finetune_takes_the_adapters_and_nothing_else(base: Path, corpus: Path, tmp_path: Path) -> None:
    """--init-from still says what is beneath them."""
    flags = [*flags_for(base, corpus, tmp_path, "fp64"), "--lr", "0", "--eval-iters", "0"]
    first, _ = job_on_rank(0, 1, [*flags_for(base, corpus, tmp_path, "fp64"), "--save", str(tmp_path / "saved")])
    first.fit()
    second, recorder = job_on_rank(
        0, 1, [*flags, "--load", str(tmp_path / "saved"), "--finetune", "--train-iters", "1"]
    )
    assert second.trainer.position.iteration == 0 and second.state.optimizer.step_count.item() == 0
    pairs = [
        zip(*(stage.named_parameters() for stage in stages), strict=True)
        for stages in zip(first.stages, second.stages, strict=True)
    ]
    assert all(torch.equal(one, other) for pair in pairs for (_, one), (_, other) in pair)
    moments = [fragment.columns["exp_avg"] for fragment in held_fragments(second.state.optimizer)]
    assert all(float(values.abs().max()) == 0 for values in moments)
    second.fit()
    assert [record.iteration for record in recorder.records] == [1]


WRONG = {
    "--lora-rank 0 --init-from {base}": "--lora-rank 0: must be",
    "--lora-rank 4": "--lora-rank 4 needs --init-from DIR",
    "--lora-alpha 3": "--lora-alpha 3 has no effect without --lora-rank",
    "--lora-targets qkv": "--lora-targets qkv has no effect without --lora-rank",
    "--lora-rank 4 --init-from {base} --lora-targets qvk": "--lora-targets qvk: known are qkv, output, gate, up, down",
    "--lora-rank 4 --init-from {base} --lora-targets gate": "with --activation gelu-tanh there are qkv, output, up, "
    "down",
    "--lora-rank 4 --init-from {base} --lora-base-bits 5": "--lora-base-bits 5 is not 4 or 8; nearest: 4",
    "--lora-rank 4 --init-from {base} --lora-base-bits 16": "--lora-base-bits 16: must be at least 4 and at most 8",
    "--lora-rank 4 --init-from {base} --extend-vocabulary --vocab-size 1010": "--lora-rank 4 with --extend-vocabulary: "
    "adapters train no embedding",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_flags_are_named(words: str, base: Path, corpus: Path) -> None:
    with pytest.raises(ConfigError) as error:
        parse_run(
            [*words.format(base=base).split(), "--data-path", str(corpus), "--vocab-size", "1003"], 1, model_source
        )
    assert WRONG[words] in str(error.value)


def test_a_base_that_is_gone_is_named(base: Path, corpus: Path, tmp_path: Path) -> None:
    flags = flags_for(base, corpus, tmp_path, "fp32")
    with pytest.raises(ConfigError, match="--init-from"):
        parse_run([str(tmp_path / "nowhere") if word == str(base) else word for word in flags], 1, model_source)
    (tmp_path / "nothing").mkdir()
    words = [*MODEL, *NUMBERS.split(), "--load", str(tmp_path / "nothing"), *data_flags(corpus, tmp_path / "cache")]
    with pytest.raises(
        ConfigError,
        match=r"--lora-rank 3: on which model\? --load .* has no complete checkpoint; name it: --init-from DIR",
    ):
        job_on_rank(0, 1, words)
