"""Adapters on a base that is stored as codes: the same on every layout, equal to a base that has the decoded numbers,
and to PEFT on bitsandbytes; the bytes that it takes; and what a checkpoint keeps of it.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fused_ops.coded import CodedBox, decode, encode, pack
from megazero.convert.native import open_native
from megazero.convert.registry import open_source
from megazero.plan.rank_state import stage_bytes
from megazero.report.banner import banner
from tests.lora.families import saved_base, their_base, with_adapters
from tests.lora.test_layouts import bases, flags_for, is_adapter
from tests.lora.test_peft import peft_steps, share_one_a
from tests.parity.training import Outcome, data_flags, job_on_rank, report_of, train, worst
from tests.plan.test_step_memory import MODEL, Held, held_on_rank
from tests.ranks import run_ranks
from tests.tables import rows

__all__ = ["bases"]
BITS = {"tied": 4, "gated": 8}
LAYOUTS = {
    name: (shape, int(ranks), words)
    for name, shape, ranks, words in rows("""
tp2-pp2-dp2-z3 | tied | 8 | --tp 2 --pp 2 --zero-stage 3
tp4-sp-recompute | gated | 4 | --tp 4 --sequence-parallel --micro-batch-size 4 --recompute-granularity full
tp2-dp2-z3-step | gated | 4 | --tp 2 --zero-stage 3 --zero3-regather step --zero3-gathered-bytes 160KB
tp2-sp-pp2-zb-h1 | tied | 4 | --tp 2 --sequence-parallel --pp 2 --pipeline-schedule zb-h1
dp4-z2-hybrid | gated | 4 | --zero-stage 2 --zero-shard-size 2 --bucket-size 300 --micro-batch-size 1
pp2-dp2-z3-interleaved-late | tied | 4 |
    --pp 2 --zero-stage 3 --virtual-stages 2 --micro-batch-size 1 --no-overlap --recompute-granularity selective
dp2-z1 | tied | 2 | --zero-stage 1 --micro-batch-size 3
""")
}


def is_matrix(name: str) -> bool:
    """The weights of linear layers of blocks."""
    return name.startswith("blocks.") and name.endswith(".weight") and "norm" not in name


def rounded(values: Tensor, bits: int) -> Tensor:
    """The numbers of a whole matrix after encoding and decoding."""
    box = CodedBox.of(tuple(values.shape), tuple((0, n) for n in values.shape), bits)
    packed = torch.empty(box.nbytes, dtype=torch.uint8)
    pack(encode(values, bits), box, packed)
    return decode(packed, box, torch.empty(box.runs, box.length, dtype=values.dtype)).view(values.shape)


@pytest.fixture(scope="module")
def alone(corpus: Path, bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """On one process, in one micro-batch."""
    folder = tmp_path_factory.mktemp("alone")
    return {
        name: train(
            1,
            [*flags_for(corpus, base, folder), "--micro-batch-size", "12", "--lora-base-bits", str(BITS[name])],
        )
        for name, base in bases.items()
    }


@pytest.mark.slow
@pytest.mark.sampled(cases=3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_trains_on_the_codes_of_one_process(
    layout: str, alone: dict[str, Outcome], bases: dict[str, Path], corpus: Path, tmp_path: Path
) -> None:
    shape, ranks, words = LAYOUTS[layout]
    bits = BITS[shape]
    flags = [*flags_for(corpus, bases[shape], tmp_path), "--lora-base-bits", str(bits), *words.split()]
    found = train(ranks, flags)
    assert all(record.grad_norm > 0.05 for record in found.records), "clipping is to bind"
    assert all(value < 1e-9 for value in worst(found, alone[shape]).values()), worst(found, alone[shape])
    with open_source(bases[shape]) as source:
        for name in source.entries:
            stored = source.read(name)
            expected = rounded(stored, bits) if is_matrix(name) else stored
            assert torch.equal(found.weights[name], expected), name
            assert not is_matrix(name) or not torch.equal(stored, expected)


def families_base(family: str, folder: Path, bits: int) -> tuple[Path, Path]:
    """A model of transformers, and the same with the matrices of its blocks encoded and decoded."""
    base, model = saved_base(family, folder), their_base(folder / family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".h." in name and name.endswith("weight") and "norm" not in name:
                parameter.copy_(rounded(parameter.detach(), bits))
    model.save_pretrained(folder / "rounded")
    return base, folder / "rounded"


FAMILY = (
    "--precision fp64 --lora-rank 3 --seq-length 12 --global-batch-size 4 --micro-batch-size 2 --lr 1e-2 "
    "--weight-decay 0.1 --clip-grad 0.002 --train-iters 3"
)


def family_flags(base: Path, corpus: Path, folder: Path) -> list[str]:
    return [*FAMILY.split(), "--init-from", str(base), *data_flags(corpus, folder / "cache")]


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_a_base_of_their_numbers(bits: int, corpus: Path, tmp_path: Path) -> None:
    """A run on a checkpoint that has these numbers does the same without codes."""
    base, numbers = families_base("bloom", tmp_path, bits)
    found = train(1, [*family_flags(base, corpus, tmp_path), "--lora-base-bits", str(bits)])
    same, exact = (train(1, family_flags(path, corpus, tmp_path)) for path in (numbers, base))
    assert all(value < 1e-12 for value in worst(found, same).values()), worst(found, same)
    assert worst(found, exact)["loss"] > 1e-6


@pytest.mark.slow
def test_adapters_go_on_and_are_merged_with_the_exact_base(
    bases: dict[str, Path], corpus: Path, tmp_path: Path, alone: dict[str, Outcome]
) -> None:
    """On another layout. What is stored holds no base, and the merged model has the base as it is."""
    flags = [*flags_for(corpus, bases["tied"], tmp_path), "--lora-base-bits", "4"]
    saved = tmp_path / "saved"
    train(2, [*flags, "--tp", "2", "--save", str(saved), "--exit-interval", "2"])
    found = train(2, [*flags, "--zero-stage", "3", "--load", str(saved)])
    rest = Outcome(alone["tied"].records[2:], alone["tied"].losses, alone["tied"].weights)
    assert all(value < 1e-9 for value in worst(found, rest).values()), worst(found, rest)
    with open_native(saved) as adapters, open_source(saved) as merged, open_source(bases["tied"]) as base:
        assert adapters.entries.keys() == {name for name in found.weights if is_adapter(name)}
        for name in base.entries:
            if is_matrix(name):
                layer = name.removesuffix(".weight")
                a, b = (adapters.read(f"{layer}.{factor}") for factor in ("lora_a", "lora_b"))
                torch.testing.assert_close(merged.read(name), base.read(name) + 2 * b @ a, rtol=0, atol=1e-12)
            else:
                assert torch.equal(merged.read(name), base.read(name))
    with pytest.raises(RuntimeError, match="--lora-base-bits: 4 in the checkpoint, 8 now"):
        train(1, [*flags, "--lora-base-bits", "8", "--load", str(saved)])


def held(rank: int, size: int, flags: list[str]) -> tuple[Held, dict[str, int], int, str]:
    in_a_step = held_on_rank(rank, size, flags)
    job, _ = job_on_rank(rank, size, flags)
    told = stage_bytes(job.run, job.grid.axes)[job.grid.at.pp]
    return in_a_step, job.state.model.bytes(), told.total, banner(report_of(job))


@pytest.fixture(scope="module")
def small(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags of a run on a saved model of hidden size 64."""
    folder = tmp_path_factory.mktemp("small")
    words = [*MODEL.split(), "--data-path", str(corpus), "--data-cache-path", str(folder), "--global-batch-size", "8"]
    job_on_rank(0, 1, [*words, "--train-iters", "1", "--save", str(folder / "base")])[0].fit()
    return [*words, "--init-from", str(folder / "base"), "--lora-rank", "4"]


MEMORY = (
    (1, "--lora-base-bits 4"),
    (2, "--lora-base-bits 8 --zero-stage 3 --recompute-granularity full"),
    (2, "--lora-base-bits 4 --zero-stage 3 --no-overlap"),
    (2, "--lora-base-bits 4 --tp 2"),
    (2, "--lora-base-bits 8 --zero-stage 1 --zero3-gathered-bytes 1MB"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "words"), MEMORY, ids=[words for _, words in MEMORY])
def test_a_step_takes_what_is_planned(ranks: int, words: str, small: list[str]) -> None:
    """The state to the byte, all of a step to 2 %."""
    flags = [*small, *words.split()]
    for rank, (found, bytes_held, told, text) in enumerate(run_ranks(ranks, held, ranks, flags)):
        assert found.measured == pytest.approx(found.predicted, rel=0.02), (rank, found)
        assert sum(bytes_held.values()) == told
        assert f"codes of {words.split()[1]} bits" in " ".join(text.split())


WIDE: dict[str, dict[str, int]] = {
    "bloom": {"hidden_size": 64, "n_head": 4},
    "llama": {"hidden_size": 64, "intermediate_size": 128, "head_dim": 8},
}
"""Rows of whole blocks: bitsandbytes 0.50 decodes others wrongly on a CPU with AVX-512, though it encodes them well."""


@pytest.mark.slow
@pytest.mark.parametrize("family", WIDE)
def test_steps_equal_those_of_peft_on_bitsandbytes(family: str, corpus: Path, tmp_path: Path) -> None:
    """The same start, the same batches, in fp32: losses and norms of three steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("bitsandbytes")
    from bench.contestants.peft_ import in_four_bits  # imports transformers, which may be absent too

    base = saved_base(family, tmp_path, **WIDE[family])
    more = ["--precision", "fp32", "--lora-base-bits", "4", "--lr-decay-style", "constant"]
    start = [*family_flags(base, corpus, tmp_path), *more]
    train(1, [*start, "--lr", "0", "--save", str(tmp_path / "start"), "--train-iters", "1"])
    with open_native(tmp_path / "start") as found:
        adapter = found.path / "peft"
    job, recorder = job_on_rank(0, 1, start)
    model = their_base(base).float()
    in_four_bits(model.transformer.h if family == "bloom" else model.model.layers, torch.float32)
    tuned = with_adapters(model, adapter, trained=True).train()
    share_one_a(tuned)
    assert any(type(module).__name__ == "Linear4bit" for module in tuned.modules())
    expected = peft_steps(tuned, lambda step: job.trainer.batches.train.micro_batches(step * 4, 4), 3)
    job.fit()
    seen = [(record.loss, record.grad_norm) for record in recorder.records]
    torch.testing.assert_close(seen, expected, rtol=1e-5, atol=0.0)
