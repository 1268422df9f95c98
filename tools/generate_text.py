"""Text from a trained model, alone or under torchrun.

    python tools/generate_text.py --load runs/mine --prompt "Once upon a time" --temperature 0.8 --top-p 0.95
    torchrun --nproc-per-node 4 tools/generate_text.py --load bloom-7b1 --tp 2 --pp 2 --prompt-file prompts.txt --greedy
    python tools/generate_text.py --load runs/mine --interactive
    echo "3 1 4 1 5" | python tools/generate_text.py --load runs/ids --ids --max-new-tokens 20

The checkpoint is of any format that tools/convert_checkpoint.py reads, on any layout. Prompts come from --prompt, from the lines of
--prompt-file (of .jsonl: strings, or "prompt" of each line; - is the standard input), else from the standard input. A single continuation is shown
as it comes, several one after the other, each under its number; --json prints a line of JSON for each, with prompt, text, ids, and what ended it.
The text goes to the standard output, all else to the standard error. Draws depend on the seed and on a prompt's place among the prompts: the
same seed gives the same text on every layout, whatever the other prompts say, but for rounding.

Status: 0, 2 for a mistake in arguments or files, 130 on Ctrl-C, 141 where nobody reads the output any more, 1 for anything else.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megazero.config.derive import max_positions
from megazero.config.level import ConfigError
from megazero.config.schema import ModelConfig, ParallelConfig
from megazero.convert.registry import format_table
from megazero.convert.source import ConversionError
from megazero.data.indexed import DataError
from megazero.data.tokenizer import KINDS, Tokenizer, build_tokenizer
from megazero.data.tool import reader_left
from megazero.inference.generate import generate
from megazero.inference.pipeline import Pipeline
from megazero.inference.prompts import STANDARD_INPUT, encoded, read_prompts
from megazero.inference.sampling import Sampling
from megazero.inference.share import shared
from megazero.inference.text import IdTokenizer, Stream
from megazero.launch import Environment, exit_status, launch, leave
from megazero.loading import Opened, open_model
from megazero.mpu.grid import ProcessGrid

A_WEEK = 7 * 24 * 60.0
"""Minutes that the other ranks wait for somebody to type."""


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--load", required=True, type=Path, metavar="CHECKPOINT", help="a checkpoint, or a folder of them")
    flags.add_argument("--from", dest="format", choices=tuple(format_table()), help="its format, where it is not to be recognised")
    text = flags.add_argument_group("prompts")
    text.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be repeated")
    text.add_argument("--prompt-file", metavar="FILE", help="a prompt in each line, as text or jsonl; - is the standard input")
    text.add_argument("--interactive", action="store_true", help="ask for one prompt after the other, until the end of the input")
    text.add_argument("--ids", action="store_true", help="prompts and continuations are token ids; no tokenizer is used")
    text.add_argument("--tokenizer", choices=tuple(KINDS), help="kind of tokenizer (default: the checkpoint's own)")
    text.add_argument("--tokenizer-path", help="folder or file of --tokenizer")
    text.add_argument("--prefix-id", type=int, metavar="ID", help="token in front of every prompt, as some models want one")
    how = flags.add_argument_group("sampling")
    how.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="of each continuation (%(default)s)")
    how.add_argument("--num-samples", type=int, default=1, metavar="N", help="continuations of each prompt (%(default)s)")
    how.add_argument("--greedy", action="store_true", help="always the likeliest token: --temperature 0")
    how.add_argument("--temperature", type=float, metavar="T", help="logits are divided by it (1.0)")
    how.add_argument("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest tokens; 0: from all")
    how.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest tokens that add up to P (%(default)s)")
    how.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="R", help="makes tokens that were there less likely (%(default)s)"
    )
    how.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends a continuation, and is not shown; may be repeated")
    how.add_argument(
        "--stop-id", action="append", type=int, default=[], metavar="ID", help="token that ends a continuation; may be repeated"
    )
    how.add_argument("--ignore-eod", action="store_true", help="go on behind the token that ends a document")
    how.add_argument("--seed", type=int, default=Sampling.seed, help="of the draws (%(default)s)")
    how.add_argument("--batch-size", type=int, default=16, metavar="N", help="continuations that are computed at once (%(default)s)")
    ranks = flags.add_argument_group("where")
    ranks.add_argument("--precision", choices=("fp64", "fp32", "bf16", "fp16"), help="to compute in (default: the checkpoint's)")
    ranks.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (%(default)s)")
    ranks.add_argument("--pp", type=int, default=1, help="pipeline stages (%(default)s)")
    ranks.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where tensors live (%(default)s)")
    ranks.add_argument("--distributed-timeout-minutes", type=float, default=10.0, help="a rank waits so long for others (%(default)s)")
    flags.add_argument("--json", action="store_true", help="a line of JSON for each continuation")
    return flags


def sampling_of(args: argparse.Namespace) -> Sampling:
    """Raises ValueError."""
    temperature = 0.0 if args.greedy else 1.0 if args.temperature is None else args.temperature
    return Sampling(temperature, args.top_k, args.top_p, args.repetition_penalty, args.seed)


def check(args: argparse.Namespace, world_size: int) -> None:
    """Raises ConfigError, which names all that is wrong."""
    problems = [
        f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1"
        for name in ("tp", "pp", "max_new_tokens", "num_samples", "batch_size")
        if getattr(args, name) < 1
    ]
    if min(args.tp, args.pp) > 0 and world_size != args.tp * args.pp:
        problems.append(f"--tp {args.tp} x --pp {args.pp} = {args.tp * args.pp} ranks, but {world_size} processes were started")
    if args.greedy and args.temperature:
        problems.append(f"--greedy and --temperature {args.temperature} exclude each other")
    try:
        sampling_of(args)
    except ValueError as error:
        problems.append(str(error))
    if not args.load.expanduser().exists():
        problems.append(f"--load {args.load}: there is no such folder")
    if args.tokenizer_path and not args.tokenizer:
        problems.append("--tokenizer-path: --tokenizer says of which kind it is")
    if args.ids and args.tokenizer:
        problems.append(f"--ids and --tokenizer {args.tokenizer} exclude each other")
    if "" in args.stop:
        problems.append("--stop: a stop string is empty")
    if args.interactive and (args.prompt or args.prompt_file):
        problems.append("--interactive asks for prompts: --prompt and --prompt-file exclude it")
    elif not (args.interactive or args.prompt or args.prompt_file) and sys.stdin.isatty():
        problems.append("there is nothing to continue: --prompt TEXT, --prompt-file FILE or --interactive")
    if args.prompt_file not in (None, STANDARD_INPUT) and not Path(args.prompt_file).expanduser().is_file():
        problems.append(f"--prompt-file {args.prompt_file}: there is no such file")
    if problems:
        raise ConfigError(problems)


def note(grid: ProcessGrid, text: str) -> None:
    if grid.rank == 0:
        print(text, file=sys.stderr, flush=True)


def tokenizer_for(args: argparse.Namespace, opened: Opened) -> Tokenizer:
    """Raises DataError."""
    assert opened.run.model.vocab_size is not None
    if args.ids:
        return IdTokenizer(opened.run.model.vocab_size)
    found = build_tokenizer(args.tokenizer, args.tokenizer_path) if args.tokenizer else opened.tokenizer
    if found is None:
        raise DataError(f"{args.load} leads to no tokenizer; name one by --tokenizer and --tokenizer-path, or work on --ids")
    return found


def stop_ids(args: argparse.Namespace, opened: Opened, tokenizer: Tokenizer) -> frozenset[int]:
    """Raises DataError for ids that the model has not."""
    model, known = opened.run.model, opened.run.data.eod_id
    for flag, ids in (("--stop-id", args.stop_id), ("--prefix-id", [] if args.prefix_id is None else [args.prefix_id])):
        for wrong in ids:
            if not 0 <= wrong < (model.vocab_size or 0):
                raise DataError(f"{flag} {wrong}: the model's vocabulary has {model.vocab_size} tokens")
    eod = known if known is not None else tokenizer.eod_id
    return frozenset([*args.stop_id, *([] if args.ignore_eod or eod is None else [eod])])


@dataclass
class Talk:
    """The model, and how it is to continue prompts."""

    args: argparse.Namespace
    grid: ProcessGrid
    model: ModelConfig
    pipeline: Pipeline
    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    eod_id: int | None
    asked: int = 0
    """Prompts so far: they number the draws."""
    noted: set[str] = field(default_factory=set)

    def read(self, prompts: Sequence[str]) -> list[tuple[str, list[int]]]:
        """On rank 0. Raises DataError."""
        ids = encoded(prompts, self.tokenizer, self.model, first=self.args.prefix_id, eod_id=self.eod_id)
        return list(zip(prompts, ids, strict=True))

    def answer(self, prompts: Sequence[tuple[str, list[int]]]) -> None:
        """Continue prompts, on every rank; rank 0 shows them."""
        count = self.args.num_samples
        self._note_length(max((len(ids) for _, ids in prompts), default=0))
        rows = [((self.asked + i) * count + k, text, ids) for i, (text, ids) in enumerate(prompts) for k in range(count)]
        self.asked += len(prompts)
        began, tokens = time.perf_counter(), 0
        for start in range(0, len(rows), self.args.batch_size):
            tokens += self._batch(rows[start : start + self.args.batch_size], alone=len(rows) == 1)
        seconds = time.perf_counter() - began
        note(self.grid, f"{tokens} tokens in {seconds:.2f} s, prompts included: {tokens / seconds:.1f} tokens/s")

    def _batch(self, rows: Sequence[tuple[int, str, list[int]]], *, alone: bool) -> int:
        """The number of new tokens."""
        here = self.grid.rank == 0
        streams = [Stream(self.tokenizer, ids, self.args.stop) for _, _, ids in rows] if here or self.args.stop else []
        streaming = here and alone and not self.args.json

        def ends(row: int, token: int) -> bool:
            if token in self.stop_ids:
                return True
            if not streams:
                return False
            show(streams[row].push(token), streaming)
            return streams[row].stopped is not None

        new = generate(
            self.pipeline,
            [ids for _, _, ids in rows],
            self.args.max_new_tokens,
            sampling_of(self.args),
            ends=ends,
            vocabulary=self.tokenizer.vocab_size,
            numbers=[number for number, _, _ in rows],
        )
        if here:
            for (number, prompt, _), ids, stream in zip(rows, new, streams, strict=True):
                show(stream.finish(), streaming)
                if not streaming:
                    print(
                        self._record(prompt, ids, stream) if self.args.json else f"=== {number + 1}: {prompt!r}\n{stream.text}", flush=True
                    )
            show("\n", streaming)
        return sum(map(len, new))

    def _record(self, prompt: str, ids: list[int], stream: Stream) -> str:
        ended = "stop string" if stream.stopped is not None else "stop token" if ids[-1] in self.stop_ids else "length"
        record: dict[str, Any] = {"prompt": prompt, "text": stream.text, "ids": ids, "ended": ended, "stop": stream.stopped}
        return json.dumps(record)

    def _note_length(self, longest: int) -> None:
        total = longest + self.args.max_new_tokens
        learned = self.model.position_embedding == "learned"
        most = max_positions(self.model) if learned else self.model.seq_length
        if total <= most or self.noted:
            return
        self.noted.add("length")
        fate = "the oldest leave the context, and every token takes a whole forward pass" if learned else "it was trained on shorter ones"
        note(self.grid, f"up to {total} tokens, more than the model's {most}: beyond them {fate}")


def show(piece: str, streaming: bool) -> None:
    if streaming and piece:
        print(piece, end="", flush=True)


def converse(talk: Talk) -> None:
    """Prompt after prompt, read by rank 0, until the input ends."""

    def ask() -> list[tuple[str, list[int]]] | None:
        if sys.stdin.isatty():
            try:
                line: str = input("> ")
            except EOFError:
                return None
        else:
            line = sys.stdin.readline()
            if not line:
                return None
        return talk.read([line.rstrip("\r\n")])

    while True:
        try:
            prompts = shared(talk.grid, ask)
        except DataError as error:
            note(talk.grid, f"error: {error}")
            continue
        if prompts is None:
            return
        talk.answer(prompts)


def talk_on(args: argparse.Namespace, grid: ProcessGrid) -> None:
    """On every rank."""
    began = time.perf_counter()
    opened = open_model(args.load, grid, precision=args.precision, format=args.format)
    tokenizer = tokenizer_for(args, opened)
    known = opened.run.data.eod_id
    eod_id = known if known is not None else tokenizer.eod_id
    pipeline = Pipeline.of(opened.stages, grid, opened.chunk_map)
    talk = Talk(args, grid, opened.run.model, pipeline, tokenizer, stop_ids(args, opened, tokenizer), eod_id)
    note(grid, f"{args.load} read in {time.perf_counter() - began:.1f} s, {opened.run.optimizer.precision} on {grid.device}")
    if args.interactive:
        converse(talk)
        return
    file = args.prompt_file or (None if args.prompt else STANDARD_INPUT)
    prompts = shared(grid, lambda: talk.read(read_prompts(args.prompt, file)))
    if not prompts:
        raise DataError(f"--prompt-file {file}: there are no prompts in it")
    talk.answer(prompts)


def main() -> None:
    environment = Environment.read()
    args = parser().parse_args()

    def run() -> None:
        check(args, environment.world_size)
        minutes = A_WEEK if args.interactive else args.distributed_timeout_minutes
        parallel = ParallelConfig(tp=args.tp, pp=args.pp, device=args.device, distributed_timeout_minutes=minutes)
        try:
            with launch(parallel, environment) as grid:
                talk_on(args, grid)
        except (ConversionError, DataError, FloatingPointError) as error:
            raise ConfigError([str(error)]) from error
        except BrokenPipeError:
            raise SystemExit(reader_left()) from None

    try:
        status = exit_status(run, environment)
    except SystemExit as leaving:
        status = int(str(leaving.code))
    except KeyboardInterrupt:
        status = 130
    leave(status)


if __name__ == "__main__":
    main()
