"""From --instruction-data to datasets. Conversations are tokenized once per file system and packed once per seed and
sequence length.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megazero.config.schema import DataConfig
from megazero.data.build import Datasets, cache_root
from megazero.data.cache import cached_arrays
from megazero.data.conversations import ConversationEncoder, read_conversations
from megazero.data.dataset import EmptyDataset
from megazero.data.file_array import ArrayRows
from megazero.data.indexed import BLOCK, DataError
from megazero.data.input_files import find_files
from megazero.data.packing import PackedDataset, Packs, pack
from megazero.data.progress import Report
from megazero.data.tokenizer import Tokenizer, place_of
from megazero.system.words import counted

FORMAT = 6
"""Version of the cache. It is increased when the same files give other tokens."""
TOKENIZER_ENDINGS = (".json", ".txt", ".model", ".jinja")


@dataclass(frozen=True)
class Conversations:
    """Tokenized conversations, back to back.

    facts      what determines them, for keys of caches
    tokens     int32 [T]
    loss_mask  bool [T]
    starts     int64 [n + 1], in memory: the beginning of each conversation, and the end
    """

    facts: dict[str, Any]
    tokens: ArrayRows
    loss_mask: ArrayRows
    starts: NDArray[np.int64]


def build_instructions(
    cfg: DataConfig,
    tokenizer: Tokenizer,
    *,
    seq_length: int,
    vocab_size: int,
    samples: tuple[int, int],
    report: Report,
) -> tuple[Datasets, str]:
    """Training and validation datasets with at least `samples` samples each, and a description for the banner.

    cfg.eod_id ends completions and pads samples. All ranks call this with the same arguments. The first on a file
    system tokenizes and packs; the others wait for a file lock. Communicates nothing. Raises DataError.
    """
    encoder = ConversationEncoder(tokenizer, cfg.eod_id, vocab_size)
    texts = []
    made: list[PackedDataset] = []
    for flag, names, requested in zip(
        ("--instruction-data", "--valid-instruction-data"),
        (cfg.instruction_data, cfg.valid_instruction_data),
        samples,
        strict=True,
    ):
        if names:
            read = _tokenized(flag, names, cfg, encoder, report)
            dataset, text = _packed(flag, read, cfg, seq_length, requested, report)
            made.append(dataset)
            texts.append(f"{' '.join(names)}: {text}")
    train, *valid = made
    return Datasets(train, valid[0] if valid else EmptyDataset(), EmptyDataset(), {}), "; validation on ".join(texts)


def _tokenized(
    flag: str, names: Sequence[str], cfg: DataConfig, encoder: ConversationEncoder, report: Report
) -> Conversations:
    try:
        paths = find_files(names, report=report)
    except DataError as error:
        raise DataError(f"{flag}: {error}") from error
    facts = {
        "format": FORMAT,
        "files": [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in paths],
        "tokenizer": [cfg.tokenizer, _fingerprint(cfg.tokenizer_path)],
        "eod_id": cfg.eod_id,
        "vocab_size": encoder.vocab_size,
    }

    def build(say: Report) -> dict[str, NDArray]:
        encoder.told.clear()
        tokens, loss_mask, lengths = [np.zeros(0, dtype=np.int32)], [np.zeros(0, dtype=np.bool_)], [0]
        for conversation in read_conversations(paths, encoder, say):
            tokens.append(conversation.ids)
            loss_mask.append(conversation.loss_mask)
            lengths.append(len(conversation.ids))
        return {
            "tokens": np.concatenate(tokens),
            "learned": np.concatenate(loss_mask),  # the name of this array in existing caches
            "starts": np.cumsum(lengths, dtype=np.int64),
            "told": np.frombuffer(os.fsencode("\0".join(encoder.told)), dtype=np.uint8),
        }

    arrays = cached_arrays(cache_root(cfg), "conversations", facts, build, report)
    for line in filter(None, os.fsdecode(arrays["told"][:].tobytes()).split("\0")):
        report(line)
    found = Conversations(facts, arrays["tokens"], arrays["learned"], arrays["starts"][:])
    if len(found.starts) < 2:
        raise DataError(f"{flag} {' '.join(names)}: holds no conversation")
    return found


def _packed(
    flag: str, read: Conversations, cfg: DataConfig, seq_length: int, requested: int, report: Report
) -> tuple[PackedDataset, str]:
    capacity = seq_length + 1
    lengths, told = _fitted(flag, read, cfg.long_conversations, capacity)
    facts = {"conversations": read.facts, "capacity": capacity, "seed": cfg.seed, "long": cfg.long_conversations}

    def build(say: Report) -> dict[str, NDArray]:
        say(f"packing {counted(int(np.count_nonzero(lengths)), 'conversation')} into samples of {capacity:,} tokens")
        packs = pack(lengths, capacity, cfg.seed)
        return {"members": packs.members[:], "bounds": packs.bounds}

    arrays = cached_arrays(cache_root(cfg), "packs", facts, build, report)
    packs = Packs(arrays["members"], arrays["bounds"][:])
    padding = 0 if cfg.eod_id is None else cfg.eod_id
    dataset = PackedDataset(
        read.tokens,
        read.loss_mask,
        read.starts,
        packs,
        seq_length=seq_length,
        padding=padding,
        seed=cfg.seed,
        requested=requested,
    )
    trained = sum(
        np.count_nonzero(read.loss_mask[start : start + BLOCK]) for start in range(0, len(read.loss_mask), BLOCK)
    )
    held = int(np.minimum(lengths, capacity).sum())
    text = (
        f"{counted(int(np.count_nonzero(lengths)), 'conversation')} of {counted(held, 'token')} in "
        f"{counted(dataset.epoch_samples, 'sample')}, "
        f"{held / (dataset.epoch_samples * capacity):.0%} full; {trained / len(read.loss_mask):.0%} of the tokens are "
        "learned"
    )
    return dataset, "; ".join([text, *told])


def _fitted(flag: str, read: Conversations, long: str, capacity: int) -> tuple[NDArray[np.int64], list[str]]:
    """(lengths of the conversations, 0 for one that is left out; a sentence on those longer than a sample)."""
    lengths = np.diff(read.starts)
    over = np.flatnonzero(lengths > capacity)
    if not len(over):
        return lengths, []
    many = f"{len(over):,} of {counted(len(lengths), 'conversation')}"
    if long == "refuse":
        raise DataError(
            f"{flag}: {many} are longer than a sample's {capacity:,} tokens (--seq-length {capacity - 1} and one "
            "more), the longest has "
            f"{lengths.max():,}; cut off what is too much with --long-conversations truncate, leave them out with "
            "--long-conversations drop, "
            f"or take a longer --seq-length"
        )
    if long == "drop":
        out = over
        told = f"{many} are longer than a sample and left out"
    else:
        begins = read.starts[over].tolist()
        out = over[[not read.loss_mask[begin : begin + capacity].any() for begin in begins]]
        told = (
            f"{many} are cut off at a sample's end, {len(out):,} of them left out, since nothing that is learned "
            "would be left"
        )
    lengths = lengths.copy()
    lengths[out] = 0
    if not lengths.any():
        raise DataError(f"{flag}: {told}; none is left")
    return lengths, [told]


def _fingerprint(path: str | None) -> str | None:
    """A hash of the files of a tokenizer and its chat template."""
    if path is None:
        return None
    place = place_of(path)
    folder = place if place.is_dir() else place.parent
    files = [place] if place.is_file() else []
    files += [file for file in sorted(folder.iterdir()) if file.is_file() and file.suffix in TOKENIZER_ENDINGS]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
