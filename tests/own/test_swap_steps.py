"""A user's model whose steps become whole on disks: a run that is killed in a step goes on from the one before."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megazero
from megazero.config.source import ConfigError
from megazero.disk.swap_file import DiskError
from megazero.zero.mover import Mover
from tests.e2e.command import ROOT, environment
from tests.own.models import CASES, Trained, plainly_trained, squared
from tests.own.test_training import Rows, settings
from tests.own.training import model_of, require_equal

NAME, DIES = "vision", 6
LAYOUTS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "sharded": (2, {"zero_stage": 1}),
    "stages, late": (2, {"pp": 2, "zero_stage": 3, "late_update": True, "offload_optimizer": "nvme:0.6"}),
}


class Died(Exception):
    """A run that ends in the middle of a step."""


def run_on_disks(folder: str, layout: Mapping[str, Any]) -> dict[str, Any]:
    disks = {"offload_optimizer": "nvme", "nvme_path": [folder], "nvme_checkpoint": True, "nvme_buffer_bytes": 300_000}
    return {**settings(CASES[NAME], disks), **layout, "bucket_size": 300}


def trained_until(folder: str, layout: Mapping[str, Any], dies: int) -> tuple[int, Trained | None]:
    """(the step from which a run begins, what it makes). dies: the step in which it ends, behind a write; 0: none."""
    case, numbers, write = CASES[NAME], list[tuple[float, float]](), Mover.write
    run, held_out = run_on_disks(folder, layout), Rows(case, case.steps, 1)
    with pytest.MonkeyPatch.context() as patch:
        try:
            with megazero.training(model=model_of(case), data=Rows(case), valid_data=held_out, run=run) as training:
                begins = training.engine.steps

                def written(mover: Mover, *what: Any) -> None:
                    write(mover, *what)
                    if begins + len(numbers) == dies - 1:
                        raise Died

                patch.setattr(Mover, "write", written)
                for step in training.steps():
                    numbers.append((float(step.loss), float(step.grad_norm)))
                values = training.engine.state_dict()
        except Died:
            return begins, None
    return begins, Trained(numbers, training.result.evaluations["valid_loss"], values)


plain = cache(plainly_trained)


@pytest.mark.parametrize("late", [False, True])
def test_a_run_that_dies_in_a_step_goes_on_from_the_one_before(late: bool, tmp_path: Path) -> None:
    """Twice; losses, norms, the evaluation and the weights are those of plain torch."""
    layout = {"late_update": True, "zero_stage": 3, "offload_params": "nvme"} if late else {}
    begun = 0
    for dies in (DIES - 3, DIES):
        assert trained_until(str(tmp_path), layout, dies) == (begun, None)
        begun = dies - 1 - late
        assert len([*tmp_path.glob("megazero-swap-checkpoint-*.json")]) == 1
    begins, made = trained_until(str(tmp_path), layout, 0)
    assert begins == begun and made is not None
    require_equal(made, plain(CASES[NAME]), f"late: {late}", since=begun)
    assert not any(tmp_path.iterdir()), "a run that has ended needs no files"


PROGRAM = """
import json, os, signal, sys
from megazero.zero.mover import Mover
import megazero
from tests.own.models import CASES
from tests.own.test_swap_steps import NAME, run_on_disks
from tests.own.test_training import Rows
from tests.own.training import model_of

folder, dies, layout = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
case, write, made = CASES[NAME], Mover.write, [-1]

def written(mover, *what):
    write(mover, *what)
    if made[0] == dies - 1 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)

Mover.write = written
with megazero.training(model=model_of(case), data=Rows(case), run=run_on_disks(folder, layout)) as training:
    made[0] = training.engine.steps
    if training.rank == 0:
        print("begins", training.engine.steps, flush=True)
    for step in training.steps():
        made[0] = step.iteration
        if training.rank == 0:
            print("step", step.iteration, float(step.loss), flush=True)
"""


@pytest.mark.parametrize("name", LAYOUTS)
def test_kill_9_of_a_rank_in_a_step(name: str, tmp_path: Path) -> None:
    """With the processes everything goes but the files: each step is that of plain torch, on whichever attempt."""
    ranks, layout = LAYOUTS[name]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "disks").mkdir()
    right, begins = [loss for loss, _ in plain(CASES[NAME]).numbers], list[int]()
    for dies in (4, 7, 0):
        command = [*launch, str(tmp_path / "program.py"), str(tmp_path / "disks"), str(dies), json.dumps(layout)]
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
        assert ("SIGKILL" in done.stderr) == (done.returncode != 0) == bool(dies), done.stderr
        lines = [line.split() for line in done.stdout.splitlines() if line.strip()]
        begins += [int(words[1]) for words in lines if words[0] == "begins"]
        for _, step, loss in (words for words in lines if words[0] == "step"):
            assert float(loss) == pytest.approx(right[int(step) - 1], rel=1e-10), step
    assert begins[0] == 0 and begins[1] in (2, 3) and begins[2] in (5, 6)
    assert lines[-2][:2] == ["step", "10"] or lines[-1][:2] == ["step", "10"]
    assert not any((tmp_path / "disks").iterdir())


def test_a_run_goes_on_from_files_of_its_own_alone(tmp_path: Path) -> None:
    case, run = CASES[NAME], run_on_disks(str(tmp_path), {})
    assert trained_until(str(tmp_path), {}, 4) == (0, None)
    others: dict[str, tuple[dict[str, Any], str]] = {
        "another model": ({"model": model_of(CASES["convolutional"])}, "a run with another model"),
        "other settings": ({"run": {**run, "weight_decay": 0.3}}, r"other settings \(weight_decay 0.1 -> 0.3\)"),
        "other samples": ({"data": Rows(case, 1)}, r"other settings \(other samples\)"),
    }
    for arguments, message in others.values():
        given = {"model": model_of(case), "data": Rows(case), "run": run, **arguments}
        with pytest.raises((ConfigError, DiskError), match=message), megazero.training(**given):
            pass
    assert trained_until(str(tmp_path), {}, 0)[0] == 3, "nothing of them was lost"


def test_a_unit_that_changes_a_buffer_is_refused(tmp_path: Path) -> None:
    """A step on disks would not have it."""
    torch.manual_seed(1)
    units = [nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)]
    model = megazero.Model([unit.double() for unit in units], squared, input="x")
    case = CASES["mlp"]
    run = {**run_on_disks(str(tmp_path), {}), **settings(case, {})}
    with (
        pytest.raises(ValueError, match=r"unit '1' changes its buffer .*: .*steps on disks"),
        megazero.training(model=model, data=Rows(case), run=run) as training,
    ):
        next(training.steps())


def test_without_optimizer_state_on_disks_there_are_no_steps(tmp_path: Path) -> None:
    case = CASES["mlp"]
    with (
        pytest.raises(ConfigError, match="nvme_checkpoint needs offload_optimizer nvme"),
        megazero.training(model=model_of(case), data=Rows(case), run=settings(case, {"nvme_checkpoint": True})),
    ):
        pass


def with_frozen(value: float) -> megazero.Model:
    """A model with a frozen layer, whose values are the program's own."""
    units = CASES["mlp"].built()
    for parameter in units[2].parameters():
        parameter.requires_grad_(False)
        torch.nn.init.constant_(parameter, value)
    return megazero.Model(units, squared)


def losses_of(value: float, run: dict[str, Any], dies: int = 0) -> dict[int, float]:
    case, losses = CASES["mlp"], dict[int, float]()
    try:
        with megazero.training(model=with_frozen(value), data=Rows(case), run=run) as training:
            for step in training.steps():
                losses[step.iteration] = float(step.loss)
                if step.iteration == dies:
                    raise Died
    except Died:
        pass
    return losses


def test_frozen_parameters_are_those_of_the_checkpoint_or_of_the_same_program(tmp_path: Path) -> None:
    """A step on disks has what is trained alone."""
    disks = {"offload_optimizer": "nvme", "nvme_path": [str(tmp_path / "disks")], "nvme_checkpoint": True}
    run = settings(CASES["mlp"], {"precision": "fp64"})
    (tmp_path / "disks").mkdir()
    losses_of(0.3, {**run, "save": tmp_path / "base", "exit_interval": 2})
    begun = {**run, "load": tmp_path / "base"}
    undisturbed = losses_of(0.1, begun)
    before, behind = losses_of(0.1, {**begun, **disks}, dies=5), losses_of(0.1, {**begun, **disks})
    assert [*before] == [3, 4, 5] and min(behind) > 3 and before | behind == undisturbed
    losses_of(0.1, {**run, **disks}, dies=3)
    with pytest.raises((ConfigError, DiskError), match="other values of what is not trained"):
        losses_of(0.2, {**run, **disks})


def test_a_run_with_checkpoints_of_its_own_goes_on_from_later_swap_files(tmp_path: Path) -> None:
    """The first attempt has begun without one, and the second finds one that is earlier than the step on disks."""
    disks = {"offload_optimizer": "nvme", "nvme_path": [str(tmp_path / "disks")], "nvme_checkpoint": True}
    run = {**settings(CASES["mlp"], disks), "save": tmp_path / "run", "load": tmp_path / "run", "save_interval": 3}
    (tmp_path / "disks").mkdir()
    undisturbed = losses_of(0.1, settings(CASES["mlp"], {}))
    made = [losses_of(0.1, run, dies=dies) for dies in (5, 8, 0)]
    begun = [min(losses) for losses in made]  # the last step of an attempt may have become whole, or not
    assert begun[0] == 1 and begun[1] in (5, 6) and begun[2] in (8, 9)
    assert made[0] | made[1] | made[2] == undisturbed
    assert not any((tmp_path / "disks").iterdir())


def test_another_optimizer_of_torch_does_not_go_on(tmp_path: Path) -> None:
    case = CASES["mlp"]
    given = {name: value for name, value in settings(case, {}).items() if not name.startswith(("adam", "weight"))}
    disks = {"offload_optimizer": "nvme", "nvme_path": [str(tmp_path)], "nvme_checkpoint": True}
    momentum = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    for optimizer in (momentum, functools.partial(torch.optim.RMSprop, lr=0.01)):
        whole = megazero.training(model=model_of(case), data=Rows(case), optimizer=optimizer, run={**given, **disks})
        with pytest.raises(Died if optimizer is momentum else (ConfigError, DiskError)) as raised, whole as training:
            next(steps := training.steps())
            next(steps)
            raise Died
    assert "another optimizer (SGD(" in str(raised.value) and "-> RMSprop(" in str(raised.value)
