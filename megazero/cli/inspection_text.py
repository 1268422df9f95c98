"""The records of `megazero inspect` as text: a checkpoint's contents, and the differences of two."""

from __future__ import annotations

import math
from typing import Any

from megazero.config.dump import run_dict
from megazero.config.schema import Run
from megazero.convert.inspection import Record
from megazero.system.words import counted
from megazero.telemetry.units import count, size
from megazero.train.text_blocks import pairs, table


def format_description(record: Record, everything: bool) -> str:
    """The record of a checkpoint as text. everything: include fields at their defaults and all files."""
    parts = []
    if record["checkpoints"]:
        rows = [
            [
                entry["name"],
                "latest" if entry["latest"] else "",
                size(entry["bytes"]),
                "damaged" if entry["problem"] else "whole",
            ]
            for entry in record["checkpoints"]
        ]
        parts.append(table(["checkpoint", "", "bytes", "manifest and headers"], rows, left=2))
    if "path" in record:
        parts += [
            _summary(record),
            _config(record["config"], everything),
            _tensors(record["tensors"]),
            _files(record["files"], everything),
        ]
        if record["elsewhere"]:
            parts.append(
                f"{len(record['elsewhere'])} of these files are not here: the checkpoint was saved on the local disks "
                f"of {record['layout']['places']} nodes, each of which has its own"
            )
    if "statistics" in record:
        parts.append(_statistics(record["statistics"]))
    if "verified" in record:
        how = (
            "every hash fits"
            if record["verified"]["hashes"]
            else "every tensor was read (this format records no hashes)"
        )
        wrong = record["verified"]["problems"]
        parts.append(
            f"verified: {counted(len(wrong), 'problem')}"
            if wrong
            else f"verified: {size(record['verified']['bytes'])}, {how}"
        )
        parts += ["\n".join(record["report"])] if "report" in record else []
    return "\n\n".join(parts)


def _summary(record: Record) -> str:
    position = [
        (key.replace("_", " "), _plain(int(value) if key == "optimizer_steps" else value))
        for key, value in record["position"].items()
        if value is not None and key != "data_plans"
    ]
    position += (
        [("data order", _order(plans, record["config"]))] if (plans := record["position"].get("data_plans")) else []
    )
    layout = "" if record["layout"] is None else _ranks(record["layout"])
    totals = record["totals"]
    bytes_ = (
        f"{size(totals['bytes'])} in tensors, {size(totals['file_bytes'])} in {counted(len(record['files']), 'file')}"
    )
    about = [("format", record["format"]), *position, *([("written by", layout)] if layout else [])]
    return f"{record['path']}\n" + pairs(
        [
            *about,
            (
                "parameters",
                f"{totals['parameters']:,} ({count(totals['parameters'])}) in {counted(totals['tensors'], 'tensor')}",
            ),
            ("bytes", bytes_),
        ]
    )


def _order(plans: list[list[int]], config: Record) -> str:
    """What determines the order of samples, in words. See `data.dataset.Samples.plans`."""
    if config["data"]["instruction_data"]:
        return "; ".join(f"{counted(samples, 'sample')} an epoch, checksum {crc:08x}" for samples, crc in plans)
    if config["data"]["data_path"]:
        return "; ".join(
            f"{counted(epochs, 'epoch')}, shuffled together up to sample {last:,}" for epochs, last in plans
        )
    return "; ".join(f"numbers {first} and {second} of the program's or the default data" for first, second in plans)


def _ranks(layout: dict[str, int]) -> str:
    """The ranks that wrote a checkpoint: 12 ranks, tp 3 x pp 2 x dp 2."""
    axes = [axis for axis in ("tp", "pp", "dp", "cp") if axis != "cp" or layout.get(axis, 1) > 1]
    sizes = " x ".join(f"{axis} {layout.get(axis, 1)}" for axis in axes)
    places = f", on the disks of {layout['places']} nodes" if layout.get("places", 1) > 1 else ""
    return f"{counted(math.prod(layout.get(axis, 1) for axis in axes), 'rank')}, {sizes}{places}"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list):
        return " ".join(_plain(item) for item in value) or "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _config(config: Record, everything: bool) -> str:
    defaults = run_dict(Run())
    fields = [
        (f"{section}.{name}", str(value))
        for section, values in config.items()
        for name, value in values.items()
        if everything or value != defaults[section][name]
    ]
    title = "configuration" if everything else "configuration, where it is not the default (--all: everything)"
    return f"{title}\n" + pairs(fields)


def _tensors(tensors: Record) -> str:
    rows = [
        [
            name,
            "x".join(map(str, tensor["shape"])),
            _columns(tensor["columns"]),
            f"{tensor['elements']:,}",
            size(tensor["bytes"]),
        ]
        for name, tensor in tensors.items()
    ]
    return table(["tensor", "shape", "columns", "elements", "bytes"], rows, left=3)


def _columns(columns: dict[str, str]) -> str:
    """`float32 weight exp_avg exp_avg_sq`; a dtype that repeats is written once."""
    words: list[str] = []
    before = None
    for column, dtype in columns.items():
        words += [dtype] * (dtype != before) + [column]
        before = dtype
    return " ".join(words)


def _files(files: dict[str, int], everything: bool) -> str:
    most = len(files) if everything else 16
    rest = [f"and {len(files) - most} more (--all)"] if len(files) > most else []
    return "\n".join(
        [table(["file", "bytes"], [[name, f"{number:,}"] for name, number in list(files.items())[:most]]), *rest]
    )


def _statistics(statistics: Record) -> str:
    keys = ["min", "max", "mean", "std", "norm", "zeros", "nan", "inf"]
    rows = [
        [f"{name} {column}", *(("-" if numbers[key] is None else f"{numbers[key]:.6g}") for key in keys)]
        for name, columns in statistics.items()
        for column, numbers in columns.items()
    ]
    return table(["statistics", *keys], rows)


def format_difference(record: Record, everything: bool) -> str:
    """The record of a comparison as text. everything: include equal tensors."""
    first, second = record["paths"]
    parts = [f"< {first} ({record['formats'][0]})\n> {second} ({record['formats'][1]})"]
    fields = [
        (f"{section}.{name}", values) for section, found in record["config"].items() for name, values in found.items()
    ]
    fields += [(f"position.{name}", values) for name, values in record["position"].items()]
    fields += [("layout", record["layout"])] * (record["layout"] is not None)
    if fields:
        parts.append("differs\n" + pairs([(name, f"{_plain(old)} -> {_plain(new)}") for name, (old, new) in fields]))
    for key, title in (("only_in_first", "only in the first"), ("only_in_second", "only in the second")):
        if record[key]:
            parts.append(f"{title} ({len(record[key])})\n" + "\n".join(f"  {name}" for name in record[key]))
    for key in ("shapes", "columns"):
        if record[key]:
            parts.append(
                f"other {key}\n"
                + pairs([(f"  {name}", f"{_plain(a)} -> {_plain(b)}") for name, (a, b) in record[key].items()])
            )
    parts.append(_values(record["tensors"], everything))
    parts.append("the models are the same to the bit" if record["identical"] else _how_they_differ(record))
    return "\n\n".join(parts)


def _how_they_differ(record: Record) -> str:
    """The last line of two models that differ. Where the columns of both are equal, it says why they still do."""
    compared = [found for columns in record["tensors"].values() for found in columns.values()]
    equal = all(found["bit_equal"] == found["elements"] for found in compared)
    alone = {column for stored in record["columns"].values() for column in {*stored[0]} ^ {*stored[1]}}
    others = any(record[key] for key in ("only_in_first", "only_in_second", "shapes")) or "model" in record["config"]
    if equal and alone and not others:
        return f"the models differ: what both have is the same to the bit, and only one has {', '.join(sorted(alone))}"
    return "the models differ"


def _values(tensors: Record, everything: bool) -> str:
    rows, equal = [], 0
    for name, columns in tensors.items():
        for column, found in columns.items():
            equal += found["bit_equal"] == found["elements"]
            if everything or found["bit_equal"] != found["elements"]:
                numbers = [
                    "not finite" if found[key] is None else f"{found[key]:.3g}" for key in ("largest", "relative")
                ]
                rows.append([f"{name} {column}", *numbers, f"{found['bit_equal']:,} of {found['elements']:,}"])
    total = sum(len(columns) for columns in tensors.values())
    told = f"{equal} of {total} columns of tensors that both have are equal to the bit"
    return (
        told
        if not rows
        else f"{told}\n\n" + table(["tensor", "largest difference", "relative", "equal elements"], rows)
    )
