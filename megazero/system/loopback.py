"""Ranks of one host that are started here: where they meet, and the network interface that their messages take."""

from __future__ import annotations

import socket
from pathlib import Path

INTERFACES = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Variables of the backends that name an interface."""
ADDRESS = "127.0.0.1"


def interface_variables() -> dict[str, str]:
    """What says to the backends that ranks of one host talk to each other. Empty where the interface has another name
    than Linux's.
    """
    return dict.fromkeys(INTERFACES, "lo") if Path("/sys/class/net/lo").is_dir() else {}


def free_port() -> int:
    """A port of this host that nobody has now."""
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        number: int = probe.getsockname()[1]
        return number
