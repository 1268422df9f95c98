"""What is refused of a run whose optimizer state leaves the device, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from megazero.config.checks_layout import least_buffer
from megazero.config.parse import ConfigError, parse_run
from megazero.config.tiers import ALIGNMENT
from megazero.mpu.parameter import StateGroup
from megazero.zero.layout import BucketLayout
from megazero.zero.offload import run_parts
from megazero.zero.shape import state_widths

ALLOWED = (
    "--offload-optimizer none",
    "--offload-optimizer cpu",
    "--offload-optimizer cpu:0.6 --optimizer sgd --precision fp64",
    "--offload-optimizer cpu:1 --nvme-buffer-bytes 40KB",
    "--offload-optimizer nvme:0.01 --nvme-path a b",
    "--offload-optimizer nvme --nvme-path a --late-update --zero-stage 3",
    "--offload-params cpu",
    "--offload-params nvme:0.3 --nvme-path a --offload-optimizer cpu --zero-stage 1",
    "--offload-gradients cpu --nvme-buffer-bytes 40KB",
    "--offload-gradients nvme:0.3 --nvme-path a --late-update --zero-stage 2",
    "--offload-activations cpu:1e-3",
    "--offload-activations none",
)
REFUSED = {
    "--offload-optimizer gpu": "--offload-optimizer: 'gpu' is not one of none, cpu, nvme, files",
    "--offload-optimizer cpu:": "--offload-optimizer: there is neither a share nor a unit behind the colon of 'cpu:'",
    "--offload-optimizer cpu:head,,embedding": "--offload-optimizer: there is no unit "
    "between two commas of 'cpu:head,,embedding'",
    "--offload-optimizer cpu:half": "--offload-optimizer cpu:half: there is no half; the units of this model are ",
    "--offload-optimizer cpu:nan": "--offload-optimizer: the share nan is not above 0 and at most 1",
    "--offload-optimizer cpu:0": "--offload-optimizer: the share 0 is not above 0 and at most 1",
    "--offload-optimizer cpu:60": "--offload-optimizer: the share 60 is not above 0 and at most 1",
    "--offload-optimizer none:0.5": "--offload-optimizer: none has no share, as in 'none:0.5'",
    "--offload-optimizer nvme:0.5": "--offload-optimizer nvme:0.5 needs --nvme-path DIR, a folder for swap files",
    "--offload-optimizer cpu --nvme-path a": "--nvme-path a has no effect without --offload-optimizer nvme, or the",
    "--offload-optimizer files:0.5": "--offload-optimizer files:0.5 needs --files-path DIR, a folder that another host",
    "--offload-optimizer nvme --nvme-path a --files-path b": "--files-path b has no effect without",
    "--offload-optimizer files --files-path a --nvme-checkpoint": (
        "--nvme-checkpoint has no effect without --offload-optimizer nvme: no optimizer state rests on disks"
    ),
    "--offload-optimizer cpu --nvme-checkpoint": "--nvme-checkpoint has no effect without --offload-optimizer nvme",
    "--offload-params cpu --nvme-buffer-bytes 9": "--nvme-buffer-bytes 9 has no effect without --offload-optimizer or",
    "--offload-optimizer nvme --nvme-path a b ./a": "--nvme-path a b ./a: ./a is there twice; name each folder once",
    "--offload-optimizer cpu --optimizer-impl apex": "apex has kernels for CUDA only, and --offload-optimizer cpu",
    "--offload-optimizer cpu --nvme-buffer-bytes 0": "--nvme-buffer-bytes 0: must be at least 1",
    "--offload-activations cpu:0": "--offload-activations: the share 0 is not above 0 and at most 1",
    "--offload-activations cpu:1.01": "--offload-activations: the share 1.01 is not above 0 and at most 1",
    "--offload-activations cpu:nan": "--offload-activations: the share nan is not above 0 and at most 1",
    "--offload-activations cpu:": "--offload-activations: there is neither a share nor a unit behind the colon of",
    "--offload-activations none:0.5": "--offload-activations: none has no share, as in 'none:0.5'",
    "--offload-params disk": "--offload-params: 'disk' is not one of none, cpu, nvme, files",
    "--offload-params nvme": "--offload-params nvme needs --nvme-path DIR, a folder for swap files",
    "--offload-params cpu --cuda-graphs": "fixed addresses, which --offload-params cpu does not have: drop one of them",
    "--offload-params nvme --nvme-path a --precision bf16 --nvme-buffer-bytes 49151": (
        "with --offload-params nvme are on their way at a time; nearest: --nvme-buffer-bytes 49152"
    ),
    "--offload-gradients disk": "--offload-gradients: 'disk' is not one of none, cpu, nvme, files",
    "--offload-gradients cpu:2": "--offload-gradients: the share 2 is not above 0 and at most 1",
    "--offload-gradients nvme": "--offload-gradients nvme needs --nvme-path DIR, a folder for swap files",
    "--offload-gradients cpu --cuda-graphs": "addresses, which --offload-gradients cpu does not have: drop one of them",
    "--offload-gradients nvme --nvme-path a --precision bf16 --nvme-buffer-bytes 61439": (
        "with --offload-gradients nvme are on their way at a time; nearest: --nvme-buffer-bytes 61440"
    ),
    "--offload-optimizer cpu --precision bf16 --nvme-buffer-bytes 36863": (
        "--nvme-buffer-bytes 36863 does not hold 6 parts of 1024 elements, which with --offload-optimizer cpu are on "
        "their way at a time; nearest: --nvme-buffer-bytes 36864"
    ),
}


@pytest.mark.parametrize("line", ALLOWED)
def test_is_allowed(line: str) -> None:
    parse_run(line.split(), 1)


@pytest.mark.parametrize("line", REFUSED)
def test_is_refused_once(line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_run(line.split(), 1)
    (problem,) = refused.value.problems
    assert REFUSED[line] in problem


def test_a_link_to_a_folder_is_that_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(ConfigError, match="b is there twice"):
        parse_run(["--offload-optimizer", "nvme", "--nvme-path", f"{tmp_path}/a", f"{tmp_path}/b"], 1)


@pytest.mark.parametrize(
    "words",
    [
        "cpu",
        "nvme --nvme-path a",
        "cpu --optimizer sgd",
        "nvme:0.5 --nvme-path a",
        "nvme --nvme-path a --offload-params cpu",
        "nvme --nvme-path a --offload-params nvme",
        "nvme --nvme-path a --offload-gradients nvme",
        "cpu --offload-gradients cpu",
    ],
)
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_the_least_buffer_is_what_the_parts_take(words: str, precision: str) -> None:
    """With it parts have 1024 elements; one more byte for each of their elements would be too much."""
    line = f"--precision {precision} --offload-optimizer {words}".split()
    run = parse_run(line, 1)
    least = least_buffer(run)
    for factor in (1, 3):
        run = parse_run([*line, "--nvme-buffer-bytes", str(factor * least)], 1)
        widths = state_widths(run.optimizer, run.parallel, run.offload)
        layout = BucketLayout(0, (), 0, 0, 6 * 5 * ALIGNMENT, StateGroup.REPLICAS)
        ((parts, *_),) = run_parts([(0, layout.numel)], [layout], widths, run.offload)
        assert max(part.stop - part.start for part in parts if part.tier.value in words) == factor * ALIGNMENT
