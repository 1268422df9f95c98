"""What an instruction says of itself."""

from __future__ import annotations

import pytest

from megazero.program.instruction import Instruction, Lane, Op
from tests.program import kinds

TEXTS = [
    (Instruction(Op.FORWARD, 3, 1, model_chunk=5), Lane.COMPUTE, "forward (micro-batch 3, chunk 1)"),
    (Instruction(Op.BACKWARD, 0, 0, units=(2, 3)), Lane.COMPUTE, "backward (micro-batch 0, chunk 0, unit 2)"),
    (
        Instruction(Op.BACKWARD_INPUT, 0, 0, units=(0, 3)),
        Lane.COMPUTE,
        "backward of the input (micro-batch 0, chunk 0, units 0 to 2)",
    ),
    (Instruction(Op.SEND_BACKWARD, 4, 0, peer=2), Lane.STAGES, "send gradients (micro-batch 4, chunk 0, to stage 2)"),
    (
        Instruction(Op.RECV_FORWARD, 4, 0, peer=0),
        Lane.STAGES,
        "receive hidden states (micro-batch 4, chunk 0, from stage 0)",
    ),
    (Instruction(Op.GATHER, buckets=(7,)), Lane.SHARDS, "gather parameters (bucket 7)"),
    (Instruction(kinds.RELEASE, buckets=(7,)), Lane.COMPUTE, "free parameters (bucket 7)"),
    (Instruction(Op.REDUCE, buckets=(0,)), Lane.SHARDS, "reduce gradients (bucket 0)"),
    (Instruction(Op.REDUCE_ACROSS, buckets=(0,)), Lane.ACROSS, "reduce gradients across (bucket 0)"),
    (Instruction(Op.REDUCE_PARTIAL), Lane.TENSOR, "sum partial gradients over tp"),
    (Instruction(Op.NORM), Lane.WORLD, "norm"),
    (Instruction(kinds.UPDATE, buckets=(0, 2)), Lane.COMPUTE, "update (buckets 0, 2)"),
    (
        Instruction(kinds.COPY_GRADIENT, buckets=(3,), part=1),
        Lane.TO_HOST,
        "copy gradients to host memory (bucket 3, part 1)",
    ),
    (Instruction(kinds.READ_STATE, buckets=(3,), part=1), Lane.FROM_DISK, "read optimizer states (bucket 3, part 1)"),
    (Instruction(kinds.UPDATE_HOST, buckets=(3,), part=1), Lane.HOST, "update in host memory (bucket 3, part 1)"),
    (
        Instruction(kinds.COPY_PARAMETERS, buckets=(3,), part=1),
        Lane.TO_DEVICE,
        "copy updated parameters to the device (bucket 3, part 1)",
    ),
    (Instruction(kinds.WRITE_STATE, buckets=(3,), part=1), Lane.TO_DISK, "write optimizer states (bucket 3, part 1)"),
    (Instruction(kinds.READ_PARAMETERS, buckets=(3,), part=1), Lane.FROM_DISK, "read parameters (bucket 3, part 1)"),
    (Instruction(kinds.LOAD, buckets=(3,)), Lane.TO_DEVICE, "copy parameters to the device (bucket 3)"),
    (Instruction(kinds.STORE, buckets=(3,)), Lane.TO_HOST, "copy updated parameters to host memory (bucket 3)"),
    (
        Instruction(kinds.WRITE_PARAMETERS, buckets=(3,), part=1),
        Lane.TO_DISK,
        "write updated parameters (bucket 3, part 1)",
    ),
    (
        Instruction(kinds.LEAVE, 1, 0, units=(2, 3)),
        Lane.TO_HOST,
        "copy activations to host memory (micro-batch 1, chunk 0, unit 2)",
    ),
    (Instruction(kinds.FREE, 1, 0, units=(2, 3)), Lane.COMPUTE, "free activations (micro-batch 1, chunk 0, unit 2)"),
    (Instruction(kinds.RETURN, 1, 0), Lane.TO_DEVICE, "copy activations to the device (micro-batch 1, chunk 0)"),
    (Instruction(kinds.WRITE_ACTIVATIONS, 1, 0), Lane.TO_DISK, "write activations (micro-batch 1, chunk 0)"),
    (Instruction(kinds.FREE_HOST, 1, 0), Lane.COMPUTE, "free activations in host memory (micro-batch 1, chunk 0)"),
    (Instruction(kinds.READ_ACTIVATIONS, 1, 0), Lane.FROM_DISK, "read activations (micro-batch 1, chunk 0)"),
]


@pytest.mark.parametrize(("instruction", "lane", "text"), TEXTS, ids=[text for *_, text in TEXTS])
def test_text_and_lane(instruction: Instruction, lane: Lane, text: str) -> None:
    assert (str(instruction), instruction.lane) == (text, lane)


def test_every_kind_is_a_computation_a_transfer_on_model_state_or_a_copy() -> None:
    on_state = {Op.GATHER, kinds.RELEASE, Op.REDUCE, Op.REDUCE_ACROSS, Op.REDUCE_PARTIAL, Op.NORM, kinds.UPDATE}
    on_state |= {kinds.READ_PARAMETERS, kinds.LOAD, kinds.STORE, kinds.WRITE_PARAMETERS}
    on_state |= {kinds.STORE_GRADIENT, Op.ADD_GRADIENT, Op.COUNT_GRADIENT, kinds.READ_SUM, kinds.WRITE_SUM}
    on_state |= {kinds.READ_GRADIENT, kinds.FETCH_GRADIENT}
    on_state |= {kinds.COPY_GRADIENT, kinds.READ_STATE, kinds.UPDATE_HOST, kinds.COPY_PARAMETERS, kinds.WRITE_STATE}
    copies = {kinds.LEAVE, kinds.FREE, kinds.RETURN, kinds.WRITE_ACTIVATIONS, kinds.FREE_HOST, kinds.READ_ACTIVATIONS}
    for op in Op:
        i = Instruction(op, 0, 0)
        assert [i.is_compute, i.is_transfer, op in on_state, op in copies].count(True) == 1
        assert i.is_send is (i.is_transfer and op.value.startswith("send"))
        assert i.is_backward is (
            op.value.startswith("backward") or op.value.endswith(("send gradients", "ve gradients"))
        )
    assert [op for op in Op if Instruction(op, 0, 0).ends_backward] == [Op.BACKWARD, Op.BACKWARD_WEIGHT]
