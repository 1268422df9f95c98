"""Devices and links that plans know, read from `hardware.yaml` and from a user's file of the same form, and a cluster
of them. Every number there names its source.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from megazero.config.options import did_you_mean
from megazero.config.source import ConfigError
from megazero.system.reading import Unreadable, shown
from megazero.system.yaml_file import load_yaml

OUR_FILE = Path(__file__).with_name("hardware.yaml")
NUMBERS = "memory bandwidth processors inside host host_memory watts".split()
"""The numbers of a device that are one pair each."""
OPTIONAL = "update_host read write carried beside".split()
"""The same of those that an entry may leave out: a plan then counts no time for what they are of."""
BOARDS = "board across".split()
"""The same of those that an entry has whose devices are on several boards of a node."""
SAID = (*OPTIONAL, *BOARDS, "threads")
"""All numbers that an entry may leave out."""
TABLES = "kind named flops interconnect constants borrowed ranks".split()
"""What else an entry may have."""
PER_RANK = "memory bandwidth inside host host_memory watts update_host read write carried".split()
"""Numbers of which ranks that share a CPU have a part each."""
DIVISORS = frozenset("products bandwidth hiding inside between strided attention thin".split())
"""Constants by which times are divided, and so above 0."""
MEMORY_OFF = 0.1
"""By how much the memory of a device may differ from its entry's: drivers and error correction take some of it."""
USUAL_NODE = 8
"""Devices of a node where nobody says it, and there are as many."""
_INTERCONNECT = re.compile(r"(0|-[0-9]{1,4}|[1-9][0-9]{0,3})x([a-z0-9-]+)")


@dataclass(frozen=True)
class Link:
    """One link between nodes. rate: bytes in a second, one direction; latency: seconds of the smallest message."""

    name: str
    rate: float
    latency: float


@dataclass(frozen=True)
class Device:
    """One GPU, or one rank's share of a CPU.

    name          its key in the file
    kind          of device of a run: cuda or cpu
    memory        bytes that a program may take
    flops         operations of products in a second, by precision
    bandwidth     bytes of its memory in a second, reads and writes together
    processors    streaming multiprocessors, compute units or cores
    inside        bytes that it sends to devices of its node in a second, one direction
    host          bytes that it exchanges with host memory in a second, one direction
    host_memory   bytes of its share of its node's host memory
    watts         under load
    interconnect  links between nodes where none is given, as `8xhdr`
    constants     what was fitted or measured of this kind beside the data sheet, by name
    update_host   bytes of gradients whose parameters the host's processors update in a second
    read, write   bytes that it reads from disks, and writes there, in a second
    carried       bytes that disks read or write while the host's processors work on them for a second
    beside        as in `program.times.ChunkTimes`
    board         number of neighbours that have direct links to each other; infinite: all of a node
    across        bytes that a board sends to another one of its node in a second, one direction
    borrowed      the kind of device whose constants these are, where no step of this kind is known
    threads       with which a rank computed while it was measured
    shared        of a CPU: what a rank has where so many ranks share it, as measured
    named         names that torch gives to such devices
    """

    name: str
    kind: str
    memory: float
    flops: Mapping[str, float]
    bandwidth: float
    processors: float
    inside: float
    host: float
    host_memory: float
    watts: float
    interconnect: str
    constants: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    update_host: float | None = None
    read: float | None = None
    write: float | None = None
    carried: float | None = None
    beside: float | None = None
    board: float = math.inf
    across: float = math.inf
    threads: float | None = None
    shared: Mapping[int, Device] = field(default_factory=lambda: MappingProxyType({}))
    named: tuple[str, ...] = ()
    borrowed: str = ""

    def __hash__(self) -> int:
        """Of a key of caches, though its tables are none."""
        return hash((self.name, *self.constants.values()))

    def of_rank(self, ranks: int) -> Device:
        """What each of so many ranks has of a CPU that they share; a GPU is a rank's alone. Of a number that was not
        measured, that of the nearest smaller one, divided further.
        """
        if not self.shared:
            return self
        measured = max((number for number in self.shared if number <= ranks), default=1)
        near, part = self.shared.get(measured, self), measured / ranks
        if part == 1:
            return near
        numbers = {name: value * part for name in PER_RANK if (value := getattr(near, name)) is not None}
        rates = MappingProxyType({precision: rate * part for precision, rate in near.flops.items()})
        return replace(near, flops=rates, **numbers)

    def crosses_boards(self, reach: int) -> bool:
        """Whether devices with so many from the first to the last are on several boards of a node."""
        return reach > self.board

    def has_name(self, found: FoundDevice) -> bool:
        """Whether this is the entry of a device of that name. Cards of one name may have different memories."""
        alike = found.memory is None or abs(found.memory / self.memory - 1) < MEMORY_OFF
        return found.kind == self.kind and found.name in self.named and alike


class FoundDevice(NamedTuple):
    """A device as torch knows it. kind: cuda or cpu; memory: bytes, None if it says nothing of the device."""

    kind: str
    name: str
    memory: int | None = None


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind on nodes.

    gpus      number of devices, which is the number of ranks
    nodes_of  devices of a node
    links     between nodes: of each node so many of a kind
    whole     of a CPU: the device that the ranks of a node share; None: `device` is a rank's alone
    """

    device: Device
    gpus: int
    nodes_of: int
    links: int
    link: Link
    whole: Device | None = None

    def of(self, gpus: int, nodes_of: int) -> Cluster:
        """The same with another number of devices. Ranks of a CPU share it anew."""
        device = self.device if self.whole is None else self.whole.of_rank(min(gpus, nodes_of))
        return replace(self, device=device, gpus=gpus, nodes_of=nodes_of)

    @property
    def nodes(self) -> int:
        return math.ceil(self.gpus / self.nodes_of)

    @property
    def node_rate(self) -> float:
        """Bytes that a node sends to other nodes in a second."""
        return self.links * self.link.rate

    def __str__(self) -> str:
        between = f" of {self.nodes_of}, {self.links} x {self.link.name} between them" if self.nodes > 1 else ""
        return f"{self.gpus:,} x {self.device.name}, {self.nodes:,} node{'s' * (self.nodes > 1)}{between}"


@dataclass(frozen=True)
class Hardware:
    """What the files know: devices and links by name."""

    devices: Mapping[str, Device]
    links: Mapping[str, Link]

    def device(self, name: str) -> Device:
        """Raises ConfigError with the nearest name for an unknown one."""
        known = self.devices.get(name.lower())
        if known is None:
            raise ConfigError([f"--gpu {name}: {_unknown(name, self.devices, 'GPU')}; --hardware FILE.yaml adds some"])
        return known

    def cluster(self, gpu: str, gpus: int, nodes_of: int | None, interconnect: str | None) -> Cluster:
        """The cluster that flags describe. Raises ConfigError with every problem of them."""
        problems, device = list[str](), None
        try:
            device = self.device(gpu)
        except ConfigError as error:
            problems += error.problems
        if gpus < 1:
            problems.append(f"--gpus {gpus}: must be at least 1")
        if nodes_of is not None and nodes_of < 1:
            problems.append(f"--nodes-of {nodes_of}: must be at least 1")
        links = device.interconnect if interconnect is None and device is not None else interconnect
        number, link = 0, None
        if links is not None:
            match = _INTERCONNECT.fullmatch(links.lower())
            name = match[2] if match else links
            if match is None:
                problems.append(f"--interconnect {links}: give links of a node x their kind, as 8xhdr")
            elif int(match[1]) < 1:
                problems.append(f"--interconnect {links}: the number of links, {match[1]}, must be at least 1")
            elif name not in self.links:
                problems.append(f"--interconnect {links}: {_unknown(name, self.links, 'link')}")
            else:
                number, link = int(match[1]), self.links[name]
        if problems or device is None or link is None:
            raise ConfigError(problems)
        of_node = min(USUAL_NODE, gpus) if nodes_of is None else nodes_of
        if gpus > of_node and gpus % of_node:
            whole = gpus // of_node * of_node
            filled = next(number for number in range(of_node, 0, -1) if gpus % number == 0)
            raise ConfigError(
                [
                    f"--gpus {gpus} on nodes of {of_node} (--nodes-of): the last node would not be full; nearest: "
                    f"--gpus {whole}, --gpus {whole + of_node}, or --nodes-of {filled}"
                ]
            )
        shared = device if device.shared else None
        return Cluster(device.of_rank(min(gpus, of_node)), gpus, of_node, number, link, shared)


def _unknown(name: str, known: Mapping[str, Any], what: str) -> str:
    alike = [other for other in known if other.startswith(name.lower())]
    hint = f"; did you mean {' or '.join(alike)}?" if alike else did_you_mean(name.lower(), known)
    return f"there is no such {what}{hint or ': ' + ', '.join(known)}"


@cache
def known_hardware(path: str | None = None) -> Hardware:
    """What megazero knows, and what a user's file adds or replaces. Raises ConfigError for a file with mistakes."""
    ours = _read(OUR_FILE)
    if path is None:
        return ours
    theirs = _read(Path(path))
    return Hardware({**ours.devices, **theirs.devices}, {**ours.links, **theirs.links})


def entry_of(found: FoundDevice, path: str | None = None) -> Device | None:
    """The entry of a device that a run has: of a user's file that with its name, else the only one without names of
    this kind; without a file that of ours with its name, None if there is none. Raises ConfigError for a file with
    mistakes, without an entry of the device, or with several.
    """
    devices = [*_read(OUR_FILE if path is None else Path(path)).devices.values()]
    entries = [device for device in devices if device.has_name(found)]
    if path is None:
        return entries[0] if entries else None
    entries = entries or [device for device in devices if device.kind == found.kind and not device.named]
    if len(entries) != 1:
        several = f"has several entries for {found.name}, and a run takes one: {_listed(entries)}"
        none = f"has no entry for {found.name}, which is of kind {found.kind}; it has: {_listed(devices)}"
        none += "; nearest: --hardware none, which predicts nothing"
        raise ConfigError([f"--hardware {path}: {several if entries else none}"])
    return entries[0]


def _listed(devices: Sequence[Device]) -> str:
    return ", ".join(f"{device.name} ({device.kind})" for device in devices) or "nothing"


@cache
def _read(path: Path) -> Hardware:
    named = f"--hardware {path}"
    try:
        content = load_yaml(path, numbers=False)  # YAML 1.1 does not take 25e9 for a number, and people write it
    except Unreadable as reason:
        raise ConfigError([f"--hardware {reason}"]) from None
    if not isinstance(content, dict) or not {*content} <= {"sources", "defaults", "gpus", "links"}:
        raise ConfigError([f"{named}: is no table of sources, defaults, gpus and links"])
    if wrong := [key for key, table in content.items() if not isinstance(table or {}, dict)]:
        raise ConfigError([f"{named}: {key}: {shown(content[key])} is no table" for key in wrong])
    sources, defaults, problems = content.get("sources") or {}, content.get("defaults") or {}, list[str]()
    devices, links = dict[str, Device](), dict[str, Link]()
    for table in ("gpus", "links"):
        names = Counter(str(name).lower() for name in content.get(table) or {})
        problems += [
            f"{named}: {table}: {name} is there {number} times" for name, number in names.items() if number > 1
        ]
    for name, entry in (content.get("gpus") or {}).items():
        whole = {**defaults, **entry} if isinstance(entry, dict) else entry
        reader = _Entry(f"{named}: gpus: {name}", whole, sources)
        devices[str(name).lower()] = reader.device(str(name).lower())
        problems += reader.problems
    for name, entry in (content.get("links") or {}).items():
        reader = _Entry(f"{named}: links: {name}", entry, sources)
        links[str(name).lower()] = Link(str(name).lower(), reader.number("bytes"), reader.number("latency"))
        problems += reader.problems
    if problems:
        raise ConfigError(problems)
    return Hardware(MappingProxyType(devices), MappingProxyType(links))


class _Entry:
    """An entry of a file on its way to a value. Mistakes are collected in `problems`, and stand for 1."""

    def __init__(self, named: str, entry: object, sources: Mapping[str, str]) -> None:
        self.named, self.sources, self.problems = named, sources, list[str]()
        self.entry: Mapping[str, Any] = entry if isinstance(entry, dict) else {}
        if not isinstance(entry, dict):
            self.problems.append(f"{named}: {shown(entry)} is no table")

    def device(self, name: str) -> Device:
        """The device; of a CPU with what its ranks have where several share it, each of which is an entry, too."""
        ranks, shared = self.entry.get("ranks") or {}, dict[int, Device]()
        if not isinstance(ranks, dict) or not all(str(number).isdecimal() and int(number) > 1 for number in ranks):
            self.problems.append(f"{self.named}: ranks: {shown(ranks)} is no table of numbers of ranks from 2")
            ranks = {}
        for number, entry in ranks.items():
            reader = _Entry(f"{self.named}: ranks: {number}", entry, self.sources)
            shared[int(number)] = reader._alone(name)
            self.problems += reader.problems
        return replace(self._alone(name), shared=MappingProxyType(shared))

    def _alone(self, name: str) -> Device:
        numbers: dict[str, Any] = {key: self.number(key) for key in NUMBERS}
        numbers |= {key: self._number(key, self.entry[key], zero=key == "beside") for key in SAID if key in self.entry}
        kind, links = self.entry.get("kind"), self._sourced("interconnect", self.entry.get("interconnect"))
        if kind not in ("cuda", "cpu"):
            self.problems.append(f"{self.named}: kind: {shown(kind)} is neither cuda nor cpu")
        flops = self.entry.get("flops")
        if not isinstance(flops, dict) or not flops:
            self.problems.append(f"{self.named}: flops: {shown(flops)} is no table of precisions")
            flops = {}
        rates = {str(precision): self._number(f"flops: {precision}", pair) for precision, pair in flops.items()}
        constants = self.entry.get("constants") or {}
        if not isinstance(constants, dict):
            self.problems.append(f"{self.named}: constants: {shown(constants)} is no table")
            constants = {}
        fitted = {
            str(key): self._number(f"constants: {key}", pair, zero=key not in DIVISORS)
            for key, pair in constants.items()
        }
        if len({*BOARDS} & {*self.entry}) == 1:
            self.problems.append(f"{self.named}: board and across go together: a board, and what leaves it")
        for key in {*self.entry} - {*NUMBERS, *SAID, *TABLES}:
            self.problems.append(f"{self.named}: there is no {key}")
        return Device(
            name,
            str(kind),
            flops=MappingProxyType(rates),
            interconnect=str(links),
            constants=MappingProxyType(fitted),
            named=self._names(),
            borrowed=(self._sourced("borrowed", self.entry["borrowed"]) or "") if "borrowed" in self.entry else "",
            **numbers,
        )

    def _names(self) -> tuple[str, ...]:
        pair = self.entry.get("named", [[], None])
        names = pair[0] if isinstance(pair, list) and len(pair) == 2 else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            self.problems.append(f"{self.named}: named: {shown(pair)} is no pair of a list of names and its source")
            return ()
        if names and not self._known(pair[1]):
            self.problems.append(f"{self.named}: named: there is no source {shown(pair[1])}")
        return tuple(names)

    def number(self, key: str) -> float:
        """A number above 0."""
        return self._number(key, self.entry.get(key))

    def _number(self, key: str, pair: object, *, zero: bool = False) -> float:
        """A number above 0; zero: or 0."""
        value = self._sourced(key, pair)
        if value is None:
            return 1.0
        with suppress(ValueError):
            if 0 < (number := float(value)) < math.inf or (zero and number == 0):
                return number
        self.problems.append(f"{self.named}: {key}: {shown(value)} is not a number {'from' if zero else 'above'} 0")
        return 1.0

    def _sourced(self, key: str, pair: object) -> str | None:
        """The value of a pair, whose source has to be known; None, with a problem, for what is no pair of words."""
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
            self.problems.append(f"{self.named}: {key}: {shown(pair)} is no pair of a value and its source")
            return None
        value, source = pair
        if not self._known(source):
            self.problems.append(f"{self.named}: {key}: there is no source {shown(source)}")
        return value

    def _known(self, source: object) -> bool:
        return isinstance(source, str) and source in self.sources
