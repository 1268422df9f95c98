"""Each rule against the one of transformers; draws follow the distribution and are numbers of their own."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from megazero.inference.sampling import Row, Sampling, among_likeliest, choose, penalised, uniform, within_mass

B, V = 6, 97


def logits(seed: int = 0, ties: bool = False) -> Tensor:
    drawn = torch.randn(B, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    return drawn.round() if ties else drawn


@pytest.mark.parametrize("penalty", [0.7, 1.0, 1.3, 5.0])
def test_repetition_penalty(penalty: float) -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    ids = torch.randint(0, V, (B, 11), generator=torch.Generator().manual_seed(1))
    ids[:, 5] = ids[:, 2]  # twice in the row, once in the sum
    theirs = processors.RepetitionPenaltyLogitsProcessor(penalty)(ids, logits())
    assert torch.equal(penalised(logits(), ids.tolist(), penalty), theirs)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("count", [1, 2, 10, V, V + 5])
def test_top_k(count: int, ties: bool) -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    assert torch.equal(
        among_likeliest(logits(2, ties), count), processors.TopKLogitsWarper(count)(None, logits(2, ties))
    )


@pytest.mark.parametrize("mass", [1e-9, 0.1, 0.5, 0.9, 0.999, 1.0])
def test_top_p(mass: float) -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    assert torch.equal(within_mass(logits(3), mass), processors.TopPLogitsWarper(mass)(None, logits(3)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(temperature=2.0, top_k=7),
        Sampling(top_p=0.8),
        Sampling(temperature=1.3, top_k=20, top_p=0.7, repetition_penalty=1.5),
    ],
)
def test_draws_follow_the_distribution_of_transformers(sampling: Sampling) -> None:
    """Frequencies of 20,000 draws, within 5 standard deviations of its probabilities after its own
    chain of processors.
    """
    processors = pytest.importorskip("transformers.generation.logits_process")
    scores, count = logits(4)[:1], 20_000
    ids = torch.tensor([[3, 50, 3, int(scores.argmax())]])
    chain = processors.LogitsProcessorList([processors.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)])
    chain.append(processors.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        chain.append(processors.TopKLogitsWarper(sampling.top_k))
    chain.append(processors.TopPLogitsWarper(sampling.top_p))
    expected = chain(ids, scores.clone()).softmax(-1)[0]
    rows = [Row(ids[0].tolist(), number, 5) for number in range(count)]
    seen = Counter(choose(scores.expand(count, -1), rows, sampling))
    frequencies = torch.tensor([seen[token] / count for token in range(V)], dtype=torch.float64)
    assert ((frequencies - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt()).all()


def test_greedy_is_the_largest_after_the_penalty() -> None:
    best = logits().argmax(-1).tolist()
    rows = [Row([token], 0, 0) for token in best]
    assert choose(logits(), rows, Sampling(temperature=0)) == best
    punished = choose(logits(), rows, Sampling(temperature=0, repetition_penalty=1e6))
    assert punished == [int(row.topk(2).indices[1]) for row in logits()]
    assert choose(logits().bfloat16(), rows, Sampling(temperature=0)) == logits().bfloat16().float().argmax(-1).tolist()


def test_draws_depend_on_seed_row_and_step_alone() -> None:
    sampling = Sampling(temperature=1.5, seed=9)
    rows = [Row([], 10 + number, 3) for number in range(B)]
    together = choose(logits(), rows, sampling)
    assert together == [choose(logits()[i : i + 1], [row], sampling)[0] for i, row in enumerate(rows)]
    numbers = {uniform(seed, row, step) for seed in (0, 2**63) for row in range(50) for step in range(50)}
    assert len(numbers) == 5000 and min(numbers) >= 0 and max(numbers) < 1
    assert abs(sum(numbers) / 5000 - 0.5) < 0.02


def test_a_token_without_probability_is_never_taken() -> None:
    """Also where the number drawn is the largest below 1 and the sum of the probabilities is rounded."""
    scores = torch.full((1, 1000), float("-inf"), dtype=torch.float64)
    scores[0, 10:700] = torch.randn(690, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = set(choose(scores.expand(4000, -1), [Row([], number, 0) for number in range(4000)], Sampling()))
    assert min(drawn) >= 10 and max(drawn) < 700


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-300, 1e-3])
def test_the_least_temperatures_take_the_likeliest(temperature: float) -> None:
    rows = [Row([], number, 0) for number in range(B)]
    assert choose(logits() * 10, rows, Sampling(temperature)) == logits().argmax(-1).tolist()


@pytest.mark.filterwarnings("error")
def test_large_seeds_are_seeds_of_their_own() -> None:
    assert len({uniform(seed, 7, 3) for seed in (2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1)}) == 4


@pytest.mark.parametrize(
    "sampling", [Sampling(0.0), Sampling(0.0, repetition_penalty=1.5), Sampling(), Sampling(0.7, 5, 0.9)]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_token_from_logits_that_are_not_finite(sampling: Sampling, value: float) -> None:
    broken = logits()
    broken[2, 5] = value
    with pytest.raises(FloatingPointError, match="not finite"):
        choose(broken, [Row([5], number, 0) for number in range(B)], sampling)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"temperature": -1.0}, r"temperature \(-1.0\)"),
        ({"temperature": float("nan")}, r"temperature \(nan\)"),
        ({"top_k": -1, "top_p": 0.0}, r"top_k \(-1\).*top_p \(0.0\)"),
        ({"top_p": 1.1}, r"top_p \(1.1\)"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty \(0.0\)"),
        ({"seed": -1}, r"seed \(-1\)"),
    ],
)
def test_refuses(wrong: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Sampling(**wrong)  # type: ignore[arg-type]
