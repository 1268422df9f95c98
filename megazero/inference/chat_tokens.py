"""Chats as tokens: the model's chat template and tokenizer encode a conversation and decode the answer."""

from __future__ import annotations

from collections.abc import Sequence

from megazero.data.chat import Message, template_of
from megazero.data.indexed import DataError
from megazero.data.libraries import HuggingFaceTokenizer
from megazero.data.tokenizer import Tokenizer


class ChatTokens:
    """A tokenizer with a chat template. The texts that it decodes have no special tokens.

    ends  the token with which the template ends an assistant's turn; empty if it has none

    Raises DataError if the tokenizer has no chat template, ImportError without jinja2.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._template = template_of(tokenizer)
        assert isinstance(tokenizer, HuggingFaceTokenizer), "there was a template"
        self._tokenizer = tokenizer
        self.vocab_size, self.eod_id, self.encode = tokenizer.vocab_size, tokenizer.eod_id, tokenizer.encode
        self.special_tokens = tokenizer.special_tokens
        end = self._template.end_of_turn()
        known = None if end is None else tokenizer.id_of(end)
        self.ends: frozenset[int] = frozenset() if known is None else frozenset({known})

    def question(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation that the model answers. A special token that a turn spells is text.

        Raises DataError for turns that the template refuses.
        """
        (encoded,) = self._tokenizer.encode_written([self._template.question(messages)])
        return [token for token, _, _ in encoded]

    def decode(self, ids: list[int]) -> str:
        """The text of ids without special tokens, as `transformers` decodes it.

        Raises DataError for an id outside the vocabulary.
        """
        return self._tokenizer.decode_without_specials(ids)


def special_tokens_in(text: str, tokenizer: Tokenizer) -> list[str]:
    """The special tokens that a text spells, which `encode` takes as plain text."""
    if isinstance(tokenizer, HuggingFaceTokenizer | ChatTokens):
        return [token for token in tokenizer.special_tokens.texts if token in text]
    try:
        end = "" if tokenizer.eod_id is None else tokenizer.decode([tokenizer.eod_id])
    except DataError:
        return []
    return [end] if end and end in text else []
