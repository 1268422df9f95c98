"""`megazero verify-layout`: whether a layout computes what one process computes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megazero.cli.exit_status import status_of
from megazero.cli.parser import command_parser, pop_flag
from megazero.cli.shared_flags import model_of
from megazero.config.source import ConfigError
from megazero.system.status import FAILED, MISTAKEN
from megazero.system.unfinished import ended_in_order
from megazero.system.writable import why_not_replaced

if TYPE_CHECKING:
    from megazero.config.schema import Run
    from megazero.verify.proof import Proof

DESCRIPTION = """
Whether a layout computes what one process computes, proven on this machine without a GPU.

All flags of `megazero pretrain` are understood. Sizes are made small, and the structure of the run is kept: stages and
their kinds of layers, heads of a rank, remainders, shards, schedule, recomputation, offload. The small run trains a few
steps in float64, is saved and resumed, and each gradient, moment and weight is compared with that of one process. The
command says that all is equal, or what differs first, at which instruction of the list and on which rank.

Status 0: equal. 1: differs. 2: it cannot be run, and the message says why.
"""
EXAMPLES = (
    "megazero verify-layout --world-size 384 --preset bloom-176b --tp 4 --pp 12 --zero-stage 1",
    "python tools/verify_layout.py --world-size 8 --vocab-size 50257 --tp 2 --pp 2 --certificate layout.json",
    "megazero verify-layout --check layout.json",
)
WORLD, RANKS, CERTIFICATE, CHECK = "--world-size", "--ranks", "--certificate", "--check"
DEFAULT = "layout-certificate.json"
HEAD = '{\n "format": '
"""The beginning of every certificate."""
MOST_RANKS = 1_000_000


def main(argv: Sequence[str]) -> int:
    if {"-h", "--help"} & {*argv}:
        # A parser for the help only: the other flags are those of a run, which `parse_arguments` reads.
        flags = command_parser("verify-layout", DESCRIPTION, EXAMPLES)
        flags.add_argument(WORLD, metavar="N", help="number of ranks of the run")
        flags.add_argument(CERTIFICATE, metavar="FILE", help=f"where the certificate goes (default: {DEFAULT})")
        flags.add_argument(CHECK, metavar="FILE", help="run again what a certificate says, and compare")
        flags.print_help()
        return 0
    with ended_in_order():
        return status_of(lambda: work(argv), (ConfigError, ValueError, SyntaxError))  # of a layer that was edited


def work(argv: Sequence[str]) -> int:
    """Prove or check. Raises ConfigError and CannotRun for what cannot be run."""
    check, words = pop_flag(argv, CHECK)
    file, words = pop_flag(words, CERTIFICATE)
    if check is not None:
        if words:
            raise ValueError(f"{CHECK} runs the flags of its certificate, and {' '.join(words)} is given too")
        return checked(Path(named(CHECK, check)), None if file is None else writable(Path(named(CERTIFICATE, file))))
    target = writable(Path(DEFAULT if file is None else named(CERTIFICATE, file)))
    world, problems, words = ranks_of(words)
    run = parsed(words, world, problems)
    assert world is not None, "a problem"
    proof, written = proven(words, run, world)
    say_result(proof, world, written["seconds"])
    is_kept = write(target, written)
    return ended(proof) or (0 if is_kept else MISTAKEN)


def named(flag: str, path: str) -> str:
    """The path of a flag. Raises ValueError for an empty one."""
    if not path:
        raise ValueError(f"{flag} is empty: it names a file")
    return path


def writable(target: Path) -> Path:
    """The path of a certificate, before minutes are spent on it. Raises ValueError for a folder that is not there, or
    that takes no file.
    """
    if target.is_dir() or not target.parent.is_dir():
        raise ValueError(
            f"{CERTIFICATE} {target}: {'this is a folder' if target.is_dir() else 'there is no such folder'}"
        )
    if (wrong := why_not_replaced(target, HEAD, len(HEAD), "certificate")) is not None:
        raise ValueError(f"{CERTIFICATE} {target}: {wrong}")
    return target


def ranks_of(words: Sequence[str]) -> tuple[int | None, list[str], list[str]]:
    """(the number of ranks; None where it is wrong, what is wrong with it, the other words)."""
    world, rest = pop_flag(words, WORLD)
    ranks, rest = pop_flag(rest, RANKS)
    given = {flag: text for flag, text in ((WORLD, world), (RANKS, ranks)) if text is not None}
    problems = [f"{WORLD} N is missing: the number of ranks of the run"] * (not given)
    problems += [
        f"{flag} {text}: a number of ranks from 1 to {MOST_RANKS:,} is needed"
        for flag, text in given.items()
        if not text.isdecimal() or not 1 <= int(text[:10]) <= MOST_RANKS
    ]
    if not problems and len({int(text) for text in given.values()}) > 1:
        problems = [f"{WORLD} {world} and {RANKS} {ranks} say different numbers of ranks"]
    return (None if problems else int(next(iter(given.values())))), problems, rest


def parsed(words: Sequence[str], world: int | None, problems: Sequence[str] = ()) -> Run:
    """The run of a command line. Raises ConfigError with what is wrong with it, and these problems."""
    from megazero.config.parse import parse_arguments

    try:
        run = parse_arguments(words, world, model_of).run
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems], error.notes) from error
    if problems:
        raise ConfigError(problems)
    return run


def proven(words: Sequence[str], run: Run, world: int) -> tuple[Proof, dict[str, Any]]:
    """The proof of a run, and its certificate. words: the flags of the run."""
    from megazero.verify.certificate import certificate
    from megazero.verify.proof import prove

    began = time.monotonic()
    proof = prove(run, world)
    return proof, certificate(words, run, world, proof, time.monotonic() - began)


def write(target: Path, written: dict[str, Any]) -> bool:
    """Write a certificate and name it. False, and a line on standard error, if that fails: the result stands."""
    try:
        target.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        print(f"error: {CERTIFICATE} {target} is not written: {error.strerror}", file=sys.stderr)
        return False
    print(f"certificate: {target}")
    return True


def checked(path: Path, target: Path | None) -> int:
    """Run a certificate again. Status 0: the same code gives the same result, and that is equal."""
    from megazero.config.help import requested_help
    from megazero.verify.certificate import read_claim

    claim = read_claim(path)
    if requested_help(claim.flags) is not None:
        raise ValueError(f"{path}: its flags ask for help, and are those of no run")
    proof, written = proven(claim.flags, parsed(claim.flags, claim.world_size), claim.world_size)
    is_kept = target is None or write(target, written)
    code = written["code"]["sha256"]
    if code != claim.code:
        print(f"the code is not that of the certificate: {code[:16]} here, {claim.code[:16]} there")
    if written["result"] != claim.result:
        print(f"the certificate says {claim.result}")
    say_result(proof, claim.world_size, written["seconds"])
    if not proof.equal:
        return ended(proof)
    if code != claim.code or written["result"] != claim.result:
        print(f"{path} does not hold: its {'code' if code != claim.code else 'result'} is another one")
        return FAILED
    if edited := claim.edited(written):
        print(f"{path} does not hold: its {', '.join(edited)} do not follow from its flags and world_size")
        return FAILED
    print(f"{path} holds")
    return 0 if is_kept else MISTAKEN


def say_result(proof: Proof, world: int, seconds: float) -> None:
    """Print what was run, what it does not cover, and how equal it is; the last line is the verdict."""
    small = proof.small
    print(f"{world} ranks, of which {small.axes.world_size} of a small run stand for all: {sizes(small.axes.sizes)}")
    for note in small.notes:
        print(f"not covered: {note}")
    worst = max(proof.errors.items(), key=lambda item: item[1], default=None)
    if proof.equal and worst is not None:
        print(f"equal in {seconds:.0f} s: the worst relative error is {worst[1]:.1e}, of {worst[0]}", flush=True)


def ended(proof: Proof) -> int:
    """Print the difference, if there is one, and return the status."""
    if proof.equal:
        return 0
    print(verdict(proof))
    return FAILED


def verdict(proof: Proof) -> str:
    """What differs, in one line: parameter, instruction and rank."""
    difference, axes = proof.difference, proof.small.axes
    if difference is None:
        return f"differs: {proof.failure}"
    at = axes.coordinates(difference.rank)
    place = f"rank {difference.rank} (stage {at.pp}, dp {at.dp}, tp {at.tp})"
    instruction = f"at {difference.instruction}, " if difference.instruction else ""
    return (
        f"differs: {difference.what} {instruction}step {difference.step} {difference.leg}, on {place}: relative error "
        f"{difference.error:.2g}"
    )


def sizes(axes: dict[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in axes.items())
