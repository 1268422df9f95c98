"""The values that instructions read and write: things that exist for part of a step; and those of one instruction."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple


class Thing(Enum):
    """The kinds of value."""

    HIDDEN = "the hidden states"
    HIDDEN_GRADIENT = "the gradients of the hidden states"
    ACTIVATIONS = "the activations"
    HOST_ACTIVATIONS = "the host's copy of the activations"
    DISK_ACTIVATIONS = "the disk's copy of the activations"
    DEFERRED = "what the weights' backward needs"
    SHARD = "the stored parameters"
    HOST_PARAMETERS = "the parameters that were read"
    LOADED = "the loaded parameters"
    PARAMETERS = "the whole parameters"
    GRADIENT = "the gradient"
    INSIDE = "the gradient reduced among the ranks that share the shards"
    REDUCED = "the reduced gradient"
    SUMMED = "the gradient summed over tp"
    NORM = "the norm"
    HOST_GRADIENT = "the gradient in host memory"
    SUM = "the sum of gradients in host memory"
    DISK_SUM = "the sum of gradients on disks"
    SQUARES = "the squares of the gradient"
    FETCHED = "the gradient back on the device"
    STATE = "the optimizer state in host memory"
    NEW_WEIGHTS = "the updated weights on the device"
    NEW_PARAMETERS = "the updated parameters in host memory"
    OWED = "the last step's gradient"
    LAST_NORM = "the last step's norm"

    __hash__ = object.__hash__  # values are keys: that of Enum takes three times as long


Value = tuple[Thing, int, int, int, int]
"""A kind and where it is, -1 where a number does not apply.

HIDDEN, HIDDEN_GRADIENT    micro-batch, model chunk, unit: those that enter this unit
ACTIVATIONS, HOST_ACTIVATIONS, DISK_ACTIVATIONS
                           micro-batch, own chunk, first unit, stop: one autograd graph
DEFERRED                   micro-batch, own chunk, unit
SHARD to OWED, but NORM     bucket, and the part of it where it is updated in parts
"""


class Effects(NamedTuple):
    """Of an instruction (`program.effects`). needs: values that are read and stay. takes: read, and gone afterwards.
    makes: new ones. adds: values that are made, or grow where they are there already.
    """

    needs: Sequence[Value]
    takes: Sequence[Value]
    makes: Sequence[Value]
    adds: Sequence[Value]


def of_bucket(thing: Thing, bucket: int, part: int = -1) -> Value:
    """A value of a bucket, or of a part of it."""
    return (thing, bucket, part, -1, -1)


NORM: Value = (Thing.NORM, -1, -1, -1, -1)
LAST_NORM: Value = (Thing.LAST_NORM, -1, -1, -1, -1)


def describe(value: Value) -> str:
    """A value in words."""
    thing, *where = value
    first, second, unit, stop = where
    if thing in (Thing.HIDDEN, Thing.HIDDEN_GRADIENT):
        place = f"before unit {unit} of model chunk {second}" if unit else f"before model chunk {second}"
        return f"{thing.value} {place} (micro-batch {first})"
    if thing in (Thing.ACTIVATIONS, Thing.HOST_ACTIVATIONS, Thing.DISK_ACTIVATIONS):
        return f"{thing.value} of units {unit} to {stop - 1} of chunk {second} as one graph (micro-batch {first})"
    if thing is Thing.DEFERRED:
        return f"{thing.value} of unit {unit} of chunk {second} (micro-batch {first})"
    if second >= 0:
        return f"{thing.value} of part {second} of bucket {first}"
    return thing.value if first < 0 else f"{thing.value} of bucket {first}"
