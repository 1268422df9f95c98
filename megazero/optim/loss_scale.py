"""Loss scaling for fp16: keeps small gradients above fp16's smallest numbers. The optimizer unscales them.

(Micikevicius et al. 2018, arXiv:1710.03740.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.config.schema import OptimizerConfig


class LossScaler:
    """A loss scale on the device, which is updated after each step without waiting for the device.

    scale      0-dim float64; 1 outside fp16, constant with `--loss-scale`
    dynamic    whether it changes (fp16 without `--loss-scale`). After `loss_scale_window` steps in a row without
               overflow the scale doubles. Of the overflows since it last doubled, the first `hysteresis` - 1 leave it
               as it is, and each further one halves it, down to `min_loss_scale`. With hysteresis 1 every overflow
               halves it. This is the rule of Megatron-LM and DeepSpeed; apex also restarts the count of overflows at
               every good step. Every overflow skips its step, whether or not the scale changes.
    """

    def __init__(self, cfg: OptimizerConfig, device: torch.device | str = "cpu") -> None:
        fp16 = cfg.precision == "fp16"
        self.dynamic = fp16 and cfg.loss_scale is None
        start = 1.0 if not fp16 else cfg.initial_loss_scale if cfg.loss_scale is None else cfg.loss_scale
        self.window, self.hysteresis, self.minimum = cfg.loss_scale_window, cfg.hysteresis, cfg.min_loss_scale
        self.scale = torch.tensor(start, dtype=torch.float64, device=device)
        self._good = torch.zeros((), dtype=torch.int64, device=device)
        self._bad = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, overflow: Tensor) -> None:
        """Update the scale after a step. overflow: 0-dim bool on the device, the same on every rank."""
        if not self.dynamic:
            return
        self._bad = torch.where(overflow, self._bad + 1, self._bad)
        self._good = torch.where(overflow, 0, self._good + 1)
        halved = torch.clamp(self.scale * 0.5, min=self.minimum).minimum(self.scale)
        grows = self._good >= self.window
        self.scale = torch.where(
            overflow & (self._bad >= self.hysteresis), halved, torch.where(grows, self.scale * 2.0, self.scale)
        )
        self._good, self._bad = torch.where(grows, 0, self._good), torch.where(grows, 0, self._bad)

    def state_dict(self) -> dict[str, float]:
        """The state for a checkpoint; empty where the scale is constant. Waits for the device."""
        if not self.dynamic:
            return {}
        return {"scale": self.scale.item(), "good_steps": int(self._good.item()), "overflows": int(self._bad.item())}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a `state_dict`. A constant scale does not change.

        A dynamic scale keeps its initial value when `state` is empty, that is, when the earlier run was not fp16 or had
        a constant scale. From the 1 of a bf16 run the scale would have to double for many windows before small
        gradients were kept.
        """
        if not self.dynamic or not state:
            return
        self.scale.fill_(state["scale"])
        self._good.fill_(int(state["good_steps"]))
        self._bad.fill_(int(state["overflows"]))
