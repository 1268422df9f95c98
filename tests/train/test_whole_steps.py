"""Swap files as a checkpoint (--nvme-checkpoint): a run goes on from the last step that is whole on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from torch import nn

from megazero.config.parse import ConfigError
from megazero.program.instruction import Instruction, Piece
from megazero.zero.mover import Mover
from tests.parameters import values_of
from tests.parity.training import data_flags, job_on_rank, small_model
from tests.parity.ways import FP16, UNTIED, spoil
from tests.ranks import run_ranks
from tests.train.told import Evaluations, Told, digest

STEPS = 6
BATCH = ["--micro-batch-size", "1", "--global-batch-size", "8", "--lr", "1e-3", "--eval-iters", "1"]
SMALL = ["--nvme-buffer-bytes", "450KB"]
LARGE, BUCKETS = ["--nvme-buffer-bytes", "4MB"], "--bucket-size 25000"
"""Two pieces, each of more than the 64 KiB in which folders share them."""


class Case(NamedTuple):
    """A layout, the step that a run does not survive, steps in which a gradient is infinite, and what goes to disks."""

    ranks: int
    words: str
    dies: int
    infinite: tuple[int, ...] = ()
    offload: str = "nvme"


CASES = {
    "one rank": Case(1, "--precision bf16", 4),
    "one rank, fp64, late": Case(1, "--precision fp64 --late-update", 4),
    "one rank, fp32, sgd": Case(1, "--precision fp32 --optimizer sgd --sgd-momentum 0.9", 3),
    "ZeRO-0": Case(2, "--precision bf16 --hidden-dropout 0.1", 3),
    "one rank, a share": Case(1, "--precision bf16", 4, (), "nvme:0.5"),
    "ZeRO-1, a share, late": Case(2, f"--zero-stage 1 {FP16} --late-update", 5, (2,), "nvme:0.3"),
    "ZeRO-3, a share, stages": Case(4, "--pp 2 --zero-stage 3 --precision bf16", 4, (), "nvme:0.7"),
    "ZeRO-1, tied over two stages": Case(4, f"--pp 2 --zero-stage 1 {FP16} --late-update", 4, (1, 3)),
    "ZeRO-1 in sets": Case(4, "--zero-stage 1 --zero-shard-size 2 --precision bf16", 2),
    "ZeRO-1, int8 weights": Case(2, "--zero-stage 1 --zero-quantized-weights --precision fp32", 3),
    "ZeRO-2, zb-h1, untied": Case(4, f"--pp 2 --zero-stage 2 --pipeline-schedule zb-h1 {UNTIED} {FP16}", 5, (2,)),
    "one rank, early": Case(1, "--precision bf16 --early-update --clip-grad 0", 4),
    "ZeRO-1, early, a share": Case(2, f"--zero-stage 1 {FP16} --early-update --clip-grad 1.5", 5, (3,), "nvme:0.5"),
    "ZeRO-3, tp, early": Case(4, "--tp 2 --zero-stage 3 --precision bf16 --early-update --clip-grad 0", 3),
    "ZeRO-3, tp, late": Case(4, "--tp 2 --sequence-parallel --zero-stage 3 --precision bf16 --late-update", 5),
}


def flags_of(corpus: Path, tmp_path: Path, words: str) -> list[str]:
    numbers = ["--train-iters", str(STEPS), "--clip-grad", "0.3", "--eval-interval", "3"]
    return [*small_model(3, heads=6), *BATCH, *numbers, *data_flags(corpus, tmp_path / "cache"), *words.split()]


def whole(*folders: Path, offload: str = "nvme") -> list[str]:
    """Flags for steps that become whole in these folders."""
    paths = map(str, folders)
    return ["--offload-optimizer", offload, "--nvme-path", *paths, "--nvme-checkpoint", *SMALL]


class Died(Exception):
    """A run that ends in the middle of a step."""


class Bits(NamedTuple):
    """What a run tells on a rank, and what it leaves."""

    begins: int
    told: list[Told]
    weights: list[str]
    steps: float


def bits_on_rank(rank: int, size: int, flags: list[str], infinite: set[int], dies: int = 0) -> Bits:
    """dies: the step in which the run ends, when two parts have been written."""
    job, _ = job_on_rank(rank, size, flags)
    begins, told = job.trainer.position.iteration, Evaluations()
    job.trainer.log._sinks = (told,)
    if rank == size - 1:
        spoil(job, frozenset(infinite))
    with pytest.MonkeyPatch.context() as patch:
        if dies:
            write, at, made = Mover.write, job.trainer, [0]

            def written(mover: Mover, i: Instruction, piece: Piece) -> None:
                write(mover, i, piece)
                made[0] += at.position.iteration == dies - 1
                if made[0] == 2:
                    raise Died

            patch.setattr(Mover, "write", written)
            with pytest.raises(Died):
                job.fit()
            job.close()
            return Bits(begins, told.told, [], 0.0)
        job.fit()
    with job.state.model.reading():
        weights = digest(piece.values for piece in values_of(nn.ModuleList(job.stages)))
    job.close()
    return Bits(begins, told.told, weights, float(job.state.optimizer.step_count))


def run(ranks: int, flags: list[str], infinite: set[int], dies: int = 0) -> list[Bits]:
    found: list[Bits] = run_ranks(ranks, bits_on_rank, ranks, flags, infinite, dies)
    return found


@pytest.mark.slow
@pytest.mark.sampled(cases=4)
@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_from_its_swap_files(name: str, corpus: Path, tmp_path: Path) -> None:
    """Every bit is that of a run that was not disturbed, and the folder is empty at the end."""
    ranks, words, dies, infinite, offload = CASES[name]
    disks = tmp_path / "disks"
    disks.mkdir()
    flags = [*flags_of(corpus, tmp_path, words), *whole(disks, offload=offload)]
    straight = run(ranks, flags, {*infinite})
    assert list(disks.iterdir()) == []
    last = dies - 1 - ("--late-update" in words)
    died = run(ranks, flags, {*infinite}, dies)
    assert len(list(disks.glob("megazero-swap-checkpoint-*.json"))) == ranks
    again = run(ranks, flags, {*infinite})
    for own, first, then in zip(straight, died, again, strict=True):
        assert (own.begins, first.begins, then.begins) == (0, 0, last)
        assert then.told == [told for told in own.told if told.iteration > last]
        assert (then.weights, then.steps) == (own.weights, own.steps)
    assert list(disks.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [([], ["--early-update"]), (["--early-update"], [])])
def test_another_number_of_slots_is_named(first: list[str], then: list[str], corpus: Path, tmp_path: Path) -> None:
    """The files stay, and the command of before goes on from them."""
    flags = [*flags_of(corpus, tmp_path, "--precision bf16 --clip-grad 0"), *whole(tmp_path)]
    run(1, [*flags, *first], set(), 4)
    switch = "off -> on" if then else "on -> off"
    with pytest.raises(RuntimeError, match=rf"iteration 3 of a run with another layout \(early-update {switch}\)"):
        run(1, [*flags, *then], set())
    (again,) = run(1, [*flags, *first], set())
    assert again.begins == 3


@pytest.fixture(scope="module")
def on_the_device(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Bits]:
    """A run on two ranks whose state never leaves the device."""
    return run(2, flags_of(corpus, tmp_path_factory.mktemp("device"), f"--precision bf16 {BUCKETS}"), set())


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--nvme-checkpoint"]])
def test_two_folders_share_a_run(more: list[str], on_the_device: list[Bits], corpus: Path, tmp_path: Path) -> None:
    """Bit for bit that of a run whose state is all on the device. Both folders have a file, and none at the end."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    flags = flags_of(corpus, tmp_path, f"--precision bf16 {BUCKETS}")
    disks = ["--offload-optimizer", "nvme", "--nvme-path", *map(str, folders), *LARGE, *more]
    assert run(2, [*flags, *disks], set()) == on_the_device
    assert [list(folder.iterdir()) for folder in folders] == [[], []]
    sizes = run_ranks(2, sizes_on_rank, 2, [*flags, *disks])
    assert all(first > second > 4096 for first, second in sizes), "a header, and something of every piece"


def sizes_on_rank(rank: int, size: int, flags: list[str]) -> list[int]:
    """Bytes of this rank's files, in folders of known speeds: a busy machine may measure one that has no piece."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megazero.disk.opening.weights_of", lambda *_: (2.0, 1.0))
        job, _ = job_on_rank(rank, size, flags)
    assert job.state.model.tiers.swap is not None
    sizes = [path.stat().st_size for path in job.state.model.tiers.swap.paths]
    job.close()
    return sizes


@pytest.mark.slow
def test_a_run_in_two_folders_goes_on(corpus: Path, tmp_path: Path) -> None:
    """Whatever the folders' speed is now: the files keep the shares with which they were made."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    flags = [*flags_of(corpus, tmp_path, f"--precision bf16 {BUCKETS}"), *whole(*folders), *LARGE]
    (straight,) = run(1, flags, set())
    run(1, flags, set(), 4)
    assert sorted(path.suffix for folder in folders for path in folder.iterdir()) == [".bin", ".bin", ".json"]
    (again,) = run(1, flags, set())
    assert again.begins == 3 and again.weights == straight.weights
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


@pytest.fixture(scope="module")
def bases(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints, base and other."""
    folder = tmp_path_factory.mktemp("bases")
    for name, seed in (("base", "1"), ("other", "2")):
        saves = ["--save", str(folder / name), "--exit-interval", "1", "--seed", seed]
        run(1, [*flags_of(corpus, folder, "--precision bf16"), *saves], set())
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("bits", [[], ["--lora-base-bits", "4"]])
def test_adapters_go_on_beside_weights_that_are_frozen(
    bits: list[str], bases: Path, corpus: Path, tmp_path: Path
) -> None:
    """The frozen weights come from --init-from again; another one of these is said."""
    disks = tmp_path / "disks"
    disks.mkdir()
    more = f"--precision bf16 --zero-stage 3 --lora-rank 32 --init-from {bases / 'base'} --lr 1e-2"
    flags = [*flags_of(corpus, tmp_path, more), *bits, *whole(disks)]
    straight = run(2, flags, set())
    assert [found.begins for found in run(2, flags, set(), 4)] == [0, 0]
    other = run_ranks(2, problem_on_rank, 2, [*flags, "--init-from", str(bases / "other")])
    assert all("other settings (init-from " in said for said in other), other
    for own, then in zip(straight, run(2, flags, set()), strict=True):
        assert then.begins == 3 and then.weights == own.weights
        assert then.told == [told for told in own.told if told.iteration > 3]
    assert list(disks.iterdir()) == []


def problem_on_rank(rank: int, size: int, flags: list[str]) -> str:
    """What a job says that cannot begin."""
    with pytest.raises(ConfigError) as raised:
        job_on_rank(rank, size, flags)
    return str(raised.value)


@pytest.mark.few(cases=1)
@pytest.mark.parametrize("words", ["none", "cpu:0.5", "none --offload-params nvme --zero-stage 3"])
def test_a_file_may_ask_for_whole_steps_where_no_optimizer_state_is_on_disks(
    words: str, corpus: Path, tmp_path: Path
) -> None:
    """As `run.yaml` of a run with --nvme-checkpoint does, beside other flags. The run is the same without."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "run.yaml").write_text(f"nvme_checkpoint: true\nnvme_path: [{tmp_path / 'disk'}]\n")
    slots = SMALL if words != "none" else []
    flags = [*flags_of(corpus, tmp_path, "--precision bf16"), *slots, "--offload-optimizer", *words.split()]
    more = ["--nvme-path", str(tmp_path / "disk")] if "nvme" in words else []
    assert run(2, ["--config", str(tmp_path / "run.yaml"), *flags], set()) == run(2, [*flags, *more], set())
    assert not list((tmp_path / "disk").iterdir())
