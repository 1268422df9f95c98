"""Children of a process that computes.

A child of a fork has one thread. If its parent has run a parallel loop of torch, the child believes that the other
threads are there too, and its own first parallel loop waits for them for ever. A child that computes on one thread
starts no such loop.
"""

from __future__ import annotations

import os

import torch


def fork() -> int:
    """`os.fork`, with one thread of torch in the child."""
    child = os.fork()
    if not child:
        torch.set_num_threads(1)
    return child
