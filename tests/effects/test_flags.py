"""Every flag does something: two runs that differ in it alone differ, first where it acts.

Nothing is compared with the parser.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megazero.config.options import run_options
from megazero.data.progress import silent
from megazero.data.train_bpe import train_bpe
from tests.corpus import write_corpus
from tests.data.chats import write_lines
from tests.effects.look import FACETS, Seen, first_difference, look
from tests.effects.rows import BASES, ROWS, SEARCHES, Row
from tests.ranks import run_ranks

Lines = tuple[str, str]
"""Of a row: the base with what is given, and the same with its words."""
SHORT = [{"prompt": "p" * (n % 7), "completion": f"{n:02d}" * (1 + n % 4)} for n in range(40)]
LONG = [{"prompt": "p", "completion": f"{n:02d}" * 15} for n in range(10)]


def lines_of(row: Row) -> Lines:
    first = f"{BASES[row.base]} {row.given}"
    return first, f"{first} {row.words}"


def on_ranks(rank: int, lines: list[str], out: Path) -> list[Seen]:
    """One world for all of them."""
    return [look(shlex.split(line), out, rank, 2) for line in lines]


COPIES = "flops: 1e11\nto_host: 10GB\nto_device: 10GB\n"
TABLES = {
    "table": "optimizer: cpu:0.5\n",
    "rates": f"{COPIES}update: 40GB\nupdate_host: 2GB\n",
    "slow": f"{COPIES}update: 1MB\nupdate_host: 2GB\n",
}
"""Files of --placement and --placement-rates. In the second of these the device updates slowly."""


def together(*ranks: Seen) -> Seen:
    """What one command line does on all ranks."""
    return {facet: [seen.get(facet) for seen in ranks] for facet in FACETS} | {
        "refused": [said for seen in ranks for said in seen["refused"]]
    }


@pytest.fixture(scope="module")
def places(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What stands in braces in the rows. kept: a checkpoint of the base's second step."""
    folder = tmp_path_factory.mktemp("effects")
    talks = {"talks": SHORT, "more_talks": SHORT[::-1], "long_talks": SHORT + LONG}
    texts = {"bpe": "the cat sat on the mat", "other_bpe": "abc abd"}
    for name, text in texts.items():
        for chat in (False, True):  # of two kinds: gpt2 and hf
            train_bpe([text], 262, folder / name, silent, chat=chat)
    made = {
        "corpus": corpus,
        "other": write_corpus(folder / "other", seed=6),
        "cache": folder / "cache",
        "kept": folder / "kept",
    }
    made |= {name: folder / f"{name}.yaml" for name in TABLES}
    for name, text in TABLES.items():
        made[name].write_text(text)
    made |= {name: write_lines(folder / f"{name}.jsonl", records) for name, records in talks.items()}
    found = {name: str(path) for name, path in made.items()} | {name: str(folder / name) for name in texts}
    look(shlex.split(f"{BASES['text']} --save {{kept}} --exit-interval 2".format(**found)), folder)
    return found


@pytest.fixture(scope="module")
def seen(places: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Seen]:
    """What a command line does; each is run once, those of two ranks in one world."""
    kept: dict[str, Seen] = {}
    pairs = list(dict.fromkeys(line for row in ROWS if row.base == "ranks" for line in lines_of(row)))

    def find(line: str) -> Seen:
        if line in pairs and line not in kept:
            out = tmp_path_factory.mktemp("ranks")
            found = run_ranks(2, on_ranks, [pair.format(**places, out=out) for pair in pairs], out)
            kept.update(zip(pairs, map(together, *found), strict=True))
        if line not in kept:
            out = tmp_path_factory.mktemp("out")
            kept[line] = look(shlex.split(line.format(**places, out=out)), out)
        return kept[line]

    return find


def cases() -> list[Any]:
    """The rows; those on two ranks, which run in one world, and those that search for a placement are slow."""
    costly = [row.base == "ranks" or row.given.startswith(SEARCHES) for row in ROWS]
    return [pytest.param(row, marks=[pytest.mark.slow] * slow) for row, slow in zip(ROWS, costly, strict=True)]


@pytest.mark.few(cases=40)
@pytest.mark.parametrize("row", cases(), ids=lambda row: row.words[2:])
def test_two_runs_differ_first_where_the_flag_acts(row: Row, seen: Callable[[str], Seen]) -> None:
    known = run_options()[row.field]
    assert row.words.split()[0] in (*known.flags, *known.negations)
    without, having = map(seen, lines_of(row))
    problems = [*without["refused"], *having["refused"]]
    shown = first_difference(without, having)
    assert shown == row.shows, problems
    assert (
        any(flag in problem for flag in known.flags for problem in problems) if row.shows == "refused" else not problems
    )


def test_every_flag_has_a_row() -> None:
    assert {row.field for row in ROWS} == set(run_options())


@pytest.mark.slow
def test_one_command_line_twice_does_the_same(places: dict[str, str], tmp_path: Path) -> None:
    """Else a difference would prove nothing."""
    for number, more in enumerate(
        (
            ROWS[0].given,
            "--save {out}/saved --save-interval 1 --tokenizer byte --sample-prompt ab",
            "--precision bf16 --fp8",
        )
    ):
        one, other = (
            look(
                shlex.split(f"{BASES['text']} {more}".format(**places, out=tmp_path / f"{number}{time}")),
                tmp_path / f"{number}{time}",
            )
            for time in range(2)
        )
        assert set(one) == set(FACETS) - {"world"} and not one["refused"] and first_difference(one, other) is None
