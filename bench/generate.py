"""Tokens per second of greedy generation, compared with transformers.generate: same model, dtype, threads and prompts,
in alternating turns.

    python -m bench.generate                 # GPT-2's smallest shape and one of a few million parameters, fp32 and bf16
    python -m bench.generate --quick         # tiny: does everything run?

Each side has its own key-value cache. A turn is one call for `--new` tokens after prompts of `--prompt` tokens. Its
time includes the prompts. The ratio is the median over the rounds of their time over ours. The first round compares
the tokens of both.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench import results
from bench.script import parser_of, report
from megazero.convert.loading import load
from megazero.inference.generate import generate
from megazero.inference.pipeline import Pipeline
from megazero.inference.sampling import Sampling
from megazero.system.allocator import restart_with_settings

HEADINGS = ("model", "parameters", "dtype", "batch", "tokens/s", "transformers", "times faster")


@dataclass(frozen=True)
class Shape:
    """A model, as transformers' configuration under transformers' names."""

    name: str
    kind: str
    settings: dict[str, Any]

    def build(self) -> Any:
        import transformers

        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(self.kind, **self.settings)
        )


def shapes(quick: bool) -> list[Shape]:
    """GPT-2 124M, and small models of LLaMA and BLOOM, whose time is mostly Python's."""
    if quick:
        return [Shape("tiny", "bloom", {"vocab_size": 503, "hidden_size": 48, "n_layer": 2, "n_head": 4})]
    llama = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1024}
    return [
        Shape("GPT-2", "gpt2", {}),
        Shape("LLaMA-shaped", "llama", {"vocab_size": 16384, "hidden_size": 384, **llama}),
        Shape("BLOOM-shaped", "bloom", {"vocab_size": 8192, "hidden_size": 256, "n_layer": 6, "n_head": 8}),
    ]


@dataclass(frozen=True)
class Result:
    """Tokens per second of both sides by round. same: rows of `batch` in which both generated the same tokens."""

    model: str
    parameters: int
    dtype: str
    batch: int
    ours: list[float]
    theirs: list[float]
    same: int

    @property
    def ratio(self) -> float:
        return statistics.median(ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True))

    def row(self) -> list[str]:
        rates = [f"{statistics.median(side):.1f}" for side in (self.ours, self.theirs)]
        return [self.model, f"{self.parameters / 1e6:.0f}M", self.dtype, str(self.batch), *rates, f"{self.ratio:.2f}"]


def timed(run: Callable[[], list[list[int]]]) -> tuple[list[list[int]], float]:
    began = time.perf_counter()
    rows = run()
    return rows, sum(map(len, rows)) / (time.perf_counter() - began)


def compare(shape: Shape, dtype: str, args: argparse.Namespace) -> Iterator[Result]:
    """Compare both sides with the same weights: ours reads the folder that theirs has written."""
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    theirs = shape.build().to(kind).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        pipeline = Pipeline.of([load(folder, precision=dtype).stage])
        for batch in args.batches:
            yield play(shape, dtype, theirs, pipeline, batch, args)


def play(shape: Shape, dtype: str, theirs: Any, pipeline: Pipeline, batch: int, args: argparse.Namespace) -> Result:
    ids = torch.randint(
        1, theirs.config.vocab_size, (batch, args.prompt), generator=torch.Generator().manual_seed(batch)
    )
    prompts = ids.tolist()

    def their_rows() -> list[list[int]]:
        count = {"max_new_tokens": args.new, "min_new_tokens": args.new, "eos_token_id": None, "pad_token_id": 0}
        rows: list[list[int]] = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **count)[
            :, args.prompt :
        ].tolist()
        return rows

    def our_rows() -> list[list[int]]:
        return generate(pipeline, prompts, args.new, Sampling(temperature=0))

    same = sum(a == b for a, b in zip(our_rows(), their_rows(), strict=True))  # also the warm-up
    ours, beside = [], []
    for _ in range(args.rounds):
        ours.append(timed(our_rows)[1])
        beside.append(timed(their_rows)[1])
    return Result(shape.name, sum(p.numel() for p in theirs.parameters()), dtype, batch, ours, beside, same)


def finish(args: argparse.Namespace, found: Sequence[Result]) -> None:
    """Write the JSON, the table and the plot."""
    settings = {"threads": args.threads, "rounds": args.rounds, "prompt": args.prompt, "new": args.new}
    contents = {"generation": [asdict(result) | {"ratio": result.ratio} for result in found]}
    text = results.table(HEADINGS, [result.row() for result in found])
    path = report(args, "generate", settings, contents, text)
    bars = [(f"{result.model} {result.dtype}, batch {result.batch}", result.ratio) for result in found]
    results.plot(
        path.with_suffix(".png"), "Generation: our tokens per second over transformers'", "times faster", {"": bars}
    )
    print(f"\n{text}\n\n{path}", flush=True)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, "a tiny model, one round: a smoke test")
    parser.add_argument(
        "--threads", type=int, default=len(results.cores()), help="of torch and the kernels (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side (%(default)s)")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt (%(default)s)")
    parser.add_argument("--new", type=int, default=64, help="tokens of a continuation (%(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="rows at once (1 8)")
    parser.add_argument("--only", default="", help="models whose name contains this")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.new, args.prompt = 1, 8, 8
    return args


def main() -> None:
    args = arguments()
    restart_with_settings()
    torch.set_num_threads(args.threads)
    found = []
    for shape in shapes(args.quick):
        if args.only not in shape.name:
            continue
        for dtype in ("fp32", "bf16"):
            for result in compare(shape, dtype, args):
                found.append(result)
                print(
                    "  ".join(result.row()), f" ({result.same} of {result.batch} rows with the same tokens)", flush=True
                )
    finish(args, found)


if __name__ == "__main__":
    main()
