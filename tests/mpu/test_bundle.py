"""Bundles of tensors and their messages."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megazero.mpu.bundle import Bundle, MessageSpec, tensors_of, with_tensors


class Named(NamedTuple):
    left: Tensor
    right: Tensor


CPU = torch.device("cpu")
MIXED = {
    "a": torch.arange(6.0).view(2, 3).requires_grad_(),
    "mask": torch.tensor([True, False, True]),
    "b": torch.arange(3, dtype=torch.float64).mul(0.1).requires_grad_(),
    "empty": torch.zeros(0, 4),
    "n": torch.tensor(7),
    "h": torch.arange(5, dtype=torch.bfloat16),
}
BUNDLES: dict[str, Bundle] = {
    "named tuple": Named(torch.arange(3.0), torch.tensor([True])),
    "one": torch.arange(4.0),
    "tuple": tuple(MIXED.values()),
    "dict": MIXED,
    "tuple of one": (torch.arange(4.0),),
}


@pytest.mark.parametrize("name", BUNDLES)
def test_a_message_has_the_tensors_of_a_bundle(name: str) -> None:
    bundle = BUNDLES[name]
    spec = MessageSpec.of(bundle)
    sent = spec.pack([tensor.detach() for tensor in tensors_of(bundle)], CPU)
    arrived = spec.buffer(CPU)
    assert sent.is_contiguous() and sent.shape == arrived.shape and sent.dtype == arrived.dtype
    found = spec.bundle(spec.parts(arrived.copy_(sent)))
    assert type(found) is type(bundle) and spec.fits(found)
    for ours, theirs in zip(tensors_of(found), tensors_of(bundle), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(found, dict):
        assert list(found) == list(MIXED)


def test_gradients_are_of_what_has_some() -> None:
    spec = MessageSpec.of(MIXED)
    assert [tensor.shape for tensor in spec.back.tensors] == [(2, 3), (3,)]
    back = spec.whole((torch.ones(2, 3), None, None, None, None, None), CPU)
    assert back[0].sum() == 6 and back[1].tolist() == [0.0, 0.0, 0.0], "none has arrived: zeros are sent"
    given = spec.gradients(back)
    assert [gradient is None for gradient in given] == [False, True, False, True, True, True]
    nothing = MessageSpec.of(torch.arange(3)).back
    assert nothing.pack((), CPU).numel() == 1 and nothing.parts(nothing.buffer(CPU)) == ()


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(2, 3),
        (torch.zeros(2, 3), torch.zeros(3, dtype=torch.float32)),
        (torch.zeros(2, 4), torch.zeros(3, dtype=torch.float64)),
        (torch.zeros(2, 3),),
        {"a": torch.zeros(2, 3), "b": torch.zeros(3, dtype=torch.float64)},
    ],
)
def test_another_form_shape_or_dtype_does_not_fit(other: Bundle) -> None:
    spec = MessageSpec.of((torch.zeros(2, 3), torch.zeros(3, dtype=torch.float64)))
    assert spec.fits((torch.ones(2, 3), torch.ones(3, dtype=torch.float64))) and not spec.fits(other)


def test_a_bundle_keeps_its_form() -> None:
    named = Named(torch.zeros(1), torch.zeros(2))
    changed = with_tensors(named, [torch.ones(1), torch.ones(2)])
    assert isinstance(changed, Named) and changed.right.sum() == 2
    assert list(with_tensors({"x": torch.zeros(1)}, [torch.ones(1)])) == ["x"]
    assert with_tensors(torch.zeros(1), [torch.ones(1)]).item() == 1.0
