"""Exit statuses of all programs; docs/reference/exit-status.md lists when each occurs."""

from __future__ import annotations

import signal

FAILED, MISTAKEN = 1, 2
"""The program failed; the configuration or the command line is wrong."""
INTERRUPTED, READER_LEFT = 128 + signal.SIGINT, 128 + signal.SIGPIPE
"""128 + the signal's number, as in a shell: Ctrl-C; the reader of the output has closed the pipe."""
