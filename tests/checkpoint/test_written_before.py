"""A checkpoint that megazero wrote on 22 November 2026, before its modules got rooms, opens and goes on as it did.

`before_2026_11` was written after 5 of 10 steps on 8 ranks (tp 2, pp 2, dp 2, ZeRO-1, fp64, dropout, tied embedding),
with its run.yaml. `metrics.jsonl` there has all 10 steps of the same run in one process. It is never written anew.
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.data.pairs import write_pair
from tests.parity.training import train

BEFORE = Path(__file__).parent / "before_2026_11"
FIGURES = ("consumed_samples", "loss", "grad_norm", "lr")


LAYOUTS = {
    "one": (1,),
    "four": (4, "--tp", "2", "--pp", "2", "--zero-stage", "2"),
    "offloaded": (1, "--offload-optimizer", "cpu:0.6", "--nvme-buffer-bytes", "200KB"),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_it_goes_on_with_the_losses_that_it_had(tmp_path: Path, layout: tuple) -> None:
    ranks, *flags = layout
    write_pair(tmp_path / "tokens", [7, 12, 5, 30, 9, 21, 16] * 12, vocab_size=43, seed=5)
    saved = shutil.copytree(BEFORE, tmp_path / "saved")
    run = ["--config", str(saved / "run.yaml"), "--load", str(saved), "--tp", "1", "--pp", "1", "--zero-stage", "0"]
    data = ["--data-path", str(tmp_path / "tokens"), "--data-cache-path", str(tmp_path / "cache"), "--override-data"]
    output = ["--save", str(tmp_path / "new"), "--metrics-file", str(tmp_path / "metrics.jsonl")]
    outcome = train(ranks, [*run, *data, *output, *flags])
    wanted = [json.loads(line) for line in (BEFORE / "metrics.jsonl").read_text().splitlines()][5:]
    assert [record.iteration for record in outcome.records] == [6, 7, 8, 9, 10] == [row["iteration"] for row in wanted]
    for record, row in zip(outcome.records, wanted, strict=True):
        for figure in FIGURES:
            assert float(getattr(record, figure)) == pytest.approx(row[figure], rel=1e-12), (record.iteration, figure)
    assert not Path("written.jsonl").exists(), "the run.yaml's metrics file must not be written where the tests run"
