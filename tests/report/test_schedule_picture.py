"""What the drawing of a schedule says."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazero.cli.draw_schedule import main
from megazero.pipeline.schedule import CHUNKS, SCHEDULES, make_schedule
from megazero.program.instruction import Instruction, Op
from megazero.program.simulate import simulate
from megazero.program.times import Span, uniform_times
from megazero.report.schedule_picture import DrawOptions, _columns, draw

TOOL = Path(__file__).parents[2] / "tools" / "draw_schedule.py"


def picture(name: str, p: int, m: int, v: int = 1, **look) -> str:
    return draw(simulate(make_schedule(name, p, m, v), uniform_times(p * v)), DrawOptions(**look))


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_a_small_schedule_in_plain_text():
    assert picture("1f1b", 2, 2, width=60).splitlines() == [
        "         0         2         4         6         8",
        "stage 0  |F0  |F1  ..........|B0-------.....|B1-------",
        "stage 1  .....|F0  |B0-------|F1  |B1-------..........",
        "",
        "         |F0 forward  |B0- backward of micro-batch 0  . idle",
        "",
        "         idle     peak activations",
        "stage 0   33.3%     2 ########################",
        "stage 1   33.3%     1 ############",
    ]


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("width", [40, 80, 133])
def test_nothing_is_wider_than_the_terminal_and_every_block_is_there(width, colour):
    for name in SCHEDULES:
        chunks = CHUNKS[name] or 2
        text = plain(picture(name, 4, 12, chunks, width=width, colour=colour))
        legend = 3 if colour and name.startswith("zb-") else 2
        assert max(map(len, text.splitlines()[: -6 - legend])) <= width
        bands = [line[9:] for line in text.splitlines() if line.startswith("stage 0")][:-1]
        row = "".join(bands)
        if not colour:
            ops, letters = "FBW" if name.startswith("zb-") else "FB", "ab" if chunks > 1 else [""]
            assert sorted(re.findall(r"\|([FBW]\d+[ab]?)", row)) == sorted(
                f"{op}{m}{c}" for op in ops for m in range(12) for c in letters
            )
        else:
            assert sorted(re.findall(r"\d+", re.sub(r"(?<=\d)(?=\d\d)", "", row)))  # numbers, no letters
            assert not re.search("[a-zA-Z]", row)


def test_fit_gives_one_band():
    text = picture("1f1b", 4, 60, width=70, fit=True)
    rows = [line for line in text.splitlines() if line.startswith("stage") and "%" not in line]
    assert len(rows) == 4 and {len(row) for row in rows} == {70}
    folded = picture("1f1b", 4, 60, width=70)
    assert len([line for line in folded.splitlines() if line.startswith("stage 0")]) > 5


def test_colours_tell_forward_from_backward_and_one_chunk_from_another():
    text = picture("interleaved", 2, 2, 2, width=100, colour=True)
    grounds = {(m[1], m[2]) for m in re.finditer(r"48;5;(\d+)m\s*(\d)\s*\x1b", text)}
    assert len({ground for ground, _ in grounds}) == 8  # 2 directions x 2 chunks x 2 shades


def test_both_parts_of_a_split_backward_are_drawn():
    assert picture("zb-h1", 2, 2, width=60).splitlines()[:5] == [
        "         0           2           4           6",
        "stage 0  |F0   |F1   ......|B0---|W0===|B1---|W1===",
        "stage 1  ......|F0   |B0---|F1   |B1---|W0===|W1===",
        "",
        "         |F0 forward  |B0- backward of the input  |W0= of the weights  . idle",
    ]
    grounds = set(re.findall(r"48;5;(\d+)m", picture("zb-v", 2, 4, 2, width=100, colour=True)))
    assert len(grounds) == 12  # 3 kinds x 2 chunks x 2 shades


class Ended(NamedTuple):
    """How the tool ended, and what it printed."""

    status: int
    out: str
    err: str


def run_tool(words: str) -> Ended:
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = main(words.split())
        except SystemExit as refused:
            status = int(str(refused.code))
    return Ended(status, out.getvalue(), err.getvalue())


def printed(words: str) -> str:
    """What the tool prints if nothing is wrong."""
    status, out, err = run_tool(words)
    assert (status, err) == (0, "")
    return out


def test_the_tool():
    words = "--pp 4 --micro-batches 8 --virtual-stages 2 --schedule interleaved --width 100"
    script = [sys.executable, str(TOOL), *words.split()]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == printed(words) and done.stdout.isascii()
    assert done.stdout.startswith(
        "interleaved: 4 stages, 2 chunks each, 8 micro-batches\nbubble 15.79%; 57 units of time for 48 of work\n"
    )
    assert "\x1b[" in printed("--color always")
    listed = printed("--pp 2 -m 1 --list 1").splitlines()
    assert listed[0] == "   0  receive hidden states (micro-batch 0, chunk 0, from stage 0)" and len(listed) == 4
    rows = printed("--forward-only").split("forward")[0]
    assert "|F7" in rows and "|B" not in rows


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--pp 0", "--pp 0: must be at least 1"),
        ("--forward-time 0", "above 0"),
        ("--list 9", "the stages are 0 to 3"),
        ("--schedule zigzag", "'zigzag' is not one of gpipe"),
        ("--schedule zb-v --virtual-stages 3", "zb-v has 2 chunks per stage, not 3"),
        ("--weight-time 2", "a part of --backward-time 2"),
        ("--zero-stage 0 --offload-activations 1.5", "a share, 0 to 1"),
        ("--zero-stage 0 --offload-activations 1 --forward-only", "--offload-activations is for training"),
        ("--offload-activations 0.5", "goes with --zero-stage"),
        ("--late-update", "--late-update goes with --zero-stage"),
        ("--zero-stage 3 --late-update --forward-only", "--late-update is for training"),
        ("--zero-stage 3 --vertical-group-size 2", "goes with --micro-batch-order vertical"),
        ("--zero-stage 3 --micro-batch-order vertical --vertical-group-size 0", "must be at least 1"),
        ("--micro-batch-order vertical", "--micro-batch-order vertical goes with --zero-stage"),
        ("--zero-stage 3 --dp 4 --zero-shard-size 3", "--zero-shard-size 3 does not divide --dp 4"),
        ("--offload-optimizer cpu", "--offload-optimizer cpu goes with --zero-stage"),
        ("--zero-stage 1 --disk-time 2", "--disk-time 2.0 goes with nvme for --offload-optimizer"),
        ("--zero-stage 1 --host-update-time 2", "--host-update-time 2.0 goes with --offload-optimizer or --offl"),
    ],
)
def test_the_tool_refuses_what_cannot_be(words, message):
    status, _, err = run_tool(words)
    assert status == 2 and message in err


def test_the_tool_takes_published_times():
    words = "--pp 8 -m 24 --profile 18.522 18.086 9.337 0.601 --fit"
    told = [printed(f"--schedule {name} {words}") for name in ("1f1b", "zb-h1", "zb-v")]
    bubbles = [float(share) for text in told for share in re.findall(r"bubble ([\d.]+)%", text)]
    assert bubbles == sorted(bubbles, reverse=True) and bubbles[0] == 24.31


def test_the_lanes_of_activations_that_leave():
    words = "--pp 1 -m 1 --zero-stage 0 --dp 1 --blocks 2 --width 80 --offload-activations 1 --update-time 0"
    out = printed(words)
    rows = {line[:12].strip(): line[12:] for line in out.splitlines() if line.startswith(("stage", "  "))}
    # Of four units the first two leave; the copies back end before the backward that needs them.
    assert [len(re.findall("k0", rows[name].strip())) for name in ("to host", "to device")] == [2, 2], out
    assert "k kept activations" in out and "bubble 0.00%" in out
    listed = printed(f"{words} --list 0")
    assert listed.count("copy activations to host memory") == listed.count("free activations") == 2
    assert "bubble 0.00%" not in printed(f"{words} --copy-time 2"), "the device waits for the copy before it frees"


def test_the_lanes_of_a_whole_step():
    words = "--pp 1 -m 1 --zero-stage 3 --blocks 1 --width 70 --update-time 0"
    out = printed(f"{words} --gather-time 0.5")
    assert out.startswith("1f1b: 1 stage, 1 micro-batch, ZeRO-3 on 4 replicas\n")
    lanes = [line[12:].rstrip() for line in out.splitlines() if line.startswith(("stage 0", "  shards"))]
    computes, messages = "".join(lanes[::2]), "".join(lanes[1::2])
    assert re.findall(r"[A-Z]\d", messages) == ["G0", "G1", "G2", "G1", "G0", "R2", "R1", "R0"]
    assert computes.index("|F0") == messages.index("|G1"), "the first unit starts with the second gather"
    assert "G gather of a bucket's parameters  R reduction of its gradients" in out
    assert "\x1b[" in printed(f"{words} --color always")
    listed = printed(f"{words} --list 0").splitlines()
    assert listed[:2] == ["   0  gather parameters (bucket 0)", "   1  gather parameters (bucket 1)"]
    assert listed[-1].endswith("update (buckets 0, 1, 2)")
    late = printed(f"{words} --late-update --list 0").splitlines()
    assert late[:2] == ["   0  update (bucket 0)", "   1  gather parameters (bucket 0)"]
    assert late[-1].endswith("  norm") and sum("update" in line for line in late) == 3
    assert printed(f"{words} --late-update")
    turned = printed(f"{words} --micro-batch-order vertical --micro-batches 2 --list 0")
    assert [line[6:] for line in turned.splitlines()[2:4]] == [
        f"forward (micro-batch {number}, chunk 0, unit 0)" for number in (0, 1)
    ]
    in_groups = printed(f"{words} --micro-batch-order vertical --micro-batches 3 --vertical-group-size 2")
    assert "3 micro-batches in 2 groups, vertical" in in_groups


def test_the_shortest_copies_have_a_column_each():
    """At the default rates a copy of updated parameters takes less time than half a column."""
    words = "--pp 2 -m 4 --zero-stage 1 --offload-optimizer nvme --late-update --width 200"
    rows: dict[str, str] = {}
    for line in printed(words).splitlines():
        rows.setdefault(line[:12].strip(), line[12:].strip("."))
    short = {name: rows[name] for name in ("from disk", "to host", "host", "to device", "to disk")}
    assert short == {  # of three buckets
        "from disk": "|s|ss",
        "to host": "gg|g",
        "host": "|H|H1|H",
        "to device": "u..u.u",
        "to disk": "|s.s.|s",
    }


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 3)), min_size=1, max_size=12), st.integers(0, 30))
def test_a_block_that_lasts_has_a_column_of_its_own(times: list[tuple[float, float]], more: int) -> None:
    """(time before it, its time) of each block."""
    spans, now = [], 0.0
    for wait, seconds in times:
        spans.append(Span(Instruction(Op.GATHER), now + wait, now + wait + seconds))
        now += wait + seconds
    lasting = [span.end > span.start for span in spans]
    total = sum(lasting) + more
    columns = _columns(spans, total / now if now else 1.0, total)
    own = [column for column, lasts in zip(columns, lasting, strict=True) if lasts]
    assert all(stop > start for start, stop in own)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(own))
    assert not own or (own[0][0] >= 0 and own[-1][1] <= total)
    assert all(stop == start for (start, stop), lasts in zip(columns, lasting, strict=True) if not lasts)


def test_a_row_with_more_blocks_than_columns_loses_the_shortest():
    spans = [Span(Instruction(Op.GATHER), float(start), float(stop)) for start, stop in ((0, 1), (1, 2), (2, 9))]
    assert _columns(spans, 2 / 9, 2) == [(0, 0), (0, 0), (0, 2)]
    assert _columns(spans, 3 / 9, 3) == [(0, 1), (1, 2), (2, 3)]


def test_a_group_above_the_micro_batches_is_told():
    words = "--zero-stage 3 --micro-batch-order vertical --micro-batches 3 --vertical-group-size"
    told = "--vertical-group-size 4 is above --micro-batches 3: all of them are one group"
    assert printed(f"{words} 4").splitlines()[1] == told
    assert "is above" not in printed(f"{words} 3")


def test_the_lanes_of_updates_in_host_memory():
    words = "--pp 1 -m 1 --zero-stage 0 --dp 1 --blocks 1 --width 100 --gather-time 0.5"
    on_disks = f"{words} --offload-optimizer nvme --host-update-time 1 --disk-time 1"
    out = printed(on_disks)
    rows: dict[str, str] = {}
    for line in out.splitlines():  # bands follow each other
        rows[line[:12].strip()] = rows.get(line[:12].strip(), "") + line[12:].ljust(88)
    labels = {"from disk": "s", "to host": "g", "host": "H", "to device": "u", "to disk": "s"}
    for lane, letter in labels.items():
        assert re.findall(r"[a-zA-Z]\d", rows[lane]) == [f"{letter}{bucket}" for bucket in range(3)]
    assert rows["host"].index("|H1") == rows["to device"].index("|u0") == rows["to disk"].index("|s0")
    assert "H update there" in out and "u updated parameters  s optimizer state  g gradients" in out
    assert max(map(len, out.splitlines())) <= 100
    cpu = printed(f"{words} --offload-optimizer cpu")
    assert "to host" in cpu and "to disk" not in cpu
    late = printed(f"{on_disks} --late-update --list 0").splitlines()
    assert late[0] == "   0  read optimizer states (bucket 0, part 0)" and late[-1].endswith("  norm")
