"""Training steps on a GPU: the contestants, and how they are timed. `bench/gpu.py` runs it.

Every contestant trains the same model on global batches of the same size, in bf16 with fp32 Adam, fp32 master weights
and gradients accumulated in fp32. Each has the largest micro-batch that fits; one that runs out of memory is started
again with half of it. transformers has fp32 weights under autocast, as in its Trainer: with bf16 weights its gradients
would be accumulated in bf16. Only one contestant uses the GPU, because two would not fit. The next one imports its
libraries meanwhile, which needs no GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.card import smi
from bench.harness import Contestant, Unavailable
from bench.workload import Entry, Workload
from megazero.config.schema import ModelConfig
from megazero.plan.flops import model_flops
from megazero.system import allocator

GPT = Workload("GPT 1.3B", layers=24, hidden=2048, heads=16, sequence=2048, vocabulary=50304, threads=4, device="cuda")
BLOOM = Workload(
    "BLOOM 1b1", layers=24, hidden=1536, heads=16, sequence=2048, vocabulary=250880, threads=4, device="cuda"
)
GLOBAL_BATCH = 32

ALLOCATORS = {allocator.VARIABLE: allocator.settings(), allocator.CUDA_VARIABLES[0]: allocator.CUDA_SETTINGS}
"""The allocator's settings of all contestants."""
FLAGS = {GPT.name: ["--position-embedding", "learned", "--no-embedding-layernorm"], BLOOM.name: []}
QUIET = ["--log-interval", "1000"]


@dataclass(frozen=True)
class Runner:
    """A contestant of one model.

    kind         ours, fp8, eager or compiled; the targets compare kinds
    micro_batch  the first size that is tried
    need         about the seconds that it takes; it is not started if less time is left
    """

    work: Workload
    entry: Entry
    kind: str
    micro_batch: int
    need: int

    @property
    def name(self) -> str:
        return f"{self.work.name}, {self.entry.name}"


@dataclass(frozen=True)
class Plan:
    """Steps before the timed ones (the first is timed by itself), turns, steps of a turn, samples of a step."""

    warm_up: int = 3
    turns: int = 3
    steps: int = 2
    global_batch: int = GLOBAL_BATCH


def ours(work: Workload, name: str, *flags: str, micro_batch: int, kind: str = "ours", need: int = 25) -> Runner:
    layout = [*FLAGS[work.name], *QUIET, *flags]
    return Runner(work, Entry(name, "megazero_", {"layout": layout}, ALLOCATORS), kind, micro_batch, need)


def theirs(work: Workload, name: str, note: str, micro_batch: int, need: int = 30, **settings: Any) -> Runner:
    shape = "gpt2" if work is GPT else "bloom"
    kind = "compiled" if settings.get("compile") else "eager"
    return Runner(
        work, Entry(name, "transformers_", {"shape": shape, **settings}, ALLOCATORS, note=note), kind, micro_batch, need
    )


BLOCKS = "one graph of a block, one of the loss"
# The contestants of the targets come first, in case time runs short.
RUNNERS = (
    ours(GPT, "megazero", micro_batch=8),
    theirs(GPT, "transformers, sdpa", "fp32 weights under autocast, fused AdamW", 8, 40, precision="autocast"),
    ours(GPT, "megazero --cuda-graphs", "--cuda-graphs", micro_batch=8),
    theirs(GPT, "transformers, compiled", f"the same, {BLOCKS}", 8, 50, precision="autocast", compile="blocks"),
    ours(GPT, "megazero --fp8", "--fp8", micro_batch=8, kind="fp8"),
    ours(BLOOM, "megazero", micro_batch=8, need=35),
    theirs(BLOOM, "transformers, eager attention", "the only one it has for BLOOM", 4, 40, precision="autocast"),
    theirs(BLOOM, "transformers, compiled", f"the same, {BLOCKS}", 4, 50, precision="autocast", compile="blocks"),
    ours(BLOOM, "megazero --cuda-graphs", "--cuda-graphs", micro_batch=8, need=35),
    theirs(
        GPT,
        "transformers, compiled, bf16 weights",
        "fp32 masters beside them, gradients added in bf16",
        8,
        40,
        precision="master",
        compile="blocks",
    ),
    ours(GPT, "megazero --fp8 --cuda-graphs", "--fp8", "--cuda-graphs", micro_batch=8, kind="fp8"),
)


def rehearsed(runner: Runner) -> Runner:
    """The contestants on the CPU, with a tiny model."""
    work = replace(runner.work, layers=2, hidden=32, heads=2, sequence=16, vocabulary=128, threads=1, device="cpu")
    return replace(runner, work=work, micro_batch=2)


def flops_of(work: Workload, samples: int) -> int:
    """72*B*s*L*h^2 * (1 + s/(6h) + V/(12*L*h)): the model's, with the whole square of attention."""
    model = ModelConfig(
        num_layers=work.layers,
        hidden_size=work.hidden,
        num_attention_heads=work.heads,
        vocab_size=work.vocabulary,
        seq_length=work.sequence,
    )
    return model_flops(model, samples)


class Started:
    """A contestant whose process has been started, and is importing."""

    def __init__(self, runner: Runner, plan: Plan, micro_batch: int, deadline: float) -> None:
        work = replace(runner.work, micro_batch=micro_batch, micro_batches=plan.global_batch // micro_batch)
        self.contestant, self.deadline = Contestant(work, runner.entry), deadline
        self.contestant.tell("load")

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The reply to a command; waits until the deadline at most."""
        self.contestant.patience = max(1.0, self.deadline - time.monotonic())
        return self.contestant.ask(do, **arguments)[0]

    def measure(self, plan: Plan) -> dict[str, Any]:
        """Time its first step by itself, then its turns, and read its memory. Raises Unavailable."""
        work = self.contestant.work
        self.contestant.patience = max(1.0, self.deadline - time.monotonic())
        versions, began = self.contestant.hear("load")[0]["versions"], time.monotonic()
        self.ask("build")
        built = time.monotonic() - began
        (first,) = self.ask("steps", count=1)["seconds"]
        self.ask("steps", count=plan.warm_up - 1)
        before = card_state(work)
        turns = [self.ask("turn", count=plan.steps) for _ in range(plan.turns)]
        return {
            "micro_batch": work.micro_batch,
            "build_seconds": built,
            "first_step_seconds": first,
            "step_seconds": [turn["seconds"] / plan.steps for turn in turns],
            "loss": turns[-1]["loss"],
            "peak_gib": self.ask("device_memory")["peak_gib"],
            "card": [before, card_state(work)],
            "versions": versions,
        }


def card_state(work: Workload) -> str:
    """Clock in MHz, power in W, temperature in degrees Celsius, which show whether the GPU is throttled."""
    return smi("clocks.sm,power.draw,temperature.gpu") if work.device == "cuda" else ""


def measured(
    runner: Runner, started: Started, plan: Plan, deadline: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """The result with the largest micro-batch that fits, at most the runner's own; {"skipped": why} if none does."""
    while True:
        micro_batch = started.contestant.work.micro_batch
        try:
            found = started.measure(plan)
            return found | derived(started.contestant.work, plan, found)
        except Unavailable as reason:
            short = (
                "OutOfMemoryError" in str(reason)
                and micro_batch > 1
                and deadline - time.monotonic() > 0.7 * runner.need
            )
            if not short:
                return {"skipped": str(reason)}
            say(f"  micro-batch {micro_batch} does not fit")
        finally:
            started.contestant.stop()
        started = Started(runner, plan, micro_batch // 2, deadline)


def derived(work: Workload, plan: Plan, found: dict[str, Any]) -> dict[str, Any]:
    """Tokens per second and model FLOPs per second of the median turn."""
    seconds = statistics.median(found["step_seconds"])
    flops = flops_of(work, plan.global_batch)
    tokens = plan.global_batch * work.sequence / seconds
    return {
        "seconds": seconds,
        "tokens_per_second": tokens,
        "flops_per_step": flops,
        "flops_per_second": flops / seconds,
    }


def trained(
    runners: Sequence[Runner], plan: Plan, deadline: float, say: Callable[[str], None]
) -> Iterator[tuple[Runner, dict[str, Any]]]:
    """Yield each runner with its result. While one is timed, the next one imports."""
    waiting: list[tuple[Runner, Started]] = []
    coming = list(runners)
    try:
        while coming or waiting:
            while coming and len(waiting) < 2:
                runner = coming.pop(0)
                waiting.append((runner, Started(runner, plan, runner.micro_batch, deadline)))
            runner, started = waiting.pop(0)
            left = deadline - time.monotonic()
            say(f"{runner.name}: starting, {left:.0f} s left")
            if left < runner.need:
                started.contestant.stop()
                yield runner, {"skipped": f"{left:.0f} s were left, it takes about {runner.need}"}
                continue
            yield runner, measured(runner, started, plan, deadline, say)
    finally:
        for _, started in waiting:
            started.contestant.stop()


def as_settings(plan: Plan, runners: Sequence[Runner]) -> dict[str, Any]:
    """The entry in the file of results."""
    return asdict(plan) | {"runners": [asdict(runner) for runner in runners]}
