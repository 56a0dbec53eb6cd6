"""The tool that changes the product to see whether a test fails: which changes it makes, and what it says of them."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.append(str(SCRIPTS))

from mutating.changes import changes_of  # noqa: E402
from mutating.running import run  # noqa: E402


def changed(source: str) -> list[str]:
    """What each change makes of a source."""
    return [change.applied(source.encode()).decode() for change in changes_of("x.py", source.encode())]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", ["a <= b"]),
        ("a is not b", ["a is b"]),
        ("a not  in b", ["a in b"]),
        ("(a) == (b)", ["(a) != (b)"]),
        ("a <= b < c", ["a < b < c", "a <= b <= c"]),
        ("a + b", ["a - b"]),
        ("a // b ** c", ["a * b ** c"]),
        ("a += b", ["a -= b"]),
        ("a and b and c", ["a or b and c", "a and b or c"]),
        ("not a", ["(a)"]),
        ("1 if a else b", ["2 if a else b", "1 if (not (a)) else b"]),
        ("[a for a in b if c]", ["[a for a in b if (not (c))]"]),
        ("while a: break", ["while (not (a)): break", "while a: continue"]),
        ("True", ["False"]),
        ("[0, 64, 0.5, 0.0]", ["[1, 64, 0.5, 0.0]", "[0, 128, 0.5, 0.0]", "[0, 64, 1.0, 0.0]", "[0, 64, 0.5, 1.0]"]),
        ("a.b(c)", ["pass"]),
        ("x = min(a, b)", ["x = max(a, b)"]),
        ("x = sorted(a, key=b)", ["x = list(a)"]),
        ("x = a[b:-1]", ["x = a[(b) + 1:-1]", "x = a[b:-2]"]),
        ("def f(a=3):\n    return a", ["def f(a=4):\n    return a", "def f(a=3):\n    return None"]),
        ("x = 'ä', 1  # a byte more", ["x = 'ä', 2  # a byte more"]),
    ],
)
def test_each_kind_of_change_keeps_the_rest_of_the_source(source: str, expected: list[str]):
    assert changed(source) == expected
    for text in expected:
        ast.parse(text)


@pytest.mark.parametrize(
    "source",
    [
        '"""Text with 1 < 2."""',
        "import a",
        "x: tuple[int, 3]",
        "def f(a: Literal[1]) -> Literal[2]:\n    return None",
        "@dataclass(frozen=True)\nclass A: ...",
        "raise ValueError(1 < 2)",
        "assert a < b, 1",
        "logger.warning('%d', 1 + 2)",
        "x = f'{a + 1}'",
        "x = 'a' + b",
        "if TYPE_CHECKING:\n    import a",
        "x = zip(a, b, strict=True)",
    ],
)
def test_what_nothing_can_notice_is_not_changed(source: str):
    assert changed(source) == []


def test_a_change_knows_its_function_by_the_name_that_a_tracer_sees():
    source = "x = 1\nclass A:\n  y = 1\n  def f(self):\n    def g():\n      z = 1\n    w = [1 for a in b]\n"
    functions = [change.function for change in changes_of("x.py", source.encode())]
    assert functions == ["", "A", "A.f.<locals>.g", "A.f"]


def test_what_does_not_end_is_ended_with_what_it_started(tmp_path: Path):
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    assert run([sys.executable, "-c", child], tmp_path, 1.0) == "not ended after 1 s"


def test_changes_are_drawn_tried_and_remembered(tmp_path: Path):
    """In a project of its own, whose test leaves the limit open."""
    (tmp_path / "src").mkdir()
    (tmp_path / "tests").mkdir()
    source = "def large(a):\n    return a >= 5\n"
    (tmp_path / "src" / "sizes.py").write_text(source)
    (tmp_path / "tests" / "test_sizes.py").write_text(
        "from sizes import large\n\ndef test_large():\n    assert large(9)\n"
    )
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)

    command = [sys.executable, SCRIPTS / "mutate.py", "--seed=3", "--count=99", "--work=work", "--json", "src"]
    first = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    told = [json.loads(line) for line in first.stdout.splitlines()]
    assert [(each["diff"].splitlines()[-1], each["killed"]) for each in told] == [
        ("+    return None", True),
        ("+    return a > 5", False),
        ("+    return a >= 6", False),
    ]
    assert "test_sizes.py::test_large" in told[0]["by"]
    assert (tmp_path / "src" / "sizes.py").read_text() == source

    again = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert (again.stdout, again.stderr) == (first.stdout, ""), "nothing is run twice"
