"""Chat templates that would take all time, all memory or the whole process: each is one error, soon, and the next text
is written.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megazero.data.indexed import DataError
from megazero.data.template_process import TemplateProcess
from megazero.data.template_program import Limits
from tests.forks import fork

ROOT = Path(__file__).parents[2]
QUICK = Limits(seconds=1, memory=1 << 28, characters=1 << 16, growth=2)
IF_EVIL = "{% if evil %}%s{% endif %}fine{{ evil }}"
ENDLESS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% "
    "endfor %}{% endfor %}",
    "one product": "{% set n = 10 ** 7 * evil %}{% set x = 7 ** n %}{% set y = x * x * x * x %}",
}
HUGE = {
    "a string": ("{% set x = 'a' * (10 ** 11 * evil) %}", "256 MiB of memory"),
    "a string that doubles": (
        "{% set ns = namespace(s='ab') %}{% for i in range(70) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "256 MiB of memory",
    ),
    "a number with a width": ("{% set x = '%1000000000d' % evil %}", "256 MiB of memory"),
    "a list of lists": ("{% set x = range(99999) | map('center', 99999) | list %}", "256 MiB of memory"),
    "an output": ("{% for i in range(9999) %}{{ 'abcdefghij' * 10 }}{% endfor %}", "its text has more than 65,"),
    "a range": ("{% for i in range(10 ** 12) %}{% endfor %}", "Range too big"),
    "a macro of itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
}


def refused(source: str, message: str) -> None:
    """The template writes a first text, is refused the second, and writes a third."""
    template = TemplateProcess(IF_EVIL.replace("%s", source), QUICK)
    assert template.render({"evil": 0}) == "fine0"
    with pytest.raises(DataError, match="the chat template fails: .*" + message):
        template.render({"evil": 1})
    assert template.render({"evil": 0}) == "fine0"


@pytest.mark.slow
@pytest.mark.parametrize("case", ENDLESS)
def test_time_ends(case: str) -> None:
    refused(ENDLESS[case], "it takes more than 1 s")


@pytest.mark.few(cases=2)
@pytest.mark.parametrize("case", HUGE)
def test_size_ends(case: str) -> None:
    refused(*HUGE[case])


def test_a_program_that_cannot_be_read_takes_nobody_with_it() -> None:
    """Python's parsers go as deep as the source does."""
    for source in ("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}", "{% if 1 %}" * 5_000 + "{% endif %}" * 5_000):
        with pytest.raises(DataError, match="the chat template"):
            TemplateProcess(source, QUICK)


def test_what_is_given_is_json() -> None:
    template = TemplateProcess("{{ x }}")
    assert template.render({"x": "\ud83d\n\u2028"}) == "\ud83d\n\u2028"
    with pytest.raises(DataError, match="cannot be given what is no JSON: Object of type object"):
        template.render({"x": object()})


def _started(folder: Path, *, before: str = "") -> subprocess.CompletedProcess[str]:
    """A program in a folder that has no package, with the import hook of an editable install, renders a template."""
    hook = f"""
import importlib.machinery, importlib.util, sys
class Hook:
    def find_spec(name, path=None, target=None):
        if name in ("megazero", "fused_ops"):
            return importlib.machinery.PathFinder.find_spec(name, [{str(ROOT)!r}])
sys.path[:] = [place for place in sys.path if place not in ("", {str(ROOT)!r})]
sys.meta_path.append(Hook)
{before}
from megazero.data.template_process import TemplateProcess
print(TemplateProcess("{{{{ x }}}}").render({{"x": "rendered"}}))
"""
    return subprocess.run([sys.executable, "-c", hook], cwd=folder, capture_output=True, text=True, check=False)


def test_an_import_hook_may_find_the_package(tmp_path: Path) -> None:
    """The process of the template has no such hook."""
    done = _started(tmp_path)
    assert (done.stdout, done.stderr) == ("rendered\n", "")


def test_what_ends_the_process_is_said(tmp_path: Path) -> None:
    """A jinja2 that fails where it is imported: its last line is in the message."""
    (tmp_path / "jinja2").mkdir()
    (tmp_path / "jinja2" / "__init__.py").write_text("import os, sys\nsys.exit('no jinja today')\n")
    done = _started(tmp_path, before=f"sys.path.insert(0, {str(tmp_path)!r})")
    assert "the chat template fails: its process ended with status 1: 'no jinja today'" in done.stderr


def test_nothing_is_left() -> None:
    """No thread, and no process behind the object, nor behind a program that is killed."""
    threads = threading.active_count()
    template = TemplateProcess("{{ x }}")
    assert template._process is not None
    own = os.pidfd_open(template._process.pid)
    assert threading.active_count() == threads
    del template
    assert select.select([own], [], [], 60)[0], "it has ended"
    program = (
        "import sys; from megazero.data.template_process import TemplateProcess as T; t = T('x');"
        "print(t._process.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as killed:
        assert killed.stdout is not None
        child = os.pidfd_open(int(killed.stdout.readline()))
        assert not select.select([child], [], [], 0)[0]
        killed.kill()
    assert select.select([child], [], [], 60)[0]
    os.close(own)
    os.close(child)


def test_a_fork_has_a_process_of_its_own() -> None:
    """Else parent and child would read each other's answers."""
    template = TemplateProcess("{{ x }}")
    (reading, writing), number = os.pipe(), fork()
    if number == 0:
        answers = {template.render({"x": "child"}) for _ in range(50)}
        os.write(writing, ",".join(sorted(answers)).encode())
        os._exit(0)
    answers = {template.render({"x": "parent"}) for _ in range(50)}
    assert os.waitpid(number, 0)[1] == 0
    assert answers == {"parent"} and os.read(reading, 99) == b"child"
    os.close(reading)
    os.close(writing)


def test_an_interrupted_text_is_not_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    template = TemplateProcess("{{ x }}")
    began, process = time.monotonic(), template._process
    assert process is not None and process.stdin is not None

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(process.stdin, "flush", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        template.render({"x": "first"})
    assert template.render({"x": "second"}) == "second" and time.monotonic() - began < 60
