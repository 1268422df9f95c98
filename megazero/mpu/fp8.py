"""Scales of FP8 products: where they come from, and what of a layer is kept from one micro-batch to the next.

A layer has three matrices: its input, its weight, the gradient of its output. One scale serves the whole of each, on
every tp rank: with a shard's own scale, another layout would be another program.

current  the scale is that of the matrix at hand. Where tp ranks hold parts of it, their largest values are reduced
         first: one float32 (all-reduce over tp, max) per such matrix, per weight once a step.
delayed  the scale is that of the largest value in the last steps, so that a matrix is read once, and nothing travels.
         What exceeds it saturates. Largest values of a step, over its micro-batches and all ranks, are one entry of the
         history: the result does not depend on how a batch is cut over dp and micro-batches. They travel once a step:
         three float32 for every FP8 layer of the whole model, one all-reduce (max) over the world, so that every rank
         can write the history into a checkpoint, and any layout can load it. Until there is a history, scaling is
         current.

A maximum may be taken twice and scales stand still within a step: a recomputed forward quantises as the first did and
changes nothing. A skipped step leaves the history as it was. All state is updated in place on the device; the host
reads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_ops.fp8 import E4M3, E5M2, LARGEST, ROLES, Quantised, empty, fill, measure, scale_of
from megazero.mpu.collectives import all_reduce
from megazero.mpu.grid import Group

DTYPES = {"input": E4M3, "weight": E4M3, "gradient": E5M2}


class Fp8:
    """The FP8 state of a rank.

    names    of the model's FP8 layers, those of other ranks included: the same on all ranks
    history  steps that a delayed scale looks back on; 0: current scaling
    tp       ranks that share a layer; world: all
    """

    def __init__(self, names: Sequence[str], history: int, tp: Group, world: Group, device: torch.device) -> None:
        self.rows, self.tp, self.world = {name: row for row, name in enumerate(names)}, tp, world
        shape = len(names), len(ROLES)
        self.amax = torch.zeros(shape, dtype=torch.float32, device=device)
        """Largest values of the step so far, on this rank."""
        self.history = torch.zeros((history, *shape), dtype=torch.float32, device=device)
        """Of all ranks, oldest first."""
        self.scales = torch.ones(shape, dtype=torch.float32, device=device)
        self._largest = torch.tensor([LARGEST[DTYPES[role]] for role in ROLES], dtype=torch.int32, device=device)
        self.calibrated = False
        self.step: int | None = None
        """Number of the step that is under way. Outside of one weights may change at any time, and are never kept."""
        self._steps = 0

    @property
    def is_delayed(self) -> bool:
        return len(self.history) > 0

    @property
    def knows_scales(self) -> bool:
        """Whether scales come from the history; the host knows it without asking the device."""
        return self.is_delayed and self.calibrated

    def layer(self, name: str, shared_out: frozenset[str]) -> Fp8Layer | None:
        """The state of the layer with this global name; None where it does not run in FP8. shared_out: roles split over
        tp.
        """
        return Fp8Layer(self, self.rows[name], shared_out) if name in self.rows else None

    def begin(self) -> None:
        """A step begins: until `end`, weights do not change and are cast once."""
        self._steps += 1
        self.step = self._steps
        self.amax.zero_()

    @torch.no_grad()
    def end(self, skip: Tensor) -> None:
        """The step is over, and the optimizer has run or skipped it (0-dim bool). Communicates as above.

        Called by all ranks.
        """
        self.step = None
        if not self.is_delayed:
            return
        self.amax.masked_fill_(~torch.isfinite(self.amax), 0.0)
        all_reduce(self.amax, self.world, "max").wait()
        self.history.copy_(torch.where(skip, self.history, torch.cat([self.history[1:], self.amax.unsqueeze(0)])))
        self._update_scales(self.amax)
        self.calibrated = True

    def _update_scales(self, otherwise: Tensor) -> None:
        """otherwise: largest values where the history has none: those of a skipped step are better than nothing."""
        window = self.history.amax(0)
        known = torch.where(window > 0, window, otherwise)
        self.scales.copy_(torch.where(known > 0, scale_of(known, self._largest), 1.0))

    def state_dict(self) -> dict[str, Any] | None:
        """Histories and scales by layer, for a checkpoint: the same on all ranks.

        None where there is nothing to keep.
        """
        if not self.knows_scales:
            return None
        history, scales = self.history.permute(1, 2, 0).tolist(), self.scales.tolist()
        return {
            name: {role: {"amax": history[row][i], "scale": scales[row][i]} for i, role in enumerate(ROLES)}
            for name, row in self.rows.items()
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on with a checkpoint's; of a history of another length the newest entries.

        If it lacks a layer, the next step's scaling is current.
        """
        if state is None or not self.is_delayed:
            return
        device, steps = self.history.device, len(self.history)
        for name in self.rows.keys() & state.keys():
            for i, role in enumerate(ROLES):
                stored, at = state[name][role], (self.rows[name], i)
                newest = torch.tensor(stored["amax"][-steps:], dtype=torch.float32, device=device)
                self.history[(slice(steps - len(newest), None), *at)] = newest
                self.scales[at] = stored["scale"]
        window = self.history.amax(0)
        self.scales.copy_(torch.where(window > 0, scale_of(window, self._largest), self.scales))
        self.calibrated = bool(self.rows.keys() <= state.keys())


class Fp8Layer:
    """One linear layer's part of the state."""

    def __init__(self, fp8: Fp8, row: int, shared_out: frozenset[str]) -> None:
        self.fp8, self.row, self.shared_out = fp8, row, shared_out
        self._weight: Quantised | None = None
        self._cast_in: int | None = None

    def quantise(
        self, role: str, x: Tensor, *, transposed: bool, compiled: bool, into: Quantised | None = None
    ) -> Quantised:
        """x [m, k] in FP8. Under current scaling one float32 is reduced over tp, if the role is shared out. into: where
        to write it.
        """
        fp8, column = self.fp8, ROLES.index(role)
        made = into if into is not None else empty(x, DTYPES[role], transposed)
        scale = fp8.scales[self.row, column] if fp8.knows_scales else None
        amax = None
        if scale is None and role in self.shared_out and fp8.tp.size > 1:
            amax = measure(x.detach())
            whole = amax.clone()
            all_reduce(whole, fp8.tp, "max").wait()
            scale = scale_of(whole, LARGEST[DTYPES[role]])
        # The step before there is a history is not compiled: it would need other bodies for itself.
        found = fill(
            role, x, made, scale=scale, amax=amax, compiled=compiled and (fp8.knows_scales or not fp8.is_delayed)
        )
        if fp8.is_delayed:
            largest = fp8.amax[self.row, column]
            torch.maximum(largest, found, out=largest)
        return made

    def weight(self, weights: Tensor, *, compiled: bool) -> Quantised:
        """The weight [n, k] in FP8 with its transpose: cast once a step, always into the same memory
        (for CUDA graphs).
        """
        if self.fp8.step is None:
            return self.quantise("weight", weights, transposed=True, compiled=compiled)
        if self._weight is None or self._cast_in != self.fp8.step:
            self._weight = self.quantise("weight", weights, transposed=True, compiled=compiled, into=self._weight)
            self._cast_in = self.fp8.step
        return self._weight
