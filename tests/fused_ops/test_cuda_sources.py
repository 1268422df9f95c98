"""Every CUDA source compiles alone, for every generation of cards that it is written for, without spilling a register.
On an A100 and an H100 the hot kernels keep their budgets (bench/kernel_budgets.csv). Over a stand-in for the runtime,
which records launches, every launcher does what it should.

A run compiles for one of these two cards, which its seed draws: between them they have all code that is particular to
generations, but for the bounds of sm_75's cross-entropy. `make test-all` compiles for all generations.
"""

import hashlib
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from bench.kernel_budgets import BUDGETS, CARDS, found_in
from bench.machine_code import disassembler
from fused_ops.native import compile as compiling
from fused_ops.native import library
from fused_ops.native.cache import cache_folder, find_or_build
from fused_ops.native.card_trial import card_refusal
from fused_ops.native.compile import NVCC, SOURCES, CompileError, Target
from fused_ops.native.cuda import CudaLibrary
from tests.fused_ops.levels import exported
from tests.fused_ops.stand_in_runtime import Watched, link
from tests.gpu.sanitize import run

FOLDER = SOURCES / "cuda"
CAPABILITIES = ("75", "80", "86", "89", "90", "100", "103", "120")
"""Turing to Blackwell; of these the ones that the compiler knows."""


def nvcc() -> str:
    try:
        return compiling.compiler(NVCC)
    except CompileError as error:
        pytest.skip(str(error))


REPORTS = ("-Xptxas", "-v")
"""Has the assembler tell the registers and memory of every kernel."""


@dataclass(frozen=True)
class Card:
    """The library for a card, for what its sources were compiled, what the compiler said of all, and the machine code
    in files.
    """

    library: Path
    capabilities: tuple[str, ...]
    said: str
    kept: Path

    def machine_code(self, capability: str) -> list[Path]:
        return sorted(self.kept.glob(f"*_{capability}.cubin"))


@pytest.fixture(scope="module")
def card(pytestconfig: pytest.Config, seed: int) -> Card:
    """Compiled once per machine, as at first use, by a compiler that is also asked for reports. `make test-all` has it
    compile for all generations.
    """
    version = compiling.compiler_version(nvcc())
    known = [capability for capability in CAPABILITIES if capability in compiling.cuda_capabilities()]
    drawn = list(CARDS)[seed % len(CARDS)]
    others = [other for other in known if other != drawn] if pytestconfig.option.depth == "all" else []
    target = compiling.cuda_target(drawn)
    inputs = " ".join([target.digest(), version, drawn, *others, *REPORTS])
    kept = cache_folder() / f"cuda_reports_{hashlib.sha256(inputs.encode()).hexdigest()[:20]}"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as work:
            compile_with_reports(target, others, Path(work)).rename(kept)
    return Card(kept / f"{target.name}.so", (drawn, *others), (kept / "said").read_text(), kept)


def compile_with_reports(target: Target, others: list[str], folder: Path) -> Path:
    """Compile the target in this folder, for other generations too; return a folder in it with the library, the machine
    code, the objects and what the compiler said.
    """
    kept, wrapper = folder / "kept", folder / "nvcc"
    kept.mkdir()
    code = (f"-gencode=arch=compute_{other},code=sm_{other}" for other in others)
    more = " ".join([*REPORTS, f"--keep --keep-dir {kept}", *code])
    # Each source's words in one piece: ninja has several compiled at once.
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*|*-shared*) exec {nvcc()} "$@";; esac\n'
        f'words=$({nvcc()} "$@" {more} 2>&1); status=$?\nprintf "%s\\n" "$words" >> {kept}/said; echo "$words"\n'
        f'for object; do :; done; [ $status != 0 ] || cp "$object" {kept}; exit $status\n'
    )
    wrapper.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDACXX", str(wrapper))
        patch.setenv("MEGAZERO_KERNEL_CACHE", str(folder / "cache"))
        built = find_or_build(target)
    for made in kept.iterdir():
        if made.suffix not in (".cubin", ".o", ""):
            made.unlink()
    built.rename(kept / built.name)
    return kept


def spills(said: str) -> list[tuple[str, ...]]:
    """(stack, stores, loads) in bytes, of every kernel."""
    return re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)


@pytest.mark.slow
def test_every_source_compiles_alone_without_spills(card):
    assert "warning" not in card.said, card.said[:2000]
    found = spills(card.said)
    assert all(numbers == ("0", "0", "0") for numbers in found), "kernels that keep registers in memory:\n" + card.said
    of = {capability: card.said.count(f"for 'sm_{capability}'") for capability in card.capabilities}
    assert sum(of.values()) == len(found) and min(of.values()) > 100, of


@pytest.mark.slow
def test_three_blocks_of_the_cross_entropy_fit_on_a_multiprocessor(card):
    """A multiprocessor has 65,536 registers. (Turing's has 1,024 threads, which are two blocks.)"""
    found = re.findall(r"function '\S*cross_entropy\S*' for 'sm_(\d+)'[^']*?Used (\d+) registers", card.said)
    assert len(found) == 6 * len(card.capabilities)
    assert max([int(used) for capability, used in found if capability != "75"], default=0) <= 65_536 // (3 * 512)


@pytest.mark.slow
def test_hot_kernels_keep_their_budgets(card):
    tool = disassembler() or pytest.skip("no nvdisasm, which reads machine code; `pip install nvidia-cuda-nvdisasm`")
    judged = [capability for capability in CARDS if capability in card.capabilities]
    assert judged
    for capability in judged:
        found = found_in(card.machine_code(capability), capability, tool)
        assert len(found) == sum(capability in budget.limits for budget in BUDGETS)
        faults = [f"{one.budget.source}.cu, {one.budget.name}: {fault}" for one in found for fault in one.faults()]
        assert not faults, f"for sm_{capability}:\n" + "\n".join(faults)


def test_sources_include_nothing_of_torch():
    for path in [*FOLDER.glob("*.cu"), *FOLDER.glob("*.h")]:
        assert not re.search(r"#include\s*[<\"](torch|ATen|c10)", path.read_text()), path.name


@pytest.mark.slow
def test_the_library_for_a_card_is_built_and_has_every_function_of_the_emulated_one(card):
    assert exported(card.library) == exported(find_or_build(compiling.emulated_target()))
    assert len(exported(card.library)) > 60
    found = CudaLibrary(card.library, "CUDA")  # loads where there is no card and no driver
    driver, runtime = found.versions()
    assert runtime >= 11000 and (driver == 0) == (not Path("/dev/nvidiactl").exists())
    if driver == 0:
        assert "no driver was found" in card_refusal(found, torch.device("cuda", 0))


@pytest.fixture(scope="module")
def stood_in(card, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return link(sorted(card.kept.glob("*.o")), tmp_path_factory.mktemp("stood_in"))


@pytest.mark.slow
def test_every_launcher_launches_on_its_stream_and_hands_errors_on(card, stood_in, monkeypatch):
    """Within the limits of a grid, also for sizes that no test has. Behind a launch that failed nothing is launched."""
    watched = Watched(stood_in)
    monkeypatch.setenv("MEGAZERO_FUSED", library.EMULATED)
    monkeypatch.setattr(library, "cpu_library", lambda asked: watched)
    run(torch.device("cpu"))
    assert not watched.faults, "\n".join(dict.fromkeys(watched.faults))
    assert watched.launched.keys() == exported(card.library) - {"error_text", "cuda_versions"}
    assert min(watched.launched.values()) > 0


PLANTED = """
#include "launch.h"
using namespace mz;
__global__ void __launch_bounds__(1024, 2) spills(float* x) {
  float a[80];
  for (int i = 0; i < 80; ++i) a[i] = x[threadIdx.x + i * 1024];
  __syncthreads();
  for (int i = 0; i < 80; ++i) x[threadIdx.x * 80 + i] = a[i] * a[79 - i];
}
__global__ void k(float* x) { *x = 1.0f; }
MZ_API int good(Launch* to, int64_t n, float* x) {
  int error = launch(*to, k, dim3((unsigned)parts_of(n, 256)), dim3(256), x);
  return error ? error : launch(*to, k, dim3(1), dim3(32), x);
}
MZ_API int default_stream(Launch* to, int64_t n, float* x) { k<<<1, 32>>>(x); return 0; }
MZ_API int deaf(Launch* to, int64_t n, float* x) { launch(*to, k, dim3(1), dim3(32), x); return 0; }
MZ_API int goes_on(Launch* to, int64_t n, float* x) {
  int error = launch(*to, k, dim3(1), dim3(32), x), other = launch(*to, k, dim3(1), dim3(32), x);
  return error ? error : other;
}
MZ_API int tall(Launch* to, int64_t n, float* x) { return launch(*to, k, dim3(1, (unsigned)n), dim3(32), x); }
MZ_API int wide_block(Launch* to, int64_t n, float* x) { return launch(*to, k, dim3(1), dim3(2048), x); }
MZ_API int part_of_a_warp(Launch* to, int64_t n, float* x) { return launch(*to, k, dim3(1), dim3(40), x); }
MZ_API int hasty(Launch* to, int64_t n, float* x) {
  int error = launch(*to, k, dim3(1), dim3(32), x);
  return scratch<float>(*to, 1 << 30) ? error : MORE_SCRATCH;
}
"""
FAULTS = {
    "good": "",
    "default_stream": "is on stream None",
    "deaf": "returns 0 where its launch 0 fails with 700",
    "goes_on": "goes on where its launch 0 fails",
    "tall": "has a grid of (1, 1048576, 1) with 262144 times its argument 0",
    "wide_block": "has blocks of 2048 threads",
    "part_of_a_warp": "has blocks of 40 threads",
    "hasty": "launches 1 kernels and asks for scratch memory",
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """An object of kernels and launchers with faults, and what the compiler says of them."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "planted.cu").write_text(PLANTED)
    words = f"-std=c++17 -arch=sm_90 -Xcompiler -fPIC -I{FOLDER} -c {folder}/planted.cu -o {folder}/planted.o"
    done = subprocess.run([nvcc(), *REPORTS, *words.split()], check=True, capture_output=True, text=True)
    return folder / "planted.o", done.stderr


@pytest.mark.slow
def test_a_report_of_spills_is_seen(planted):
    """The check above rests on the compiler's words."""
    (stores,) = (int(stores) for _, stores, _ in spills(planted[1]) if stores != "0")
    assert stores > 0


@pytest.mark.slow
def test_faults_of_launchers_are_seen(planted, tmp_path):
    watched = Watched(link([planted[0]], tmp_path))
    for name, fault in FAULTS.items():
        watched.faults.clear()
        watched.call(name, 4, torch.zeros(()))
        assert any(fault in words for words in watched.faults) if fault else not watched.faults, (name, watched.faults)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("driver", "runtime", "failure", "words"),
    [
        (12080, 13000, 0, "linked to CUDA 13.0, and the driver runs CUDA 12.8 at most"),
        (0, 13000, 0, "no driver was found"),
        (13000, 13000, 0, "a trial launch on cpu is wrong"),
        (13000, 13000, 209, "no kernel image is available for execution on the device (CUDA error 209)"),
    ],
)
def test_a_library_that_no_driver_runs_is_refused(stood_in, driver, runtime, failure, words):
    """As it is in the library itself: the runtime says the versions, a launch fails or computes nothing."""
    found = CudaLibrary(stood_in, "stood in")
    found.function("stand_in_versions")(driver, runtime)
    found.function("stand_in_begin")(0 if failure else -1, failure)
    assert words in card_refusal(found, torch.device("cpu"))
