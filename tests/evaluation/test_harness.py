"""The adapter for lm_eval beside lm_eval's own for `transformers`: the same weights and requests, in float64.

What lm_eval's own has answered is recorded. `test_lm_eval.py`, in `make test-all`, asks it again.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from megazero.data.indexed import DataError
from megazero.mpu.axes import Axes
from megazero.mpu.grid import build_grid
from tests.evaluation.harness_questions import (
    CHAT,
    CUT,
    SPOKEN,
    TURNS,
    Answers,
    answers,
    instances,
    ours,
    prompts_of,
    recorded,
    speaking,
    with_chats,
)
from tests.evaluation.hf_folder import CASES, CONTEXT, folder_of
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("tokenizers")
    return {family: folder_of(family, tmp_path_factory.mktemp(family)) for family in CASES}


def same(found: Answers, wanted: Answers, tolerance: float) -> None:
    assert sum(flag for _, flag in wanted["greedy"]) == 3
    for key in ("loglikelihood", "greedy"):
        assert [flag for _, flag in found[key]] == [flag for _, flag in wanted[key]]
        assert [mine for mine, _ in found[key]] == pytest.approx([right for right, _ in wanted[key]], rel=tolerance)
    assert found["rolling"] == pytest.approx(wanted["rolling"], rel=tolerance)
    assert found["generated"] == wanted["generated"]
    assert len(set(found["generated"])) > 4


@pytest.fixture(scope="module")
def right() -> dict[str, Any]:
    return recorded()


@pytest.mark.slow
@pytest.mark.parametrize("family", CASES)
def test_the_same_answers(family: str, folders: dict[str, Path], right: dict[str, Any]) -> None:
    same(answers(ours(folders[family])), right["answers"][family], CASES[family].tolerance)


def answers_on_rank(rank: int, size: int, tp: int, pp: int, folder: Path) -> Answers:
    return answers(ours(folder, grid=build_grid(Axes(pp, size // (tp * pp), 1, tp))))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "size", "tp", "pp"), [("bloom", 2, 2, 1), ("llama", 2, 1, 1), ("gpt2", 2, 1, 2)])
def test_on_ranks(family: str, size: int, tp: int, pp: int, folders: dict[str, Path], right: dict[str, Any]) -> None:
    for found in run_ranks(size, answers_on_rank, size, tp, pp, folders[family]):
        same(found, right["answers"][family], CASES[family].tolerance)


@pytest.mark.slow
def test_chat_templates(folders: dict[str, Path], right: dict[str, Any], tmp_path: Path, caplog: Any) -> None:
    """The begin token that a template writes is not put there twice; turns of a system that a template refuses are left
    out, as there.
    """
    lm = ours(with_chats(folders["llama"], tmp_path / "chats"))
    found = prompts_of(lm)
    assert [list(each) for each in found] == right["chats"]
    assert all(ids[:2].count(1) == 1 for _, ids in found)
    assert caplog.text.count("turns of a system are left out") == 1
    assert lm.chat_template(True) == CHAT and lm.chat_template(False) is None
    assert lm.tokenizer_name and lm.tokenizer_name == ours(tmp_path / "chats").tokenizer_name
    with pytest.raises(ValueError, match="only the default chat template"):
        lm.chat_template("rag")
    with pytest.raises(DataError, match="has no chat template"):
        ours(folders["gpt2"]).apply_chat_template(TURNS)


def test_begin_tokens(folders: dict[str, Path]) -> None:
    """BLOOM's tokenizer has one and puts it nowhere, LLaMA's puts it before every text, GPT-2's is its end token."""
    for family, (prefix, begins, end) in {"bloom": (1, (), 2), "llama": (1, (1,), 2), "gpt2": (1, (), 1)}.items():
        tokens = ours(folders[family]).tokens
        assert (tokens.prefix, tokens.begins, tokens.eot) == (prefix, begins, end), family
    assert ours(folders["llama"], add_bos_token=False).tok_encode("the cat")[0] != 1
    assert ours(folders["bloom"], add_bos_token=True).tok_encode("the cat")[0] == 1
    assert ours(folders["gpt2"], prefix_token_id=9).prefix_token_id == 9


def test_special_tokens_that_are_generated_are_no_text(
    folders: dict[str, Path], right: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They can stop a text all the same."""
    lm = ours(folders["bloom"])
    ids = speaking(lm)

    def speak(pipeline: Any, prompts: Any, most: int, sampling: Any, *, ends: Any, **more: Any) -> list[list[int]]:
        stop = next((place for place, token in enumerate(ids) if ends(0, token)), most)
        return [ids[: stop + 1]]

    monkeypatch.setattr("megazero.evaluation.harness.generate", speak)
    assert [lm.tok_decode(ids, skip) for skip in (True, False)] == right["decoded"]
    assert lm.generate_until(instances("generate_until", SPOKEN)) == right["spoken"]
    found = lm.generate_until(instances("generate_until", [("the", {"until": ["<s>"], "max_gen_toks": 40})]))
    assert found == ["the cat sat"], "stopped by a special token"


def test_texts_end_at_every_token_that_the_model_s_files_name(
    folders: dict[str, Path], right: dict[str, Any], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folders["gpt2"], tmp_path / "model"))
    requests = instances("generate_until", CUT)
    ends, plain, wanted = right["ended"]
    assert ours(folder).generate_until(requests) == plain
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert ours(folder).generate_until(requests) == wanted != plain


@pytest.mark.slow
def test_what_it_has_not_is_refused(folders: dict[str, Path]) -> None:
    lm = ours(folders["gpt2"])
    with pytest.raises(ValueError, match="num_beams"):
        lm.generate_until(instances("generate_until", [("the", {"until": [], "num_beams": 4})]))
    with pytest.raises(ValueError, match="do_sample without temperature"):
        lm.generate_until(instances("generate_until", [("the", {"until": [], "do_sample": True})]))
    with pytest.raises(ValueError, match="leave no room"):
        lm.generate_until(instances("generate_until", [("the", {"until": [], "max_gen_toks": CONTEXT})]))
    with pytest.raises(ValueError, match="batch_size auto"):
        ours(folders["gpt2"]).__class__(folders["gpt2"], batch_size="auto")
    with pytest.raises(ValueError, match="does not divide the 1 process"):
        lm.__class__(folders["gpt2"], tp=2)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    needing = ("megazero.harness", "megazero.evaluation.harness")
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval" or name in needing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match="pip install 'lm_eval"):
        importlib.import_module("megazero.harness")
    assert importlib.import_module("megazero.evaluation").__name__, "the rest needs it not"
