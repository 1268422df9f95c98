"""What a page of runs reads: metrics files, folders of runs, and what follows from them about saves and resumes."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from math import isnan, nan
from pathlib import Path

import pytest

from megazero.config.dump import RUN_FILE
from megazero.report.metrics_lines import UnreadableRun, read_metrics
from megazero.report.run_events import EventKind, attempts, events, superseded
from megazero.report.run_folder import RunOnDisk, read_runs, told_apart
from megazero.report.run_series import kept_rows, series_of
from tests.report.runs_on_disk import loss_of, skipped, step, write_metrics, write_run


def told(run: RunOnDisk, kind: EventKind) -> list[tuple[int, int, str]]:
    return [(e.first, e.last, e.words) for e in events(run, attempts(run.metrics)) if e.kind is kind]


def test_columns_are_the_numbers_of_the_lines(tmp_path: Path) -> None:
    path = write_metrics(tmp_path / "m.jsonl", [step(1), skipped(step(2)), step(3)], evaluate_every=3)
    metrics = read_metrics(path)
    assert list(metrics.columns["iteration"]) == [1, 2, 3] and metrics.steps == 3
    assert metrics.columns["loss"][0] == loss_of(1) and isnan(metrics.columns["loss"][1])
    assert list(metrics.columns["consumed_samples"]) == [8, 16, 24]
    assert metrics.skipped == (1,) and not metrics.torn
    assert "mfu" not in metrics.columns, "no line has it"
    (evaluation,) = metrics.evaluations
    assert (evaluation.iteration, evaluation.row) == (3, 2)
    assert evaluation.losses == {"valid_loss": loss_of(3) + 0.2, "valid_loss/code": loss_of(3) - 0.5}


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_torn_last_line_is_one_that_is_being_written(cut: int, tmp_path: Path) -> None:
    path = write_metrics(tmp_path / "m.jsonl", [step(1), step(2)])
    path.write_bytes(path.read_bytes()[:-cut])
    metrics = read_metrics(path)
    whole = cut == 1  # the line lacks its newline alone
    assert metrics.torn is not whole and metrics.steps == 1 + whole


def test_a_first_line_that_is_torn_begins_as_metrics(tmp_path: Path) -> None:
    path = write_metrics(tmp_path / "m.jsonl", [step(1)])
    path.write_bytes(path.read_bytes()[:9])
    assert read_metrics(path).torn and read_metrics(path).steps == 0
    path.write_text("one line of something else")
    with pytest.raises(UnreadableRun, match="line 1, is no JSON"):
        read_metrics(path)


def test_an_empty_file_is_a_run_that_has_just_begun(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").touch()
    assert read_metrics(tmp_path / "m.jsonl").steps == 0
    (tmp_path / "other.txt").touch()
    for path in (tmp_path / "m.jsonl", tmp_path):
        (run,) = read_runs([path])
        assert run.metrics.path == tmp_path / "m.jsonl"
        assert attempts(run.metrics) == [] and events(run, []) == []


LINE = json.dumps(step(2).as_json())


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("no json", "line 2, is no JSON"),
        ("[1, 2]", "line 2, is no line of a metrics file: it has no whole number `iteration`"),
        ('{"iteration": 2.5, "loss": 1}', "line 2, is no line of a metrics file"),
        ('{"iteration": true}', "line 2, is no line of a metrics file"),
        ('{"iteration": 2, "other": 1}', "line 2, has neither the loss of a step nor that of an evaluation"),
        (
            LINE.replace('"skipped": false', '"skipped": false, "lr": "fast"'),
            "has a string as `lr`, not a number: 'fast'",
        ),
        ('{"iteration": 2, "valid_loss": [3]}', "line 2, has a list as `valid_loss`, not a number"),
        ("[" * 200_000, "line 2, is nested more than"),
        (f'{{"iteration": {"9" * 400}}}', "line 2, is no JSON: it holds a number of 400 digits"),
        ('{"iteration": 2, "name": "' + "x" * 300_000 + '"}', "line 2, has more than 262,144 bytes"),
        ("\udcff\udcfe", "line 2, is no UTF-8"),
    ],
    ids=["text", "list", "half", "true", "other", "words", "evaluation", "deep", "digits", "long", "bytes"],
)
def test_a_line_that_cannot_be_read_is_named_by_its_number(line: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    first = json.dumps(step(1).as_json())
    path.write_bytes(f"{first}\n{line}\n{LINE}\n".encode(errors="surrogateescape"))
    with pytest.raises(UnreadableRun) as refused:
        read_metrics(path)
    assert str(path) in str(refused.value) and sentence in str(refused.value)
    assert len(str(refused.value)) < 400 + len(str(path))


def test_a_resume_is_an_iteration_that_stands_again(tmp_path: Path) -> None:
    path = write_metrics(tmp_path / "m.jsonl", [step(i) for i in (*range(1, 11), *range(7, 15), *range(13, 14))])
    (run,) = read_runs([path])
    processes = attempts(run.metrics)
    assert processes == [range(10), range(10, 18), range(18, 19)]
    assert told(run, EventKind.RESUME) == [
        (7, 7, "goes on behind iteration 6, runs 4 steps again"),
        (13, 13, "goes on behind iteration 12, runs 2 steps again so far"),
    ]
    again = superseded(run.metrics, processes)
    assert again == {6, 7, 8, 9, 16, 17}, "7 to 10 of the first process, 13 and 14 of the second"


def test_a_resume_without_steps_again_shows_in_the_peak_of_memory(tmp_path: Path) -> None:
    small = [replace(step(i), peak_memory_bytes=400_000_000 + i) for i in range(6, 9)]
    (run,) = read_runs([write_metrics(tmp_path / "m.jsonl", [*map(step, range(1, 6)), *small])])
    assert told(run, EventKind.RESUME) == [(6, 6, "goes on behind iteration 5")]
    assert superseded(run.metrics, attempts(run.metrics)) == set()


def test_skips_are_stretches_and_numbers_that_are_not_finite_are_told_apart(tmp_path: Path) -> None:
    scaled = [replace(skipped(step(i)), loss_scale=65536.0 / 2 ** (i - 1)) for i in (1, 2, 3)]
    broken = replace(step(5), loss=nan)
    records = [*scaled, step(4), broken, step(6), skipped(step(7))]
    (run,) = read_runs([write_metrics(tmp_path / "m.jsonl", records)])
    assert told(run, EventKind.SKIP) == [
        (1, 3, "3 steps changed nothing, loss scale 65536 to 16384"),
        (7, 7, "1 step changed nothing"),
    ]
    assert told(run, EventKind.NOT_FINITE) == [(5, 5, "the loss of 1 step that changed the weights")]


def test_a_loss_that_never_was_finite_is_told(tmp_path: Path) -> None:
    records = [replace(step(i), loss=nan) for i in (1, 2)]
    (run,) = read_runs([write_metrics(tmp_path / "m.jsonl", records)])
    assert "loss" not in run.metrics.columns
    assert told(run, EventKind.NOT_FINITE) == [(1, 2, "the loss of 2 steps that changed the weights")]


def test_lines_that_are_missing_are_told(tmp_path: Path) -> None:
    (run,) = read_runs([write_metrics(tmp_path / "m.jsonl", [step(4), step(5), step(8)])])
    assert told(run, EventKind.GAP) == [
        (1, 3, "3 iterations without a line at the begin of the file"),
        (6, 7, "2 iterations without a line"),
    ]


def test_saves_are_the_checkpoints_that_are_there(tmp_path: Path) -> None:
    save = write_run(tmp_path, 40, saved=(20, 40))
    (save / "iter_0000030").mkdir()  # without a manifest: none
    (run,) = read_runs([save])
    assert told(run, EventKind.SAVE) == [
        (20, 20, "iter_0000020, 2023-11-14 22:13:40 UTC"),
        (40, 40, "iter_0000040, 2023-11-14 22:14:00 UTC"),
    ]
    assert run.settings is not None and run.settings["schedule"]["train_length"] == "40 iterations"


def test_the_folder_of_save_the_one_around_it_and_the_file_are_the_same_run(tmp_path: Path) -> None:
    save = write_run(tmp_path / "a", 20, saved=(20,))
    runs = [read_runs([path])[0] for path in (save, tmp_path / "a", tmp_path / "a" / "metrics.jsonl")]
    assert [run.metrics.path.resolve() for run in runs] == [(tmp_path / "a" / "metrics.jsonl").resolve()] * 3
    assert [run.folder for run in runs] == [save] * 3
    with pytest.raises(UnreadableRun, match="is the run of"):
        read_runs([save, tmp_path / "a"])


def test_a_run_that_was_moved_is_found_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run.yaml has relative paths of the folder that it was started in."""
    monkeypatch.chdir(tmp_path)
    write_run(Path("before"), 5)
    write_metrics(tmp_path / "elsewhere" / "metrics.jsonl", [step(1)])
    (tmp_path / "before").rename(tmp_path / "after")
    monkeypatch.chdir(tmp_path / "elsewhere")
    (run,) = read_runs([tmp_path / "after" / "saved"])
    assert run.metrics.path == tmp_path / "after" / "metrics.jsonl" and run.metrics.steps == 5


def test_a_file_beside_a_run_of_another_file_is_not_of_that_run(tmp_path: Path) -> None:
    write_run(tmp_path, 5)
    (run,) = read_runs([write_metrics(tmp_path / "other.jsonl", [step(1)])])
    assert run.folder is None and run.settings is None


def refusal(*paths: Path) -> str:
    with pytest.raises(UnreadableRun) as refused:
        read_runs(paths)
    return str(refused.value)


def test_what_is_no_run_is_refused_with_what_to_give(tmp_path: Path) -> None:
    give = "give the folder of --save, a folder around it, or the file of --metrics-file"
    assert refusal(tmp_path / "none") == f"{tmp_path / 'none'} is not there: {give}"
    assert refusal(tmp_path) == f"{tmp_path} is no folder of a run: {give}"
    picture = tmp_path / "photo.jpg"
    picture.write_bytes(b"\xff\xd8\xff\xe0\n")
    assert f"{picture}, line 1, is no UTF-8" in refusal(picture)
    os.mkfifo(tmp_path / "pipe")
    assert "is a pipe or a device" in refusal(tmp_path / "pipe")


def test_a_run_without_metrics_is_refused_with_the_reason(tmp_path: Path) -> None:
    save = write_run(tmp_path / "a", 5)
    (tmp_path / "a" / "metrics.jsonl").unlink()
    assert f"its --metrics-file {tmp_path / 'a' / 'metrics.jsonl'} is not there any more" in refusal(save)
    assert refusal(tmp_path / "a") == refusal(save), "from the folder around it, too"
    settings = (
        (save / RUN_FILE).read_text().replace(f"metrics_file: {tmp_path / 'a' / 'metrics.jsonl'}", "metrics_file: null")
    )
    (save / RUN_FILE).write_text(settings)
    assert "ran without --metrics-file, so its steps are recorded nowhere" in refusal(save)
    (save / RUN_FILE).write_text("- 1\n")
    assert refusal(save) == f"{save / RUN_FILE} holds no settings of a run"


def test_a_folder_of_several_runs_is_refused_with_their_names(tmp_path: Path) -> None:
    for name in "ab":
        write_run(tmp_path / name, 5)
        (tmp_path / name / "metrics.jsonl").rename(tmp_path / f"{name}.jsonl")
    assert (
        refusal(tmp_path) == f"{tmp_path} holds several runs; name one: {tmp_path / 'a.jsonl'}, {tmp_path / 'b.jsonl'}"
    )


def test_names_are_as_short_as_they_can_be() -> None:
    assert told_apart([Path("/x/runs/mine")]) == ["runs/mine"]
    assert told_apart([Path("/x/a/saved"), Path("/x/b/saved")]) == ["a", "b"]
    assert told_apart([Path("/x/a/saved"), Path("/x/b/other")]) == ["saved", "other"]
    assert told_apart([Path("/x/1/a/s"), Path("/x/2/a/s"), Path("/x/2/b/s")]) == ["1/a", "2/a", "2/b"]


def test_a_long_run_is_thinned_to_steps_that_there_are(tmp_path: Path) -> None:
    records = [step(i) for i in range(1, 401)]
    records[123] = replace(records[123], loss=99.0)
    records[287] = replace(records[287], grad_norm=77.0)
    (run,) = read_runs(
        [write_metrics(tmp_path / "m.jsonl", [*records, *map(step, range(390, 411))], evaluate_every=50)]
    )
    processes = attempts(run.metrics)
    rows, together = kept_rows(run.metrics, [process.start for process in processes], 100)
    assert len(rows) <= 104 and together == 17 and {0, 123, 287, 400, 420} <= set(rows)
    series, _ = series_of(run, processes, events(run, processes), 100)
    assert list(series.columns["iteration"]) == [run.metrics.columns["iteration"][row] for row in rows]
    assert max(series.columns["loss"]) == 99.0 and rows[series.starts[1]] == 400
    hours = run.metrics.columns["step_seconds"]
    assert series.columns["hours"][-1] == pytest.approx(sum(hours) / 3600), "of all steps, not of those that are kept"


def test_evaluations_that_were_made_again_are_there_once(tmp_path: Path) -> None:
    (run,) = read_runs([write_metrics(tmp_path / "m.jsonl", [*map(step, range(1, 51)), *map(step, range(31, 61))], 20)])
    assert [each.iteration for each in run.metrics.evaluations] == [20, 40, 40, 60]
    processes = attempts(run.metrics)
    series, together = series_of(run, processes, [], 1000)
    points = series.points["valid_loss"]
    assert together == 1 and list(points.axes["iteration"]) == [20, 40, 60]
    assert list(points.axes["consumed_samples"]) == [160, 320, 480]
    assert list(points.axes["hours"]) == [series.columns["hours"][row] for row in (19, 59, 79)], "of the second 40"
    assert points.values == [loss_of(i) + 0.2 for i in (20, 40, 60)]


def test_an_evaluation_goes_with_the_steps_before_it(tmp_path: Path) -> None:
    """A process that has begun again before 40, and has not come so far yet, has not evaluated there."""
    (run,) = read_runs([write_metrics(tmp_path / "m.jsonl", [*map(step, range(1, 51)), *map(step, range(31, 36))], 20)])
    series, _ = series_of(run, attempts(run.metrics), [], 1000)
    assert list(series.points["valid_loss"].axes["iteration"]) == [20]
