"""Constants that are fitted to measured steps: those by which the seconds were made, and a fault among them is seen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType

import pytest

from megazero.calibrate.calibration import entry_lines
from megazero.calibrate.effort import CARD, CARD_FP8, FIRST, SECOND, Effort, MeasuredRun, RankMeasurements, median_of
from megazero.calibrate.entry import (
    BETWEEN_CARDS,
    CARD_START,
    OF_COLLECTIVES,
    START,
    FittedDevice,
    MachineFacts,
    fitted_device,
    message_times,
    planned,
)
from megazero.calibrate.runs import run_of
from megazero.plan.cluster.hardware import Device, known_hardware
from megazero.plan.cluster.shared_pages import shared_bytes

TRUE: Mapping[str, float] = MappingProxyType(
    {"attention": 0.5, "bandwidth": 1.7, "launch": 2.3e-5, "thin": 0.6, "update": 34.0}
)
LARGE = {"bf16": 2e11, "fp32": 8e10, "fp64": 4e10}
SHARES = {"bf16": 0.5, "fp32": 0.9}
CONTEXT, NARROW, HOLES, FREE = 3.3e8, 9e6, 0.6, 2_000_000
COMPILER, GROUP = 5e7, 2e7
BESIDE = {"compiler": COMPILER, "group": GROUP}
LATENCY, RATE = 2e-5, 3e9
RATES = {
    "to_host": 6e9,
    "update": 4e9,  # of 4 bytes a parameter, for which memory at 1.7 times its rate moves 34
    "update_host": 1.5e9,
    "read": 2e9,
    "write": 1e9,
    "beside": 0.1,
    "carried": 3e9,
    "bandwidth": 2e10,
    "waking": 1.3e-5,
}
MACHINE = MachineFacts("cpu", "a processor", 16e9, 16e9, 2.0)


def measured(ranks: int = 1) -> RankMeasurements:
    """What a machine with these constants measures."""
    constants = replace(START, **TRUE, latency=LATENCY)
    flops = MappingProxyType({precision: share * LARGE[precision] for precision, share in SHARES.items()})
    inside = RATE if ranks > 1 else RATES["bandwidth"]
    device = Device("x", "cpu", 16e9, flops, 2e10, 2.0, inside, 6e9, 16e9, 30.0, "1xeth10")
    device = replace(device, constants=MappingProxyType(asdict(constants)))
    runs = list[MeasuredRun]()
    for words in (*FIRST, *SECOND):
        is_first = words in (FIRST[0], SECOND[0])
        together = ranks if is_first else 1
        step = planned(run_of(words, together, "cpu"), device, together)
        holes = round(step.passing * HOLES)
        memory = (
            step.tensors + holes + round(CONTEXT + NARROW * (words is SECOND[0])) + shared_bytes(step.run, step.axes)
        )
        own = (memory, FREE + step.passing + holes) if is_first else (None, None)
        runs.append(MeasuredRun(words, together, step.seconds, *own))
    sizes = (1e3, 1e5, 1e7) if ranks > 1 else ()
    messages = tuple((size, LATENCY + size / 2 / RATE) for size in sizes)
    stages = tuple((size, LATENCY + size / RATE) for size in sizes)
    return RankMeasurements(ranks, 2 // ranks, LARGE, RATES, BESIDE, messages, stages, tuple(runs))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_fit_finds_the_constants_by_which_the_seconds_were_made(ranks: int) -> None:
    fitted = fitted_device("here", MACHINE, measured(ranks))
    known = fitted.device.constants
    assert {name: known[name] for name in TRUE} == pytest.approx(dict(TRUE), rel=0.02)
    assert max(map(abs, fitted.errors)) < 0.005
    reached = {precision: rate / LARGE[precision] for precision, rate in fitted.device.flops.items()}
    assert reached == pytest.approx({**SHARES, "fp64": math.sqrt(0.5 * 0.9)}, rel=0.02)
    assert known["context"] == pytest.approx(CONTEXT, rel=1e-3)
    assert known["narrow"] == pytest.approx(NARROW, rel=0.05)
    assert known["holes"] == pytest.approx(HOLES, rel=1e-2)
    assert fitted.device.memory == 16e9 / ranks and fitted.device.read == 2e9
    assert known["waking"] == 1.3e-5 and fitted.device.carried == 3e9


def test_ranks_with_half_a_processor_carry_half_of_what_its_second_does() -> None:
    own = MeasuredRun(FIRST[0], 1, 0.1, 10**9, 10**7)  # too few to say anything of constants
    for ranks, carried in ((1, 3e9), (2, 3e9), (4, 1.5e9), (8, 0.75e9)):
        few = replace(measured(), ranks=ranks, runs=(own,))
        assert fitted_device("here", MACHINE, few).device.carried == carried


def test_a_run_that_took_too_long_is_seen_and_moves_no_constant() -> None:
    true, at = measured(), len(FIRST) + 1
    slow = replace(true.runs[at], seconds=2 * true.runs[at].seconds)
    fitted = fitted_device("here", MACHINE, replace(true, runs=(*true.runs[:at], slow, *true.runs[at + 1 :])))
    assert fitted.errors[at] == pytest.approx(-0.5, abs=0.02)
    assert max(abs(error) for number, error in enumerate(fitted.errors) if number != at) < 0.02
    assert fitted.device.constants["launch"] == pytest.approx(TRUE["launch"], rel=0.05)


def test_latency_and_rate_of_messages_are_found() -> None:
    ranks, sizes = 4, (1e3, 3e4, 1e6, 3e7)
    sent = [(size, 2 * LATENCY + size * 3 / 4 / RATE) for size in sizes]  # two doublings of ranks
    latency, rate = message_times(sent, ranks)
    assert latency == pytest.approx(LATENCY, rel=1e-3) and rate == pytest.approx(RATE, rel=1e-3)
    odd = [*sent[:3], (sent[3][0], 3 * sent[3][1])]
    assert message_times(odd, ranks)[1] != pytest.approx(RATE, rel=0.1)


def with_large(**changes: int) -> FittedDevice:
    """What is fitted where of the two runs whose memory is known the one with more that comes and goes has others."""
    true = measured()
    _, large = (run for run in true.runs if run.memory)
    changed = replace(large, **{name: getattr(large, name) + change for name, change in changes.items()})
    runs = tuple(changed if run is large else run for run in true.runs)
    return fitted_device("here", MACHINE, replace(true, runs=runs))


def test_what_kernels_of_16_bits_keep_is_no_hole() -> None:
    known = with_large(memory=20_000_000).device.constants
    assert known["holes"] == pytest.approx(HOLES, rel=1e-2) and known["context"] == pytest.approx(CONTEXT, rel=1e-3)
    assert known["narrow"] == pytest.approx(NARROW + 2e7, rel=0.02)


def test_holes_are_what_is_free_beside_what_comes_and_goes() -> None:
    more = with_large(free=10_000_000, memory=10_000_000).device.constants
    assert more["holes"] > 1.4 * HOLES and more["context"] < CONTEXT
    assert with_large(free=-100_000_000).device.constants["holes"] == 0.0  # less than none is noise


def test_an_entry_says_the_threads_of_its_ranks(tmp_path: Path) -> None:
    """By number of ranks."""
    fitted = [fitted_device("here", MACHINE, measured(ranks)) for ranks in (1, 2)]
    file = tmp_path / "here.yaml"
    file.write_text("\n".join(entry_lines(MACHINE, fitted, Effort())))
    device = known_hardware(str(file)).device("here")
    assert {1: device.threads} | {ranks: shared.threads for ranks, shared in device.shared.items()} == {1: 2, 2: 1}


def test_of_rounds_the_median_counts_number_by_number() -> None:
    usual = measured(2)

    def paced(pace: float, memory: int) -> RankMeasurements:
        """Of a machine that is so many times as slow, in a process with so much more memory."""
        runs = tuple(
            replace(run, seconds=run.seconds * pace, memory=None if run.memory is None else run.memory + memory)
            for run in usual.runs
        )
        messages = tuple((nbytes, seconds * pace) for nbytes, seconds in usual.collectives)
        flops = {name: rate / pace for name, rate in usual.flops.items()}
        return replace(usual, flops=flops, collectives=messages, runs=runs)

    middle = median_of([paced(1.4, -50), paced(0.7, 900), usual])
    assert (middle.flops, middle.rates, middle.memory) == (dict(usual.flops), dict(usual.rates), dict(usual.memory))
    assert (middle.collectives, middle.stages, middle.runs) == (usual.collectives, usual.stages, usual.runs)
    # each number by itself: seconds of one round, bytes of another
    assert median_of([paced(1.4, 0), paced(0.7, 900), paced(1.0, 2000)]).runs == paced(1.0, 900).runs


def test_measurements_pass_between_processes_as_they_are() -> None:
    assert RankMeasurements.read(measured(2).text()) == measured(2)


CARD_TRUE: Mapping[str, float] = MappingProxyType({"attention": 0.6, "bandwidth": 0.7, "launch": 4e-5, "update": 21.0})
CARD_LARGE = {"bf16": 8e14, "fp16": 7e14, "fp32": 5e13, "fp8": 1.5e15, "fp64": 6e13}
CARD_SHARES = {"bf16": 0.9, "fp16": 0.8, "fp32": 0.95, "fp8": 0.7}
CARD_RATES = {"to_host": 5e10, "update": 3e11, "update_host": 1e10, "bandwidth": 4e12}


def test_odd_rows_of_a_card_cost_what_they_cost_an_a100() -> None:
    assert CARD_START.misaligned == known_hardware().device("a100-80gb").constants["misaligned"]


def test_a_card_is_fitted_by_runs_of_its_own_and_has_what_it_does_not_show_of_its_kind() -> None:
    like = known_hardware(None).cluster("h200", 1, None, None).device
    unseen = {name: like.constants[name] for name in (*BETWEEN_CARDS, *OF_COLLECTIVES)}
    constants = MappingProxyType(asdict(replace(CARD_START, **unseen, **CARD_TRUE)))
    flops = MappingProxyType({name: share * CARD_LARGE[name] for name, share in CARD_SHARES.items()})
    true = Device("x", "cuda", 1.5e11, flops, 4e12, 132.0, like.inside, 5e10, 1e11, 700.0, "8xndr", constants)
    runs = list[MeasuredRun]()
    for words in (*CARD, *CARD_FP8):
        step = planned(run_of(words, 1, "cuda"), true, 1)
        runs.append(MeasuredRun(words, 1, step.seconds, round(1.03 * step.tensors), 0))
    runs[2] = replace(runs[2], memory=None)  # one that nobody knows is left out
    machine = MachineFacts("cuda", "a card", 1.5e11, 1e11, 132.0, like)
    told = RankMeasurements(1, 16, CARD_LARGE, CARD_RATES, {"context": 1.4e9}, (), (), tuple(runs))
    fitted = fitted_device("here", machine, told)
    known = fitted.device.constants
    assert {name: known[name] for name in CARD_TRUE} == pytest.approx(dict(CARD_TRUE), rel=0.03)
    reached = {name: fitted.device.flops[name] / CARD_LARGE[name] for name in CARD_SHARES}
    assert reached == pytest.approx(CARD_SHARES, rel=0.03)
    assert {name: known[name] for name in unseen} == unseen and known["context"] == 1.4e9
    assert known["fragmentation"] == pytest.approx(0.03, abs=1e-4)
    assert (fitted.device.watts, fitted.device.inside, fitted.device.interconnect) == (700.0, like.inside, "8xndr")
    lines = "\n".join(entry_lines(machine, [fitted], Effort.of("cuda", (1,))))
    assert "flops in bf16, fp16, fp32, fp8: fitted" in lines and "messages: of the entry h200" in lines
