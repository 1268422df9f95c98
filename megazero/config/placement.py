"""--placement: a table of what lies where and when it moves, in a file, or one that is searched for (`plan.placement`).

`ROWS` says which settings of a run a placement is. A file of --placement sets some of them. With `auto` none may be set
beside it, and the search sets all. A setting that says otherwise at the same or a higher place than --placement itself
(a flag beside a flag) is an error that names both. Lower ones give way, as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from megazero.config.derive import micro_batch_order
from megazero.config.options import did_you_mean, run_options
from megazero.config.schema import Run
from megazero.config.source import ConfigSource
from megazero.config.tiers import TierShare, plain_unit
from megazero.system.reading import Unreadable, shown
from megazero.system.yaml_file import load_yaml

FLAGS, AUTO = "flags", "auto"
"""The values of --placement that name no file."""
PLACEMENT = "placement"
ORDER = "micro_batch_order"
"""A field whose default follows from others."""


@dataclass(frozen=True)
class PlacementRow:
    """A line of a placement.

    column  whether it says where a column rests
    whole   whether a search moves all of the column or nothing where another one leaves too
    """

    field: str
    column: bool = False
    whole: bool = False


ROWS: Mapping[str, PlacementRow] = {
    "optimizer": PlacementRow("offload_optimizer", column=True),
    "params": PlacementRow("offload_params", column=True, whole=True),
    "gradients": PlacementRow("offload_gradients", column=True, whole=True),
    "activations": PlacementRow("offload_activations", column=True),
    "late_update": PlacementRow("late_update"),
    "early_update": PlacementRow("early_update"),
    "micro_batch_order": PlacementRow("micro_batch_order"),
    "vertical_group_size": PlacementRow("vertical_group_size"),
}
"""By key of a file: columns first."""
_OF_A_COLUMN = ("tier", "share", "units")


def applied(run: Run, settings: Mapping[str, Any]) -> Run:
    """The run with these settings: field -> value, or its words. Raises ValueError for a value that is none."""
    parts: dict[str, dict[str, Any]] = {}
    for field, value in settings.items():
        known = run_options()[field]
        parts.setdefault(known.section, {})[field] = known.from_value(value)
    return replace(run, **{section: replace(getattr(run, section), **fields) for section, fields in parts.items()})


def unplaced(run: Run) -> Run:
    """The run without a placement: with the defaults of all that a search chooses."""
    return applied(run, {row.field: run_options()[row.field].default for row in ROWS.values()})


def as_flags(settings: Mapping[str, Any]) -> str:
    """The flags that give these settings, where they are not the defaults; empty where all are."""
    flags = []
    # the default order follows from where parameters rest
    others = {field: value for field, value in settings.items() if field != ORDER}
    defaults = {ORDER: micro_batch_order(applied(Run(), others))}
    for field, setting in settings.items():
        known = run_options()[field]
        value = known.from_value(setting)
        if value is not None and value != defaults.get(field, known.default):  # None: not given
            flags.append(known.flag if value is True else f"{known.flag} {quote(str(value))}")
    return " ".join(flags)


def with_placement(sources: Sequence[ConfigSource]) -> tuple[list[ConfigSource], list[str], list[str]]:
    """The sources with the settings of a file of --placement, what is wrong, and notes. sources: the lowest first."""
    number = next((n for n in reversed(range(len(sources))) if PLACEMENT in sources[n].settings), None)
    word = FLAGS if number is None else sources[number].settings[PLACEMENT]
    if number is None or word == FLAGS:
        return list(sources), [], []
    below, above = sources[:number], sources[number:]
    if word == AUTO:
        for source in below:  # they give way, as to any flag
            for row in ROWS.values():
                source.settings.pop(row.field, None)
        return list(sources), [*_contradictions(None, above)], []
    file = read_placement(word)
    problems = [*_contradictions(file, above)]
    for source in above:
        source.settings.pop(PLACEMENT, None)  # the run has what the file says, and may outlive the file
    settings = ", ".join(f"{name} {value}" for name, value in file.settings.items()) or "says nothing"
    return [*below, file, *above], problems, [] if file.problems else [f"--placement {word}: {settings}"]


def _contradictions(file: ConfigSource | None, above: Sequence[ConfigSource]) -> Iterator[str]:
    """Settings that say otherwise than a file of --placement, or (None) any that `auto` chooses.

    above: the source with --placement, and those above it
    """
    placed = dict.fromkeys(row.field for row in ROWS.values()) if file is None else file.settings
    for source in above:
        for field, value in placed.items():
            other = source.settings.get(field, value)
            # a whole run that a program gives has all settings: only those that it changes contradict
            if other == value or (source.resolved and other == run_options()[field].default):
                continue
            if file is None:
                conflict = "which chooses it"
            else:
                conflict = f"where {file.written[field]} is {value}, say different things"
            yield f"{_as_written(source, field)} and {_as_written(above[0], PLACEMENT)}, {conflict}: give one of them"


def _as_written(source: ConfigSource, field: str) -> str:
    """A setting as the user wrote it."""
    value, written = source.settings[field], source.written.get(field, field)
    return written if isinstance(value, bool) and written.startswith("--") else f"{written} {value}"


def read_placement(path: str) -> ConfigSource:
    """The settings of a file of --placement. Mistakes in it are collected in the source's `problems`."""
    source = ConfigSource(f"--placement {path}")
    try:
        content = load_yaml(Path(path))
    except Unreadable as reason:
        source.problems.append(f"--placement {reason}")
        return source
    if not isinstance(content, dict):
        kind = "nothing" if content is None else type(content).__name__
        source.refuse(f"holds no table, but {kind}")
        return source
    for key, value in content.items():
        name = str(key).replace("-", "_")
        row = ROWS.get(name)
        if row is None:
            source.refuse(f"there is no {key}{did_you_mean(name, ROWS) or ': ' + ', '.join(ROWS)}")
            continue
        if row.field in source.settings:
            source.refuse(f"{key} stands twice, once with - and once with _")
            continue
        try:
            from_table = row.column and isinstance(value, dict)
            setting = _column(value) if from_table else run_options()[row.field].from_value(value)
            source.put(row.field, setting, f"{path}: {key}")
        except ValueError as reason:
            source.refuse(f"{key}: {reason}", row.field)
    return source


def _column(table: Mapping[Any, Any]) -> TierShare:
    """What `{tier: cpu, share: 0.5}` or `{tier: cpu, units: [embedding, blocks 0-5]}` says."""
    strange = [key for key in table if key not in _OF_A_COLUMN]
    if strange or "tier" not in table:
        wrong = f"there is no {strange[0]}" if strange else "the tier is missing"
        raise ValueError(f"{shown(dict(table))}: {wrong}; the keys are tier, and share or units")
    share, units = table.get("share"), table.get("units")
    if units is None:
        return TierShare.of_table(table["tier"], share)
    if share is not None:
        raise ValueError(f"{shown(dict(table))}: units leave as a whole: give share or units")
    names = [units] if isinstance(units, str) else units
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"the units {shown(units)} are no names; such as [embedding, blocks 0-5]")
    return TierShare.parsed(f"{table['tier']}:{','.join(map(plain_unit, names))}")
