"""Special tokens that plain text spells. They must be tokenized as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megazero.data.indexed import DataError

CUT = "\ufdd2"
"""A marker at which the tokenizer splits a text, and which it drops: a noncharacter of Unicode, for internal use."""

OF_CLASS = {
    name: dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    for name in ("GPT2Tokenizer", "GPT2TokenizerFast")
}
"""Class of a tokenizer -> default named tokens, which its files override."""


def named_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, str]:
    """Name (bos_token, eos_token) -> token, from the contents of tokenizer_config.json and special_tokens_map.json.

    This is `transformers`'s rule: the second file has precedence, unless the first has an added_tokens_decoder (newer
    versions write that). An entry without a token removes the name.
    """
    more = config.get("extra_special_tokens")
    found: dict[str, Any] = dict(OF_CLASS.get(str(config.get("tokenizer_class")), {}))
    for entries in (
        config,
        more if isinstance(more, dict) else {},
        {} if "added_tokens_decoder" in config else special_map,
    ):
        found |= {key: token_text(value) for key, value in entries.items() if key.endswith("_token")}
    return {key: text for key, text in found.items() if text is not None}


def token_text(token: Any) -> str | None:
    """The text of a token, which these files write as a string or as a record; None if there is none."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


class SpecialTokens:
    """The texts of a tokenizer's special tokens."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(sorted(texts, key=len, reverse=True))
        self.longest = max(map(len, self.texts), default=0)
        self._beginnings = {text[:n] for text in self.texts for n in range(1, len(text))}
        self._ends = {text[-n:] for text in self.texts for n in range(1, len(text))}
        self._whole = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        self._starts = re.compile("|".join(f"(?={re.escape(text)})" for text in self.texts) or r"(?!)")

    def count(self, text: str) -> int:
        """Number of special tokens in a text, without overlaps."""
        return len(self._whole.findall(text))

    def parted(self, text: str) -> str:
        """The text with `CUT` inside each special token that it spells, also inside overlapping ones.

        Raises DataError if such a token is a single character.
        """
        starts = [found.start() for found in self._starts.finditer(text)]
        if any(text.startswith(token, start) for token in self.texts if len(token) == 1 for start in starts):
            raise DataError("the tokenizer has a special token of one character, which stands in the text")
        for start in reversed(starts):
            text = f"{text[: start + 1]}{CUT}{text[start + 1 :]}"
        return text

    def borders(self, text: str) -> bool:
        """Whether this string together with text before or behind it could spell a special token."""
        text = text.strip()
        if len(text) < self.longest and any(text in token for token in self.texts):
            return bool(text)
        return any(
            text[:n] in self._ends or text[-n:] in self._beginnings for n in range(1, min(self.longest, len(text) + 1))
        )
