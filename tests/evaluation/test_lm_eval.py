"""lm_eval itself: it runs our adapter, and its own answers what was recorded of it (`make test-all` installs it)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.evaluation.harness_questions import GREEDY, asked_of_lm_eval, ours, recorded, theirs, with_chats
from tests.evaluation.hf_folder import CASES, CONTEXT, folder_of, text
from tests.evaluation.rolling import rolling_windows

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("lm_eval.utils")
    pytest.importorskip("datasets")
    return folder_of("llama", tmp_path_factory.mktemp("llama"))


def test_the_recorded_answers_are_its_own(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval.utils")
    known, now = recorded(), asked_of_lm_eval(tmp_path)
    assert {key: now[key] for key in now if key not in ("versions", "answers")} == {
        key: known[key] for key in known if key not in ("versions", "answers")
    }
    for family, case in CASES.items():
        was, found = known["answers"][family], now["answers"][family]
        assert found.keys() == was.keys() and found["generated"] == was["generated"]
        assert found["rolling"] == pytest.approx(was["rolling"], rel=case.tolerance)
        for key in ("loglikelihood", "greedy"):
            assert [flag for _, flag in found[key]] == [flag for _, flag in was[key]]
            assert [mine for mine, _ in found[key]] == pytest.approx([old for old, _ in was[key]], rel=case.tolerance)


@given(length=st.integers(0, 60), context=st.integers(1, 12), data=st.data())
def test_the_windows_are_its_own(length: int, context: int, data: st.DataObject) -> None:
    utils = pytest.importorskip("lm_eval.utils")
    stride = data.draw(st.integers(1, context))
    ids = list(range(100, 100 + length))
    theirs = utils.get_rolling_token_windows(ids, prefix_token=7, max_seq_len=context, context_len=context - stride + 1)
    assert list(rolling_windows(ids, 7, context, stride)) == list(theirs)


def test_its_command_line_helps() -> None:
    """What our model takes, and lm_eval's own help."""
    pytest.importorskip("lm_eval.utils")
    done = subprocess.run(
        [sys.executable, "-m", "megazero.harness", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for words in (
        "--model megazero --model_args path=runs/bloom",
        "tp, pp           ranks that share the model",
        "usage: ",
    ):
        assert words in done.stdout


def tasks(folder: Path) -> list[Any]:
    """A multiple choice, a generation and a perplexity, made of local files."""
    from lm_eval.api.task import ConfigurableTask

    rows = [{"q": text(3 + n, n), "a": text(1, n), "b": text(2, 90 + n), "gold": n % 2} for n in range(6)]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}, "test_split": "test"}
    kinds: dict[str, dict[str, Any]] = {
        "choice": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{q}}",
            "doc_to_choice": ["{{a}}", "{{b}}"],
            "doc_to_target": "gold",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "told": {
            "output_type": "generate_until",
            "doc_to_text": "{{q}}",
            "doc_to_target": "{{a}}",
            "generation_kwargs": GREEDY,
            "metric_list": [{"metric": "exact_match"}],
        },
        "rolled": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{q}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
    }
    return [ConfigurableTask(config={"task": name, **common, **kind}) for name, kind in kinds.items()]


def test_simple_evaluate(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of lm_eval's way, by object and by name."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = llama

    manager = TaskManager(include_defaults=False)
    """Without the index of all tasks, which takes longer than the test."""

    def results(model: Any, **how: Any) -> dict[str, dict[str, float]]:
        how |= {"tasks": tasks(tmp_path), "task_manager": manager, "bootstrap_iters": 0, "log_samples": False}
        found = lm_eval.simple_evaluate(model=model, **how)["results"]
        numbers = {
            task: {name: value for name, value in row.items() if isinstance(value, float)}
            for task, row in found.items()
        }
        return {task: row for task, row in numbers.items() if row}

    with theirs("llama", folder) as lm:
        wanted = results(lm)
    assert set(wanted) == {"choice", "told", "rolled"} and len(wanted["rolled"]) >= 2
    arguments = f"path={folder},precision=fp64,max_length={CONTEXT},device=cpu"
    for found in (results(ours(folder)), results("megazero", model_args=arguments, batch_size=3)):
        assert found.keys() == wanted.keys()
        for task, row in wanted.items():
            assert found[task] == pytest.approx(row, rel=1e-10), task


def test_evaluation_of_chats(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = with_chats(llama, tmp_path / "chats")
    lm = ours(folder)
    how: dict[str, Any] = {
        "apply_chat_template": True,
        "task_manager": TaskManager(include_defaults=False),
        "bootstrap_iters": 0,
    }
    with theirs("llama", folder) as right:
        assert lm.chat_template(True) == right.chat_template(True)
        found, wanted = (
            lm_eval.simple_evaluate(model=each, tasks=tasks(tmp_path), system_instruction="be brief", **how)
            for each in (lm, right)
        )
    for task, samples in wanted["samples"].items():
        assert [each["arguments"] for each in found["samples"][task]] == [each["arguments"] for each in samples]
    for task in ("choice", "told"):
        assert "system: be brief</s>" in str(found["samples"][task][0]["arguments"])
        for name, value in wanted["results"][task].items():
            assert found["results"][task][name] == (
                pytest.approx(value, rel=1e-10) if isinstance(value, float) else value
            )
