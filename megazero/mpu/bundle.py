"""What one unit of a model hands to the next, and the message that carries it from stage to stage.

A bundle is a tensor, or a tuple or a dict of tensors of any shapes and dtypes. Its message is one tensor: the only one
of the bundle, or the bytes of all of them, each from a multiple of `ALIGNMENT` on. Both ends know the shapes before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar, cast

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


def with_tensors(bundle: BundleType, tensors: Sequence[Tensor]) -> BundleType:
    """A bundle of the same form with other tensors."""
    made: Any = tensors[0]
    if isinstance(bundle, dict):
        made = dict(zip(bundle, tensors, strict=True))
    elif isinstance(bundle, tuple):
        made = bundle._make(tensors) if hasattr(bundle, "_make") else tuple(tensors)
    return cast("BundleType", made)


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
    """The bundle at a boundary between two model chunks.

    keys       of a dict; None: it is none
    is_single  whether it is one tensor, and no tuple of one
    """

    tensors: tuple[TensorSpec, ...]
    keys: tuple[str, ...] | None = None
    is_single: bool = False

    @classmethod
    def single(cls, shape: Sequence[int], dtype: torch.dtype) -> MessageSpec:
        """That of one tensor with a gradient."""
        return cls((TensorSpec(tuple(shape), dtype),), is_single=True)

    @classmethod
    def of(cls, bundle: Bundle) -> MessageSpec:
        """That of bundles like this one, whose tensors have gradients where `requires_grad` says so."""
        specs = tuple(TensorSpec(tuple(each.shape), each.dtype, each.requires_grad) for each in tensors_of(bundle))
        keys = tuple(bundle) if isinstance(bundle, dict) else None
        return cls(specs, keys, isinstance(bundle, Tensor))

    @property
    def back(self) -> MessageSpec:
        """The message of the gradients, which are a tuple."""
        return MessageSpec(tuple(spec for spec in self.tensors if spec.graded))

    def bundle(self, tensors: Sequence[Tensor]) -> Bundle:
        """The bundle of these tensors."""
        if self.is_single:
            (only,) = tensors
            return only
        return tuple(tensors) if self.keys is None else dict(zip(self.keys, tensors, strict=True))

    def fits(self, bundle: Bundle) -> bool:
        """Whether a bundle has this form, and its tensors these shapes and dtypes."""
        other = MessageSpec.of(bundle)
        plain = [[(spec.shape, spec.dtype) for spec in each.tensors] for each in (self, other)]
        return plain[0] == plain[1] and (self.keys, self.is_single) == (other.keys, other.is_single)

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

    @property
    def _starts(self) -> list[int]:
        """The first byte of each tensor, and the end of the last."""
        sizes = (-(-spec.nbytes // ALIGNMENT) * ALIGNMENT for spec in self.tensors)
        return [*accumulate(sizes, initial=0)]
