"""How a model's makers would have its tokens taken: generation_config.json, which `transformers` follows where its
caller says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megazero.data.indexed import DataError
from megazero.inference.sampling import Sampling
from megazero.system.reading import shown

DRAWN = ("temperature", "top_k", "top_p")
"""What only counts where tokens are drawn."""
COUNTS = ("top_k", "max_new_tokens")
KEYS = (*DRAWN, "repetition_penalty", "max_new_tokens")

Settings = Mapping[str, float]


def generation_defaults(config: Mapping[str, Any]) -> dict[str, float]:
    """Of the file's content what `KEYS` names and it says; a temperature of 0 where it says that nothing is drawn
    ("do_sample": false).

    A file that does not say whether tokens are drawn says nothing about how, and one without a top_k does not ask for
    the 50 that `transformers` takes then: of a model whose makers name a top_p alone, that is what counts. Raises
    DataError for what is no such number.
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
    """Tokens taken as these settings say, and as `Sampling` has it where they say nothing. Raises ValueError."""
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
    """Of the defaults what a user leaves standing: what is given wins, and who says how to draw wants
    tokens to be drawn.
    """
    draws = any(key in given for key in DRAWN) and defaults.get("temperature") == 0
    return {key: value for key, value in defaults.items() if key not in given and not (draws and key == "temperature")}
