"""--ema-decay: the average of the weights, against one process in float64 that has the model, Adam and the average
written out in plain torch; where it rests, what a skipped step leaves, and how it goes on from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megazero.checkpoint.api import Checkpoint
from megazero.config.source import ConfigError
from megazero.convert.convert import convert
from megazero.convert.formats import TargetOptions
from megazero.convert.registry import format_table, open_source
from megazero.data.progress import silent
from tests.parameters import assemble, held_fragments, values_of
from tests.parity.training import data_flags, job_on_rank, small_model, train
from tests.parity.ways import FP16, Way

LAYERS, HEADS, WIDTH, STEPS, BATCH, DECAY, LR = 2, 2, 24, 4, 4, 0.6, 1e-2
MODEL = [*small_model(LAYERS, heads=HEADS), "--make-vocab-size-divisible-by", "1"]
TRAINS = f"--train-iters {STEPS} --global-batch-size {BATCH} --micro-batch-size 1"
SAVES = "--save-interval 1 --keep-last 0 --save"
KEEPS = f"--ema-decay {DECAY}"
PLAINLY = f"--position-embedding learned --activation gelu --lr {LR} --lr-decay-style constant --adam-eps 1e-5"
EXACT = "--precision fp64 --no-embedding-layernorm --untie-embeddings-and-output-weights --clip-grad 0"
SMALL = "--nvme-buffer-bytes 600KB"
"""Buffers of several parts a bucket."""
Weights = dict[str, Tensor]
Flags = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def flags_of(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Flags:
    """The flags of the model in these words, and of its data."""
    data = data_flags(corpus, tmp_path_factory.getbasetemp() / "cache")
    return lambda words: [*MODEL, *data, *TRAINS.split(), *words.split()]


@pytest.fixture(scope="module")
def begun(flags_of: Flags) -> tuple[Weights, list[tuple[Tensor, Tensor]]]:
    """The initial weights, and (tokens, labels) of each step, [b, s]."""
    job, _ = job_on_rank(0, 1, flags_of(f"{EXACT} {PLAINLY}"))
    weights = assemble([values_of(nn.ModuleList(job.stages))])
    batches = [job.trainer.batches.train.micro_batches(step * BATCH, BATCH) for step in range(STEPS)]
    job.close()
    return weights, [
        (torch.cat([one.tokens for one in step]), torch.cat([one.labels for one in step])) for step in batches
    ]


def loss_of(weights: Weights, tokens: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of the model in plain torch."""

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (WIDTH,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    b, s = tokens.shape
    x = F.embedding(tokens, weights["embedding.word.weight"]) + weights["embedding.position.weight"][:s]
    for at in (f"blocks.{layer}" for layer in range(LAYERS)):
        heads = linear(norm(x, f"{at}.attention_norm"), f"{at}.attention.qkv")
        q, k, v = heads.view(b, s, HEADS, 3, WIDTH // HEADS).permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, WIDTH)
        x = x + linear(mixed, f"{at}.attention.output")
        x = x + linear(F.gelu(linear(norm(x, f"{at}.mlp_norm"), f"{at}.mlp.up")), f"{at}.mlp.down")
    logits = F.linear(norm(x, "head.norm"), weights["head.weight"])
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def averages(
    begun: tuple[Weights, list[tuple[Tensor, Tensor]]], skipped: frozenset[int] = frozenset()
) -> list[tuple[Weights, Weights]]:
    """(weights, their average) after each step of one process."""
    first, batches = begun
    weights = {name: value.clone().requires_grad_() for name, value in first.items()}
    average, after = {name: value.clone() for name, value in first.items()}, []
    decays = [[value for value in weights.values() if (value.dim() == 2) is matrix] for matrix in (True, False)]
    groups = [{"params": own, "weight_decay": decay} for own, decay in zip(decays, (0.1, 0.0), strict=True)]
    adam = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-5)
    for step, batch in enumerate(batches, 1):
        if step not in skipped:
            adam.zero_grad()
            loss_of(weights, *batch).backward()
            adam.step()
            average = {name: DECAY * average[name] + (1 - DECAY) * weights[name].detach() for name in average}
        after.append(({name: value.detach().clone() for name, value in weights.items()}, average))
    return after


def saved(folder: Path, column: str, step: int = STEPS) -> Weights:
    there = Checkpoint(folder / f"iter_{step:07}")
    return {name: there.read(name, column) for name in there.tensors}


def expect(folder: Path, after: list[tuple[Weights, Weights]], steps: Iterable[int]) -> None:
    """The checkpoints of these steps hold the weights and their average."""
    for step in steps:
        for column, expected in zip(("weight", "ema"), after[step - 1], strict=True):
            found = saved(folder, column, step)
            assert found.keys() == expected.keys()
            for name, values in expected.items():
                torch.testing.assert_close(found[name], values, rtol=1e-12, atol=1e-12, msg=f"{column} {name} {step}")
        weights, average = after[step - 1]
        moved = [name for name in weights if not torch.allclose(average[name], weights[name], rtol=1e-3, atol=1e-6)]
        assert len(moved) == len(weights) and all(average[name].any() for name in moved)


NVME = f"--offload-optimizer nvme --nvme-path {{disks}} {SMALL}"
LAYOUTS = {
    "ZeRO-0": "--zero-stage 0",
    "ZeRO-1, late": "--zero-stage 1 --late-update",
    "ZeRO-2, small buckets": "--zero-stage 2 --bucket-size 3000",
    "ZeRO-3": "--zero-stage 3 --bucket-size 3000",
    "tp": "--tp 2",
    "pp": "--pp 2",
    "hybrid shards": "--zero-stage 1 --zero-shard-size 1",
    "host memory, a share": "--zero-stage 1 --offload-optimizer cpu:0.5",
    "disks": f"--zero-stage 2 {NVME}",
    "disks, late": f"--zero-stage 3 --late-update {NVME} --offload-params cpu",
    "each step whole on disks": f"--zero-stage 0 {NVME.replace('nvme ', 'nvme:0.5 ')} --nvme-checkpoint",
    "sums in host memory": "--zero-stage 1 --offload-gradients cpu",
    "host memory": "--zero-stage 3 --offload-optimizer cpu --offload-params cpu",
}


@pytest.mark.sampled(cases=3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_average_of_one_process(
    layout: str, flags_of: Flags, begun: tuple[Weights, list[tuple[Tensor, Tensor]]], tmp_path: Path
) -> None:
    (tmp_path / "disks").mkdir()
    words = f"{EXACT} {PLAINLY} {KEEPS} {SAVES} {tmp_path / 'saved'} {LAYOUTS[layout].format(disks=tmp_path / 'disks')}"
    train(2, flags_of(words))
    expect(tmp_path / "saved", averages(begun), range(1, STEPS + 1))


@pytest.mark.parametrize("layout", ["ZeRO-1, late", "disks"])
def test_a_skipped_step_leaves_the_average(
    layout: str, flags_of: Flags, begun: tuple[Weights, list[tuple[Tensor, Tensor]]], tmp_path: Path
) -> None:
    (tmp_path / "disks").mkdir()
    words = f"{EXACT} {PLAINLY} {KEEPS} {SAVES} {tmp_path / 'saved'} {LAYOUTS[layout].format(disks=tmp_path / 'disks')}"
    outcome = train(2, flags_of(words), way=Way(infinite=frozenset({2})))
    assert [record.iteration for record in outcome.records if record.skipped] == [2]
    expect(tmp_path / "saved", averages(begun, frozenset({2})), (1, 3, 4))  # a skipped step is not saved


@pytest.mark.parametrize(("first", "then"), [("ZeRO-3", "tp"), ("pp", "disks, late"), ("disks", "ZeRO-0")])
def test_the_average_goes_on_in_another_layout(
    first: str, then: str, flags_of: Flags, begun: tuple[Weights, list[tuple[Tensor, Tensor]]], tmp_path: Path
) -> None:
    (tmp_path / "disks").mkdir()
    layouts = [LAYOUTS[layout].format(disks=tmp_path / "disks") for layout in (first, then)]
    folders = [f"{SAVES} {tmp_path / 'a'} --exit-interval 2", f"--load {tmp_path / 'a'} {SAVES} {tmp_path / 'b'}"]
    for words in zip(layouts, folders, strict=True):
        train(2, flags_of(" ".join((EXACT, PLAINLY, KEEPS, *words))))
    expect(tmp_path / "b", averages(begun), range(3, STEPS + 1))


def expect_follows(
    folder: Path, average: Weights, steps: Iterable[int], tolerance: float, skipped: Collection[int] = ()
) -> None:
    """The averages of these steps follow from this one and the weights of their checkpoints."""
    for step in steps:
        weights, after = saved(folder, "weight", step), saved(folder, "ema", step)
        for name, values in weights.items():
            share = 0.0 if step in skipped else 1 - DECAY
            expected = (1 - share) * average[name].double() + share * values.double()
            torch.testing.assert_close(after[name].double(), expected, rtol=tolerance, atol=tolerance, msg=name)
        assert all(not torch.equal(after[name], values) for name, values in weights.items())
        average = after


RULES = {
    "sgd": (EXACT + " --optimizer sgd", 1e-12),
    "bf16": ("--precision bf16", 1e-6),
    "fp16": (FP16, 1e-6),
    "fp32, shares of disks": (f"--precision fp32 {NVME.replace('nvme ', 'nvme:0.5 ')}", 1e-6),
    "adapters": ("--precision fp64 --init-from {base} --lora-rank 2", 1e-12),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_average_follows_every_rule_and_precision(rule: str, flags_of: Flags, tmp_path: Path) -> None:
    words, tolerance = RULES[rule]
    for folder in ("disks", "base"):
        (tmp_path / folder).mkdir()
    if "{base}" in words:
        train(1, flags_of(f"--precision fp64 --exit-interval 1 --save {tmp_path / 'base'}"))
    words = words.format(disks=tmp_path / "disks", base=tmp_path / "base")
    outcome = train(1, flags_of(f"{words} --lr 1e-2 {KEEPS} {SAVES} {tmp_path / 'saved'}"))
    skipped = {record.iteration for record in outcome.records if record.skipped}
    assert len(skipped) == (2 if rule == "fp16" else 0)
    there = Checkpoint(tmp_path / "saved")
    assert {tensor.columns["ema"] for tensor in there.tensors.values()} == {
        torch.float64 if "fp64" in words else torch.float32
    }
    assert ("base" in words) == all("lora" in name for name in there.tensors)
    expect_follows(tmp_path / "saved", saved(tmp_path / "saved", "ema", 1), range(2, STEPS + 1), tolerance, skipped)


@pytest.mark.parametrize("offload", ["", NVME])
def test_an_average_begins_as_the_weights_that_are_loaded(
    offload: str, flags_of: Flags, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "disks").mkdir()
    train(2, flags_of(f"{EXACT} {PLAINLY} --exit-interval 2 --zero-stage 1 --save {tmp_path / 'a'}"))
    words = f"{EXACT} {PLAINLY} {KEEPS} {offload.format(disks=tmp_path / 'disks')} --load {tmp_path / 'a'}"
    for other, changes in (("--finetune", False), ("--no-load-optim", True), ("", True)):
        job, _ = job_on_rank(0, 1, flags_of(f"{words} {other} {SAVES} {tmp_path / 'b'}"))
        told = " ".join(capsys.readouterr().out.split())
        assert "ema begins as these weights" in told and ("ema-decay" in told.partition("Changed")[2]) == changes
        if not offload:
            columns = [fragment.columns for fragment in held_fragments(job.state.optimizer)]
            assert all(torch.equal(held["ema"], held["weight"]) for held in columns)
        if not other:
            job.fit()
        job.close()
    expect_follows(tmp_path / "b", saved(tmp_path / "a", "weight", 2), range(3, STEPS + 1), 1e-12)


def test_an_average_is_left_out_by_a_run_that_keeps_none(
    flags_of: Flags, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = flags_of(f"{EXACT} {PLAINLY} {SAVES} {tmp_path / 'a'}")
    kept = train(1, [*flags, *KEEPS.split()])
    words = f"{EXACT} {PLAINLY} --load {tmp_path / 'a' / 'iter_0000002'} {SAVES} {tmp_path / 'b'}"
    job, _ = job_on_rank(0, 1, flags_of(words))
    told = " ".join(capsys.readouterr().out.split())
    assert "its ema is left out: this run keeps none" in told and "ema-decay" in told.partition("Changed")[2]
    job.fit()
    job.close()
    assert all(
        {*tensor.columns} == {"weight", "exp_avg", "exp_avg_sq"}
        for tensor in Checkpoint(tmp_path / "b").tensors.values()
    )
    for name, values in saved(tmp_path / "b", "weight").items():
        torch.testing.assert_close(values, kept.weights[name], rtol=1e-12, atol=1e-12)


def test_the_average_begins_as_the_weights_of_another_model(flags_of: Flags, tmp_path: Path) -> None:
    """--init-from: it begins as the weights that are read, and takes no average from there."""
    train(1, flags_of(f"{EXACT} {PLAINLY} {KEEPS} --exit-interval 2 --save {tmp_path / 'a'}"))
    train(1, flags_of(f"{EXACT} {PLAINLY} {KEEPS} --init-from {tmp_path / 'a'} {SAVES} {tmp_path / 'b'}"))
    expect_follows(tmp_path / "b", saved(tmp_path / "a", "weight", 2), range(1, STEPS + 1), 1e-12)


def test_whole_steps_on_disks_have_the_average(
    flags_of: Flags, begun: tuple[Weights, list[tuple[Tensor, Tensor]]], tmp_path: Path
) -> None:
    """A run that ends in the middle goes on from its swap files; one that keeps no average cannot, and says why."""
    (tmp_path / "disks").mkdir()
    offload = f"{NVME.format(disks=tmp_path / 'disks').replace('nvme ', 'nvme:0.5 ', 1)} --nvme-checkpoint"
    words = f"{EXACT} {PLAINLY} {offload} --save {tmp_path / 'saved'} --save-interval 4"
    job, _ = job_on_rank(0, 1, flags_of(f"{words} {KEEPS}"))
    for _ in range(2):
        job.trainer.train_step(stop=False)
        job.trainer.after_step()
    job.trainer.whole_steps.wait()
    job.close()
    with pytest.raises(ConfigError, match=r"has iteration 2 of a run with .*ema-decay 0\.6 -> none"):
        job_on_rank(0, 1, flags_of(words))
    again, _ = job_on_rank(0, 1, flags_of(f"{words} {KEEPS}"))
    assert again.trainer.position.iteration == 2
    again.fit()
    again.close()
    expect(tmp_path / "saved", averages(begun), range(STEPS, STEPS + 1))


def test_formats_of_other_programs_have_no_average(flags_of: Flags, tmp_path: Path) -> None:
    train(1, flags_of(f"{EXACT} {PLAINLY} {KEEPS} --optimizer adam --exit-interval 1 --save {tmp_path / 'saved'}"))
    with open_source(tmp_path / "saved") as source:
        assert source.columns == ("weight", "exp_avg", "exp_avg_sq")
        assert source.report.notes == ["ema is not carried over: only a run that resumes has it"]
        assert len(source.report.mapped) == 3 * len(source.entries)
        formats = [one for one in format_table().values() if one.write is not None and one.has_optimizer]
        assert len(formats) > 2
        for one in formats:
            convert(source, one, tmp_path / one.name, TargetOptions(), silent)
            with open_source(tmp_path / one.name) as written:
                assert all("ema" not in entry.columns for entry in written.entries.values()), one.name
