"""A run as YAML, nested by section, and back: `--config` reads it, and every run saves it with its results."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import yaml

from megazero.config.flags import option_called
from megazero.config.lengths import Length
from megazero.config.options import PARSED, did_you_mean, did_you_mean_key, run_options, sections
from megazero.config.schema import Run
from megazero.config.source import ConfigSource
from megazero.system.reading import Unreadable, json_type, shown
from megazero.system.yaml_file import load_yaml

NAMED = 3
"""Fields of a section that a message names."""
HEAD = "# A resolved run: --config with this file reproduces it; flags have precedence over it.\n"
"""The first line of a file of a run."""
RUN_FILE = "run.yaml"
"""Name of the file of a run in the folder of its checkpoints."""
RESOLVED = "resolved"
"""Top-level key of a file that a run wrote. It has every field, and may give lengths in several units."""


def run_dict(run: Run) -> dict[str, dict[str, Any]]:
    """Section -> field -> plain value: tuples as lists, tiers and lengths as the words of their flags."""
    return {
        section: {field.name: plain_value(getattr(getattr(run, section), field.name)) for field in fields(cls)}
        for section, cls in sections().items()
    }


def plain_value(value: Any) -> Any:
    """The value of a field as YAML and JSON have it; `Option.from_value` reads it."""
    if isinstance(value, (*PARSED, Length)):
        return str(value)
    return list(map(plain_value, value)) if isinstance(value, tuple) else value


def changed_settings(run: Run, among: Collection[str] | None = None) -> dict[str, dict[str, Any]]:
    """The part of `run_dict` that differs from the defaults, without empty sections. among: fields that count; None:
    all.
    """
    defaults = run_dict(Run())
    changed = {
        section: {
            name: value
            for name, value in settings.items()
            if value != defaults[section][name] and (among is None or name in among)
        }
        for section, settings in run_dict(run).items()
    }
    return {section: settings for section, settings in changed.items() if settings}


def dump(run: Run) -> str:
    """YAML that gives the same run when passed by --config."""
    return HEAD + yaml.safe_dump({RESOLVED: True, **run_dict(run)}, sort_keys=False, allow_unicode=True, width=120)


def read_yaml(path: str | Path, named_by: str = "--config") -> ConfigSource:
    """The settings of a YAML file. Mistakes in it are collected in the source's `problems`.

    named_by: the flag or argument that names the file, for messages.
    """
    source = ConfigSource(str(path))
    try:
        content = load_yaml(Path(path), numbers=False)
    except Unreadable as reason:
        source.problems.append(f"{named_by} {reason}")
        source.unread = True
        return source
    content = {} if content is None else content  # a file of comments alone
    if not isinstance(content, dict):
        source.problems.append(f"{named_by} {path}: holds no settings (key: value), but {json_type(content)}")
        source.unread = True
        return source
    _read_settings(source, content)
    return source


def program_source(given: Run | Mapping[str, Any], name: str) -> ConfigSource:
    """The settings that a program gives, read like a YAML file's. given: a mapping as in the file, or a whole run."""
    source = ConfigSource(name)
    if not isinstance(given, Run):
        _read_settings(source, _as_in_a_file(given))
        return source
    for section, cls in sections().items():
        if not isinstance(part := getattr(given, section), cls):
            source.problems.append(f"{name}: {section} is {shown(part)}, not a {cls.__name__}")
            source.unread = True
    if not source.unread:
        _read_settings(source, _as_in_a_file({RESOLVED: True, **run_dict(given)}))
    return source


def _as_in_a_file(value: Any) -> Any:
    """A value of a program as a file holds it: paths are words, numpy's numbers are numbers, mappings are dicts."""
    if isinstance(value, Mapping):
        return {key: _as_in_a_file(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_in_a_file(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, bool | int | float):
        return value
    return int(value) if isinstance(value, Integral) else float(value) if isinstance(value, Real) else value


def _read_settings(source: ConfigSource, content: dict[Any, Any]) -> None:
    source.resolved = content.pop(RESOLVED, False) is True
    for key, value in content.items():
        if key in sections():
            _read_section(source, str(key), value)
        else:
            _read_key(source, str(key), value, None)


def _read_section(source: ConfigSource, section: str, value: object) -> None:
    if not isinstance(value, dict):
        if value is not None:
            held = f"holds no fields, but {shown(value)}"
            source.problems.append(f"{source.name}: {section} {held}{_in_section(section)}")
        return
    for key, item in value.items():
        _read_key(source, str(key), item, section)


def _read_key(source: ConfigSource, key: str, value: object, section: str | None) -> None:
    """Read one field, by its name or an alias. section: the section around it; None at the top level."""
    place = key if section is None else f"{section}.{key}"
    known = option_called(key)
    if known is None:
        hint = _sections_of(key, value, section) if isinstance(value, dict) else ""
        hint = hint or _did_you_mean(key, section)
        source.problems.append(f"{source.name}: there is no {place if len(place) <= 80 else shown(place)}{hint}")
        return
    if section not in (None, known.section, known.earlier):
        source.problems.append(f"{source.name}: there is no {place}; {known.name} belongs to {known.section}")
        return
    if known.name in source.settings and not known.measures:  # of a length's names the source tells which contradict
        source.problems.append(f"{source.name}: {place} gives {known.name} a second time")
        return
    try:
        source.put(known.name, known.from_value(value, known.measure_of(key)), f"{source.name}: {place}")
    except ValueError as reason:
        source.problems.append(f"{source.name}: {place}: {reason}")
        source.bad.add(known.name)


def _in_section(section: str) -> str:
    """What stands in a section, for a message about one that holds something else."""
    if section in run_options():  # who leaves out the sections means the field of that name
        around = run_options()[section].section
        return f"; {section} is a key of the section {around}: {{{around}: {{{section}: ...}}}}"
    names = [name for name, option in run_options().items() if option.section == section]
    return f"; fields of it are {', '.join(names[:NAMED])}, ..."


def _did_you_mean(key: str, section: str | None) -> str:
    """A hint for an unknown key: a similar field of its section, else one of any section."""
    names = [name for name, option in run_options().items() if section in (None, option.section)]
    return did_you_mean_key(key, names if section else [*names, *sections()]) or did_you_mean_key(key, run_options())


def _sections_of(key: str, fields_in_it: dict[Any, Any], section: str | None) -> str:
    """A hint for a key that is no section, but holds fields: a similar section, and where the fields belong."""
    similar = did_you_mean(key, sections()) if section is None else ""
    options = list(dict.fromkeys(filter(None, map(option_called, map(str, fields_in_it)))))[:NAMED]
    places = [f"{option.name} belongs to {option.section}" for option in options]
    return f"{similar}; {', '.join(places)}" if places else similar
