"""The house keeps its order: imports go one way, and each outside package is known in one place."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megarl"

# A module may import from its own layer and from those before it.
LAYERS = [
    [
        "registry",
        "words",
        "types",
        "config",
        "model_config",
        "model_configs",
        "linears",
        "hf_weights",
        "safetensors_header",
        "declared",
        "interruption",
        "platform",
        "checks",
        "durable",
        "manifest",
        "sandbox",
    ],
    ["algorithms", "rewards", "tools", "data", "model_shape", "flops", "schedule", "padded_schedule"],
    ["shards", "engines", "megatron", "exchange"],
    ["worker", "actor_worker", "critic_worker"],
    ["cluster"],
    ["killable"],
    ["scoring", "agents"],
    ["rollout"],
    [
        "checkpoint",
        "skipped",
        "saver",
        "placement",
        "profiling",
        "route",
        "critic",
        "teacher",
        "observe",
        "identity",
        "preflight",
        "preflight_engines",
        "preflight_judge",
        "preflight_model",
        "convert",
    ],
    ["controller", "start_engines"],
    ["run"],
    ["doctor", "rehearsal", "planner"],
    ["commands"],
    ["cli", "quickstart", "__main__", "__init__"],
]

# Why a module may still reach up: said here, or not at all.
EXCEPTIONS = {
    ("config", "algorithms"): "validation asks the registries for the names they know",
}

# Outside packages and the only part of megarl that may import them.
HOMES = {
    "ray": ("cluster",),
    "megatron": ("megatron", "planner", "commands"),
    "mbridge": ("megatron", "planner"),
    "vllm": ("engines",),
    "sglang": ("engines",),
    "torch_npu": ("platform",),
    "mindspeed": ("platform",),
    "plotly": ("observe",),
    "tensorboard": ("observe",),
    "pyarrow": ("data",),
    "PIL": ("data",),
    "pyseccomp": ("sandbox",),
    "mcp": ("agents",),
}


# Words that only the parts which know the device may use: a fourth kind of device is files there, and nothing elsewhere.
DEVICE_WORDS = re.compile(r"(?<![a-z])(npus?|ascend|hccl|mindspeed|cann)(?![a-z])", re.IGNORECASE)
KNOW_DEVICES = ("platform", "engines")
WORD_EXCEPTIONS = {
    "docs/generate/supported_recipes.py": "the page that it writes names verl's tables, and scripts of theirs, as verl calls them",
    "benchmarks/published.py": "it names the recipes of others whose steps were timed as they call them",
}


@cache
def imports(path: Path) -> set[str]:
    """Modules that a file imports at run time, wherever it does so (what only type checkers see is left out)."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            if node.module == "megarl":
                found.update(f"megarl.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return found


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(PACKAGE.rglob("*.py"))
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    own = part(path)
    assert own in LAYER, f"{own} has no layer: give it one in this test and in docs/architecture.md"
    for module in imports(path):
        pieces = module.split(".")
        if pieces[0] != "megarl" or len(pieces) < 2 or pieces[1] not in LAYER:
            continue
        if (own, pieces[1]) in EXCEPTIONS:
            continue
        assert LAYER[pieces[1]] <= LAYER[own], f"{own} imports {pieces[1]}, which lies above it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_outside_package_has_a_home(path: Path) -> None:
    for module in imports(path):
        homes = HOMES.get(module.split(".")[0])
        assert homes is None or part(path) in homes, f"{part(path)} imports {module}; it belongs into {homes}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_devices_are_known_in_one_place(path: Path) -> None:
    """What differs between kinds of devices is asked of `megarl.platform.kinds`."""
    if part(path) in KNOW_DEVICES:
        return
    words = sorted({found[0] for found in DEVICE_WORDS.finditer(path.read_text())})
    excepted = str(path.relative_to(PACKAGE)) in WORD_EXCEPTIONS
    assert bool(words) == excepted, f"{words}: ask the DeviceKind, or take the exception away"


def test_reading_a_recipe_needs_nothing_heavy() -> None:
    """`megarl --help` and recipe errors come in a second: no torch, vLLM, Ray or transformers on that way."""
    import subprocess
    import sys

    code = (
        "import sys, megarl.cli; from megarl import load_recipe;"
        "load_recipe('recipes/quickstart.yaml');"
        "heavy = {'torch', 'vllm', 'ray', 'transformers', 'megatron', 'plotly', 'pyarrow'} & set(sys.modules);"
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
