"""Training of a module of any kind in a loop of the program's own: it calls the module, and the backward of its loss.

The list of a step is that of one chunk of units. Hooks of the units tell the pass where the program is
(`own.hooked_run`). Pipelines are not for such a module: its forward is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from megazero.config.derive import brings_parameters
from megazero.mpu.parameter import Parameter
from megazero.own.called_units import OutsideUnit, reconnect, tensors_in
from megazero.own.engine_state import EngineState, StepResult
from megazero.own.gathered import gathered
from megazero.own.hooked_run import HookedRun, OtherOrder
from megazero.own.opening import Opening
from megazero.own.units.model import Units
from megazero.own.units.stage import buffers_by_words, parameters_by_words, require_same_versions, versions_of
from megazero.pipeline.engine import PipelineEngine
from megazero.program.instruction import Op
from megazero.zero.actions import UpdateValues
from megazero.zero.optimizer import OwedStepEnd, TrainingStepEnd


class HookedEngine(EngineState):
    """A module in training on this rank.

    micro_batches  of a step on this rank: so often `forward` and `backward` are called before `step`
    groups         options of groups of parameters for the next step (`UpdateValues.groups`)
    """

    def __init__(self, module: nn.Module, micro_batches: int, units: Units, opening: Opening) -> None:
        self._outside = next((unit for unit in units.units if isinstance(unit, OutsideUnit)), None)
        tree = nn.Module() if self._outside is None else self._outside.module
        before = dict[str, Tensor]([*tree.named_parameters(), *tree.named_buffers()])
        super().__init__(units, opening)
        reconnect(module, tree, before)
        self.module, self.micro_batches = module, micro_batches
        self.groups: tuple[Mapping[str, Any], ...] = ()
        self._parts = PipelineEngine(self.stages, self.grid, self._lists, (), self._channels, self.state.actions).parts
        self._pass: HookedRun | None = None
        self._end: TrainingStepEnd | None = None
        self._number = 0
        """Of the micro-batch whose forward comes next, or is under way."""
        self._waits_for_backward = self._in_backward = self._is_broken = False
        self._taken = 0
        """The gradients that had been taken behind the last backward of this engine."""
        self._brings = brings_parameters(self.run.parallel, self.run.offload)
        """Whether a unit's parameters are there for its computations alone."""
        self._calls = dict[nn.Module, list[int]]()
        """The numbers of a module's units: one for each of its calls in a forward."""
        for number, unit in enumerate(units.units):
            self._calls.setdefault(unit.module, []).append(number)
        self._called_so_far = Counter[nn.Module]()
        self._by_words = {unit.module: parameters_by_words(unit.module) for unit in units.units}
        self._versions = dict[nn.Module, dict[str, tuple[Tensor, int]]]()
        for unit_module in self._calls:
            # first of all hooks, of which others may use and change what the unit has
            unit_module.register_forward_pre_hook(self._before_forward, prepend=True)
            unit_module.register_forward_hook(self._behind_forward, with_kwargs=True)

    # --- what the program calls ------------------------------------------------------------------------------------

    def forward(self, *args: Any, **named: Any) -> Any:
        """What the module returns. With gradients it is a micro-batch of a step, otherwise an evaluation."""
        if not torch.is_grad_enabled() or not self.module.training:
            return self._evaluated(args, named)
        if self._waits_for_backward:
            raise RuntimeError(
                "the module is called again before the backward of its last loss: a micro-batch is one call. Call it "
                "with eval() or under torch.no_grad() where no backward follows"
            )
        if self._number == self.micro_batches:
            raise RuntimeError(f"a step has {self.micro_batches} micro-batches, and here is another: call step first")
        self._require_whole()
        if self._pass is None:
            self.forget_gradients()
            self.require_as_before()
            self._end = self._begin_step(float(self.micro_batches), reports=True)
            owed = self._end.values is not None
            self._pass = HookedRun(self._parts, self.micro_batches, self._end, trains=True)
            self._pass.open(self._lists.training(self.micro_batches, owed=owed), self._end.scale)
        self._is_broken = True
        made = self._called(self._pass, args, named)
        self._is_broken, self._waits_for_backward = False, True
        return made

    def _require_whole(self) -> None:
        """Raise RuntimeError where a step cannot be made to its end."""
        if self._is_broken:
            raise RuntimeError(
                "the last call of the module has raised an error, and its step cannot be made to its end: go on from a "
                "checkpoint with another engine"
            )
        if self._pass is not None and self.state.reducer.taken != self._taken:
            raise RuntimeError(
                "gradients have come to the module's parameters in a backward that is not the engine's, in the middle "
                "of a step: call backward of the engine with the whole loss"
            )

    def forget_gradients(self) -> None:
        """Drop gradients that have come outside of a step, such as those of another module's loss. Does nothing in a
        step.
        """
        if self._pass is None and self.state.reducer.taken != self._taken:
            self.state.reducer.discard()
            self._taken = self.state.reducer.taken

    def _evaluated(self, args: Any, named: Any) -> Any:
        if self._pass is not None:
            raise RuntimeError(
                f"an evaluation in the middle of a step, behind {self._number} of its {self.micro_batches} "
                "micro-batches: evaluate behind step"
            )
        self.state.actions.settle()
        self._pass = HookedRun(self._parts, 1, None, trains=False)
        try:
            self._pass.open(self._lists.evaluation(1), None)
            with torch.no_grad():
                made = self._called(self._pass, args, named)
            self._pass.leave(0)
            self._pass.close()
            return made
        finally:
            self._pass = None

    def _called(self, hooked: HookedRun, args: Any, named: Any) -> Any:
        self._called_so_far.clear()
        before = dict[str, tuple[Tensor, int]]()
        if self._outside is not None:
            hooked.enter(Op.FORWARD, self._number, 0)
            before = versions_of(self._kept_outside())
        made = self.module(*args, **named)
        if self._outside is not None:
            require_same_versions(self._outside, self._kept_outside(), before)
        return made

    def _kept_outside(self) -> dict[str, Tensor]:
        """By words, what the module may not change outside of units."""
        assert self._outside is not None
        keeps = self.stages[0].keeps_buffers
        named = self._outside.tensors()
        return {f"its {name}": each for name, each in named if keeps or isinstance(each, nn.Parameter)}

    @property
    def is_at_boundary(self) -> bool:
        """Whether the micro-batch under way, or the last one, is the last of a step."""
        return self._pass is not None and self._number + self._waits_for_backward == self.micro_batches

    def backward(self, loss: Tensor) -> None:
        """The gradients of a micro-batch's loss, 0-dim, a mean over its samples."""
        if self._pass is None or self._end is None or not self._waits_for_backward:
            raise RuntimeError("backward without a forward: call the engine first, with gradients and in training mode")
        if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
            raise ValueError(f"backward takes the loss of a micro-batch, a 0-dim tensor, and got {loss!r:.100}")
        self._require_whole()
        exact = loss if loss.dtype.itemsize > 2 else loss.float()
        self._in_backward = True
        try:
            (exact * self._end.scale.to(exact)).backward()
        finally:
            self._in_backward = False
        self._pass.leave(self._number)
        self._pass.loss_sum += loss.detach()
        self._number, self._waits_for_backward = self._number + 1, False
        self._taken = self.state.reducer.taken

    def step(self) -> StepResult | None:
        """Update the parameters behind the last micro-batch of a step, with the learning rate of now; None behind the
        others.
        """
        if self._waits_for_backward:
            raise RuntimeError("step without a backward: call backward of the engine with the loss")
        if self._pass is None or self._end is None or self._number < self.micro_batches:
            return None
        self._require_whole()
        self._end.lr, self._end.groups = self.lr, self.groups
        self._pass.close()
        end, self._pass, self._end, self._number = self._end, None, None, 0
        result = self._end_step(end)
        self.state.wait_parameters()  # the program may use the module's parameters in any way until the next step
        return result

    def gathered(self, parameters: Sequence[Parameter], writer: int | None) -> AbstractContextManager[None]:
        """`own.gathered.gathered`, between two steps. In the midst of one parameters can be read that are whole."""
        if self._pass is None:
            return gathered(self, parameters, writer)
        if self._brings or writer is not None:
            raise RuntimeError(
                "parameters are gathered, or written, in the middle of a step: do so behind step, or in front of the "
                "first micro-batch"
            )
        return nullcontext()

    # --- hooks of units --------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> HookedEngine:
        """A copy of the module, which has the hooks too, is none of the engine's."""
        return self

    def _before_forward(self, module: nn.Module, given: Any) -> None:
        if self._pass is None or module not in self._calls:
            return
        numbers = self._calls[module]
        if self._in_backward:  # torch.utils.checkpoint computes the unit again
            if self._brings:
                with self._order_of(module):
                    self._pass.enter(Op.BACKWARD, self._number, self._pass.last_of(numbers))
            return
        so_far = self._called_so_far[module]
        with self._order_of(module):
            if so_far == len(numbers):
                raise OtherOrder
            self._pass.enter(Op.FORWARD, self._number, numbers[so_far])
        self._called_so_far[module] += 1
        self._versions[module] = versions_of(self._unchanged_by(module))

    def _behind_forward(self, module: nn.Module, args: Any, named: Any, made: Any) -> None:
        if self._pass is None or module not in self._calls:
            return
        numbers = self._calls[module]
        number = self._pass.last_of(numbers) if self._in_backward else numbers[self._called_so_far[module] - 1]
        if not self._in_backward:
            require_same_versions(self._units()[number], self._unchanged_by(module), self._versions[module])
        if not torch.is_grad_enabled():
            return
        before, given = _BeforeBackward(self, self._number, number), {id(each) for each in tensors_in((args, named))}
        tensors = [each for each in tensors_in(made) if each.requires_grad]
        for tensor in tensors:
            if id(tensor) not in given:  # what is handed on as it came belongs to the unit that made it
                tensor.register_hook(before)
        if self._brings and not tensors and any(each.requires_grad for each in module.parameters()):
            raise ValueError(
                f"unit {self._units()[number].name!r} returns a {type(made).__name__}, in which no tensor with a "
                "gradient is: with ZeRO-3, or parameters off the device, the engine has to see its backward"
            )

    def _unchanged_by(self, module: nn.Module) -> dict[str, Tensor]:
        """By words, what a unit may not change."""
        keeps = self.stages[0].keeps_buffers
        return self._by_words[module] | (buffers_by_words(module) if keeps else {})

    def enter_backward(self, micro_batch: int, number: int) -> None:
        """Called in front of the backward of a unit."""
        if self._pass is not None and self._in_backward:
            with self._order_of(self._units()[number].module):
                self._pass.enter(Op.BACKWARD, micro_batch, number)

    @contextmanager
    def _order_of(self, module: nn.Module) -> Iterator[None]:
        """A context whose OtherOrder says which unit the program computes."""
        try:
            yield
        except OtherOrder as error:
            units = self._units()
            name = units[self._calls[module][0]].name
            last = units[self._pass.unit].name if self._pass is not None else ""
            raise RuntimeError(
                f"unit {name!r} of the module is computed behind {last!r}, which was not so in the first forward: an "
                "order that changes with the data cannot be followed. With ZeRO-3 or parameters off the device, "
                "torch.utils.checkpoint has one unit at a time"
            ) from error

    def _settle(self, values: UpdateValues) -> None:
        run = HookedRun(self._parts, 0, OwedStepEnd(self.optimizer, values), trains=False)
        run.run(self._lists.settling(), None)


class _BeforeBackward:
    """A hook of what a unit returns, called with the gradient of that."""

    def __init__(self, engine: HookedEngine, micro_batch: int, number: int) -> None:
        self._engine, self._at = engine, (micro_batch, number)

    def __call__(self, gradient: Tensor) -> None:
        self._engine.enter_backward(*self._at)
