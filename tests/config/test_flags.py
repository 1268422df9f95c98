"""The command line: every flag that other programs rely on, aliases, negations and mistakes.

That each does something: tests/effects.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megazero.config.options import Option, run_options
from megazero.config.parse import ConfigError, parse_run

# Words after each flag of the contract, and the flags without which it would have no effect.
CONTRACT = """
--tensor-model-parallel-size 2 | --tp 2 | --pipeline-model-parallel-size 2 | --pp 2 | --num-layers 6 | --hidden-size 120
--num-attention-heads 6 | --seq-length 64 | --micro-batch-size 1 | --global-batch-size 48
--micro-batch-size 1 --rampup-batch-size 8 8 100
--train-iters 7 | --train-samples 700 | --lr 1e-4 | --min-lr 1e-5 | --lr-decay-style linear | --lr-warmup-iters 3
--train-samples 700 --lr-warmup-samples 30 | --lr-warmup-fraction 0.1 | --lr-decay-iters 50
--train-samples 700 --lr-decay-samples 500
--weight-decay 0.01 | --clip-grad 0.5 | --adam-beta1 0.8 | --adam-beta2 0.99 | --adam-eps 1e-6
--init-method-std 0.01 | --seed 7
--data-path some/prefix --vocab-size 100 | --split 90,10,0 | --vocab-size 500 | --make-vocab-size-divisible-by 64
--save folder
--load folder | --save folder --save-interval 5 | --eval-interval 5 | --eval-iters 2 | --test-iters 2
--log-interval 2 | --exit-interval 5
--exit-duration-in-mins 3 | --fp16 | --bf16 | --recompute-granularity full | --sequence-parallel
--tensorboard-dir board
--position-embedding learned --max-position-embeddings 999 | --max-position-embeddings 999 | --ffn-hidden-size 480
--num-query-groups 4
--untie-embeddings-and-output-weights | --disable-bias-linear | --hidden-dropout 0.1 | --attention-dropout 0.1
--recompute-granularity full --recompute-num-layers 2 | --label-smoothing 0.1 | --z-loss 1e-4 | --optimizer sgd
--fp16 --initial-loss-scale 4096 | --fp16 --loss-scale-window 500 | --fp16 --hysteresis 3 | --fp16 --min-loss-scale 2
--num-workers 2
--data-cache-path cache | --distributed-timeout-minutes 3 | --load folder --finetune | --load folder --no-load-optim
--override-opt-param-scheduler | --data-path p --vocab-size 9 --eod-id 3 | --zero-stage 0 | --zero-stage 1
--zero-stage 2
--pipeline-schedule gpipe | --pipeline-schedule 1f1b | --virtual-stages 2 --pipeline-schedule interleaved
--virtual-stages 2
--pipeline-schedule zb-h1 | --virtual-stages 2 --pipeline-schedule zb-v
--position-embedding learned | --position-embedding alibi | --position-embedding rotary | --position-embedding none
--embedding-layernorm | --activation gelu | --activation gelu-tanh | --activation relu | --activation swiglu
--norm layernorm
--norm rmsnorm | --precision fp64 | --precision fp32 | --precision bf16 | --precision fp16 | --device auto
--device cpu | --device cuda
--backend auto | --backend gloo | --backend nccl | --backend mpi | --preset gpt2-124m | --data-path p --tokenizer byte
--data-path p --tokenizer gpt2 --tokenizer-path t | --data-path p --tokenizer sentencepiece --tokenizer-path t
--data-path p --tokenizer hf --tokenizer-path t | --metrics-file m.jsonl | --grad-reduce-dtype bf16
--partition-by time
--zero-stage 3 --zero-shard-size 2 --zero3-gathered-bytes 1000000 --zero3-persist-below 1000
--valid-data-path a p b q | --validate-only --world-size 8
"""
# --config and --deepspeed-config read files: test_precedence.py and test_deepspeed.py.


def test_every_flag_of_the_contract_is_accepted() -> None:
    lines = [line.strip() for line in CONTRACT.replace("\n", "|").split("|") if line.strip()]
    assert len(lines) > 90
    for line in lines:
        parse_run(line.split(), 8)


@pytest.mark.parametrize(
    ("words", "section", "name", "value"),
    [
        (["--tensor-model-parallel-size", "2"], "parallel", "tp", 2),
        (["--tp=2"], "parallel", "tp", 2),
        (["--fp16"], "optimizer", "precision", "fp16"),
        (["--precision", "FP32"], "optimizer", "precision", "fp32"),
        (["--bf16", "--precision", "fp32"], "optimizer", "precision", "fp32"),
        (["--precision", "fp32", "--fp16", "--bf16"], "optimizer", "precision", "bf16"),
        (["--no-overlap"], "parallel", "overlap", False),
        (["--no-embedding-layernorm"], "model", "embedding_layernorm", False),
        (["--train-samples", "220_000_000"], "schedule", "train_samples", 220_000_000),
        (["--train-samples", "2e8"], "schedule", "train_samples", 200_000_000),
        (["--activation-memory-budget", "2e8"], "parallel", "activation_memory_budget", 200_000_000),
        (["--activation-memory-budget", "1.5gb"], "parallel", "activation_memory_budget", 1_500_000_000),
        (["--activation-memory-budget", "12KB"], "parallel", "activation_memory_budget", 12_000),
        (["--activation-memory-budget", "3 MiB"], "parallel", "activation_memory_budget", 3 << 20),
        (["--zero3-gathered-bytes", "2e8"], "parallel", "zero3_gathered_bytes", 200_000_000),
        (["--zero3-gathered-bytes", "none"], "parallel", "zero3_gathered_bytes", None),
        (
            ["--micro-batch-size", "1", "--rampup-batch-size", "8", "8", "100"],
            "schedule",
            "rampup_batch_size",
            (8, 8, 100),
        ),
        (["--num-layers", "8", "--pp", "2", "--partition", "5,3"], "parallel", "partition", (5, 3)),
        (["--data-path", "0.3", "a", "0.7", "b", "--vocab-size", "9"], "data", "data_path", ("0.3", "a", "0.7", "b")),
        (["--tp", "4", "--tp", "2"], "parallel", "tp", 2),
        (["--preset", "bloom-560m", "--rampup-batch-size", "none"], "schedule", "rampup_batch_size", None),
        (["--load", "x", "--no-load-optim"], "checkpoint", "no_load_optim", True),
        (["--load", "x", "--no-load-optim", "--load-optim"], "checkpoint", "no_load_optim", False),
    ],
)
def test_words_become_values(words: list[str], section: str, name: str, value: object) -> None:
    assert getattr(getattr(parse_run(words, 8), section), name) == value


def test_a_size_has_a_unit_that_is_known() -> None:
    with pytest.raises(ConfigError, match="--zero3-gathered-bytes: '4XB' is not a number of bytes, such as 500MB or"):
        parse_run(["--zero3-gathered-bytes", "4XB"], 1)


def test_mistakes_of_every_kind_come_in_one_message() -> None:
    words = (
        "stray --micro-batch-sise 3 --tp two --lr 1e --seed --overlap yes --activation swigl --preset blom-3b "
        "--fp16 --bf16 --min-lr -1e-5"
    )
    with pytest.raises(ConfigError) as caught:
        parse_run(words.split(), 1)
    message = str(caught.value)
    assert message.startswith("9 problems") and len(caught.value.problems) == 9
    for part in (
        "'stray'",
        "did you mean --micro-batch-size?",
        "--tp: 'two' is not a whole number",
        "--lr: '1e' is not a number",
        "--seed: takes one value, and none follows",
        "--overlap: takes no value",
        "did you mean swiglu?",
        "did you mean bloom-3b?",
        "--min-lr -1e-05: must be at least 0",
    ):
        assert part in message, part


@pytest.mark.parametrize(
    ("typo", "right"), [("-tp", "--tp"), ("--seq-lenght", "--seq-length"), ("--zero_stage", "--zero-stage")]
)
def test_a_typo_suggests_the_flag(typo: str, right: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {right}\\?"):
        parse_run([typo, "1"], 1)


@pytest.mark.parametrize("word", ["nan", "inf", "-inf"])
def test_numbers_are_finite(word: str) -> None:
    with pytest.raises(ConfigError, match="not a finite number"):
        parse_run(["--lr", word], 1)


def test_a_command_line_is_a_list_of_words() -> None:
    given: tuple[tuple[Any, Any, str], ...] = (
        ("--lr 1", 1, "argv is str '--lr 1': a list of words is needed"),
        (["--lr", 1], 1, 'argv[1] is int 1: a word is needed, such as "1"'),
        (None, 1, "argv is NoneType: a list of words is needed"),
        ([], "2", "world_size is str '2': a number of ranks is needed"),
        ([], 2.0, "world_size is float 2.0"),
    )
    for argv, ranks, told in given:
        with pytest.raises(TypeError, match=re.escape(told)):
            parse_run(argv, ranks)


def test_a_list_of_numbers_is_a_value() -> None:
    with pytest.raises(ConfigError, match="--split -1,1,1: up to three shares with commas between, none") as wrong:
        parse_run(["--split", "-1,1,1"], 1)
    assert len(wrong.value.problems) == 1


def test_an_epsilon_above_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=re.escape("--norm-epsilon 1e+30: must be more than 0 and at most 1")):
        parse_run(["--layernorm-epsilon", "1e30"], 1)


def test_abbreviations_are_refused() -> None:
    with pytest.raises(ConfigError, match="there is no --micro"):
        parse_run(["--micro", "1"], 1)


def test_reading_a_configuration_does_not_import_torch() -> None:
    code = "import sys; from megazero.config.parse import parse_run; parse_run([], 1); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_world_size_belongs_to_validate_only() -> None:
    with pytest.raises(ConfigError, match="--world-size 8 goes with --validate-only"):
        parse_run(["--world-size", "8"], 1)
    assert parse_run(["--validate-only", "--world-size", "48", "--tp", "4", "--pp", "12"], 1).parallel.pp == 12


@pytest.mark.parametrize("flag", ["--save", "--load", "--metrics-file", "--data-path", "--sample-prompt"])
def test_an_empty_word_is_no_value(flag: str) -> None:
    """What an unset variable of a script leaves must not train for days and keep nothing."""
    with pytest.raises(ConfigError, match=f"{flag}: is empty"):
        parse_run([flag, "", "--vocab-size", "9"], 1)


WORDS = [option for option in run_options().values() if option.kind is str and option.choices is None]


@pytest.mark.parametrize("option", WORDS, ids=lambda option: option.name)
@pytest.mark.parametrize(("value", "reason"), [("a\0b", "holds a NUL byte"), ("\ud800", "holds half of a character")])
def test_what_no_path_can_hold(option: Option, value: str, reason: str, tmp_path: Path) -> None:
    """The command line of a process cannot hold it, but a file can."""
    (tmp_path / "run.yaml").write_text(json.dumps({option.section: {option.name: [value] if option.many else value}}))
    with pytest.raises(ConfigError) as told:
        parse_run(["--config", str(tmp_path / "run.yaml")], 1)
    assert f"{tmp_path}/run.yaml: {option.section}.{option.name}: {value!r} {reason}" in told.value.problems


@pytest.mark.parametrize("value", ["4XB", "GB", "-", "1e400GB", "nan"])
def test_what_is_no_number_of_bytes(value: str) -> None:
    with pytest.raises(ConfigError, match="is not a number of bytes, such as 500MB or 4GB"):
        parse_run(["--activation-memory-budget", value], 1)
