"""The loss scale of fp16: small gradients are lifted above fp16's smallest numbers, and unscaled in the optimizer."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.config.schema import OptimizerConfig


class LossScaler:
    """A loss scale that lives on the device and follows overflows without the host reading them.

    scale      0-dim float64; 1 outside fp16, constant with `--loss-scale`
    dynamic    (fp16) After `loss_scale_window` steps in a row without overflow the scale doubles. Of the overflows
               since it last doubled the first `hysteresis` - 1 leave it as it is and each one from number `hysteresis`
               on halves it, down to `min_loss_scale`. So with hysteresis 1 every overflow halves. (The rule of
               Megatron-LM and DeepSpeed; apex also starts the count anew at every good step.) Every overflow skips its
               step, whatever the scale does.
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
        """After a step. overflow: 0-dim bool on the device, the same on every rank."""
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
        """What a resumed run needs to continue exactly; waits for the device. Empty where the scale does not move."""
        if not self.dynamic:
            return {}
        return {"scale": self.scale.item(), "good_steps": int(self._good.item()), "overflows": int(self._bad.item())}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from `state_dict`. A scale that this run fixes (or does not have) stays what it is.

        So does the first one of a dynamic scale when there is nothing to continue: the run before was no fp16, or fixed
        its scale. Its 1 (bf16) would lose the small gradients for as many windows as it takes to double to a useful
        one.
        """
        if not self.dynamic or not state:
            return
        self.scale.fill_(state["scale"])
        self._good.fill_(int(state["good_steps"]))
        self._bad.fill_(int(state["overflows"]))
