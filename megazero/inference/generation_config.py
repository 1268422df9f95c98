"""The model's own defaults for sampling: generation_config.json, which `transformers` uses for settings that its caller
does not give. Without that file it takes the same keys from config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megazero.data.indexed import DataError
from megazero.inference.sampling import Sampling
from megazero.system.reading import shown

DRAWN = ("temperature", "top_k", "top_p")
"""Settings that only have an effect if tokens are drawn."""
KEYS = (*DRAWN, "repetition_penalty", "max_new_tokens")
"""Settings that a flag has too."""
MAX_LENGTH = "max_length"
"""The most tokens of a prompt and its continuation together, where nothing says how many new ones."""
COUNTS = ("top_k", "max_new_tokens", MAX_LENGTH)

NOT_APPLIED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "min_p", "penalty_alpha"), (0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(
        (
            "num_beams",
            "typical_p",
            "guidance_scale",
            "num_beam_groups",
            "encoder_repetition_penalty",
            "num_return_sequences",
        ),
        (1,),
    ),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"), ([], {})),
    **dict.fromkeys(("force_words_ids", "constraints", "stop_strings"), ([],)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
    **dict.fromkeys(("watermarking_config", "dola_layers", "top_h", "max_time"), ()),
    "token_healing": (False,),
}
"""Keys that change the text of `transformers` and are not applied here -> values without an effect, besides null."""

Settings = Mapping[str, float]


def generation_defaults(config: Mapping[str, Any], file: str = "generation_config.json") -> dict[str, float]:
    """The settings of `KEYS` that the file has, and its `MAX_LENGTH` if it has no max_new_tokens.

    With "do_sample": false the temperature is 0. Without do_sample, the settings of drawing are ignored. A missing
    top_k stays unset, while `transformers` then takes 50: if a model's makers set top_p alone, only top_p applies.
    Raises DataError, which names the file, for a value that is not such a number.
    """
    draws = config.get("do_sample")
    if draws is not None and not isinstance(draws, bool):
        raise DataError(f"{file}: do_sample is {shown(draws)}, neither true nor false")
    found = {key: _number(file, key, config[key]) for key in (*KEYS, MAX_LENGTH) if config.get(key) is not None}
    unused = (() if draws else DRAWN) + ((MAX_LENGTH,) if "max_new_tokens" in found else ())
    found = {key: value for key, value in found.items() if key not in unused}
    if draws is False:
        found["temperature"] = 0.0
    try:
        sampling_of(found)
    except ValueError as error:
        raise DataError(f"{file}: {error}") from error
    for key in ("max_new_tokens", MAX_LENGTH):
        if found.get(key, 1) < 1:
            raise DataError(f"{file}: {key} ({found[key]}) is not 1 or more")
    return found


def not_applied(config: Mapping[str, Any]) -> list[str]:
    """The keys of the file that change the text of `transformers` and are not applied here, as `key value`."""
    return [
        f"{key} {shown(config[key])}"
        for key, idle in NOT_APPLIED.items()
        if config.get(key) is not None and config[key] not in idle
    ]


def sampling_of(settings: Settings, seed: int = Sampling.seed) -> Sampling:
    """A `Sampling` with these settings, and its defaults for the others. Raises ValueError."""
    return Sampling(
        settings.get("temperature", Sampling.temperature),
        int(settings.get("top_k", Sampling.top_k)),
        settings.get("top_p", Sampling.top_p),
        settings.get("repetition_penalty", Sampling.repetition_penalty),
        seed,
    )


def _number(file: str, key: str, value: Any) -> float:
    wanted = int if key in COUNTS else (int, float)
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise DataError(f"{file}: {key} is {shown(value)}, no {'whole number' if key in COUNTS else 'number'}")
    return value


def applicable_defaults(defaults: Settings, given: Settings) -> dict[str, float]:
    """The defaults that the user's settings do not replace. If the user sets how to draw, a default temperature of 0 is
    dropped too, so that tokens are drawn. If the user sets the number of new tokens, `MAX_LENGTH` does not count.
    """
    draws = any(key in given for key in DRAWN) and defaults.get("temperature") == 0
    replaced = {*given, *(["temperature"] if draws else []), *([MAX_LENGTH] if "max_new_tokens" in given else [])}
    return {key: value for key, value in defaults.items() if key not in replaced}
