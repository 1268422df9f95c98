"""A training step does not wait for its device.

The device is torch's "meta": its tensors have no values, so every way of reading one fails, and the code takes the
branches of a device that runs behind the host. What torch lets through there (numbers copied to the device, results
whose size only the device knows) is looked for among the operations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fused_ops.linear import add_weight_gradient
from megazero.config.parse import parse_run
from megazero.data.progress import silent
from megazero.mpu.axes import axes_of
from megazero.mpu.grid import build_grid
from megazero.train.job import Job, build_job
from megazero.train.prepare import prepare
from tests.parity.training import data_flags, small_model

MODEL = small_model(2, heads=4)
NUMBERS = "--global-batch-size 4 --micro-batch-size 2 --train-iters 50 --log-interval 50 --eval-iters 0"
FP8 = "--hidden-size 32 --seq-length 16 --fp8"
RUNS = {
    "bf16": "--precision bf16",
    "fp16, late updates": "--precision fp16 --late-update",
    "fp16, dynamic scale": "--precision fp16",
    "fp32, sgd, masks": "--precision fp32 --optimizer sgd --eod-mask-loss --document-mask --eod-id 0",
    "dropout, recompute": "--hidden-dropout 0.1 --attention-dropout 0.1 --recompute-granularity full",
    "FP8": "--fp8 delayed --hidden-size 64",
    "fp8": FP8,
    "fp8, delayed, recompute": f"{FP8} delayed --activation swiglu --recompute-granularity full",
    "llama": "--position-embedding rotary --norm rmsnorm --activation swiglu --num-query-groups 2",
    "learned, untied, smoothing": "--position-embedding learned --untie-embeddings-and-output-weights "
    "--label-smoothing 0.1 --z-loss 0.001 --zero-stage 2 --recompute-granularity selective",
}
SIZED_BY_VALUES: tuple[str, ...] = ("aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim")
SIZED_BY_VALUES += ("aten::repeat_interleave.Tensor",)
READS = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")


def tensors(values: Any) -> Iterator[Tensor]:
    """Those among arguments, lists included."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(value)


class Numbers(TorchFunctionMode):
    """Writes down tensors made on the device from numbers of the host: torch makes them there and copies."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        makes = func in (torch.tensor, torch.as_tensor, torch.asarray)
        if makes and result.is_meta and not isinstance(args[0], Tensor):
            self.found.append(f"torch.{func.__name__} of numbers")
        return result


class Waits(TorchDispatchMode):
    """Writes down what would make the host wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.seen: Counter[str] = Counter()
        self._numbers = Numbers(self.found)

    def __enter__(self) -> Waits:
        super().__enter__()
        self._numbers.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._numbers.__exit__(*error)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, given = func._schema.name, list(tensors([*args, *(kwargs or {}).values()]))
        on_device = any(tensor.is_meta for tensor in given)
        overload = f"{name}.{func._schema.overload_name}" if func._schema.overload_name else name
        self.seen[overload] += on_device
        if on_device and (name in READS or overload in SIZED_BY_VALUES or name in SIZED_BY_VALUES):
            self.found.append(overload)
        if on_device and name in ("aten::index.Tensor", "aten::index", "aten::index_put", "aten::index_put_"):
            self.found += [f"{name} by a mask" for index in tensors(args[1]) if index.dtype == torch.bool]
        after = [result] if isinstance(result, Tensor) else []
        crosses = (
            name in ("aten::_to_copy", "aten::copy_") and len({tensor.is_meta for tensor in [*given, *after]}) == 2
        )
        if crosses and not (kwargs or {}).get("non_blocking", len(args) > 2 and args[2]):
            self.found.append(f"{name} between host and device")
        return result


def test_what_waits_is_found() -> None:
    x = torch.zeros(3, device="meta")
    with Waits() as waits:
        torch.tensor(1.0, device="meta")
        torch.as_tensor(2.0, dtype=torch.float64, device="meta")
        torch.zeros(3).to("meta")
        x.copy_(torch.zeros(3))
        x[x > 0] = 1.0
        torch.zeros(3).to("meta", non_blocking=True)
        torch.full((), 1.0, device="meta")
        x[torch.zeros(1, dtype=torch.int64, device="meta")] += 1
    copies = [f"aten::{name} between host and device" for name in ("_to_copy", "copy_")]
    numbers = ["torch.tensor of numbers", "torch.as_tensor of numbers"]
    assert waits.found == [*numbers, *copies, "aten::index_put_ by a mask"]
    with pytest.raises((RuntimeError, NotImplementedError)), Waits():
        x[0].item()
    with pytest.raises((RuntimeError, NotImplementedError)), Waits():
        bool(x[0] > 0)


def job_on_meta(flags: str, corpus: Path, cache: Path, patch: pytest.MonkeyPatch) -> Job:
    # It is read back from the device, once a run.
    patch.setattr("megazero.train.save_policy.new_token", lambda *_: "of nobody")
    run = parse_run([*MODEL, *NUMBERS.split(), *flags.split(), *data_flags(corpus, cache)[:-2]], 1)
    prepared = prepare(run, 1, silent)
    return build_job(prepared, build_grid(axes_of(prepared.run, 1), "meta"))


@pytest.mark.few(cases=3)
@pytest.mark.parametrize("name", RUNS)
def test_a_step_reads_nothing_from_its_device(
    name: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = job_on_meta(RUNS[name], corpus, tmp_path, monkeypatch).trainer
    trainer.log._sinks = ()
    trainer.train_step(stop=False)  # slopes and tables are made once
    trainer.after_step()
    with Waits() as waits:
        for _ in range(2):
            trainer.train_step(stop=False)
            trainer.after_step()
    assert waits.seen.total() > 500 and waits.seen["aten::mm.out"] + waits.seen["aten::mm.dtype_out"], (
        "the backward was not seen"
    )
    assert not waits.found, waits.found
    assert trainer.position.iteration == 3


def test_a_weight_gradient_is_one_product_that_adds_to_the_sum() -> None:
    """On a device whose products widen; the first writes, no 16-bit product and no pass of its own over the sum."""

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    grad, x = (torch.empty(64, n + 3, dtype=torch.bfloat16, device="meta")[:, 1 : n + 1] for n in (16, 24))
    into = torch.empty(10_000, device="meta")[160 : 160 + 16 * 24].view(16, 24)
    for add in (False, True):
        add_weight_gradient(grad, x, into, add)  # finds out what the device can
        if add and torch.__version__ < "2.12":
            return  # there the meta device, unlike CUDA, has no sum with a wide product
        called: list[str] = []
        with Names():
            add_weight_gradient(grad, x, into, add)
        assert [name for name in called if "mm" in name] == ["aten.addmm.dtype_out" if add else "aten.mm.dtype_out"]
        assert not {name for name in called if "add_" in name or "copy" in name}
