"""What an adapter is made on of lm_eval, for `make test`, which does not install it: 75 MB for a few lines.

These parts judge nothing. What the adapter answers on them is compared with what lm_eval's own adapter has answered
(`harness_answers.json`), and `test_lm_eval.py` runs the adapter in lm_eval itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple


class Instance(NamedTuple):
    """A request."""

    request_type: str
    doc: dict[str, Any]
    arguments: tuple[Any, ...]
    idx: int

    @property
    def args(self) -> tuple[Any, ...]:
        return self.arguments


class CacheHook:
    """The hook of a run without a cache."""

    def add_partial(self, attr: str, req: Any, res: Any) -> None: ...


class TemplateLM:
    """Turns pairs of texts into tokens, as the class of this name does for models that read from left to right."""

    backend = "causal"
    prefix_token_id: int

    def __init__(self) -> None:
        self.cache_hook = CacheHook()

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        raise NotImplementedError

    def _loglikelihood_tokens(self, requests: Sequence[Any], **unused: Any) -> list[tuple[float, bool]]:
        raise NotImplementedError

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self._loglikelihood_tokens([(request.args, *self._pair(*request.args)) for request in requests])

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if not context:
            ids = self.tok_encode(continuation, add_special_tokens=False)
            first = self.prefix_token_id
            return ([first], ids) if ids[0] != first else (ids[:1], ids[1:])
        words = context.rstrip()
        before = self.tok_encode(words)
        return before, self.tok_encode(words + context[len(words) :] + continuation)[len(before) :]


def register_model(*names: str) -> Callable[[type], type]:
    return lambda kind: kind


PARTS: dict[str, dict[str, Any]] = {
    "lm_eval": {},
    "lm_eval.api": {},
    "lm_eval.api.instance": {"Instance": Instance},
    "lm_eval.api.model": {"TemplateLM": TemplateLM},
    "lm_eval.api.registry": {"register_model": register_model},
}


def provide() -> None:
    """Let these parts be imported as lm_eval's, if that is not installed."""
    if "lm_eval" in sys.modules or find_spec("lm_eval") is not None:
        return
    for name, contents in PARTS.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(contents, __path__=[])
