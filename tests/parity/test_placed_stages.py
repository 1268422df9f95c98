"""A search that takes parameters off the device, over stages that hold a tied embedding: it is gathered for each use,
and the stages use it at different times.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megazero.config.tiers import Tier, offload_of
from tests.parity.tier_layouts import RATES, tight_budget, whole_run
from tests.parity.training import data_flags, small_model, train, worst

TRAINS = ["--precision", "fp64", "--lr", "1e-2", "--clip-grad", "0.5", "--train-iters", "3", "--global-batch-size", "4"]


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", ["1", "2"])
def test_a_search_shards_parameters_within_each_stage(zero_stage: str, corpus: Path, tmp_path: Path) -> None:
    flags = [*small_model(8, heads=3), "--hidden-size", "48", *TRAINS, *data_flags(corpus, tmp_path / "cache")]
    alone = train(1, [*flags, "--micro-batch-size", "4"])
    layout = ["--pp", "2", "--zero-stage", zero_stage, "--micro-batch-size", "1", "--bucket-size", "500"]
    (tmp_path / "rates.yaml").write_text(RATES)
    budget = tight_budget(whole_run([*flags, *layout], 4), 4, part=0.02)
    search = ["--placement", "auto", "--placement-rates", str(tmp_path / "rates.yaml")]
    found = train(4, [*flags, *layout, *search, "--device-memory-budget", str(budget)])
    assert found.run is not None and offload_of(found.run.parallel.offload_params).tier is not Tier.DEVICE
    differences = worst(found, alone)
    assert all(value < 1e-9 for value in differences.values()), differences
