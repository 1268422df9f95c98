"""What a program hands to a model: numbers of other libraries are taken, and each mistake says what to pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import megazero
from megazero.convert.loading import TrainedModel, model_of
from megazero.data.tokenizer import build_tokenizer
from megazero.inference.sampling import Sampling
from tests.convert.sources import made

IDS = [1, 2, 3]


@pytest.fixture(scope="module")
def model() -> TrainedModel:
    return model_of(made())


@pytest.mark.parametrize(
    "make", [tuple, np.array, torch.tensor, lambda ids: [*map(np.int32, ids)], lambda ids: [*torch.tensor(ids)]]
)
def test_ids_of_every_kind_are_ids(make: Callable[[list[int]], Any], model: TrainedModel) -> None:
    """A list of int comes back, which JSON takes."""
    found = model.generate(make(IDS), np.int64(2))  # type: ignore[arg-type]
    assert found == model.generate(IDS, 2) and {type(token) for token in found} == {int}


MISTAKES: tuple[tuple[Any, Any, Any, str], ...] = (
    ("text", 2, None, "ids is text, 'text': a list of token ids is needed; the checkpoint leads to no tokenizer, so"),
    (["a", "b"], 2, None, "ids is text, ['a', 'b']"),
    ([IDS], 2, None, "ids holds several prompts: give the ids of one, such as ids[0]"),
    (torch.tensor([IDS]), 2, None, "ids has 2 dimensions, [1, 3]: the ids of one prompt have one"),
    (np.array(3), 2, None, "ids has 0 dimensions, []"),
    (5, 2, None, "ids is int 5: a list of token ids is needed"),
    ([1.5], 2, None, "ids[0] is float 1.5: a token id is a whole number"),
    ([1, True], 2, None, "ids[1] is bool True: a token id is a whole number"),
    ([], 2, None, "ids is empty: a model needs a token to continue"),
    ([97], 2, None, "ids holds id 97, outside the model's vocabulary of 97"),
    ([-1], 2, None, "ids holds id -1, outside"),
    (IDS, -1, None, "max_new_tokens is -1, less than 0"),
    (IDS, 2.5, None, "max_new_tokens is float 2.5: it is a whole number"),  # it was generated without an end
    (IDS, 2, 0.7, "sampling is float 0.7: a Sampling of megazero.inference.sampling is needed, such as Sampling("),
    (IDS, 2, {"temperature": 1}, "sampling is dict: a Sampling"),
)


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_each_mistake_says_what_to_pass(number: int, model: TrainedModel) -> None:
    ids, count, sampling, told = MISTAKES[number]
    with pytest.raises((TypeError, ValueError)) as caught:
        model.generate(ids, count, Sampling() if sampling is None else sampling)
    assert str(caught.value).startswith(told)


def test_a_text_is_for_the_models_own_tokenizer() -> None:
    model = model_of(made())
    model.tokenizer = build_tokenizer("byte", None)
    with pytest.raises(TypeError, match=r"model\.tokenizer\.encode\(text\) makes them"):
        model.generate("text", 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        (IDS, "ids is list: a tensor of token ids [b, s] is needed, such as torch.tensor([[1, 2]])"),
        (torch.tensor(IDS), "ids is of shape [3]: [b, s] is needed, with at least one id"),
        (torch.zeros(1, 0), "ids is of shape [1, 0]"),
        (torch.ones(1, 2), "ids is of torch.float32: token ids are whole numbers, as torch.int64"),
        (torch.tensor([[3, 97]]), "ids holds 97, outside the model's vocabulary of 97"),
    ],
)
def test_a_forward_pass_takes_a_tensor_of_ids(ids: Any, told: str, model: TrainedModel) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        model(ids)
    assert str(caught.value).startswith(told)
    short = torch.tensor([IDS], dtype=torch.int32)
    assert torch.equal(model(short), model(short.long()))


@pytest.mark.parametrize("messages", ["hello", {"role": "user", "content": "hello"}, ["hello"]])
def test_a_chat_is_a_list_of_turns(messages: Any, model: TrainedModel) -> None:
    with pytest.raises(TypeError, match=r'messages is a list of turns, such as \[\{"role": "user"'):
        model.chat(messages)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"temperature": "hot"}, "temperature is str 'hot': it is a number"),
        ({"top_k": 2.5}, "top_k is float 2.5: it is a whole number"),
        ({"temperature": -1}, "temperature (-1) is not 0 or more"),
    ],
)
def test_a_sampling_is_numbers(settings: dict[str, Any], told: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        Sampling(**settings)
    assert str(caught.value) == told


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"precision": "float16"}, "precision is 'float16': known are fp64, fp32, bf16, fp16"),
        ({"format": "huggingface"}, "format is 'huggingface': known are megatron, "),
        ({"device": "gpu"}, "device is 'gpu': nearest: cpu"),
    ],
)
def test_what_load_does_not_know(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError) as caught:
        megazero.load("nowhere", **settings)
    assert str(caught.value).startswith(told)
