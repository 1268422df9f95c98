"""A model's tokenizer as GGUF's metadata, from the files that `--to hf` writes: tokenizer.json or tokenizer.model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megazero.convert.hf.config import read_json
from megazero.convert.source import ConversionError

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Types of tokens: those of gguf and of sentencepiece, which are the same numbers."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS: Mapping[str, str] = MappingProxyType(
    {
        _GPT2: "gpt-2",
        _WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe",
        _WORDS + r"\p{N}" + _REST: "qwen2",
        r" ?[^(\s|[.,!?…。，、।۔،])]+": "bloom",  # noqa: RUF001 (as BLOOM has it)
    }
)
"""The pattern by which a tokenizer cuts text into words -> llama.cpp's name for the pattern."""


@dataclass(frozen=True)
class GgufVocabulary:
    """The tokens of a model by id.

    model   llama.cpp's algorithm: gpt2 (merges of bytes), llama (sentencepiece's BPE), t5 (sentencepiece's unigrams)
    pre     how text is cut into words
    scores  of sentencepiece
    merges  of gpt2: two tokens with a blank between
    extra   further metadata by the name of the writer's method without its add_
    """

    model: str
    pre: str
    tokens: tuple[str | bytes, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...] = ()
    merges: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def padded(self, size: int) -> GgufVocabulary:
        """With tokens that stand for nothing, as many as the model's embedding has rows. Raises ConversionError for a
        tokenizer with more tokens than rows.
        """
        lacking = size - len(self.tokens)
        if lacking < 0:
            raise ConversionError(
                f"the tokenizer has {len(self.tokens)} tokens, and the model {size}: llama.cpp opens no such file; "
                "--without-tokenizer writes the model alone"
            )
        return GgufVocabulary(
            self.model,
            self.pre,
            (*self.tokens, *(f"[PAD{number}]" for number in range(len(self.tokens), size))),
            (*self.types, *[UNUSED] * lacking),
            (*self.scores, *[-1000.0] * lacking) if self.scores else (),
            self.merges,
            self.extra,
        )


def vocabulary_in(folder: Path) -> GgufVocabulary | None:
    """The tokenizer in a folder of transformers' files; None if there is none. tokenizer.model counts first, since it
    says more than the tokenizer.json that transformers makes of it. Raises ConversionError where llama.cpp has none
    such.
    """
    if (folder / "tokenizer.model").is_file():
        return _sentencepiece(folder / "tokenizer.model")
    if (folder / "tokenizer.json").is_file():
        return _byte_level(read_json(folder / "tokenizer.json", most=1 << 30))
    return None


def _byte_level(made: Mapping[str, Any]) -> GgufVocabulary:
    """Of a tokenizer.json whose model merges bytes."""
    model = made["model"]
    if model.get("type", "BPE") != "BPE" or model.get("byte_fallback"):
        raise _unknown(f"tokenizer.json of the model {model.get('type')}, which merges no bytes")
    pre = _pre_tokenizer(made.get("pre_tokenizer") or {})
    by_id = {number: (token, NORMAL) for token, number in model["vocab"].items()}
    for added in made.get("added_tokens") or ():
        by_id[added["id"]] = added["content"], CONTROL if added.get("special") else USER_DEFINED
    rows = [by_id.get(number, (f"[PAD{number}]", UNUSED)) for number in range(max(by_id) + 1)]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    tokens, types = zip(*rows, strict=True)
    return GgufVocabulary("gpt2", pre, tokens, types, merges=tuple(merges))


def _pre_tokenizer(cut: Mapping[str, Any]) -> str:
    """llama.cpp's name for how text is cut: by ByteLevel with its own pattern, or by a Split before."""
    steps = cut.get("pretokenizers", [cut])
    patterns = [(step.get("pattern") or {}).get("Regex") for step in steps if step.get("type") == "Split"]
    level = next((step for step in steps if step.get("type") == "ByteLevel"), None)
    if level is not None and level.get("use_regex", True):
        patterns.append(_GPT2)
    known = PRE_TOKENIZERS.get(patterns[0] or "") if len(patterns) == 1 else None
    if level is None or known is None or level.get("add_prefix_space"):
        raise _unknown(f"tokenizer.json that cuts text by {json.dumps(cut)[:200]}")
    return known


def _sentencepiece(file: Path) -> GgufVocabulary:
    try:
        from sentencepiece import sentencepiece_model_pb2 as format_of
    except ImportError as error:
        raise ConversionError(
            f"tokenizer.model needs the packages sentencepiece and protobuf ({error}): pip install sentencepiece "
            "protobuf"
        ) from error
    made: Any = getattr(format_of, "ModelProto")()  # noqa: B009 (made at import)
    made.ParseFromString(file.read_bytes())
    kinds = {made.trainer_spec.UNIGRAM: "t5", made.trainer_spec.BPE: "llama"}
    if made.trainer_spec.model_type not in kinds:
        raise _unknown("tokenizer.model of words or of characters")
    extra: dict[str, Any] = {"add_space_prefix": made.normalizer_spec.add_dummy_prefix}
    if made.trainer_spec.model_type == made.trainer_spec.UNIGRAM:
        extra["remove_extra_whitespaces"] = made.normalizer_spec.remove_extra_whitespaces
        if made.normalizer_spec.precompiled_charsmap:
            extra["precompiled_charsmap"] = made.normalizer_spec.precompiled_charsmap
    return GgufVocabulary(
        kinds[made.trainer_spec.model_type],
        "default",
        tuple(piece.piece for piece in made.pieces),
        tuple(piece.type for piece in made.pieces),
        tuple(piece.score for piece in made.pieces),
        extra=extra,
    )


def _unknown(what: str) -> ConversionError:
    return ConversionError(
        f"--to gguf: a {what}: llama.cpp's name for it is not known; --without-tokenizer writes the model alone"
    )


@dataclass(frozen=True)
class Usage:
    """What surrounds a text: ids by the name of the writer's method without its add_, what is put around a prompt, and
    the template of chats.
    """

    ids: Mapping[str, int]
    add_bos: bool
    template: str | None


def usage_in(folder: Path, vocabulary: GgufVocabulary, end_of_text: int | None, end_of_turn: int | None) -> Usage:
    """From tokenizer_config.json and chat_template.jinja. end_of_text: of the run; end_of_turn: of the template."""
    file = folder / "tokenizer_config.json"
    settings = read_json(file) if file.is_file() else {}
    numbers = {token: number for number, token in enumerate(vocabulary.tokens)}
    ids = {"eos_token_id": end_of_text, "eot_token_id": end_of_turn}
    for kind in ("bos", "eos", "unk", "pad"):
        token = settings.get(f"{kind}_token")
        content = token.get("content") if isinstance(token, dict) else token
        if content in numbers:
            ids[f"{kind}_token_id"] = numbers[content]
    template = folder / "chat_template.jinja"
    kept = template.read_text(encoding="utf-8") if template.is_file() else settings.get("chat_template")
    # Classes of LLaMA add a BOS unless they say otherwise; megazero's own tokenizers add nothing.
    adds = settings.get("add_bos_token", "Llama" in str(settings.get("tokenizer_class")))
    return Usage(
        {name: number for name, number in ids.items() if number is not None},
        bool(adds) and "bos_token_id" in ids,
        kept if isinstance(kept, str) else None,
    )
