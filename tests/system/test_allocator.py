"""What glibc does with freed memory under the program's settings, seen by the kernel's count of a process."""

import os
import platform
import subprocess
import sys

import pytest

from megazero.system.allocator import LARGE, VARIABLE, describe, settings

BYTES = 4 * LARGE  # more than the heap has to spare
CODE = f"""
from megazero.system.allocator import return_large

def held():
    return int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0]) * 1024

{{call}}
before = held()
block = bytearray(b"x") * {BYTES}
there = held()
del block
print(there - before, held() - before)
"""


def growth(call: str, given: str) -> list[int]:
    """Bytes by which a process has grown with a large block, and after it is freed."""
    command = [sys.executable, "-c", CODE.replace("{call}", call)]
    done = subprocess.run(command, env={**os.environ, VARIABLE: given}, capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc")
def test_large_blocks_return_to_the_system_only_where_a_run_asks_for_it() -> None:
    for call, given, stays in (
        ("", settings(), True),
        ("return_large()", settings(), False),
        ("return_large()", "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184", True),
    ):
        there, left = growth(call, given)
        assert there > 0.9 * BYTES
        assert (left > 0.9 * BYTES) is stays and (left < 0.1 * BYTES) is not stays, (call, given, left)


def test_the_banner_says_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, settings())
    assert describe() == "glibc keeps freed memory, large pages where allowed"
    assert describe(returns_large=True) == "glibc keeps freed memory below 32 MiB, large pages where allowed"
    monkeypatch.setenv(VARIABLE, "glibc.malloc.trim_threshold=1")
    assert describe(returns_large=True) == f"glibc with {VARIABLE} as given"
