"""What the code makes of the pages is new, and no page hides anything from a reader of plain Markdown."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.extension import made
from docs.extension.links import anchors
from docs.extension.options import all_options
from docs.extension.setup import INCLUDED, listed
from megazero.cli.main import SUBCOMMANDS
from tests.docs.pages import FENCE, ROOT, pages, text_of

ANEW = "`python -m docs.extension` writes it anew"


@pytest.fixture(scope="module")
def as_made() -> made.Made:
    return made.make()


def test_what_the_code_makes_of_the_pages_is_new(as_made: made.Made) -> None:
    old = [page for page, text in as_made.pages.items() if (ROOT / page).read_text() != text]
    assert not old, ANEW


def test_drawings_are_what_the_code_draws(as_made: made.Made) -> None:
    assert len(as_made.drawings) > 25
    old = [path for path, text in as_made.drawings.items() if (ROOT / path).read_text() != text]
    assert not old, ANEW
    drawn = {str(path.relative_to(ROOT)) for path in (ROOT / made.PICTURES).glob("*.svg")}
    assert drawn == set(as_made.drawings), f"a drawing that no page names; {ANEW}"


def test_a_changed_page_and_a_stray_drawing_are_seen_and_mended(tmp_path: Path) -> None:
    (tmp_path / made.PICTURES).mkdir(parents=True)
    (tmp_path / "README.md").write_text("# One\n")
    page = tmp_path / "docs" / "how-to" / "two.md"
    page.parent.mkdir()
    page.write_text("# Two\n<!-- made by the code: drawing grid tp=2 -->\nold\n<!-- until here -->\nrest\n")
    stray = tmp_path / made.PICTURES / "stray.svg"
    stray.write_text("<svg/>")
    picture = "docs/pictures/grid-tp2.svg"
    assert made.write(tmp_path) == ["docs/how-to/two.md", picture, "docs/pictures/stray.svg"]
    assert (
        "](../pictures/grid-tp2.svg)\n<!-- until here -->\nrest" in page.read_text() and "old" not in page.read_text()
    )
    ElementTree.fromstring((tmp_path / picture).read_text())
    assert made.write(tmp_path) == [] and not stray.exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("drawing nothing", "nothing"),
        ("drawing grid tp", "'tp' is not name=value"),
        ("flags layout", "'layout' is not one of command, model"),
        ("poem", "poem"),
    ],
)
def test_words_that_make_nothing_are_an_error_with_the_page(words: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"<!-- made by the code: {words} -->\n<!-- until here -->\n")
    with pytest.raises(ValueError, match=rf"README.md: `{words}` cannot be made: .*{re.escape(reason)}"):
        made.make(tmp_path)


def test_every_flag_and_every_negation_has_an_entry() -> None:
    known = anchors(ROOT / "docs" / "reference" / "flags.md")
    spelled = {flag for option in all_options() for flag in option.flags}
    off = {
        flag
        for option in all_options()
        if option.kind is bool and option.section != "command"
        for flag in option.negations
    }
    assert known.keys() >= spelled | off
    assert len(set(known.values())) == len(all_options())


def test_every_command_has_its_help_on_the_page_of_commands() -> None:
    page = text_of("docs/reference/commands.md")
    assert all(f"## {name}\n\n```text\nusage: megazero {name}" in page for name in SUBCOMMANDS)


# --- plain Markdown --------------------------------------------------------------------------------------------------


def hidden(text: str) -> list[str]:
    """What a forge would not show, or show raw: links and pictures without words, directives, roles."""
    directives = [block["language"] for block in FENCE.finditer(text) if block["language"].startswith("{")]
    prose = FENCE.sub("", text)
    nameless = re.findall(r"!?\[\s*\]\([^)]*\)", prose)
    return directives + nameless + re.findall(r"^:::.*$|\{[a-z:]+\}`[^`]*`", prose, re.M)


@pytest.mark.parametrize("page", pages())
def test_plain_markdown_hides_nothing(page: str) -> None:
    assert not hidden(text_of(page))


def test_what_a_forge_would_not_show_is_seen() -> None:
    text = "[](a.md) [b](b.md) ![](c.svg)\n```{toctree}\na\n```\n```sh\nx [](d.md)\n```\n:::{note}\n:::\n{ref}`e`\n"
    assert hidden(text) == ["{toctree}", "[](a.md)", "![](c.svg)", ":::{note}", ":::", "{ref}`e`"]


def test_a_rendered_page_has_words_in_every_link(as_made: made.Made) -> None:
    """By another renderer of Markdown than the expressions above."""
    markdown_it = pytest.importorskip("markdown_it")
    render = markdown_it.MarkdownIt("commonmark").enable("table").parse
    for page in pages():
        for token in render(text_of(page)):
            children = token.children or []
            for at, child in enumerate(children):
                if child.type == "link_open":
                    assert children[at + 1].type != "link_close", (
                        f"{page}: a link to {child.attrGet('href')} without words"
                    )
            assert not token.info.startswith("{"), f"{page}: {token.info}"


def test_every_page_is_listed_once() -> None:
    """By the table of an index page, from which the site's side bar is made."""
    entries = []
    for page in pages():
        if page.endswith("/index.md"):
            entries += [
                str(((ROOT / page).parent / f"{entry}.md").resolve().relative_to(ROOT))
                for entry in listed(text_of(page))
            ]
    site = {page for page in pages() if page.startswith("docs/") and page != "docs/index.md"}
    assert sorted(entries) == sorted(site)
    assert {f"docs/{name}.md" for name in INCLUDED} <= site
