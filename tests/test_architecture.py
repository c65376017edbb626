"""The package's layout: order of rooms, sizes, homes of outside packages, pages that are generated."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from megarl.platform.kinds import KINDS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megarl"

# A room imports rooms of lower rows alone, in type-only imports too.
ROOMS = [
    ["__init__", "__main__"],
    ["cli"],
    ["commands"],
    ["train"],
    ["recovery"],
    ["step"],
    ["assembly"],
    ["preflight", "trainer"],
    ["megatron"],
    ["checkpoint"],
    ["observe"],
    ["rollout"],
    ["engines", "rewards", "agents"],
    ["weight_sync", "subprocess_pool", "batching"],
    ["cluster", "data", "algorithms"],
    ["recipe"],
    ["platform", "hf", "exit_status"],
    ["errors", "atomic_files", "types", "registry", "sandbox"],
]
ROW = {room: number for number, rooms in enumerate(ROOMS) for room in rooms}

# Outside packages, and the only files and folders that import them.
HOMES = {
    "ray": ("cluster/ray/", "commands/launch/", "commands/run_on_all_nodes.py"),
    "megatron": ("megatron/", "commands/accept/", "commands/plan/"),
    "mbridge": ("megatron/",),
    "vllm": ("engines/vllm/", "commands/plan/"),
    "sglang": ("engines/sglang/",),
    "torch_npu": ("platform/npu.py",),
    "mindspeed": ("platform/npu.py",),
    "tensorboard": ("observe/sinks.py", "commands/compare/"),
    "pyarrow": ("data/rows.py",),
    "huggingface_hub": ("hf/hub/",),
    "PIL": ("data/image_files.py", "agents/tool_process.py", "commands/data/"),
    "pyseccomp": ("sandbox/syscalls.py",),
    "mcp": ("agents/mcp_tools.py",),
    "starlette": ("commands/view/", "commands/serve/"),
    "uvicorn": ("commands/view/", "commands/serve/"),
}

LONGEST_FILE, LONGEST_FUNCTION = 400, 60
LONGEST = {"train.py": 99, "step.py": 149}  # stricter limits
FILES_AT_THE_TOP, ROOMS_AT_THE_TOP = 12, 20
FILES_IN_A_FOLDER = 20  # Python files, __init__.py included

# Words for devices: they stand only in the files that know devices, so that a new kind of device needs files there alone.
DEVICE_WORDS = re.compile(r"(?<![a-z])(npus?|ascend|hccl|mindspeed|cann)(?![a-z])", re.IGNORECASE)
KNOW_DEVICES = ("platform", "engines")
DEVICE_NAMES = {kind.name for kind in KINDS}  # values of cluster.device
DEVICE_FILES = {
    "commands/build_operators.py",
    "commands/doctor/npu_checks.py",
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.fixture(scope="module", autouse=True)
def _forget_trees() -> Iterator[None]:
    """Free the millions of nodes at the end: with them each garbage collection of a later test takes half a second."""
    yield
    tree_of.cache_clear()


@cache
def imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere in it, for type checkers too."""
    modules: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
            if node.module == "megarl":
                modules.update(f"megarl.{alias.name}" for alias in node.names)
    return modules


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(PACKAGE.rglob("*.py"))


def imports_that_go_up(path: Path) -> Iterator[str]:
    room = room_of(path)
    if room not in ROW:
        yield f"{room} has no row: give it one in this test and in docs/architecture.md"
        return
    for module in imports(path):
        package, _, rest = module.partition(".")
        imported = rest.split(".")[0]
        if package == "megarl" and imported in ROW and imported != room and ROW[imported] <= ROW[room]:
            yield f"{room} imports {imported}, which is not below it"


def imports_from_outside_their_home(path: Path) -> Iterator[str]:
    place = str(path.relative_to(PACKAGE))
    for module in imports(path):
        homes = HOMES.get(module.split(".")[0])
        if homes is not None and not place.startswith(homes):
            yield f"imports {module}; its home is {homes}"


def device_words(path: Path) -> Iterator[str]:
    """Facts about kinds of devices come from `megarl.platform.kinds`."""
    words = sorted({match[0] for match in DEVICE_WORDS.finditer(path.read_text())})
    expected = str(path.relative_to(PACKAGE)) in DEVICE_FILES
    if room_of(path) not in KNOW_DEVICES and bool(words) != expected:
        yield f"{words}: read a field of DeviceKind, or correct DEVICE_FILES"


def comparisons_with_device_names(path: Path) -> Iterator[str]:
    """A decision that depends on the device is a field of `DeviceKind` or a property of `Platform`.

    Comparisons of `tensor.device.type` are free: they tell host memory from device memory.
    """
    if room_of(path) in KNOW_DEVICES:
        return
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            values = {
                part.value for operand in operands for part in ast.walk(operand) if isinstance(part, ast.Constant)
            }
            of_tensor = any(isinstance(operand, ast.Attribute) and operand.attr == "type" for operand in operands)
            if not of_tensor and (names := DEVICE_NAMES & values):
                yield f"line {node.lineno} compares with {names}: read a field of DeviceKind"


def long_files_and_functions(path: Path) -> Iterator[str]:
    lines = len(path.read_text().splitlines())
    if lines > LONGEST.get(str(path.relative_to(PACKAGE)), LONGEST_FILE):
        yield f"{lines} lines: split the file"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > LONGEST_FUNCTION:
                yield f"{node.name} has {length} lines: split it"


def recipes_of_which_one_section_is_read(path: Path) -> Iterator[str]:
    """A function takes a `Recipe` to read two sections of it or to pass it on."""
    for function in ast.walk(tree_of(path)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        for argument in arguments:
            if argument.annotation is None or ast.unparse(argument.annotation).strip("'\"") != "Recipe":
                continue
            uses = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == argument.arg]
            reads = [
                node
                for node in ast.walk(function)
                if isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == argument.arg
            ]
            sections = {node.attr for node in reads}
            if len(uses) == len(reads) and len(sections) <= 1:
                yield f"{function.name} needs only {sections}, not the recipe"


RULES = [
    imports_that_go_up,
    imports_from_outside_their_home,
    device_words,
    comparisons_with_device_names,
    long_files_and_functions,
    recipes_of_which_one_section_is_read,
]


@pytest.mark.parametrize("faults", RULES, ids=lambda rule: rule.__name__)
def test_no_file_has(faults: Callable[[Path], Iterator[str]]) -> None:
    found = [f"{path.relative_to(ROOT)}: {fault}" for path in FILES for fault in faults(path)]
    assert not found, "\n".join(found)


def test_files_of_tests_are_small() -> None:
    lines = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py")}
    too_long = {str(path): count for path, count in lines.items() if count > LONGEST_FILE}
    assert not too_long, f"at most {LONGEST_FILE} lines in a file; split them by topic: {too_long}"


def test_folders_are_small() -> None:
    top = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert len([path for path in top if path.suffix == ".py"]) <= FILES_AT_THE_TOP
    assert len([path for path in top if path.is_dir()]) <= ROOMS_AT_THE_TOP
    files = Counter(str(path.parent.relative_to(PACKAGE)) for path in FILES)
    too_many = {folder: count for folder, count in files.items() if count > FILES_IN_A_FOLDER}
    assert not too_many, f"at most {FILES_IN_A_FOLDER} Python files in a folder; group them: {too_many}"


def test_class_names_are_unique() -> None:
    places = defaultdict(set)
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(str(path.relative_to(PACKAGE)))
    assert {name: sorted(files) for name, files in places.items() if len(files) > 1} == {}


def test_tests_import_names_that_exist() -> None:
    """mypy reads the package and not the tests, and some imports of tests happen only in processes of slow tests."""
    missing = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("megarl", "tests"):
                module = ROOT.joinpath(*node.module.split("."))
                file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
                names = top_level_names(file) if file.is_file() else set()
                for name in (alias.name for alias in node.names):
                    is_module = (module / name).is_dir() or (module / f"{name}.py").is_file()
                    if name not in names and not is_module and "__getattr__" not in names:
                        missing.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}.{name}")
    assert not missing, missing


@cache
def top_level_names(path: Path) -> set[str]:
    """Return the names that a module defines or imports, in branches too."""
    names: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def test_a_run_imports_no_command() -> None:
    """`train` needs nothing of commands/, docs/ or benchmarks/: the closure of its imports, written in files."""
    pending, closure = (
        [PACKAGE / "train.py", PACKAGE / "trainer" / "actor.py", PACKAGE / "trainer" / "critic.py"],
        set(),
    )
    while pending:
        path = pending.pop()
        if path in closure:
            continue
        closure.add(path)
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                assert name.split(".")[0] not in ("docs", "benchmarks", "tests"), f"{path} imports {name}"
                file = ROOT / Path(*name.split("."))
                pending += [source for source in (file.with_suffix(".py"), file / "__init__.py") if source.is_file()]
    commands = sorted(str(path.relative_to(PACKAGE)) for path in closure if room_of(path) == "commands")
    assert commands == []


def test_the_package_reads_no_file_outside_itself() -> None:
    """A wheel has no docs/ and no recipes/: no module steps out of the package by `__file__`."""
    for path in FILES:
        depth = len(path.relative_to(PACKAGE).parts)
        for match in re.finditer(r"__file__\)(?:\.resolve\(\))?((?:\.parent)+|\.parents\[(\d)\])", path.read_text()):
            steps = int(match[2]) + 1 if match[2] else match[1].count(".parent")
            assert steps <= depth, f"{path}: {match[0]}"


def test_reading_a_recipe_needs_nothing_heavy() -> None:
    """`megarl --help` and recipe errors come in a second: no torch, vLLM, Ray or transformers on that way."""
    code = (
        "import sys, megarl.cli; from megarl import load_recipe;"
        "load_recipe('recipes/quickstart.yaml');"
        "heavy = {'torch', 'vllm', 'ray', 'transformers', 'megatron', 'pyarrow'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_no_place_of_one_machine_is_named() -> None:
    for path in [
        *FILES,
        *ROOT.glob("launch/*"),
        *ROOT.glob("recipes/**/*.yaml"),
        *ROOT.glob("docs/*.md"),
        ROOT / "README.md",
    ]:
        if path.is_file():
            assert not re.search(r"/(home|root|Users|work)/", path.read_text()), path


def test_recipes_page_is_up_to_date() -> None:
    from docs.generate.recipes import document

    assert (ROOT / "docs" / "recipes.md").read_text() == document(), "run python -m docs.generate.recipes"


def test_doctors_page_is_up_to_date() -> None:
    from docs.generate.doctor import PAGE, document

    assert PAGE.read_text() == document(), "run python -m docs.generate.doctor"


def test_algorithms_page_is_up_to_date() -> None:
    from docs.generate.algorithms import PAGE, document

    assert PAGE.read_text() == document(PAGE.read_text()), "run python -m docs.generate.algorithms"
