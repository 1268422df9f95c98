"""Keys of a tokenizer's files that change ids or text: as `transformers` takes them, or named in one line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from megazero.data.chat import read_template
from megazero.data.conversations import ConversationEncoder, read_conversations
from megazero.data.indexed import DataError
from megazero.data.preprocess import PreprocessJob, preprocess
from megazero.data.progress import silent
from megazero.data.tokenizer import build_tokenizer
from megazero.data.tokenizer_differences import differences
from megazero.data.train_bpe import train_bpe
from tests.data.test_folder_tokens import SPOKEN, TEXT, pieces, written

assert pieces  # a fixture
TEXTS = (
    *SPOKEN,
    " the cat",
    "The CAT , is n't it ?",
    "",
    "a\nb  \n",
    "cafe\u0301 naïve",
    "a <tool>b<tool> c",
    "a<tool>b",
)
NAMED = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
PLAIN = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": False}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vocab.json and merges.txt."""
    folder = tmp_path_factory.mktemp("words")
    train_bpe((TEXT for _ in range(20)), 300, folder, silent)
    return folder


def opened(kind: str, folder: str) -> Any:
    return build_tokenizer(kind, folder)


def library(words: Path, prefix: bool = False) -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(words / "vocab.json"), str(words / "merges.txt")))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    return made


def frame(model: Any, single: str) -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    ends = [(token, model.token_to_id(token)) for token in ("<s>", "</s>")]
    model.post_processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=ends)
    return model


def truncated(model: Any) -> Any:
    model.enable_truncation(3)
    model.enable_padding(length=40, pad_token="<s>")
    return model


def normalized(model: Any) -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    model.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.NFC(), tokenizers.normalizers.Lowercase()]
    )
    return model


def decoder(**flags: bool) -> dict[str, Any]:
    return {"added_tokens_decoder": {"302": {"content": "<tool>"} | PLAIN | flags}}


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "cut and filled": (truncated, {"model_max_length": 4, "truncation_side": "left", "padding_side": "left"}),
    "normalized": (normalized, {"do_lower_case": False}),
    "lower case by name alone": (None, {"do_lower_case": True}),
    "framed": (lambda model: frame(model, "<s> $A </s>"), {}),
    "begin by name alone": (None, {"add_bos_token": True, "add_eos_token": True}),
    "begin taken back by name alone": (lambda model: frame(model, "<s> $A"), {"add_bos_token": False}),
    "prefix of another class": (None, {"add_prefix_space": True}),
    "end by name alone, of Llama's class": (
        lambda model: frame(model, "<s> $A"),
        {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False, "add_eos_token": True},
    ),
    "prefix of Llama's class": (None, {"tokenizer_class": "LlamaTokenizerFast", "add_prefix_space": True}),
    "prefix of GPT-2's class": (None, {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}),
    "no prefix of GPT-2's class": ("prefix", {"tokenizer_class": "GPT2TokenizerFast"}),
    "prefix of the file": ("prefix", {}),
    "clean for BPE": (None, {"clean_up_tokenization_spaces": True}),
    "special tokens split": (None, {"split_special_tokens": True}),
    "left": (None, decoder(lstrip=True)),
    "right": (None, decoder(rstrip=True)),
    "single": (None, decoder(single_word=True)),
    "left, right, single": (None, decoder(lstrip=True, rstrip=True, single_word=True)),
    "normalized token": (normalized, decoder(normalized=True)),
}


@pytest.mark.parametrize("case", CASES)
def test_ids_and_text_of_tokenizer_json(case: str, words: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    change, config = CASES[case]
    model = library(words, prefix=change == "prefix")
    (change(model) if callable(change) else model).save(str(tmp_path / "tokenizer.json"))
    written(tmp_path, tokenizer_config=NAMED | config)
    mine, theirs = opened("hf", str(tmp_path)), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (mine.vocab_size, mine.eod_id) == (len(theirs), theirs.eos_token_id)
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert mine.encode(text) == ids and mine.decode(ids) == theirs.decode(ids), text
        assert [*mine.begins, *ids, *mine.ends] == theirs(text)["input_ids"]
    assert not [line for line in differences(mine) if "<s>" not in line]


SLOW: dict[str, dict[str, Any]] = {
    "begin": {"add_bos_token": True},
    "begin and end": {"add_bos_token": True, "add_eos_token": True},
    "prefix": {"add_prefix_space": True},
    "left": {"added_tokens_decoder": {"300": {"content": "<tool>"} | PLAIN | {"lstrip": True}}},
    "right": {"added_tokens_decoder": {"300": {"content": "<tool>"} | PLAIN | {"rstrip": True}}},
    "single": {"added_tokens_decoder": {"300": {"content": "<tool>"} | PLAIN | {"single_word": True}}},
}


@pytest.mark.parametrize("case", SLOW)
def test_ids_and_text_of_vocab_json(case: str, words: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(words / name, tmp_path)
    end = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    written(tmp_path, tokenizer_config=end | SLOW[case])
    mine, theirs = opened("gpt2", str(tmp_path)), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert mine.encode(text) == ids and mine.decode(ids) == theirs.decode(ids), text
        assert [*mine.begins, *ids, *mine.ends] == theirs(text)["input_ids"]


def test_frames_of_sentencepiece(pieces: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shutil.copy(pieces / "tokenizer.model", tmp_path)
    size = build_tokenizer("sentencepiece", str(tmp_path)).vocab_size
    for flags in ({"lstrip": True}, {"rstrip": True}, {"single_word": True}, {}):
        added = {str(size): {"content": "<tool>"} | PLAIN | flags}
        config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
        written(tmp_path, tokenizer_config=config | {"added_tokens_decoder": added})
        mine, theirs = (
            opened("sentencepiece", str(tmp_path)),
            transformers.AutoTokenizer.from_pretrained(tmp_path),
        )
        for text in ("the cat", "a <tool> b", "a<tool>b", "a <tool>  b <tool> c", "(<tool>)"):
            assert mine.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], (text, flags)
            assert [*mine.begins, *mine.encode(text), *mine.ends] == theirs(text)["input_ids"]


def test_a_named_end_that_the_vocabulary_spells_cannot_be_forged(tmp_path: Path) -> None:
    """`transformers` makes a special token of it too: its text then ends nothing here, and `decode` leaves it out."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {token: number for number, token in enumerate(("<unk>", "<s>", "</s>", "a", "b"))}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "<unk>"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.save(str(tmp_path / "tokenizer.json"))
    written(tmp_path, tokenizer_config=NAMED)
    mine: Any = build_tokenizer("hf", str(tmp_path))
    assert mine.eod_id == 2 and 2 not in mine.encode("a </s> b") and mine.encode("a b") == [3, 4]
    assert mine.decode_without_specials([1, 3, 2]) == "a"


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "clean": ({"clean_up_tokenization_spaces": True}, "clean_up_tokenization_spaces"),
    "a special token without an id": ({"additional_special_tokens": ["<|im_end|>"]}, r"<|im_end|>"),
    "pad": ({"pad_token": "<pad>"}, "<pad>"),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_what_is_not_applied_is_named(case: str, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    config, name = DIFFERENT[case]
    vocab = {token: number for number, token in enumerate(("<unk>", "<s>", "</s>", "a", "b"))}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "<unk>")).save(str(tmp_path / "tokenizer.json"))
    written(tmp_path, tokenizer_config=NAMED)
    assert not differences(build_tokenizer("hf", str(tmp_path)))
    written(tmp_path, tokenizer_config=NAMED | config)
    (line,) = differences(build_tokenizer("hf", str(tmp_path)))
    assert name in line


def lettered(folder: Path) -> None:
    """A tokenizer.json of five words."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {token: number for number, token in enumerate(("<unk>", "<s>", "</s>", "a", "b"))}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "<unk>")).save(str(folder / "tokenizer.json"))


def test_an_end_without_an_id_is_named_with_the_one_that_is_taken(pieces: Path, tmp_path: Path) -> None:
    ends = r"eos_token '<nope>', which has no id: documents end with '</s>' \(2\), unless --eod-id names another token"
    shutil.copy(pieces / "tokenizer.model", tmp_path)
    lettered(tmp_path)
    for kind in ("hf", "sentencepiece"):
        written(tmp_path, tokenizer_config=NAMED | {"eos_token": "<nope>", "pad_token": "<pad>"})
        mine = build_tokenizer(kind, str(tmp_path))
        assert mine.eod_id == 2
        first, second = differences(mine)
        assert re.search(ends, first) and "'<pad>'" in second and "'<nope>'" not in second
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a")).save(str(tmp_path / "tokenizer.json"))
    written(tmp_path, tokenizer_config={"eos_token": "<nope>"})
    (line,) = differences(build_tokenizer("hf", str(tmp_path)))
    assert "which has no id: no token ends documents, unless --eod-id names one" in line


@pytest.mark.parametrize("value", [["</s>"], 5, False, {"content": 5}, {"id": 2}])
def test_a_token_of_a_wrong_type_is_an_error(value: Any, pieces: Path, tmp_path: Path) -> None:
    """As in `transformers`: another token would end the documents."""
    lettered(tmp_path)
    shutil.copy(pieces / "tokenizer.model", tmp_path)
    for files in ({"tokenizer_config": NAMED | {"eos_token": value}}, {"special_tokens_map": {"eos_token": value}}):
        written(tmp_path, **({"tokenizer_config": {}} | files))
        for kind in ("hf", "sentencepiece"):
            with pytest.raises(DataError, match=rf"{next(iter(files))}.json: eos_token .* is no token: .*--eod-id"):
                build_tokenizer(kind, str(tmp_path))
    written(tmp_path, tokenizer_config=NAMED | {"add_eos_token": True}, special_tokens_map={"eos_token": None})
    assert build_tokenizer("hf", str(tmp_path)).eod_id == 2


TAKEN: dict[str, tuple[dict[str, Any], str]] = {
    "taken": ({"added_tokens": {"<tok>": 3}}, r"add the token '<tok>' as 3, which is the id of 'a'"),
    "renamed": (
        {"tokenizer_config": {"added_tokens_decoder": {"4": {"content": "<tok>"}}}},
        r"add the token '<tok>' as 4, which is the id of 'b'",
    ),
    "twice": ({"added_tokens": {"<one>": 5, "<two>": 5}}, r"add the token '<two>' as 5, which is the id of '<one>'"),
    "far": ({"added_tokens": {"<tok>": 7}}, r"as 7, and here it would be 5: tokens between are missing"),
}


@pytest.mark.parametrize("case", TAKEN)
def test_an_id_that_is_taken_is_named_with_its_token(case: str, tmp_path: Path) -> None:
    lettered(tmp_path)
    files, message = TAKEN[case]
    written(tmp_path, **({"tokenizer_config": {}} | files))
    with pytest.raises(DataError, match=message):
        build_tokenizer("hf", str(tmp_path))


def test_dropout_of_merges_is_named_and_left_out(words: Path, tmp_path: Path) -> None:
    library(words).save(str(tmp_path / "tokenizer.json"))
    record = json.loads((tmp_path / "tokenizer.json").read_text())
    record["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(record))
    mine = build_tokenizer("hf", str(tmp_path))
    assert len({tuple(mine.encode(TEXT)) for _ in range(8)}) == 1
    assert any("dropout 0.5" in line for line in differences(mine))


def test_a_blank_that_is_taken_back_is_named(pieces: Path, tmp_path: Path) -> None:
    shutil.copy(pieces / "tokenizer.model", tmp_path)
    for blank, told in ((True, False), (False, True)):
        config = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>", "add_prefix_space": blank}
        written(tmp_path, tokenizer_config=config)
        lines = differences(build_tokenizer("sentencepiece", str(tmp_path)))
        assert any("add_prefix_space" in line for line in lines) is told


CLASSES: dict[str, tuple[dict[str, Any], str]] = {
    "Llama": (
        {"tokenizer_class": "LlamaTokenizerFast"},
        "'LlamaTokenizerFast', which puts no blank before a text that",
    ),
    "Llama without": ({"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}, "add_prefix_space false"),
    "the file": ({"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": True}, ""),
    "Qwen2": ({"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": True}, "add_prefix_space true of 'Qwen2Tok"),
}


@pytest.mark.parametrize("case", CLASSES)
def test_a_class_that_treats_blanks_otherwise_is_named(case: str, words: Path, tmp_path: Path) -> None:
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    config, line = CLASSES[case]
    model = library(words)
    if case != "Qwen2":
        alphabet = sorted({*TEXT, "a", "▁", "<unk>", "<s>", "</s>"} - {" "})
        vocab = {token: number for number, token in enumerate(alphabet)}
        model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True))
        model.normalizer = tokenizers.normalizers.Sequence(
            [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
        )
    model.save(str(tmp_path / "tokenizer.json"))
    written(tmp_path, tokenizer_config=NAMED | config)
    mine, theirs = opened("hf", str(tmp_path)), transformers.AutoTokenizer.from_pretrained(tmp_path)
    same = all(mine.encode(text) == theirs(text, add_special_tokens=False)["input_ids"] for text in ("a", " a"))
    assert same == (not line)
    assert [line in told for told in differences(mine)] == [True] * bool(line)


TEMPLATES: dict[str, tuple[Any, dict[str, str], str | None]] = {
    "one": ("a", {}, "a"),
    "a list of several": ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "a"}], {}, "a"),
    "a table of several": ({"tool_use": "t", "default": "a"}, {}, "a"),
    "a file before the key": ("a", {"chat_template.jinja": "f"}, "f"),
    "a file and further ones": (
        None,
        {"chat_template.jinja": "f", "additional_chat_templates/tool_use.jinja": "t"},
        "f",
    ),
    "none called default": ({"tool_use": "t", "rag": "r"}, {}, None),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_the_chat_template(case: str, words: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    key, files, wanted = TEMPLATES[case]
    library(words).save(str(tmp_path / "tokenizer.json"))
    written(tmp_path, tokenizer_config=NAMED | ({} if key is None else {"chat_template": key}))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    if wanted is None:
        with pytest.raises(ValueError):
            theirs.get_chat_template()
        with pytest.raises(DataError, match="tool_use, rag, but none called default"):
            read_template(tmp_path, [])
        return
    assert read_template(tmp_path, []).source == theirs.get_chat_template() == wanted
    with_tools: list[dict[str, Any]] = []
    assert read_template(tmp_path, [], tools=True).source == theirs.get_chat_template(tools=with_tools)


def test_conversations_with_tools_are_written_by_the_template_for_them(words: Path, tmp_path: Path) -> None:
    library(words).save(str(tmp_path / "tokenizer.json"))
    template = "{% for message in messages %}{% generation %}{{ message['content'] }}X{% endgeneration %}{% endfor %}"
    both = {"default": template.replace("X", " the"), "tool_use": template.replace("X", " cat")}
    written(tmp_path, tokenizer_config=NAMED | {"chat_template": both})
    mine = build_tokenizer("hf", str(tmp_path))
    turns = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    lines = [turns, turns | {"tools": []}, turns | {"tools": None}]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    found = list(read_conversations([path], ConversationEncoder(mine, mine.eod_id, mine.vocab_size), silent))
    assert [mine.decode(one.ids.tolist()) for one in found] == ["a theb the", "a catb cat", "a theb the"]


def test_documents_are_named_that_transformers_would_begin(words: Path, tmp_path: Path) -> None:
    """And nothing of them is cut: tokenizer.json has a truncation."""
    truncated(frame(library(words), "<s> $A")).save(str(tmp_path / "tokenizer.json"))
    written(tmp_path, tokenizer_config=NAMED)
    (tmp_path / "text.txt").write_text(TEXT)
    lines: list[str] = []
    job = PreprocessJob("hf", str(tmp_path), append_eod=True)
    done = preprocess([tmp_path / "text.txt"], tmp_path / "pair", job, workers=1, report=lines.append)
    mine = build_tokenizer("hf", str(tmp_path))
    assert done.tokens == len(mine.encode(TEXT)) + 1
    assert any(f"transformers puts {mine.pieces()['<s>']} before a text" in line for line in lines)
