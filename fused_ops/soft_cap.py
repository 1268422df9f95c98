"""What a model does to its logits before the loss and before sampling: a multiplier (Granite) and a soft cap (Gemma 2).

y = cap tanh(multiplier x / cap), or multiplier x without a cap. (Soft cap: Bello et al. 2016, arXiv:1611.09940; Gemma
2: arXiv:2408.00118.)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fused_ops.blocks import opmath_dtype


@dataclass(frozen=True)
class SoftCap:
    """multiplier: of the logits. cap: above 0, which no logit exceeds; None: there is none. Raises ValueError for 0."""

    multiplier: float = 1.0
    cap: float | None = None

    def __post_init__(self) -> None:
        if self.cap is not None and not self.cap > 0:
            raise ValueError(f"a soft cap of logits is above 0, not {self.cap:g}")

    @property
    def changes(self) -> bool:
        """Whether y differs from x."""
        return self.multiplier != 1.0 or self.cap is not None

    def of(self, logits: Tensor) -> Tensor:
        """y in the dtype of the computation, fp32 for 16 bits: a new tensor where `changes`. autograd can follow it."""
        values = logits.to(opmath_dtype(logits.dtype))
        if self.cap is not None:
            return (values * (self.multiplier / self.cap)).tanh() * self.cap
        return values * self.multiplier if self.changes else values

    def slope(self, capped: Tensor) -> Tensor | float:
        """dy/dx where y is `capped`."""
        if self.cap is None:
            return self.multiplier
        share = capped / self.cap
        return (1 - share * share) * self.multiplier


def soft_capped(logits: Tensor, multiplier: float = 1.0, cap: float | None = None) -> Tensor:
    """y of logits x, rounded once to their dtype; the logits themselves where nothing changes them."""
    soft_cap = SoftCap(multiplier, cap)
    return soft_cap.of(logits).to(logits.dtype) if soft_cap.changes else logits
