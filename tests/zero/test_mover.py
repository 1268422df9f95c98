"""Parts of buckets on their way between tiers: slots, what waits for what, and gradients that disks have damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import current_thread

import pytest

from megazero.disk.swap_file import SwapDamaged
from megazero.program.instruction import Instruction, Op, Piece
from megazero.program.passes.slots import tenant_of
from megazero.zero.memories import PartSlot
from tests.parity.training import data_flags, job_on_rank, small_model
from tests.program import kinds
from tests.ranks import run_ranks

WORDS = "--micro-batch-size 1 --global-batch-size 8 --train-iters 6 --precision bf16 --micro-batch-order horizontal"
SMALL = "--nvme-buffer-bytes 300KB"
"""Parts of 1024 to 5120 elements."""


def flags_of(words: str, corpus: Path, cache: Path) -> list[str]:
    return [*small_model(3, heads=6), *WORDS.split(), *data_flags(corpus, cache), *words.split()]


def parts_on_rank(rank: int, size: int, flags: list[str]) -> tuple[list[int], int, list[int], int]:
    """For each bucket its number of parts; how many slots there are, and in which order parts have taken them; bytes
    written.
    """
    job, _ = job_on_rank(rank, size, flags)
    model, ring, taken = job.state.model, job.state.model.mover.update_slots, list[int]()
    take = ring.slot_of

    def watched(i: Instruction) -> PartSlot:
        taken.extend([i.slot] * (tenant_of(i) not in ring.under_way))
        return take(i)

    ring.slot_of = watched  # type: ignore[method-assign]
    job.fit()
    job.close()
    return [len(rests.parts) for rests in model.resting], len(ring.slots), taken, model.tiers.disks.bytes_written


@pytest.mark.slow
def test_the_slots_are_taken_in_turn_and_every_part_is_written(corpus: Path, tmp_path: Path) -> None:
    flags = flags_of(f"--offload-optimizer nvme --nvme-path {tmp_path} {SMALL}", corpus, tmp_path)
    ((parts, slots, taken, written),) = run_ranks(1, parts_on_rank, 1, flags)
    assert min(parts) > slots == 12 and taken == 6 * [turn % slots for turn in range(sum(parts))]
    elements = 12 * 1024 * (sum(parts) - len(parts))
    assert written > (1 + 6) * elements  # once when weights are made, and in every step


def test_the_program_goes_on_while_parameters_are_updated_and_loaded(corpus: Path, tmp_path: Path) -> None:
    """What a load waits for is waited for on its lane; the program waits where it reads them."""
    job, _ = job_on_rank(0, 1, flags_of("--offload-params cpu", corpus, tmp_path))
    model, waiting = job.state.model, list[str]()
    model.mover._updated[1].append(lambda: waiting.append(current_thread().name))
    for kind in (kinds.LOAD, Op.GATHER):
        model.actions.by_kind[kind](Instruction(kind, buckets=(1,)))
    model.actions.ready([0])
    assert current_thread().name not in waiting
    model.actions.ready([1])
    assert waiting[0].startswith("to-device") and 1 not in model.mover._updated
    model.actions.by_kind[kinds.RELEASE](Instruction(kinds.RELEASE, buckets=(1,)))
    job.close()


def test_a_sum_is_stored_over_the_one_before_when_its_update_has_read_that(corpus: Path, tmp_path: Path) -> None:
    """The lane that copies gradients to the host waits for the updates of the step before, not the program. With one
    micro-batch nothing passes through slots, whose last parts are waited for as well.
    """
    words = "--offload-gradients cpu --offload-optimizer cpu --global-batch-size 1"
    job, _ = job_on_rank(0, 1, flags_of(words, corpus, tmp_path))
    mover, waiting = job.state.model.mover, list[str]()
    updating = mover.updating

    def watched(i: Instruction, changed: Callable[[], bool]) -> None:
        def named() -> bool:
            waiting.append(current_thread().name)
            return changed()

        updating(i, named)

    mover.updating = watched  # type: ignore[method-assign]
    job.trainer.train_step(stop=False)
    assert not any(name.startswith("to-host") for name in waiting)
    job.trainer.train_step(stop=False)
    assert any(name.startswith("to-host") for name in waiting)
    job.close()


def test_a_slot_is_not_taken_twice(corpus: Path, tmp_path: Path) -> None:
    """Parts are read into a few slots. One more would overwrite the first, which nobody has loaded."""
    words = f"--offload-params nvme --nvme-path {tmp_path} --nvme-buffer-bytes 60KB"
    job, _ = job_on_rank(0, 1, flags_of(words, corpus, tmp_path))
    mover = job.state.model.mover
    slots = len(mover.load_slots.slots)
    assert slots < len(job.state.model.resting[0].parts)
    for part in range(slots):
        mover.move(Instruction(kinds.READ_PARAMETERS, buckets=(0,), part=part, slot=part))
    with pytest.raises(AssertionError, match=f"part {slots}.* would overwrite bucket 0, part 0, which is under way"):
        mover.move(Instruction(kinds.READ_PARAMETERS, buckets=(0,), part=slots, slot=0))
    job.close()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["to add to it", "for its update"])
def test_a_flipped_bit_of_a_gradient_is_an_error(what: str, corpus: Path, tmp_path: Path) -> None:
    """In a sum that is added to, and in one that is used."""
    words = f"--offload-gradients nvme --nvme-path {tmp_path} --global-batch-size {2 if what == 'to add to it' else 1}"
    job, _ = job_on_rank(0, 1, flags_of(f"{words} {SMALL}", corpus, tmp_path))
    swap, mover = job.state.model.tiers.disks, job.state.model.mover
    op = kinds.READ_SUM if what == "to add to it" else kinds.READ_GRADIENT
    read = mover.read

    def flipped(i: Instruction, piece: Piece) -> None:
        key = i.key
        assert i.op == op
        swap._newest[f"bucket {key[0]}, part {key[1]}: gradient"].request.wait()  # type: ignore[union-attr]
        with swap.paths[0].open("r+b") as file:
            extent = swap._layout.extents(f"bucket {key[0]}, part {key[1]}: gradient", 0)[0]
            file.seek(extent.offset)
            byte = file.read(1)[0]
            file.seek(extent.offset)
            file.write(bytes([byte ^ 1]))
        read(i, piece)

    mover.read = flipped  # type: ignore[method-assign]
    with pytest.raises(SwapDamaged, match=r"part \d+: gradient' of .* bytes has the checksum"):
        job.fit()
    job.close()
