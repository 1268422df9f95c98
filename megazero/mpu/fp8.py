"""Scales of FP8 products: current and delayed scaling, and the state of a layer between micro-batches.

A layer has three matrices: its input, its weight and the gradient of its output. Each has one scale for the whole
tensor, the same on every tp rank. With one scale per shard the result would depend on the layout.

current  The scale follows from the largest absolute value (amax) of the matrix itself. Where tp ranks hold parts of the
         matrix, an all-reduce (max) over tp of one float32 comes first: per matrix, for weights once a step.
delayed  The scale follows from the largest amax of the last steps (delayed scaling of NVIDIA's Transformer Engine). The
         matrix is read once and nothing is communicated for it. Values beyond the scale saturate. The amax of a step,
         over its micro-batches and all ranks, is one entry of the history, so the result does not depend on how a batch
         is split over dp and micro-batches. Once a step there is one all-reduce (max) over the world, of three float32
         for every FP8 layer of the whole model. Every rank therefore has the whole history for a checkpoint, and any
         layout can load it. Until there is a history, scaling is current.

Scales do not change within a step, and measuring an amax twice changes nothing: a recomputed forward quantises as the
first one did. A skipped step leaves the history as it was. All state is updated in place on the device; the host never
waits for it.
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

    names    global names of all FP8 layers of the model, in the same order on all ranks
    history  number of steps whose amax a delayed scale uses; 0: current scaling
    tp       the ranks that share a layer
    world    all ranks
    keeps_weights
             whether the copies of weights stay from their cast to the end of the step. Else every product makes its
             own: where weights are whole only while they are used (ZeRO-3), their copies are too
    """

    def __init__(
        self,
        names: Sequence[str],
        history: int,
        tp: Group,
        world: Group,
        device: torch.device,
        *,
        keeps_weights: bool = True,
    ) -> None:
        self.keeps_weights = keeps_weights
        self.rows, self.tp, self.world = {name: row for row, name in enumerate(names)}, tp, world
        shape = len(names), len(ROLES)
        self.amax = torch.zeros(shape, dtype=torch.float32, device=device)
        """float32 [layers, roles]: amax of the step so far, on this rank."""
        self.history = torch.zeros((history, *shape), dtype=torch.float32, device=device)
        """float32 [steps, layers, roles]: amax of the last steps over all ranks, oldest first."""
        self.scales = torch.ones(shape, dtype=torch.float32, device=device)
        self._largest = torch.tensor([LARGEST[DTYPES[role]] for role in ROLES], dtype=torch.int32, device=device)
        self.calibrated = False
        self.step: int | None = None
        """Number of the current step; None between steps, when weights may change and their FP8 copies are not kept."""
        self._steps = 0

    @property
    def is_delayed(self) -> bool:
        return len(self.history) > 0

    @property
    def knows_scales(self) -> bool:
        """Whether scales come from the history. Does not read from the device."""
        return self.is_delayed and self.calibrated

    def layer(self, name: str, shared_out: frozenset[str]) -> Fp8Layer | None:
        """The state of the layer with this global name; None where it does not run in FP8.

        shared_out: the roles ("input", "weight", "gradient") whose matrix is split over tp.
        """
        return Fp8Layer(self, self.rows[name], shared_out) if name in self.rows else None

    def begin(self) -> None:
        """Begin a step. Until `end`, weights do not change and are cast once."""
        self._steps += 1
        self.step = self._steps
        self.amax.zero_()

    @torch.no_grad()
    def end(self, skip: Tensor) -> None:
        """End a step after the optimizer has run. All ranks call this.

        skip: 0-dim bool on the device, whether the optimizer skipped the step. Communicates under delayed scaling: an
        all-reduce (max) over the world of float32 [layers, roles].
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
        """otherwise: the amax to use where the history has none, which is so after a first step that was skipped."""
        window = self.history.amax(0)
        known = torch.where(window > 0, window, otherwise)
        self.scales.copy_(torch.where(known > 0, scale_of(known, self._largest), 1.0))

    def state_dict(self) -> dict[str, Any] | None:
        """Histories and scales by layer, for a checkpoint: the same on all ranks. Waits for the device.

        None under current scaling, and before the end of the first step.
        """
        if not self.knows_scales:
            return None
        history, scales = self.history.permute(1, 2, 0).tolist(), self.scales.tolist()
        return {
            name: {role: {"amax": history[row][i], "scale": scales[row][i]} for i, role in enumerate(ROLES)}
            for name, row in self.rows.items()
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue with a checkpoint's state. Of a longer history it takes the newest entries.

        If the checkpoint lacks a layer of this run, the next step scales by current values.
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
    """The FP8 state of one linear layer."""

    def __init__(self, fp8: Fp8, row: int, shared_out: frozenset[str]) -> None:
        self.fp8, self.row, self.shared_out = fp8, row, shared_out
        self._weight: Quantised | None = None
        self._cast_in: int | None = None

    def quantise(
        self, role: str, x: Tensor, *, transposed: bool, compiled: bool, into: Quantised | None = None
    ) -> Quantised:
        """Cast x [m, k] to the FP8 dtype of its role, with its transpose [k, m] if `transposed`.

        into: an earlier result of this shape to overwrite. Communicates under current scaling, if the role is split
        over tp: an all-reduce (max) over tp of one float32.
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
        # A delayed run's first step scales by current values. It is not compiled: other code would be compiled for it.
        found = fill(
            role, x, made, scale=scale, amax=amax, compiled=compiled and (fp8.knows_scales or not fp8.is_delayed)
        )
        if fp8.is_delayed:
            largest = fp8.amax[self.row, column]
            torch.maximum(largest, found, out=largest)
        return made

    def weight(self, weights: Tensor, *, compiled: bool) -> Quantised:
        """The weight [n, k] in FP8 with its transpose [k, n], cast once a step if copies are kept.

        Within steps it is always in the same memory then, as CUDA graphs need. Communicates as `quantise`.
        """
        if self.fp8.step is None or not self.fp8.keeps_weights:
            return self.quantise("weight", weights, transposed=True, compiled=compiled)
        if self._weight is None or self._cast_in != self.fp8.step:
            self._weight = self.quantise("weight", weights, transposed=True, compiled=compiled, into=self._weight)
            self._cast_in = self.fp8.step
        return self._weight
