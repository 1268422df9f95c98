"""How the tests run each command of the pages.

A command is of one of four kinds: a training, which runs with a smaller model on ranks of the pool; a subcommand of
`megazero`, which runs unchanged in this process; a goal of make; or a command that another test runs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

ELSEWHERE: Mapping[str, str] = {
    r"make (?!-)": "tests/docs/test_commands.py::test_make_knows_the_goals",
    r"pip install \.": "tests/test_setup.py::test_an_isolated_build_makes_the_wheel_without_torch",
    r"torchrun --nproc-per-node 48 ": "tests/e2e/test_mission.py::test_48_ranks_equal_one_process",
    r"megazero pretrain$": "tests/e2e/test_first_run.py::test_the_bare_command",
    r"(\w+=\S+ )*sbatch ": "tests/examples/test_recipes.py::test_slurm_starts_one_torchrun_per_node",
    r"CHECK=1 ": "tests/examples/test_recipes.py::test_a_recipe_is_checked_without_slurm",
    r"docker build ": "tests/examples/test_container.py::test_what_is_copied_can_be_installed",
    r"docker run ": "tests/examples/test_container.py::test_what_is_copied_is_enough_to_train_with",
    r"kubectl ": "tests/examples/test_kubernetes.py::test_its_command_is_valid_on_its_ranks",
    r"megazero harness run ": "tests/evaluation/test_lm_eval.py::test_simple_evaluate",
    r"(python|torchrun .*) examples/own_program": "tests/examples/test_own_program.py::test_it_trains_under_torchrun",
    r"(python|torchrun .*) examples/deepspeed_program": "tests/examples/test_deepspeed_program.py::test_ranks_train",
    r"python examples/own_plain": "tests/examples/test_own_modules.py::test_the_page_shows_what_the_plain_loop_prints",
    r"(python|torchrun .*) examples/own_modules[.]py.*(--meta|bf16|fp16)": (
        "tests/examples/test_own_modules.py::test_others_learn_too"
    ),
    r"(python|torchrun .*) examples/own_modules": (
        "tests/examples/test_own_modules.py::test_a_layout_prints_what_the_plain_loop_prints"
    ),
    r"(python|torchrun .*) examples/own_loop": "tests/examples/test_own_modules.py::test_the_loop_goes_on",
    r"\(ulimit ": "tests/examples/test_own_modules.py::test_a_model_of_more_than_the_memory",
    r"(python|torchrun .*) examples/own_(vision|translation|head)": (
        "tests/examples/test_own_examples.py::test_ranks_learn_the_same"
    ),
    r"sed -n '/\^```python/": "tests/docs/test_one_step.py::test_the_first_command_prints_what_the_page_shows",
    r"torchrun .* one_step[.]py$": "tests/docs/test_one_step.py::test_the_first_command_prints_what_the_page_shows",
    r"torchrun .* one_step[.]py --pp 2$": "tests/docs/test_one_step.py::test_two_stages_print_the_same_results",
    r"(megazero pretrain|torchrun .* pretrain_gpt[.]py) --config examples/hub/(?!.*--validate-only)": (
        "tests/examples/test_hub.py::test_a_shrunk_recipe_trains"
    ),
    r"megazero pretrain --config examples/hub/.* --validate-only ": (
        "tests/examples/test_hub.py::test_the_planner_prints_what_the_page_states"
    ),
    r"megazero export out/checkpoints": "tests/own/test_exported.py::test_floats_are_rounded_on_request",
    r"megazero prepare-data .* --tokenizer-path Qwen/": "tests/convert/test_hub_names.py::test_a_tokenizer_by_name",
    r"megazero verify-layout .* --preset bloom-176b ": "tests/verify/test_large.py::test_bloom_on_384_ranks",
    r"megazero verify-layout .* --activation swiglu": (
        "tests/verify/test_example.py::test_a_layer_is_proven_and_a_subtle_fault_is_caught"
    ),
    r"megazero plan .* --program megatron-deepspeed": "tests/cli/test_plan.py::test_the_step_of_bloom",
    r"megazero plan --(calibrate|hardware) here[.]yaml": (
        "tests/calibrate/test_calibration.py::test_an_entry_is_measured_and_a_plan_takes_it"
    ),
    r"megazero pretrain .*--hardware here[.]yaml": "tests/train/test_predicted.py::test_a_run_says_what_a_plan_says",
    r"python -m pytest ": "tests/docs/test_commands.py::test_pytest_knows_the_tests",
}
"""Commands, as a regular expression that their beginning matches -> the test that runs them, or their like."""

TINY = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 64"
DATA = "--data-path my-data --tokenizer hf --tokenizer-path models/bloom"
STEPS = "--global-batch-size 8 --eval-iters 0 --train-iters 2 --data-cache-path cache"
FOUR = "--train-iters 4 --save-interval 2"

SHRUNK: Mapping[str, str] = {
    r"megazero pretrain --ranks 2 --tp 2 --train-iters 20": f"{TINY} {DATA} {STEPS}",
    r"megazero pretrain --ranks 2 --train-iters 150 ": f"{TINY} {DATA} {STEPS} --train-iters 6",
    r"megazero pretrain --ranks 4 ": f"{TINY} {DATA} {STEPS}",
    r"megazero pretrain --ranks 2 --data-path .* --save runs/(mine|calmer) ": f"{TINY} {STEPS} {FOUR}",
    r"megazero pretrain --train-iters 20 --metrics-file": f"{TINY} {DATA} {STEPS}",
    r"megazero pretrain --train-iters 20 --save runs/watched": f"{TINY} {DATA} {STEPS}",
    r"torchrun .* --init-from models/gpt2 ": STEPS,
    r"torchrun .* --instruction-data ": f"{STEPS} --seq-length 64",
    r"torchrun .* --(offload-optimizer|placement) ": f"{TINY} {STEPS}",
    r"torchrun .* --lora-rank ": f"{STEPS} --seq-length 64",
    r"torchrun .* --save runs/a --save-interval 50": f"{TINY} {DATA} {STEPS} --train-iters 4 --exit-interval 2",
    r"torchrun .* --load runs/a": f"{TINY} {DATA} {STEPS} --train-iters 4",
}
"""Trainings -> the flags that make them small; they win over those before them."""

OTHER_NUMBERS: Mapping[str, str] = {
    "--vocab-size 32000": "--vocab-size 300",
    "iter_0000100": "iter_0000002",
    "iter_0000050": "iter_0000002",
    "--bytes 4GB --seconds 20": "--bytes 64MiB --seconds 1",
}
"""Words of a page -> words that are run instead, because the data are twenty small texts and the runs are short."""


def elsewhere(line: str) -> str | None:
    """The test that runs a command, where it is none of those here."""
    return next((test for pattern, test in ELSEWHERE.items() if re.match(pattern, line)), None)


def training(line: str) -> tuple[int, list[str]] | None:
    """(ranks, flags shrunk) of a training; None for a command that is none, or starts nothing."""
    words = shlex.split(line)
    if not re.match(r"(torchrun .*(pretrain_gpt[.]py|megazero pretrain)|megazero pretrain) ", line):
        return None
    if {"--validate-only", "--print-config", "--help"} & {*words}:
        return None
    ranks = 1
    for count in ("--nproc-per-node", "--ranks"):
        if count in words:
            at = words.index(count)
            ranks, words = int(words[at + 1]), words[:at] + words[at + 2 :]
    first = words.index("pretrain_gpt.py" if "pretrain_gpt.py" in words else "pretrain")
    more = next(flags for pattern, flags in SHRUNK.items() if re.match(pattern, line))
    return ranks, [*words[first + 1 :], *more.split()]


def program(line: str) -> list[str] | None:
    """The words behind `megazero` of a command that runs in this process."""
    words = shlex.split(line)
    return words[1:] if words[0] == "megazero" else None


def shrunk_numbers(line: str) -> str:
    for written, run in OTHER_NUMBERS.items():
        line = line.replace(written, run)
    return line
