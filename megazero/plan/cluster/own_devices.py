"""The step of a run on the devices that the run has: what a plan with its flags says, for the banner.

The devices are those of an entry of hardware: of the file of --hardware, or of the entry that has the GPU's name. A run
without an entry has no such step.
"""

from __future__ import annotations

import torch

from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.plan.cluster.cluster_step import ClusterStep
from megazero.plan.cluster.hardware import Cluster, FoundDevice, entry_of, known_hardware
from megazero.plan.cluster.kernels import constants_of
from megazero.system import device as devices


def hardware_problems(run: Run) -> list[str]:
    """What is wrong with the file of --hardware, for the run on this machine; nothing without the flag."""
    kind = devices.kind(run.parallel.device)
    if run.trainer.hardware is None or (kind == "cuda" and not devices.cuda_available()):
        return []
    try:
        own_cluster(run, torch.device(kind), 1, 1)
    except ConfigError as error:
        return [*error.problems]
    return []


def own_cluster(run: Run, device: torch.device, ranks: int, ranks_here: int) -> Cluster | None:
    """The cluster of devices like this rank's; None for devices that nobody knows, for ranks that do not fill nodes
    like this one, and where several share a GPU. ranks_here: of this node.

    Raises ConfigError for a file of --hardware that has not the one entry of this device, or not for this run.
    """
    file, precision = run.trainer.hardware, run.optimizer.precision
    if file is None and device.type == "cpu":
        return None
    memory = devices.total_memory_bytes(device) if device.type == "cuda" else None  # ranks of a CPU share it
    entry = entry_of(FoundDevice(device.type, devices.name(device), memory), file)
    if entry is None or (file is None and precision not in entry.flops):
        return None
    if precision not in entry.flops:
        raise ConfigError([f"--hardware {file}: {entry.name} computes in {', '.join(entry.flops)}, not in {precision}"])
    if ranks % ranks_here or (device.type == "cuda" and ranks_here > devices.device_count(device)):
        return None
    try:
        constants_of(entry)
        return known_hardware(file).cluster(entry.name, ranks, ranks_here, None)
    except ConfigError as error:  # what the entry names is not there
        # the problems of a plan name its flags, which a run does not have
        plain = [problem.removeprefix(f"--gpu {entry.name}: ").removeprefix("--") for problem in error.problems]
        raise ConfigError([f"--hardware {file}: {entry.name}: {problem}" for problem in plain]) from None


def own_step(run: Run, device: torch.device, ranks: int, ranks_here: int) -> ClusterStep | None:
    """The step of a resolved run, of the whole batch where it grows. None as for `own_cluster`."""
    cluster = own_cluster(run, device, ranks, ranks_here)
    return None if cluster is None else ClusterStep(run, cluster)
