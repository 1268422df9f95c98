"""A certificate: what was run, by which code, and how equal it was, as JSON that `--check` runs again."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from megazero import __version__
from megazero.config.dump import changed_settings
from megazero.config.schema import Run
from megazero.pipeline.stage_specs import specs_of_stage
from megazero.system import extensions
from megazero.verify.compare import TOLERANCE
from megazero.verify.proof import Proof
from megazero.verify.session import SPOILED

FORMAT = 1
PACKAGES = "megazero", "fused_ops"
SOURCES = (".py", ".cpp", ".cu", ".cuh", ".h")
FOLLOWS = "settings", "small", "roles", "left_out", "tolerance", "seed"
"""What a certificate says that follows from its flags, its number of ranks and the code."""
GROUPS = extensions.LR_DECAY_STYLES, extensions.SINKS, extensions.FAMILIES


class NotACertificate(ValueError):
    """A file that is no certificate of this format."""


def code_hash() -> str:
    """A hash of the sources of this installation, and of the modules that installed packages add to it."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        spec = find_spec(package)
        assert spec is not None and spec.submodule_search_locations is not None
        root = Path(next(iter(spec.submodule_search_locations)))
        for path in sorted(path for path in root.rglob("*") if path.suffix in SOURCES):
            digest.update(f"{package}/{path.relative_to(root).as_posix()}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    for point in sorted({point.value.partition(":")[0] for group in GROUPS for point in entry_points(group=group)}):
        found = find_spec(point)
        if found is not None and found.origin is not None and Path(found.origin).is_file():
            digest.update(f"{point}\0".encode() + hashlib.sha256(Path(found.origin).read_bytes()).digest())
    return digest.hexdigest()


def certificate(flags: Sequence[str], run: Run, world_size: int, proof: Proof, seconds: float) -> dict[str, Any]:
    """The certificate of a proof as JSON's types. flags: of the run, as they were given."""
    small = proof.small
    difference = proof.difference
    return {
        "format": FORMAT,
        "result": "equal" if proof.equal else "differs",
        "difference": None if difference is None else difference._asdict() | {"error": _number(difference.error)},
        "failure": proof.failure,
        "flags": list(flags),
        "world_size": world_size,
        "settings": changed_settings(run),
        "small": {"settings": changed_settings(small.run), "ranks": small.axes.world_size, "steps": SPOILED},
        "roles": roles(run, proof),
        "left_out": list(small.notes),
        "tolerance": TOLERANCE,
        "worst_relative_error": {name: _number(error) for name, error in sorted(proof.errors.items())},
        "slope_error": _number(proof.slope_error),
        "seed": small.run.data.seed,
        "code": {"sha256": code_hash(), "megazero": __version__},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "seconds": round(seconds, 1),
    }


def roles(run: Run, proof: Proof) -> dict[str, Any]:
    """Which ranks stand for which: the axes of the run and of the small one, and the blocks of each stage."""
    real, small = proof.small.real, proof.small.axes
    stages = [
        {"stage": stage, "blocks": sum(len(spec.blocks) for spec in specs_of_stage(proof.small.run, stage))}
        for stage in range(small.pp)
    ]
    return {
        "ranks": real.world_size,
        "axes": real.sizes | {"shard": real.shard_size},
        "ranks_run": small.world_size,
        "axes_run": small.sizes | {"shard": small.shard_size},
        "stages": stages,
        "by_role": small.pp * small.tp,
    }


def _number(error: float) -> float | str:
    return error if error == error and abs(error) != float("inf") else "not a number"


@dataclass(frozen=True)
class Claim:
    """What a certificate says that can be run again. follows: of `FOLLOWS`, as the file has it."""

    flags: tuple[str, ...]
    world_size: int
    result: str
    code: str
    follows: Mapping[str, Any]

    def edited(self, again: Mapping[str, Any]) -> list[str]:
        """The keys of `FOLLOWS` of which the certificate that the same code writes says something else."""
        made = json.loads(json.dumps(again))
        return [name for name in FOLLOWS if self.follows[name] != made[name]]


def read_claim(path: Path) -> Claim:
    """What a file claims. Raises NotACertificate."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotACertificate(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise NotACertificate(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        given = content.get("format", "not said") if isinstance(content, dict) else type(content).__name__
        raise NotACertificate(f"{path} is no certificate of format {FORMAT}: its format is {str(given)[:40]}")
    flags, world, result, code = (content.get(name) for name in ("flags", "world_size", "result", "code"))
    digest = code.get("sha256") if isinstance(code, dict) else None
    if (
        not isinstance(flags, list)
        or not all(isinstance(word, str) for word in flags)
        or type(world) is not int
        or not isinstance(digest, str)
        or result not in ("equal", "differs")
    ):
        raise NotACertificate(f"{path} lacks flags, world_size, result or the hash of the code")
    if result == "equal" and (content.get("difference") is not None or content.get("failure") is not None):
        raise NotACertificate(f"{path} says equal, and a difference or a failure as well")
    return Claim(tuple(flags), world, str(result), digest, {name: content.get(name) for name in FOLLOWS})
