"""The adapter for lm_eval against lm_eval's own for `transformers`, on the same weights, with the same requests, in
float64.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.data.indexed import DataError
from megazero.mpu.axes import Axes
from megazero.mpu.grid import build_grid
from tests.convert.hf_models import in_double
from tests.evaluation.hf_folder import CASES, CONTEXT, VOCABULARY, folder_of, text
from tests.parity.float64 import in_float64
from tests.ranks import run_ranks

lm_eval = pytest.importorskip("lm_eval")
transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

BATCH = 5
Answers = dict[str, list[Any]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: folder_of(family, tmp_path_factory.mktemp(family)) for family in CASES}


@contextmanager
def theirs(family: str, folder: Path) -> Iterator[Any]:
    """Their adapter over the model in float64."""
    from lm_eval.models.huggingface import HFLM

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = in_double(CASES[family])
    with in_float64():
        yield HFLM(pretrained=model, tokenizer=tokenizer, batch_size=BATCH, max_length=CONTEXT)


def ours(folder: Path, **arguments: Any) -> Any:
    from megazero.harness import MegazeroLM

    return MegazeroLM(folder, precision="fp64", batch_size=BATCH, max_length=CONTEXT, device="cpu", **arguments)


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=words, idx=number) for number, words in enumerate(arguments)]


def pairs() -> list[tuple[str, str]]:
    """Contexts of all lengths, none and too long ones included, spaces at their ends, and continuations of one and
    several tokens.
    """
    found = [(text(count, count), " " + text(1 + count % 4, 100 + count)) for count in (1, 2, 3, 5, 8, 13, 21, 60)]
    found += [
        ("", text(3, 7)),
        (text(4, 8) + " ", text(2, 9)),
        (text(4, 8) + "  ", "cat"),
        ("the", text(15, 5)),
        ("é", "ü the"),
    ]
    return [*found, *((text(4, 8), f" {word}") for word in ("cat", "dog", "sea"))]


GREEDY = {"until": ["\n"], "max_gen_toks": 9}
WISHES: list[dict[str, Any]] = [
    GREEDY,
    {"until": "the", "max_gen_toks": 12, "do_sample": False},
    {"until": [" c", "e"], "max_gen_toks": 7},
    {"max_new_tokens": 5, "temperature": 0.0},
]


def asked() -> list[tuple[str, dict[str, Any]]]:
    return [(text(3 + 7 * number, 40 + number), dict(WISHES[number % len(WISHES)])) for number in range(10)]


def after(lm: Any, context: str) -> list[tuple[float, bool]]:
    """Every token of the vocabulary after a context, one of which is the greedy one; then after that again; then the
    two together.
    """
    ids = lm.tok_encode(context)
    found: list[tuple[float, bool]] = []
    likely: list[int] = []
    for _ in range(2):
        found += lm._loglikelihood_tokens([(("", ""), [*ids, *likely], [token]) for token in range(VOCABULARY)])
        likely.append(next(token for token, (_, greedy) in enumerate(found[-VOCABULARY:]) if greedy))
    pairs = [likely, [likely[0], (likely[1] + 1) % VOCABULARY], [(likely[0] + 1) % VOCABULARY, likely[1]]]
    return [*found, *lm._loglikelihood_tokens([(("", ""), ids, pair) for pair in pairs])]


def answers(lm: Any) -> Answers:
    return {
        "loglikelihood": lm.loglikelihood(instances("loglikelihood", pairs())),
        "greedy": after(lm, "the cat sat on"),
        "rolling": lm.loglikelihood_rolling(
            instances("loglikelihood_rolling", [(text(n, n),) for n in (1, 4, 40, 90)] + [("",)])
        ),
        "generated": lm.generate_until(instances("generate_until", asked())),
    }


def same(found: Answers, wanted: Answers, tolerance: float) -> None:
    assert sum(flag for _, flag in wanted["greedy"]) == 3
    for key in ("loglikelihood", "greedy"):
        assert [flag for _, flag in found[key]] == [flag for _, flag in wanted[key]]
        assert [mine for mine, _ in found[key]] == pytest.approx([right for right, _ in wanted[key]], rel=tolerance)
    assert found["rolling"] == pytest.approx(wanted["rolling"], rel=tolerance)
    assert found["generated"] == wanted["generated"]
    assert len(set(found["generated"])) > 4


@pytest.fixture(scope="module")
def right(folders: dict[str, Path]) -> dict[str, Answers]:
    found = {}
    for family, folder in folders.items():
        with theirs(family, folder) as lm:
            found[family] = answers(lm)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", CASES)
def test_the_same_answers(family: str, folders: dict[str, Path], right: dict[str, Answers]) -> None:
    same(answers(ours(folders[family])), right[family], CASES[family].tolerance)


def answers_on_rank(rank: int, size: int, tp: int, pp: int, folder: Path) -> Answers:
    return answers(ours(folder, grid=build_grid(Axes(pp, size // (tp * pp), 1, tp))))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "size", "tp", "pp"), [("bloom", 2, 2, 1), ("llama", 2, 1, 1), ("gpt2", 2, 1, 2)])
def test_on_ranks(
    family: str, size: int, tp: int, pp: int, folders: dict[str, Path], right: dict[str, Answers]
) -> None:
    for found in run_ranks(size, answers_on_rank, size, tp, pp, folders[family]):
        same(found, right[family], CASES[family].tolerance)


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


@pytest.mark.slow
def test_simple_evaluate(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of lm_eval's way, by object and by name."""
    pytest.importorskip("datasets")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = folders["llama"]

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


CHAT = """{{ bos_token }}{% for message in messages %}
{%- if message['role'] == 'system' and 'no' in message['content'] %}
{{- raise_exception('no system here') }}{% endif %}
{{- message['role'] + ': ' + message['content'] | trim + eos_token }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""


@pytest.mark.slow
def test_chat_templates(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """The begin token that a template writes is not put there twice; turns of a system that a template refuses are left
    out, as there.
    """
    pytest.importorskip("datasets")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = Path(shutil.copytree(folders["llama"], tmp_path / "chats"))
    (folder / "chat_template.jinja").write_text(CHAT)
    turns = [
        {"role": "user", "content": " the cat "},
        {"role": "assistant", "content": "sat</s> on"},
        {"role": "user", "content": "why?"},
    ]
    lm = ours(folder)
    how: dict[str, Any] = {
        "apply_chat_template": True,
        "task_manager": TaskManager(include_defaults=False),
        "bootstrap_iters": 0,
    }
    with theirs("llama", folder) as right:
        for system in ("be brief", "no more"):
            history = [{"role": "system", "content": system}, *turns]
            for last, asks in ((3, True), (2, False)):
                wanted = right.apply_chat_template(history[: last + 1], add_generation_prompt=asks)
                assert lm.apply_chat_template(history[: last + 1], add_generation_prompt=asks) == wanted
                assert lm.tok_encode(wanted) == right.tok_encode(wanted) and lm.tok_encode(wanted)[:2].count(1) == 1
        assert lm.chat_template(True) == right.chat_template(True) == CHAT and lm.chat_template(False) is None
        found, wanted = (
            lm_eval.simple_evaluate(model=each, tasks=tasks(tmp_path), system_instruction="be brief", **how)
            for each in (lm, right)
        )
    assert caplog.text.count("turns of a system are left out") == 1
    for task, samples in wanted["samples"].items():
        assert [each["arguments"] for each in found["samples"][task]] == [each["arguments"] for each in samples]
    for task in ("choice", "told"):
        assert "system: be brief</s>" in str(found["samples"][task][0]["arguments"])
        for name, value in wanted["results"][task].items():
            assert found["results"][task][name] == (
                pytest.approx(value, rel=1e-10) if isinstance(value, float) else value
            )
    assert lm.tokenizer_name and lm.tokenizer_name == ours(folder).tokenizer_name
    with pytest.raises(ValueError, match="only the default chat template"):
        lm.chat_template("rag")
    with pytest.raises(DataError, match="has no chat template"):
        ours(folders["gpt2"]).apply_chat_template(turns)


def test_begin_tokens(folders: dict[str, Path]) -> None:
    """BLOOM's tokenizer has one and puts it nowhere, LLaMA's puts it before every text, GPT-2's is its end token."""
    for family, (prefix, begins, end) in {"bloom": (1, (), 2), "llama": (1, (1,), 2), "gpt2": (1, (), 1)}.items():
        tokens = ours(folders[family]).tokens
        assert (tokens.prefix, tokens.begins, tokens.eot) == (prefix, begins, end), family
    assert ours(folders["llama"], add_bos_token=False).tok_encode("the cat")[0] != 1
    assert ours(folders["bloom"], add_bos_token=True).tok_encode("the cat")[0] == 1
    assert ours(folders["gpt2"], prefix_token_id=9).prefix_token_id == 9


def test_special_tokens_that_are_generated_are_no_text(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They can stop a text all the same."""
    lm = ours(folders["bloom"])
    ids = [*lm.tok_encode("the cat "), 0, *lm.tok_encode("sat"), 1, *lm.tok_encode("on a mat")]

    def speak(pipeline: Any, prompts: Any, most: int, sampling: Any, *, ends: Any, **more: Any) -> list[list[int]]:
        stop = next((place for place, token in enumerate(ids) if ends(0, token)), most)
        return [ids[: stop + 1]]

    monkeypatch.setattr("megazero.evaluation.harness.generate", speak)
    with theirs("bloom", folders["bloom"]) as right:
        assert all(lm.tok_decode(ids, skip) == right.tok_decode(ids, skip) for skip in (True, False))
        monkeypatch.setattr(
            right, "_model_generate", lambda context, **more: torch.tensor([[*context[0].tolist(), *ids]])
        )
        asked = [("the", {"until": [], "max_gen_toks": 40})]
        assert lm.generate_until(instances("generate_until", asked)) == right.generate_until(
            instances("generate_until", asked)
        )
    found = lm.generate_until(instances("generate_until", [("the", {"until": ["<s>"], "max_gen_toks": 40})]))
    assert found == ["the cat sat"], "stopped by a special token"


def test_texts_end_at_every_token_that_the_model_s_files_name(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["gpt2"], tmp_path / "model"))
    requests = instances("generate_until", [(text(3, seed), {"until": [], "max_gen_toks": 9}) for seed in range(4)])
    lm = ours(folder)
    plain = lm.generate_until(requests)
    ends = [1, *lm.tok_encode(plain[1][0])]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with theirs("gpt2", folder) as right:
        right.model.generation_config.eos_token_id = ends
        wanted = right.generate_until(requests)
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
    needing = ("megazero.harness", "megazero.cli.harness_model", "megazero.evaluation.harness")
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval" or name in needing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match="pip install 'lm_eval"):
        importlib.import_module("megazero.harness")
    assert importlib.import_module("megazero.evaluation").__name__, "the rest needs it not"
