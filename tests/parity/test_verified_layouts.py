"""`megazero verify-layout` finds nothing in legal layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megazero.config.parse import parse_run
from megazero.config.schema import LoraConfig, Run
from megazero.verify.proof import prove
from tests.parity import tier_layouts
from tests.parity.layouts import Case, cases
from tests.parity.tier_layouts import NUMBERS, RULES, whole_run
from tests.parity.training import small_model


def assert_equal(run: Run, ranks: int) -> None:
    proof = prove(run, ranks)
    assert proof.equal, (proof.difference, proof.failure)
    assert max(proof.errors.values()) < 1e-9


@pytest.mark.slow
@pytest.mark.layouts(draw=cases, check=0, test=2, all=1000, salt=36)
def test_a_legal_layout_is_equal(case: Case) -> None:
    flags = [*case.model.flags("bf16"), *case.layout_flags(), "--train-iters", "4"]
    assert_equal(parse_run(flags, case.ranks), case.ranks)


@pytest.mark.slow
@pytest.mark.layouts(draw=tier_layouts.cases, check=0, test=2, all=95, salt=37)
def test_a_layout_off_the_device_is_equal(case: tier_layouts.Case, tmp_path: Path) -> None:
    flags = [*small_model(case.layers, heads=case.heads), "--global-batch-size", str(case.batch), "--train-iters", "4"]
    flags += ["--position-embedding", "alibi" if case.tied else "rotary", *RULES[case.rule].split()]
    flags += ["--untie-embeddings-and-output-weights"] * (not case.tied) + ["--hidden-dropout", "0.1"] * case.dropout
    flags += [*NUMBERS[case.numbers].split(), *case.layout_flags(), "--save", str(tmp_path / "saved")]
    whole = whole_run(flags, case.ranks)
    run = parse_run([*flags, *case.budget_flags(whole), *case.offload_flags(tmp_path, whole)], case.ranks)
    if case.lora != "none":  # on a base that the proof makes
        bits = None if case.lora == "whole" else int(case.lora[0])
        run = replace(run, lora=LoraConfig(lora_rank=3, lora_base_bits=bits))
    assert_equal(run, case.ranks)
