"""Steps become lines: keys, precision, one write a line, torn lines cut, tensors read once per interval."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megazero.telemetry import steplog
from megazero.telemetry.metrics import ForeignFileError, MetricsFile, mend_last_line, why_not_a_metrics_file
from megazero.telemetry.record import Rates, Scalar, StepRecord, StepValues
from megazero.telemetry.steplog import StepLog

RATES = Rates(flops_per_sample=2e9, sequence=128, ranks=4)
KEYS = (
    "iteration consumed_samples consumed_tokens loss grad_norm lr loss_scale skipped global_batch_size step_seconds "
    "tokens_per_second model_tflops_per_rank peak_memory_bytes"
)


def step(iteration: int, loss: float = 1 / 3, **changes: object) -> StepValues:
    values = {
        "iteration": iteration,
        "consumed_samples": 8 * iteration,
        "consumed_tokens": 8 * 128 * iteration,
        "loss": torch.tensor(loss, dtype=torch.float64),
        "grad_norm": torch.tensor(2.5),
        "lr": 3e-4,
        "loss_scale": torch.tensor(65536.0),
        "skipped": torch.tensor(False),
        "global_batch_size": 8,
        "step_seconds": 0.5,
    }
    return StepValues(**(values | changes))  # type: ignore[arg-type]


class Asked:
    """A peak memory that counts how often it is asked for."""

    times = 0

    def __call__(self) -> int:
        self.times += 1
        return 7


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def log_to(path: Path, rates: Rates = RATES, interval: int = 1) -> StepLog:
    return StepLog([MetricsFile(path)], rates, lambda: 4096, interval)


def test_a_line_has_the_contracts_keys_and_full_precision(tmp_path: Path) -> None:
    path = tmp_path / "made" / "metrics.jsonl"
    log = log_to(path)
    log.step(step(1))
    (line,) = lines(path)
    assert " ".join(line) == KEYS
    assert line["loss"] == 1 / 3
    assert line["lr"] == 3e-4
    assert line["skipped"] is False
    assert line["consumed_tokens"] == 1024
    assert line["tokens_per_second"] == 8 * 128 / 0.5
    assert line["model_tflops_per_rank"] == pytest.approx(8 * 2e9 / 0.5 / 4 / 1e12)
    assert line["peak_memory_bytes"] == 4096


def test_mfu_where_the_peak_is_known(tmp_path: Path) -> None:
    log = log_to(tmp_path / "m", Rates(2e9, 128, 4, peak_flops=1e12))
    log.step(step(1))
    assert lines(tmp_path / "m")[0]["mfu"] == pytest.approx(8 * 2e9 / 0.5 / 4 / 1e12)


def test_what_is_computed_again_is_the_hardwares_work_alone(tmp_path: Path) -> None:
    log = log_to(tmp_path / "m", Rates(2e9, 128, 4, peak_flops=1e12, recomputed_per_sample=1e9))
    log.step(step(1))
    (line,) = lines(tmp_path / "m")
    assert line["mfu"] == pytest.approx(8 * 2e9 / 0.5 / 4 / 1e12)
    assert line["hardware_tflops_per_rank"] == pytest.approx(8 * 3e9 / 0.5 / 4 / 1e12)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_are_null(tmp_path: Path, value: float) -> None:
    log = log_to(tmp_path / "m")
    log.step(step(1, loss=value, grad_norm=torch.tensor(value), skipped=torch.tensor(True)))
    log.evaluation(1, {"valid_loss": value, "valid_loss/wiki": 2.0})
    first, second = lines(tmp_path / "m")
    assert first["loss"] is None and first["grad_norm"] is None and first["skipped"] is True
    assert second == {"iteration": 1, "valid_loss": None, "valid_loss/wiki": 2.0}


def test_lines_wait_for_the_interval_and_are_read_in_one_transfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    real = steplog.read_scalars

    def counted(values: Sequence[Scalar]) -> list[float]:
        reads.append(len(values))
        return real(values)

    monkeypatch.setattr(steplog, "read_scalars", counted)
    log = log_to(tmp_path / "m", interval=3)
    for i in range(1, 8):
        log.step(step(i, loss=float(i)))
    assert [line["iteration"] for line in lines(tmp_path / "m")] == [1, 2, 3, 4, 5, 6]
    log.flush(durable=True)
    assert [line["loss"] for line in lines(tmp_path / "m")] == [1, 2, 3, 4, 5, 6, 7]
    assert reads == [12, 12, 4]


def test_evaluation_comes_after_the_steps_before_it(tmp_path: Path) -> None:
    log = log_to(tmp_path / "m", interval=10)
    log.step(step(1))
    log.evaluation(1, {"valid_loss": 2.0})
    assert [list(line)[1] for line in lines(tmp_path / "m")] == ["consumed_samples", "valid_loss"]


def test_ranks_without_sinks_read_nothing_but_take_part() -> None:
    asked = Asked()
    log = StepLog([], RATES, asked, 2)
    for i in range(1, 5):
        log.step(step(i, loss_scale=torch.empty((), device="meta")))  # reading a meta tensor would raise
    log.close()
    assert asked.times == 2


def test_close_writes_what_waits_without_communicating(tmp_path: Path) -> None:
    asked = Asked()
    log = StepLog([MetricsFile(tmp_path / "m")], RATES, asked, 10)
    log.step(step(1))
    log.close()
    assert [line["iteration"] for line in lines(tmp_path / "m")] == [1]
    assert asked.times == 0


def test_a_torn_last_line_is_cut_and_the_rest_kept(tmp_path: Path) -> None:
    path = tmp_path / "m"
    log_to(path).step(step(1))
    whole = path.read_bytes()
    for torn in (b"{", b'{"iteration": 2, "lo'):
        path.write_bytes(whole + torn)
        assert why_not_a_metrics_file(path) is None
        log = log_to(path)
        assert path.read_bytes() == whole
        log.close()
    log = log_to(path)
    log.step(step(2))
    assert [line["iteration"] for line in lines(path)] == [1, 2]


def test_a_file_that_is_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(b'{"iteration": 1')
    descriptor = os.open(path, os.O_RDWR)
    assert mend_last_line(descriptor) == 15
    assert mend_last_line(descriptor) == 0
    os.close(descriptor)
    assert path.read_bytes() == b""


def test_a_whole_line_without_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "m"
    log_to(path).step(step(1))
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    log_to(path).step(step(2))
    assert [line["iteration"] for line in lines(path)] == [1, 2]


RECORD = b'{"iteration": 1, "loss": 2.5}\n'
FOREIGN = {
    "a text": b"Dear diary,\nit rains",
    "one line": b"it rains",
    "a binary": bytes(range(256)) * 300,
    "a long text in one line": b"x" * 200_000,
    "other records": b'{"name": "a", "iteration": "b"}\n',
    "a deep one": b"[" * 50_000 + b"\n",
    "a text behind metrics": RECORD + b"it rains\n",
    "half a text behind metrics": RECORD + b"it rai",
    "metrics behind a text": b"it rains\n" + RECORD,
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_no_metrics_file_is_refused_and_left_alone(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(FOREIGN[kind])
    assert "is no metrics file" in str(why_not_a_metrics_file(path))
    with pytest.raises(ForeignFileError, match="m: is no metrics file"):
        MetricsFile(path)
    assert path.read_bytes() == FOREIGN[kind]


def test_one_write_per_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    real = os.write
    log = log_to(tmp_path / "m")

    def spied(descriptor: int, data: bytes) -> int:
        written.append(data)
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", spied)
    log.step(step(1))
    log.step(step(2))
    assert [data.count(b"\n") for data in written] == [1, 1]
    assert all(data.endswith(b"\n") for data in written)


def test_a_superseded_job_writes_nothing(tmp_path: Path) -> None:
    owner = {"mine": True}

    def check() -> None:
        if not owner["mine"]:
            raise LookupError("another's")

    file = MetricsFile(tmp_path / "m", check)
    log = StepLog([file], RATES, lambda: 0)
    log.step(step(1))
    (tmp_path / "m").write_bytes((tmp_path / "m").read_bytes() + b"torn")
    owner["mine"] = False
    with pytest.raises(LookupError):
        log.step(step(2))
    with pytest.raises(LookupError):
        MetricsFile(tmp_path / "m", check)  # would cut a line its successor is writing
    assert (tmp_path / "m").read_bytes().endswith(b"torn")


def test_where_nobody_can_say_whose_it_is_lines_wait(tmp_path: Path) -> None:
    """The folder of checkpoints is on a disk that is away for a while; nothing is lost, and nothing
    written meanwhile.
    """
    away: list[OSError] = []
    told: list[str] = []

    def check() -> None:
        for error in away:
            raise error

    file = MetricsFile(tmp_path / "m", check, told.append)
    log = StepLog([file], RATES, lambda: 0)
    log.step(step(1))
    away.append(OSError(116, "Stale file handle"))
    log.step(step(2))
    log.step(step(3))
    assert [line["iteration"] for line in lines(tmp_path / "m")] == [1]
    away.clear()
    log.step(step(4))
    assert [line["iteration"] for line in lines(tmp_path / "m")] == [1, 2, 3, 4]
    assert len(told) == 2 and told[0].startswith(f"WARNING: {tmp_path / 'm'} cannot be written: Stale file handle")


def test_record_leaves_mfu_out_when_unknown() -> None:
    record = StepRecord(1, 1, 1, 1.0, 1.0, 1.0, 1.0, False, 1, 1.0, 1.0, 1.0, 1)
    assert "mfu" not in record.as_json()
