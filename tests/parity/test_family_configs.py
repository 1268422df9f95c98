"""Whatever a configuration of a family says, its folder computes what `transformers` computes: logits, loss and every
gradient, in float64.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import megazero
from megazero.convert.hf.config import read_config
from megazero.model.batch import MicroBatch
from tests.convert.hf_models import in_double, saved
from tests.parameters import assemble, gradients_of, worst_difference
from tests.parity.family_configs import VOCABULARY, Drawn, configs, rewrite_older
from tests.parity.float64 import in_float64
from tests.parity.test_families import alone, in_our_names

ROWS = 2


@pytest.mark.slow
@pytest.mark.layouts(draw=configs, check=0, test=33, all=330, salt=35)
def test_a_drawn_config_equals_transformers(case: Drawn, tmp_path: Path) -> None:
    theirs = in_double(case.case)
    saved(case.case, tmp_path)
    if case.older:
        rewrite_older(tmp_path, case.case, random.Random(case.name))
    generator = torch.Generator().manual_seed(case.length)
    text = torch.randint(VOCABULARY, (ROWS, case.length + 1), generator=generator)
    tokens, labels = text[:, :-1], text[:, 1:].contiguous()

    with in_float64():
        logits = theirs(tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
    with torch.no_grad():
        ours = megazero.load(str(tmp_path), precision="fp64")(tokens)
    assert (ours - logits).abs().max() < 1e-11 * logits.abs().max()

    model = read_config(json.loads((tmp_path / "config.json").read_text()), tmp_path)
    stage = alone(model, case.case.kind, theirs)
    total = stage(None, MicroBatch(tokens, labels, None, torch.arange(ROWS))).sum() / labels.numel()
    assert abs(total.item() - loss.item()) < 1e-11 * loss.item()
    total.backward()
    gradients = assemble([gradients_of(stage)])
    state = {key: parameter.grad for key, parameter in theirs.named_parameters() if parameter.grad is not None}
    apart, worst = worst_difference(gradients, in_our_names(case.case.kind, model, state, [*gradients]))
    assert apart < 1e-9, worst
