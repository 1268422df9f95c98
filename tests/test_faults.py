"""Every numerical fault that peers shipped has a test that carries its number."""

import re
from pathlib import Path

FAULTS = range(1, 31)
NOT_BUILT = {11: "offload to host memory"}


def test_every_fault_has_a_test():
    names = re.findall(
        r"def (test_fault_\w+)", "\n".join(path.read_text() for path in Path(__file__).parent.rglob("test_*.py"))
    )
    tested = {int(number) for name in names for number in re.findall(r"(?<=_)\d\d(?=_)", name)}
    assert sorted(set(FAULTS) - tested) == sorted(NOT_BUILT)
