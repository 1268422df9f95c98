"""The log: aligned, at most 120 columns, no carriage returns."""

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megazero.telemetry.logline import LogLines, columns, header, line
from megazero.telemetry.record import StepRecord
from megazero.telemetry.tensorboard import TensorBoard
from megazero.telemetry.units import count, duration, size

RECORD = StepRecord(7, 56, 7168, 8.123456, 1.5, 3e-4, 65536.0, False, 8, 0.5, 2048.0, 0.0123, 512 << 20)


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("total", [100, 95367])
def test_lines_are_as_wide_as_their_header(fp16: bool, total: int) -> None:
    shown = columns(total, fp16)
    wide = header(shown)
    records = [
        RECORD,
        replace(RECORD, loss=float("nan"), grad_norm=float("inf"), skipped=True),
        replace(RECORD, iteration=total, loss=12345678.9, grad_norm=1e-30, lr=0.0),
        replace(RECORD, tokens_per_second=9.9995e9, model_tflops_per_rank=912.3),
        replace(RECORD, step_seconds=123456.0, peak_memory_bytes=79 << 30, loss_scale=2.0**-14),
    ]
    for record in records:
        text = line(record, total, shown, 10 * 86400)
        assert len(text.removesuffix("  skipped")) == len(wide), text
        assert len(text) <= 120
        assert text.endswith("skipped") == record.skipped
    assert ("loss scale" in wide) == fp16


def test_log_repeats_its_header_and_ends_with_the_last_step() -> None:
    stream = io.StringIO()
    log = LogLines(10, interval=4, header_every=2, stream=stream)
    for i in range(1, 11):
        log.step(replace(RECORD, iteration=i))
    log.evaluation(10, {"valid_loss": 2.0, "valid_loss/wiki": 3.5})
    printed = stream.getvalue().splitlines()
    assert [text.split()[0] for text in printed] == ["iteration", "4/10", "8/10", "iteration", "10/10", "validation"]
    assert printed[-1] == "validation after iteration 10:   valid_loss 2.0000   valid_loss/wiki 3.5000"
    assert "\r" not in stream.getvalue()
    assert printed[1].endswith("0:00:03")


def test_time_left_forgets_a_slow_first_step_and_knows_the_deadline() -> None:
    def left(**arguments: float) -> str:
        stream = io.StringIO()
        log = LogLines(1000, stream=stream, **arguments)  # type: ignore[arg-type]
        log.step(replace(RECORD, iteration=1, step_seconds=100.0))
        for i in range(2, 41):
            log.step(replace(RECORD, iteration=i, step_seconds=1.0))
        return stream.getvalue().splitlines()[-1].split()[-1]

    assert left() == "0:16:00"
    assert left(seconds_to_deadline=200.0) == "0:01:01"


def test_units() -> None:
    counts = " ".join(map(count, (0, 999, 1000, 12345, 999_600, 176e9, 0.5)))
    assert counts == "0 999 1.00k 12.3k 1.00M 176B 0.50"
    assert ", ".join(map(size, (0, 1023, 1024, 80 * 2**30, 3 * 2**45))) == "0 B, 1023 B, 1.00 KiB, 80.0 GiB, 96.0 TiB"
    assert [duration(s) for s in (-1, 59.6, 3723, 90061)] == ["0:00:00", "0:01:00", "1:02:03", "1d 01:01:01"]


def test_tensorboard_curves_are_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    board.step(RECORD)
    board.evaluation(7, {"valid_loss": 2.0, "valid_loss/wiki": 3.5})
    board.evaluation(7, {"test_loss": 4.5})
    board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Scalars("train/loss")[0].step == 7
    assert events.Scalars("train/loss")[0].value == pytest.approx(RECORD.loss)
    assert events.Scalars("valid/loss")[0].value == 2.0
    assert events.Scalars("valid/wiki")[0].value == 3.5
    assert events.Scalars("test/loss")[0].value == 4.5


def test_without_tensorboard_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        TensorBoard(tmp_path)
