"""A legal layout is equal to one process; a fault is found, with its parameter, its instruction and its rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megazero.config.parse import parse_run
from megazero.config.schema import LoraConfig
from megazero.data.loader import TrainLoader
from megazero.model.mlp import Mlp
from megazero.mpu import collectives, layers
from megazero.mpu.axes import Axes
from megazero.mpu.collectives import CommunicationHandle
from megazero.mpu.parameter import StateGroup
from megazero.train.state import TrainingPosition
from megazero.verify.local import LocalMail
from megazero.verify.proof import CannotRun, Proof, prove
from megazero.zero.optimizer import ShardedOptimizer
from megazero.zero.reducer import GradientReducer

ANY = "--vocab-size 1001 --num-layers 2"


def proof_of(flags: str, world: int) -> Proof:
    return prove(parse_run([*ANY.split(), *flags.split()], world), world)


def found(proof: Proof) -> tuple[str, str, str, int]:
    """(what, its instruction without numbers, leg, step) of a difference."""
    assert not proof.equal and proof.difference is not None, proof
    difference = proof.difference
    return difference.what, difference.instruction.partition(" (")[0], difference.leg, difference.step


@pytest.mark.parametrize(
    ("flags", "world"),
    [
        ("--tp 2 --pp 2 --zero-stage 1 --sequence-parallel --hidden-dropout 0.1 --recompute-granularity full", 4),
        ("--pp 2 --zero-stage 3 --optimizer sgd --untie-embeddings-and-output-weights --late-update", 4),
        ("--zero-stage 2 --offload-optimizer cpu --offload-gradients cpu:0.5 --ema-decay 0.9 --save runs/x", 2),
    ],
)
def test_a_legal_layout_is_equal(flags: str, world: int) -> None:
    proof = proof_of(flags, world)
    assert proof.equal, (proof.difference, proof.failure)
    columns = {"gradient", "exp_avg", "weight", "parameter", "loss", "gradient norm", "validation loss"}
    assert columns - ({"gradient"} if "late" in flags else set()) <= proof.errors.keys()
    assert 0 < max(proof.errors.values()) < 1e-11 and 0 < proof.slope_error < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, 4])
def test_adapters_are_equal_too(bits: int | None) -> None:
    """On a base that is saved first. What is frozen has no gradient."""
    adapters = LoraConfig(lora_rank=4, lora_base_bits=bits, lora_dropout=0.1)
    run = replace(parse_run([*ANY.split(), "--tp", "2"], 2), lora=adapters)
    proof = prove(run, 2)
    assert proof.equal, (proof.difference, proof.failure)


def test_a_tied_embedding_that_is_summed_over_its_own_stage_only(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Axes.state_ranks
    of_stage = lambda self, group, at: ranks(self, StateGroup.REPLICAS, at)  # noqa: E731
    monkeypatch.setattr(Axes, "state_ranks", of_stage)
    what, instruction, leg, step = found(proof_of("--pp 2", 4))
    assert (what, instruction) == ("the gradient of embedding.word.weight", "reduce gradients")
    assert (leg, step) == ("from the seed", 1)


def test_a_sum_over_tp_that_is_forgotten_in_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a rank of the second stage alone: the layer behind it is the first that is wrong there."""
    reduce = collectives.all_reduce

    def forgetful(tensor: Tensor, group: Any, op: str = "sum") -> CommunicationHandle:
        if tensor.dim() == 3 and group.ranks == (2, 3):
            reduce(tensor.clone(), group, op).wait()
            return CommunicationHandle()
        return reduce(tensor, group, op)

    monkeypatch.setattr("megazero.mpu.functional.all_reduce", forgetful)
    proof = proof_of("--tp 2 --pp 2", 4)
    what, instruction, *_ = found(proof)
    assert (what, instruction) == ("the input of the head", "forward")
    assert proof.difference is not None and proof.difference.rank in (2, 3)


@pytest.mark.slow
def test_gradients_of_a_micro_batch_that_are_added_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    accumulate, count = GradientReducer.accumulate, [0]

    def twice(self: GradientReducer, index: int, entry: int, write: Any) -> None:
        name = self.buckets[index].parameters[entry].spec.name
        if name == "blocks.1.mlp.up.weight" and self.tp.size > 1:
            count[0] += 1

            def again(into: Tensor, add: bool) -> None:
                write(into, add)
                if count[0] == 3:
                    write(into, True)

            accumulate(self, index, entry, again)
        else:
            accumulate(self, index, entry, write)

    monkeypatch.setattr(GradientReducer, "accumulate", twice)
    what, *_ = found(proof_of("--tp 2", 2))
    assert what == "the gradient of blocks.1.mlp.up.weight"


def test_a_norm_that_counts_replicas_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    squares = ShardedOptimizer.sum_of_squares
    monkeypatch.setattr(
        ShardedOptimizer, "sum_of_squares", lambda self: squares(self) * (1 + (self.grid.at.tp == 1)), raising=True
    )
    assert found(proof_of("--tp 2", 2))[:2] == ("the gradient norm", "norm")


@pytest.mark.slow
def test_a_resume_that_is_off_by_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    read = TrainingPosition.read

    def off(progress: Any) -> TrainingPosition:
        position = read(progress)
        return replace(position, consumed_samples=position.consumed_samples + 6)

    monkeypatch.setattr(TrainingPosition, "read", off)
    _, _, leg, step = found(proof_of("--zero-stage 1", 2))
    assert (leg, step) == ("resumed from its own checkpoint", 3)


@pytest.mark.slow
def test_micro_batches_of_replicas_that_are_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replica has its samples twice as often as the other's: a mean over equal samples looks alike."""
    numbers = TrainLoader._numbers

    def mixed(self: TrainLoader, consumed: int, batch: int) -> list[range]:
        made = numbers(self, consumed, batch)
        return [made[0], *made[:-1]] if self.dp_rank else made

    monkeypatch.setattr(TrainLoader, "_numbers", mixed)
    assert not proof_of("", 2).equal


@pytest.mark.slow
def test_a_missing_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the gathers of updated parameters."""
    gather = collectives.all_gather

    def unawaited(output: Tensor, piece: Tensor, group: Any) -> CommunicationHandle:
        gather(output, piece, group)
        return CommunicationHandle()

    monkeypatch.setattr(collectives, "all_gather", unawaited)
    proof = proof_of("--zero-stage 3", 2)
    assert not proof.equal


@pytest.mark.slow
def test_ranks_that_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    scatter = collectives.reduce_scatter

    def once(output: Tensor, whole: Tensor, group: Any) -> CommunicationHandle:
        return CommunicationHandle() if group.index else scatter(output, whole, group)

    monkeypatch.setattr(collectives, "reduce_scatter", once)
    proof = proof_of("--zero-stage 2", 2)
    assert proof.failure is not None and proof.failure.startswith("from the seed: ")
    assert proof.failure.endswith(" (norm)"), proof.failure


@pytest.mark.slow
def test_a_message_that_is_never_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both stages wait for ever, and the failure ends with the instruction of the first of them."""
    monkeypatch.setattr(LocalMail, "send", lambda *message: None)
    proof = proof_of("--pp 2", 2)
    assert proof.failure is not None and "2 ranks wait for each other for ever: rank 0 in " in proof.failure
    assert proof.failure.endswith("(backward (micro-batch 0, chunk 0))"), proof.failure


def test_what_one_process_cannot_run_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **more: Any) -> Tensor:
        raise TypeError("a layer of mine")

    monkeypatch.setattr("megazero.model.mlp.Mlp.forward", broken)
    with pytest.raises(CannotRun, match="one process does not run it: rank 0: TypeError: a layer of mine"):
        proof_of("--tp 2", 2)


def test_a_loss_that_is_no_number_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Mlp.forward
    monkeypatch.setattr(Mlp, "forward", lambda *args: forward(*args) * float("nan"))
    with pytest.raises(CannotRun, match=r"one process has no finite loss \(its steps have nan, nan, nan\)"):
        proof_of("--tp 2", 2)


def test_a_proof_leaves_the_process_as_it_was() -> None:
    torch.set_num_threads(2)
    try:
        state = torch.random.get_rng_state()
        assert proof_of("", 2).equal
        assert torch.get_num_threads() == 2 and torch.equal(torch.random.get_rng_state(), state)
    finally:
        torch.set_num_threads(1)


def test_a_backward_that_is_wrong_on_one_process_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks and one process agree, and the slope of the loss does not."""
    gradient = layers.embedding_gradient
    monkeypatch.setattr(layers, "embedding_gradient", lambda ids, grad, *rest: gradient(ids, 2 * grad, *rest))
    what, instruction, *_ = found(proof_of("--tp 2 --untie-embeddings-and-output-weights", 2))
    assert (what, instruction) == ("the gradient of embedding.word.weight", "backward")


@pytest.mark.slow
def test_a_step_that_is_not_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's infinite gradient is left out of the norm."""
    squares = ShardedOptimizer.sum_of_squares
    finite = lambda self: torch.nan_to_num(squares(self), nan=0.0, posinf=0.0)  # noqa: E731
    monkeypatch.setattr(ShardedOptimizer, "sum_of_squares", lambda self: (finite if self.grid.at.tp else squares)(self))
    proof = proof_of("--tp 2", 2)
    assert proof.difference is not None and proof.difference.step == 4, proof
