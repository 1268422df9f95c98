"""The keys of rotary positions in a config.json: rope_theta, rope_scaling and rope_parameters, of all versions.

Versions of transformers differ in which of them they use. What they say is one set of `RotarySettings`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megazero.config.layers.kinds import ROTARY, rotary_sets
from megazero.config.rotary import KINDS, OF_MODEL, ORIGINAL, RotaryScaling, RotarySettings
from megazero.config.schema import ModelConfig
from megazero.convert.hf.tables import Config, ConfigKey, ModelRequirement
from megazero.system.reading import shown

PLAIN = "default"
_OTHER_NAMES = {"su": "longrope"}
_SETTINGS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def rope_values(config: Config) -> dict[str, Any]:
    """Everything that config.json says in rope_scaling and rope_parameters, under the names of newer versions."""
    values = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    if "type" in values:
        values.setdefault("rope_type", values["type"])
    return values


def settings_of(
    values: Mapping[str, Any], *, base: float, share: float, trained: Any, renamed: Mapping[str, str] = _OTHER_NAMES
) -> RotarySettings:
    """The settings that these keys say.

    base, share  of positions without keys of their own
    trained      the longest sequence of the model, which is that of its first training where no key names this
    renamed      other names of kinds

    Raises ValueError for a kind, a key or a value that `RotaryScaling` does not know.
    """
    kind = values.get("rope_type") or values.get("type") or PLAIN
    kind = renamed.get(kind, kind)
    theta, part = values.get("rope_theta") or base, values.get("partial_rotary_factor") or share
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        raise ValueError(f"rope_theta {shown(theta)} is not a number")
    if isinstance(part, bool) or not isinstance(part, int | float):
        raise ValueError(f"partial_rotary_factor {shown(part)} is not a number")
    rest = {key: value for key, value in values.items() if key not in _SETTINGS and value is not None}
    return RotarySettings(float(theta), float(part), scaling=_scaling(kind, rest, trained))


def _scaling(kind: str, values: dict[str, Any], trained: Any) -> RotaryScaling | None:
    if kind == PLAIN or (kind == "linear" and values.get("factor") == 1):
        strange = values.keys() - {"factor", ORIGINAL}
        if strange:
            raise ValueError(f"{', '.join(sorted(strange))} of rope_type {kind!r}: megazero has nothing of that name")
        return None
    if kind not in KINDS:
        raise ValueError(f"rope_type {kind!r}: megazero computes {PLAIN}, {', '.join(KINDS)}")
    if ORIGINAL in KINDS[kind].keys:
        values.setdefault(ORIGINAL, trained)
    if kind == "longrope" and "factor" not in values and trained:
        values["factor"] = _growth(values[ORIGINAL], trained)
    for key, value in values.items():
        if not isinstance(value, bool | int | float | list) or (
            isinstance(value, list) and not all(type(number) in (int, float) for number in value)
        ):
            raise ValueError(f"{key} {shown(value)} is neither a number nor a list of numbers")
    return RotaryScaling(
        kind, tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in values.items())
    )


def _growth(original: Any, trained: Any) -> Any:
    """How many times as long the context is as that of the first training."""
    numbers = all(type(length) in (int, float) for length in (original, trained))
    if not numbers or not 0 < original <= trained:
        raise ValueError(
            f"{ORIGINAL} {shown(original)} is no number from 1 to max_position_embeddings, which is {shown(trained)}: "
            "longrope lengthens the context of a first training"
        )
    return trained / original


def parameters(settings: RotarySettings, share: float = 1.0) -> dict[str, Any]:
    """rope_parameters of these settings. share: the part of a head that turns where no key says it."""
    scaling = settings.scaling
    written: dict[str, Any] = {"rope_type": PLAIN if scaling is None else scaling.kind, "rope_theta": settings.base}
    if settings.share != share:
        written["partial_rotary_factor"] = settings.share
    return written | ({} if scaling is None else {key: _plain(key, value) for key, value in scaling.values})


def _plain(key: str, value: Any) -> Any:
    """A value as JSON has it: counts as whole numbers, lists, switches."""
    if isinstance(value, tuple):
        return list(value)
    if key == "truncate":
        return bool(value)
    return int(value) if key == ORIGINAL else value


@dataclass(frozen=True)
class RopeKeys(ConfigKey):
    """All keys of the rotary positions of a model whose layers turn alike.

    share     the part of a head that turns where no key says it
    base_key  the key of the base outside of rope_parameters, which older versions read
    part_key  the same of the part that turns
    partial   whether models of the family turn a part of each head
    length    the longest sequence where no key says it
    renamed   other names of kinds of scaling
    """

    share: float = 1.0
    base_key: str = "rope_theta"
    part_key: str = "partial_rotary_factor"
    partial: bool = False
    length: int = 2048
    renamed: Mapping[str, str] | None = None

    def read(self, config: Config) -> Any:
        values = rope_values(config)
        for key, outer in (("rope_theta", self.base_key), ("partial_rotary_factor", self.part_key)):
            if values.get(key) is None and config.get(outer) is not None:
                values[key] = config[outer]
        if any(isinstance(value, dict) for value in values.values()):
            raise ValueError(f"of several kinds of layers ({', '.join(sorted(values))}): all layers turn alike here")
        if config.get(ORIGINAL) is not None:
            values[ORIGINAL] = config[ORIGINAL]
        if not self.partial and values.get("partial_rotary_factor") not in (None, 1):
            raise ValueError(
                f"partial_rotary_factor {shown(values['partial_rotary_factor'])}: this family turns whole heads"
            )
        trained = config.get("max_position_embeddings") or self.length
        return settings_of(
            values, base=self.default, share=self.share, trained=trained, renamed=self.renamed or _OTHER_NAMES
        )

    def entries(self, model: ModelConfig) -> dict[str, Any]:
        """Written in rope_parameters, for newer versions of transformers, and outside of it, for older ones."""
        settings = settings_of_model(model)
        scaling = settings.scaling
        written: dict[str, Any] = {self.base_key: settings.base, "rope_parameters": parameters(settings, self.share)}
        if settings.share != self.share or self.part_key != "partial_rotary_factor":
            written[self.part_key] = settings.share
        if scaling is not None:
            outside = ("rope_theta", "partial_rotary_factor")
            within = written["rope_parameters"]
            written["rope_scaling"] = {key: value for key, value in within.items() if key not in outside}
            if ORIGINAL in dict(scaling.values):
                written[ORIGINAL] = int(scaling.original(0))
        return written


def settings_of_model(model: ModelConfig) -> RotarySettings:
    """The rotary settings of the model's own fields."""
    return rotary_sets(model)[ROTARY]


def scaled_by(*kinds: str) -> ModelRequirement:
    """Positions that are not scaled, or that are in one of these ways."""
    return ModelRequirement("the kind of --rotary-scaling", _kind, ("none", *kinds))


def _kind(model: ModelConfig) -> str:
    return "none" if model.rotary_scaling is None else model.rotary_scaling.kind


def fields_of(settings: RotarySettings) -> dict[str, Any]:
    """The fields of these settings, which take halves of a head as pairs."""
    return {field: getattr(settings, name) for field, name in OF_MODEL.items()}


def rope(theta: float = 10000.0, **more: Any) -> RopeKeys:
    """The keys of rotary positions whose base is `theta` where no key says it. more: fields of `RopeKeys`."""
    made = RopeKeys(("rope_parameters",), theta, fields_of, settings_of_model, **more)
    keys = ("rope_parameters", "rope_scaling", made.base_key, made.part_key, ORIGINAL)
    return replace(made, keys=tuple(dict.fromkeys(keys)))


def two_minds(config: Config) -> Iterator[str]:
    """Contradictions between rope_theta, rope_scaling and rope_parameters, of which versions use different ones."""
    older, newer = dict(config.get("rope_scaling") or {}), dict(config.get("rope_parameters") or {})
    for values in (older, newer):
        if values:
            values["rope_type"] = values.get("rope_type") or values.pop("type", None) or PLAIN
    for key in sorted(older.keys() & newer.keys()):
        if older[key] != newer[key]:
            yield f"rope_scaling.{key} is {older[key]!r}, rope_parameters.{key} {newer[key]!r}"
    outer = config.get("rope_theta")
    for name, values in (("rope_scaling", older), ("rope_parameters", newer)):
        if None not in (outer, values.get("rope_theta")) and outer != values["rope_theta"]:
            yield f"rope_theta is {outer!r}, {name}.rope_theta {values['rope_theta']!r}"
