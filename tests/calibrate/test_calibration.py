"""`megazero plan --calibrate`: the file that it writes is one that plans take, and what is in the way is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from megazero.calibrate import ranks
from megazero.calibrate.calibration import HEAD, numbers_of_ranks
from megazero.calibrate.effort import Effort
from megazero.cli.main import main
from megazero.cli.plan import arguments, calibrated
from megazero.plan.cluster.hardware import known_hardware
from megazero.plan.cluster.kernels import constants_of

TINY = tuple(
    "--num-layers 1 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --vocab-size 128 --precision fp32".split()
)
SHORT = Effort(ranks=(1, 2), runs=((TINY,),), rounds=1, steps=1, precisions=("fp32",), largest=1 << 16)


def test_an_entry_is_measured_and_a_plan_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "Null"  # lower case means nothing to YAML, if it is not a word
    file = tmp_path / "desk.yaml"
    words = ["--calibrate", str(file), "--gpu", name]
    args, run_flags = arguments().parse_known_args(words)
    status = calibrated(args, run_flags, SHORT)
    told = capsys.readouterr()
    assert status == 0, told.err
    assert told.out.splitlines()[-1].startswith(f"{file}: megazero plan --hardware {file} --gpu null")
    content = yaml.safe_load(file.read_text())
    assert {*content["gpus"]["null"]["ranks"]} == {2}
    alone, shared = (known_hardware(str(file)).cluster("null", count, None, None).device for count in (1, 2))
    assert alone.kind == "cpu" and alone.memory == pytest.approx(2 * shared.memory, rel=1e-3)
    for device in (alone, shared):
        assert device.flops["fp32"] > 1e6 and device.bandwidth > 1e6 and device.read is not None
        assert constants_of(device).launch > 0 and device.constants["context"] > 1e7
    model = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --vocab-size 256 --seq-length 64 --data-path x"
    rest = "--eod-id 0 --global-batch-size 4 --precision fp32 --json"
    assert main(["plan", "--hardware", str(file), "--gpu", "null", "--gpus", "2", *model.split(), *rest.split()]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert best and all(layout["seconds"] > 0 and layout["fits"] for layout in best)


def test_ranks_that_do_not_end_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "MOST_SECONDS", 0.1)  # no rank has imported torch by then
    with pytest.raises(ranks.NotMeasured, match=r"2 ranks on this machine: not done after 0\.1 seconds"):
        ranks.measured(2, tmp_path, SHORT)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "--calibrate {folder}/own.yaml",
            "own.yaml: is there already and is no file of --calibrate; name another file",
        ),
        ("--calibrate {folder}", ": is a folder; name a file"),
        ("--calibrate {folder}/none/here.yaml", "none/here.yaml: there is no such folder"),
        ("--calibrate {folder}/x.yaml --gpu a/b", "--gpu a/b: the name of an entry is of a-z, 0-9"),
        ("--calibrate {folder}/x.yaml --gpus 0", "--gpus 0: this machine is measured with 1 to "),
        ("--calibrate {folder}/x.yaml --json --tp 2", "--json --tp 2: --calibrate takes --gpu NAME, of its entry"),
    ],
)
def test_what_is_in_the_way_is_said_before_anything_is_measured(
    tmp_path: Path, words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.yaml").write_text("sources: {}\n")
    assert main(["plan", *words.format(folder=tmp_path).split()]) == 2
    assert told in capsys.readouterr().err.replace("\n", " ")
    assert (tmp_path / "own.yaml").read_text() == "sources: {}\n" and not (tmp_path / "x.yaml").exists()


def test_an_earlier_entry_may_be_written_again(tmp_path: Path) -> None:
    from megazero.calibrate.calibration import require_calibration

    (tmp_path / "here.yaml").write_text(f"{HEAD} by hand\n")
    require_calibration(tmp_path / "here.yaml", "here", 2)


def test_numbers_of_ranks_are_doublings_up_to_the_last() -> None:
    assert numbers_of_ranks(6) == (1, 2, 4, 6) and numbers_of_ranks(8) == (1, 2, 4, 8) and numbers_of_ranks(1) == (1,)
