"""Which modules and parameters of a model are cut among tp ranks, and how: a plan by names, resolved.

A plan has patterns of names as `fnmatch` reads them, each with a word (`words`). A module says what is within it by an
attribute `tp_plan`, whose names begin at the module; the model's own plan says it for all. The terms are those of
Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053).
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import Tensor, nn

from megazero.own.tensor_parallel.words import ParameterSplit, PlanWord, TensorParallelPlan

PLAN = "tp_plan"
"""The attribute by which a module says how it is cut."""


class LinearFields(NamedTuple):
    """Of a class of linear modules: the dimensions of its weight, and the attributes with its numbers of features."""

    out_dim: int
    in_dim: int
    out_features: str
    in_features: str


LINEAR = LinearFields(0, 1, "out_features", "in_features")
TRANSPOSED = LinearFields(1, 0, "nf", "nx")
"""Of `Conv1D` of transformers, whose weight is [in, out]."""


ADAPTED: Mapping[str, str] = {
    "column": "lora_B",
    "column gathered": "lora_B",
    "row": "lora_A",
    "row split": "lora_A",
}
"""By the kind of word for a linear module into which PEFT has put an adapter, which matrix of the adapter is cut alike:
the one that makes outputs, or that takes inputs. The other one is whole."""


def linear_fields(module: nn.Module) -> LinearFields | None:
    """Those of a linear module whose product is the usual one; None for another module."""
    if "weight" not in module._parameters:  # which is made of others (weight_norm)
        return None
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return LINEAR
    return TRANSPOSED if type(module).__name__ == "Conv1D" and hasattr(module, "nf") else None


@dataclass
class ResolvedPlan:
    """What a plan says of a model.

    splits    by the name of a parameter, how it is cut
    partial   names of parameters that every rank has whole and uses for its part alone, so that the gradient is the
              sum over tp ranks
    words     of the modules that compute otherwise
    divided   modules and the attributes of theirs that are numbers of heads, or the like, of one rank
    problems  what is wrong with the plan
    """

    splits: dict[str, ParameterSplit] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)
    words: dict[nn.Module, PlanWord] = field(default_factory=dict)
    divided: dict[tuple[nn.Module, str], bool] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.splits or self.words)


class _Place(NamedTuple):
    """A module of a model under one of its names."""

    name: str
    module: nn.Module


def resolve(
    modules: Iterable[tuple[str, nn.Module]], plan: TensorParallelPlan, names: Mapping[int, str]
) -> ResolvedPlan:
    """What the plans of a model and of its modules say together.

    modules  the units' modules, each with what the names of its tensors begin with
    names    from the number (`id`) of each parameter to its name
    """
    places = [
        _Place(f"{prefix}{path}".rstrip("."), module)
        for prefix, unit in modules
        for path, module in unit.named_modules(remove_duplicate=False)
    ]
    resolving = _Resolving(places, names)
    for name, module in places:
        within = getattr(module, PLAN, None)
        if within is not None and not isinstance(within, Mapping):
            resolving.refuse(
                f"{PLAN} of {type(module).__name__} ({name}) is {type(within).__name__}: a mapping is needed"
            )
        if isinstance(within, Mapping):
            of_family = isinstance(getattr(type(module), PLAN, None), property)  # transformers': of all its models
            for pattern, text in within.items():
                inside = ".".join(each for each in (glob.escape(name), str(pattern)) if each)
                resolving.say(inside, text, f"{PLAN} of {type(module).__name__}: {pattern!r}", required=not of_family)
    for pattern, text in plan.items():
        resolving.say(pattern, text, f"{PLAN}: {pattern!r}", required=True)
    resolving.follow_ties()
    return resolving.resolved


class _Resolving:
    """A plan that is being resolved, line by line."""

    def __init__(self, places: Sequence[_Place], names: Mapping[int, str]) -> None:
        self.resolved, self._places, self._names = ResolvedPlan(), places, names
        self._said = set[nn.Module]()
        """Modules whose parameters were named one by one, or that are within a module whose output is summed."""

    def say(self, pattern: str, text: str, where: str, *, required: bool) -> None:
        """Add what one line says. required: whether it has to name something."""
        try:
            word = PlanWord.of(text)
        except ValueError as error:
            self.refuse(f"{where}: {error}")
            return
        named = [*self._take(pattern, word, where)]
        if not named and required:
            self.refuse(f"{where} names no module, parameter or number of the model")

    def _take(self, pattern: str, word: PlanWord, where: str) -> Iterator[str]:
        """Take over what the word says of everything of this name; yields the names."""
        for name, module in self._places:
            if word.kind == "divided":
                above, _, attribute = pattern.rpartition(".")
                if fnmatchcase(name, above) and type(vars(module).get(attribute)) is int:
                    self.resolved.divided[module, attribute] = False
                    yield f"{name}.{attribute}"
                continue
            if fnmatchcase(name, pattern):
                self._take_module(name, module, word, where)
                yield name
            for own, parameter in module._parameters.items():
                full = f"{name}.{own}" if name else own
                if parameter is not None and fnmatchcase(full, pattern):
                    self._said.add(module)
                    self._take_parameter(parameter, word, f"{where} ({full})")
                    yield full

    def _take_module(self, name: str, module: nn.Module, word: PlanWord, where: str) -> None:
        here = f"{where} ({name}, {type(module).__name__})"
        if word.kind in ADAPTED and isinstance(base := module._modules.get("base_layer"), nn.Module):
            adapters = module._modules.get(ADAPTED[word.kind])
            for each in (base, *(adapters.children() if adapters is not None else ())):
                self._take_module(name, each, word, where)
            return
        if word.kind == "partial":
            self.resolved.partial |= {self._names[id(each)] for each in module.parameters()}
            return
        if (before := self.resolved.words.get(module)) not in (None, word):
            assert before is not None
            self.refuse(f"{here}: {word.text!r}, and another line says {before.text!r}")
            return
        fields = linear_fields(module)
        if word.kind in ("column", "column gathered", "row", "row split") and fields is not None:
            self._take_linear(module, fields, word, here)
        elif word.kind == "vocabulary" and isinstance(module, nn.Embedding):
            if module.max_norm is not None or module.scale_grad_by_freq:
                self.refuse(f"{here}: max_norm and scale_grad_by_freq need the whole of an embedding")
            self._split(module.weight, ParameterSplit(0, pads=True), here)
            self.resolved.divided[module, "num_embeddings"] = True
        elif word.kind == "summed":
            self._said |= {*module.modules()}
        elif not (word.kind == "cut" and type(module) is nn.Dropout and len(word.numbers) == 1):
            self.refuse(
                f"{here}: {word.text!r} is not for such a module. column and row are for nn.Linear and Conv1D, "
                "vocabulary for nn.Embedding, cut for nn.Dropout and for parameters, summed and partial for any"
            )
            self._said.add(module)
            return
        self.resolved.words[module] = word

    def _take_linear(self, module: nn.Module, fields: LinearFields, word: PlanWord, where: str) -> None:
        weight, bias = module.get_parameter("weight"), module._parameters.get("bias")
        if word.kind.startswith("row"):
            self._split(weight, ParameterSplit(fields.in_dim, word.parts), where)
            self.resolved.divided[module, fields.in_features] = False
            return
        pads = word.kind == "column gathered" and fields.out_dim == 0
        self._split(weight, ParameterSplit(fields.out_dim, word.parts, pads), where)
        if bias is not None:
            self._split(bias, ParameterSplit(0, word.parts, pads), where)
        self.resolved.divided[module, fields.out_features] = pads

    def _take_parameter(self, parameter: nn.Parameter, word: PlanWord, where: str) -> None:
        """A parameter [..., out, in] is cut along out by "column", and along in by "row"."""
        dims = {"column": -2, "row": -1, "cut": word.numbers[0] if word.kind == "cut" else 0}
        if word.kind == "partial":
            self.resolved.partial.add(self._names[id(parameter)])
        elif word.kind in dims:
            dim = dims[word.kind]
            self._split(parameter, ParameterSplit(dim + parameter.dim() if dim < 0 else dim, word.parts), where)
        else:
            self.refuse(f"{where}: {word.text!r} is not for a parameter, which is cut or partial")

    def _split(self, parameter: Tensor, split: ParameterSplit, where: str) -> None:
        name = self._names[id(parameter)]
        if self.resolved.splits.setdefault(name, split) != split:
            self.refuse(f"{where}: parameter {name} is cut in another way, too")

    def follow_ties(self) -> None:
        """An embedding and a head that have one weight are cut together. Adds what is missing, and the problems of
        cut parameters that a module has which is not in the plan.
        """
        resolved = self.resolved
        for name, module in self._places:
            for own, parameter in module._parameters.items():
                known = None if parameter is None else self._names[id(parameter)]
                if known not in resolved.splits or module in resolved.words or module in self._said:
                    continue
                where = f"{PLAN}: {known} is cut, and is {own} of {name} ({type(module).__name__})"
                if isinstance(module, nn.Embedding):
                    self._take_module(name, module, PlanWord("vocabulary"), where)
                elif linear_fields(module) is not None and resolved.splits[known].dim == 0:
                    self._take_module(name, module, PlanWord("column gathered"), where)
                else:
                    self.refuse(f"{where}, of which the plan says nothing")
        for name in sorted(resolved.partial & resolved.splits.keys()):
            self.refuse(f"{PLAN}: {name} is cut and partial: a gradient of a part is that rank's alone")

    def refuse(self, words: str) -> None:
        if words not in self.resolved.problems:
            self.resolved.problems.append(words)
