"""Exit statuses of every program here; docs/reference/exit-status.md says who ends with which."""

from __future__ import annotations

import signal

FAILED, MISTAKEN = 1, 2
"""Something went wrong; what the user asked for is wrong."""
INTERRUPTED, READER_LEFT = 128 + signal.SIGINT, 128 + signal.SIGPIPE
"""As a shell counts the signals."""
