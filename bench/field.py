"""The tables of `bench/peers.py`: which contestants are compared on which workload.

A new contestant is a row here or in `bench/field_offload.py`, and a `build` in `bench/contestants`.
"""

from __future__ import annotations

from dataclasses import replace

from bench.entries import (
    ALONE,
    FEW,
    PIPELINE,
    TWO,
    TWO_BLOCKS,
    W1,
    W2,
    WIDE,
    Table,
    adapters,
    bloom,
    deepspeed,
    gpt2,
    megazero,
    own_layers,
    own_model,
    plain,
    torch_parallel,
)
from bench.field_offload import OFFLOADED
from bench.workload import Entry, Workload

TRAFFIC = {
    1: "a reduce-scatter of fp32 gradients and a gather of bf16 parameters: 4 + 2 bytes a parameter and step",
    3: "the same, and parameters are gathered in forward and in backward: 4 + 2 x 2 bytes a parameter and step",
}
SHARDING = (
    torch_parallel(
        "FSDP2",
        "fsdp2",
        "blocks compiled; a block is a unit, resharded after its forward; gradients travel in fp32",
        replicas=2,
        compile=True,
    ),
    deepspeed(3, "; two blocks gathered at a time, as with megazero", zero=TWO_BLOCKS),
    deepspeed(3, "; its own limits, under which it keeps what it has gathered until backward", "DeepSpeed, keeping"),
)
"""The peers that shard their parameters."""


def sharded(name: str, work: Workload) -> Table:
    """ZeRO-3 beside our ZeRO-1 and the peers that shard their parameters."""
    return Table(
        name,
        f"two ranks with one thread each, BLOOM, 8 layers of 1024, 2 x 1 x {work.sequence} tokens",
        work,
        replace(megazero("megazero ZeRO-3", "--zero-stage", "3", replicas=2), note=TRAFFIC[3]),
        (
            replace(megazero("megazero ZeRO-1", "--zero-stage", "1", replicas=2), note=TRAFFIC[1]),
            *SHARDING,
        ),
    )


def own(name: str, work: Workload) -> Table:
    """A user's model with ZeRO-3, beside the peers with the same model, and beside our own BLOOM."""
    return Table(
        name,
        f"two ranks with one thread each, transformers' BLOOM, 8 layers of 1024, 2 x 1 x {work.sequence} tokens",
        work,
        own_model("megazero, own model", replicas=2, zero_stage=3),
        (
            *SHARDING,
            replace(megazero("megazero, its own BLOOM", "--zero-stage", "3", replicas=2), note=TRAFFIC[3]),
        ),
    )


def same_layers(name: str, title: str, work: Workload, replicas: int) -> Table:
    """Our own layers as a user's modules, beside the run that has them as its stages: what the engine costs."""
    of_run = ("--zero-stage", "3") if replicas > 1 else ()
    of_engine = {"zero_stage": 3} if replicas > 1 else {}
    return Table(
        name,
        title,
        work,
        own_layers("megazero's layers as a user's modules", replicas=replicas, **of_engine),
        (megazero("megazero's own stages", *of_run, replicas=replicas),),
    )


# Settings are the fastest of those that were tried: precision "master" (bf16 parameters with fp32 masters) or
# "autocast" (fp32 parameters), attention "sdpa" or "eager" (written in plain ops, which the compiler then fuses).
ONE_PROCESS = (
    bloom("BLOOM of transformers", "eager, tuned allocator, fused AdamW", precision="autocast"),
    bloom("BLOOM compiled", "the same under torch.compile", precision="autocast", compile=True),
    gpt2("GPT-2 sdpa", "of transformers, not compiled", precision="master"),
    gpt2(
        "GPT-2 compiled",
        "written-out attention, which is faster compiled than sdpa",
        precision="autocast",
        compile=True,
        attention="eager",
    ),
    plain(
        "plain GPT compiled",
        "in nanoGPT's manner, written-out attention",
        precision="master",
        compile=True,
        attention="eager",
    ),
)
TABLES = (
    Table(
        "W1",
        "one process, 2 threads, 8 layers of 512, 4 x 512 tokens, vocabulary 8192",
        W1,
        megazero("megazero"),
        (bloom("BLOOM as it comes", "eager, glibc's own settings", tuned=False, precision="autocast"), *ONE_PROCESS),
    ),
    Table(
        "W2",
        "the same with vocabulary 50304",
        W2,
        megazero("megazero"),
        (ONE_PROCESS[0], ONE_PROCESS[1], ONE_PROCESS[-1]),
    ),
    Table(
        "ZeRO-1",
        "two ranks with one thread each, BLOOM, 2 x 4 x 512 tokens",
        TWO,
        megazero("megazero ZeRO-1", "--zero-stage", "1", replicas=2),
        (
            deepspeed(1),
            torch_parallel(
                "DDP", "ddp", "blocks compiled; gradients travel in bf16", replicas=2, precision="master", compile=True
            ),
            torch_parallel("FSDP2", "fsdp2", "blocks compiled; gradients travel in fp32", replicas=2, compile=True),
        ),
    ),
    Table(
        "ZeRO-2",
        "the same",
        TWO,
        megazero("megazero ZeRO-2", "--zero-stage", "2", replicas=2),
        (deepspeed(2), deepspeed(3, "; shards the parameters as well")),
    ),
    own("own-ZeRO-3", WIDE),
    same_layers("own-cost", "one process, 2 threads, BLOOM, 8 layers of 512, 4 x 512 tokens", W1, 1),
    same_layers("own-cost-few", "two ranks, BLOOM, 8 layers of 1024, 2 x 1 x 128 tokens", FEW, 2),
    own("own-ZeRO-3-few", FEW),
    sharded("ZeRO-3", WIDE),
    sharded("ZeRO-3-few", FEW),
    Table(
        "tp",
        "tensor parallelism over two ranks with one thread each, 4 x 512 tokens",
        TWO,
        megazero("megazero tp 2", "--tp", "2"),
        (torch_parallel("DTensor", "tp", "plain GPT, blocks compiled", compile=True, attention="eager"),),
    ),
    Table(
        "pp",
        "two stages with one thread each, 4 micro-batches of 4 x 512 tokens, head not tied",
        PIPELINE,
        megazero(
            "megazero pp 2, zb-h1",
            *(
                "--pp",
                "2",
                "--untie-embeddings-and-output-weights",
                "--pipeline-schedule",
                "zb-h1",
                "--partition-by",
                "time",
            ),
        ),
        (
            torch_parallel(
                "torch pipelining", "pp", "1F1B, plain GPT, blocks compiled", compile=True, attention="eager"
            ),
        ),
    ),
    Table(
        "QLoRA",
        "adapters of rank 16 on a base in 4 bits: one process with 2 threads, BLOOM, 8 layers of 1024, 1 x 512 tokens",
        ALONE,
        adapters("megazero, base in 4 bits", "--lora-base-bits", "4"),
        (
            Entry("PEFT on bitsandbytes", "peft_", {"rank": 16}, note="NF4 with double quantisation, fp32 adapters"),
            adapters("megazero, base in bf16"),
        ),
    ),
    *OFFLOADED,
)
