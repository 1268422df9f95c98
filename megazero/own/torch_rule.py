"""Optimizers of `torch.optim`, or of a package, as the update of a model state.

A state is flat: a range of it has parts of several parameters, or a part of one. So an optimizer is taken whose update
of an element depends on that element alone (AdamW, SGD, Adagrad, RMSprop, Lion), which a trial finds out. Its state
tensors are the columns of the model state: sharded, off the device and in checkpoints as those of our own optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megazero.config.source import ConfigError
from megazero.zero.actions import UpdateValues
from megazero.zero.optimizer import UpdateRange

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""From parameters to their optimizer, such as `functools.partial(torch.optim.AdamW, lr=1e-3)`."""
COLUMNS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
"""The columns that the state tensors are kept in, in the order in which the optimizer makes them."""
STEP = "step"
"""What an optimizer keeps beside them: the number of its steps."""
TRIED, CUT, STEPS, EXACT = (4, 6), 5, 3, 1e-12
"""The trial in float64: a parameter's shape, where it is cut in two, steps, and the relative difference that counts."""


class TorchRule:
    """The update of ranges by an optimizer of torch; a `zero.optimizer.Rule`.

    lr       the learning rate that it was made with
    columns  of the model state, by its own names of its state tensors

    Raises ConfigError for an optimizer that ranges cannot have, and says why.
    """

    def __init__(self, make: MakeOptimizer) -> None:
        if isinstance(make, torch.optim.Optimizer) or not callable(make):
            raise ConfigError(
                [
                    f"optimizer is a {type(make).__name__}: the name of one of ours is needed, or what makes one of a "
                    "list of parameters, such as functools.partial(torch.optim.AdamW, lr=1e-3)"
                ]
            )
        self._make = make
        weights = torch.linspace(-1.0, 1.0, TRIED[0] * TRIED[1], dtype=torch.float64)
        try:
            made = make([nn.Parameter(weights.clone())])
        except Exception as error:
            raise ConfigError([f"optimizer makes no optimizer of a list of parameters: {error}"]) from error
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError([f"optimizer makes a {type(made).__name__}: a torch.optim.Optimizer is needed"])
        self.name = type(made).__name__
        self.lr = float(made.param_groups[0]["lr"])
        self._try(weights)

    @property
    def kept(self) -> tuple[str, ...]:
        """The columns that the model state has for it."""
        return tuple(self.columns.values())

    def __call__(self, ranges: Sequence[UpdateRange], now: UpdateValues) -> None:
        """Update ranges. The host waits for the device: an optimizer of torch does not skip by a value there."""
        if bool(now.skip):
            return
        number = int(now.number)
        for step, _, third in ranges:
            weights = step.master
            state = dict(zip(COLUMNS, (step.exp_avg, step.exp_avg_sq, third), strict=True))
            columns = {name: state[column] for name, column in self.columns.items()}
            gradient = step.grad.to(weights.dtype) * now.multiplier.to(weights.dtype)
            self._update(weights, gradient, columns, now.lr, number)
            if step.param_out is not None:
                step.param_out.copy_(weights)

    def _update(
        self, weights: Tensor, gradient: Tensor, columns: Mapping[str, Tensor | None], lr: float | None, number: int
    ) -> None:
        """Update weights and columns in place. number: of the step, from 1; in the first one a state begins."""
        parameter = nn.Parameter(weights)
        parameter.grad = gradient
        optimizer = self._make([parameter])
        if lr is not None:
            optimizer.param_groups[0]["lr"] = lr
        state = optimizer.state[parameter]
        if number > 1:
            state.update(columns)
            if self._step is not None:
                state[STEP] = self._step(number - 1)
        optimizer.step()
        for name, column in columns.items():
            made = state[name]
            if made is not column:
                assert column is not None, "a state tensor has a column"
                column.copy_(made)

    # --- the trial -------------------------------------------------------------------------------------------------

    def _try(self, weights: Tensor) -> None:
        """Find out what the optimizer keeps, and compare its steps on a parameter with those on ranges of it."""
        gradients = [torch.sin(weights * (3.0 + step)) for step in range(STEPS)]
        whole = nn.Parameter(weights.clone().view(TRIED))
        pieces = [nn.Parameter(piece.clone()) for piece in (weights[:CUT], weights[CUT:])]
        optimizers = [self._make([parameter]) for parameter in (whole, *pieces)]
        for gradient in gradients:
            whole.grad = gradient.view(TRIED).clone()
            for piece, part in zip(pieces, (gradient[:CUT], gradient[CUT:]), strict=True):
                piece.grad = part.clone()
            for optimizer in optimizers:
                try:
                    optimizer.step()
                except Exception as error:
                    raise self._refused(f"it makes no step of parameters with dense gradients: {error}") from error
        expected = whole.detach().view(-1)
        if _differ(torch.cat([piece.detach() for piece in pieces]), expected):
            raise self._refused(
                "its update of an element depends on other elements of the parameter, and a rank may have a part of "
                "the parameter alone"
            )
        self._learn(optimizers[1].state[pieces[0]], pieces[0])
        self._try_columns(weights, gradients, expected)

    def _learn(self, state: Mapping[str, Any], parameter: Tensor) -> None:
        """Take over from the state of a parameter behind some steps what is kept."""
        kept = {name: value for name, value in state.items() if value is not None}
        is_column = {name: isinstance(value, Tensor) and value.shape == parameter.shape for name, value in kept.items()}
        if others := [name for name, it_is in is_column.items() if not it_is and name != STEP]:
            raise self._refused(
                f"it keeps {others[0]} of a parameter, which is neither a tensor of the parameter's shape nor its step"
            )
        names = [name for name, it_is in is_column.items() if it_is]
        if len(names) > len(COLUMNS):
            raise self._refused(f"it keeps {', '.join(names)} of each element: {len(COLUMNS)} are the most")
        self.columns = dict(zip(names, COLUMNS, strict=False))
        self._step: Callable[[int], Any] | None = None
        if isinstance(step := kept.get(STEP), Tensor):
            dtype = step.dtype
            self._step = lambda number: torch.tensor(float(number), dtype=dtype)
        elif step is not None:
            self._step = type(step)

    def _try_columns(self, weights: Tensor, gradients: Sequence[Tensor], expected: Tensor) -> None:
        """The same steps with the state in columns, by an optimizer that is made anew for each."""
        updated = weights.clone()
        columns = {name: torch.zeros_like(weights) for name in self.columns}
        for number, gradient in enumerate(gradients, 1):
            for own in (slice(0, CUT), slice(CUT, None)):
                views = {name: column[own] for name, column in columns.items()}
                self._update(updated[own], gradient[own].clone(), views, None, number)
        if _differ(updated, expected):
            raise self._refused("it keeps something elsewhere than in the state of its parameters")

    def _refused(self, why: str) -> ConfigError:
        return ConfigError([f"optimizer {self.name} cannot run on ranges of parameters: {why}"])


def _differ(left: Tensor, right: Tensor) -> bool:
    return not torch.allclose(left, right, rtol=EXACT, atol=EXACT)
