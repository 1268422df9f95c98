"""ZeRO's optimizer files, stages 1 and 2: every parameter group is one flat fp32 vector, cut into as many parts as
there are dp ranks.

Of a file (dp partition, model-parallel rank) the following is used, under `optimizer_state_dict`:

    single_partition_of_fp32_groups   per group the partition's master weights, flat
    base_optimizer_state              {state: {group: {exp_avg, exp_avg_sq, step}}, param_groups}, or a list of the
                                      groups' states
    param_slice_mappings              per group: parameter -> (numel, start) of what the partition has of it; a
                                      parameter that crosses a border is in several partitions, in order
    partition_count                   a number, or one per group

Files without slice mappings are read in the order of `param_shapes` in the mp_rank files, which is the order in the
vector.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.convert.files.unpickle import Record
from megazero.convert.megatron_deepspeed.folders import Files, Listing
from megazero.convert.source import EXP_AVG, EXP_AVG_SQ, WEIGHT, ConversionError

STATE, BASE, MASTERS, MAPPINGS = (
    "optimizer_state_dict",
    "base_optimizer_state",
    "single_partition_of_fp32_groups",
    "param_slice_mappings",
)


@dataclass(frozen=True)
class PartitionSlice:
    """Consecutive elements of a parameter: `numel` elements from `start` on, in a group's flat vector in the file of a
    dp partition.
    """

    partition: int
    group: int
    start: int
    numel: int


@dataclass
class ZeroContents:
    """The contents of the optimizer's files, before any value is read.

    slices  per model-parallel rank: parameter -> where its elements are, in order
    dtypes  column -> dtype; masters alone where the optimizer has no two moments
    steps   Adam's step count
    scaler  the loss scaler's state, if any
    hyper   the settings of the first parameter group
    """

    slices: list[dict[str, list[PartitionSlice]]]
    dtypes: dict[str, torch.dtype]
    steps: float = 0.0
    scaler: Record | None = None
    hyper: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_zero(files: Files, listing: Listing) -> ZeroContents:
    """The layout of a checkpoint's optimizer files.

    Raises ConversionError where files are missing or damaged, or do not say where a parameter is.
    """
    ranks = 1 + max(rank for rank, _ in listing.zero)
    partitions = _partitions(files, listing, ranks)
    found = ZeroContents([], {})
    steps: set[float] = set()
    columns: list[dict[str, torch.dtype]] = []
    for rank in range(ranks):
        states = [_state(files, listing.zero[rank, partition]) for partition in range(partitions)]
        mapped = all(state.get(MAPPINGS) for state in states)
        slices = _by_mappings(states) if mapped else _by_shapes(files, listing, rank, states)
        _refuse_overhangs(listing, rank, slices, states)
        found.slices.append(slices)
        steps |= {step for state in states for step in _steps(state)}
        columns += [_dtypes(state) for state in states]
    found.dtypes = {
        column: dtype for column, dtype in columns[0].items() if all(each.get(column) == dtype for each in columns)
    }
    if EXP_AVG not in found.dtypes or EXP_AVG_SQ not in found.dtypes:
        found.dtypes = {WEIGHT: found.dtypes[WEIGHT]}
        found.notes.append(
            "the optimizer's files hold no two moments (exp_avg, exp_avg_sq) per group: master weights alone are taken "
            "from them"
        )
    if len(steps) > 1:
        found.notes.append(
            f"parameter groups have made different numbers of steps ({', '.join(map(str, sorted(steps)))}); the "
            "largest is taken"
        )
    found.steps = max(steps, default=0.0)
    first = _state(files, listing.zero[0, 0])
    scaler = first.get("loss_scaler")
    found.scaler = scaler if isinstance(scaler, Record) else None
    groups = _param_groups(first)
    found.hyper = (
        dict(groups[0], weight_decay=max((g.get("weight_decay", 0.0) for g in groups), default=0.0)) if groups else {}
    )
    return found


def column_of(state: Mapping[str, Any], column: str, group: int) -> Tensor:
    """The flat vector of a group and column in one file."""
    return state[MASTERS][group] if column == WEIGHT else _group_states(state)[group][column]


def pieces_of(files: Files, listing: Listing, rank: int, slices: Sequence[PartitionSlice], column: str) -> list[Tensor]:
    """The elements of a parameter on one model-parallel rank: 1-D views, in order."""
    found = []
    for part in slices:
        flat = column_of(_state(files, listing.zero[rank, part.partition]), column, part.group)
        found.append(flat[part.start : part.start + part.numel])
    return found


def _state(files: Files, path: Path) -> Mapping[str, Any]:
    content = files[path]
    state = content.get(STATE) if isinstance(content, dict) else None
    if isinstance(state, dict) and isinstance(state.get(STATE), dict) and MASTERS not in state:
        state = state[STATE]
    problem = None
    if not isinstance(state, dict):
        problem = f"no {STATE}"
    elif state.get("zero_stage") is not None and _number(state["zero_stage"]) == 3:
        problem = "the state of ZeRO stage 3, which no pipeline of Megatron-DeepSpeed writes"
    elif not isinstance(state.get(MASTERS), list | tuple) or BASE not in state:
        problem = f"no {MASTERS} or no {BASE}; it has {', '.join(map(str, list(state)[:8]))}"
    if problem:
        raise ConversionError(f"{path} holds {problem}")
    assert isinstance(state, dict)
    return state


def _partitions(files: Files, listing: Listing, ranks: int) -> int:
    """The number of dp partitions: each rank has as many files, and the files name this number."""
    counts = {rank: sorted(partition for r, partition in listing.zero if r == rank) for rank in range(ranks)}
    said = _state(files, listing.zero[min(listing.zero)]).get("partition_count")
    numbers = [_number(count) for count in (said if isinstance(said, list | tuple) else [said]) if count is not None]
    wanted = max([*numbers, 0]) or max(len(there) for there in counts.values())
    wrong = {rank: there for rank, there in counts.items() if there != list(range(wanted))}
    if wrong:
        rank, there = next(iter(wrong.items()))
        raise ConversionError(
            f"{listing.folder} is not whole: the optimizer's state was cut into {wanted} dp "
            f"partitions, but of model-parallel rank {rank} there are {len(there)} files "
            f"(partitions {', '.join(map(str, there))}); {len(wrong)} of {ranks} ranks are like "
            "that. To convert the weights alone, move the *_optim_states.pt files elsewhere"
        )
    return wanted


def _group_states(state: Mapping[str, Any]) -> Mapping[int, Mapping[str, Any]]:
    """group -> its state. In files of DeepSpeed's "elastic" kind it is a list."""
    base = state[BASE]
    inside = base.get("state") if isinstance(base, dict) else base
    if isinstance(inside, list):
        inside = dict(enumerate(inside))
    return (
        {int(group): values for group, values in inside.items() if isinstance(values, dict)}
        if isinstance(inside, dict)
        else {}
    )


def _param_groups(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    base = state[BASE]
    groups = base.get("param_groups") if isinstance(base, dict) else None
    return [group for group in groups or [] if isinstance(group, dict)]


def _steps(state: Mapping[str, Any]) -> Iterator[float]:
    held = [*_group_states(state).values(), *_param_groups(state), {"step": state.get("base_optimizer_state_step")}]
    for group in held:
        if group.get("step") is not None:
            yield float(group["step"])


def _dtypes(state: Mapping[str, Any]) -> dict[str, torch.dtype]:
    """The columns that every group has, with their dtypes."""
    groups = _group_states(state)
    found = {WEIGHT: state[MASTERS][0].dtype}
    for column in (EXP_AVG, EXP_AVG_SQ):
        tensors = [groups.get(group, {}).get(column) for group in range(len(state[MASTERS]))]
        dtypes = {tensor.dtype if isinstance(tensor, Tensor) else None for tensor in tensors}
        dtype = dtypes.pop()
        if dtype is not None and not dtypes:
            found[column] = dtype
    return found


def _by_mappings(states: Sequence[Mapping[str, Any]]) -> dict[str, list[PartitionSlice]]:
    found: dict[str, list[PartitionSlice]] = {}
    for partition, state in enumerate(states):
        mappings = state[MAPPINGS]
        for group, mapping in mappings.items() if isinstance(mappings, dict) else enumerate(mappings):
            for name, address in mapping.items():
                numel, start = _address(address)
                found.setdefault(name, []).append(PartitionSlice(partition, group, start, numel))
    return found


def _address(address: Any) -> tuple[int, int]:
    """(numel, start) of DeepSpeed's fragment_address, which has been stored in several forms."""
    if isinstance(address, Record):
        address = address.state if address.state else dict(zip(("numel", "start"), address.args, strict=False))
    if isinstance(address, dict):
        address = (address.get("numel"), address.get("start"))
    if not (
        isinstance(address, tuple | list) and len(address) == 2 and all(type(n) is int and n >= 0 for n in address)
    ):
        raise ConversionError(f"param_slice_mappings hold {reprlib.repr(address)}, which is no (numel, start)")
    return address[0], address[1]


def _by_shapes(
    files: Files, listing: Listing, rank: int, states: Sequence[Mapping[str, Any]]
) -> dict[str, list[PartitionSlice]]:
    """The slices where no mapping tells them: parameters lie in the joined vector in the order of `param_shapes`, each
    followed by its alignment padding, if any.
    """
    shapes = files[listing.ranks[rank]].get("param_shapes") if rank in listing.ranks else None
    if not isinstance(shapes, list | tuple) or not all(isinstance(group, dict) for group in shapes):
        raise ConversionError(
            f"{listing.folder}: the optimizer's files of rank {rank} have no param_slice_mappings, and no mp_rank file "
            "says by param_shapes which "
            f"parameters they hold. To convert the weights alone, move the *_optim_states.pt files elsewhere"
        )
    found: dict[str, list[PartitionSlice]] = {}
    for group, named in enumerate(shapes):
        lengths = [state[MASTERS][group].numel() for state in states]
        gaps = (states[0].get("param_alignment_paddings") or [[0] * len(each) for each in shapes])[group]
        at = 0
        for (name, shape), gap in zip(named.items(), gaps, strict=True):
            numel = math.prod(shape)
            found[name] = list(_cut(lengths, group, at, numel))
            at += numel + gap
    return found


def _cut(lengths: Sequence[int], group: int, at: int, numel: int) -> Iterator[PartitionSlice]:
    """The slices that hold elements [at, at + numel) of a vector whose parts have these lengths."""
    begin = 0
    for partition, length in enumerate(lengths):
        start, stop = max(at, begin), min(at + numel, begin + length)
        if start < stop:
            yield PartitionSlice(partition, group, start - begin, stop - start)
        begin += length


def _refuse_overhangs(
    listing: Listing, rank: int, slices: Mapping[str, Sequence[PartitionSlice]], states: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse slices that do not lie inside every column's vector, and parameters that go on in the next partition
    before they have reached the end of one.
    """
    columns = _dtypes(states[0])
    lengths: dict[tuple[int, int], int] = {}
    for name, parts in slices.items():
        for part in parts:
            key = (part.partition, part.group)
            if key not in lengths:
                vectors = [column_of(states[part.partition], column, part.group) for column in columns]
                if any(vector.dim() != 1 for vector in vectors):
                    raise ConversionError(
                        f"{listing.zero[rank, part.partition]}: group {part.group} is not kept as flat vectors"
                    )
                lengths[key] = min(vector.numel() for vector in vectors)
            if part.start + part.numel > lengths[key]:
                raise ConversionError(
                    f"{listing.zero[rank, part.partition]}: {name} is said to be at {part.start} .. "
                    f"{part.start + part.numel} of group {part.group}, "
                    f"which has {lengths[key]} elements"
                )
        for before, after in pairwise(parts):
            if after.start or before.start + before.numel != lengths[before.partition, before.group]:
                raise ConversionError(
                    f"{listing.zero[rank, before.partition].name} and {listing.zero[rank, after.partition].name} do "
                    f"not follow each other: {name} should "
                    f"end the one and go on in the other. Have files of partitions been swapped?"
                )


_STAGES = ("disabled", "optimizer_states", "gradients", "weights")
"""Members of DeepSpeed's ZeroStageEnum, by value."""


def _number(value: Any) -> int:
    """A number, or the value of a member of DeepSpeed's enumeration of ZeRO stages."""
    given = value.args[0] if isinstance(value, Record) and value.args else value
    return _STAGES.index(given) if given in _STAGES else int(given)
