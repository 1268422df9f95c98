"""Modules of torch that compute with this rank's part of their parameters, and can compute with the whole of them.

A module gets a subclass of its own class, so that it stays what it is for the program: `isinstance` and names hold.
t = tp size; the last dimension of activations is that of features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megazero.mpu.functional import copy_to_tp, gather_last, reduce_from_tp, split_last
from megazero.mpu.grid import Group
from megazero.own.tensor_parallel.plan import LINEAR, TRANSPOSED, ResolvedPlan
from megazero.own.tensor_parallel.words import PlanWord


class TensorParallelModules:
    """The modules of this rank that a plan cuts. Their attributes are those of a part, but for the context `whole`.

    group     tp ranks
    modules   this rank's modules of which the plan says anything
    is_whole  whether they compute with whole parameters now, without messages
    """

    def __init__(self, group: Group, plan: ResolvedPlan, units: Iterable[nn.Module]) -> None:
        self.group, self.is_whole = group, False
        here = {module for unit in units for module in unit.modules()}
        self._numbers = dict[tuple[nn.Module, str], tuple[int, int]]()
        """Of the whole and of a part, by module and attribute."""
        for (module, attribute), pads in plan.divided.items():
            if module in here:
                part, rest = divmod(getattr(module, attribute), group.size)
                self._numbers[module, attribute] = getattr(module, attribute), part + (pads and rest > 0)
        self.modules = here & {*plan.words, *(module for module, _ in plan.divided)}
        self.is_cut = group.size > 1 and not plan.is_empty
        self._cut = [
            (module, type(module), _become_parallel(module, word, self))
            for module, word in (plan.words.items() if self.is_cut else ())
            if module in here
        ]
        self._set(whole=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallelModules:
        """A copy of a module is cut as the module is."""
        return self

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A context in which modules compute as if there were no plan, once they are given whole parameters."""
        self._set(whole=True)
        try:
            yield
        finally:
            self._set(whole=False)

    def undo(self) -> None:
        """Make the modules what they were."""
        self._set(whole=True)
        for module, kind, hook in self._cut:
            hook.remove()
            module.__class__ = kind
            del module.word, module.tensor_parallel

    def whole_number(self, module: nn.Module, attribute: str) -> int:
        """What a divided attribute of a module is of the whole."""
        return self._numbers[module, attribute][0]

    def _set(self, *, whole: bool) -> None:
        self.is_whole = whole
        for (module, attribute), (number, part) in self._numbers.items():
            setattr(module, attribute, number if whole else part)


def undividable(plan: ResolvedPlan, shapes: Mapping[str, tuple[int, ...]], size: int) -> Iterator[str]:
    """What so many tp ranks cannot share, in words. shapes: of parameters by name."""
    for name, split in plan.splits.items():
        if (problem := split.problem(shapes[name], size)) is not None:
            yield f"tp is {size}: parameter {name} {[*shapes[name]]} {problem}"
    for (module, attribute), pads in plan.divided.items():
        if not pads and (number := getattr(module, attribute)) % size:
            yield f"tp is {size}: {attribute} of {type(module).__name__} is {number}, which {size} ranks cannot share"


class _Parallel(nn.Module):
    """A module that is cut. `tensor_parallel` and `word` are set when it becomes one."""

    tensor_parallel: TensorParallelModules
    word: PlanWord

    @property
    def tp(self) -> Group | None:
        """The ranks with which it computes; None: it is whole."""
        return None if self.tensor_parallel.is_whole else self.tensor_parallel.group


class ColumnParallel(_Parallel):
    """A linear module whose outputs are cut: x [..., in] -> [..., out/t]. "column gathered": -> [..., out], and the
    weight may have rows of padding.

    Communicates in backward an all-reduce of the input's gradient; gathered: in forward an all-gather of the output.
    """

    def forward(self, x: Tensor) -> Any:
        if (group := self.tp) is None:
            return super().forward(x)
        made = super().forward(copy_to_tp(x, group))
        if self.word.kind == "column":
            return made
        features = LINEAR.out_features if isinstance(self, nn.Linear) else TRANSPOSED.out_features
        return gather_last(made, group)[..., : self.tensor_parallel.whole_number(self, features)]


class RowParallel(_Parallel):
    """A linear module whose inputs are cut: x [..., in/t] -> [..., out]. "row split": x [..., in], whole, of which a
    rank takes its part. The bias is whole and is added behind the sum.

    Communicates in forward an all-reduce of the output; split: in backward an all-gather of the input's gradient.
    """

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Any:
        if (group := self.tp) is None:
            return super().forward(x)
        part = split_last(x, group) if self.word.kind == "row split" else x
        product = F.linear(part, self.weight) if isinstance(self, nn.Linear) else part @ self.weight
        made = reduce_from_tp(product, group)
        return made if self.bias is None else made + self.bias


class VocabularyParallel(_Parallel, nn.Embedding):
    """An embedding whose rows are cut: ids [...] -> [..., width]. A row of another rank adds zeros.

    Communicates in forward an all-reduce of the output. Raises as torch does for an id that no rank has.
    """

    def forward(self, ids: Tensor) -> Any:
        if (group := self.tp) is None:
            return super().forward(ids)
        rows = len(self.weight)
        vocabulary = self.tensor_parallel.whole_number(self, "num_embeddings")
        first, here = group.index * rows, ids - group.index * rows
        is_mine = (here >= 0) & (here < rows)
        is_valid = (ids >= 0) & (ids < vocabulary)
        # an id that is none of the vocabulary stays out of range
        index = torch.where(is_mine & is_valid, here, torch.where(is_valid, 0, rows))
        padding = self.padding_idx - first if self.padding_idx is not None else -1
        looked_up = F.embedding(index, self.weight, padding if 0 <= padding < rows else None)
        return reduce_from_tp(looked_up * is_mine.unsqueeze(-1), group)


class SummedParallel(_Parallel):
    """A module of any kind that computes with its part of cut parameters, and whose output is the sum over tp ranks.

    Communicates in forward an all-reduce of the output, a tensor; in backward one of the gradient of each input.
    """

    def forward(self, *args: Any, **named: Any) -> Any:
        if (group := self.tp) is None:
            return super().forward(*args, **named)

        def copied(value: Any) -> Any:
            return copy_to_tp(value, group) if isinstance(value, Tensor) and value.is_floating_point() else value

        made = super().forward(*map(copied, args), **{name: copied(value) for name, value in named.items()})
        if not isinstance(made, Tensor):
            raise ValueError(f"{type(self).__name__} returns {type(made).__name__}: a sum over tp ranks is of a tensor")
        return reduce_from_tp(made, group)


class CutDropout(_Parallel):
    """Dropout of a tensor that is cut along a dimension: it draws what it would draw for the whole tensor, of which it
    takes its part. Communicates nothing.
    """

    p: float

    def forward(self, x: Tensor) -> Any:
        if (group := self.tp) is None or not self.training or self.p == 0.0:
            return super().forward(x)
        dim = self.word.numbers[0] % x.dim()
        # torch draws in the order in which the numbers are in memory
        strides = x.stride()
        # a dimension of one has the stride of those behind it: it is inside of another one of this stride
        order = sorted(range(x.dim()), key=lambda each: (-strides[each], x.shape[each] == 1, each))
        whole = [each * group.size if place == dim else each for place, each in enumerate(x.shape)]
        in_memory = F.dropout(x.new_ones([whole[place] for place in order]), self.p)
        kept = in_memory.permute([order.index(place) for place in range(x.dim())])
        return x * kept.narrow(dim, group.index * x.shape[dim], x.shape[dim])


PARALLEL: Mapping[str, type[_Parallel]] = {
    "column": ColumnParallel,
    "column gathered": ColumnParallel,
    "row": RowParallel,
    "row split": RowParallel,
    "vocabulary": VocabularyParallel,
    "summed": SummedParallel,
    "cut": CutDropout,
}
"""By the word's kind, what a module becomes."""


def _become_parallel(module: nn.Module, word: PlanWord, modules: TensorParallelModules) -> RemovableHandle:
    """Returns its hook."""
    base = type(module)
    kind = PARALLEL[word.kind]
    bases: tuple[type, ...] = (kind, base)
    if kind is VocabularyParallel:  # a scaled embedding calls the forward of the class below it
        bases = (kind,) if base is nn.Embedding else (base, kind)
    module.__class__ = type(base.__name__, bases, {"__module__": base.__module__})
    assert isinstance(module, _Parallel)
    module.word, module.tensor_parallel = word, modules
    # a transformer layer of torch takes weights of its linears in evaluations, and not where one of them has a hook
    return module.register_forward_pre_hook(_nothing)


def _nothing(module: nn.Module, given: Any) -> None:
    """A hook."""
