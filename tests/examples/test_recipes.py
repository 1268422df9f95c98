"""Run scripts: their syntax, the command they start, and that this command is valid on the ranks it starts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megazero.config.flags import read_command_line
from megazero.config.options import run_options
from megazero.config.parse import parse_run
from megazero.config.presets import presets
from megazero.config.schema import Run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# preset, nodes, GPUs per node, tp, pp
RECIPES = {
    "bloom/560m.sh": ("bloom-560m", 8, 4, 1, 1),
    "bloom/1b1.sh": ("bloom-1b1", 8, 4, 1, 2),
    "bloom/1b7.sh": ("bloom-1b7", 16, 4, 2, 2),
    "bloom/3b.sh": ("bloom-3b", 32, 4, 4, 4),
    "bloom/7b1.sh": ("bloom-7b1", 32, 4, 4, 4),
    "bloom/176b.sh": ("bloom-176b", 48, 8, 4, 12),
    "gpt/124m.sh": ("gpt2-124m", 1, 8, 1, 1),
    "gpt/1.5b.sh": ("gpt2-1.5b", 4, 8, 1, 1),
    "gpt/175b.sh": ("gpt3-175b", 128, 8, 8, 16),
}
STUB = '#!/usr/bin/env bash\nprintf "%s\\n" "$@" > "$RECORD"\nenv > "$RECORD.env"\n'
SHRUNK = (
    "--tp 1 --pp 1 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 1000 --precision fp32 "
    "--micro-batch-size 1 --global-batch-size 4 --rampup-batch-size none --train-iters 3"
)


def stub(folder: Path, name: str, text: str = STUB) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def start(folder: Path, script: Path, *words: str, **environment: str) -> list[str]:
    """What the script hands to torchrun."""
    stub(folder, "torchrun")
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder), "RECORD": str(folder / "record"), **environment}
    subprocess.run(["bash", str(script), *words], cwd=folder, env=env, check=True)
    return (folder / "record").read_text().splitlines()


def taken_apart(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """(torchrun's own options, flags of the run)."""
    at = next(i for i, word in enumerate(words) if word.endswith("pretrain_gpt.py"))
    return dict(zip(words[:at:2], words[1:at:2], strict=True)), words[at + 1 :]


def ranks(options: dict[str, str]) -> int:
    return int(options["--nnodes"]) * int(options["--nproc-per-node"])


def test_all_scripts_are_tested() -> None:
    assert {str(p.relative_to(EXAMPLES)) for p in EXAMPLES.glob("*/*.sh")} == set(RECIPES)


@pytest.mark.parametrize("script", sorted(str(p.relative_to(EXAMPLES)) for p in EXAMPLES.glob("**/*.sh")))
def test_syntax(script: str) -> None:
    subprocess.run(["bash", "-n", str(EXAMPLES / script)], check=True)


@pytest.mark.parametrize("script", RECIPES)
def test_a_recipe_is_valid_on_its_ranks_and_is_its_preset(script: str, tmp_path: Path) -> None:
    name, nodes, gpus, tp, pp = RECIPES[script]
    options, words = taken_apart(start(tmp_path, EXAMPLES / script))
    assert (options["--nnodes"], options["--nproc-per-node"], options["--rdzv-backend"]) == (str(nodes), str(gpus), "c10d")
    run = parse_run([*words, "--validate-only", "--world-size", str(ranks(options))], None)
    assert run == parse_run(words, nodes * gpus)
    assert (run.parallel.tp, run.parallel.pp) == (tp, pp)
    for field, value in presets()[name].items():
        assert getattr(getattr(run, run_options()[field].section), field) == value, f"the script departs from the preset in {field}"
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=900" in (tmp_path / "record.env").read_text()
    assert not read_command_line(words).level.problems


@pytest.mark.parametrize("script", RECIPES)
def test_flags_behind_the_script_win(script: str, tmp_path: Path) -> None:
    words = start(tmp_path, EXAMPLES / script, *SHRUNK.split(), NNODES="1", GPUS_PER_NODE="4", DATA_PATH="0.5 a 0.5 b", SAVE="here")
    options, flags = taken_apart(words)
    assert ranks(options) == 4
    run: Run = parse_run(flags, 4)
    assert (run.schedule.train_iters, run.schedule.train_samples, run.model.hidden_size, run.parallel.pp) == (3, None, 64, 1)
    assert run.data.data_path == ("0.5", "a", "0.5", "b") and run.checkpoint.save == run.checkpoint.load == "here"


@pytest.mark.slow
@pytest.mark.parametrize("script", RECIPES)
def test_a_shrunk_recipe_trains(script: str, tmp_path: Path, corpus: Path) -> None:
    """Its own precision, schedule and features on two ranks of this machine, as data-parallel ranks or as stages."""
    stages = "2" if RECIPES[script][4] > 1 else "1"
    words = f"--device cpu --tp 1 --pp {stages} --num-layers 2 --hidden-size 48 --num-attention-heads 4 --seq-length 16 --vocab-size 1003"
    words += " --micro-batch-size 1 --global-batch-size 4 --rampup-batch-size 2 2 4 --train-iters 3 --eval-iters 0"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "NNODES": "1",
        "GPUS_PER_NODE": "2",
        "RDZV_ENDPOINT": f"localhost:{port}",
        "DATA_PATH": str(corpus),
    }
    flags = [*words.split(), "--data-cache-path", str(tmp_path / "cache")]
    done = subprocess.run(["bash", str(EXAMPLES / script), *flags], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (metrics,) = tmp_path.glob("runs/*/metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [(step["iteration"], step["consumed_samples"]) for step in steps] == [(1, 2), (2, 4), (3, 8)]
    assert len(list(tmp_path.glob("runs/*/logs/*/attempt_0/*/stdout.log"))) == 2, "a log per rank"
    assert "iteration" in done.stdout + done.stderr, "the first rank also prints"


def test_the_176b_stages_are_published_ones() -> None:
    partition = pytest.importorskip("megazero.pipeline.partition").partition
    counts = pytest.importorskip("megazero.model.count").parameters_per_layer(parse_run(["--preset", "bloom-176b"], None).model)
    assert partition([counts.block] * 70, counts.embedding, counts.head + counts.output, 12) == (5, *[6] * 10, 5)


def test_slurm_starts_one_torchrun_per_node(tmp_path: Path) -> None:
    stub(tmp_path, "scontrol", '#!/usr/bin/env bash\nprintf "node7\\nnode8\\nnode9\\n"\n')
    # srun: drop its own options and run what follows, as the second of the nodes.
    stub(
        tmp_path,
        "srun",
        '#!/usr/bin/env bash\nprintf "%s\\n" "$@" > "$RECORD.srun"\nwhile [[ $1 == -* ]]; do [[ $1 == *=* ]] && shift || shift 2; done\nSLURM_NODEID=1 "$@"\n',
    )
    slurm = {"SLURM_JOB_NUM_NODES": "48", "SLURM_JOB_NODELIST": "node[7-9]", "SLURM_JOB_ID": "123456", "SLURM_GPUS_ON_NODE": "8"}
    words = start(tmp_path, EXAMPLES / "slurm.sh", str(EXAMPLES / "bloom/176b.sh"), "--train-iters", "9", **slurm)
    options, flags = taken_apart(words)
    assert ranks(options) == 384
    assert (options["--rdzv-endpoint"], options["--rdzv-id"]) == ("node7:23456", "123456")
    assert options["--log-dir"] == "logs/123456/node-1" and options["--redirects"] == "3"
    assert parse_run(flags, 384).schedule.train_iters == 9
    srun = (tmp_path / "record.srun").read_text().splitlines()
    assert "--wait=960" in srun and "--kill-on-bad-exit=0" in srun


def test_slurm_signals_before_its_time_limit_and_leaves_time_to_save() -> None:
    text = (EXAMPLES / "slurm.sh").read_text()
    warning = int(text.split("--signal=TERM@")[1].split()[0])
    shutdown = int((EXAMPLES / "launch.sh").read_text().split("TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-")[1].split("}")[0])
    assert "#SBATCH --time=" in text and warning > shutdown + 60


def test_slurm_without_a_recipe_says_how(tmp_path: Path) -> None:
    result = subprocess.run(["bash", str(EXAMPLES / "slurm.sh")], capture_output=True, text=True)
    assert result.returncode == 2 and "usage" in result.stderr
