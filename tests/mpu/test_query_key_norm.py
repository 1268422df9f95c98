"""The norm of queries and keys under tensor parallelism against one process, in fp64.

Row 8 of the numerical faults once more: replicated weights of which each rank has other heads (Megatron-LM issue 816).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megazero.mpu.axes import Axes
from megazero.mpu.grid import Group, build_grid, single_rank_group
from megazero.mpu.norm import QueryKeyNorm, RMSNorm
from megazero.mpu.parameter import ParameterKind, spec_of
from megazero.mpu.random import initialise
from tests.parameters import Piece, assemble, gradients_of
from tests.ranks import run_ranks

GROUPS, REPEATS, HEAD, S, B, EPS = 6, 2, 4, 5, 2, 1e-3
WIDTH = GROUPS * (REPEATS + 2) * HEAD


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights(kind: str) -> dict[str, Tensor]:
    """Whole weights, of which no two values are equal."""
    sizes = {"head": (HEAD, HEAD), "all": (GROUPS * REPEATS * HEAD, GROUPS * HEAD), "l2": ()}[kind]
    names = ("attention.query_norm.weight", "attention.key_norm.weight")
    return {name: drawn(size, seed=i) for i, (name, size) in enumerate(zip(names, sizes, strict=False), 3)}


@dataclass(frozen=True)
class Case:
    kind: str
    offset: float = 0.0
    dtype: torch.dtype = torch.float64


def norm_of(case: Case, group: Group) -> QueryKeyNorm:
    norm = QueryKeyNorm(
        *("attention", case.kind, GROUPS, REPEATS, HEAD, EPS, group), dtype=case.dtype, device="cpu", offset=case.offset
    )
    for parameter in norm.parameters():
        spec = spec_of(parameter)
        parameter.data.copy_(weights(case.kind)[spec.name][slice(*spec.box[0])])
    return norm


Result = tuple[Tensor, Tensor, list[Piece]]


def result_of(case: Case, group: Group) -> Result:
    """(output, gradient of mixed) of this rank's heads, and the gradients of its parameters."""
    norm = norm_of(case, group)
    mixed, incoming = (drawn(S, B, WIDTH, seed=seed).chunk(group.size, -1)[group.index] for seed in (1, 2))
    leaf = mixed.to(case.dtype).requires_grad_()
    output = norm(leaf)
    output.backward(incoming.to(case.dtype))
    with torch.no_grad():
        assert torch.equal(norm(leaf), output)
    assert leaf.grad is not None
    return output.detach(), leaf.grad, gradients_of(norm)


def parallel(rank: int, world: int, cases: list[Case]) -> list[Result]:
    group = build_grid(Axes(tp=world)).tp
    return [result_of(case, group) for case in cases]


def dense(case: Case) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The formulas on whole tensors, for autograd."""
    leaves = {name: value.to(case.dtype).double().requires_grad_() for name, value in weights(case.kind).items()}
    mixed = drawn(S, B, WIDTH, seed=1).to(case.dtype).double().requires_grad_()
    heads = mixed.unflatten(-1, (GROUPS, REPEATS + 2, HEAD))
    parts = []
    for part, name in ((heads[..., :REPEATS, :], "query"), (heads[..., REPEATS : REPEATS + 1, :], "key")):
        over = (-3, -2, -1) if case.kind == "all" else (-1,)
        unit = part / ((part * part).mean(over, keepdim=True) + EPS) ** 0.5
        weight = leaves.get(f"attention.{name}_norm.weight")
        if weight is not None:
            unit = unit * ((weight.view(part.shape[-3:]) if case.kind == "all" else weight) + case.offset)
        parts.append(unit)
    output = torch.cat([*parts, heads[..., REPEATS + 1 :, :]], dim=-2).flatten(-3)
    output.backward(drawn(S, B, WIDTH, seed=2).to(case.dtype).double())
    assert mixed.grad is not None
    return output.detach(), mixed.grad, {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


CASES = [Case(kind, offset) for kind in QueryKeyNorm.KINDS for offset in (0.0, 1.0)]


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_fault_08_equal_to_one_process(tp: int) -> None:
    """Output, gradient of the input, and gradients of the weights, whose parts are added up where the spec says so."""
    every: list[list[Result]] = run_ranks(tp, parallel, tp, CASES)
    for number, case in enumerate(CASES):
        ranks = [results[number] for results in every]
        output, of_mixed, gradients = dense(case)
        torch.testing.assert_close(torch.cat([rank[0] for rank in ranks], -1), output, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(torch.cat([rank[1] for rank in ranks], -1), of_mixed, rtol=1e-11, atol=1e-12)
        ours = assemble([rank[2] for rank in ranks], unreduced=True)
        assert ours.keys() == gradients.keys() == weights(case.kind).keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(ours[name], gradient, rtol=1e-11, atol=1e-12, msg=f"{case} {name}: {{}}".format)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", QueryKeyNorm.KINDS)
def test_sixteen_bits_round_once(kind: str, dtype: torch.dtype) -> None:
    case = Case(kind, 1.0, dtype)
    output, of_mixed, pieces = result_of(case, single_rank_group())
    exact, of_exact, gradients = dense(case)
    pairs = [(output, exact), (of_mixed, of_exact), *((p.values, gradients[p.spec.name]) for p in pieces)]
    for ours, theirs in pairs:
        assert ours.dtype == dtype
        error = (ours.double() - theirs).abs() / theirs.abs().clamp(min=theirs.abs().max() / 100)
        assert error.max() <= 1.05 * torch.finfo(dtype).eps / 2


def places(rank: int, kind: str) -> list[tuple[str, tuple[int, ...], Any, bool, bool]]:
    norm = QueryKeyNorm(*("a", kind, 4, 3, 2, EPS, build_grid(Axes(tp=2)).tp), dtype=torch.float32, device="cpu")
    specs = [spec_of(parameter) for parameter in norm.parameters()]
    assert all(spec.kind is ParameterKind.NORM for spec in specs)
    return [(spec.name, spec.shape, spec.box, spec.tp_sharded, spec.tp_partial) for spec in specs]


def test_which_ranks_hold_what() -> None:
    names = "a.query_norm.weight", "a.key_norm.weight"
    assert run_ranks(2, places, "l2") == [[], []]
    assert run_ranks(2, places, "head") == [[(name, (2,), ((0, 2),), False, True) for name in names]] * 2
    assert run_ranks(2, places, "all") == [
        [(names[0], (24,), (query,), True, False), (names[1], (8,), (key,), True, False)]
        for query, key in (((0, 12), (0, 4)), ((12, 24), (4, 8)))
    ]


def test_one_process_has_nothing_to_add_up() -> None:
    assert not any(spec_of(p).tp_partial for p in norm_of(Case("head"), single_rank_group()).parameters())


@pytest.mark.parametrize("kind", ["head", "all"])
def test_weights_begin_where_the_norm_changes_nothing(kind: str) -> None:
    for offset in (0.0, 1.0):
        norm = norm_of(Case(kind, offset), single_rank_group())
        rms = RMSNorm("norm", 7, EPS, single_rank_group(), False, torch.float64, "cpu", offset)
        for parameter in (*norm.parameters(), *rms.parameters()):
            initialise(parameter, spec_of(parameter), 1)
            assert (parameter + offset == 1).all()
        x = drawn(3, 7, seed=1)
        torch.testing.assert_close(rms(x), x / (x.square().mean(-1, keepdim=True) + EPS).sqrt())
        torch.testing.assert_close(rms.of_sum(x, x)[1], 2 * x / (4 * x.square().mean(-1, keepdim=True) + EPS).sqrt())


def test_what_is_wrong_is_said() -> None:
    pair = replace(single_rank_group(), ranks=(0, 1))
    for kind, groups, message in (("layer", 4, "'layer'"), ("head", 3, "3 key-value heads are not divisible by tp=2")):
        with pytest.raises(ValueError, match=message):
            QueryKeyNorm(*("a", kind, groups, 1, 2, EPS, pair), dtype=torch.float32, device="cpu")


def test_all_heads_are_those_of_olmo() -> None:
    """Its norms are over whole queries and whole keys."""
    olmo = pytest.importorskip("transformers.models.olmo2.modeling_olmo2")
    case = Case("all")
    query, key = weights("all").values()
    heads = drawn(S, B, WIDTH, seed=1).unflatten(-1, (GROUPS, REPEATS + 2, HEAD))
    ours = norm_of(case, single_rank_group())(drawn(S, B, WIDTH, seed=1)).unflatten(-1, (GROUPS, REPEATS + 2, HEAD))
    for place, weight in ((slice(REPEATS), query), (slice(REPEATS, REPEATS + 1), key)):
        norm = olmo.Olmo2RMSNorm(weight.numel(), eps=EPS)
        norm.weight.data = weight
        expected = norm(heads[..., place, :].flatten(-3))
        # It computes in float32, whatever it is given.
        torch.testing.assert_close(ours[..., place, :].flatten(-3), expected.double(), rtol=2e-6, atol=2e-6)
