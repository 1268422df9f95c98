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
STEPS, EXACT = 12, 1e-11
"""The steps of a trial in float64, and the relative difference that counts."""
SHAPES, CUT = ((4, 6), (33, 40)), 0.3
"""The shapes of a parameter in trials, and where it is cut in two."""
SCALES = (1e-3, 1.0, 1e3)
"""Of gradients in trials."""


class UnknownState(RuntimeError):
    """An optimizer keeps something else of a parameter than in the trial."""


class TorchRule:
    """The update of ranges by an optimizer of torch; a `zero.optimizer.Rule`.

    make     makes one of a list of parameters
    groups   for each group of parameters the options that are others than those of `make`

    lr       the learning rate that it was made with
    options  its other options, by name
    words    its class and these
    columns  of the model state, by its own names of its state tensors

    Raises ConfigError for an optimizer that ranges cannot have, and says why.
    """

    def __init__(self, make: MakeOptimizer, groups: Sequence[Mapping[str, Any]] = ({},)) -> None:
        if isinstance(make, torch.optim.Optimizer) or not callable(make):
            raise ConfigError(
                [
                    f"optimizer is a {type(make).__name__}: the name of one of ours is needed, or what makes one of a "
                    "list of parameters, such as functools.partial(torch.optim.AdamW, lr=1e-3)"
                ]
            )
        self._make, self.columns = make, dict[str, str]()
        parameters = [nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in ((3, 2), (2,), (1,))]
        try:
            made = make(list(parameters))
        except Exception as error:
            raise ConfigError([f"optimizer makes no optimizer of a list of parameters: {error}"]) from error
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError([f"optimizer makes a {type(made).__name__}: a torch.optim.Optimizer is needed"])
        self.name = type(made).__name__
        self.options = {name: value for name, value in made.param_groups[0].items() if name not in ("params", "lr")}
        self.words = f"{self.name}({', '.join(f'{name}={value}' for name, value in sorted(self.options.items()))})"
        self.words += "".join(f" {sorted(group.items())}" for group in groups if group)
        if len(made.param_groups) != 1 or len(made.param_groups[0]["params"]) != len(parameters):
            raise self._refused(
                f"it makes {len(made.param_groups)} groups of parameters, and ranges of all parameters have one"
            )
        self.lr = float(made.param_groups[0]["lr"])
        draw, before = torch.Generator().manual_seed(5), None
        for self._options in groups:
            for shape in SHAPES:
                for scale in SCALES:
                    for orthogonal in (False, True):
                        self._try(shape, scale, orthogonal, draw)
            if before not in (None, self.columns):
                then, now = (", ".join(names) or "nothing" for names in (before or {}, self.columns))
                raise self._refused(f"of one group of parameters it keeps {then}, and of another {now}")
            before = self.columns

    @property
    def kept(self) -> tuple[str, ...]:
        """The columns that the model state has for it."""
        return tuple(self.columns.values())

    def __call__(self, ranges: Sequence[UpdateRange], now: UpdateValues) -> None:
        """Update ranges. The host waits for the device: an optimizer of torch does not skip by a value there."""
        if bool(now.skip):
            return
        number, options = int(now.number), {"lr": now.lr, **now.options}
        for step, _, _, third in ranges:
            weights = step.master
            state = dict(zip(COLUMNS, (step.exp_avg, step.exp_avg_sq, third), strict=True))
            columns = {name: state[column] for name, column in self.columns.items()}
            gradient = step.grad.to(weights.dtype) * now.multiplier.to(weights.dtype)
            self._update(weights, gradient, columns, options, number)
            if step.param_out is not None:
                step.param_out.copy_(weights)

    def _update(
        self,
        weights: Tensor,
        gradient: Tensor,
        columns: Mapping[str, Tensor | None],
        options: Mapping[str, Any],
        number: int,
    ) -> None:
        """Update weights and columns in place.

        options  of this step, where they are others than those of `make`
        number   of the step, from 1; in the first one a state begins
        """
        parameter = nn.Parameter(weights)
        parameter.grad = gradient
        optimizer = self._make([parameter])
        optimizer.param_groups[0].update(options)
        state = optimizer.state[parameter]
        if number > 1:
            state.update(columns)
            if self._step is not None:
                state[STEP] = self._step(number - 1)
        optimizer.step()
        kept = {name for name, value in state.items() if value is not None} - {STEP}
        if kept != columns.keys():
            other = ", ".join(sorted(kept ^ columns.keys()))
            raise UnknownState(f"it keeps {other} of a parameter in some steps: step {number} is not as others")
        for name, column in columns.items():
            made = state[name]
            if made is not column:
                assert column is not None, "a state tensor has a column"
                column.copy_(made)

    # --- the trial -------------------------------------------------------------------------------------------------

    def _try(self, shape: tuple[int, int], scale: float, orthogonal: bool, draw: torch.Generator) -> None:
        """Find out what the optimizer keeps, and compare its steps on a parameter with those on ranges of it.

        scale       of the gradients
        orthogonal  whether they have no part along the weights, as optimizers that project look for
        """
        weights = torch.randn(shape, generator=draw, dtype=torch.float64).view(-1)
        cut = int(CUT * weights.numel())
        whole = nn.Parameter(weights.clone().view(shape))
        pieces = [nn.Parameter(piece.clone()) for piece in (weights[:cut], weights[cut:])]
        optimizers = [self._make([parameter]) for parameter in (whole, *pieces)]
        for optimizer in optimizers:
            optimizer.param_groups[0].update(self._options)
        options = _options(optimizers[0])
        gradients = list[Tensor]()
        for _ in range(STEPS):
            gradient = scale * torch.randn(weights.shape, generator=draw, dtype=torch.float64)
            at = whole.detach().view(-1)
            gradients.append(gradient - (gradient @ at) / (at @ at) * at if orthogonal else gradient)
            whole.grad = gradients[-1].view(shape).clone()
            for piece, part in zip(pieces, (gradients[-1][:cut], gradients[-1][cut:]), strict=True):
                piece.grad = part.clone()
            for optimizer in optimizers:
                try:
                    optimizer.step()
                except Exception as error:
                    raise self._refused(f"it makes no step of parameters with dense gradients: {error}") from error
        if _options(optimizers[0]) != options:
            raise self._refused("its steps change the options of its group, which a range begins with anew")
        expected = whole.detach().view(-1)
        if _differ(torch.cat([piece.detach() for piece in pieces]), expected):
            raise self._refused(
                "its update of an element depends on other elements of the parameter, and a rank may have a part of "
                "the parameter alone"
            )
        self._learn(optimizers[1].state[pieces[0]], pieces[0])
        self._try_columns(weights, gradients, expected, cut)

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

    def _try_columns(self, weights: Tensor, gradients: Sequence[Tensor], expected: Tensor, cut: int) -> None:
        """The same steps with the state in columns, by an optimizer that is made anew for each."""
        updated = weights.clone()
        columns = {name: torch.zeros_like(weights) for name in self.columns}
        for number, gradient in enumerate(gradients, 1):
            for own in (slice(0, cut), slice(cut, None)):
                views = {name: column[own] for name, column in columns.items()}
                try:
                    self._update(updated[own], gradient[own].clone(), views, self._options, number)
                except UnknownState as error:
                    raise self._refused(str(error)) from error
        if _differ(updated, expected):
            raise self._refused("it keeps something elsewhere than in the state of its parameters")

    def _refused(self, why: str) -> ConfigError:
        return ConfigError([f"optimizer {self.name} cannot run on ranges of parameters: {why}"])


def _options(optimizer: torch.optim.Optimizer) -> str:
    return str({name: value for name, value in optimizer.param_groups[0].items() if name != "params"})


def _differ(left: Tensor, right: Tensor) -> bool:
    """Whether two results differ by more than rounding. An optimizer that diverges is refused by neither."""
    return not torch.allclose(left, right, rtol=EXACT, atol=EXACT * float(right.abs().max()), equal_nan=True)
