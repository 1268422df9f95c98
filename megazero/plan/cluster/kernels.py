"""The seconds that a device takes for recorded work: a roofline of products by shape and tiles, and of all other
kernels by the bytes that they move; and the seconds that its host takes to launch them.

A product is cut into tiles, and each processor computes one tile at a time, so the last wave of tiles may leave most
processors idle. The tile is the one that takes the least time; a smaller one reads its factors more often and reaches
less. A product is never faster than its bytes.

The host launches kernels while the device computes. Where it takes longer, the device waits. Between the two extremes
the time is a norm of both, since neither is always ahead: h and g seconds take (h^p + g^p)^(1/p).

A CPU launches its kernels itself, one behind the other: p is 1. It has no waves of tiles and no wide loads: a product
takes its operations, and then the bytes of its factors and of its result. A gradient of weights is read and written
again with each micro-batch, in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

from fused_ops.products import LEAST
from megazero.config.source import ConfigError
from megazero.pipeline.recorded import PassWork, Product
from megazero.plan.cluster.hardware import Device


class Tile(NamedTuple):
    """A tile of a product's result, and the speed that it reaches, as a share of the largest tile's."""

    rows: int
    columns: int
    speed: float


TILES = (
    Tile(256, 128, 1.0),
    Tile(128, 256, 1.0),
    Tile(128, 128, 0.93),
    Tile(128, 64, 0.75),
    Tile(64, 64, 0.55),
)
"""Tiles that cuBLAS and CUTLASS have. A tile of m x n reads m + n numbers for m n results, so what it reaches falls
with its size. The speeds are assumed, and no part of the fit.
"""
ALIGNED = 8
"""Elements of 16 bits that the wide loads of tensor cores read at once. A row of another length needs narrow ones."""
PRECISIONS: Mapping[str, str] = MappingProxyType(
    {
        "float16": "fp16",
        "bfloat16": "bf16",
        "float32": "fp32",
        "float64": "fp64",
        "float8_e4m3fn": "fp8",
        "float8_e5m2": "fp8",
    }
)
"""dtypes of factors -> the key of their rate in `Device.flops`."""


@dataclass(frozen=True)
class Constants:
    """What was fitted of a kind of device (`bench/fit_plan.py`): shares of what its data sheet says, and seconds.

    products    share of `Device.flops` that the largest tile reaches
    bandwidth   share of `Device.bandwidth` that kernels reach
    misaligned  by how much a product takes longer whose rows are no multiple of `ALIGNED` elements
    launch      seconds of the host for each kernel
    hiding      p above: how well the host's work and the device's hide each other
    straggling  by how much the host's work takes longer for each doubling of tp, whose ranks wait for the slowest
    latency     seconds of a collective for each doubling of its ranks, beside its bytes: its ranks wait for the slowest
    inside      share of `Device.inside` that collectives reach
    between     share of the links between nodes that messages reach
    strided     share of that which groups reach together that have several ranks on a node, but not neighbours
    blocking    share of a message between stages in which neither of the two computes
    update      bytes that an update moves for each parameter
    stages      share of `Device.inside` that messages between stages of a node reach; 0: as collectives
    attention   share of what the largest tile reaches that products in attention's kernels do
    thin        share of what other products of fp32 reach on a CPU that those do which another library computes
                (`fused_ops.products`)
    written     how often a product on a CPU moves the bytes of its result: 1; 0 in entries from before these counted
    factors     the same of the bytes of its factors, which count since a later time
    waking      seconds more of each kernel on a CPU while another thread computes with threads of its own: OpenMP's
                are then more than the processors, and sleep between two kernels
    """

    products: float
    bandwidth: float
    misaligned: float
    launch: float
    hiding: float
    straggling: float
    latency: float
    inside: float
    between: float
    strided: float
    blocking: float
    update: float
    stages: float = 0.0
    attention: float = TILES[2].speed
    thin: float = 1.0
    written: float = 0.0
    factors: float = 0.0
    waking: float = 0.0


def constants_of(device: Device) -> Constants:
    """Those of a device. Raises ConfigError if its entry in the file lacks one."""
    known, names = device.constants, [each.name for each in fields(Constants)]
    missing = [each.name for each in fields(Constants) if each.default is MISSING and each.name not in known]
    if missing:
        raise ConfigError([f"--gpu {device.name}: its entry has no constants {', '.join(missing)}"])
    return Constants(**{name: known[name] for name in names if name in known})


@cache
def tiled_flops(product: Product, processors: float) -> float:
    """Operations of all waves of the best tile, as if idle processors computed at the speed of the largest tile."""

    def flops(tile: Tile) -> float:
        tiles = math.ceil(product.rows / tile.rows) * math.ceil(product.columns / tile.columns) * product.batch
        waves = math.ceil(tiles / processors)
        return waves * processors * 2.0 * tile.rows * tile.columns * product.depth / tile.speed

    return min(map(flops, TILES))


def is_thin(product: Product) -> bool:
    """Whether a CPU's product of fp32 is one that `fused_ops.products` leaves to torch's library for its shape."""
    return PRECISIONS[product.dtype] == "fp32" and min(product.rows, product.columns, product.depth) < LEAST


@dataclass(frozen=True)
class Kernels:
    """A device and its constants."""

    device: Device
    constants: Constants

    def product(self, product: Product) -> float:
        """The seconds of a product.

        A product of attention's kernels has no bytes of its own, and is cut into tiles of one head's queries.
        """
        rate = self._rate(product.dtype) * self.constants.products
        if not product.made:
            return product.flops / (rate * self.constants.attention)
        if self.device.kind == "cpu":
            rate *= self.constants.thin if is_thin(product) else 1.0
            moved = self.constants.written * product.made + self.constants.factors * product.read
            return product.flops / rate + self.moved(moved)
        seconds = tiled_flops(product, self.device.processors) / rate
        if product.columns % ALIGNED or product.depth % ALIGNED or product.rows % ALIGNED:
            seconds *= self.constants.misaligned
        return max(seconds, self.moved(product.read + product.made))

    def _rate(self, dtype: str) -> float:
        """Operations in a second; a precision that the device's entry does not name has that of fp32."""
        flops = self.device.flops
        return flops.get(PRECISIONS[dtype]) or flops.get("fp32") or min(flops.values())

    def moved(self, nbytes: float) -> float:
        """The seconds in which kernels read and write so many bytes."""
        return nbytes / (self.device.bandwidth * self.constants.bandwidth)

    def computing(self, work: PassWork) -> float:
        """The seconds of all kernels on the device, without messages."""
        products = sum(number * self.product(product) for product, number in work.products.items())
        return products + self.moved(work.moved)

    def launching(self, work: PassWork, ranks: int) -> float:
        """The seconds of the host for the launches of all kernels and messages, of the slowest of so many ranks."""
        launches = work.kernels + sum(work.messages.values())
        return launches * self.constants.launch * (1 + self.constants.straggling * math.log2(ranks))

    def together(self, host: float, device: float) -> float:
        """The seconds of work that takes the host and the device so long."""
        longer, shorter = max(host, device), min(host, device)
        if not longer:
            return 0.0
        return longer * float(1 + (shorter / longer) ** self.constants.hiding) ** (1 / self.constants.hiding)
