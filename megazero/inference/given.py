"""What a program hands to a model: ids, counts and samplings as numbers, or an error that says what to pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megazero.inference.sampling import Sampling
from megazero.system.given import is_whole, kind
from megazero.system.reading import shown

WHOLE_TENSORS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


def token_ids(what: str, given: Any, vocabulary: int, *, text: str = "a tokenizer's encode makes them") -> list[int]:
    """The ids of one prompt: a list, tensor or array of whole numbers, as a list of int.

    what: names the ids in messages. vocabulary: the model's. text: what to do with a text instead. Raises TypeError for
    anything else than ids of one prompt, ValueError for none and for ids outside the vocabulary.
    """
    if isinstance(given, str | bytes) or _holds_text(given):
        raise TypeError(f"{what} is text, {shown(given)}: a list of token ids is needed; {text}")
    if isinstance(given, Tensor | np.ndarray):
        if given.ndim != 1:
            raise TypeError(f"{what} has {given.ndim} dimensions, {[*given.shape]}: the ids of one prompt have one")
        given = given.tolist()
    if not isinstance(given, Sequence | range):
        raise TypeError(f"{what} is {kind(given)}: a list of token ids is needed")
    if not len(given):
        raise ValueError(f"{what} is empty: a model needs a token to continue")
    for place, token in enumerate(given):
        if isinstance(token, Sequence | np.ndarray) or (isinstance(token, Tensor) and token.ndim):
            raise TypeError(f"{what} holds several prompts: give the ids of one, such as {what}[0]")
        number = token.item() if isinstance(token, Tensor) else token
        if not is_whole(number):
            raise TypeError(f"{what}[{place}] is {kind(number)}: a token id is a whole number")
        if not 0 <= number < vocabulary:
            raise ValueError(f"{what} holds id {number}, outside the model's vocabulary of {vocabulary}")
    return [int(token) for token in given]


def new_tokens(given: Any) -> int:
    """The most tokens of a continuation. Raises TypeError, ValueError."""
    if not is_whole(given):
        raise TypeError(f"max_new_tokens is {kind(given)}: it is a whole number")
    if given < 0:
        raise ValueError(f"max_new_tokens is {given}, less than 0")
    return int(given)


def sampling_given(given: Any) -> Sampling:
    """The sampling. Raises TypeError that shows how one is made."""
    if not isinstance(given, Sampling):
        raise TypeError(
            f"sampling is {kind(given)}: a Sampling of megazero.inference.sampling is needed, such as "
            "Sampling(temperature=0.8)"
        )
    return given


def batch_of_ids(given: Any, vocabulary: int) -> Tensor:
    """Ids [b, s] as int64. Raises TypeError and ValueError. The range is not looked at on a GPU, which would wait."""
    if not isinstance(given, Tensor):
        raise TypeError(f"ids is {kind(given)}: a tensor of token ids [b, s] is needed, such as torch.tensor([[1, 2]])")
    if given.ndim != 2 or not given.numel():
        raise ValueError(f"ids is of shape {[*given.shape]}: [b, s] is needed, with at least one id")
    if given.dtype not in WHOLE_TENSORS:
        raise TypeError(f"ids is of {given.dtype}: token ids are whole numbers, as torch.int64")
    if given.device.type == "cpu":
        low, high = (int(end) for end in torch.aminmax(given))
        if low < 0 or high >= vocabulary:
            raise ValueError(f"ids holds {low if low < 0 else high}, outside the model's vocabulary of {vocabulary}")
    return given.long()


def _holds_text(given: Any) -> bool:
    return isinstance(given, list | tuple) and any(isinstance(item, str | bytes) for item in given)
