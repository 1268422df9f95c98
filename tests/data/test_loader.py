"""The loader: which samples, in which order, with which masks, whoever prepares them."""

import threading
import time

import numpy as np
import pytest
import torch

from megazero.data.indexed import DataError
from megazero.data.loader import TrainLoader

S = 6


class Numbered:
    """Sample i holds i in every place but a separator (0) at 2 and, in odd samples, at 0."""

    plans: tuple[tuple[int, int], ...] = ()

    def __init__(self, count=1000):
        self.count, self.asked, self.threads = count, [], set()

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.asked.append(index)
        self.threads.add(threading.current_thread().name)
        text = np.full(S + 1, index + 1, dtype=np.int64)
        text[2] = 0
        text[0] *= 1 - index % 2
        return text


def _loader(dataset=None, dp_rank=0, dp_size=1, micro=2, workers=1, **more):
    shape = {"dp_rank": dp_rank, "dp_size": dp_size, "micro_batch_size": micro, "seq_length": S, "num_workers": workers}
    return TrainLoader(dataset or Numbered(), **shape, **more)


@pytest.mark.parametrize(("dp", "micro"), [(1, 1), (1, 12), (2, 3), (3, 2), (4, 1), (6, 2), (12, 1)])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_global_batch_is_the_same_for_every_layout(dp, micro, workers):
    """Consumed samples alone decide; micro-batch m of rank r holds consumed + (m dp + r) b + j."""
    for consumed in (0, 7, 36):
        seen = {}
        for rank in range(dp):
            loader = _loader(dp_rank=rank, dp_size=dp, micro=micro, workers=workers)
            loader.prefetch(consumed, 12)
            for number, batch in enumerate(loader.micro_batches(consumed, 12)):
                expected = consumed + (number * dp + rank) * micro + np.arange(micro)
                assert batch.samples.tolist() == expected.tolist()
                assert batch.samples.dtype == batch.tokens.dtype == batch.labels.dtype == torch.int64
                for row, sample in enumerate(batch.samples.tolist()):
                    text = torch.from_numpy(Numbered()[sample])
                    assert torch.equal(batch.tokens[row], text[:-1]) and torch.equal(batch.labels[row], text[1:])
                    seen[sample] = (rank, number, row)
            loader.close()
        assert sorted(seen) == list(range(consumed, consumed + 12))


def test_masks():
    loader = _loader(eod_id=0, eod_mask_loss=True, document_mask=True)
    (batch,) = loader.micro_batches(4, 2)
    assert batch.loss_mask is not None and batch.documents is not None
    assert batch.loss_mask.tolist() == [[True, True, False, True, True, True], [False, True, False, True, True, True]]
    assert batch.documents.tolist() == [[0, 0, 0, 1, 1, 1], [0, 1, 1, 2, 2, 2]]
    assert batch.loss_mask.dtype == torch.bool and batch.documents.dtype == torch.int64
    (plain,) = _loader(eod_id=0).micro_batches(4, 2)
    assert plain.loss_mask is None and plain.documents is None


def test_prefetch_works_in_the_background_and_only_once():
    dataset = Numbered()
    loader = _loader(dataset)
    loader.prefetch(0, 4)
    loader.prefetch(0, 4)
    while len(dataset.asked) < 4:
        time.sleep(0.001)
    assert threading.current_thread().name not in dataset.threads
    loader.micro_batches(0, 4)
    assert sorted(dataset.asked) == [0, 1, 2, 3]
    loader.prefetch(4, 4)
    assert [batch.samples.tolist() for batch in loader.micro_batches(100, 4)] == [[100, 101], [102, 103]]
    loader.close()


def test_a_failure_in_the_background_reaches_the_step():
    class Broken(Numbered):
        def __getitem__(self, index):
            raise DataError("x.bin: sample 3 is broken")

    loader = _loader(Broken())
    loader.prefetch(0, 4)
    with pytest.raises(DataError, match="sample 3 is broken"):
        loader.micro_batches(0, 4)


def test_clear_errors():
    with pytest.raises(DataError, match=r"--global-batch-size 10 is not a multiple of --micro-batch-size 2 x dp 3 = 6"):
        _loader(dp_size=3).micro_batches(0, 10)
    with pytest.raises(DataError, match=r"samples 996 to 1003 are asked of a dataset of 1000"):
        loader = _loader()
        loader.prefetch(996, 8)
        loader.micro_batches(996, 8)
    for flag in ("eod_mask_loss", "document_mask"):
        with pytest.raises(DataError, match="--eod-id"):
            _loader(**{flag: True})
