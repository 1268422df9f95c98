"""A run as YAML, nested by section, and back: what `--config` reads and every run saves beside its results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from megazero.config.flags import option_called
from megazero.config.level import Level
from megazero.config.options import did_you_mean_key, run_options, sections
from megazero.config.schema import Run
from megazero.config.yaml_file import load_yaml
from megazero.system.reading import Unreadable, shown

RUN_FILE = "run.yaml"
"""Where a run keeps itself, in the folder of its checkpoints."""
RESOLVED = "resolved"
"""Top-level key of a file that a run wrote: every field is there, and units are mixed where presets and flags did so.
"""


def run_dict(run: Run) -> dict[str, dict[str, Any]]:
    """Section -> field -> plain value (tuples as lists)."""
    plain: dict[str, dict[str, Any]] = {section: {} for section in sections()}
    for name, known in run_options().items():
        value = getattr(getattr(run, known.section), name)
        plain[known.section][name] = list(value) if isinstance(value, tuple) else value
    return plain


def departures(run: Run) -> dict[str, dict[str, Any]]:
    """Of `run_dict` what differs from the defaults, without the sections where nothing does."""
    plain = run_dict(Run())
    found = {
        section: {name: value for name, value in fields.items() if value != plain[section][name]}
        for section, fields in run_dict(run).items()
    }
    return {section: fields for section, fields in found.items() if fields}


def build_run(settings: Mapping[str, Any]) -> Run:
    """The run of these settings (field name -> value) over the defaults. Nothing is checked."""
    parts: dict[str, dict[str, Any]] = {section: {} for section in sections()}
    for name, value in settings.items():
        parts[run_options()[name].section][name] = value
    return Run(**{section: cls(**parts[section]) for section, cls in sections().items()})


def dump(run: Run) -> str:
    """YAML that gives the same run when passed by --config."""
    head = "# A resolved run: --config with this file reproduces it; flags win over what stands here.\n"
    return head + yaml.safe_dump({RESOLVED: True, **run_dict(run)}, sort_keys=False, allow_unicode=True, width=120)


def read_yaml(path: str | Path) -> Level:
    """The settings of a YAML file; what is wrong with it is in the level's problems."""
    level = Level(str(path))
    try:
        content = load_yaml(Path(path))
    except Unreadable as reason:
        level.problems.append(f"--config {reason}")
        level.unread = True
        return level
    if content is None:
        content = {}
    if not isinstance(content, dict):
        level.problems.append(f"--config {path}: holds no settings, but {type(content).__name__}")
        level.unread = True
        return level
    _read_settings(level, content)
    return level


def given_level(given: Run | Mapping[str, Any], name: str) -> Level:
    """The settings that a program gives, as `read_yaml` has those of a file: a mapping as a file holds it, or a run,
    which says every field.
    """
    level = Level(name)
    _read_settings(level, {RESOLVED: True, **run_dict(given)} if isinstance(given, Run) else dict(given))
    return level


def _read_settings(level: Level, content: dict[Any, Any]) -> None:
    level.resolved = content.pop(RESOLVED, False) is True
    for key, value in content.items():
        if key in sections():
            _read_section(level, str(key), value)
        else:
            _read_key(level, str(key), value, None)


def _read_section(level: Level, section: str, value: object) -> None:
    if not isinstance(value, dict):
        if value is not None:
            level.problems.append(f"{level.name}: {section} holds no fields, but {shown(value)}")
        return
    for key, item in value.items():
        _read_key(level, str(key), item, section)


def _read_key(level: Level, key: str, value: object, section: str | None) -> None:
    """One field, by its name or an alias, with or without its section around it."""
    where = key if section is None else f"{section}.{key}"
    known = option_called(key)
    if known is None:
        names = [name for name, option in run_options().items() if section in (None, option.section)]
        hint = did_you_mean_key(key, names if section else [*names, *sections()]) or did_you_mean_key(
            key, run_options()
        )
        level.problems.append(f"{level.name}: there is no {where}{hint}")
        return
    if section is not None and known.section != section:
        level.problems.append(f"{level.name}: there is no {where}; {known.name} belongs to {known.section}")
        return
    if known.name in level.settings:
        level.problems.append(f"{level.name}: {where} gives {known.name} a second time")
        return
    try:
        level.put(known.name, known.from_value(value), f"{level.name}: {where}")
    except ValueError as reason:
        level.problems.append(f"{level.name}: {where}: {reason}")
        level.bad.add(known.name)
