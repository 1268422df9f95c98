"""How `transformers` takes a text otherwise than megazero does, by what a tokenizer's files say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megazero.data.folder_tokens import CompletedTokenizer
from megazero.data.libraries import HuggingFaceTokenizer
from megazero.data.tokenizer import Tokenizer
from megazero.system.reading import listed, shown

CLEAN, CLEAN_BPE = (
    "clean_up_tokenization_spaces",
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
)

_AS_THE_FILE = ("PreTrainedTokenizerFast", "TokenizersBackend")
_LLAMA = ("LlamaTokenizer", "LlamaTokenizerFast")
"""Values of tokenizer_class. The first take tokenizer.json as it is, the others only if it works on bytes."""


def begins_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that `transformers` puts before a text."""
    return tokenizer.begins if isinstance(tokenizer, HuggingFaceTokenizer | CompletedTokenizer) else ()


def differences(tokenizer: Tokenizer) -> list[str]:
    """What the tokenizer's files say that `transformers` applies and megazero does not, a phrase for each."""
    return [*_differences(tokenizer)] if isinstance(tokenizer, HuggingFaceTokenizer | CompletedTokenizer) else []


def told_of_differences(tokenizer: Tokenizer) -> Iterator[str]:
    """A line with all `differences`, if there are any."""
    if ignored := differences(tokenizer):
        yield f"the tokenizer's files say what transformers applies and is not applied here: {', '.join(ignored)}"


def _differences(tokenizer: HuggingFaceTokenizer | CompletedTokenizer) -> Iterator[str]:
    config, pieces = tokenizer.tokens.config, tokenizer.pieces()
    key = CLEAN_BPE
    if isinstance(tokenizer, HuggingFaceTokenizer):
        key = CLEAN_BPE if tokenizer.joins_pairs else CLEAN
        if tokenizer.dropout:
            yield f"dropout {tokenizer.dropout} of the merges in tokenizer.json"
    if config.get(CLEAN) is True and config.get(key) is True:
        yield f"{key} true"
    yield from _of_blanks(tokenizer, config.get("tokenizer_class"), config.get("add_prefix_space"))
    end = tokenizer.tokens.end
    if end is not None and end not in pieces:
        yield f"eos_token {shown(end)}, which has no id: {_instead(tokenizer, pieces)}"
    unknown = [token for token in sorted(tokenizer.tokens.special) if token not in pieces and token != end]
    if unknown:
        yield f"special tokens without an id, {listed(map(shown, unknown))}"


def _instead(tokenizer: Tokenizer, pieces: Mapping[str, int]) -> str:
    """What ends documents where the files name a token without an id."""
    if tokenizer.eod_id is None:
        return "no token ends documents, unless --eod-id names one"
    taken = next((piece for piece, number in pieces.items() if number == tokenizer.eod_id), "")
    return f"documents end with {shown(taken)} ({tokenizer.eod_id}), unless --eod-id names another token"


def _of_blanks(tokenizer: HuggingFaceTokenizer | CompletedTokenizer, kind: object, prefix: object) -> Iterator[str]:
    """kind: the tokenizer_class. prefix: add_prefix_space."""
    blank = _blank_before(tokenizer)
    if prefix is False and blank:
        yield "add_prefix_space false"
    if not isinstance(tokenizer, HuggingFaceTokenizer) or kind is None:
        return
    if prefix is True and not blank and kind not in (*_AS_THE_FILE, *_LLAMA):
        yield f"add_prefix_space true of {shown(kind)}"
    if prefix is not False and blank == "▁" and kind in _LLAMA and tokenizer.encode(" a") != tokenizer.encode("a"):
        yield f"tokenizer_class {shown(kind)}, which puts no blank before a text that begins with one"


def _blank_before(tokenizer: HuggingFaceTokenizer | CompletedTokenizer) -> str:
    """The blank with which the first token of a text begins and which is not in the text, as the tokenizer writes it;
    empty where there is none.
    """
    first = tokenizer.encode("a")[:1]
    found = (piece[0] for piece, number in tokenizer.pieces().items() if [number] == first and piece[:1] in ("▁", "Ġ"))
    return next(found, "")
