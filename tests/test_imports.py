"""The import graph of the package points one way. It is read from the source, including nested imports.

types, errors <- env, protocol <- play <- rows <- runs <- measure <- train <- engines <- tools, cli
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"

# Room of the package -> the rooms, or modules of rooms, that it may import besides itself. `lfo` holds the version.
MAY_IMPORT: Mapping[str, frozenset[str]] = {
    "lfo": frozenset(),
    "types": frozenset(),
    "errors": frozenset(),
    "statistics": frozenset(),
    "settings": frozenset({"errors"}),
    "checkpoints": frozenset({"errors"}),
    "streams": frozenset({"errors"}),
    "atomic": frozenset({"errors", "checkpoints"}),
    "env": frozenset({"types", "errors", "statistics", "atomic", "protocol.hermes", "protocol.schemas"}),
    "config": frozenset({"errors", "settings", "env"}),
    "protocol": frozenset({"types", "errors"}),
    "objectives": frozenset({"types"}),
    "play": frozenset({"types", "errors", "checkpoints", "config", "env", "protocol"}),
    "rows": frozenset({"types", "errors", "config", "env", "protocol", "objectives", "play"}),
    "model": frozenset({"types", "errors", "checkpoints", "config", "objectives"}),
    "algorithms": frozenset({"types", "statistics", "config", "env", "play"}),
    "backend": frozenset({"types", "config", "play"}),
    "runs": frozenset(
        {
            *("types", "errors", "statistics", "settings", "config", "checkpoints", "atomic", "env", "play"),
            "model.catalog",
        }
    ),
    "measure": frozenset(
        {
            *("types", "errors", "statistics", "config", "atomic", "env", "protocol", "play", "rows", "backend"),
            "runs",
        }
    ),
    "report": frozenset({"errors", "config", "env.worlds.shipped", "runs", "measure"}),
    "loading": frozenset({"errors", "settings", "config", "env", "model"}),
    "base_form": frozenset({"types", "errors", "atomic", "config", "protocol", "model", "loading"}),
    "agent": frozenset(
        {
            *("types", "errors", "settings", "config", "checkpoints", "env", "protocol", "play", "runs", "model"),
            *("loading", "base_form"),
        }
    ),
    "serving": frozenset(
        {
            *("types", "errors", "config", "checkpoints", "env", "protocol", "play", "runs", "loading", "base_form"),
            "agent",
        },
    ),
    "train": frozenset(
        {
            *("types", "errors", "config", "checkpoints", "atomic", "streams", "env", "protocol", "objectives"),
            *("play", "rows", "algorithms", "backend", "runs", "measure"),
        }
    ),
    "engines": frozenset(
        {
            *("types", "errors", "settings", "config", "atomic", "env", "protocol", "objectives", "play", "model"),
            *("algorithms", "loading", "base_form", "agent", "train"),
        }
    ),
    "tools": frozenset(
        {
            *("types", "errors", "statistics", "config", "atomic", "env", "protocol", "objectives", "play", "runs"),
            *("model", "measure", "loading", "base_form", "agent", "train", "engines"),
        }
    ),
}
EVERYTHING = frozenset(MAY_IMPORT)  # for cli

# Package from outside -> where in this one it may be imported; anything not named here may be imported anywhere.
LIVES_IN: Mapping[str, tuple[str, ...]] = {
    "torch": (
        "lfo.objectives.losses",
        "lfo.model",
        "lfo.train.tracking",
        "lfo.loading",
        "lfo.agent",
        "lfo.tools",
        "lfo.engines",
    ),
    "peft": ("lfo.model", "lfo.tools", "lfo.engines"),
    "verl": ("lfo.engines.verl", "lfo.env.adapters.verl_project"),
    "ray": ("lfo.engines.verl",),
    "hydra": ("lfo.engines.verl",),
    "vllm": ("lfo.engines.verl",),
    "starlette": ("lfo.serving.app",),
    "uvicorn": ("lfo.serving.app", "lfo.serving.connections"),
    "gymnasium": ("lfo.env.gym", "lfo.env.adapters.gymnasium_env"),
    "textarena": ("lfo.env.adapters.textarena_game",),
    "openenv": ("lfo.env.adapters.openenv_server",),
    "verifiers": ("lfo.env.adapters.verifiers_env", "lfo.env.adapters.verifiers_v1", "lfo.env.for_verifiers"),
    "scienceworld": ("lfo.env.adapters.scienceworld_task",),
}
# (module, what it imports inside a function), with the reason.
LATE: Mapping[tuple[str, str], str] = {
    ("lfo.model.fast.turn_decoder", "lfo.model.fast.turn_kernels"): "Triton is there only beside a GPU",
}
# The environment is pure Python, and so is what it may import, except for its faces to other libraries.
PURE = ("lfo.env", "lfo.protocol.hermes", "lfo.statistics")
IMPURE = ("lfo.env.gym", "lfo.env.adapters", "lfo.env.for_verifiers")


def package_sources() -> dict[str, str]:
    """Module name -> source, for the whole package; a package goes by its own name."""
    sources = {}
    for path in sorted((SOURCE / "lfo").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return sources


def imported(module: str, source: str, modules: set[str], nested: bool = True) -> Iterator[str]:
    """The full names of what a module imports; of `from a import b` that is a.b where it is a module, else a."""
    is_package = any(name.startswith(f"{module}.") for name in modules)
    tree = ast.parse(source)
    for node in ast.walk(tree) if nested else _at_import_time(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", getattr(node.func, "id", "")) in ("import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value)


def _at_import_time(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when the module is imported: not the bodies of functions, not what only type checkers read."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and getattr(child.test, "id", getattr(child.test, "attr", "")) == "TYPE_CHECKING":
            continue
        yield child
        yield from _at_import_time(child)


def part(module: str) -> str:
    """`lfo.env.worlds.phone.world` belongs to the room `env`."""
    return module.split(".")[1] if "." in module else "lfo"


def within(module: str, places: tuple[str, ...]) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places)


def violations(sources: Mapping[str, str]) -> list[str]:
    """One sentence for every import that points the wrong way."""
    modules, found = set(sources), []
    for module, source in sources.items():
        here = part(module)
        if here not in MAY_IMPORT and here != "cli":
            found.append(f"{module}: nobody has said what {here} may import")
            continue
        allowed = (EVERYTHING if here == "cli" else MAY_IMPORT[here]) | {here, "lfo"}
        for name in imported(module, source, modules):
            top = name.partition(".")[0]
            if top == "lfo" and not {part(name), name.removeprefix("lfo.")} & allowed:
                found.append(f"{module} imports {name}")
            if top in LIVES_IN and not within(module, LIVES_IN[top]):
                found.append(f"{module} imports {name}")
            pure = within(module, PURE) and not within(module, IMPURE)
            if pure and top != "lfo" and top not in sys.stdlib_module_names and top not in LIVES_IN:
                found.append(f"{module} imports {name}")
    return found


def late_imports(sources: Mapping[str, str]) -> set[tuple[str, str]]:
    """(module, what it imports) for every import of our own inside a function, where one at the top would do.

    A command imports late, so that `lfo --help` is fast; an engine, because its packages may not be there.
    """
    modules, found = set(sources), set()
    for module, source in sources.items():
        if within(module, ("lfo.cli", "lfo.engines.verl")) or module == "lfo.engines":
            continue
        for function in ast.walk(ast.parse(source)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                names = imported(module, ast.unparse(function), modules)
                found |= {(module, name) for name in names if name.partition(".")[0] == "lfo"}
    return found


def cycles(sources: Mapping[str, str]) -> list[list[str]]:
    """Modules that need each other while they are being imported."""
    modules = set(sources)
    graph = {
        module: sorted({name for name in imported(module, source, modules, nested=False) if name in modules})
        for module, source in sources.items()
    }
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append([*path[path.index(module) :], module])
        elif module not in done:
            for name in graph[module]:
                visit(name, [*path, module])
            done.add(module)

    for module in graph:
        visit(module, [])
    return found


def test_imports_point_one_way():
    sources = package_sources()
    assert {"lfo", "lfo.types", "lfo.env.interface", "lfo.cli"} <= set(sources)
    assert violations(sources) == []


def test_there_are_no_import_cycles():
    assert cycles(package_sources()) == []


def test_no_import_hides_in_a_function():
    assert late_imports(package_sources()) == set(LATE)


@pytest.mark.parametrize("source", ["from lfo.env import two", "import lfo.env.two", "from . import two"])
def test_an_import_that_hides_in_a_function_is_caught(source):
    sources = {"lfo": "", "lfo.env": "", "lfo.env.two": "", "lfo.env.one": f"def f():\n    def g():\n        {source}"}
    assert late_imports(sources) == {("lfo.env.one", "lfo.env.two")}
    assert late_imports({**sources, "lfo.env.one": source, "lfo.cli.one": f"def f():\n    {source}"}) == set()


def test_the_table_itself_has_no_cycle():
    order: list[str] = []
    while len(order) < len(MAY_IMPORT):
        ready = [
            name
            for name, needs in MAY_IMPORT.items()
            if name not in order and {need.partition(".")[0] for need in needs} <= set(order)
        ]
        assert ready, "the allowed directions go in a circle"
        order += ready


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("lfo.types", "import lfo.errors"),
        ("lfo.env.worlds.phone.world", "from lfo.protocol import chat"),
        ("lfo.env.worlds.phone.world", "from lfo import protocol"),
        ("lfo.env.worlds.phone.world", "from ....protocol.chat import encode"),
        ("lfo.env", "from ..protocol import chat"),
        ("lfo.env", "from .. import protocol"),
        ("lfo.protocol.chat", "from lfo.env.interface import Environment"),
        ("lfo.play.runner", "def f():\n    from lfo.measure import metrics"),
        ("lfo.measure.metrics", "import lfo.engines.local"),
        ("lfo.engines.local", "from lfo.cli import app"),
        ("lfo.objectives.losses", "from lfo.config import RunConfig"),
        ("lfo.objectives.losses", "from lfo.errors import WorkError"),
        ("lfo.report.page", "from lfo.engines.local import train"),
        ("lfo.report.page", "import importlib\nimportlib.import_module('lfo.engines.local')"),
        ("lfo.report.page", "if TYPE_CHECKING:\n    from lfo.model import adapters"),
        ("lfo.config", "import torch"),
        ("lfo.config", "from lfo.model import adapters"),
        ("lfo.runs.data", "from lfo.model.adapters import DualAdapterModel"),
        ("lfo.play.runner", "from lfo.rows.samples import TrainingSample"),
        ("lfo.cli.train", "def f():\n    import torch.nn as nn"),
        ("lfo.play.runner", "from torch import Tensor"),
        ("lfo.objectives.advantages", "import torch"),
        ("lfo.engines.local", "import verl"),
        ("lfo.engines.local", "from ray import remote"),
        ("lfo.engines.verl_notes", "import hydra"),
        ("lfo.env.worlds.phone.world", "import numpy as np"),
        ("lfo.statistics", "import numpy as np"),
        ("lfo.protocol.hermes", "from lfo.env.interface import Environment"),
        ("lfo.env.worlds.phone.world", "import torch"),
        ("lfo.env.worlds.phone.world", "import gymnasium"),
        ("lfo.play.runner", "import gymnasium"),
        ("lfo.surprise", "import os"),
        ("lfo.serving.wire", "import starlette"),
        ("lfo.serving.batcher", "import torch"),
    ],
)
def test_a_wrong_import_is_caught(module, source):
    sources = dict.fromkeys(package_sources(), "") | {
        "lfo.protocol.chat": "",
        "lfo.measure.metrics": "",
        module: source,
    }
    assert len(violations(sources)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("lfo.env.gym", "import gymnasium, numpy"),
        ("lfo.env.worlds.phone.world", "import random\nfrom .rules import law\nfrom lfo.types import Message"),
        ("lfo.env", "from .rules import law\nfrom . import rules\nfrom .. import types"),
        ("lfo.env.worlds.phone.world", "from lfo.protocol.hermes import read_tool_call\nfrom lfo import statistics"),
        ("lfo.objectives.losses", "import torch\nfrom lfo.types import TrainingSample"),
        ("lfo.engines.verl.backend", "import verl, ray, hydra, torch\nfrom lfo.model import adapters"),
        ("lfo.cli.train", "def f():\n    from lfo.engines.local import train"),
        ("lfo.config", "from lfo.config.couplings import COUPLINGS"),
        ("lfo.runs.folder", "import lfo\nfrom lfo import __version__"),
    ],
)
def test_a_right_import_passes(module, source):
    assert violations(dict.fromkeys(package_sources(), "") | {"lfo.env.worlds.phone.rules": "", module: source}) == []


def test_a_cycle_is_caught_and_a_late_import_is_none():
    one, two = "from lfo.env import two", "from lfo.env.one import x"
    sources = {"lfo": "", "lfo.env": "", "lfo.env.one": one}
    assert cycles(sources | {"lfo.env.two": two}) == [["lfo.env.one", "lfo.env.two", "lfo.env.one"]]
    assert cycles(sources | {"lfo.env.two": f"def f():\n    {two}"}) == []
    assert cycles(sources | {"lfo.env.two": f"if TYPE_CHECKING:\n    {two}"}) == []
