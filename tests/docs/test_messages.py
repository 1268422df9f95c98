"""Messages that the page "When something goes wrong" quotes are those of the program: each stands in a source."""

from __future__ import annotations

import re
from functools import cache

import pytest

from megazero.config.flags import _flag_table
from tests.docs.pages import ROOT, fences, prose, text_of

PAGE = "docs/how-to/when-something-goes-wrong.md"
OURS = (
    ", with which rank ",
    "has not answered for ",
    " was ended by ",
    "the swap files of ",
    "; nearest: ",
    "could not be written: ",
    "  skipped",
    "nothing was learned",
    " in the checkpoint, ",
    " is damaged: ",
    " is not the recorded one",
    "is not there; a run that may have to start",
    "model that is known here; if it changes nothing",
    "the model loaded is not the model saved",
)
"""Words of messages that the program writes."""
THEIRS = ("EADDRINUSE", "exitcode  : -9", "DefaultCPUAllocator")
"""Words of torch's own messages."""


def quoted() -> list[str]:
    return fences(PAGE, "text")


@cache
def sources() -> str:
    return "\n".join(path.read_text() for path in sorted((ROOT / "megazero").rglob("*.py")))


@pytest.mark.parametrize("words", OURS)
def test_the_program_still_says_it(words: str) -> None:
    assert words in text_of(PAGE), "no longer on the page"
    assert words in sources()


@pytest.mark.parametrize("message", quoted(), ids=range(len(quoted())))
def test_each_quoted_message_has_a_source(message: str) -> None:
    assert any(words in message for words in (*OURS, *THEIRS))


def test_the_columns_of_the_quoted_log_are_those_of_a_run() -> None:
    from megazero.telemetry.logline import columns, header

    heads = [line.split() for block in quoted() for line in block.splitlines() if line.startswith("iteration")]
    assert heads == [header(columns(40, fp16=False)).split()]


def test_the_sections_that_the_first_table_names_are_there() -> None:
    assert len(re.findall(r"\]\(#", text_of(PAGE))) >= 4


@pytest.mark.parametrize("page", [PAGE, "docs/how-to/offload.md"])
def test_flags_of_the_prose_are_flags(page: str) -> None:
    """Commands run elsewhere; this is for flags in sentences and lists."""
    code = " ".join(re.findall(r"`([^`\n]+)`", prose(page)))
    unknown = {*re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", code)} - {*_flag_table()}
    assert unknown <= {"--master-port", "--standalone", "--input", "--to", "--output"}, "torchrun's, convert's"
