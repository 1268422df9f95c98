"""Packed conversations: who shares a sample, what is in it, and that nobody's tokens are lost, learned twice or seen by
others.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megazero.config.schema import DataConfig
from megazero.data.conversations import ConversationEncoder, TokenizedConversation, read_conversations
from megazero.data.dataset import PackedSample
from megazero.data.indexed import DataError
from megazero.data.instructions import build_instructions
from megazero.data.loader import TrainLoader, within_documents
from megazero.data.packing import PackedDataset, Packs, first_fit, pack
from megazero.data.progress import silent
from megazero.data.tokenizer import build_tokenizer
from tests.data.chats import write_lines

SEQUENCE = 20


def naive_first_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for item, length in enumerate(lengths):
        for held in bins:
            if sum(lengths[other] for other in held) + length <= capacity:
                held.append(item)
                break
        else:
            bins.append([item])
    return bins


@pytest.mark.parametrize("count", [0, 1, 2, 7, 64, 300])
def test_first_fit(count: int) -> None:
    random = np.random.default_rng(count)
    for capacity in (1, 5, 40):
        lengths = random.integers(1, capacity + 1, count).tolist()
        assert first_fit(lengths, capacity) == naive_first_fit(lengths, capacity)


def conversations(count: int = 40, seed: int = 3) -> list[dict[str, str]]:
    random = np.random.default_rng(seed)
    return [
        {"prompt": "p" * int(random.integers(0, 9)), "completion": f"{number:02d}" * int(random.integers(1, 5))}
        for number in range(count)
    ]


def config(path: Path, cache: Path, **more: Any) -> DataConfig:
    return replace(
        DataConfig(instruction_data=(str(path),), data_cache_path=str(cache), tokenizer="byte", eod_id=256), **more
    )


def built(cfg: DataConfig, requested: int = 100, seq_length: int = SEQUENCE) -> tuple[PackedDataset, str]:
    tokenizer = build_tokenizer("byte", None)
    datasets, text = build_instructions(
        cfg, tokenizer, seq_length=seq_length, vocab_size=257, samples=(requested, 0), report=silent
    )
    assert isinstance(datasets.train, PackedDataset)
    return datasets.train, text


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("packed") / "x.jsonl", conversations())


def parts(sample: PackedSample) -> list[tuple[list[int], list[bool]]]:
    """The conversations in a sample, as a naive reader sees them: tokens, and which of them are learned as labels."""
    loss_mask = [False, *sample.loss_mask.tolist()]
    found = []
    for number in range(int(sample.documents.max()) + 1):
        (places,) = np.where(sample.documents == number)
        # The last token is no input: it belongs to a conversation that has not ended before it.
        last = places[-1] + int(places[-1] + 1 == SEQUENCE and sample.tokens[places[-1]] != 256)
        found.append((sample.tokens[places[0] : last + 1].tolist(), loss_mask[places[0] : last + 1]))
    return found


def test_every_conversation_is_in_every_epoch_once_and_whole(path: Path, tmp_path: Path) -> None:
    dataset, text = built(config(path, tmp_path))
    encoder = ConversationEncoder(build_tokenizer("byte", None), 256, 257)
    wanted = sorted((c.ids.tolist(), c.loss_mask.tolist()) for c in read_conversations([path], encoder, silent))
    orders = []
    for epoch in range(2):
        numbers = range(epoch * dataset.epoch_samples, (epoch + 1) * dataset.epoch_samples)
        samples = [dataset[number] for number in numbers]
        assert all(
            sample.tokens.shape == (SEQUENCE + 1,) and sample.loss_mask.shape == (SEQUENCE,) for sample in samples
        )
        found = []
        for sample in samples:
            for ids, loss_mask in parts(sample):
                if set(ids) != {256}:  # what fills the sample up
                    loss_mask[0] = False
                    found.append((ids, loss_mask))
                else:
                    assert not any(loss_mask[1:])
        assert sorted(found) == wanted
        assert sum(int(sample.loss_mask.sum()) for sample in samples) == sum(sum(loss_mask) for _, loss_mask in wanted)
        orders.append([sample.tokens.tobytes() for sample in samples])
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    assert f"40 conversations of {sum(len(ids) for ids, _ in wanted)} tokens in {dataset.epoch_samples} samples" in text


def test_the_first_token_of_a_conversation_is_no_label() -> None:
    """It follows the last token of another one."""
    starts, loss_mask = np.array([0, 3, 6, 8]), np.array([0, 1, 1, 0, 1, 1, 0, 1], dtype=np.bool_)
    packs = Packs(np.array([2, 0, 1]), np.array([0, 3]))
    sample = PackedDataset(
        np.arange(8, dtype=np.int32), loss_mask, starts, packs, seq_length=9, padding=77, seed=1, requested=1
    )[0]
    assert sample.tokens.tolist() == [6, 7, 0, 1, 2, 3, 4, 5, 77, 77]
    assert sample.loss_mask.tolist() == [True, False, True, True, False, True, True, False, False]
    assert sample.documents.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert within_documents(sample.documents[None])[0].tolist() == [0, 1, 0, 1, 2, 0, 1, 2, 0]


def test_a_longer_run_begins_like_a_shorter_one(path: Path, tmp_path: Path) -> None:
    short, long = (built(config(path, tmp_path), requested)[0] for requested in (3, 200))
    assert len(long) >= 200 and all(np.array_equal(short[i].tokens, long[i].tokens) for i in range(len(short)))
    other = built(config(path, tmp_path, seed=5))[0]
    assert [other[i].tokens.tolist() for i in range(5)] != [short[i].tokens.tolist() for i in range(5)]
    with pytest.raises(IndexError):
        long[len(long)]


def test_conversations_longer_than_a_sample(path: Path, tmp_path: Path) -> None:
    lengths = np.array([len(c["prompt"]) + len(c["completion"]) + 1 for c in conversations()])
    prompts = np.array([len(c["prompt"]) for c in conversations()])
    over, gone = int((lengths > 8).sum()), int(((lengths > 8) & (prompts >= 8)).sum())
    assert over > 5 and gone > 0, "this test needs both"
    with pytest.raises(
        DataError,
        match=f"--instruction-data: {over} of 40 conversations are longer than a sample's 8 tokens .* the longest has "
        f"{lengths.max()}",
    ):
        built(config(path, tmp_path), seq_length=7)
    dataset, text = built(config(path, tmp_path, long_conversations="drop"), seq_length=7)
    assert (
        f"{over} of 40 conversations are longer than a sample and left out" in text
        and len(dataset.packs.members) == 40 - over
    )
    dataset, text = built(config(path, tmp_path, long_conversations="truncate"), seq_length=7)
    assert f"{over} of 40 conversations are cut off at a sample's end, {gone} of them left out" in text
    assert len(dataset.packs.members) == 40 - gone
    assert all(dataset[number].loss_mask.any() for number in range(dataset.epoch_samples))
    with pytest.raises(DataError, match="none is left"):
        built(config(path, tmp_path, long_conversations="drop"), seq_length=1)


def test_files_that_hold_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="holds no conversation"):
        built(config(tmp_path / "empty.jsonl", tmp_path))
    with pytest.raises(DataError, match="--instruction-data: no file or folder"):
        built(config(tmp_path / "missing.jsonl", tmp_path))


def test_a_changed_file_is_tokenized_again(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", conversations(5))
    before = built(config(path, tmp_path / "cache"))[0]
    write_lines(path, conversations(6))
    assert len(built(config(path, tmp_path / "cache"))[0].packs.members) == len(before.packs.members) + 1


def test_keys_that_nothing_reads_are_named_in_every_run(tmp_path: Path) -> None:
    """Also in those that find the tokens in the cache."""
    path = write_lines(tmp_path / "x.jsonl", [record | {"source": "web"} for record in conversations(5)])
    for _ in range(2):
        said: list[str] = []
        build_instructions(
            config(path, tmp_path / "cache"),
            build_tokenizer("byte", None),
            seq_length=SEQUENCE,
            vocab_size=257,
            samples=(5, 0),
            report=said.append,
        )
        warnings = [line for line in said if line.startswith("warning")]
        assert warnings == [f"warning: {path}: nothing reads source (5 times, first in line 1)"]


def test_the_loader_gives_masks_documents_and_places(path: Path, tmp_path: Path) -> None:
    dataset = built(config(path, tmp_path))[0]
    loader = TrainLoader(
        dataset, dp_rank=1, dp_size=2, micro_batch_size=2, seq_length=SEQUENCE, restart_positions=True, num_workers=1
    )
    loader.prefetch(4, 8)
    for number, batch in enumerate(loader.micro_batches(4, 8)):
        for row, sample in enumerate(dataset[4 + (number * 2 + 1) * 2 + j] for j in range(2)):
            assert batch.loss_mask is not None and batch.documents is not None and batch.positions is not None
            assert (
                batch.tokens[row].tolist() == sample.tokens[:-1].tolist()
                and batch.labels[row].tolist() == sample.tokens[1:].tolist()
            )
            assert (
                batch.loss_mask[row].tolist() == sample.loss_mask.tolist()
                and batch.documents[row].tolist() == sample.documents.tolist()
            )
            assert batch.positions[row].tolist() == within_documents(sample.documents[None])[0].tolist()
    loader.close()
    plain = TrainLoader(dataset, dp_rank=0, dp_size=1, micro_batch_size=2, seq_length=SEQUENCE, num_workers=0)
    (batch,) = plain.micro_batches(0, 2)
    assert batch.positions is None and batch.documents is not None and batch.documents.dtype == torch.int64


def test_packs_of_many(tmp_path: Path) -> None:
    """100,000 conversations: no sample is over-full, and little room is left."""
    lengths = np.random.default_rng(1).integers(1, 400, 100_000)
    packs = pack(lengths, 1024, 1)
    members = packs.members[:]
    held = np.add.reduceat(lengths[members], packs.bounds[:-1])
    assert sorted(members.tolist()) == list(range(100_000)) and held.max() <= 1024 and held.mean() > 0.97 * 1024


def test_what_is_read_is_what_the_tokenizer_says(path: Path) -> None:
    first = next(read_conversations([path], ConversationEncoder(build_tokenizer("byte", None), 256, 257), silent))
    record = conversations()[0]
    assert (
        isinstance(first, TokenizedConversation)
        and bytes(first.ids[:-1].tolist()).decode() == record["prompt"] + record["completion"]
    )
