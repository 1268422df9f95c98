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
    if config.get("add_prefix_space") is False and _blank_before(tokenizer):
        yield "add_prefix_space false"
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


def _blank_before(tokenizer: HuggingFaceTokenizer | CompletedTokenizer) -> bool:
    """Whether the first token of a text begins with a blank that is not in the text."""
    ids = tokenizer.encode("a")
    return any(piece[:1] in "▁Ġ" for piece, number in tokenizer.pieces().items() if ids and piece and number == ids[0])
