"""Compiles the C++ sources to shared libraries by ninja. setup.py uses it too, so it imports the standard library only.

A target is one library. `cpu_*` is for one level of instruction set, from `csrc/cpu`, without torch's headers.
`torch_*`, from `csrc/torch`, needs torch's headers and is therefore built at first use against the installed torch.
`cuda_*`, from `csrc/cuda`, is without torch's headers and is built at first use by nvcc for the present GPU.
`cuda_emulated` is the same sources compiled for the CPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "csrc"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
)
WARNINGS = ("-Wall", "-Wextra", "-Wno-psabi", "-Wno-unknown-pragmas")
LEVELS = {
    "avx512_bf16": ("-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"),
    "avx512": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    "avx2": ("-march=x86-64-v3",),
    "generic": (),
}
"""Instruction set level -> compiler flags, best first."""
_AVX512 = frozenset({"avx512vl", "avx512bw", "avx512dq", "fma"})
NEEDED: Mapping[str, frozenset[str]] = {
    "avx512_bf16": _AVX512 | {"avx512_bf16"},
    "avx512": _AVX512,
    "avx2": frozenset({"avx2", "fma"}),
    "generic": frozenset(),
}
"""Instruction set level -> the flags in Linux's /proc/cpuinfo by which torch, and for bf16 `library.level`, know it."""

CUDA_FLAGS = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden")
EMULATION_FLAGS = (
    "-x",
    "c++",
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-ffp-contract=fast",
    "-U_FORTIFY_SOURCE",
)
"""_FORTIFY_SOURCE would abort at a jump to another fiber's stack."""


class CompileError(RuntimeError):
    """There is no compiler, or it failed. The message says what to do or has the end of its output."""


@dataclass(frozen=True)
class Compiler:
    """How a compiler is found.

    called    its name in messages
    variable  environment variable with its command
    commands  commands that are tried otherwise
    advice    what to do if there is none
    """

    called: str
    variable: str
    commands: Callable[[], Sequence[str]]
    advice: str


def _nvccs() -> list[str]:
    """nvcc of CUDA_HOME, of pip's packages, of PATH, and where the toolkit's installer puts it.

    pip's comes before PATH's: who installs `megazero[cuda]` means it, and its version is that of torch.
    """
    home = [str(Path(os.environ[name]) / "bin/nvcc") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    named = [shlex.quote(path) for path in (*home, *map(str, _nvccs_of_pip()))]
    return [*named, "nvcc", "/usr/local/cuda/bin/nvcc"]


def _nvccs_of_pip() -> list[Path]:
    """Those in this environment that have all of their parts: other packages bring single ones, as torch's does."""
    found = find_spec("nvidia")
    folders = [Path(folder) for folder in (found.submodule_search_locations or ())] if found else []
    roots = [root for folder in folders for root in sorted(folder.glob("cu[0-9]*"), reverse=True)]
    parts = "bin/nvcc", "bin/ptxas", "nvvm/bin/cicc", "include/nv/target", "lib/libcudart_static.a"
    return [root / parts[0] for root in roots if all((root / part).exists() for part in parts)]


CPP = Compiler("C++ compiler", "CXX", lambda: ("g++", "c++", "clang++"), "`sudo apt-get install -y g++` installs one")
NVCC = Compiler(
    "CUDA compiler",
    "CUDACXX",
    _nvccs,
    "`pip install 'megazero[cuda]'` brings one of CUDA 13.0; for another version, which has to be that of torch "
    "(`python -c 'import torch; print(torch.version.cuda)'`), install its toolkit, or name its nvcc in CUDACXX",
)
HINTS = (
    (
        "unsupported GNU version|unsupported clang version",
        "this nvcc knows no host compiler as new: name an older one (NVCC_PREPEND_FLAGS='-ccbin g++-13'), or take a "
        "newer nvcc",
    ),
    (
        "exception specification is incompatible",
        "glibc 2.41 and newer declare functions that nvcc before CUDA 13 declares too: take nvcc of CUDA 13",
    ),
    (
        "Unsupported gpu architecture|is not defined for option 'gpu-architecture'",
        "this nvcc knows the card no longer: name an older one in CUDACXX",
    ),
)
"""What compilers say, and what to do about it."""


@dataclass(frozen=True)
class Target:
    """A shared library `name`.so, compiled from all sources of a folder of `csrc`."""

    name: str
    folder: str
    flags: tuple[str, ...]
    includes: tuple[str, ...] = field(default=())
    links: tuple[str, ...] = field(default=())
    compiler: Compiler = CPP

    @property
    def sources(self) -> list[Path]:
        folder = SOURCES / self.folder
        return sorted([*folder.glob("*.cpp"), *folder.glob("*.cu")])

    @property
    def inputs(self) -> list[Path]:
        """The sources and all headers that they may include."""
        folders = {self.folder, "cpu"} if self.folder == "torch" else {self.folder}
        return sorted([*self.sources, *(path for folder in folders for path in (SOURCES / folder).glob("*.h"))])

    def digest(self) -> str:
        """A hash of the inputs and flags, which determine the library.

        Not of the code that a CUDA compiler generates for the named card: it follows from the compiler's version, and a
        machine without a compiler has to find the library of another.
        """
        flags = [flag for flag in self.flags if not flag.startswith("-gencode")]
        text = hashlib.sha256(json.dumps([self.name, flags, self.includes, self.links]).encode())
        for path in self.inputs:
            text.update(path.name.encode() + path.read_bytes())
        return text.hexdigest()[:20]


def levels_of_this_machine_type() -> tuple[str, ...]:
    """The levels that processors of this architecture may have."""
    return tuple(LEVELS) if platform.machine().lower() in ("x86_64", "amd64") else ("generic",)


def levels_of_this_processor() -> tuple[str, ...]:
    """The level of this processor, without torch, which decides at run time (`library.level`); all that it may be where
    the system does not tell.
    """
    flags, possible = processor_flags(), levels_of_this_machine_type()
    return (next(level for level in possible if NEEDED[level] <= flags),) if flags else possible


@cache
def processor_flags() -> frozenset[str]:
    """The flags of this processor in Linux's /proc/cpuinfo, such as `avx512_bf16`; empty elsewhere."""
    return frozenset(_processor_line("flags").split())


def processor_vendor() -> str:
    """The maker of this processor in Linux's /proc/cpuinfo, such as `AuthenticAMD`; empty elsewhere."""
    return _processor_line("vendor_id").partition(": ")[2]


def _processor_line(begin: str) -> str:
    """The first line of Linux's /proc/cpuinfo that begins so; empty without one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith(begin)), "")


def cpu_target(level: str) -> Target:
    """The CPU kernels without torch's headers, for one level."""
    return Target(f"cpu_{level}", "cpu", FLAGS + WARNINGS + LEVELS[level])


def cuda_target(capability: str) -> Target:
    """The CUDA kernels for GPUs of a compute capability ("90" for 9.0).

    They are machine code and PTX, from which the driver compiles for newer GPUs. For a GPU that is newer than the
    compiler they are PTX for the newest capability that the compiler knows.
    """
    older = [known for known in cuda_capabilities() if int(known) <= int(capability)]
    made_for = older[-1] if older else capability
    code = f"[sm_{made_for},compute_{made_for}]" if made_for == capability else f"compute_{made_for}"
    flags = (*CUDA_FLAGS, f"-gencode=arch=compute_{made_for},code={code}")
    return Target(f"cuda_sm{capability}", "cuda", flags, compiler=NVCC)


def cuda_capabilities() -> list[str]:
    """Those that the CUDA compiler knows, oldest first; empty where there is no compiler."""
    try:
        words = [*shlex.split(compiler(NVCC)), "--list-gpu-arch"]
    except CompileError:
        return []
    said = subprocess.run(words, capture_output=True, text=True, check=False).stdout
    return sorted(re.findall(r"^compute_(\d+)$", said, re.MULTILINE), key=int)


def emulated_target() -> Target:
    """The CUDA kernels compiled for the CPU (csrc/cuda/emulation.h), for tests."""
    return Target("cuda_emulated", "cuda", EMULATION_FLAGS + WARNINGS)


def compiler(kind: Compiler = CPP) -> str:
    """The command of a compiler. Raises CompileError with what to install if there is none."""
    wanted = (os.environ[kind.variable],) if os.environ.get(kind.variable) else kind.commands()
    for command in wanted:
        if shutil.which(shlex.split(command)[0]):
            return command
    raise CompileError(f"no {kind.called} ({', '.join(wanted)}) was found; {kind.advice}")


def compiler_version(command: str) -> str:
    """The line with the version in the output of --version."""
    said = subprocess.run([*shlex.split(command), "--version"], capture_output=True, text=True, check=False)
    lines = (said.stdout or said.stderr).splitlines() or [""]
    return next(
        (line for line in lines if " release " in line), lines[0]
    )  # nvcc begins with its name and the copyright


def build(targets: Sequence[Target], folder: Path, work: Path) -> list[Path]:
    """Compile the targets in `work` and move each library into `folder` atomically; return their paths.

    Raises CompileError.
    """
    work.mkdir(parents=True, exist_ok=True)
    (work / "build.ninja").write_text(_rules(targets))
    done = subprocess.run([*_ninja(), "-C", str(work)], capture_output=True, text=True, check=False)
    if done.returncode:
        said = "\n".join(done.stdout.splitlines()[-30:]) + done.stderr
        hints = "".join(f"\n{advice}" for words, advice in HINTS if re.search(words, done.stdout))
        raise CompileError(f"compiling the kernels failed:\n{said}{hints}")
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for target in targets:
        beside = folder / f".{target.name}.{secrets.token_hex(8)}"
        shutil.copyfile(work / f"{target.name}.so", beside)
        library = folder / f"{target.name}.so"
        digest_file(library).unlink(missing_ok=True)  # first and last: a library without it is made again
        made.append(Path(shutil.move(beside, library)))
        digest_file(library).write_text(target.digest())
    return made


def digest_file(library: Path) -> Path:
    """The file beside a library with the digest of the target that it was made of."""
    return library.with_suffix(".digest")


def _ninja() -> list[str]:
    if shutil.which("ninja"):
        return ["ninja"]
    beside = Path(sys.executable).with_name("ninja")
    if beside.exists():
        return [str(beside)]
    raise CompileError("ninja was not found; `pip install ninja` installs it")


def _rules(targets: Sequence[Target]) -> str:
    """The text of build.ninja.

    OpenMP is compiled in but not linked: its functions are found at load time in the runtime that torch has loaded. A
    second runtime would have a second pool of threads.
    """
    lines = [
        "rule compile",
        "  command = $compiler $flags -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        "  command = $compiler -shared $in -o $out $links",
    ]
    for target in targets:
        found = compiler(target.compiler)
        command, links = f"  compiler = {found}", [*target.links, *_runtime_links(found)]
        flags = " ".join([*target.flags, *(f"-isystem {_escaped(path)}" for path in target.includes)])
        objects = []
        for source in target.sources:
            objects.append(f"{target.name}/{source.stem}.o")
            lines += [f"build {objects[-1]}: compile {_escaped(str(source))}", command, f"  flags = {flags}"]
        lines += [f"build {target.name}.so: link {' '.join(objects)}", command, f"  links = {' '.join(links)}"]
    return "\n".join(lines) + "\n"


def _runtime_links(command: str) -> list[str]:
    """Where pip's nvcc has its runtime, which it does not look for there itself."""
    folder = Path(shutil.which(shlex.split(command)[0]) or "").resolve().parents[1] / "lib"
    return [f"-L{folder}"] if (folder / "libcudart_static.a").exists() else []


def _escaped(path: str) -> str:
    return path.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")
