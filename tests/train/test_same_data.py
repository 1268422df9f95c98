"""A run goes on with the tokenizer and the data of its checkpoint wherever these lie by then, and with no others."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from megazero.checkpoint.manager import find
from megazero.config.parse import parse_run
from megazero.config.source import ConfigError
from megazero.data.contents import cached_contents, contents_of
from megazero.data.progress import silent
from megazero.data.train_bpe import train_bpe
from megazero.train.init_from import model_source
from megazero.train.prepare import Prepared, prepare
from megazero.train.same_data import with_present_names
from tests.corpus import write_corpus
from tests.data.chats import write_lines
from tests.parity.training import job_on_rank
from tests.train.starts import problems_at_start

MODEL = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 24 --precision fp32"
BATCH = "--global-batch-size 2 --micro-batch-size 1 --eval-iters 0 --lr-decay-style constant"
TEXT = "the cat sat on the mat and the dog sat on the log, said the frog to the hog in the fog " * 30
WORDS = f"{MODEL} {BATCH} --data-cache-path cache --tokenizer gpt2".split()
SPLIT = [*WORDS, "--split", "1,0,0"]
ON_TEXT = [*SPLIT, "--tokenizer-path", "bpe", "--data-path", "d"]
CHATS = [{"prompt": f"the cat {number}", "completion": "sat on the mat"} for number in range(9)]


def ran(words: Iterable[str]) -> None:
    job_on_rank(0, 1, [*words])[0].fit()


def prepared(*words: str) -> Prepared:
    return prepare(parse_run([*words], 1, model_source), 1, silent)


def refused(*words: str) -> str:
    """What the start of the run says, which --validate-only says too where the names differ."""
    with pytest.raises(ConfigError) as wrong:
        prepared(*words)
    return str(wrong.value)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs `text`, `chats` on the weights of `text`, and `adapters` on them, after a step each; another `other`
    tokenizer and pair.
    """
    folder = tmp_path_factory.mktemp("made")
    train_bpe([TEXT], 300, folder / "bpe", silent)
    train_bpe([TEXT[:200]], 280, folder / "other-bpe", silent)
    write_corpus(folder / "d", documents=40, vocabulary=250)
    write_corpus(folder / "other", documents=40, vocabulary=250, seed=6)
    write_lines(folder / "chats.jsonl", CHATS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        ran([*ON_TEXT, "--save", "text", "--train-iters", "1"])
        for name, more in (("chats", []), ("adapters", ["--lora-rank", "2"])):
            ran([*on_chats("text"), *more, "--save", name, "--train-iters", "1"])
    return folder


def on_chats(base: str) -> list[str]:
    words = [word for word in WORDS if word not in ("--tokenizer", "gpt2")]
    return [*words, "--init-from", base, "--instruction-data", "chats.jsonl"]


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def resume(name: str) -> list[str]:
    return ["--load", name, "--save", name, "--train-iters", "2"]


def moved(to: str, *names: str) -> None:
    Path(to).mkdir()
    for name in names:
        for path in Path().glob(f"{name}*"):
            shutil.move(path, Path(to) / path.name)


def test_by_another_name(here: Path) -> None:
    for path, data in (("./bpe", "./d"), (str(here / "bpe"), str(here / "d")), ("bpe/vocab.json", "d")):
        words = [*SPLIT, "--tokenizer-path", path, "--data-path", data]
        run = parse_run([*words, *resume("text")], 1)
        assert problems_at_start(run) == ()
        assert prepared(*words, *resume("text")).resumed is not None


def test_what_is_not_known_yet_hides_no_other_problem(here: Path) -> None:
    """The default corpus is made at the start, and so is the number of the samples of --epochs."""
    model, lr = f"{MODEL} {BATCH} --vocab-size 290 --split 1,0,0 --load text --save text".split(), ["--lr", "0.5"]
    run = parse_run([*model, "--train-iters", "2"], 1)
    assert problems_at_start(run) == ()
    (problem,) = problems_at_start(parse_run([*model, *lr, "--train-iters", "2"], 1))
    assert problem.startswith("text/iter_0000001: --lr: 0.001 in the checkpoint, 0.5 now")
    assert problems_at_start(parse_run([*model, "--epochs", "2"], 1)) == ()
    assert problems_at_start(parse_run([*model, *lr, "--epochs", "2"], 1)) == (problem,)


def test_moved(here: Path) -> None:
    moved("away", "bpe", "d")
    words = [*SPLIT, "--tokenizer-path", "away/bpe", "--data-path", "away/d", *resume("text")]
    assert problems_at_start(parse_run(words, 1)) == ()
    assert prepared(*words).resumed is not None


def test_by_another_kind_of_file(here: Path) -> None:
    transformers = pytest.importorskip("tokenizers")
    bpe = transformers.ByteLevelBPETokenizer("bpe/vocab.json", "bpe/merges.txt")
    bpe.add_special_tokens(["<|endoftext|>"])
    bpe.save("tokenizer.json")
    kind = [word if word != "gpt2" else "hf" for word in SPLIT]
    words = [*kind, "--tokenizer-path", "tokenizer.json", "--data-path", "d", *resume("text")]
    assert prepared(*words).resumed is not None


@pytest.mark.parametrize("name", ["chats", "adapters"])
def test_a_model_to_start_from_that_has_moved_or_gone_on(here: Path, name: str) -> None:
    more = ["--lora-rank", "2"] * (name == "adapters")
    ran([*ON_TEXT, *resume("text")])
    assert prepared(*on_chats("text"), *more, *resume(name)).resumed is not None
    moved("away", "text", "chats.jsonl")
    words = [word if word != "chats.jsonl" else "away/chats.jsonl" for word in on_chats("away/text")]
    assert prepared(*words, *more, *resume(name)).resumed is not None


def test_others_are_refused(here: Path) -> None:
    words = [*SPLIT, "--tokenizer-path", "bpe"]
    told = refused(*words, "--data-path", "other", *resume("text"))
    assert told.count("--data-path: d in the checkpoint, other now; to change it on resume: --override-data") == 1
    told = refused(*SPLIT, "--tokenizer-path", "other-bpe", "--data-path", "d", "--vocab-size", "300", *resume("text"))
    assert "--tokenizer-path: bpe in the checkpoint, other-bpe now" in told
    write_lines(Path("others.jsonl"), CHATS[:-1])
    words = [word if word != "chats.jsonl" else "others.jsonl" for word in on_chats("text")]
    assert "--instruction-data: chats.jsonl in the checkpoint, others.jsonl now" in refused(*words, *resume("chats"))
    told = refused(*ON_TEXT[:-1], "0.5", "d", "0.5", "d", *resume("text"))
    assert "--data-path: d in the checkpoint, 0.5 d 0.5 d now" in told


def test_other_documents_of_the_same_name_are_told_as_such(here: Path) -> None:
    for name, documents, told in (
        ("other", 40, r"documents than when the checkpoint was written (40 with "),
        ("more", 41, "tokens then, 41 with "),
    ):
        if name == "more":
            write_corpus(here / "more", documents=documents, vocabulary=250)
        for ending in ("bin", "idx"):
            shutil.copy(f"{name}.{ending}", f"d.{ending}")
        said = refused(*ON_TEXT, *resume("text"))
        assert "--data-path d holds other " in said and told in said and "--train-iters" not in said
        assert said.endswith("so samples would be repeated and left out; to go on all the same: --override-data")
    assert prepared(*ON_TEXT, *resume("text"), "--override-data").resumed is not None


def test_a_checkpoint_of_before_is_compared_with_what_is_still_there(here: Path) -> None:
    """It records no contents, so what its names lead to is read."""
    found = find("text")
    assert found is not None and len(found.progress["data_contents"]) == 1
    shutil.copytree("bpe", "bpe-2")
    for ending in ("bin", "idx"):
        shutil.copy(f"d.{ending}", f"d-2.{ending}")
    then = parse_run([*ON_TEXT, "--train-iters", "1"], 1)
    now = replace(then, data=replace(then.data, data_path=("d-2",), tokenizer_path="bpe-2"))
    other = replace(then, data=replace(then.data, data_path=("other",), tokenizer_path="other-bpe"))
    assert with_present_names(then, now).data == now.data
    assert with_present_names(then, other).data == then.data
    shutil.rmtree("bpe")
    Path("d.bin").unlink()
    assert with_present_names(then, now).data == then.data


def test_contents_do_not_depend_on_place_or_cache(here: Path) -> None:
    data = parse_run([*ON_TEXT, "--train-iters", "1"], 1).data
    shutil.copy("d.bin", "e.bin")
    shutil.copy("d.idx", "e.idx")
    same = replace(data, data_path=("0.5", "d", "0.5", "e"))
    first, second = contents_of(same)
    assert first == second and first[0] == 40 and cached_contents(same, silent) == (first, second)
    assert cached_contents(same, silent) == (first, second)
    chats = replace(data, data_path=(), instruction_data=("chats.jsonl",))
    ((files, size, _),) = contents_of(chats)
    assert (files, size) == (1, Path("chats.jsonl").stat().st_size)
