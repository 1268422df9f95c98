"""From --data-path and the flags that belong to it to datasets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megazero.config.schema import DataConfig
from megazero.data.blend import normalise_weights, samples_to_build
from megazero.data.cache import default_root
from megazero.data.dataset import BlendedDataset, EmptyDataset, Samples, blend_of, one_dataset
from megazero.data.id_range import id_range_of, require_ids_below
from megazero.data.indexed import DataError, IndexedDataset
from megazero.data.orders import split_bounds
from megazero.data.progress import Report, silent
from megazero.data.tokenizer import ListedTokenizer
from megazero.data.tokenizer_record import require_tokenizer
from megazero.system.words import counted

SPLITS = ("train", "valid", "test")
Requests = tuple[int | None, int | None, int | None]


@dataclass(frozen=True)
class Blend:
    """The value of --data-path.

    prefixes  of the pairs of files
    shares    normalised weights, float64 [prefixes]; None for one prefix without a weight
    """

    prefixes: tuple[str, ...]
    shares: NDArray[np.float64] | None


@dataclass(frozen=True)
class Datasets:
    """The splits of --data-path, and the named sets of --valid-data-path."""

    train: Samples
    valid: Samples
    test: Samples
    named_valid: dict[str, Samples]


def cache_root(cfg: DataConfig) -> Path:
    return Path(cfg.data_cache_path).expanduser() if cfg.data_cache_path else default_root()


def parse_data_path(words: Sequence[str]) -> Blend:
    """Parse PREFIX, or pairs WEIGHT PREFIX (one pair is a blend of one). Raises DataError."""
    _require_names("--data-path", words)
    if len(words) == 1:
        return Blend((words[0],), None)
    if not words or len(words) % 2:
        raise DataError(
            f"--data-path has {counted(len(words), 'word')}; give one PREFIX, or WEIGHT PREFIX pairs: {' '.join(words)}"
        )
    weights = []
    for place, word in enumerate(words[::2]):
        try:
            weights.append(float(word))
        except ValueError:
            raise DataError(
                f"--data-path: word {2 * place + 1} is {word!r}, where the weight of {words[2 * place + 1]} belongs"
            ) from None
    return Blend(tuple(words[1::2]), normalise_weights(weights))


def parse_valid_data_path(words: Sequence[str]) -> dict[str, str]:
    """Parse pairs NAME PREFIX: name -> prefix. Raises DataError."""
    _require_names("--valid-data-path", words)
    if len(words) % 2:
        raise DataError(
            f"--valid-data-path has {counted(len(words), 'word')}; give NAME PREFIX pairs: {' '.join(words)}"
        )
    names = words[::2]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"--valid-data-path names {', '.join(twice)} more than once")
    return dict(zip(names, words[1::2], strict=True))


def _require_names(flag: str, words: Sequence[str]) -> None:
    """Raise DataError for an empty word, as a variable of a shell gives it that is not set."""
    if "" in words:
        raise DataError(f"{flag} {' '.join(word or repr(word) for word in words)}: '' names no pair of .bin and .idx")


def train_tokens(cfg: DataConfig) -> list[int]:
    """Number of training tokens (by --split) of each pair of --data-path. Reads only parts of the .idx files.

    Raises DataError.
    """
    pairs = [IndexedDataset(prefix) for prefix in parse_data_path(cfg.data_path).prefixes]
    return [data.tokens_between(*split_bounds(cfg.split, len(data))[0]) for data in pairs]


def build_datasets(
    cfg: DataConfig,
    *,
    seq_length: int,
    samples: Requests,
    vocab_size: int | None = None,
    tokenizer: ListedTokenizer | None = None,
    named_samples: int | None = None,
    report: Report = silent,
) -> Datasets:
    """The datasets of --data-path and --valid-data-path.

    samples        least numbers of samples of train, valid and test. With None or 0 a dataset has one epoch, and its
                   split may be empty
    named_samples  the same for each named validation set
    vocab_size     bound of the token ids; None: they are not checked
    tokenizer      the tokenizer of cfg. Pairs that record their tokenizer must have been made with it

    All ranks call this with the same arguments. The first on a file system builds index files that are not cached; the
    others wait for a file lock. Communicates nothing; no collective may be outstanding meanwhile. Raises DataError.
    """
    if seq_length < 1:
        raise DataError(f"--seq-length {seq_length}: must be at least 1")
    if not 0 <= cfg.seed < 2**32:
        raise DataError(f"--seed {cfg.seed}: must be between 0 and {2**32 - 1}")
    root = cache_root(cfg)
    blend = parse_data_path(cfg.data_path)
    named = parse_valid_data_path(cfg.valid_data_path)
    prefixes = (*blend.prefixes, *named.values())
    if tokenizer is not None:
        require_tokenizer(prefixes, tokenizer, cfg.tokenizer)
    opened = {prefix: _open(prefix, vocab_size, root, report) for prefix in prefixes}

    def single(prefix: str, name: str, bounds: tuple[int, int], requested: int | None) -> Samples:
        return one_dataset(opened[prefix], name, bounds, requested, seq_length, cfg.seed, vocab_size, root, report)

    def split(number: int) -> Samples:
        name, size = SPLITS[number], samples[number]
        bounds = [split_bounds(cfg.split, len(opened[prefix]))[number] for prefix in blend.prefixes]
        if blend.shares is None:
            return single(blend.prefixes[0], name, bounds[0], size)
        if size is None:
            raise DataError(f"--data-path has weights, so the number of {name} samples must be given (0 for none)")
        if size == 0:
            return EmptyDataset()
        index = blend_of(name, blend.shares, size, root, report)  # before its parts, whose orders take longer
        counts = samples_to_build(blend.shares, size)
        parts = [
            single(prefix, name, *rest)
            for prefix, rest in zip(blend.prefixes, zip(bounds, counts, strict=True), strict=True)
        ]
        return BlendedDataset(parts, index)

    train, valid, test = (split(number) for number in range(3))
    whole = {name: single(prefix, name, (0, len(opened[prefix])), named_samples) for name, prefix in named.items()}
    return Datasets(train, valid, test, whole)


def _open(prefix: str, vocab_size: int | None, root: Path, report: Report) -> IndexedDataset:
    data = IndexedDataset(prefix)
    if data.dtype.kind not in "iu":
        raise DataError(f"{data.idx_path}: dtype {data.dtype} holds no token ids")
    facts = id_range_of(data, root, report)
    if vocab_size is not None:
        require_ids_below(vocab_size, data, facts)
    return data
