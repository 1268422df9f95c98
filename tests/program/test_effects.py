"""What instructions read and write: found once for all micro-batches, and for lists of equal ranks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megazero.program import effects
from megazero.program.scope import Scope, shared_scope
from tests.program.steps import drawn, step_of


@pytest.mark.parametrize("seed", range(24))
def test_effects_of_every_micro_batch_are_those_of_its_row(seed: int) -> None:
    model = replace(drawn(random.Random(seed)), evaluation=False, micro_batches=4)
    step = step_of(model)
    for role, instructions in step.lists.items():
        shape, chunks = step.shapes[role], model.pp * model.virtual
        shared = shared_scope(shape, chunks, trains=True, border=step.border)
        for i in instructions:
            found = [list(values) for values in effects.effects(i, shared)]
            assert found == [list(values) for values in effects._of_row(i, Scope(shape, chunks, True, step.border))], i
