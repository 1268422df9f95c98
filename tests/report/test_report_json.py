"""--report-json: one object with what a run says before its first step, and a page that describes every key of it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from megazero.config.dump import run_dict
from megazero.config.parse import parse_arguments, parse_run
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.mpu.axes import axes_of
from megazero.plan.rank_state import stage_bytes
from megazero.plan.step_lists import StageLists
from megazero.program.instruction import Lane
from megazero.program.traffic import traffic
from megazero.report import report_json
from megazero.report.run_report import RunReport, gather
from megazero.train.checked import asked_start, dry_run_text
from megazero.train.path_checks import unusable_places
from tests.parity.training import data_flags, job_on_rank, small_model
from tests.ranks import run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "run-report.md"
MODEL = [*small_model(4, heads=4), "--global-batch-size", "16", "--micro-batch-size", "2", "--train-iters", "1"]
FULL = "--pp 2 --zero-stage 3 --zero-shard-size 2 --offload-optimizer cpu --offload-activations cpu --device cpu "
FULL += "--recompute-granularity full --device-memory-budget 9MB"


def documented() -> set[str]:
    return set(re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE))


def keys_of(kind: Any, path: str) -> Iterator[str]:
    """The keys of a type's values that are numbers, words, or mappings whose keys are no fields."""
    inside = [part for part in get_args(kind) if part not in (type(None), Ellipsis)]
    if isinstance(kind, UnionType):
        yield from keys_of(inside[0], path)
    elif kind is Run:
        yield "settings"
    elif is_dataclass(kind) or hasattr(kind, "_fields"):
        for name, part in get_type_hints(kind).items():
            yield from keys_of(part, f"{path}.{name}".strip("."))
    elif get_origin(kind) is tuple and (is_dataclass(inside[0]) or hasattr(inside[0], "_fields")):
        yield from keys_of(inside[0], f"{path}[]")
    else:
        yield path


PARENTS = {"recompute", "memory.leaving", "memory.budgets", "machine", "prediction"}
LISTS = {"memory.stages", "memory.gathered", "memory.peaks", "messages", "decisions"}
"""Objects that may be null and lists of objects. The page describes them beside their keys."""


def paths_of(value: Any, path: str = "") -> Iterator[str]:
    """The keys of an object, down to what the page describes as one."""
    if not value or path in documented() - PARENTS - LISTS:
        yield path
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from paths_of(part, f"{path}.{name}".strip("."))
    elif isinstance(value, list):
        for part in value:
            yield from paths_of(part, f"{path}[]")
    else:
        yield path


def validated(words: str, place: Path, ranks: int) -> dict[str, Any]:
    check = ["--validate-only", "--skip-files", "--world-size", str(ranks), "--report-json", str(place)]
    dry_run_text(parse_arguments([*MODEL, *words.split(), *check], 1), 1)
    text = place.read_text()
    found: dict[str, Any] = json.loads(text)
    return found


def test_the_page_has_every_key_and_no_other() -> None:
    keys = {*keys_of(RunReport, "")} | {"kind"}
    assert documented() - PARENTS - LISTS == keys


def test_every_key_of_an_object_is_on_the_page(tmp_path: Path) -> None:
    for words, ranks in (("", 1), (FULL, 8)):
        found = validated(words, tmp_path / f"{ranks}.json", ranks)
        assert {*paths_of(found)} <= documented(), words
        assert found["kind"] == report_json.KIND and found["machine"] is None


def test_the_numbers_are_those_of_the_plan(tmp_path: Path) -> None:
    found = validated(FULL, tmp_path / "report.json", 8)
    run = parse_run([*MODEL, *FULL.split(), "--report-json", str(tmp_path / "report.json")], 8)
    axes = axes_of(run, 8)
    resolved = asked_start(run, 8, range(0), reads_files=False, searches=True).resolved
    assert found["settings"] == json.loads(json.dumps(run_dict(resolved.run)))
    assert found["decisions"] == [
        {"field": "eod_id", "value": 0, "why": "the tokenizer's token that ends a document"}
    ], "the device, the paths and so on are those of other machines"
    assert found["given"]["parallel"]["pp"] == 2 and found["axes"] == axes.sizes | {"shard_size": 2}
    state = [stage.weights for stage in stage_bytes(run, axes)]
    assert [stage["weights"] for stage in found["memory"]["stages"]] == state
    assert found["memory"]["budgets"]["together"] == 9_000_000 and len(found["memory"]["peaks"]) == 2
    assert found["schedule"]["micro_batches"] == 2 and 0 < found["schedule"]["bubble"] < 1


@pytest.mark.parametrize("words", [FULL, "--zero-shard-size 2", "--zero-stage 2 --zero-quantized-gradients int8"])
def test_messages_are_those_of_the_steps_list(words: str) -> None:
    run = parse_run([*MODEL, *words.split(), "--report-json", "report.json"], 8)
    steps = StageLists(run, axes_of(run, 8), nccl=False)
    for stage in range(steps.axes.pp):
        sent = traffic(steps.of(stage).instructions, steps.of(stage).shape)
        found = [message for message in gather(steps).messages if message.stage == stage]
        for axis, lane in (("dp", Lane.SHARDS), ("dp across sets", Lane.ACROSS)):
            assert sum(message.bytes for message in found if message.axis == axis) == sent.get(lane, 0)
        transfers = [message for message in found if message.axis == "pp"]
        # One half of 8 micro-batches passes a replica: [12, 2, 24] in bf16.
        assert sum(message.bytes for message in transfers) == sum(message.number for message in transfers) * 12 * 48 * 2
        assert bool(transfers) == (steps.axes.pp > 1)


def test_a_report_replaces_nothing_but_another(tmp_path: Path) -> None:
    kept, link, report = tmp_path / "kept.json", tmp_path / "link.json", tmp_path / "report.json"
    kept.write_text("[1]")
    link.symlink_to(report)
    first = validated("", report, 1)
    assert validated("--lr 0.5", link, 1) != first and link.is_symlink()
    assert json.loads(report.read_text())["given"]["schedule"]["lr"] == 0.5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.json", "link.json", "report.json"]
    os.mkfifo(tmp_path / "pipe")
    for name, wrong in (
        ("kept.json", "is there already and is no report of a run; name another file"),
        (".", "is a folder; name a file"),
        ("pipe", "is no regular file; name a file"),
        ("kept.json/x", "is no folder"),
        ("metrics", "is the file of --metrics-file"),
        ("step.json", "is the file of --memory-trace"),
    ):
        outputs = ["--metrics-file", tmp_path / "metrics", "--memory-trace", tmp_path / "step.html"]
        flags = [*MODEL, *map(str, outputs), "--report-json", str(tmp_path / name)]
        (problem,) = unusable_places(parse_run(flags, 1))
        assert problem.startswith("--report-json ") and wrong in problem
    with pytest.raises(ConfigError, match=r"--report-json .*: is there already and is no report"):
        validated("", kept, 1)
    assert kept.read_text() == "[1]"


def report_on_rank(rank: int, size: int, flags: list[str], place: str) -> tuple[Mapping[str, Any], bool]:
    job, _ = job_on_rank(rank, size, [*flags, "--report-json", place])
    job.close()
    return json.loads(Path(place).read_text()) if rank == 0 else {}, job.grid.rank == rank


def test_a_run_writes_it_before_its_first_step(corpus: Path, tmp_path: Path) -> None:
    flags = [*MODEL, "--pp", "2", *data_flags(corpus, tmp_path / "cache")]
    (found, _), _ = run_ranks(2, report_on_rank, 2, flags, str(tmp_path / "new folder" / "report.json"))
    assert {*paths_of(found)} <= documented()
    assert found["start"] == "from scratch" and found["samples"] == 16 and str(corpus) in found["data"]
    assert found["machine"]["ways"].keys() == {"pp"} and found["machine"]["ops"]["attention"]
    assert found["given"]["parallel"]["pp"] == 2


def fails_on_rank(rank: int, size: int, flags: list[str], place: str) -> str:
    with pytest.raises((ConfigError, RuntimeError)) as caught:
        job_on_rank(rank, size, [*flags, "--report-json", place])
    return str(caught.value)


def test_all_ranks_end_where_it_cannot_be_written(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that appears after the check of places."""
    flags = [*MODEL, *data_flags(corpus, tmp_path / "cache")]
    (tmp_path / "file").write_text("[1]")
    monkeypatch.setattr("megazero.train.path_checks.unusable_places", lambda run: [])
    (told,) = run_ranks(1, fails_on_rank, 1, flags, str(tmp_path / "file"))
    assert "--report-json" in told and "is no report of a run" in told
