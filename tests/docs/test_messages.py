"""Messages that the page "When something goes wrong" quotes are those of the program: each stands in a source file."""

from __future__ import annotations

import re

import pytest

from megazero.config.flags import _flag_table
from tests.docs.pages import ROOT, fences, prose, text_of

PAGE = "docs/how-to/when-something-goes-wrong.md"
SOURCES = {
    ", with which rank ": "megazero/mpu/shared_memory.py",
    "has not answered for ": "megazero/mpu/shared_memory.py",
    " was ended by ": "megazero/cli/ranks.py",
    "the swap files of ": "megazero/train/disk_checks.py",
    "--device-memory-budget": "megazero/plan/budgets.py",
    "could not be written: ": "megazero/train/save_policy.py",
    "  skipped": "megazero/telemetry/logline.py",
    "nothing was learned": "megazero/train/standstill.py",
    " in the checkpoint, ": "megazero/checkpoint/resume_changes.py",
    " is damaged: ": "megazero/checkpoint/manager.py",
    " is not the recorded one": "megazero/checkpoint/blocks.py",
    "is not there; a run that may have to start": "megazero/train/output_checks.py",
    "megazero turns by position": "megazero/convert/hf/llama.py",
    "the model loaded is not the model saved": "megazero/train/probe.py",
}
"""Words of a message -> the file that writes them."""
THEIRS = ("EADDRINUSE", "exitcode  : -9", "DefaultCPUAllocator")
"""Words of torch's own messages."""


def quoted() -> list[str]:
    return fences(PAGE, "text")


@pytest.mark.parametrize("words", SOURCES)
def test_the_program_still_says_it(words: str) -> None:
    assert words in text_of(PAGE), "no longer on the page"
    assert words in (ROOT / SOURCES[words]).read_text()


@pytest.mark.parametrize("message", quoted(), ids=range(len(quoted())))
def test_each_quoted_message_has_a_source(message: str) -> None:
    assert any(words in message for words in (*SOURCES, *THEIRS))


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
