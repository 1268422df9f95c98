"""What one unit of a model hands to the next, and the message that carries it from stage to stage.

A bundle is a tensor, or a tuple or a dict of tensors of any shapes and dtypes. Its message is one tensor: the only one
of the bundle, or the bytes of all of them, each from a multiple of `ALIGNMENT` on. Both ends know the shapes before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TypeVar, cast

import torch
from torch import Tensor

Bundle = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
BundleType = TypeVar("BundleType", bound=Bundle)
Gradients = tuple[Tensor | None, ...]
"""One for each tensor of a bundle. None: no gradient has reached the tensor."""
ALIGNMENT = 16
"""Bytes: a tensor of any dtype may begin there."""


def tensors_of(bundle: Bundle) -> tuple[Tensor, ...]:
    """The tensors of a bundle in order."""
    if isinstance(bundle, Tensor):
        return (bundle,)
    return tuple(bundle.values() if isinstance(bundle, dict) else bundle)


@dataclass(frozen=True)
class BundleForm:
    """What is left of a bundle without its tensors. kind: its class; keys: of a dict."""

    kind: type
    keys: tuple[str, ...] = ()

    @classmethod
    def of(cls, bundle: Bundle) -> BundleForm:
        """That of this bundle."""
        if isinstance(bundle, Tensor):
            return SINGLE
        return cls(type(bundle), tuple(bundle) if isinstance(bundle, dict) else ())

    def bundle(self, tensors: Sequence[Tensor]) -> Bundle:
        """The bundle of this form with these tensors. A named tuple is of its class, and a dict a plain one."""
        if self == SINGLE:
            (only,) = tensors
            return only
        if issubclass(self.kind, dict):
            return dict(zip(self.keys, tensors, strict=True))
        make: Callable[[Sequence[Tensor]], tuple[Tensor, ...]] = getattr(self.kind, "_make", tuple)
        return make(tensors)


SINGLE = BundleForm(Tensor)
TUPLE = BundleForm(tuple)


def with_tensors(bundle: BundleType, tensors: Sequence[Tensor]) -> BundleType:
    """A bundle of the same form with other tensors."""
    return cast("BundleType", BundleForm.of(bundle).bundle(tensors))


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a bundle. graded: whether the gradient of the loss with respect to it is sent back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    graded: bool = True

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class MessageSpec:
    """The bundle at a boundary between two model chunks."""

    tensors: tuple[TensorSpec, ...]
    form: BundleForm

    @classmethod
    def single(cls, shape: Sequence[int], dtype: torch.dtype) -> MessageSpec:
        """That of one tensor with a gradient."""
        return cls((TensorSpec(tuple(shape), dtype),), SINGLE)

    @classmethod
    def of(cls, bundle: Bundle) -> MessageSpec:
        """That of bundles like this one, whose tensors have gradients where `requires_grad` says so."""
        specs = tuple(TensorSpec(tuple(each.shape), each.dtype, each.requires_grad) for each in tensors_of(bundle))
        return cls(specs, BundleForm.of(bundle))

    @cached_property
    def back(self) -> MessageSpec:
        """The message of the gradients, which are a tuple."""
        return MessageSpec(tuple(spec for spec in self.tensors if spec.graded), TUPLE)

    def bundle(self, tensors: Sequence[Tensor]) -> Bundle:
        """The bundle of these tensors."""
        return self.form.bundle(tensors)

    def fits(self, bundle: Bundle) -> bool:
        """Whether a bundle has this form, and its tensors these shapes and dtypes."""
        given = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors_of(bundle)]
        return self.form == BundleForm.of(bundle) and given == [(spec.shape, spec.dtype) for spec in self.tensors]

    def gradients(self, sent: Sequence[Tensor]) -> Gradients:
        """What has arrived of the gradients, for each tensor of the bundle."""
        arrived = iter(sent)
        return tuple(next(arrived) if spec.graded else None for spec in self.tensors)

    def whole(self, gradients: Gradients, device: torch.device) -> tuple[Tensor, ...]:
        """What is sent of the gradients: zeros where none has reached a tensor."""
        return tuple(
            torch.zeros(spec.shape, dtype=spec.dtype, device=device) if gradient is None else gradient
            for spec, gradient in zip(self.tensors, gradients, strict=True)
            if spec.graded
        )

    def pack(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """The message of these tensors, contiguous."""
        if len(self.tensors) == 1:
            return tensors[0].contiguous()
        message = self.buffer(device)
        for part, tensor in zip(self.parts(message), tensors, strict=True):
            part.copy_(tensor)
        return message

    def buffer(self, device: torch.device) -> Tensor:
        """Memory for a message."""
        if len(self.tensors) == 1:
            return torch.empty(self.tensors[0].shape, dtype=self.tensors[0].dtype, device=device)
        # a message has a byte at least: backends differ in what they make of none
        return torch.empty(max(1, self._starts[-1]), dtype=torch.uint8, device=device)

    def parts(self, message: Tensor) -> tuple[Tensor, ...]:
        """The tensors in a message, as views."""
        if len(self.tensors) == 1:
            return (message,)
        return tuple(
            message[start : start + spec.nbytes].view(spec.dtype).view(spec.shape)
            for start, spec in zip(self._starts, self.tensors, strict=False)
        )

    @cached_property
    def _starts(self) -> list[int]:
        """The first byte of each tensor, and the end of the last."""
        sizes = (-(-spec.nbytes // ALIGNMENT) * ALIGNMENT for spec in self.tensors)
        return [*accumulate(sizes, initial=0)]
