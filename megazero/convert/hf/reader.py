"""A Hugging Face folder as a source.

Everything that can be wrong with keys and shapes is found from headers, when it is opened.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, reduce
from pathlib import Path

import torch
from torch import Tensor

from megazero.checkpoint.window import TensorInfo
from megazero.config.dtypes import PRECISION_OF, compute_dtype
from megazero.config.schema import ModelConfig
from megazero.convert.hf.config import CONFIG, GENERATION, family_of, named_dtype, read_config, read_json, run_of
from megazero.convert.hf.files import LazyTensor, listed_places, stored_tensors, unread_weights, weight_files
from megazero.convert.hf.language_part import language_config, language_tensors, note_of_others
from megazero.convert.hf.rearrange import FUSED, SEPARATE
from megazero.convert.hf.rules import EMBEDDING, Names, Rule, their_shapes
from megazero.convert.source import WEIGHT, ConversionError, Source, parameter_specs
from megazero.convert.tokenizers import tokenizer_files

COMPANIONS = (
    *(CONFIG, GENERATION, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "chat_template.json"),
)
"""Files of a model that are no tensors."""
FURTHER_TEMPLATES = "additional_chat_templates"
_BUFFERS = (
    (re.compile(r"\.attn\.(bias|masked_bias)$"), "the causal mask, which follows from nothing but positions"),
    (re.compile(r"rotary_emb\.inv_freq$"), "rotary angles, which follow from rope_theta"),
)
_STRANGE = "the model that config.json describes has no such tensor"
Places = Callable[[], Mapping[str, str]]
"""Key -> where the index says that it is, of `files.listed_places`."""
_SHOWN = 20
_ROWS = 1 << 14


class HfSource(Source):
    """A model of a family that is known here, of one file or many."""

    def __init__(self, path: Path, closing: ExitStack) -> None:
        where = path / CONFIG
        whole = read_json(where)
        config = language_config(whole, where)
        model, self.family = read_config(config, where), family_of(config, where)
        named = config.get("transformers_weights")
        self._stored, others = language_tensors(whole, stored_tensors(path, closing, named))
        places = cache(lambda: language_tensors(whole, listed_places(path, named))[0])  # for an error alone
        self._rules, entries = _found(path, self.family.names, model, self._stored, places)
        dtype = reduce(torch.promote_types, {entry.columns[WEIGHT] for entry in entries.values()})
        companions = {name: path / name for name in COMPANIONS if (path / name).is_file()}
        super().__init__("hf", path, run_of(config, where, dtype), entries, companions=companions, closing=closing)
        self._name_tokenizer()
        head = self.family.names.head
        tied = not model.untie_embeddings_and_output_weights
        self.tied = {head} if tied and head in self._stored else set[str]()
        unread = unread_weights(path, named)
        if unread:
            self.report.notes.append(f"{', '.join(unread)} not read: transformers too takes the other weights")
        if (path / FURTHER_TEMPLATES).is_dir():
            self.report.notes.append(f"{FURTHER_TEMPLATES} is not taken along: a checkpoint has one chat template")
        self.report.unused |= dict.fromkeys(others, "no part of the language model")
        notes = [*note_of_others(whole, others), *self.family.notes(config)]
        self._report(config.get("architectures"), named_dtype(config), notes)

    def _name_tokenizer(self) -> None:
        found = tokenizer_files(self)
        if found is not None:
            self.run = replace(self.run, data=replace(self.run.data, tokenizer=found[0], tokenizer_path=found[1]))

    def _report(self, architectures: object, named: str | None, notes: Iterable[str]) -> None:
        used = {key for rule in self._rules.values() for key in rule.theirs}
        self.report.mapped += [key for key in self._stored if key in used]
        self.report.unused |= {key: self._reason(key) for key in self._stored if key not in used}
        self.report.notes += notes
        strange = [key for key, why in self.report.unused.items() if why == _STRANGE]
        if strange:
            self.report.notes.append(
                f"{len(strange)} tensors are no part of the model that {CONFIG} describes ({strange[0]}), and are left "
                "out"
            )
        dtypes = Counter(entry.columns[WEIGHT] for entry in self.entries.values())
        stored = compute_dtype(self.run.optimizer.precision)
        if len(dtypes) > 1:
            kinds = ", ".join(f"{count} of {dtype}" for dtype, count in dtypes.most_common())
            self.report.notes.append(f"tensors are stored in several dtypes ({kinds}); the model is taken as {stored}")
        if named is not None and named != str(stored).removeprefix("torch."):
            self.report.notes.append(f"{CONFIG} says {named}, the tensors are {stored}: they are taken as they are")
        if architectures and self.family.architecture not in architectures:  # type: ignore[operator]
            self.report.notes.append(f"{CONFIG} says {architectures}; only the language model is read")

    def _reason(self, key: str) -> str:
        if key in self.tied:
            return "tied to the embedding, and compared with it when that is read"
        return next((why for pattern, why in _BUFFERS if pattern.search(key)), _STRANGE)

    @property
    def separates_qkv(self) -> bool:
        return any(rule.how in (SEPARATE, FUSED) for rule in self._rules.values())

    def read(self, name: str, column: str = WEIGHT) -> Tensor:
        if column != WEIGHT:
            raise KeyError(f"Hugging Face folders hold weights, not {column}")
        rule = self._rules[name]
        parts = [self._stored[key].read() for key in rule.theirs]
        if name == EMBEDDING and self.tied - set(rule.theirs):
            self._compare(parts[0], self._stored[self.family.names.head].read())
        return rule.how.ours(self.model, parts).to(self.entries[name].columns[WEIGHT])

    def _compare(self, embedding: Tensor, head: Tensor) -> None:
        """Refuse a model that config.json calls tied but whose head differs from the embedding: the head would be lost.

        The two are compared in pieces, since both may be mapped files.
        """
        pieces = zip(embedding.split(_ROWS), head.split(_ROWS), strict=True)
        if embedding.shape != head.shape or not all(
            torch.equal(ours.to(theirs.dtype), theirs) for ours, theirs in pieces
        ):
            raise ConversionError(
                f"{self.path}: {self.family.names.head} differs from the embedding, but {CONFIG} says "
                "tie_word_embeddings; for a model with a head of its own set it to false there, else leave the tensor "
                "out"
            )


def _found(
    path: Path, names: Names, model: ModelConfig, stored: Mapping[str, LazyTensor], places: Places
) -> tuple[dict[str, Rule], dict[str, TensorInfo]]:
    """Each rule with the keys as the files have them, and the entries. places: what `files.listed_places` finds.

    Raises one ConversionError with every key that is missing or has another shape.
    """
    rules, entries, problems = {}, {}, []
    for name, spec in parameter_specs(model).items():
        rule = _as_stored(names.rule(name), names, model, stored)
        shapes = their_shapes(rule, model, spec.shape)
        wrong = list(_misfits(rule, shapes, stored, places))
        if wrong:
            problems += wrong
            continue
        kinds = {dtype for key in rule.theirs if (dtype := stored[key].dtype)}
        rules[name] = rule
        entries[name] = TensorInfo(spec.shape, {WEIGHT: reduce(torch.promote_types, kinds)})
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ConversionError(f"{path} does not hold the model of its {CONFIG}: {'; '.join(problems[:_SHOWN])}{more}")
    return rules, entries


def _as_stored(rule: Rule, names: Names, model: ModelConfig, stored: Mapping[str, LazyTensor]) -> Rule:
    """The keys as the files have them, with the prefix or without. Of a tied model this may be the head's key, where
    only the head was stored.
    """
    keys = tuple(
        full if full in stored or key not in stored else key
        for full, key in zip(names.written(rule), rule.theirs, strict=True)
    )
    tied = rule.ours == EMBEDDING and not model.untie_embeddings_and_output_weights
    if tied and keys[0] not in stored and names.head in stored:
        keys = (names.head,)
    return replace(rule, theirs=keys)


def _misfits(
    rule: Rule, shapes: list[tuple[int, ...]], stored: Mapping[str, LazyTensor], places: Places
) -> Iterator[str]:
    for key, shape in zip(rule.theirs, shapes, strict=True):
        if key not in stored:
            listed = f", though {places()[key]}" if key in places() else ""
            yield f"{key} {list(shape)} is missing ({rule.ours}){listed}"
        elif stored[key].shape != shape:
            yield f"{key} is {list(stored[key].shape)}, not {list(shape)} ({rule.ours})"
        elif stored[key].dtype not in PRECISION_OF:
            yield f"{key} is stored as {stored[key].code}, which is no dtype of weights here ({rule.ours})"


def recognises(path: Path) -> bool:
    """Whether a folder has a config.json and weight files under transformers' names."""
    try:
        return (path / CONFIG).is_file() and bool(weight_files(path))
    except ConversionError:  # an index that cannot be read: opening says so
        return True


def open_hf(path: Path) -> HfSource:
    """A folder as `save_pretrained` writes it. Raises ConversionError."""
    with ExitStack() as stack:
        source = HfSource(path, stack)
        source.closing = stack.pop_all()
    return source
