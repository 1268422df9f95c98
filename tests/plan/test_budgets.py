"""Budgets of memory before a run starts: what is refused, in which words, and whether what is offered really fits."""

from __future__ import annotations

import re

import pytest

from megazero.config.parse import ConfigError, parse_run
from megazero.config.schema import Run
from megazero.mpu.axes import axes_of
from megazero.plan.budget_changes import BudgetSearch, MemoryChange
from megazero.plan.budgets import HostRoom, host_problems, memory_problems, shortened
from megazero.plan.rank_state import stage_bytes
from megazero.plan.search import SearchLimits
from megazero.plan.step_lists import StageLists
from megazero.plan.step_memory import run_peaks
from megazero.plan.step_times import ASSUMED, timed_traces
from megazero.report.banner import budgets_sentence
from megazero.report.run_report import RunReport, gather
from megazero.report.verdict import peaks_table
from megazero.system import host_memory
from megazero.train.requirements import budget_problems
from tests.tables import rows

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 1003 --device cpu "
    "--data-path x --micro-batch-size 4 --global-batch-size 8 --train-iters 3 --precision bf16"
)
ACTIVATIONS = "--micro-batch-size 1 --seq-length 512 --global-batch-size 4"
"""With these the activations are most of a step."""


def asked(words: str, ranks: int = 1) -> Run:
    return parse_run(f"{MODEL} {words}".split(), ranks)


def report_of(run: Run, ranks: int) -> RunReport:
    return gather(StageLists(run, axes_of(run, ranks), nccl=False))


def peaks(words: str, ranks: int = 1, kind: str = "cpu") -> tuple[int, int]:
    """The most on the device and in host memory, by arithmetic."""
    run = asked(words, ranks)
    every = run_peaks(run, axes_of(run, ranks), kind)
    return max(found.device_bytes for found in every), max(found.host_bytes for found in every)


def refusal(words: str, ranks: int = 1, kind: str = "cpu") -> str:
    """The one sentence with which a run is refused on a device of this kind."""
    (told,) = memory_problems(asked(words, ranks), ranks, kind)
    return told


def offered(told: str) -> list[str]:
    """The flags that a sentence offers as fitting."""
    assert "still too much" not in told
    return [flags for flags, _ in re.findall(r"(?:nearest: |, or )(--.+?) \(([\d,]+ bytes[^)]*)\)", told)]


SHORTENED = (
    "",
    "--offload-optimizer cpu:0.5 --nvme-buffer-bytes 200KB",
    "--offload-gradients cpu --nvme-buffer-bytes 200KB --late-update",
    "--offload-gradients nvme --offload-optimizer nvme --nvme-path x --nvme-buffer-bytes 200KB",
    "--offload-params cpu",
    "--offload-params nvme:0.5 --nvme-path x --micro-batch-order horizontal",
    "--offload-activations cpu --recompute-granularity selective",
    "--offload-activations nvme --nvme-path x",
)
"""What leaves the device, in horizontal order."""


@pytest.mark.parametrize("words", SHORTENED)
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, ""),
        (2, "--zero-stage 3"),
        (4, "--pp 2 --zero-stage 2"),
        (2, "--pp 2 --virtual-stages 2 --pipeline-schedule interleaved"),
        (2, "--pp 2 --virtual-stages 2 --pipeline-schedule zb-v"),
    ],
)
def test_a_shortened_step_has_the_peaks_of_the_whole(ranks: int, layout: str, words: str) -> None:
    run = asked(f"{words} {layout} --micro-batch-size 1 --global-batch-size 100", ranks)
    axes = axes_of(run, ranks)
    short = shortened(run, axes)
    assert short.schedule.global_batch_size < 40
    found = [[(peaks.device, peaks.host) for peaks in run_peaks(each, axes, "cpu")] for each in (short, run)]
    assert found[0] == found[1]


@pytest.mark.parametrize("words", ["--offload-params nvme --nvme-path x", "--offload-activations cpu:0.5"])
def test_a_step_whose_micro_batches_all_count_is_not_shortened(words: str) -> None:
    run = asked(f"{words} --micro-batch-size 1 --global-batch-size 100")
    assert shortened(run, axes_of(run, 1)) == run


def test_what_takes_many_hosts_is_not_searched_for() -> None:
    run = asked("")
    (told,) = host_problems(run, 1, "cpu", range(1), HostRoom(10_000, 0))
    assert re.search(
        r"takes [\d,]+ bytes of its memory, and all processes here may have 10,000: it takes \d+ such", told
    )


def test_the_peak_on_the_device_is_that_of_the_memory_trace() -> None:
    """But for what has left it: on a CPU the trace has a column for that."""
    for words in ("", "--zero-stage 3", "--offload-optimizer cpu:0.5 --nvme-buffer-bytes 200KB"):
        run = asked(words, 2)
        (trace,) = timed_traces(StageLists(run, axes_of(run, 2), nccl=False), "cpu", ASSUMED["cpu"])
        off = {column.value: size for column, size in trace.peak.columns.items()}
        assert peaks(words, 2)[0] == trace.peak.total - off.get("offloaded state in host memory", 0)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("flag", ["device", "host"])
def test_a_budget_holds_to_the_byte(flag: str, ranks: int) -> None:
    words = f"--offload-optimizer cpu:0.5 --offload-activations cpu --pp {min(2, ranks)}"
    most = peaks(words, ranks, "cuda")[flag == "host"]
    fits, does_not = (f"{words} --{flag}-memory-budget {most - less}" for less in (0, 1))
    assert memory_problems(asked(fits, ranks), ranks, "cuda") == []
    told = refusal(does_not, ranks, "cuda")
    assert f"--{flag}-memory-budget {most - 1:,}: a rank" in told and f"takes {most:,} bytes" in told
    assert (" of stage " in told) == (ranks > 1)


def test_a_refusal_says_where_and_of_what() -> None:
    """The three largest columns, and the rest, are the peak."""
    told = refusal("--pp 2 --device-memory-budget 4MB", 2)
    found = re.search(r"takes ([\d,]+) bytes of memory at number \d+ of its list, (.+?): (.+?); ", told)
    assert found is not None and "stage 0 of 2" in told and found[2].startswith("backward")
    amounts = [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) of ", found[3])]
    assert len(amounts) == 4 and sum(amounts) == int(found[1].replace(",", ""))
    assert amounts[:3] == sorted(amounts[:3], reverse=True) and "of optimizer" in found[3]


CASES = {
    name: (words, int(ranks), offered)
    for name, words, ranks, offered in rows("""
a smaller micro-batch | --device-memory-budget 6MB | 1 | --micro-batch-size 1
ZeRO first, which costs nothing | --device-memory-budget 7MB | 2 | --zero-stage 1
ZeRO-2 | --device-memory-budget 12MB --zero-stage 1 --micro-batch-size 1 --num-layers 24 --vocab-size 250 --bucket-size
    60000 | 4 | --zero-stage 2
selective recompute | --micro-batch-size 1 --seq-length 512 --global-batch-size 4 --attention softmax
    --device-memory-budget 14MB | 1 | selective
activations leave | --micro-batch-size 1 --seq-length 512 --global-batch-size 4 --num-layers 8 --device-memory-budget
    18MB | 1 | --offload-activations cpu
full recompute | --micro-batch-size 1 --seq-length 512 --global-batch-size 4 --num-layers 8 --device-memory-budget 12MB
    --host-memory-budget 1MB | 1 | --recompute-granularity full
a share of the optimizer | --device-memory-budget 5.1MB --micro-batch-size 1 --seq-length 128 | 1 |
    --offload-optimizer cpu:0.
smaller buckets | --zero-stage 2 --micro-batch-size 1 --num-layers 24 --vocab-size 250 --device-memory-budget 20MB |
    4 | --bucket-size
a share of the gradients | --hidden-size 1024 --num-layers 24 --micro-batch-size 1 --global-batch-size 1
    --offload-optimizer cpu --device-memory-budget 1.7GB | 1 | --offload-gradients cpu:0.
a share of the parameters | --micro-batch-size 1 --seq-length 16 --vocab-size 9003 --offload-optimizer cpu
    --nvme-buffer-bytes 100KB --device-memory-budget 4.9MB | 1 | --offload-params cpu
buffers | --offload-optimizer cpu --offload-gradients cpu --host-memory-budget 6MB | 1 | --nvme-buffer-bytes
less in host memory | --offload-optimizer cpu --nvme-buffer-bytes 100KB --device-memory-budget 6MB --host-memory-budget
    3MB | 1 | --offload-optimizer cpu:0.
nothing in host memory | --offload-activations cpu --host-memory-budget 1KB | 1 | --offload-activations none
""")
}


@pytest.mark.few(cases=4)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_offered_fits(case: tuple[str, int, str]) -> None:
    """Given on the command line; and the bytes are those of the run that comes out."""
    words, ranks, expected = case
    kind = "cuda" if " cpu" in expected else "cpu"
    told = refusal(words, ranks, kind)
    found = offered(told)
    assert found and expected in found[0], told
    for flags in found:
        assert memory_problems(asked(f"{words} {flags}", ranks), ranks, kind) == [], flags
        device, host = peaks(f"{words} {flags}", ranks, kind)
        size = device if kind == "cuda" else device + host
        assert f"{flags} ({size:,} bytes o" in told or "--host" in words


ONE_MEMORY = {
    name: (words, int(ranks))
    for name, words, ranks in rows("""
the optimizer's state | --hidden-size 1024 --micro-batch-size 1 --global-batch-size 1 --device-memory-budget 850MB | 1
samples | --device-memory-budget 6MB | 1
activations | --micro-batch-size 1 --seq-length 512 --global-batch-size 4 --num-layers 8 --device-memory-budget 12MB | 1
replicas | --device-memory-budget 7MB | 2
state on a device and in host memory | --offload-optimizer cpu:0.5 --hidden-size 256 --device-memory-budget 65MB | 1
both budgets | --micro-batch-size 4 --device-memory-budget 6MB --host-memory-budget 2MB | 1
host memory alone | --offload-optimizer cpu --host-memory-budget 2MB | 1
""")
}


@pytest.mark.parametrize(("words", "ranks"), ONE_MEMORY.values(), ids=ONE_MEMORY)
def test_on_a_cpu_what_is_offered_takes_less_of_its_one_memory(words: str, ranks: int) -> None:
    """What leaves for host memory stays in the same memory."""
    now, told = sum(peaks(words, ranks)), refusal(words, ranks)
    found, run = offered(told), asked(words, ranks).offload
    assert found, told
    for flags in found:
        assert not re.search(r"--offload-\S+ cpu", flags), told
        changed = f"{words} {flags}"
        assert memory_problems(asked(changed, ranks), ranks, "cpu") == [], flags
        most = run.device_memory_budget or now
        assert sum(peaks(changed, ranks)) <= min(now, most + (run.host_memory_budget or 0)), flags


def test_on_a_cpu_a_budget_counts_what_has_left_the_device() -> None:
    """With a budget for each tier they are two budgets, whose sum is of the one memory."""
    words = "--offload-optimizer cpu --nvme-buffer-bytes 100KB"
    device, host = peaks(words)
    told = refusal(f"{words} --device-memory-budget {device + host - 1}")
    assert f"takes {device + host:,} bytes of memory at " in told
    assert not memory_problems(asked(f"{words} --device-memory-budget {device + host}"), 1, "cpu")
    both = asked(f"{words} --device-memory-budget {device} --host-memory-budget {host}")
    assert not memory_problems(both, 1, "cpu")
    assert not memory_problems(asked(f"{words} --device-memory-budget {device + host}"), 1, "cuda")
    *_, limits = (line.split() for line in peaks_table(report_of(both, 1)).splitlines())
    assert limits == ["budget", f"{device:,}", f"{host:,}", f"{device + host:,}", "-"]


def test_the_smallest_share_is_offered() -> None:
    """A hundredth less does not fit."""
    words = "--device-memory-budget 5MB --micro-batch-size 1"
    (share,) = [float(flags.split(":")[1]) for flags in offered(refusal(words, kind="cuda")) if "cpu:" in flags]
    assert 0.1 < share < 0.9
    assert memory_problems(asked(f"{words} --offload-optimizer cpu:{share - 0.01:.2f}"), 1, "cuda")


@pytest.mark.slow
def test_disks_are_offered_where_host_memory_is_short() -> None:
    """The slots and the buffers of the files are in host memory, the state is not."""
    words = (
        "--num-layers 8 --hidden-size 512 --micro-batch-size 1 --nvme-buffer-bytes 20MB --global-batch-size 1 "
        "--offload-optimizer cpu --host-memory-budget 100MB --device-memory-budget 250MB"
    )
    (flags,) = offered(refusal(words))
    assert re.fullmatch(r"--offload-optimizer nvme:0\.\d+ --nvme-path DIR", flags)
    assert memory_problems(asked(f"{words} {flags}"), 1, "cpu") == []


def test_disks_are_offered_for_activations() -> None:
    """A budget of activations chooses what is computed again, so that no flag may; host memory does not hold them."""
    words = (
        f"{ACTIVATIONS} --num-layers 32 --seq-length 1024 --activation-memory-budget 70MB --device-memory-budget 75MB "
        "--host-memory-budget 52MB"
    )
    (flags,) = offered(refusal(words))
    assert "--offload-activations nvme --nvme-path DIR" in flags and "--nvme-buffer-bytes" in flags
    assert memory_problems(asked(f"{words} {flags}"), 1, "cpu") == []


@pytest.mark.slow
def test_several_changes_where_one_is_not_enough() -> None:
    """None of them is needless."""
    words = "--device-memory-budget 3.6MB"
    told = refusal(words, 2)
    assert "no single flag makes it fit; nearest: " in told
    (flags,) = offered(told)
    assert memory_problems(asked(f"{words} {flags}", 2), 2, "cpu") == []
    changes = re.findall(r"--[a-z-]+ \S+", flags)
    assert len(changes) > 1
    for change in changes:
        less = flags.replace(change, "")
        assert memory_problems(asked(f"{words} {less}", 2), 2, "cpu"), change


@pytest.mark.slow
def test_nothing_fits() -> None:
    told = refusal("--device-memory-budget 100KB")
    assert "no single flag makes it fit; nearest, and still too much: --" in told
    flags = told.split("too much: ")[1].split(" (")[0]
    assert f"({sum(peaks(flags)):,} bytes of memory a rank)" in told


def test_a_change_that_the_run_may_not_have_is_not_tried() -> None:
    """A budget of activations chooses what is computed again: then no flag may."""
    run = asked("--activation-memory-budget 3MB --device-memory-budget 5MB")
    search = BudgetSearch(run, 1, "cpu", SearchLimits(5_000_000), 0)
    assert search.attempt(MemoryChange((("recompute_granularity", "full"),))) is None
    assert search.attempt(MemoryChange((("micro_batch_size", 1),))) is not None
    assert search.attempt(MemoryChange((("micro_batch_size", 3),))) is None, "3 does not divide 8"
    told = memory_problems(asked("--activation-memory-budget 1KB --device-memory-budget 5MB"), 1, "cpu")
    assert len(told) == 1 and told[0].startswith("--activation-memory-budget 1,000: stage 0 needs ")


def test_a_host_that_is_too_small_for_the_model_state() -> None:
    """On a CPU all of it counts, on a card what rests in host memory. Ranks of other hosts do not count."""
    words = "--pp 2 --offload-optimizer cpu:0.5 --nvme-buffer-bytes 200KB"
    run = asked(words, 4)
    states = stage_bytes(run, axes_of(run, 4))
    for kind in ("cpu", "cuda"):
        first, last = (state.elsewhere.memory + state.total * (kind == "cpu") for state in states)
        for here, needed in ((range(1, 3), first + last), (range(4), 2 * first + 2 * last), (range(2), 2 * first)):
            assert host_problems(run, 4, kind, here, HostRoom(needed, 0)) == []
            (told,) = host_problems(run, 4, kind, here, HostRoom(needed - 1, 0))
            assert f"all ranks of this host ({len(here)}) takes {needed:,} bytes" in told
            assert f"may have {needed - 1:,}; " in told


@pytest.mark.slow
def test_what_is_offered_to_a_host_that_is_too_small_fits() -> None:
    """Host memory is no help where it is the device's: only disks are. What the processes take besides is left free."""
    room, process = 900_000_000, 300_000_000
    words = "--hidden-size 1024 --num-layers 8 --micro-batch-size 1 --global-batch-size 2"
    (told,) = host_problems(asked(words, 2), 2, "cpu", range(2), HostRoom(2 * (room + process), process))
    ((flags, size),) = re.findall(r"nearest: (--.+?) \(([\d,]+) bytes of memory a rank\)", told)
    assert "--offload-optimizer nvme" in flags and "--nvme-path DIR" in flags
    device, host = peaks(f"{words} {flags}", 2)
    assert device + host == int(size.replace(",", "")) <= room


def test_a_run_looks_at_the_memory_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "limit_bytes", lambda: 3_000_000)
    run = asked("", 2)
    (told,) = budget_problems(run, 2, tries_cards=False)
    assert "ranks of this host (2)" in told and "may have 3,000,000" in told
    (told,) = budget_problems(run, 2, tries_cards=False, local_ranks=range(1))
    assert "ranks of this host (1)" in told
    assert budget_problems(run, 2, tries_cards=True, local_ranks=range(0)) == [], "meant for other machines"
    monkeypatch.setattr(host_memory, "limit_bytes", lambda: None)
    assert budget_problems(run, 2, tries_cards=True) == [], "nobody knows"


def test_words_of_the_command_line() -> None:
    assert str(MemoryChange((("zero_stage", 2), ("nvme_path", ("a", "b"))))) == "--zero-stage 2 --nvme-path a b"
    with pytest.raises(ConfigError, match="--activation-memory-budget 9 is a part of --device-memory-budget 8"):
        asked("--activation-memory-budget 9 --device-memory-budget 8")
    with pytest.raises(ConfigError, match="--host-memory-budget 0: must be more than 0"):
        asked("--host-memory-budget 0")


def test_a_vocabulary_is_needed() -> None:
    """The tokenizer has it, and a dry run may not read that."""
    flags = f"{MODEL} --device-memory-budget 1KB --tokenizer hf --tokenizer-path x".replace("--vocab-size 1003 ", "")
    run = parse_run(flags.split(), 1)
    assert budget_problems(run, 1, tries_cards=True) == []


def test_what_is_told_of_a_run_that_fits() -> None:
    words = "--pp 2 --offload-optimizer cpu:0.5 --device-memory-budget 20MB --host-memory-budget 30MB"
    run = asked(words, 2)
    told = budgets_sentence(report_of(run, 2))
    assert told.startswith("a rank of stage 0 of 2 takes ") and "of --device-memory-budget 19.1 MiB; a rank " in told
    lines = [line.split() for line in peaks_table(report_of(run, 2)).splitlines()]
    every = run_peaks(run, axes_of(run, 2), "cpu")
    assert lines[2:] == [
        *(
            [str(n), f"{found.device_bytes:,}", f"{found.host_bytes:,}", f"{found.total_bytes:,}", "0"]
            for n, found in enumerate(every)
        ),
        ["budget", "20,000,000", "30,000,000", "50,000,000", "-"],
    ]
    assert budgets_sentence(report_of(asked("--pp 2", 2), 2)) == ""
