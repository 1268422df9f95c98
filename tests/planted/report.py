"""What the program prints: a line for each fault as it is judged, and a table by area at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from tests.planted.fault import Fault
from tests.planted.plant import Judge, Proven, Verdict
from tests.planted.proofs import why_unseen

MAY_BE_MISSED = 0.02
"""The share of the faults that each of the two judges may miss: 98 of 100 are to be caught."""


class Judged(NamedTuple):
    """A fault that was planted, and what was said of it.

    verdict  of its test; None: that has not run
    proof    of `megazero verify-layout`; None: it was not asked, or the fault is not in what it runs
    """

    fault: Fault
    verdict: Verdict | None = None
    proof: Proven | None = None


def line_of(one: Judged) -> str:
    """A fault, what has caught it, its processor time, and what a proof says of it."""
    fault, verdict, proof = one
    row = "" if fault.number is None else f"{fault.number:2}"
    line = f"{row:2} {fault.area:10} {fault.name:42} "
    if verdict is not None:
        line += f"{verdict.judge.value if verdict.judge else 'MISSED':7} {verdict.seconds:5.1f} s  {fault.test}"
    if proof is not None:
        said = f"({proof.layouts[-1]}) {proof.told}" if proof.judge else f"MISSED {' '.join(proof.refused)}"
        line += f"\n{'':14}proof {said.strip()}, {proof.seconds:.1f} s"
    elif reason := why_unseen(fault):
        line += f"\n{'':14}no proof: {reason}"
    return line.rstrip()


def table_of(judged: Sequence[Judged]) -> str:
    """For each area the number of faults, of those that were caught, by each judge, and the processor time."""
    of_tests = [judge.value for judge in Judge if judge is not Judge.PROOF]
    heads = ("area", "faults", "caught", *(f"by {judge}" for judge in of_tests), "to prove", "by proof", "seconds")
    areas = sorted({one.fault.area for one in judged})
    rows = [(area, [one for one in judged if one.fault.area == area]) for area in areas]
    cells = [_cells(area, inside) for area, inside in (*rows, ("all", judged))]
    return "\n".join(f"{first:12}" + "".join(f"{cell:>12}" for cell in rest) for first, *rest in (heads, *cells))


def _cells(area: str, judged: Sequence[Judged]) -> tuple[str, ...]:
    judges = Counter(one.verdict.judge for one in judged if one.verdict is not None)
    proofs = [one.proof.judge for one in judged if one.proof is not None]
    seconds = sum(said.seconds for one in judged for said in (one.verdict, one.proof) if said is not None)
    caught = judges.total() - judges[None]
    of_tests = (judges[judge] for judge in Judge if judge is not Judge.PROOF)
    numbers = (len(judged), caught, *of_tests, len(proofs), len(proofs) - proofs.count(None))
    return area, *map(str, numbers), f"{seconds:.0f}"


def words_of(judged: Sequence[Judged]) -> str:
    """How many of the faults are caught, by tests and by proofs, and which are not."""
    tested, proven = (
        [one for one in judged if one.verdict is not None],
        [one for one in judged if one.proof is not None],
    )
    threads = len({one.fault.thread for one in judged} - {""})
    rows = len({one.fault.number for one in judged} - {None})
    said = list[str]()
    if tested:
        missed = [one.fault.name for one in tested if one.verdict is not None and one.verdict.judge is None]
        said.append(f"{len(tested) - len(missed)} of {len(tested)} faults caught{_listed(missed)}")
    if proven:
        missed = [one.fault.name for one in proven if one.proof is not None and one.proof.judge is None]
        named = sum(one.proof is not None and one.proof.is_named for one in proven)
        said.append(
            f"verify-layout: {len(proven) - len(missed)} of {len(proven)} faults that lie in what it runs, of "
            f"{named} the value or its instruction{_listed(missed)}"
        )
        said += [f"  {count:3} not in what it runs, {reason}" for reason, count in unseen_of(judged).items()]
    return "\n".join((*said, f"{rows} rows of the list, {threads} threads"))


def _listed(missed: Sequence[str]) -> str:
    return f"; missed: {', '.join(missed)}" if missed else ""


def unseen_of(judged: Sequence[Judged]) -> dict[str, int]:
    """Why faults are not in what a proof runs, and how many of them."""
    return Counter(reason for one in judged if (reason := why_unseen(one.fault)))


def suffices(judged: Sequence[Judged]) -> bool:
    """Whether each judge has caught as many as it has to: all but a fiftieth of those that it was asked of."""
    return all(
        sum(said.judge is None for said in asked) <= MAY_BE_MISSED * len(asked)
        for asked in (
            [one.verdict for one in judged if one.verdict is not None],
            [one.proof for one in judged if one.proof is not None],
        )
    )
