"""Words of other programs: what they are called here is said, and is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from megazero.config.flags import read_command_line
from megazero.config.foreign_flags import CHOICES, FLAGS, normalise_flag
from megazero.config.options import run_options
from megazero.config.parse import ConfigError, parse_run
from megazero.convert.names import FORMATS

ASKED = {
    # what people type, and what they are told
    "--learning-rate 1e-4": "did you mean --lr?",
    "--learning_rate 1e-4": "did you mean --lr?",
    "--learning-rte 1e-4": "did you mean learning-rate, which here is --lr?",
    "--max_seqlen 64": "did you mean max-seq-len, which here is --seq-length?",
    "--per_device_train_batch_size 4": "did you mean --micro-batch-size?",
    "--gradient_checkpointing": "did you mean --recompute-granularity full?",
    "--use-rotary-position-embeddings": "did you mean --position-embedding rotary?",
    "--use-distributed-optimizer": "did you mean --zero-stage 1?",
    "--local-rank=0": "it is set by torchrun in each rank's environment",
    "--rope": "did you mean --position-embedding rotary?",
    "--nheads 8": "did you mean --num-attention-heads?",
    "--num-heads 8": "did you mean --num-attention-heads?",
    "--n_layer=8": "did you mean --num-layers?",
    "--d-model 64": "did you mean --hidden-size?",
    "--bsz 4": "did you mean --global-batch-size, or --micro-batch-size",
    "--mbs 4": "did you mean --micro-batch-size?",
    "--max_iters=10": "did you mean --train-iters?",
    "--num-steps 10": "did you mean --train-iters?",
    "--wd 0.1": "did you mean --weight-decay?",
    "--eps 1e-8": "did you mean --adam-eps?",
    "--grad_accum 4": "did you mean --global-batch-size, which is micro-batch x dp x these steps",
    "--fsdp": "did you mean --zero-stage 2, which shards",
    "--dtype bf16": "did you mean --precision?",
    "--dropout 0.1": "did you mean --hidden-dropout, and --attention-dropout?",
    "--out_dir x": "did you mean --save?",
    "--tb": "did you mean --tensorboard-dir, or --metrics-file",
    "--wandb_project p": "did you mean --wandb?",
    "--wandb-entity us": "did you mean --wandb TEAM/PROJECT?",
    "--run-name r": "it is the variable WANDB_NAME beside --wandb",
    "--lr-scheduler cosine": "did you mean --lr-decay-style?",
    "--flash-attn": "did you mean --attention flash?",
    "--optimizer-cpu-offload": "did you mean --offload-optimizer cpu?",
    "--optimizer-offload-fraction 0.5": "did you mean --offload-optimizer cpu:SHARE?",
    "--offload_optimizer_device nvme": "did you mean --offload-optimizer?",
    "--dp 2": "it is what the number of ranks leaves of --tp x --pp",
    "--gpus 8": "did you mean --ranks on one host, or a flag of torchrun",
    "--nproc_per_node 8": "did you mean --ranks on one host, or a flag of torchrun",
    "--recompute": "did you mean --recompute-granularity?",
    "--position-embedding rope": "did you mean rotary?",
    "--activation silu": "did you mean swiglu?",
    "--activation gelu_new": "did you mean gelu-tanh?",
    "--norm rms_norm": "did you mean rmsnorm?",
    "--precision bfloat16": "did you mean bf16?",
    "--device gpu": "did you mean cuda?",
    "--lr-decay-style constant_with_warmup": "did you mean constant?",
    "--tokenizer GPT2BPETokenizer": "did you mean gpt2?",
}


@pytest.mark.parametrize("line", ASKED)
def test_words_of_other_programs_get_their_suggestion(line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run(line.split(), 1)
    (problem,) = caught.value.problems
    assert ASKED[line] in problem


@pytest.mark.parametrize("word", ["--ema", "--verbose", "--abcd", "--shuffle"])
def test_what_is_like_nothing_gets_no_suggestion(word: str) -> None:
    """The dashes that all flags begin with are no likeness: with them --act was like --tp."""
    assert read_command_line([word]).source.problems == [f"{word}: there is no {word}"]


def test_a_file_gets_them_too(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: {n_layer: 3, activation: silu}\nlearning_rate: 3\n")
    with pytest.raises(ConfigError) as caught:
        parse_run(["--config", str(tmp_path / "run.yaml")], 1)
    told = " ".join(caught.value.problems)
    assert "there is no model.n_layer; here it is --num-layers" in told
    assert "there is no learning_rate; here it is --lr" in told and "did you mean swiglu?" in told


def test_every_suggestion_can_be_followed() -> None:
    """A flag that is named exists, and takes the words behind it; a word that is ours already is in no list."""
    for word, ours in FLAGS.items():
        assert read_command_line([f"--{word}"]).source.problems, f"--{word} is a flag here"
        assert normalise_flag(word) == word
        if ours.startswith("--"):
            words = ours.split(",")[0].split()
            problems = read_command_line(words).source.problems
            assert all("takes one value" in problem or "needs one value" in problem for problem in problems), (
                word,
                problems,
            )
    for name, table in CHOICES.items():
        choices = FORMATS if name in ("to", "format") else run_options()[name].choices
        assert choices is not None
        for word, ours in table.items():
            assert ours in choices and word not in choices and normalise_flag(word) == word, (name, word)
