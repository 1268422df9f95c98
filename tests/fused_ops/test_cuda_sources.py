"""Every CUDA source compiles alone, for every generation of cards that it is written for, without spilling a register."""

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fused_ops.native import compile as compiling
from fused_ops.native.binding import Library
from fused_ops.native.cache import built
from fused_ops.native.compile import NVCC, SOURCES, CompileError

FOLDER = SOURCES / "cuda"
CAPABILITIES = ("80", "90")


def nvcc() -> str:
    try:
        return compiling.compiler(NVCC)
    except CompileError as error:
        pytest.skip(str(error))


def compiled(command: str, source: Path, folder: Path) -> str:
    """What the compiler says of the source, with the registers and memory of every kernel."""
    targets = [f"-gencode=arch=compute_{capability},code=sm_{capability}" for capability in CAPABILITIES]
    words = [command, "-std=c++17", f"-I{FOLDER}", *targets, "-Xptxas", "-v", "-c", str(source), "-o", str(folder / f"{source.stem}.o")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, f"{source.name}:\n{done.stderr[-3000:]}"
    return done.stderr


@pytest.mark.slow
def test_every_source_compiles_alone_without_spills(tmp_path):
    command, sources = nvcc(), sorted(FOLDER.glob("*.cu"))
    with ThreadPoolExecutor(2) as pool:
        reports = dict(zip(sources, pool.map(lambda source: compiled(command, source, tmp_path), sources), strict=True))
    kernels = 0
    for source, report in reports.items():
        assert "warning" not in report, f"{source.name}: {report[:2000]}"
        found = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
        kernels += len(found)
        assert all(numbers == ("0", "0", "0") for numbers in found), f"{source.name} keeps registers in memory:\n{report}"
        for capability in CAPABILITIES:
            assert not found or f"sm_{capability}" in report
    assert kernels > 100 * len(CAPABILITIES)


def test_a_report_of_spills_is_seen(tmp_path):
    """The check above rests on the compiler's words."""
    source = tmp_path / "spills.cu"
    source.write_text(
        "__global__ void __launch_bounds__(1024, 2) k(float* x) {\n"
        "  float a[80];\n"
        "  for (int i = 0; i < 80; ++i) a[i] = x[threadIdx.x + i * 1024];\n"
        "  __syncthreads();\n"
        "  for (int i = 0; i < 80; ++i) x[threadIdx.x * 80 + i] = a[i] * a[79 - i];\n"
        "}\n"
    )
    numbers = re.findall(r"(\d+) bytes spill stores", compiled(nvcc(), source, tmp_path))
    assert len(numbers) == len(CAPABILITIES) and all(int(number) > 0 for number in numbers)


def test_sources_include_nothing_of_torch():
    for path in [*FOLDER.glob("*.cu"), *FOLDER.glob("*.h")]:
        assert not re.search(r"#include\s*[<\"](torch|ATen|c10)", path.read_text()), path.name


@pytest.mark.slow
def test_the_library_for_a_card_is_built_and_has_every_function_of_the_emulated_one(tmp_path, monkeypatch):
    nvcc()
    monkeypatch.setenv("MEGAZERO_KERNEL_CACHE", str(tmp_path))
    path = built(compiling.cuda_target("90"))
    assert exported(path) == exported(built(compiling.emulated_target())) and len(exported(path)) > 60
    Library(path, "CUDA")  # loads where there is no card and no driver


def exported(path: Path) -> set[str]:
    """C functions of ours that a library offers."""
    tool = shutil.which("nm") or pytest.skip("no nm")
    listed = subprocess.run([tool, "-D", "--defined-only", str(path)], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1] for line in listed.splitlines() if line.split()[-2] == "T" and not line.split()[-1].startswith("_")}
