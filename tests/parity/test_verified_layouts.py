"""`megazero verify-layout` finds nothing in legal layouts."""

from __future__ import annotations

import pytest

from megazero.config.parse import parse_run
from megazero.verify.proof import prove
from tests.parity.layouts import Case


@pytest.mark.slow
@pytest.mark.layouts(check=0, test=2, all=1000, salt=36)
def test_a_legal_layout_is_equal(case: Case) -> None:
    flags = [*case.model.flags("bf16"), *case.layout_flags(), "--train-iters", "4"]
    proof = prove(parse_run(flags, case.ranks), case.ranks)
    assert proof.equal, (proof.difference, proof.failure)
    assert max(proof.errors.values()) < 1e-9
