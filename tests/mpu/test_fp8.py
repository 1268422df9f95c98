"""FP8 layers: scales and histories, what is kept and what is not, what travels, tensor parallelism against one rank."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fused_ops.fp8 import ROLES
from fused_ops.gated import swiglu
from fused_ops.native.library import EMULATED, cpu_library
from megazero.mpu import fp8 as module
from megazero.mpu.axes import Axes
from megazero.mpu.fp8 import Fp8, Fp8Layer
from megazero.mpu.fp8_linear import _Fp8Linear
from megazero.mpu.grid import Group, build_grid, single_rank_group
from megazero.mpu.layers import ColumnParallelLinear, RowParallelLinear, column_parallel_pair
from megazero.mpu.parameter import spec_of
from megazero.mpu.random import initialise
from tests.mpu.splitting import split_sequence
from tests.parameters import Piece, assemble, gradients_of
from tests.ranks import run_ranks

HIDDEN, FFN, S, B = 32, 64, 16, 2
NAMES = ("wide", "narrow", "gate", "down")
GO, SKIP = torch.tensor(False), torch.tensor(True)
CPU = torch.device("cpu")
LINEAR: dict[str, Any] = {"std": 0.2, "sequence_parallel": False, "dtype": torch.bfloat16, "device": "cpu"}


def state(history: int = 0, names: tuple[str, ...] = NAMES, tp: Group | None = None, world: Group | None = None) -> Fp8:
    return Fp8(names, history, tp or single_rank_group(), world or single_rank_group(), CPU)


class Network(nn.Module):
    """A feed-forward pair and a gated one."""

    def __init__(self, fp8: Fp8 | None, group: Group, sequence_parallel: bool = False, bias: bool = True) -> None:
        super().__init__()
        linear = {**LINEAR, "bias": bias, "sequence_parallel": sequence_parallel, "fp8": fp8}
        self.wide = ColumnParallelLinear("wide", HIDDEN, FFN, group, **linear)
        self.narrow = RowParallelLinear("narrow", FFN, HIDDEN, group, **linear)
        self.gate = ColumnParallelLinear("gate", HIDDEN, FFN, group, **linear)
        self.up = ColumnParallelLinear("up", HIDDEN, FFN, group, **linear)
        self.down = RowParallelLinear("down", FFN, HIDDEN, group, **linear)
        for parameter in self.parameters():
            initialise(parameter, spec_of(parameter), 7)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.narrow(torch.tanh(self.wide(x)))
        return x + self.down(swiglu(*column_parallel_pair(self.gate, self.up, x)))


def data(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many copies of each role are made."""
    counted: Counter[str] = Counter()
    fill = module.fill

    def counting(role: str, *args: Any, **kwargs: Any) -> Tensor:
        counted[role] += 1
        return fill(role, *args, **kwargs)

    monkeypatch.setattr(module, "fill", counting)
    return counted


# --- the history -----------------------------------------------------------------------------------------------------


def after(fp8: Fp8, amax: float, skip: Tensor = GO, role: int = 0) -> float:
    """The scale after a step whose largest value was this."""
    fp8.begin()
    fp8.amax[0, role] = amax
    fp8.end(skip)
    return fp8.scales[0, role].item()


def test_a_scale_is_that_of_the_largest_value_in_the_last_steps() -> None:
    fp8 = state(3, ("wide",))
    assert [after(fp8, amax) for amax in (1.0, 4.0, 1.0, 1.0, 2.0, 2.0)] == [256.0, 64.0, 64.0, 64.0, 128.0, 128.0]
    assert after(fp8, 1.0, role=2) == 2.0**15 and fp8.history[:, 0, 0].tolist() == [2.0, 2.0, 0.0]


def test_a_skipped_step_leaves_the_history() -> None:
    fp8 = state(2, ("wide",))
    after(fp8, 2.0)
    before = fp8.history.clone()
    assert [after(fp8, amax, SKIP) for amax in (1e30, float("inf"), float("nan"))] == [128.0] * 3
    assert torch.equal(fp8.history, before)


def test_without_a_history_a_skipped_steps_values_are_better_than_nothing() -> None:
    fp8 = state(2, ("wide",))
    assert not fp8.knows_scales
    assert after(fp8, 8.0, SKIP) == 32.0 and fp8.knows_scales and not fp8.history.any()
    assert after(fp8, float("inf"), SKIP) == 1.0
    assert after(fp8, 1.0) == 256.0


def test_a_step_of_not_finite_values_that_was_taken_is_no_entry() -> None:
    fp8 = state(2, ("wide",))
    after(fp8, 4.0)
    assert after(fp8, float("inf")) == 64.0 and fp8.history[:, 0, 0].tolist() == [4.0, 0.0]


@pytest.mark.parametrize("length", [2, 5])
def test_a_state_goes_through_text(length: int) -> None:
    fp8 = state(5)
    generator = torch.Generator().manual_seed(3)
    for _ in range(7):
        fp8.begin()
        fp8.amax.copy_(torch.exp(5 * torch.randn(fp8.amax.shape, generator=generator)))
        fp8.end(GO)
    found = state(length, ("gate", "wide", "down", "narrow"))  # by name, not by place
    found.load_state_dict(json.loads(json.dumps(fp8.state_dict())))
    assert found.knows_scales
    for name, row in fp8.rows.items():
        assert torch.equal(found.history[:, found.rows[name]], fp8.history[-length:, row])
        window = fp8.history[-length:, row].amax(0)
        assert (found.scales[found.rows[name]] * window <= torch.tensor([448.0, 448.0, 57344.0])).all()
        if length == 5:
            assert torch.equal(found.scales[found.rows[name]], fp8.scales[row])


def test_a_state_that_lacks_a_layer_is_calibrated_anew() -> None:
    fp8 = state(2, ("wide",))
    after(fp8, 1.0)
    found = state(2)
    found.load_state_dict(fp8.state_dict())
    assert not found.knows_scales
    assert state(0).state_dict() is None and state(2).state_dict() is None
    found = state(2)
    found.load_state_dict(None)
    assert not found.knows_scales


def extremes_on_rank(rank: int) -> tuple[Tensor, dict[Any, int], dict[Any, int]]:
    """Two pipeline stages x two tp ranks, each of which saw something else."""
    grid = build_grid(Axes(pp=2, tp=2))
    fp8 = state(2, NAMES, grid.tp, grid.world)
    fp8.begin()
    fp8.amax[rank] = rank + 1.0
    fp8.amax[0, 2] = 10.0 * rank
    fp8.end(GO)
    return fp8.history, dict(grid.tp.traffic), dict(grid.world.traffic)


def test_histories_are_of_all_ranks_in_one_message_a_step() -> None:
    results = run_ranks(4, extremes_on_rank)
    expected = torch.tensor([[1.0, 1, 30], [2, 2, 2], [3, 3, 3], [4, 4, 4]])
    for history, tp, world in results:
        assert torch.equal(history[-1], expected) and not tp
        assert world == {("all_reduce", torch.float32): 2 * 4 * 3 * len(NAMES)}


# --- layers ----------------------------------------------------------------------------------------------------------


def run(network: Network, x: Tensor, grad: Tensor, recompute: bool = False) -> tuple[Tensor, Tensor]:
    """Output and the input's gradient."""
    x = x.clone().requires_grad_()
    y = checkpoint(network, x, use_reentrant=False) if recompute else network(x)
    y.backward(grad)
    assert x.grad is not None
    return y.detach(), x.grad


def relative(ours: Tensor, theirs: Tensor) -> float:
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


@pytest.mark.parametrize("packed", [True, False])
def test_a_layers_products_are_those_of_its_copies(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gated pair with biases; its weights side by side in memory, or not."""
    copies: dict[str, Tensor] = {}
    quantise = Fp8Layer.quantise

    def keeping(layer: Fp8Layer, role: str, x: Tensor, **rest: Any) -> Any:
        made = quantise(layer, role, x, **rest)
        copies[role] = made.values.double() * made.inverse.double()
        return made

    monkeypatch.setattr(Fp8Layer, "quantise", keeping)
    network = Network(state(), single_rank_group())
    gate, up = network.gate, network.up
    if packed:
        gate.weight.data, up.weight.data = torch.cat([gate.weight.data, up.weight.data]).view(2, FFN, HIDDEN).unbind()
    for seed, bias in ((5, gate.bias), (6, up.bias)):
        assert bias is not None
        bias.data = data(seed, FFN)
    x = data(1, S, B, HIDDEN).requires_grad_()
    y = torch.cat(column_parallel_pair(gate, up, x), dim=-1)
    grad = data(2, S, B, 2 * FFN)
    y.backward(grad)
    rows, weight, narrow = (copies[role] for role in ("input", "weight", "gradient"))
    assert gate.bias is not None and up.bias is not None and x.grad is not None
    wanted = rows @ weight.t() + torch.cat([gate.bias, up.bias]).double()
    assert relative(y.reshape(-1, 2 * FFN), wanted) < 2.0**-8
    assert relative(x.grad.reshape(-1, HIDDEN), narrow @ weight) < 2.0**-8
    weights = torch.cat([layer.weight.grad for layer in (gate, up) if layer.weight.grad is not None])
    assert relative(weights, narrow.t() @ rows) < 2.0**-8
    biases = torch.cat([bias.grad for bias in (gate.bias, up.bias) if bias.grad is not None])
    assert relative(biases, grad.reshape(-1, 2 * FFN).double().sum(0)) < 2.0**-8


def test_a_gathered_copy_is_transposed_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under sequence parallelism ranks send FP8 by rows, and backward wants it by columns. torch moves single bytes."""
    found, called, gradients = cpu_library(EMULATED), list[str](), list[Tensor]()
    if found is None:
        pytest.skip("no compiler, no kernels")
    call = found.call

    def counted(name: str, *given: Any) -> None:
        called.append(name)
        call(name, *given)

    monkeypatch.setattr(found, "call", counted)
    for bodies in ("reference", EMULATED):
        monkeypatch.setenv("MEGAZERO_FUSED", bodies)
        layer, weight = state(0, ("wide",)).layer("wide", frozenset()), data(3, FFN, HIDDEN).requires_grad_()
        y = _Fp8Linear.apply(data(1, S, B, HIDDEN), layer, single_rank_group(), True, 1, False, weight)
        y.backward(data(2, S, B, FFN))
        assert weight.grad is not None
        gradients.append(weight.grad)
    assert called.count("transpose_bytes") == 1 and torch.equal(*gradients)


@pytest.mark.parametrize("history", [0, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_a_network_is_near_its_16_bit_self(bias: bool, history: int) -> None:
    """A rounded factor is wrong by about 2.6% (e4m3) or 5% (e5m2), a product of two by both: 4% to 6%, and up to four
    stand in a row.
    """
    fp8 = state(history)
    narrow, plain = Network(fp8, single_rank_group(), bias=bias), Network(None, single_rank_group(), bias=bias)
    x, grad = data(1, S, B, HIDDEN), data(2, S, B, HIDDEN)
    theirs = run(plain, x, grad)
    for step in range(2):  # the second one with a history
        narrow.zero_grad()
        fp8.begin()
        ours = run(narrow, x, grad)
        fp8.end(GO)
        assert fp8.knows_scales == (history > 0)
        for mine, other in zip(ours, theirs, strict=True):
            assert 0 < relative(mine, other) < 0.15, step
        for (name, mine_), other_ in zip(narrow.named_parameters(), plain.parameters(), strict=True):
            assert mine_.grad is not None and other_.grad is not None and mine_.grad.dtype == torch.bfloat16
            assert relative(mine_.grad, other_.grad) < 0.15, name
            assert mine_.dim() == 1 or relative(mine_.grad, other_.grad) > 0.01, name


def test_without_gradients_nothing_is_narrow_and_nothing_moves(casts: Counter[str]) -> None:
    fp8 = state(2)
    narrow, plain, x = Network(fp8, single_rank_group()), Network(None, single_rank_group()), data(1, S, B, HIDDEN)
    with torch.no_grad():
        assert torch.equal(narrow(x), plain(x))
    assert not casts and not fp8.amax.any()


def test_weights_are_cast_once_a_step_and_never_kept_outside_of_one(casts: Counter[str]) -> None:
    fp8 = state(0)
    network, x, grad = Network(fp8, single_rank_group()), data(1, S, B, HIDDEN), data(2, S, B, HIDDEN)
    for step in range(1, 3):
        fp8.begin()
        for _ in range(7):
            run(network, x, grad, recompute=True)
        fp8.end(GO)
        assert casts["weight"] == 4 * step and casts["gradient"] == 4 * 7 * step and casts["input"] == 2 * 4 * 7 * step
    casts.clear()
    first, _ = run(network, x, grad)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.data.mul_(2.0)  # as an optimizer that goes by addresses: no version tells of it
    second, _ = run(network, x, grad)
    assert casts["weight"] == 8 and not torch.equal(first, second)
    fp8.begin()
    third, _ = run(network, x, grad)
    assert torch.equal(second, third)
    fp8.end(GO)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.data.mul_(0.5)
    fp8.begin()
    assert torch.equal(run(network, x, grad)[0], first)


def test_fp8_weights_lie_in_the_same_memory_in_every_step() -> None:
    fp8 = state(0)
    network, x, grad = Network(fp8, single_rank_group()), data(1, S, B, HIDDEN), data(2, S, B, HIDDEN)
    specs = []
    for _ in range(3):
        fp8.begin()
        run(network, x, grad)
        fp8.end(GO)
        kept = network.narrow.fp8._weight if network.narrow.fp8 is not None else None
        assert kept is not None and kept.transposed is not None
        specs.append([t.data_ptr() for t in (kept.values, kept.transposed, kept.inverse)])
    assert specs[0] == specs[1] == specs[2]


@pytest.mark.parametrize("history", [0, 3])
def test_a_recomputed_step_is_the_same_step(history: int) -> None:
    outcomes = []
    for recompute in (False, True):
        fp8 = state(history)
        network = Network(fp8, single_rank_group())
        for step in range(3):
            fp8.begin()
            for micro in range(2):
                shape, seed = (S, B, HIDDEN), 10 * step + micro
                result = run(network, data(seed, *shape) * (1 + step), data(100 + seed, *shape), recompute)
            fp8.end(GO)
        gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
        outcomes.append([*result, *gradients, fp8.history, fp8.scales])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    assert (outcomes[0][-2] > 0).all()


def test_tokens_that_do_not_fit_leave_the_weights_gradient_to_16_bits() -> None:
    fp8 = state(0, ("narrow",))
    narrow, plain = (
        RowParallelLinear("narrow", FFN, HIDDEN, single_rank_group(), bias=False, fp8=given, **LINEAR)
        for given in (fp8, None)
    )
    for layer in (narrow, plain):
        initialise(layer.weight, spec_of(layer.weight), 7)
        x = data(1, 9, 1, FFN).requires_grad_()
        layer(x).backward(data(2, 9, 1, HIDDEN))
    assert narrow.fp8 is not None and narrow.weight.grad is not None and plain.weight.grad is not None
    assert torch.equal(narrow.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("where", ["input", "gradient", "weight"])
@pytest.mark.parametrize("history", [0, 2])
def test_what_is_not_finite_reaches_every_gradient(where: str, history: int) -> None:
    fp8 = state(history)
    network, x, grad = Network(fp8, single_rank_group()), data(1, S, B, HIDDEN), data(2, S, B, HIDDEN)
    if history:
        fp8.begin()
        run(network, x, grad)
        fp8.end(GO)
    network.zero_grad()
    for tensor, role in ((x, "input"), (grad, "gradient"), (network.wide.weight.data, "weight")):
        if role == where:
            tensor[3, 0] = float("inf")
    fp8.begin()
    _, back = run(network, x, grad)
    total = sum(
        parameter.grad.double().square().sum() for parameter in network.parameters() if parameter.grad is not None
    )
    assert not torch.isfinite(torch.as_tensor(total)) and not back.isfinite().all()


# --- tensor parallelism ----------------------------------------------------------------------------------------------


class Scales:
    """What every copy was divided by, by (layer, role), in order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.found: dict[tuple[int, str], list[float]] = {}
        quantise = Fp8Layer.quantise

        def noting(layer: Fp8Layer, role: str, x: Tensor, **rest: Any) -> Any:
            made = quantise(layer, role, x, **rest)
            self.found.setdefault((layer.row, role), []).append(made.inverse.item())
            return made

        patch.setattr(Fp8Layer, "quantise", noting)


def parallel_on_rank(
    rank: int, size: int, sequence_parallel: bool, history: int
) -> tuple[list[Tensor], list[Piece], dict[tuple[int, str], list[float]], dict[Any, int]]:
    grid = build_grid(Axes(tp=size))
    fp8 = state(history, NAMES, grid.tp, grid.world)
    network = Network(fp8, grid.tp, sequence_parallel)
    with pytest.MonkeyPatch.context() as patch:
        scales = Scales(patch)
        for step in range(2):
            network.zero_grad()
            traffic = Counter(grid.tp.traffic)
            fp8.begin()
            x, grad = (data(seed + step, S, B, HIDDEN) for seed in (1, 11))
            if sequence_parallel:
                x, grad = split_sequence(x, grid.tp), split_sequence(grad, grid.tp)
            y, back = run(network, x, grad)
            within = Counter(grid.tp.traffic) - traffic
            fp8.end(GO)
    return [y, back], gradients_of(network), scales.found, dict(within)


@pytest.mark.few(cases=1)
@pytest.mark.parametrize("history", [0, 2])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_layers_have_the_scales_of_one_rank(sequence_parallel: bool, history: int) -> None:
    (alone,) = run_ranks(1, parallel_on_rank, 1, False, history)
    both = run_ranks(2, parallel_on_rank, 2, sequence_parallel, history)
    for outputs, _, scales, traffic in both:
        assert scales == alone[2]
        wholes = [torch.cat([b[0][i] for b in both]) if sequence_parallel else outputs[i] for i in range(2)]
        for ours, theirs in zip(wholes, alone[0], strict=True):
            # bf16's last bits, another rank's sum, decide which way some elements are rounded to FP8.
            assert relative(ours, theirs) < 0.06
        # Four weights; inputs of narrow and down; gradients of wide and gate; under sequence parallelism inputs of wide
        # and gate.
        scalars = 0 if history else (4 + 2 + 2 + 2 * sequence_parallel) * 2 * 4
        assert traffic.get(("all_reduce", torch.float32), 0) == scalars
        # FP8 inputs of wide and gate, forward and backward.
        assert traffic.get(("all_gather", torch.uint8), 0) == (4 * S * B * HIDDEN if sequence_parallel else 0)
    gradients = assemble([pieces for _, pieces, _, _ in both], unreduced=True)
    for name, theirs in assemble([alone[1]]).items():
        assert relative(gradients[name], theirs) < 0.06, name


def test_the_names_of_roles() -> None:
    assert ROLES == ("input", "weight", "gradient") and set(module.DTYPES) == set(ROLES)
