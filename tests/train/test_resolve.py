"""One run however it is begun: the command, --validate-only, --print-config and Python resolve 500 requests alike."""

from __future__ import annotations

import random
import re
import shlex
import shutil
import typing
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import yaml

from megazero.config.dump import plain_value, run_dict
from megazero.config.flags import fields_for_flags, read_command_line
from megazero.config.lengths import Length, Measure
from megazero.config.options import run_options
from megazero.config.parse import parse_arguments, parse_run
from megazero.config.presets import preset, presets
from megazero.config.source import ConfigError
from megazero.convert.formats import TargetOptions
from megazero.convert.native import write_native
from megazero.data.corpus import Corpus
from megazero.data.progress import silent
from megazero.mpu.meeting import Environment
from megazero.train import api, checked
from megazero.train.api import Arguments
from megazero.train.checked import dry_run_text
from megazero.train.epochs import Epoch
from megazero.train.init_from import AdapterBase, model_source
from megazero.train.logs import Callbacks
from megazero.train.path_checks import missing_files
from megazero.train.prepare import Prepared, prepare
from megazero.train.resolve import Facts, Vocabulary, contradictions, resolve
from tests.convert.sources import made
from tests.corpus import write_corpus
from tests.train.starts import resolved_for

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DRAWN = 250
SHAPE = "--num-layers 3 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --make-vocab-size-divisible-by 1"
CHOICES: dict[str, tuple[str, ...]] = {
    "data": (
        f"{SHAPE} --data-path {{pair}} --vocab-size 1003 --split 80,10,10",
        f"{SHAPE} --data-path {{pair}} --vocab-size 1003",
        f"{SHAPE} --data-path {{pair}} --vocab-size 1003 --eod-id 0 --document-mask",
        f"{SHAPE} --instruction-data {{talks}} --tokenizer byte",
        "--init-from {model} --data-path {pair} --vocab-size 1003 --extend-vocabulary",
        f"{SHAPE} --data-path {{pair}}/missing --vocab-size 12",
        f"{SHAPE} --data-path {{pair}}",
        "--init-from {model} --data-path {few} --lora-rank 2",
        "--init-from {model} --data-path {few} --lora-rank 2 --lora-base-bits 4",
    ),
    "length": (
        *("--train-iters 4", "--epochs 2", "--epochs 3.5", "--train-samples 90", "--epochs 0.001", ""),
        "--epochs 0.5 --lr-warmup '500 samples'",
    ),
    "end": (*[""] * 5, "--eod-id 300"),
    "batch": ("", "--global-batch-size 8", "--global-batch-size 12 --micro-batch-size 3"),
    "zero": ("", "--zero-stage 1", "--zero-stage 2", "--zero-stage 3"),
    "precision": ("", "--precision fp32", "--precision fp64"),
    "params": ("", "", "", "--offload-params cpu:0.5", "--offload-params nvme --nvme-path {disk}"),
    "optimizer": ("", "", "", "--offload-optimizer cpu", "--offload-optimizer nvme:0.5 --nvme-path {disk}"),
    "gradients": ("", "", "", "--offload-gradients cpu"),
    "budget": (*[""] * 6, "--device-memory-budget 9MB", "--device-memory-budget 3MB", "--host-memory-budget 1MB"),
    "recompute": (*[""] * 6, "--activation-memory-budget 90KB", "--recompute-granularity full"),
    "order": ("", "", "", "--micro-batch-order vertical"),
    "device": ("", "", "--device cpu"),
    "late": ("", "", "", "--late-update"),
    "wrong": (*[""] * 9, "--tokenizer-path {pair}"),
}
"""Settings of drawn runs, each a choice. Some contradict each other: a refusal is compared, too."""
LAYOUTS = {
    1: ("",),
    4: ("", "--tp 2", "--pp 2", "--pp 2 --pipeline-schedule zb-h1", "--zero-stage 3 --zero-shard-size 2"),
}
"""By number of ranks."""
SEARCHED = (
    "--num-layers 1 --global-batch-size 1 --micro-batch-size 1 --data-path {pair} --vocab-size 1003 --eval-iters 0 "
    "--placement auto --placement-rates {rates} --precision bf16 --device-memory-budget 3MB"
)


WAYS_TO_START = r"; (to start \d+ ranks on this host: .*|command.world_size \d+ checks it|--world-size \d+ checks it)"
"""What a command, a check and a program say differently, because each has other words for a number of ranks."""


class Place(NamedTuple):
    pair: Path
    few: Path
    talks: Path
    model: Path
    disk: Path
    rates: Path


@pytest.fixture(scope="module")
def place(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("resolve")
    write_native(made(), folder / "model", TargetOptions(), lambda count: None)
    (folder / "disk").mkdir()
    talks = [f'{{"prompt": "ab", "completion": "{"c" * (n % 7 + 1)}"}}\n' for n in range(60)]
    (folder / "talks.jsonl").write_text("".join(talks))
    rates = "flops: 1e11\nto_host: 10GB\nto_device: 10GB\nupdate: 40GB\nupdate_host: 2GB\nread: 1GB\nwrite: 1GB\n"
    (folder / "rates.yaml").write_text(rates)
    few = write_corpus(folder / "few", vocabulary=made().model.vocab_size or 0)
    return Place(corpus, few, folder / "talks.jsonl", folder / "model", folder / "disk", folder / "rates.yaml")


def example_flags() -> Iterator[str]:
    """The flags of each recipe."""
    for script in sorted(EXAMPLES.glob("*/*.sh")):
        found = re.search(r"^recipe \S+ \\\n(.*?)\"\$@\"", script.read_text(), re.MULTILINE | re.DOTALL)
        assert found is not None, script
        yield found[1].replace("\\\n", " ")


def requests(ranks: int) -> Iterator[str]:
    """Flags of runs: every preset and recipe, in full and small, then drawn ones."""
    small = (
        f"{SHAPE} --global-batch-size 8 --micro-batch-size 1 --rampup-batch-size none --vocab-size 1003 --tp 1 --pp 1"
    )
    short = "--train-iters 4 --train-samples none --lr-decay-samples none --lr-warmup-samples none"
    every = [*(f"--preset {name}" for name in presets()), *example_flags()]
    for flags in every:
        yield f"{flags} --data-path {{pair}}/missing"
        yield f"{flags} {small} {short} --num-query-groups none --ffn-hidden-size none --data-path {{pair}}"
    if ranks == 1:  # a search takes seconds
        yield f"{SHAPE} {SEARCHED}"
    chance = random.Random(ranks)
    while True:
        words = [chance.choice(choices) for choices in (*CHOICES.values(), LAYOUTS[ranks])]
        yield " ".join(filter(None, words))


def refusal_or(find: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any] | tuple[str, ...]:
    """What `find` returns, or what is wrong, in any order and with names that a program uses too."""
    try:
        return find(*given)
    except ConfigError as error:
        problems = {fields_for_flags(problem) for problem in error.problems}
        return tuple(sorted(re.sub(WAYS_TO_START, "", problem) for problem in problems))


def final(prepared: Prepared, ranks: int) -> dict[str, Any]:
    """The run as sections of plain values, with what rank 0 decides once the ranks have met."""
    resolved = prepared.resolved
    if resolved.left_open:
        alone = SimpleNamespace(world=SimpleNamespace(is_on_device=False))
        resolved = resolve(resolved.asked, checked.facts_together(resolved, alone, ranks))  # type: ignore
    assert not resolved.left_open
    return run_dict(resolved.run)


def by_command(words: list[str], ranks: int) -> dict[str, Any]:
    return final(prepare(parse_arguments(words, ranks, model_source, missing_files).run, ranks, silent), ranks)


def by_check(words: list[str], ranks: int) -> dict[str, Any]:
    """What --print-config prints of a run that --validate-only accepts."""
    line = [*words, "--print-config", "--validate-only"]
    told = dry_run_text(parse_arguments(line, ranks, model_source, missing_files), ranks)
    printed, _, verdict = told.partition("\n\nOK: ")
    assert verdict
    return {"left open": re.findall(r"^# not decided here: (\w+)", printed, re.MULTILINE), **yaml.safe_load(printed)}


def by_program(words: list[str], ranks: int, rank: int) -> dict[str, Any]:
    """The same settings as a mapping, on one of the ranks."""
    line = read_command_line(words)
    settings = dict(preset(line.command.preset)) if line.command.preset else {}
    given: dict[str, dict[str, Any]] = {}
    for name, value in {**settings, **line.source.settings}.items():
        given.setdefault(run_options()[name].section, {})[name] = plain_value(value)
    environment = Environment(rank, rank, ranks, ranks)
    return final(api._prepared(given, Arguments(None, None, None, Callbacks(), False), environment)[1], ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_every_way_to_begin_resolves_to_one_run(ranks: int, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """500 requests, half of them on each number of ranks. Refusals are equal, too."""
    monkeypatch.setattr("megazero.system.host_memory.limit_bytes", lambda: None)  # presets are larger than this host
    refused = 0
    for number, request in enumerate(islice(requests(ranks), DRAWN)):
        cache = f"--data-cache-path {place.disk.parent}/cache --save none"
        words = shlex.split(request.format(**place._asdict()) + " " + cache)
        command = refusal_or(by_command, words, ranks)
        program = refusal_or(by_program, words, ranks, number % ranks)
        checked = refusal_or(by_check, words, ranks)
        assert command == program, request
        if isinstance(checked, dict):
            still_open = checked.pop("left open")
            assert set(still_open) <= {"train_length"} and checked.pop("resolved") is True, request
            if still_open and not isinstance(command, dict):  # conversations are packed, and so counted, at the start
                assert all("schedule.epochs" in problem for problem in command), request
                continue
            if still_open and isinstance(command, dict):
                checked["schedule"]["train_length"] = command["schedule"]["train_length"]
        assert command == checked, request
        refused += isinstance(command, tuple)
    assert DRAWN // 10 < refused < DRAWN * 7 // 10, "the draws have to have both"


def test_what_is_printed_resolves_to_itself(place: Place, tmp_path: Path) -> None:
    flags = f"--data-path {place.few} --epochs 2 --init-from {place.model} --global-batch-size 8 --micro-batch-size 1"
    words = f"{flags} --device-memory-budget 40MB --offload-params nvme --nvme-path {place.disk}".split()
    first = by_check(words, 1)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({name: first[name] for name in first if name != "left open"}))
    again = by_check(["--config", str(tmp_path / "run.yaml")], 1)
    assert (
        first == again
        and first["parallel"]["micro_batch_order"] is not None
        and first["schedule"]["train_length"].endswith(" samples")
    )


def test_a_default_corpus_is_known_before_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "library"
    library.mkdir()
    for path in sorted(Path(typing.__file__).parent.glob("*.py"))[:60]:
        shutil.copy(path, library)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(library))
    words = [*SHAPE.split(), "--train-iters", "2", "--data-cache-path", str(tmp_path / "cache"), "--eval-iters", "0"]
    before, made_here, after = (by_check(words, 1), by_command(words, 1), by_check(words, 1))
    assert before.pop("left open") == after.pop("left open") == [] and before == after
    assert before == {**made_here, "resolved": True} and before["model"]["vocab_size"] == 4096
    assert before["data"]["eod_id"] == 0 and before["data"]["data_path"][0].startswith(str(tmp_path / "cache"))


FACTS = Facts(
    4,
    "cuda",
    device="cuda",
    corpus=Corpus("c/text", "c", "files"),
    vocabulary=Vocabulary(77, 3),
    epoch=Epoch(tokens=1001),
    base=AdapterBase("/models/b", "three"),
)


def test_every_decision_says_its_field_its_value_and_why() -> None:
    """By arithmetic alone, of a machine that is not there."""
    asked = parse_run([*SHAPE.split(), "--epochs", "2", "--global-batch-size", "8"], 4)
    asked = replace(asked, lora=replace(asked.lora, lora_rank=4, lora_base_bits=4))
    resolved = resolve(asked, FACTS)
    made_decisions = {decision.field: decision.value for decision in resolved.decisions}
    assert made_decisions == {
        "device": "cuda",
        "data_path": ("c/text",),
        "tokenizer": "gpt2",
        "tokenizer_path": "c",
        "sample_prompt": "import os\n\n\ndef ",
        "vocab_size": 77,
        "eod_id": 3,
        "init_from": "/models/b",
        "lora_base_qkv": "three",
        "train_length": Length((2 * 1001 - 1) // 16, Measure.SAMPLES),
    }
    assert all(decision.why for decision in resolved.decisions)
    plain = {name: value for values in run_dict(resolved.run).values() for name, value in values.items()}
    assert {name: plain[name] for name in made_decisions} == {n: plain_value(v) for n, v in made_decisions.items()}
    assert resolve(asked, FACTS) == resolved and resolved.left_open == ()


def test_what_the_user_says_is_not_decided() -> None:
    flags = "--device cpu --vocab-size 50 --eod-id 1 --data-path x --train-iters 3"
    asked = parse_run([*SHAPE.split(), *flags.split()], 1)
    assert resolve(asked, replace(FACTS, world_size=1)).decisions == () and resolved_for(asked).run == asked


def test_facts_that_are_not_known_leave_a_field_open() -> None:
    flags = "--epochs 1 --data-path x --tokenizer byte --device-memory-budget 1GB --offload-params nvme --nvme-path y"
    asked = parse_run([*SHAPE.split(), *flags.split()], 1)
    open_run = resolve(asked, Facts(1, "cuda"))
    assert open_run.left_open == ("vocab_size", "train_length", "micro_batch_order")
    assert open_run.run == asked and open_run.decisions == ()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            "--epochs 0.4 --lr-warmup-samples 300 --lr-decay-style linear",
            "--lr-warmup-samples 300 is longer than --train-samples 24, which counts the warm-up in; nearest: 24 "
            "(--train-samples: --epochs 0.4 of the data)",
        ),
        (
            "--epochs 0.4 --lr-wsd-decay-samples 20 --lr-warmup-samples 6 --lr-decay-style wsd",
            "--lr-wsd-decay-samples 20 + --lr-warmup-samples 6 is longer than --train-samples 24; nearest: "
            "--lr-wsd-decay-samples 18 (--train-samples: --epochs 0.4 of the data)",
        ),
        (
            "--epochs 0.4 --lr-warmup 20",
            "--lr-warmup 20 iterations is longer than --train-samples 24, which counts the warm-up in; nearest: 3 "
            "(--train-samples: --epochs 0.4 of the data)",
        ),
        (
            "--epochs 0.4 --lr-warmup 20 --global-batch-size 16 --rampup-batch-size 4 4 64",
            "--lr-warmup 20 iterations is longer than --train-samples 24, which counts the warm-up in; nearest: 6 "
            "(--train-samples: --epochs 0.4 of the data)",
        ),
        (
            "--epochs 0.4 --lr-wsd-decay 2 --lr-warmup-iters 2 --lr-decay-style wsd",
            "--lr-wsd-decay 2 iterations + --lr-warmup-iters 2 is longer than --train-samples 24; nearest: "
            "--lr-wsd-decay 1 iteration (--train-samples: --epochs 0.4 of the data)",
        ),
        ("--epochs 0.4 --lr-warmup 3", None),
        ("--epochs 0.4 --lr-warmup 20 --lr-decay-style constant", None),
        ("--epochs 0.4 --lr-warmup 4 --lr-decay 9", None),
        (
            "--eod-id 77",
            "--eod-id 77 is no token of --vocab-size 77; nearest: 76 (--vocab-size: the tokenizer has as many tokens)",
        ),
        (
            "--vocab-size 3",
            "--vocab-size 3 does not have the --eod-id 3; without --vocab-size the tokenizer says both (--eod-id: the "
            "tokenizer's token that ends a document)",
        ),
        ("--vocab-size 77", None),
        ("--eod-id 76 --epochs 0.4 --lr-warmup-samples 24", None),
        # the machine's checks tell this
        ("--optimizer-impl apex --precision fp32", None),
    ],
)
def test_decided_values_are_checked_as_given_ones_are(words: str, problem: str | None) -> None:
    asked = parse_run([*SHAPE.split(), "--global-batch-size", "8", *words.split()], 1)
    facts = replace(FACTS, world_size=1, device="cpu", kind="cpu", base=None, epoch=Epoch(tokens=1001))
    assert contradictions(resolve(asked, facts)) == ([] if problem is None else [problem])
