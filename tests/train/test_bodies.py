"""Ranks that compute with other bodies than rank 0 are named before the first step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fused_ops.attention import trial
from fused_ops.attention.reach import Reach
from fused_ops.attention.selection import AttentionSupport
from fused_ops.attention.trial import AttentionWorkload
from fused_ops.native.library import cpu_library
from megazero.config.parse import parse_run
from megazero.config.source import ConfigError
from megazero.mpu.grid import Axes, build_grid
from megazero.pipeline import build
from megazero.pipeline.build import attention_workload
from megazero.plan.recompute import activation_peaks
from megazero.train import bodies, report
from megazero.train.bodies import bodies_of, note_of_other_bodies, recompute_of_all_ranks
from tests.ranks import run_ranks

FLAGS = ["--num-layers", "2", "--hidden-size", "24", "--num-attention-heads", "3", "--seq-length", "16", "--device"]


def note(rank: int, levels: list[str]) -> tuple[str, dict[str, str]]:
    """What rank `rank` hears where each rank has kernels of its own level."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGAZERO_FUSED", levels[rank])
        run = parse_run([*FLAGS, "cpu"], len(levels))
        own = bodies_of(run, torch.device("cpu"))
        return note_of_other_bodies(own, build_grid(Axes(dp=len(levels)))), own


def test_ranks_of_one_kind_say_nothing() -> None:
    assert [text for text, _ in run_ranks(3, note, ["auto"] * 3)] == [""] * 3


def test_the_first_rank_with_other_bodies_is_named_on_all() -> None:
    if cpu_library("auto") is None:
        pytest.skip("there are no kernels here")
    found = run_ranks(4, note, ["auto", "auto", "reference", "reference"])
    level = found[0][1]["adam"]
    assert level.endswith("kernel") and found[2][1]["adam"] != level
    text = found[0][0]
    assert "2 of 4 ranks" in text and "the first, rank 2 on" in text
    assert f"adam: {found[2][1]['adam']}, here {level}" in text


def chosen(rank: int, size: int, budget: int) -> tuple[str, ...]:
    """What is computed again, or the problems, where only rank 0 has a body that keeps much."""
    flags = [*FLAGS, "cpu", "--attention", "auto" if rank else "softmax", "--vocab-size", "300", "--data-path", "x"]
    run = parse_run([*flags, "--activation-memory-budget", str(budget)], size)
    try:
        return recompute_of_all_ranks(run, build_grid(Axes(dp=size)))
    except ConfigError as error:
        return error.problems


def test_all_ranks_take_the_choice_of_rank_0() -> None:
    run = parse_run([*FLAGS, "cpu", "--attention", "softmax", "--vocab-size", "300", "--data-path", "x"], 2)
    (most,) = activation_peaks(run, Axes(dp=2), "cpu")
    first, second = run_ranks(2, chosen, 2, most - 1)
    assert first == second and first != ("none", "none"), "rank 1 by itself would recompute nothing"
    first, second = run_ranks(2, chosen, 2, most // 100)
    assert first == second and "stage 0 needs" in first[0]


def test_a_body_of_attention_counts() -> None:
    run = parse_run([*FLAGS, "cpu", "--attention", "softmax"], 1)
    assert bodies_of(run, torch.device("cpu"))["attention"] == "products and fused softmax"


def test_kinds_of_layers_with_different_bodies_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64 torch's flash attention computes layers without a window, on every CPU."""
    run, cpu = (
        parse_run([*FLAGS, "cpu", "--position-embedding", "learned", "--precision", "fp64"], 1),
        torch.device("cpu"),
    )
    plain = attention_workload(run)
    kinds: tuple[AttentionWorkload, ...] = (
        plain,
        replace(plain, reach=Reach(4)),
        replace(plain, reach=Reach(6)),
        replace(plain, cap=2.0),
    )
    for module in (bodies, build, report):
        monkeypatch.setattr(module, "attention_workloads", lambda run: kinds)
    softmax, why = "products and fused softmax", "no torch's flash attention: it "
    text = f"torch's flash attention; with a window of 4: {softmax}; with scores up to 2: {softmax}"
    assert bodies_of(run, cpu)["attention"] == text
    about = report._about_ops(run, cpu)
    assert why not in about["attention"]
    assert f"{why}knows no windows" in about["attention with a window of 4"]
    assert f"{why}has no place for a cap" in about["attention with scores up to 2"] and len(about) == 3
    kinds = kinds[1:]
    assert bodies_of(run, cpu)["attention"] == softmax


@pytest.mark.parametrize(("cudnn", "words"), [("", "flash attention, cuDNN's"), ("it failed", "flash attention")])
def test_who_computes_flash_on_a_card_counts(cudnn: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    card = torch.device("cuda", 0)
    run = parse_run([*FLAGS, "cuda", "--attention", "flash", "--position-embedding", "learned", "--bf16"], 1)
    monkeypatch.setattr(bodies, "attention_support", lambda run, device: AttentionSupport("flash", 16, cudnn=cudnn))
    monkeypatch.setattr(bodies, "describe", lambda device, **_: {})
    monkeypatch.setattr(trial, "capability", lambda device: (9, 0))
    assert bodies_of(run, card)["attention"].endswith(words)
