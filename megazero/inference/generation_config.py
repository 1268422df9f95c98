"""The model's own defaults for sampling: generation_config.json, which `transformers` uses for settings that its caller
does not give.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megazero.data.indexed import DataError
from megazero.inference.sampling import Sampling
from megazero.system.reading import shown

DRAWN = ("temperature", "top_k", "top_p")
"""Settings that only have an effect if tokens are drawn."""
COUNTS = ("top_k", "max_new_tokens")
KEYS = (*DRAWN, "repetition_penalty", "max_new_tokens")

Settings = Mapping[str, float]


def generation_defaults(config: Mapping[str, Any]) -> dict[str, float]:
    """The settings of `KEYS` that the file has.

    With "do_sample": false the temperature is 0. Without do_sample, the settings of drawing are ignored. A missing
    top_k stays unset, while `transformers` then takes 50: if a model's makers set top_p alone, only top_p applies.
    Raises DataError for a value that is not such a number.
    """
    draws = config.get("do_sample")
    wanted = KEYS if draws is True else tuple(key for key in KEYS if key not in DRAWN)
    found: dict[str, float] = {key: _number(key, config[key]) for key in wanted if config.get(key) is not None}
    if draws is False:
        found["temperature"] = 0.0
    try:
        sampling_of(found)
    except ValueError as error:
        raise DataError(f"generation_config.json: {error}") from error
    if found.get("max_new_tokens", 1) < 1:
        raise DataError(f"generation_config.json: max_new_tokens ({found['max_new_tokens']}) is not 1 or more")
    return found


def sampling_of(settings: Settings, seed: int = Sampling.seed) -> Sampling:
    """A `Sampling` with these settings, and its defaults for the others. Raises ValueError."""
    return Sampling(
        settings.get("temperature", Sampling.temperature),
        int(settings.get("top_k", Sampling.top_k)),
        settings.get("top_p", Sampling.top_p),
        settings.get("repetition_penalty", Sampling.repetition_penalty),
        seed,
    )


def _number(key: str, value: Any) -> float:
    wanted = int if key in COUNTS else (int, float)
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise DataError(
            f"generation_config.json: {key} is {shown(value)}, no {'whole number' if key in COUNTS else 'number'}"
        )
    return value


def applicable_defaults(defaults: Settings, given: Settings) -> dict[str, float]:
    """The defaults that the user's settings do not replace. If the user sets how to draw, a default temperature of 0 is
    dropped too, so that tokens are drawn.
    """
    draws = any(key in given for key in DRAWN) and defaults.get("temperature") == 0
    return {key: value for key, value in defaults.items() if key not in given and not (draws and key == "temperature")}
