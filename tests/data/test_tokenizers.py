"""Tokenizers: decode undoes encode, ids equal the original libraries', damaged files are named."""

import json
import random
import re
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.data.gpt2 import GPT2Tokenizer, apply_merges, byte_symbols
from megazero.data.indexed import DataError, IndexedDataset
from megazero.data.progress import silent
from megazero.data.tokenizer import ByteTokenizer, build_tokenizer
from megazero.data.train_bpe import train_bpe
from tests.reference import REFERENCE, needs_reference

ODDITIES = [
    "",
    " ",
    "  two  spaces ",
    "\r\n\r\nline\r\n",
    "tabs\t\t\n\n\n x",
    "I'll they're it's 'tis we'd I'm you've don't 'S",
    "naïve café Straße ﬁ Ǆ İ",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪",
    "日本語テキスト 中文 한국어 العربية עברית हिन्दी ไทย",
    "e\u0301 \u00e9 \u200b\u200d\ufeff\u00a0\u2028\u2029\x85\x00\x7f\ufffd\U0010ffff",
    "<|endoftext|> is text",
    "x" * 300 + " " * 300 + "1" * 300 + "ab" * 5000,
]
PIECES = " \n\r\t\u3000\x85\u2028a1é'\u20190.,<|>"


def random_text(seed: int) -> str:
    """Characters from the whole of Unicode among plain ones."""
    choose = random.Random(seed)
    symbols = []
    for _ in range(choose.randrange(1, 60)):
        code = choose.choice(
            [
                choose.randrange(0x110000),
                choose.randrange(0x3000),
                choose.randrange(32, 127),
                ord(choose.choice(PIECES)),
            ]
        )
        symbols.append("?" if 0xD800 <= code < 0xE000 else chr(code))
    return "".join(symbols)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    train_bpe(
        (random_text(seed) + " the cat sat on the mat, and the dog" * 3 for seed in range(300)), 600, folder, silent
    )
    return folder


@pytest.fixture(scope="module")
def original(trained):
    return pytest.importorskip("tokenizers").ByteLevelBPETokenizer(
        str(trained / "vocab.json"), str(trained / "merges.txt")
    )


@pytest.mark.parametrize("text", ODDITIES, ids=range(len(ODDITIES)))
def test_oddities_survive(text, trained, original):
    for tokenizer in (ByteTokenizer(), build_tokenizer("gpt2", str(trained))):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= number < tokenizer.vocab_size for number in ids) and tokenizer.eod_id not in ids
    assert build_tokenizer("gpt2", str(trained)).encode(text) == original.encode(text).ids


def test_gpt2_equals_the_library_on_random_unicode(trained, original):
    mine = build_tokenizer("gpt2", str(trained))
    for seed in range(1500):
        text = random_text(seed)
        assert mine.encode(text) == original.encode(text).ids and mine.decode(mine.encode(text)) == text


def test_every_character_class_is_cut_as_the_library_does(trained, original):
    mine = build_tokenizer("gpt2", str(trained))
    by_class: dict[str, list[str]] = {}
    for code in range(0x110000):
        by_class.setdefault(unicodedata.category(chr(code)), []).append(chr(code))
    del by_class["Cs"]
    for symbols in by_class.values():
        for symbol in random.Random(0).sample(symbols, min(100, len(symbols))):
            text = f"a{symbol}1{symbol} {symbol}{symbol}  {symbol}."
            assert mine.encode(text) == original.encode(text).ids, (hex(ord(symbol)), unicodedata.category(symbol))


def joined_in_passes(ids: list[int], merges: dict[tuple[int, int], tuple[int, int]]) -> list[int]:
    """As the original does it: a pass over the whole word for each pair."""
    while pairs := [pair for pair in pairwise(ids) if pair in merges]:
        pair, out = min(pairs, key=lambda each: merges[each][0]), []
        while ids:
            both = tuple(ids[:2]) == pair
            out.append(merges[pair][1] if both else ids[0])
            ids = ids[1 + both :]
        ids = out
    return ids


@st.composite
def lists_of_merges(draw) -> dict[tuple[int, int], tuple[int, int]]:
    """Over the tokens 0 to 3; in any order, so that a join can make an earlier pair."""
    made = list(range(4))
    pairs: dict[tuple[int, int], int] = {}
    for _ in range(draw(st.integers(1, 12))):
        pair = draw(st.tuples(st.sampled_from(made), st.sampled_from(made)))
        if pair not in pairs:
            pairs[pair] = len(made)
            made.append(len(made))
    ranks = draw(st.permutations(range(len(pairs))))
    return {pair: (rank, number) for (pair, number), rank in zip(pairs.items(), ranks, strict=True)}


@pytest.mark.slow
@settings(max_examples=400)
@given(merges=lists_of_merges(), ids=st.lists(st.integers(0, 3), max_size=60))
def test_pairs_are_joined_as_the_original_joins_them(merges, ids):
    assert apply_merges(ids, merges) == joined_in_passes(list(ids), merges)


def test_a_long_word_takes_steps_as_it_has_letters(trained):
    """Passes would look at each pair of 40,000 letters some hundred times, which took half a minute."""

    class Counting(dict):
        looked = 0

        def get(self, key, default=None):
            self.looked += 1
            return super().get(key, default)

    mine = GPT2Tokenizer(trained / "vocab.json", trained / "merges.txt")
    word = "".join(random.Random(1).choice(("the", "cat", "sat", "dog", "x", "mat")) for _ in range(15_000))
    letters = [mine._first[ord(letter)] for letter in word]
    merges = Counting(mine.merges)
    ids = apply_merges(letters, merges)
    assert len(word) > 35_000 and len(ids) < 30_000 and merges.looked < 4 * len(word)
    assert mine.encode(word) == ids, "the library joins the same"
    assert mine._library is not None


def test_a_list_that_is_out_of_order_is_joined_here(tmp_path):
    """A join makes a pair that stands before it: the library would take that at once, the original after all others of
    the first.
    """
    tokens = [*byte_symbols(), "bb", "abb", "bbb", "bbbb"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("bb b\nb b\na bb\n")
    mine = GPT2Tokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")
    assert mine._library is None
    assert mine.decode(mine.encode("abbbbb")) == "abbbbb"
    assert mine.encode("bbbb") == [tokens.index("bb")] * 2


@needs_reference
def test_reference_tokenizer_gives_the_reference_ids():
    """Somebody else tokenized this file with these merges: decoding and encoding again must give their ids."""
    library = pytest.importorskip("tokenizers")
    assert REFERENCE is not None
    paths = [str(REFERENCE / f"gpt2-tiny-{name}") for name in ("vocab.json", "merges.txt")]
    mine = build_tokenizer("gpt2", str(REFERENCE / "gpt2-tiny"))
    assert (mine.vocab_size, mine.eod_id) == (5000, 4999)
    data, other = (
        IndexedDataset(REFERENCE / "meg-gpt2-openwebtext_text_document"),
        library.ByteLevelBPETokenizer(*paths),
    )
    for number in range(0, 1000, 25):
        ids = [number for number in data[number].tolist() if number != mine.eod_id]
        assert mine.encode(mine.decode(ids)) == ids == other.encode(other.decode(ids)).ids
    for seed in range(500):
        assert mine.encode(random_text(seed)) == other.encode(random_text(seed)).ids


@needs_reference
def test_ways_to_name_the_gpt2_files(tmp_path):
    assert REFERENCE is not None
    for path in (REFERENCE, REFERENCE / "gpt2-tiny", REFERENCE / "gpt2-tiny-vocab.json"):
        assert build_tokenizer("gpt2", str(path)).vocab_size == 5000


def test_hf_file(trained, tmp_path):
    library = pytest.importorskip("tokenizers")
    model = library.Tokenizer(library.models.BPE.from_file(str(trained / "vocab.json"), str(trained / "merges.txt")))
    model.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = library.decoders.ByteLevel()
    model.add_special_tokens(["<|endoftext|>"])
    model.enable_truncation(5)
    model.save(str(tmp_path / "tokenizer.json"))
    mine, gpt2 = build_tokenizer("hf", str(tmp_path)), build_tokenizer("gpt2", str(trained))
    assert (mine.vocab_size, mine.eod_id) == (gpt2.vocab_size, gpt2.eod_id)
    for text in ODDITIES:
        assert mine.encode(text) == gpt2.encode(text) and mine.decode(mine.encode(text)) == text


def test_sentencepiece(tmp_path):
    library = pytest.importorskip("sentencepiece")
    words = ("alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu " * 20).split()
    sentences = iter([" ".join(words[start : start + 9]) for start in range(200)])
    settings = {
        "vocab_size": 300,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
    }
    library.SentencePieceTrainer.train(
        sentence_iterator=sentences,
        model_prefix=str(tmp_path / "m"),
        hard_vocab_limit=False,
        remove_extra_whitespaces=False,
        minloglevel=2,
        **settings,
    )
    mine = build_tokenizer("sentencepiece", str(tmp_path))
    assert mine.eod_id == 2 and mine.vocab_size > 256
    for text in ("alpha beta  gamma", "日本 👍", "delta\nmu"):
        assert mine.decode(mine.encode(text)) == text
    with pytest.raises(DataError, match=f"token id {mine.vocab_size}"):
        mine.decode([mine.vocab_size])


def test_training_is_deterministic(trained, tmp_path):
    train_bpe(
        (random_text(seed) + " the cat sat on the mat, and the dog" * 3 for seed in range(300)), 600, tmp_path, silent
    )
    for name in ("vocab.json", "merges.txt"):
        assert (tmp_path / name).read_bytes() == (trained / name).read_bytes()
    with pytest.raises(DataError, match="--vocab-size 100"):
        train_bpe([], 100, tmp_path, silent)


def test_what_a_dead_process_left_of_a_tokenizer_is_removed(tmp_path):
    (tmp_path / "vocab.json.unfinished-1").write_text("left")
    train_bpe(["the cat sat on the mat"], 260, tmp_path, silent)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merges.txt", "vocab.json"]


def test_a_text_that_gives_fewer_tokens_says_why(tmp_path):
    said: list[str] = []
    train_bpe(["ab ab"], 300, tmp_path / "few", said.append)
    why = "fewer than 300: with them each word of the text is a token of its own"
    assert re.fullmatch(rf"2\d\d tokens, {why}: vocab.json and merges.txt", said[-1])
    train_bpe(["ab ab"], 258, tmp_path / "all", said.append)
    assert said[-1].startswith("258 tokens: ")


def test_bytes_that_are_no_text(trained):
    assert ByteTokenizer().decode([0xFF, 65, 256]) == "\ufffdA<|endoftext|>"
    gpt2 = build_tokenizer("gpt2", str(trained))
    half = gpt2.encode("é")[:1]
    assert "\ufffd" in gpt2.decode(half) or len(gpt2.encode("é")) == 1


def test_clear_errors(tmp_path, trained):
    with pytest.raises(DataError, match="--tokenizer 'bert': known are byte, gpt2"):
        build_tokenizer("bert", None)
    for kind in ("gpt2", "sentencepiece", "hf"):
        with pytest.raises(DataError, match=f"--tokenizer {kind} needs --tokenizer-path"):
            build_tokenizer(kind, None)
        with pytest.raises(DataError, match="tokenizer-path"):
            build_tokenizer(kind, str(tmp_path / "absent"))
    with pytest.raises(DataError, match=r"one file must end in vocab\.json; found none"):
        build_tokenizer("gpt2", str(tmp_path))
    for tokenizer in (ByteTokenizer(), build_tokenizer("gpt2", str(trained))):
        with pytest.raises(DataError, match="token id 99999"):
            tokenizer.decode([99999])
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer\.json is no JSON"):
        build_tokenizer("hf", str(tmp_path))


def test_damaged_gpt2_files(tmp_path):
    vocab = {symbol: number for number, symbol in enumerate([*byte_symbols(), "ab"])}
    files = tmp_path / "vocab.json", tmp_path / "merges.txt"

    def load(table, merges):
        files[0].write_text(json.dumps(table))
        files[1].write_text(merges)
        return GPT2Tokenizer(*files)

    assert load(vocab, "#version: 0.2\na b\n").encode("abc") == [256, ord("c")]
    with pytest.raises(DataError, match=r"merges\.txt, line 2: 'a c'"):
        load(vocab, "#version: 0.2\na c\n")
    with pytest.raises(DataError, match="no token for 1 of the 256 bytes, the first of them 33"):
        load({symbol: number for symbol, number in vocab.items() if symbol != "!"}, "")
    with pytest.raises(DataError, match="257 tokens 256 different ids"):
        load(vocab | {"ab": 5}, "")
    with pytest.raises(DataError, match="no table"):
        load([1], "")
