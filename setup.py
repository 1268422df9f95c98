"""What is installed: two packages, the training script, and compiled CPU kernels.

Names, versions and dependencies stand in pyproject.toml. Nothing but setuptools, the standard library and
fused_ops/native/compile.py may be imported here: pip builds in an environment of its own that has no torch, and the
kernels that need torch's headers are compiled at first use against the torch that is installed then.
"""

import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def compiling() -> ModuleType:
    """fused_ops/native/compile.py alone: its package, or an installed one of the same name, is not imported."""
    spec = spec_from_file_location("megazero_compile", ROOT / "fused_ops/native/compile.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look
    spec.loader.exec_module(module)
    return module


def levels_to_compile(native: ModuleType, editable: bool) -> tuple[str, ...]:
    """The instruction set levels for which kernels are compiled now."""
    asked = os.environ.get("MEGAZERO_LEVELS") or ("" if editable else "all")
    levels = native.levels_of_this_machine_type() if asked == "all" else tuple(filter(None, asked.split(",")))
    if unknown := set(levels) - set(native.LEVELS):
        raise ValueError(f"MEGAZERO_LEVELS={asked}: {sorted(unknown)} are not among {', '.join(native.LEVELS)} and all")
    return levels or native.levels_of_this_processor()


class BuildKernels(build_ext):
    """Compiles CPU kernels, and for the cards of MEGAZERO_CUDA (compute capabilities, "8.0,9.0") the CUDA kernels. What
    is not compiled here is compiled at first use. Without a compiler it says so and goes on: the ops then run their
    torch bodies.

    An editable install stays on this machine and gets the kernels of its processor. A wheel may go to another one, also
    the wheel that `pip install .` makes, as nothing tells it from that of `pip wheel`: it gets the kernels of all
    instruction set levels. MEGAZERO_LEVELS names other ones ("avx2,generic"), or `all`.
    """

    def run(self) -> None:
        editable = self.inplace or getattr(self, "editable_mode", False)
        self.folder = (ROOT if editable else Path(self.build_lib).resolve()) / "fused_ops" / "_kernels"
        self.made: list[Path] = []
        native = compiling()
        cards = [
            native.cuda_target(capability)
            for capability in os.environ.get("MEGAZERO_CUDA", "").replace(".", "").split(",")
            if capability
        ]
        levels = [native.cpu_target(level) for level in levels_to_compile(native, editable)]
        for targets, without in (
            (levels, "CPU kernels, a step on a CPU takes about twice as long"),
            (cards, "CUDA kernels"),
        ):
            try:
                self.made += native.build(targets, self.folder, Path(self.build_temp).resolve() / "kernels")
            except native.CompileError as error:
                print(f"megazero: installed without compiled {without}: {error}", file=sys.stderr)

    def get_outputs(self) -> list[str]:
        return [str(path) for path in getattr(self, "made", [])]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


setup(
    packages=find_packages(include=["megazero", "megazero.*", "fused_ops", "fused_ops.*"]),
    package_data={
        "fused_ops": ["csrc/*/*.cpp", "csrc/*/*.cu", "csrc/*/*.h"],
        "megazero": ["plan/cluster/*.yaml", "report/page/static/*"],
    },
    py_modules=["pretrain_gpt"],
    # Named so that the wheel carries a platform; the sources are compiled by ninja, above.
    ext_modules=[Extension("fused_ops._kernels", sources=[])],
    cmdclass={"build_ext": BuildKernels},
)
