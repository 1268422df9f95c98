"""Parallel layers against torch's own in fp64: outputs, input gradients and every parameter's gradient.

One small network holds every layer: embedding, norms, a biased feed-forward pair, a gated pair, the tied head and the
cross-entropy. Row 8 of the numerical faults: sequence parallelism on and off give all the same gradients.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fused_ops.gated import swiglu
from megazero.mpu.axes import Axes
from megazero.mpu.cross_entropy import vocab_parallel_cross_entropy
from megazero.mpu.grid import Group, build_grid, single_rank_group
from megazero.mpu.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, column_parallel_pair
from megazero.mpu.linear import adjacent_view, column_parallel_linear
from megazero.mpu.norm import LayerNorm, RMSNorm
from megazero.mpu.parameter import ParameterKind, StateGroup, spec_of
from megazero.mpu.random import initialise
from tests.mpu.splitting import split_sequence
from tests.parameters import Piece, assemble, gradients_of, values_of
from tests.ranks import run_ranks

VOCAB, HIDDEN, FFN, S, B = 29, 12, 24, 12, 2


@dataclass(frozen=True)
class Case:
    tp: int
    sequence_parallel: bool = False
    recompute: bool = False
    twice: bool = False
    packed: bool = True


class Network(nn.Module):
    """What a model does with the layers, in a few lines."""

    def __init__(self, group: Group, case: Case, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.group, self.case = group, case
        common: dict[str, Any] = {"sequence_parallel": case.sequence_parallel, "dtype": dtype, "device": "cpu"}
        linear: dict[str, Any] = {"std": 0.5, **common}
        padded = -(-VOCAB // (4 * group.size)) * 4 * group.size
        self.embedding = VocabParallelEmbedding(
            "embedding", VOCAB, HIDDEN, padded, group, std=1.0, state_group=StateGroup.REPLICAS, **common
        )
        self.first_norm = LayerNorm("first_norm", HIDDEN, 1e-5, group, case.sequence_parallel, dtype, "cpu")
        self.wide = ColumnParallelLinear("wide", HIDDEN, FFN, group, bias=True, **linear)
        self.narrow = RowParallelLinear("narrow", FFN, HIDDEN, group, bias=True, **linear)
        self.second_norm = RMSNorm("second_norm", HIDDEN, 1e-5, group, case.sequence_parallel, dtype, "cpu")
        self.gate = ColumnParallelLinear("gate", HIDDEN, FFN, group, bias=case.packed, **linear)
        self.up = ColumnParallelLinear("up", HIDDEN, FFN, group, bias=case.packed, **linear)
        self.down = RowParallelLinear("down", FFN, HIDDEN, group, bias=False, **linear)
        for parameter in self.parameters():
            initialise(parameter, spec_of(parameter), 7)
            if spec_of(parameter).kind in (ParameterKind.BIAS, ParameterKind.NORM):  # constants would hide mistakes
                box, whole = (
                    spec_of(parameter).box[0],
                    torch.sin(torch.arange(spec_of(parameter).shape[0], dtype=torch.float64)),
                )
                parameter.data += whole[slice(*box)].to(dtype)
        if case.packed:
            flat = torch.cat([self.gate.weight.data.view(-1), self.up.weight.data.view(-1)])
            self.gate.weight.data, self.up.weight.data = flat.view(2, *self.gate.weight.shape).unbind()
            assert adjacent_view((self.gate.weight, self.up.weight)) is not None

    def block(self, x: Tensor) -> Tensor:
        x = x + self.narrow(torch.tanh(self.wide(self.first_norm(x))))
        return x + self.down(swiglu(*column_parallel_pair(self.gate, self.up, self.second_norm(x))))

    def forward(self, tokens: Tensor, labels: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Token losses, the noise added after the embedding (whose gradient is the input gradient),
        the block's output.
        """
        if self.case.sequence_parallel:
            noise = split_sequence(noise, self.group)
        x = self.embedding(tokens) + noise
        for _ in range(2 if self.case.twice else 1):
            x = checkpoint(self.block, x, use_reentrant=False) if self.case.recompute else self.block(x)
        logits = column_parallel_linear(x, self.embedding.weight, None, self.group, self.case.sequence_parallel)
        loss = vocab_parallel_cross_entropy(
            logits.view(S * B, -1), labels.t().reshape(-1), self.group, vocab=VOCAB, label_smoothing=0.1, z_loss=0.01
        )
        return loss, noise, x


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens, labels = (torch.randint(0, VOCAB, (B, S), generator=generator) for _ in range(2))
    noise, weight = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((S, B, HIDDEN), (S * B,))
    )
    return tokens, labels, noise, weight


Result = tuple[Tensor, Tensor, Tensor, list[Piece], list[Piece]]


def parallel(rank: int, world: int, cases: list[Case]) -> list[Result]:
    """Of cases that have one tp."""
    group = build_grid(Axes(dp=world // cases[0].tp, tp=cases[0].tp)).tp
    return [result_of(case, group) for case in cases]


def result_of(case: Case, group: Group) -> Result:
    network = Network(group, case)
    tokens, labels, noise, weight = batch()
    noise.requires_grad_()
    loss, _, x = network(tokens, labels, noise)
    (loss * weight).sum().backward()
    assert noise.grad is not None
    return loss.detach(), noise.grad, x.detach(), values_of(network), gradients_of(network)


def dense(values: dict[str, Tensor], case: Case) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """The same with torch's own functions on whole tensors."""
    w = {name: value.clone().requires_grad_() for name, value in values.items()}
    tokens, labels, noise, weight = batch()
    noise.requires_grad_()
    x = F.embedding(tokens, w["embedding.weight"]).transpose(0, 1) + noise
    for _ in range(2 if case.twice else 1):
        y = F.layer_norm(x, (HIDDEN,), w["first_norm.weight"], w["first_norm.bias"], 1e-5)
        y = torch.tanh(F.linear(y, w["wide.weight"], w["wide.bias"]))
        x = x + F.linear(y, w["narrow.weight"], w["narrow.bias"])
        y = F.rms_norm(x, (HIDDEN,), w["second_norm.weight"], 1e-5)
        y = F.silu(F.linear(y, w["gate.weight"], w.get("gate.bias"))) * F.linear(y, w["up.weight"], w.get("up.bias"))
        x = x + F.linear(y, w["down.weight"])
    logits = F.linear(x, w["embedding.weight"]).view(S * B, VOCAB)
    loss = F.cross_entropy(logits, labels.t().reshape(-1), label_smoothing=0.1, reduction="none")
    loss = loss + 0.01 * logits.logsumexp(-1).square()
    (loss * weight).sum().backward()
    assert noise.grad is not None
    gradients = {name: value.grad for name, value in w.items() if value.grad is not None}
    return loss.detach(), noise.grad, x.detach(), gradients


CASES = [Case(tp, sp) for tp, sp in itertools.product((1, 2, 3, 4), (False, True))]
CASES += [Case(tp, sp, recompute=True) for tp, sp in itertools.product((1, 2), (False, True))]
CASES += [Case(3, sp, twice=True, recompute=sp) for sp in (False, True)]
CASES += [Case(tp, sp, packed=False) for tp, sp in itertools.product((1, 2), (False, True))]


@pytest.mark.few(cases=2)
@pytest.mark.parametrize(("tp", "world"), [(1, 1), (2, 2), (3, 3), (4, 4), (2, 4)])
def test_fault_08_equal_to_torchs_own_layers(tp, world):
    cases = [case for case in CASES if case.tp == tp and (world == tp or case in CASES[:8])]
    every: list[list[Result]] = run_ranks(world, parallel, world, cases)
    for (number, case), replica in itertools.product(enumerate(cases), range(world // tp)):
        ranks = [results[number] for results in every[replica * tp : (replica + 1) * tp]]
        values = assemble([rank[3] for rank in ranks])
        found = assemble([rank[4] for rank in ranks], unreduced=True)
        loss, noise, x, gradients = dense(values, case)
        for rank in ranks:
            torch.testing.assert_close(rank[0], loss, rtol=1e-12, atol=1e-13)
            torch.testing.assert_close(rank[1], noise, rtol=1e-11, atol=1e-12)
        whole = torch.cat([rank[2] for rank in ranks]) if case.sequence_parallel else ranks[0][2]
        torch.testing.assert_close(whole, x, rtol=1e-12, atol=1e-13)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert gradient.abs().max() > 1e-3
            told = f"{name}: {{}}".format
            torch.testing.assert_close(found[name], gradient, rtol=1e-11, atol=1e-12, msg=told)


def partial_places(rank: int, sequence_parallel: bool) -> dict[str, bool]:
    network = Network(build_grid(Axes(tp=2)).tp, Case(2, sequence_parallel))
    return {spec_of(p).name: spec_of(p).tp_partial for p in network.parameters()}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_which_gradients_are_partial(sequence_parallel):
    expected = (
        {"first_norm.weight", "first_norm.bias", "second_norm.weight", "narrow.bias"} if sequence_parallel else set()
    )
    for specs in run_ranks(2, partial_places, sequence_parallel):
        assert {name for name, partial in specs.items() if partial} == expected
    alone = Network(single_rank_group(), Case(1, sequence_parallel))
    assert not any(spec_of(p).tp_partial or spec_of(p).tp_sharded for p in alone.parameters())


def counted(rank: int, sequence_parallel: bool) -> dict[tuple[str, torch.dtype], int]:
    """Bytes of one column-parallel and one row-parallel product, forward and backward."""
    group = build_grid(Axes(tp=2)).tp
    kw: dict[str, Any] = {"bias": True, "std": 0.1, "dtype": torch.float64, "device": "cpu"}
    kw["sequence_parallel"] = sequence_parallel
    wide, narrow = ColumnParallelLinear("w", HIDDEN, FFN, group, **kw), RowParallelLinear("n", FFN, HIDDEN, group, **kw)
    for parameter in itertools.chain(wide.parameters(), narrow.parameters()):
        initialise(parameter, spec_of(parameter), 1)
    x = torch.ones(S // 2 if sequence_parallel else S, B, HIDDEN, dtype=torch.float64, requires_grad=True)
    narrow(wide(x)).sum().backward()
    return dict(group.traffic)


def test_what_travels():
    whole = S * B * HIDDEN * 8
    plain = {("all_reduce", torch.float64): 2 * 2 * whole}
    # Forward gather and scatter; backward gather of the output gradient and of the input, scatter of the input
    # gradient.
    parallel_sequence = {("all_gather", torch.float64): 3 * whole, ("reduce_scatter", torch.float64): 2 * whole}
    assert run_ranks(2, counted, False) == [plain] * 2
    assert run_ranks(2, counted, True) == [parallel_sequence] * 2


def test_adjacency_is_exact():
    flat = torch.arange(40.0)
    first, second = flat[4:16].view(3, 4), flat[16:24].view(2, 4)
    merged = adjacent_view((first, second))
    assert merged is not None and torch.equal(merged, flat[4:24].view(5, 4))
    turned = flat[16:24].view(4, 2)
    for other in (flat[20:28].view(2, 4), flat[12:20].view(2, 4), turned, turned.t(), torch.zeros(2, 4)):
        assert adjacent_view((first, other)) is None
    assert adjacent_view((second, first)) is None


def sixteen_bit(rank: int, sequence_parallel: bool) -> tuple[Tensor, list[Piece]]:
    case = Case(2, sequence_parallel)
    network = Network(build_grid(Axes(tp=2)).tp, case, torch.bfloat16)
    tokens, labels, noise, weight = batch()
    loss, _, _ = network(tokens, labels, noise.bfloat16())
    assert loss.dtype == torch.float32
    (loss * weight.float()).sum().backward()
    return loss.detach(), gradients_of(network)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_bf16_is_near_fp64(sequence_parallel):
    results = run_ranks(2, sixteen_bit, sequence_parallel)
    values = {
        name: value.double()
        for name, value in assemble([values_of(Network(single_rank_group(), Case(1), torch.bfloat16))]).items()
    }
    loss, _, _, gradients = dense(values, Case(1))
    torch.testing.assert_close(results[0][0].double(), loss, rtol=0.1, atol=0.1)
    found = assemble([rank[1] for rank in results], unreduced=True, tolerance=0.02)
    for name, gradient in gradients.items():
        assert (found[name].double() - gradient).abs().max() < 0.1 * gradient.abs().max(), name
