"""The house stands: imports run downwards, no globals, one file for the device, short files and functions, clean
linters.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

import pytest

ROOT = Path(__file__).resolve().parents[1]
LONGEST_FILE, LONGEST_FUNCTION = 500, 70


def drawn() -> dict[str, int]:
    """Room -> floor, as the table in docs/architecture.md draws it.

    A room is a package, or a module directly under megazero.
    """
    found: dict[str, int] = {}
    floor = 0
    table = (ROOT / "docs" / "architecture.md").read_text().split("## Floors")[1].split("\n## ")[0]
    for cells in (line.split("|") for line in table.splitlines() if line.startswith("|") and "`" in line):
        floor = int(cells[1]) if cells[1].strip() else floor
        found |= {
            name.strip("/").removesuffix(".py").replace("/", "."): floor for name in re.findall("`(.*?)`", cells[2])
        }
    return found


FLOORS = drawn()


def modules(*folders: str) -> dict[str, Path]:
    """Python files of these folders (and the training script) by their dotted names."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    if (ROOT / "pretrain_gpt.py").exists():
        paths.append(ROOT / "pretrain_gpt.py")
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


OURS = modules("megazero", "fused_ops", "tools", "bench")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file; every rule looks at them."""
    return tuple(ast.walk(parsed(path)))


def room(module: str) -> str:
    """The room a module stands in: the innermost one. `megazero` itself is the ground."""
    return max((name for name in FLOORS if module == name or module.startswith(name + ".")), key=len, default=module)


def floor(module: str) -> int:
    """The floor of a module. Everyone may import `megazero` itself, which imports nothing of ours."""
    return -1 if module == "megazero" else FLOORS[room(module)]


def imports(module: str, path: Path) -> Iterator[tuple[int, str]]:
    """(line, module of ours) for every import in a file, those inside functions and under TYPE_CHECKING included."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in nodes(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in ("megazero", "fused_ops", "tools", "bench", "tests", "pretrain_gpt"):
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            if base.split(".")[0] in ("megazero", "fused_ops", "tools", "bench", "tests", "pretrain_gpt"):
                for alias in node.names:
                    full = f"{base}.{alias.name}"
                    yield node.lineno, full if full in OURS else base


def packages_asked(path: Path) -> Iterator[str]:
    """Packages of ours that a file imports from. `from package import module` needs the package too, and a package that
    imports the file is not ready then.
    """
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module in OURS:
            yield node.module


def test_there_is_something_to_check() -> None:
    assert len(OURS) > 30
    assert "megazero.plan.flops" in OURS
    assert ("megazero.config.schema") in {
        target for _, target in imports("megazero.plan.flops", OURS["megazero.plan.flops"])
    }


def test_every_module_stands_in_a_room_and_every_room_has_one() -> None:
    assert not [module for module in OURS if module != "megazero" and room(module) not in FLOORS]
    assert {room(module) for module in OURS if module != "megazero"} == set(FLOORS)
    assert room("megazero.somewhere.new") not in FLOORS, "one that is not drawn is seen"


def test_imports_run_strictly_downwards() -> None:
    """A room imports rooms of lower floors and its own files, nothing else: rooms of one floor never
    import each other.
    """
    wrong = []
    for module, path in OURS.items():
        for line, target in imports(module, path):
            if room(module) != room(target) and floor(target) >= floor(module):
                wrong.append(
                    f"{path.relative_to(ROOT)}:{line}: {module} (floor {floor(module)}) imports {target} (floor "
                    f"{floor(target)})"
                )
    assert not wrong, "\n".join(wrong)


OTHER_RUNS = {
    "megazero.config.placement": "`applied`, by which `resolve` makes its decisions",
    "megazero.train.resolve": "the one place",
    "megazero.train.requirements": "smaller shares that would fit, for a message",
    "megazero.train.same_data": "the run of a checkpoint, with the present names of its data",
    "megazero.train.checked": "the run of a checkpoint, with what is not known yet of the present one",
    "megazero.train.whole_steps": "two runs that are compared without the sections that may differ",
    "megazero.own.settings": "the one place for a model of modules",
    "megazero.plan": "runs that a search tries",
    "megazero.convert": "models of other programs",
    "megazero.verify": "small runs of the same structure, and the same on one process",
}
"""Modules and rooms that make a run out of another -> which runs these are."""


def test_a_run_is_changed_where_it_is_resolved_alone() -> None:
    """Behind `resolve` a run is what it is: `replace` of a section, or of a run, stands nowhere else."""
    sections = {item.target.id for item in nodes(ROOT / "megazero/config/schema/__init__.py") if is_field(item)}
    assert {"model", "parallel", "offload"} <= sections
    changing = dict[str, list[int]]()
    for module, path in modules("megazero").items():
        for node in nodes(path):
            if isinstance(node, ast.Call) and changes_a_run(node, sections):
                changing.setdefault(room(module) if room(module) in OTHER_RUNS else module, []).append(node.lineno)
    assert changing.keys() == OTHER_RUNS.keys(), changing


def is_field(node: ast.AST) -> TypeGuard[Any]:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def changes_a_run(call: ast.Call, sections: set[str]) -> bool:
    """applied(...), replace(anything, section=...), replace(run, ...), replace(run.section, ...)."""
    name = ast.unparse(call.func)
    if name == "applied":
        return True
    if name not in ("replace", "dataclasses.replace") or not call.args:
        return False
    of = ast.unparse(call.args[0]).split(".")
    named = {keyword.arg for keyword in call.keywords}
    of_a_run = of[-1] == "run" or (len(of) > 1 and of[-2] == "run" and of[-1] in sections)
    return of_a_run or (bool(named) and named <= sections)


NAMES = re.compile(r"(embedding|head|blocks|attention_norm|mlp_norm)\.|(attention)\.(qkv|output)|(mlp)\.(gate|up|down)")


def test_a_models_parameters_are_named_in_the_inventory_alone() -> None:
    """Converters, which translate names, and docstrings aside."""
    wrong = []
    for module, path in OURS.items():
        if module == "megazero.config.inventory" or module.startswith("megazero.convert.") or room(module) == "bench":
            continue
        documents = {id(node.value) for node in nodes(path) if isinstance(node, ast.Expr)}
        wrong += [
            f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
            for node in nodes(path)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in documents
            and NAMES.match(node.value)
        ]
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles() -> None:
    graph = {
        module: {*(target for _, target in imports(module, path)), *packages_asked(path)} & OURS.keys() - {module}
        for module, path in OURS.items()
    }
    assert "megazero.system" in graph["megazero.config.options"], "a package that is asked for a module counts"
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> None:
        assert module not in trail, "import cycle: " + " -> ".join([*trail[trail.index(module) :], module])
        if module in done:
            return
        for target in sorted(graph[module]):
            visit(target, [*trail, module])
        done.add(module)

    for module in graph:
        visit(module, [])


def test_nobody_imports_tests() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for module, path in OURS.items()
        for line, target in imports(module, path)
        if target.split(".")[0] == "tests"
    ]
    assert not wrong


def test_no_global_statement() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{n.lineno}"
        for path in OURS.values()
        for n in nodes(path)
        if isinstance(n, ast.Global)
    ]
    assert not wrong, wrong


PURE = """Size _lends all any bool cast dict dim is_contiguous is_file is_dir isinstance keys len max min nbytes numel
prod set sorted startswith stride sum to tuple zip""".split()
"""Functions and methods without an effect, which an assertion may call."""


def effects_of_assertions(tree: Iterable[ast.AST]) -> list[int]:
    """Lines of assertions whose condition calls what may have an effect, or binds a name."""
    return [
        assertion.lineno
        for assertion in tree
        if isinstance(assertion, ast.Assert)
        for node in ast.walk(assertion.test)
        if isinstance(node, ast.NamedExpr | ast.Await | ast.Yield)
        or (isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] not in PURE)
    ]


def test_no_assertion_has_an_effect() -> None:
    """Python leaves assertions out under -O; the program is the same."""
    told = "assert next(it) is None\nassert (n := 3)\nassert all(d.pop(x) for x in y)\nassert len(a.b) == 2"
    assert effects_of_assertions(ast.walk(ast.parse(told))) == [1, 2, 3]
    found = [
        f"{path.relative_to(ROOT)}:{line}" for path in OURS.values() for line in effects_of_assertions(nodes(path))
    ]
    assert not found


CHANGES = ("insert", "append", "extend", "remove", "pop", "clear")


def changes_the_path(tree: Iterable[ast.AST]) -> list[int]:
    """Lines that change sys.path, by a method of the list or by assigning to it or a part of it."""
    found = []
    for node in tree:
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
        targets = [node.target] if isinstance(node, ast.AugAssign) else targets
        places = [target.value if isinstance(target, ast.Subscript) else target for target in targets]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            places = [node.func.value]
        found += [place.lineno for place in places if is_attribute(place, "path") and dotted(place) == "sys.path"]
    return found


@pytest.mark.slow
def test_nobody_changes_where_modules_are_found() -> None:
    """What runs is what is installed, or what PYTHONPATH or `-m` name: the same for a module and its imports."""
    ways = "sys.path.insert(0, x)\nsys.path += x\nsys.path[:0] = x\ndel sys.path[0]\nsys.path[0].strip()"
    assert sorted(changes_the_path(ast.walk(ast.parse(ways)))) == [1, 2, 3, 4]
    paths = [*OURS.values(), *modules("tests", "docs").values(), ROOT / "setup.py"]
    paths = [path for path in paths if "sys.path" in path.read_text()]  # the others need not be parsed
    wrong = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in changes_the_path(nodes(path))]
    assert not wrong, wrong


def touches_cuda(path: Path) -> list[int]:
    """Lines whose code (not comments or strings) names torch.cuda or imports it."""
    lines: list[int] = []
    if "cuda" not in path.read_text():
        return lines
    words = [
        t
        for t in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        if t.type in (tokenize.NAME, tokenize.OP)
    ]
    for first, dot, last in zip(words, words[1:], words[2:], strict=False):
        if (first.string, dot.string, last.string) == ("torch", ".", "cuda"):
            lines.append(first.start[0])
    for node in nodes(path):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module == "torch"
            and any(alias.name == "cuda" for alias in node.names)
        ):
            lines.append(node.lineno)
    return lines


def test_cuda_is_named_in_device_and_fused_ops_only() -> None:
    wrong = []
    for module, path in OURS.items():
        if module in ("megazero.system.device", "megazero.system.streams") or room(module) == "fused_ops":
            continue
        wrong += [f"{path.relative_to(ROOT)}:{line}" for line in touches_cuda(path)]
    assert touches_cuda(ROOT / "megazero" / "system" / "device.py")
    assert not wrong, wrong


def test_files_are_short() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in OURS.values()}
    assert not {name: length for name, length in lengths.items() if length > LONGEST_FILE}


def test_functions_fit_a_screen() -> None:
    wrong = []
    for path in OURS.values():
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > LONGEST_FUNCTION:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has {length} lines")
    assert not wrong, "\n".join(wrong)


MOST_FILES, LEAST_CODE = 25, 40
FOLDERS = (
    "megazero/config",
    "megazero/config/schema",
    "megazero/cli",
    "megazero/disk",
    "megazero/own",
    "megazero/own/units",
    "megazero/pipeline",
    "megazero/plan",
    "megazero/program",
    "megazero/program/passes",
    "megazero/report",
    "megazero/report/page",
    "megazero/train",
    "megazero/zero",
)
"""Folders in which files are counted and measured. More are to follow."""

FILES: dict[str, int] = {}
"""Folders with more than `MOST_FILES`: how many they have. Lower the number with each file that goes."""

SECTION = "a section of the configuration is a file"
SHORT = {
    "megazero/config/dtypes.py": "the only file of the room that imports torch, which a command line is read without",
    "megazero/config/schema/__init__.py": "the run, whose sections are the other files",
    "megazero/config/schema/checkpoint.py": SECTION,
    "megazero/config/schema/lora.py": SECTION,
    "megazero/disk/buffers.py": "memory that disks read into, which swap files and measures share",
    "megazero/disk/store.py": "what the program asks of files, whatever tier they are on",
    "megazero/own/units/parameter_shape.py": "a value that checkpoints, plans and proofs share",
    "megazero/pipeline/actions.py": "protocols of what the engine asks of others: most of it is docstrings",
    "megazero/pipeline/warm_up.py": "a pass without messages, with the reason why cards need one",
    "megazero/program/passes/cut.py": "a pass that other passes import",
    "megazero/program/transfers.py": "where messages stand, which schedules and vertical order share",
    "megazero/report/page/plan_page.py": "the sections of a plan's page; `run_page` has those of a run",
    "megazero/report/verdict.py": "the printer of --validate-only, which is neither the banner nor JSON",
}
"""Files of less than `LEAST_CODE` lines of code, each with the reason. Take out what grew or went."""

TWINS = {
    "megazero/config": {"placement", "rotary", "source"},
    "megazero/cli": {"convert", "generate", "harness", "inspect", "report"},
    "megazero/train": {"api", "report", "state"},
}
"""Names of files that are also in a room which imports this one, or which this one imports. Take out what is renamed.
Programs on the top floor are called like the commands that they are, and sections of the configuration, and the value
of rotary positions, like what they are of.
"""


def files_of(folder: str) -> list[Path]:
    """The files of a folder itself. An empty __init__.py is none."""
    return [path for path in sorted((ROOT / folder).glob("*.py")) if path.read_text().strip()]


def lines_of_code(text: str) -> int:
    """Lines that are no blank, comment or docstring. Sentences under fields count: they are the help."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documents = [
        node.body[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, documented) and ast.get_docstring(node) is not None
    ]
    without = {line for node in documents for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return sum(
        number not in without and bool(line.strip()) and not line.strip().startswith("#")
        for number, line in enumerate(text.splitlines(), 1)
    )


def test_a_folder_has_few_files() -> None:
    """Where a folder has too many, the number in `FILES` only falls."""
    numbers = {folder: len(files_of(folder)) for folder in FOLDERS}
    assert {folder: number for folder, number in numbers.items() if number > MOST_FILES} == FILES


def test_a_file_is_an_idea_of_some_length() -> None:
    """A file below `LEAST_CODE` lines of code says in `SHORT` why it is one."""
    assert lines_of_code('"""A.\n\nB.\n"""\n\n# c\nx: int = 1\n"D"\ndef f():\n    """E."""\n    return 1\n') == 4
    short = {
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in files_of(folder)
        if lines_of_code(path.read_text()) < LEAST_CODE
    }
    assert short == set(SHORT)


def test_rooms_that_import_each_other_have_no_files_of_one_name() -> None:
    """So that a name in a sentence, or in a traceback, is one file."""
    neighbours = {
        frozenset((room(module), room(target))) for module, path in OURS.items() for _, target in imports(module, path)
    }
    twins = {
        folder: {
            path.stem
            for path in files_of(folder)
            for module, other in OURS.items()
            if other.name == path.name != "__init__.py"
            and floor(module) < max(FLOORS.values())
            and not module.startswith("megazero.config.schema.")
            and room(module) != folder.replace("/", ".")
            and frozenset((room(module), folder.replace("/", "."))) in neighbours
        }
        for folder in TWINS
    }
    assert twins == TWINS


def is_attribute(node: ast.expr, name: str) -> bool:
    """Whether an expression ends with `.name`: found at once, where `dotted` writes the expression."""
    return isinstance(node, ast.Attribute) and node.attr == name


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain, else what ast makes of it."""
    return ast.unparse(node)


def test_no_pickle_is_loaded() -> None:
    """torch.load only with weights_only=True, numpy.load only without allow_pickle, and no unpickling module at all.

    One file is exempt from the last: `megazero/convert/files/unpickle.py` takes the instructions of Python's pickle
    machine that make plain data and replaces all others (docs/torch-files.md says why torch.load is not used).
    """
    wrong = []
    for path in OURS.values():
        for node in nodes(path):
            if not isinstance(node, ast.Import | ast.ImportFrom | ast.Call):
                continue
            where = f"{path.relative_to(ROOT)}:{node.lineno}"
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                unpickles = path == ROOT / "megazero" / "convert" / "files" / "unpickle.py" and names == ["pickle"]
                names = [] if unpickles else names
                wrong += [
                    where
                    for name in names
                    if name.split(".")[0] in ("pickle", "cloudpickle", "dill", "shelve", "marshal")
                ]
            if isinstance(node, ast.Call) and is_attribute(node.func, "load"):
                keywords = {word.arg: word.value for word in node.keywords}
                called = dotted(node.func)
                safe = (
                    isinstance(keywords.get("weights_only"), ast.Constant)
                    and ast.unparse(keywords["weights_only"]) == "True"
                )
                if called == "torch.load" and not safe:
                    wrong.append(where)
                if "allow_pickle" in keywords and ast.unparse(keywords["allow_pickle"]) != "False":
                    wrong.append(where)
    assert not wrong, wrong


def test_no_module_level_containers_to_fill() -> None:
    """A module-level name bound to an empty container is a cache or a registry in the making: state
    that nobody passed.
    """
    makers = ("dict", "list", "set", "defaultdict", "Counter", "collections.defaultdict", "collections.Counter")
    wrong = []
    for path in OURS.values():
        for node in parsed(path).body:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            literal = value is not None and ast.unparse(value) in ("[]", "{}")
            made = isinstance(value, ast.Call) and dotted(value.func) in makers and len(value.args) == 0
            if literal or made:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, wrong


def run_module(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.lint
def test_ruff_is_clean() -> None:
    pytest.importorskip("ruff")
    run_module("ruff", "check", ".")
    run_module("ruff", "format", "--check", ".")


@pytest.mark.lint
@pytest.mark.slow
def test_mypy_is_clean() -> None:
    pytest.importorskip("mypy")
    run_module("mypy")
