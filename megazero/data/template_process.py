"""A chat template that runs in a process of its own. `template_program` is the program there and has its limits."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from threading import Lock
from typing import Any

from megazero.data import template_program
from megazero.data.indexed import DataError
from megazero.data.template_program import Limits
from megazero.system.reading import shown

DEFAULT = Limits()
OLDEST_JINJA = (3, 1, 6)
"""The oldest allowed version: earlier sandboxes have known escapes."""
_START = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[1]); runpy.run_path(sys.argv[2], run_name='__main__')"
)
_PATIENCE = 2.0
"""Seconds that a process has to end by itself after its input is closed."""


class TemplateProcess:
    """The process of a Jinja program (`source`).

    It starts and ends with this object, and is restarted after a request that exceeded a limit. Threads may share this
    object; a forked process starts a process of its own. Raises DataError where the program cannot be read, ImportError
    without jinja2.
    """

    def __init__(self, source: str, limits: Limits = DEFAULT) -> None:
        _require_jinja()
        self._source, self.limits, self._lock, self._owner = source, limits, Lock(), 0
        self._process: subprocess.Popen[bytes] | None = None
        with self._lock:
            self._start()

    def render(self, variables: dict[str, Any], today: datetime | None = None) -> str:
        """The text of the template with these variables. today: the date of `strftime_now`; None: without that
        function.

        Raises DataError where the template fails or exceeds a limit.
        """
        try:
            request = json.dumps({"variables": variables, "today": today and today.isoformat()})
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"the chat template cannot be given what is no JSON: {error}") from error
        with self._lock:
            if self._process is None or self._owner != os.getpid():
                self._start()
            return self._answer(request)

    def _start(self) -> None:
        # The program is given as a file, since an import hook of this process (an editable install has one) is not
        # there. In a session of its own it does not get Ctrl-C of the terminal. It ends at the end of its input, also
        # when this process is killed.
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                "-W",
                "ignore",
                "-c",
                _START,
                json.dumps(_places()),
                template_program.__file__,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._owner = os.getpid()
        self._end = weakref.finalize(self, _ended, self._process)
        self._answer(json.dumps({"source": self._source, "limits": asdict(self.limits)}))

    def _answer(self, request: str) -> str:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        said = b""
        try:
            with suppress(BrokenPipeError):  # it may have said why
                process.stdin.write(request.encode("ascii") + b"\n")
                process.stdin.flush()
            while (line := process.stdout.readline()) and not line.startswith(b"{"):
                said = line.strip() or said  # no answer, but what Python itself says when the program ends by an error
        except BaseException:  # after Ctrl-C before the answer, the next request would get this answer
            self._drop()
            raise
        if not line.endswith(b"\n"):
            raise DataError(f"the chat template fails: {self._why(self._drop(), said.decode(errors='replace'))}")
        answer: dict[str, str] = json.loads(line)
        if "unreadable" in answer:
            raise DataError(f"the chat template is no program that jinja2 understands: {answer['unreadable']}")
        if "wrong" in answer:
            raise DataError(f"the chat template fails: {answer['wrong']}")
        return answer["text"]

    def _drop(self) -> int:
        """Kill the process; return its status, which is its own if it had ended before."""
        process, self._process = self._process, None
        assert process is not None
        self._end.detach()
        process.kill()
        return _ended(process)

    def _why(self, status: int, said: str) -> str:
        if status == -signal.SIGXCPU:
            return f"it takes more than {self.limits.seconds} s"
        ended = f"its process ended with {'signal' if status < 0 else 'status'} {abs(status)}"
        return f"{ended}: {shown(said)}" if said else ended


def _ended(process: subprocess.Popen[bytes]) -> int:
    """Close the pipes of a process and wait for its end; return its status."""
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(OSError):  # from buffered data that could not be sent
            pipe.close()
    try:
        return process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _places() -> list[str]:
    """Where the program looks for modules: this process's path, and where its import hooks find jinja2."""
    specs = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
    packages = [os.path.dirname(os.path.dirname(spec.origin)) for spec in specs if spec and spec.origin]
    return list(dict.fromkeys([*(place or os.getcwd() for place in sys.path), *packages]))


def _require_jinja() -> None:
    """Raise ImportError unless a recent jinja2 is installed. It is not imported here; only the process needs it."""
    if importlib.util.find_spec("jinja2") is None:
        raise ImportError("chat templates need the package jinja2: pip install jinja2")
    version = importlib.metadata.version("jinja2")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < OLDEST_JINJA:
        raise ImportError(f"chat templates need jinja2 {'.'.join(map(str, OLDEST_JINJA))} or later, not {version}")
