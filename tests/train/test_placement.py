"""--placement auto in real runs: one choice on all ranks, the results of the same flags given by hand, what is told."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

from megazero.checkpoint.format import CheckpointError
from megazero.config.dump import dump
from megazero.config.parse import ConfigError, parse_arguments, parse_run
from megazero.config.placement import FLAGS, ROWS, as_flags
from megazero.config.schema import Run
from megazero.data.progress import silent
from megazero.mpu.axes import axes_of
from megazero.mpu.grid import build_grid
from megazero.plan.step_times import NAMES, MachineRates, read_rates
from megazero.train import checked, placed
from megazero.train.checked import dry_run_text, resolved_on_all_ranks
from megazero.train.job import build_job
from megazero.train.measured_rates import Work, _beside, measured_rates
from megazero.train.prepare import prepare
from tests.parameters import values_of
from tests.parity.training import data_flags, job_on_rank, small_model
from tests.ranks import run_ranks
from tests.train.starts import resolved_for

MODEL = [*small_model(2, heads=4), "--global-batch-size", "4", "--micro-batch-size", "1", "--train-iters", "3"]
MODEL += ["--precision", "bf16", "--bucket-size", "6000"]
NUMBERS = "flops: 1e11\nto_host: 10GB\nto_device: 10GB\nupdate: 40GB\nupdate_host: 2GB\nread: 2GB\nwrite: 1GB\n"
TWO = ["--host-memory-budget", "100MB"]
"""With it a CPU has a budget for each tier, and host memory takes what leaves."""


def searched(folder: Path, *more: str) -> list[str]:
    (folder / "rates.yaml").write_text(NUMBERS)
    return ["--placement", "auto", "--placement-rates", str(folder / "rates.yaml"), *more]


def trained(rank: int, size: int, flags: Sequence[str]) -> tuple[str, Run, list[float], list[list[float]]]:
    """What was chosen, the run, the losses, and the final weights of this rank."""
    job, recorder = job_on_rank(rank, size, list(flags))
    job.fit()
    with job.state.model.reading():
        weights = [piece.values.flatten().tolist() for piece in values_of(nn.ModuleList(job.stages))]
    job.close()
    settings = {**vars(job.run.parallel), **vars(job.run.offload)}
    told = as_flags({row.field: settings[row.field] for row in ROWS.values()})
    return told, job.run, [record.loss for record in recorder.records], weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "budget"), [("--zero-stage 0", "500KB"), ("--zero-stage 2", "400KB"), ("--pp 2", "330KB")]
)
def test_the_choice_is_made_once_and_trains_as_its_flags_do(
    layout: str, budget: str, corpus: Path, tmp_path: Path
) -> None:
    """On two ranks, to the bit. It says no placement any more, but what it has chosen."""
    flags = [*MODEL, *layout.split(), *data_flags(corpus, tmp_path / "cache")]
    found = run_ranks(2, trained, 2, [*flags, *searched(tmp_path, "--device-memory-budget", budget, *TWO)])
    (told, run, _, _), _ = found
    assert "--offload-" in told and run.offload.placement == FLAGS and run.offload.placement_rates is None
    by_hand = run_ranks(2, trained, 2, [*flags, *told.split()])
    for auto, hand in zip(found, by_hand, strict=True):
        assert auto[0] == hand[0] == told
        assert auto[2:] == hand[2:] and len(auto[2]) == 3
    kept = tmp_path / "run.yaml"
    kept.write_text(dump(run))
    assert parse_run(["--config", str(kept)], 2) == run


def refused(rank: int, size: int, flags: list[str]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised:
        job_on_rank(rank, size, flags)
    return raised.value.problems


def test_all_ranks_end_with_one_message_where_nothing_fits(corpus: Path, tmp_path: Path) -> None:
    flags = [*MODEL, *data_flags(corpus, tmp_path / "cache"), *searched(tmp_path, "--device-memory-budget", "9KB")]
    first, other = run_ranks(2, refused, 2, flags)
    assert first == other and first[0].startswith("--device-memory-budget 9,000: no placement keeps to it; the least")


def test_on_a_cpu_the_devices_budget_is_of_all_memory(corpus: Path, tmp_path: Path) -> None:
    """So host memory does not make a run fit."""
    flags = [*MODEL, *data_flags(corpus, tmp_path / "cache"), *searched(tmp_path, "--device-memory-budget", "500KB")]
    (told,) = run_ranks(1, refused, 1, flags)[0]
    assert told.startswith("--device-memory-budget 500,000: it is of all memory of a rank on a CPU, and the placement")


def failed(rank: int, size: int, flags: list[str]) -> str:
    """The error of a search that fails on rank 0, and on no other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placed, "choose_placement", lambda *given: 1 // (size - 2))
        with pytest.raises((ZeroDivisionError, CheckpointError)) as raised:
            job_on_rank(rank, size, flags)
    return f"{type(raised.value).__name__}: {raised.value}"


def test_a_search_that_fails_ends_all_ranks(corpus: Path, tmp_path: Path) -> None:
    first, other = run_ranks(2, failed, 2, [*MODEL, *data_flags(corpus, tmp_path / "cache"), *searched(tmp_path)])
    assert first.startswith("ZeroDivisionError") and "ZeroDivisionError" in other and first != other


def test_a_file_of_rates_is_read_before_anything_starts(corpus: Path, tmp_path: Path) -> None:
    flags = [*MODEL, *data_flags(corpus, tmp_path / "cache"), *searched(tmp_path)]
    (tmp_path / "rates.yaml").write_text("flops: 3\n")
    (problem,) = refused(0, 1, flags)
    assert "rates.yaml: to_host, to_device, update, update_host: missing" in problem


def measured(rank: int, size: int, folder: str) -> dict[str, float]:
    data = ["--vocab-size", "100", "--data-path", "x"]
    run = parse_run([*MODEL, *data, "--placement", "auto", "--nvme-path", folder], size)
    grid, rates = build_grid(axes_of(run, size), "cpu"), list[MachineRates]()

    def measure(*given: Any) -> MachineRates:
        rates.append(measured_rates(*given))
        return rates[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checked, "measured_rates", measure)
        told = resolved_on_all_ranks(resolved_for(run, size), grid, size).placement
    assert told[-1].startswith("rates measured now, in a second: {flops: ") or rank > 0
    return rates[0].plain()


@pytest.mark.slow
def test_all_ranks_get_the_rates_of_the_slowest(tmp_path: Path) -> None:
    first, other = run_ranks(2, measured, 2, str(tmp_path))
    assert first == other and set(first) == set(NAMES)
    assert 0 <= first.pop("beside") <= 1 and first.pop("workspace") >= 0 and min(first.values()) > 0
    assert list(tmp_path.iterdir()) == [], "files of the measurement are removed"


@pytest.mark.parametrize("fails", ["product", "update"])
def test_a_measurement_that_fails_beside_another_ends_both(fails: str) -> None:
    """The updates went on for ever, because the product that failed did not come to its end."""
    updates = 0

    def work(name: str) -> Any:
        nonlocal updates
        updates += name == "update"
        time.sleep(0.001)
        if name == fails or updates >= 1000:
            raise MemoryError(name)

    with pytest.raises(MemoryError, match=fails):
        _beside(Work(lambda: work("product"), 1.0), 1.0, Work(lambda: work("update"), 1.0), 1.0)
    assert updates < 1000


def banner_of(flags: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a run says before its first step, as one line."""
    parsed = parse_arguments(list(flags), 1)
    prepared = prepare(parsed.run, 1, silent)
    build_job(prepared, build_grid(axes_of(prepared.run, 1), "cpu"), parsed=parsed).close()
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_the_banner_has_the_choice_and_a_dry_run_makes_the_same(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The flags, the predicted step, the peak, and the next best."""
    flags = [*MODEL, "--vocab-size", "1003", *data_flags(corpus, tmp_path / "cache")]
    auto = searched(tmp_path, "--device-memory-budget", "500KB", *TWO)
    told = banner_of([*flags, *auto], capsys)
    found = re.search(
        r"placement (--offload-.*?) predicted: a step of [0-9.e-]+ s, of which [0-9.e-]+ s \(\d+%\) are", told
    )
    assert found is not None and re.search(r" takes, of a rank: device [\d.]+ KiB of 488 KiB, fullest at \S+", told)
    assert re.search(r"next best: --.*?: [0-9.e-]+ s, (as long|[\d.]+% longer); \d+ steps were simulated", told)
    (line,) = re.findall(r"rates of \S+, in a second: (\{.*?\})", told)
    (tmp_path / "again.yaml").write_text(line)
    assert read_rates(str(tmp_path / "again.yaml")) == read_rates(str(tmp_path / "rates.yaml")), (
        "a file has what is told"
    )
    both = dry_run_text(parse_arguments([*flags, *auto, "--print-config", "--validate-only"], 1), 1)
    printed, _, verdict = both.partition("OK: 1 rank")
    assert f"placement {found[1]} predicted: a step" in " ".join(verdict.split())
    chosen = parse_run([*flags, *found[1].split()], 1)
    kept, by_hand = (yaml.safe_load(text)["offload"] for text in (printed, dump(chosen)))
    budgets = {"device_memory_budget": 500_000, "host_memory_budget": 100_000_000}
    assert kept == by_hand | budgets
    small = ["--num-layers", "1", "--global-batch-size", "1"]  # with disks there is much more to search
    elsewhere = [*flags, *auto, *small, "--nvme-path", str(tmp_path / "not there"), "--print-config"]
    assert yaml.safe_load(dry_run_text(parse_arguments(elsewhere, 1), 1))["offload"]["placement"] == FLAGS
    unknown = [*flags, "--placement", "auto", "--validate-only"]
    assert "--placement auto: the start measures the machine" in " ".join(
        dry_run_text(parse_arguments(unknown, 1), 1).split()
    )


def test_budgets_that_nothing_keeps_to_are_no_ok(corpus: Path, tmp_path: Path) -> None:
    """Without rates too: what fits follows from bytes. The start says the same."""
    flags = [*MODEL, *data_flags(corpus, tmp_path / "cache"), "--placement", "auto", "--device-memory-budget", "20KB"]
    with pytest.raises(ConfigError, match="--device-memory-budget 20,000: no placement keeps to it") as checked:
        dry_run_text(parse_arguments([*flags, "--validate-only"], 1), 1)
    with pytest.raises(ConfigError) as started:
        job_on_rank(0, 1, flags)
    assert checked.value.problems[0].split(";")[0] == started.value.problems[0].split(";")[0]


@pytest.mark.slow
def test_a_resumed_run_tells_how_its_choice_differs(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*MODEL, *data_flags(corpus, tmp_path / "cache")]
    job, _ = job_on_rank(0, 1, [*flags, "--save", str(tmp_path / "saved"), "--exit-interval", "1"])
    job.fit()
    capsys.readouterr()
    more = ["--device-memory-budget", "500KB", *TWO]
    told = banner_of([*flags, "--load", str(tmp_path / "saved"), *searched(tmp_path, *more)], capsys)
    assert re.search(r" offload-\S+ none cpu", told.split("Changed since the checkpoint")[1])
