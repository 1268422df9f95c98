"""The limits of control groups count, of both versions, wherever the process's group is."""

from pathlib import Path
from typing import NamedTuple

import pytest

from megazero.system import host_memory, limits


class Version(NamedTuple):
    """How a version of control groups names a limit, no limit, what is used, and the page cache."""

    limit: str
    without: str
    used: str
    stat: str


STAT = "anon 29000000\nfile 21000000\n{0}inactive_file 3000000\n{0}active_file 1000000\nshmem 17000000\n"
NEWER = Version("memory.max", "max", "memory.current", STAT.format(""))
OLDER = Version(
    "memory.limit_in_bytes",
    "9223372036854771712",
    "memory.usage_in_bytes",
    "inactive_file 7\nactive_file 9\n" + STAT.format("total_"),
)
# /proc/self/cgroup, and the group's folder below what is mounted: in a container, in a job of a batch system, beside
# the mount.
GROUPS = {
    "container": (NEWER, "0::/\n", "."),
    "job": (NEWER, "1:cpu:/\n0::/slurm/job_7/step_0\n", "slurm/job_7"),
    "elsewhere": (NEWER, "0::/../outer\n", "."),
    "older container": (OLDER, "4:memory:/docker/1f\n1:cpu:/docker/1f\n", "memory"),
    "older job": (OLDER, "3:cpuset:/other\n4:hugetlb,memory:/slurm/job_7/step_0\n0::/\n", "memory/slurm/job_7"),
}


@pytest.mark.parametrize("kind", GROUPS)
def test_a_control_groups_limit_counts(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its files fill in the page cache is given up when memory is asked for."""
    version, told, folder = GROUPS[kind]
    own = tmp_path / "root" / folder
    own.mkdir(parents=True)
    (tmp_path / "cgroup").write_text(told)
    monkeypatch.setattr(limits, "OWN", tmp_path / "cgroup")
    monkeypatch.setattr(limits, "ROOT", tmp_path / "root")
    machine, total, swap = (host_memory.machine_bytes(name) or 0 for name in ("MemAvailable", "MemTotal", "SwapTotal"))
    assert host_memory.available_bytes() == pytest.approx(machine, rel=0.5), "there is none"
    (own / version.used).write_text("50000000\n")
    (own / "memory.stat").write_text(version.stat)
    for limit, free in ((60_000_000, 14_000_000), (40_000_000, 0)):
        (own / version.limit).write_text(f"{limit}\n")
        assert host_memory.available_bytes() == free
        assert host_memory.limit_bytes() == limit + swap
        assert host_memory.is_short() == (4 * free < limit + swap)
    (own / version.limit).write_text(f"{version.without}\n")
    assert host_memory.available_bytes() == pytest.approx(machine, rel=0.5)
    assert host_memory.limit_bytes() == total + swap
