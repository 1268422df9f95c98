"""A step on the card: nothing in it waits, the input travels beside it, weight gradients are one product, and bits
repeat.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fused_ops import linear
from fused_ops.linear import add_weight_gradient
from megazero.data.loader import TrainLoader
from megazero.system import device as devices
from tests.gpu.jobs import assert_equal, deterministic_again, flags_of, job_on_card, train
from tests.gpu.synchronisation import raise_on_synchronisation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not devices.cuda_available(), reason="torch finds no NVIDIA GPU on this machine"),
]

NUMBERS = ["--micro-batch-size", "2", "--global-batch-size", "8", "--lr", "1e-3"]
RUNS = {
    "bf16, alibi": [],
    "fp16, learned, dropout": ["--precision", "fp16", "--position-embedding", "learned", "--hidden-dropout", "0.1"],
    "documents, masks": ["--document-mask", "--eod-mask-loss", "--eod-id", "0"],
    "llama": "--position-embedding rotary --norm rmsnorm --activation swiglu --num-query-groups 4".split(),
    "attention dropout, recompute": ["--attention-dropout", "0.1", "--recompute-granularity", "full"],
    "fp32, smoothing, sgd": "--precision fp32 --label-smoothing 0.1 --z-loss 1e-3 --optimizer sgd".split(),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_host_waits_for_nothing(name: str, corpus: Path, tmp_path: Path) -> None:
    flags = [*NUMBERS, *RUNS[name], "--train-iters", "50", "--log-interval", "50"]
    job, _ = job_on_card(flags_of(flags, corpus, tmp_path / "cache"))
    for _ in range(3):  # kernels are compiled, tables made, the allocator filled
        job.trainer.train_step(stop=False)
        job.trainer.after_step()
    with raise_on_synchronisation(job.grid.device):
        for _ in range(3):
            job.trainer.train_step(stop=False)
            job.trainer.after_step()
    job.trainer.log.flush()
    assert job.trainer.position.iteration == 6


def test_waiting_would_be_noticed() -> None:
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError), raise_on_synchronisation(x.device):
        x.sum().item()
    with pytest.raises(RuntimeError), raise_on_synchronisation(x.device):
        torch.tensor(1.0, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_gradient_is_one_product_into_the_wide_sum(dtype: torch.dtype) -> None:
    """No 16-bit product between: 3 x 2^-9 of it would show. Factors are columns of wider tensors."""
    generator = torch.Generator("cuda").manual_seed(1)
    grad, x = (
        torch.randn((4096, n + 8), dtype=torch.float32, device="cuda", generator=generator).to(dtype)[:, 8:]
        for n in (520, 264)
    )
    into = torch.full((520 * 264 + 24,), torch.nan, device="cuda")[24:].view(520, 264)
    exact = grad.double().t() @ x.double()
    scale = grad.double().abs().t() @ x.double().abs()
    for times in (1, 2, 3):
        add_weight_gradient(grad, x, into, times > 1)
        assert ((into.double() - times * exact).abs() <= times * 2e-6 * scale).all()
    assert linear._widens("cuda", dtype, torch.float32, True) and linear._widens("cuda", dtype, torch.float32, False)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        add_weight_gradient(grad, x, into, True)
        torch.cuda.synchronize()
    on_card = [event.name for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [name for name in on_card if not name.startswith(("Mem", "mem"))]
    # A product over 4096 rows may be split, and its parts are then summed by a second kernel.
    assert 1 <= len(kernels) <= 2, kernels


class Numbered:
    """Sample n is n, n + 1, ..."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> np.ndarray:
        return np.arange(index, index + 4097, dtype=np.int64)


def test_batches_arrive_whole_while_the_card_computes() -> None:
    """Each is taken while products are queued, and its memory is used again for the next ones."""
    loader = TrainLoader(Numbered(), dp_rank=0, dp_size=1, micro_batch_size=4, seq_length=4096, device="cuda")  # type: ignore[arg-type]
    a, found = torch.randn(4096, 4096, device="cuda"), []
    expected: list[Tensor] = []
    for step in range(30):
        loader.prefetch(8 * step + 8, 8)
        for batch in loader.micro_batches(8 * step, 8):
            a = (a @ a).tanh_()
            assert batch.tokens.is_cuda and batch.samples.is_cuda
            found.append(batch.tokens[:, ::1000].clone())
            expected.append(batch.samples)
        loader.upload()
    for tokens, samples in zip(found, expected, strict=True):
        assert torch.equal(tokens, samples[:, None] + torch.arange(0, 4096, 1000, device="cuda"))
    loader.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16, alibi", "fp16, learned, dropout", "documents, masks"])
def test_two_deterministic_runs_have_the_same_bits(name: str, corpus: Path, tmp_path: Path) -> None:
    flags = flags_of([*NUMBERS, *RUNS[name], "--train-iters", "20", "--deterministic"], corpus, tmp_path / "cache")
    with deterministic_again():
        first, second = train(flags), train(flags)
    assert len(first.records) == 20
    assert_equal(first, second)
