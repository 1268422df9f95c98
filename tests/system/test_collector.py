"""What Python's collector looks at while a command works, and behind it."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from megazero.system.collector import last_work, without_collections


@pytest.mark.parametrize("context", [without_collections, last_work])
def test_nothing_is_collected_within(context: object) -> None:
    assert gc.isenabled() and callable(context)
    with context():
        assert not gc.isenabled()
    assert gc.isenabled()


LEFT = """
import atexit, gc
from megazero.system.collector import last_work

looked_at = []
atexit.register(lambda: print(gc.get_freeze_count() > 100_000, max(looked_at, default=0) < 100_000))
with last_work():
    left = [[number] for number in range(200_000)]
gc.callbacks.append(lambda phase, about: looked_at.append(len(gc.get_objects(about["generation"]))))
more = [[number] for number in range(2_000)]
"""


def test_what_is_left_at_the_end_is_looked_at_by_no_collection() -> None:
    ended = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["True", "True"]
