"""The values with which the parameters and buffers of a rank's units begin: those of the modules, or for modules on the
meta device those that their `reset_parameters` makes, one unit at a time.

So a model can be built that no memory holds as a whole. What a unit begins with depends on its name and on torch's
seed alone, and so is the same on every layout.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megazero.config.source import ConfigError
from megazero.own.units.model import Unit, Units
from megazero.system.generators import seed_torch, torch_generators_kept

RESETS = ("reset_parameters", "_reset_parameters")
"""Methods by which torch's modules make their values."""


@dataclass
class InitialValues:
    """Values by name.

    there   those that the modules have
    blanks  units on the meta device by name, without values: what names of their tensors begin with, and the module
    makers  the unit whose values a parameter without values gets
    """

    there: dict[str, Tensor] = field(default_factory=dict)
    blanks: dict[str, tuple[str, nn.Module]] = field(default_factory=dict)
    makers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._made: tuple[str, Mapping[str, Tensor]] = "", {}

    def add(self, unit: Unit, model: Units) -> None:
        """Take over the values of one of a model's units."""
        for parameter in unit.parameters():
            name = model.names[id(parameter)]
            if parameter.is_meta:
                # a parameter of several units begins on every rank as the first of them makes it
                self._add_blank(model.value_units[name])
                self.makers[name] = model.value_units[name].name
            else:
                self.there.setdefault(name, parameter.detach())
        if any(buffer.is_meta for buffer in unit.buffers()):
            self._add_blank(unit)

    def _add_blank(self, unit: Unit) -> None:
        if unit.name not in self.blanks:
            self.blanks[unit.name] = unit.prefix, copy.deepcopy(unit.module)

    def of(self, name: str) -> Tensor:
        """The value of a parameter. The last unit that was made is kept: ask for those of a unit together."""
        return self.there[name] if name in self.there else self._unit(self.makers[name])[name]

    def of_buffer(self, unit: Unit, name: str) -> Tensor:
        """A value for a buffer on the meta device. name: in the unit's module."""
        return self._unit(unit.name)[unit.prefix + name].clone()

    def fill_buffers(self, unit: Unit) -> None:
        """Give a unit's buffers on the meta device their values, in host memory."""
        for path, module in unit.module.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = self.of_buffer(unit, f"{path}.{name}" if path else name)

    def forget(self) -> None:
        """Free all values."""
        self.there, self.blanks, self._made = {}, {}, ("", {})

    def _unit(self, name: str) -> Mapping[str, Tensor]:
        """The tensors of a unit that has none, by name."""
        if self._made[0] != name:
            self._made = "", {}  # one unit at a time
            prefix, blank = self.blanks[name]
            module = materialised(name, blank)
            named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
            self._made = name, {f"{prefix}{own}": tensor.detach() for own, tensor in named}
        return self._made[1]


def materialised(name: str, blank: nn.Module) -> nn.Module:
    """A unit with values in host memory, of one on the meta device.

    Raises ConfigError for a module that has parameters or buffers, and no method that makes their values.
    """
    module = copy.deepcopy(blank).to_empty(device="cpu")
    host = torch.device("cpu")
    with torch_generators_kept(host):
        seed_torch((torch.initial_seed() + zlib.crc32(name.encode())) % 2**63, host)
        whole: Any = getattr(module, "reset_unit", None)
        if whole is not None:
            whole()
            return module
        for path, part in module.named_modules():
            reset = next((getattr(part, method) for method in RESETS if hasattr(part, method)), None)
            own = any(value is not None for value in (*part._parameters.values(), *part._buffers.values()))
            if reset is not None:
                reset()
            elif own:
                where = f"module {path} of unit {name!r}" if path else f"unit {name!r}"
                raise ConfigError(
                    [
                        f"{where} ({type(part).__name__}) is on the meta device, and has no reset_parameters that "
                        "makes values for its parameters and buffers"
                    ]
                )
    return module
