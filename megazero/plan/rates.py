"""How fast the ranks of a run compute, copy, update, read and write: what a predicted step takes, from a file of
--placement-rates or measured at the start (`train.measured_rates`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType

from megazero.config.options import bytes_of, did_you_mean
from megazero.config.source import ConfigError
from megazero.system.reading import Unreadable, shown
from megazero.system.yaml_file import load_yaml


@dataclass(frozen=True)
class MachineRates:
    """Of one rank, while all ranks of its host do the same.

    flops        floating-point operations of matrix products in a second
    to_host      bytes copied from the device to host memory in a second
    to_device    bytes copied back in a second
    update       bytes of gradients whose parameters the device updates in a second
    update_host  the same of the host's processor
    read         bytes read from all folders of --nvme-path in a second; None: nothing may rest on disks
    write        bytes written there in a second, until they are durable; None: nothing may rest on disks
    messages     bytes that a rank sends to others in a second; None: messages take no time
    workspace    bytes of the device that matrix products take for themselves (`train.measured_rates`), which a search
                 leaves free; None: nothing is known of it
    beside       the share of its speed, 0 to 1, that a computation keeps while the host's processors update or copy at
                 full speed; and these beside each other. None: computations run elsewhere, and nothing slows them down
    """

    flops: float
    to_host: float
    to_device: float
    update: float
    update_host: float
    read: float | None = None
    write: float | None = None
    messages: float | None = None
    workspace: float | None = None
    beside: float | None = None

    @property
    def has_disks(self) -> bool:
        return self.read is not None and self.write is not None

    def plain(self) -> dict[str, float]:
        """The numbers that are known, by name: a file of --placement-rates."""
        return {name: value for name, value in asdict(self).items() if value is not None}


ASSUMED: Mapping[str, MachineRates] = MappingProxyType(
    {
        "cuda": MachineRates(3e14, 2e10, 2e10, update=2e11, update_host=5e9, read=3e9, write=2e9, messages=5e10),
        "cpu": MachineRates(1e11, 8e9, 8e9, update=2e9, update_host=2e9, read=2e9, write=1e9, messages=2e9),
    }
)
"""By kind of device: those of a large card and of some cores, for pictures of a step on a machine that nobody has
named."""
NAMES = tuple(field.name for field in fields(MachineRates))
NEEDED = NAMES[:5]


def rates_of(numbers: Mapping[str, float]) -> MachineRates:
    """The rates of these numbers (`MachineRates.plain`)."""
    return MachineRates(**numbers)


def read_rates(path: str) -> MachineRates:
    """The rates of a file: a number for each name; bytes may be written as 3GB. Raises ConfigError."""
    named = f"--placement-rates {path}"
    try:
        content = load_yaml(Path(path))
    except Unreadable as reason:
        raise ConfigError([f"--placement-rates {reason}"]) from None
    if not isinstance(content, dict):
        raise ConfigError([f"{named}: holds no table of {', '.join(NAMES)}"])
    numbers, problems = dict[str, float](), list[str]()
    for key, value in content.items():
        if key not in NAMES:
            problems.append(f"{named}: there is no {key}{did_you_mean(str(key), NAMES) or ': ' + ', '.join(NAMES)}")
            continue
        read, what = _OTHERS.get(key, (_rate, "a number above 0 in a second, such as 3e9 or 3GB"))
        try:
            numbers[key] = read(value)
        except ValueError:
            problems.append(f"{named}: {key}: {shown(value)} is not {what}")
    missing = [name for name in NEEDED if name not in content]
    problems += [f"{named}: {', '.join(missing)}: missing"] * bool(missing)
    if ("read" in content) != ("write" in content):
        problems.append(f"{named}: read and write go together: disks need both")
    if problems:
        raise ConfigError(problems)
    return rates_of(numbers)


def _share(value: object) -> float:
    # yes and true of YAML are bool, and so numbers to Python
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(value)
    return float(value)


def _rate(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(value)
    number = float(bytes_of(value)) if isinstance(value, str) else float(value)
    if not 0 < number < float("inf"):
        raise ValueError(value)
    return number


def _bytes(value: object) -> float:
    return 0.0 if value == 0 and not isinstance(value, bool) else _rate(value)


_OTHERS: Mapping[str, tuple[Callable[[object], float], str]] = MappingProxyType(
    {"beside": (_share, "a number from 0 to 1"), "workspace": (_bytes, "a number of bytes, such as 32MB")}
)
"""What is no rate: how its value is read, and what it has to be."""
