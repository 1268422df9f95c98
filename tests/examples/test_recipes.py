"""Run scripts: their syntax, the command they start, and that this command is valid on the ranks it starts."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from megazero.config.flags import read_command_line
from megazero.config.inventory import parameters_per_layer
from megazero.config.options import run_options
from megazero.config.parse import parse_run
from megazero.config.presets import presets
from megazero.config.schema import Run
from megazero.pipeline.partition import partition
from tests.e2e.command import wait_until
from tests.parity.training import job_on_rank
from tests.ranks import run_ranks

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
    "--tp 1 --pp 1 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 1000 "
    "--precision fp32 --micro-batch-size 1 --global-batch-size 4 --rampup-batch-size none --train-iters 3"
)


def stub(folder: Path, name: str, text: str = STUB) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def start(folder: Path, script: Path, *words: str, **environment: str) -> list[str]:
    """What the script hands to torchrun."""
    stub(folder, "torchrun")
    meet = {"RDZV_ENDPOINT": "node1:29500", "RDZV_ID": "a-job"}
    place = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder), "RECORD": str(folder / "record")}
    subprocess.run(["bash", str(script), *words], cwd=folder, env={**place, **meet, **environment}, check=True)
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
    starts = options["--nnodes"], options["--nproc-per-node"], options["--rdzv-backend"]
    assert starts == (str(nodes), str(gpus), "c10d")
    run = parse_run([*words, "--validate-only", "--world-size", str(ranks(options))], None)
    assert run == parse_run(words, nodes * gpus)
    assert (run.parallel.tp, run.parallel.pp) == (tp, pp)
    for field, value in presets()[name].items():
        assert getattr(getattr(run, run_options()[field].section), field) == value, (
            f"the script departs from the preset in {field}"
        )
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=900" in (tmp_path / "record.env").read_text()
    assert not read_command_line(words).source.problems


@pytest.mark.parametrize("script", RECIPES)
def test_flags_behind_the_script_win(script: str, tmp_path: Path) -> None:
    environment = {"NNODES": "1", "GPUS_PER_NODE": "4", "DATA_PATH": "0.5 a 0.5 b", "SAVE": "here"}
    options, flags = taken_apart(start(tmp_path, EXAMPLES / script, *SHRUNK.split(), **environment))
    assert ranks(options) == 4
    run: Run = parse_run(flags, 4)
    schedule = run.schedule
    assert (schedule.train_iters, schedule.train_samples, run.model.hidden_size, run.parallel.pp) == (3, None, 64, 1)
    assert run.data.data_path == ("0.5", "a", "0.5", "b") and run.checkpoint.save == run.checkpoint.load == "here"


EXTRAS = (
    *("tensorboard", "wandb", "mlflow", "gguf", "sentencepiece", "zstandard", "transformers", "lm_eval", "matplotlib"),
    *("deepspeed", "peft"),
)


def core_only(folder: Path) -> Path:
    """A folder for PYTHONPATH with which no program finds what the extras of the installation bring."""
    (folder / "core").mkdir()
    (folder / "core" / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({EXTRAS})\n")
    return folder / "core"


TINY = (
    "--device cpu --tp 1 --num-layers 2 --hidden-size 48 --num-attention-heads 4 --seq-length 16 --vocab-size 1003 "
    "--micro-batch-size 1 --global-batch-size 4 --rampup-batch-size 2 2 4 --train-iters 3 --eval-iters 0"
)


def tiny(script: str, folder: Path) -> list[str]:
    """Flags that make a recipe small, as two data-parallel ranks or as two stages."""
    return [*TINY.split(), "--pp", str(min(2, RECIPES[script][4])), "--data-cache-path", str(folder / "cache")]


def check_steps(folder: Path) -> None:
    (metrics,) = folder.glob("runs/*/metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [(step["iteration"], step["consumed_samples"]) for step in steps] == [(1, 2), (2, 4), (3, 8)]


def train_on_rank(rank: int, size: int, flags: list[str], folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()):
        patch.chdir(folder)
        job, _ = job_on_rank(rank, size, flags, keep_log=True)
        job.fit()
        job.close()


@pytest.mark.slow
@pytest.mark.sampled(cases=3)
@pytest.mark.parametrize("script", RECIPES)
def test_a_shrunk_recipe_trains(script: str, tmp_path: Path, corpus: Path) -> None:
    """Its own precision, schedule and features on two ranks."""
    environment = {"NNODES": "1", "GPUS_PER_NODE": "2", "DATA_PATH": str(corpus)}
    options, flags = taken_apart(start(tmp_path, EXAMPLES / script, *tiny(script, tmp_path), **environment))
    assert ranks(options) == 2
    run_ranks(2, train_on_rank, 2, flags, str(tmp_path))
    check_steps(tmp_path)


@pytest.mark.slow
def test_a_shrunk_recipe_trains_under_torchrun(tmp_path: Path, corpus: Path) -> None:
    """After a plain install."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    env |= {"NNODES": "1", "GPUS_PER_NODE": "2", "DATA_PATH": str(corpus)}
    env |= {"PYTHONPATH": f"{core_only(tmp_path)}:{EXAMPLES.parent}"}
    words = ["bash", str(EXAMPLES / "bloom/560m.sh"), *tiny("bloom/560m.sh", tmp_path)]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    check_steps(tmp_path)
    assert len(list(tmp_path.glob("runs/*/logs/*/attempt_0/*/stdout.log"))) == 2, "a log per rank"
    assert "iteration" in done.stdout + done.stderr, "the first rank also prints"


def test_the_176b_stages_are_published_ones() -> None:
    counts = parameters_per_layer(parse_run(["--preset", "bloom-176b"], None).model)
    assert partition(counts.blocks, counts.embedding, counts.head + counts.output, 12) == (5, *[6] * 10, 5)


def test_one_node_meets_in_a_file_and_many_have_to_say_where(tmp_path: Path) -> None:
    """torch's store listens on all addresses, and torchrun unpickles what is in it."""
    alone = {"NNODES": "1", "RDZV_ENDPOINT": "", "RDZV_ID": ""}
    first, second = (taken_apart(start(tmp_path, EXAMPLES / "gpt/124m.sh", **alone))[0] for _ in range(2))
    files = [Path(options["--rdzv-endpoint"]) for options in (first, second)]
    assert first["--rdzv-conf"] == "store_type=file" and files[0].is_absolute() and files[0] != files[1]
    assert not any(file.exists() for file in files), "nothing is left"
    assert re.fullmatch("[0-9a-f]{32}", first["--rdzv-id"]) and first["--rdzv-id"] != second["--rdzv-id"]
    if Path("/sys/class/net/lo").exists():
        assert "GLOO_SOCKET_IFNAME=lo\n" in (tmp_path / "record.env").read_text()
    for missing in ("RDZV_ENDPOINT", "RDZV_ID"):
        with pytest.raises(subprocess.CalledProcessError) as failed:
            start(tmp_path, EXAMPLES / "gpt/1.5b.sh", **{missing: ""})
        assert failed.value.returncode == 2


# A launcher of two ranks that end as they are told to, and that says 1 whatever they say, as torchrun does.
RANK = """
import os, signal, sys, time
def told(number, frame):
    open(f"{sys.argv[1]}.told.{sys.argv[2]}", "w").close()
    os._exit(0)
signal.signal(signal.SIGINT, told), signal.signal(signal.SIGTERM, told)
open(f"{sys.argv[1]}.{sys.argv[2]}", "w").close()
time.sleep(60)
sys.exit(1)
"""
TORCHRUN = f"""#!{sys.executable}
import os, subprocess, sys
ranks = [subprocess.Popen([sys.executable, "-c", {RANK!r}, os.environ["RECORD"], str(rank)]) for rank in range(2)]
sys.exit(any([rank.wait() for rank in ranks]))
"""


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_goes_to_the_ranks_and_the_status_is_theirs(kind: signal.Signals, tmp_path: Path) -> None:
    stub(tmp_path, "torchrun", TORCHRUN)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RECORD": str(tmp_path / "record"), "NNODES": "1"}
    process = subprocess.Popen(["bash", str(EXAMPLES / "gpt/124m.sh")], cwd=tmp_path, env=env, start_new_session=True)
    wait_until(lambda: len(list(tmp_path.glob("record.[01]"))) == 2, process)
    process.send_signal(kind)
    assert process.wait(timeout=60) == 0
    assert len(list(tmp_path.glob("record.told.*"))) == 2


def test_the_status_of_a_wrong_configuration_is_the_ranks_own(tmp_path: Path) -> None:
    """torchrun's is 1; the file that it writes says what its rank had."""
    for code, status in ((2, 2), (1, 1), (-9, 1)):
        said = json.dumps({"message": {"errorCode": code}})
        stub(tmp_path, "torchrun", f"""#!/usr/bin/env bash\necho '{said}' >"$TORCHELASTIC_ERROR_FILE"; exit 1\n""")
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NNODES": "1"}
        done = subprocess.run(["bash", str(EXAMPLES / "gpt/124m.sh")], cwd=tmp_path, env=env, check=False)
        assert done.returncode == status


SCONTROL = """#!/usr/bin/env bash
[[ $1 == show ]] && printf "node7\\nnode8\\nnode9\\n" || echo "$@" >>"$RECORD.requeued"
"""
# srun: drop its own options and run what follows, as the second of the nodes.
SRUN = """#!/usr/bin/env bash
printf "%s\n" "$@" > "$RECORD.srun"
while [[ $1 == -* ]]; do [[ $1 == *=* ]] && shift || shift 2; done
SLURM_NODEID=1 exec "$@"
"""
SLURM = {"SLURM_JOB_NUM_NODES": "48", "SLURM_JOB_NODELIST": "node[7-9]"}
SLURM |= {"SLURM_JOB_ID": "123456", "SLURM_GPUS_ON_NODE": "8"}


@pytest.mark.parametrize(
    ("line", "status", "told"),
    [
        ("CHECK=1 examples/bloom/176b.sh --train-iters 1000", 0, "OK: 384 ranks, tp 4 x pp 12 x dp 8"),
        ("CHECK=1 NNODES=2 examples/bloom/560m.sh --tp 2", 0, "OK: "),
        ("CHECK=1 examples/bloom/560m.sh --tp 3", 2, "--tp 3"),
    ],
)
def test_a_recipe_is_checked_without_slurm(line: str, status: int, told: str, tmp_path: Path) -> None:
    stub(tmp_path, "python", f"""#!/usr/bin/env bash\nexec {sys.executable} "$@"\n""")
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(EXAMPLES.parent)}
    words = line.replace("examples/", f"bash {EXAMPLES}/")
    done = subprocess.run(
        ["bash", "-c", words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == status and told in done.stdout + done.stderr, done.stdout + done.stderr
    assert not (tmp_path / "runs").exists(), "nothing was started"


def test_slurm_starts_one_torchrun_per_node(tmp_path: Path) -> None:
    stub(tmp_path, "scontrol", SCONTROL)
    stub(tmp_path, "srun", SRUN)
    environment = SLURM | {"RDZV_ENDPOINT": "", "RDZV_ID": ""}
    words = start(tmp_path, EXAMPLES / "slurm.sh", str(EXAMPLES / "bloom/176b.sh"), "--train-iters", "9", **environment)
    options, flags = taken_apart(words)
    assert ranks(options) == 384
    assert options["--rdzv-endpoint"] == "node7:23456" and re.fullmatch("[0-9a-f]{32}", options["--rdzv-id"])
    assert options["--log-dir"] == "logs/123456/node-1" and options["--redirects"] == "3"
    assert parse_run(flags, 384).schedule.train_iters == 9
    srun = (tmp_path / "record.srun").read_text().splitlines()
    assert "--wait=960" in srun and "--kill-on-bad-exit=0" in srun
    assert not (tmp_path / "record.requeued").exists(), "a run that has finished"


# A step that ends with 0 when it gets TERM, as ranks do; of one that "fails" the status is 1. scancel signals the step
# only.
STEP = """#!/usr/bin/env bash
trap 'exit %s' TERM
echo $$ >"$RECORD.step.new"; mv "$RECORD.step.new" "$RECORD.step"
for _ in {1..600}; do sleep 0.1; done
"""
SCANCEL = """#!/usr/bin/env bash
[[ "$*" == "--signal=TERM 123456" ]] && kill -TERM "$(cat "$RECORD.step")"
"""


@pytest.mark.parametrize(
    ("flags", "restarts", "ends", "status", "requeued"),
    [
        (["--resubmit", "2"], "", 0, 0, True),
        (["--resubmit", "2"], "1", 0, 0, True),
        (["--resubmit", "2"], "2", 0, 0, False),
        ([], "", 0, 0, False),
        (["--resubmit", "2"], "", 1, 1, False),
    ],
    ids=["first", "second", "enough", "not asked", "failed"],
)
def test_slurm_near_its_time_limit_saves_and_goes_back_into_the_queue(
    flags: list[str], restarts: str, ends: int, status: int, requeued: bool, tmp_path: Path
) -> None:
    for name, text in (("scontrol", SCONTROL), ("srun", STEP % ends), ("scancel", SCANCEL)):
        stub(tmp_path, name, text)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RECORD": str(tmp_path / "record"), **SLURM}
    environment |= {"SLURM_RESTART_COUNT": restarts} if restarts else {}
    process = subprocess.Popen(["bash", str(EXAMPLES / "slurm.sh"), *flags, "recipe.sh"], cwd=tmp_path, env=environment)
    wait_until((tmp_path / "record.step").exists, process)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=60) == status, "saved and stopped as asked is not a failure"
    told = tmp_path / "record.requeued"
    assert (told.read_text() if told.exists() else "") == ("requeue 123456\n" if requeued else "")


def test_slurm_signals_before_its_time_limit_and_leaves_time_to_save() -> None:
    text = (EXAMPLES / "slurm.sh").read_text()
    warning = int(text.split("--signal=B:USR1@")[1].split()[0])
    shutdown = int((EXAMPLES / "launch.sh").read_text().split("TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-")[1].split("}")[0])
    assert "#SBATCH --time=" in text and warning > shutdown + 60


def test_slurm_without_a_recipe_says_how(tmp_path: Path) -> None:
    for words in ([], ["--resubmit", "3"], ["--resubmit", "often", "recipe.sh"]):
        result = subprocess.run(["bash", str(EXAMPLES / "slurm.sh"), *words], capture_output=True, text=True)
        assert result.returncode == 2 and "usage" in result.stderr
