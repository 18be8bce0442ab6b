"""Imports point down only, and every foreign import is declared: read from the sources, without importing them."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LAYERS = {
    6: {"bench", "cli", "cli_bench", "cli_facts", "cli_plan", "cli_profile", "cli_rehearse", "cli_store",
        "integrations", "planner_plot", "rehearsal", "testing"},
    5: {"engine", "optimizer", "checkpoint", "model_blocks", "params", "zero_params", "offload",
        "process_end", "cpu_threads", "plan_check", "plan_sources", "profiler", "run_state", "run_plan",
        "checkpoint_folder"},
    4: {"runtime"},
    3: {"store", "memory", "adam", "grad_norm", "step_protocol", "updater", "read_ahead"},
    2: {"planner"},
    1: {"plan", "profile", "block", "config", "config_checks", "errors", "work",
        "step_summary", "stripe", "run_name"},
    0: {"ops"},
}
LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names}
ROOT_LAYER = 7  # lohan_ds/__init__.py: nobody inside takes the public names from there
NO_TORCH = LAYERS[1] | LAYERS[2] | {"step_protocol"}
NO_PLANNER = LAYERS[3] | LAYERS[4]
WITHOUT_DEEPSPEED = {"offload", "plan_check", "plan_sources", "profiler", "run_plan"}
MAY_IMPORT_DEEPSPEED = LAYERS[5] - WITHOUT_DEEPSPEED | {"bench", "integrations", "ops"}
MAY_IMPORT_HUGGINGFACE = {"bench", "integrations", "cli"}
PIPELINES = {"param_streamer", "activation_swapper", "gradient_pipeline"}   # of runtime; they never call each other


def test_imports_point_down_and_are_declared():
    sources = package_sources()
    declared = declared_distributions()
    found = [line for module, path in sources.items() for line in violations(module, path, set(sources), declared)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("module", "code", "expected"),
    [
        ("store.block_store", "from lohan_ds.engine import LohanEngine", "points up"),
        ("store.block_store", "from ..runtime import streams", "points up"),
        ("store.block_store", "from lohan_ds import LohanEngine", "points up"),
        ("runtime.gradient_pipeline", "from .param_streamer import ParamStreamer", "runtime modules"),
        ("runtime.gradient_pipeline", "from .streams import Streams", None),
        ("runtime.gradient_pipeline", "from lohan_ds.planner import search", "planner"),
        ("planner.search", "def f():\n    import torch.nn", "must not import torch"),
        ("store.block_store", "import torch, deepspeed", "must not import deepspeed"),
        ("engine", "def f():\n    from transformers import Trainer", "must not import transformers"),
        ("integrations.huggingface", "import transformers, deepspeed", None),
        ("cli", "import undeclared_thing", "not declared"),
        ("cli", "import json", None),
        ("ops", "import lohan_ds.errors", "points up"),
        ("brand_new", "", "add it to a layer"),
    ],
)
def test_each_rule(tmp_path, module, code, expected):
    path = tmp_path / "source.py"
    path.write_text(code)
    known = {f"lohan_ds.{name}" for name in ("engine", "errors", "planner.search", "runtime.streams", module)}
    found = violations(f"lohan_ds.{module}", path, known, {"torch", "deepspeed", "transformers"})
    assert (expected in found[0]) if expected else not found, found


def package_sources() -> dict[str, Path]:
    """Every module of the package and its file, without tests and testing."""
    sources = {}
    for folder, package in ((ROOT / "lohan_ds", "lohan_ds"), (ROOT / "ops", "lohan_ds.ops")):
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            if parts[0] not in ("tests", "testing"):
                sources[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return sources


def declared_distributions() -> set[str]:
    """Names in pyproject.toml's dependencies and in its extras "hf" and "plot", as they are imported."""
    text = (ROOT / "pyproject.toml").read_text()  # Python 3.10 has no tomllib
    lists = re.findall(r"^(?:dependencies|hf|plot) = \[(.*?)\]", text, re.DOTALL | re.MULTILINE)
    return {name.replace("-", "_") for entry in lists for name in re.findall(r'"([\w-]+)', entry)}


def violations(module: str, path: Path, modules: set[str], declared: set[str]) -> list[str]:
    """Every broken rule of one file as "file:line: rule"."""
    if module == "lohan_ds":
        part, layer = "", ROOT_LAYER
    else:
        part = module.split(".")[1]
        if part not in LAYER_OF:
            return [f"{path}: {part} is new: add it to a layer in {Path(__file__).name}"]
        layer = LAYER_OF[part]
    found = []
    for line, target in imported_modules(module, path, modules):
        top = target.split(".")[0]
        if top == "lohan_ds":
            problem = package_problem(module, part, layer, target)
        elif top in sys.stdlib_module_names:
            problem = None
        else:
            problem = foreign_problem(part, top, declared)
        if problem:
            found.append(f"{path}:{line}: {problem}")
    return found


def package_problem(module: str, part: str, layer: int, target: str) -> str | None:
    """Rules for imports from inside lohan_ds."""
    target_part = target.split(".")[1] if "." in target else ""
    target_layer = LAYER_OF.get(target_part, ROOT_LAYER)
    if target_layer > layer or (layer == 0 and target_part != "ops"):
        return f"{module} (layer {layer}) imports {target} (layer {target_layer}): points up"
    if target_part == "planner" and part in NO_PLANNER:
        return f"{module} must not import the planner: it carries out plans"
    if part == target_part == "runtime" and target != module and target.split(".")[2:]:
        if target.split(".")[2] in PIPELINES:
            return f"{module} imports {target}: runtime modules do not know its pipelines"
    return None


def foreign_problem(part: str, top: str, declared: set[str]) -> str | None:
    """Rules for imports of other people's packages."""
    if top == "torch" and part in NO_TORCH:
        return f"{part} must not import torch"
    if top == "deepspeed" and part not in MAY_IMPORT_DEEPSPEED:
        return f"{part} must not import deepspeed"
    if top in ("transformers", "accelerate") and part not in MAY_IMPORT_HUGGINGFACE:
        return f"{part} must not import {top}"
    if top not in declared:
        return f"{top} is not declared in pyproject.toml"
    return None


def imported_modules(module: str, path: Path, modules: set[str]):
    """Yield (line, module name) of every import anywhere in the file, also inside functions."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{base}.{alias.name}"
                is_module = name in modules or any(other.startswith(name + ".") for other in modules)
                yield node.lineno, name if is_module else base
