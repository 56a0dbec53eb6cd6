"""No file has more than 450 lines and no function more than 60 lines of code, and reading a run takes little."""

import ast
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
code_lines = runpy.run_path(str(ROOT / "scripts" / "count_lines.py"))["code_lines"]
MOST_IN_A_FILE, MOST_IN_A_FUNCTION = 450, 60
CHECKED = ("src", "benchmarks", "research", "scripts", "examples")


def sources() -> Iterator[tuple[str, str]]:
    for folder in CHECKED:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def long_functions(source: str) -> list[str]:
    """The names of the functions that are too long; blank lines, comments and docstrings do not count."""
    functions = (each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.FunctionDef))
    lines = source.splitlines(keepends=True)
    found = []
    for each in functions:
        own = [line[each.col_offset :] or "\n" for line in lines[each.lineno - 1 : each.end_lineno]]
        if code_lines("".join(own)) > MOST_IN_A_FUNCTION:
            found.append(each.name)
    return found


def test_no_file_is_too_long():
    found = {name: source.count("\n") for name, source in sources()}
    assert len(found) > 200
    assert {name: lines for name, lines in found.items() if lines > MOST_IN_A_FILE} == {}


def test_no_function_is_too_long():
    assert {name: found for name, source in sources() if (found := long_functions(source))} == {}


@pytest.mark.parametrize(("lines", "found"), [(59, []), (60, ["long"])])
def test_a_function_of_more_lines_than_that_is_caught(lines: int, found: list[str]):
    body = "".join(f"        x = {line}\n\n        # why\n" for line in range(lines))
    assert long_functions(f'class A:\n    def long(self):\n        """What it does."""\n{body}') == found


def test_runs_are_compared_without_an_environment_and_without_a_runner():
    """Its modules are those of `lfo compare`, in a process of its own."""
    run = ROOT / "research" / "results" / "level2" / "dapo-0"
    command = (
        "import sys; from lfo.cli import app; app(sys.argv[1:], standalone_mode=False); "
        "print(*(name for name in sys.modules if name.startswith('lfo.')), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", command, "compare", run], capture_output=True, text=True, check=True)
    assert "Tasks to a share of the ceiling" in done.stdout
    loaded = set(done.stderr.split())
    assert "lfo.runs.sample_efficiency" in loaded
    worlds = {f"lfo.env.{name}" for name in ("phone_calls", "oracle", "tool_environment", "generator", "tasks", "gym")}
    heavy = {"lfo.rollout", "lfo.agent", "lfo.train.loop", "lfo.engines", "lfo.loading", "lfo.model.adapters"}
    assert not loaded & (worlds | heavy)
    assert not any(name.startswith(("lfo.rollout.", "lfo.engines.", "lfo.env.adapters.")) for name in loaded)
