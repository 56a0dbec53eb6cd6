#!/usr/bin/env python3
"""Count the lines of code under src, without blank lines, comments and docstrings: by top-level package, and in total.

scripts/count_lines.py             of this repository
scripts/count_lines.py FOLDER      of another one
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

IGNORED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> int:
    """Return how many lines have code on them.

    >>> code_lines("'''What it is.'''\\n\\nx = [  # a list\\n    1,\\n]\\n")
    3
    """
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for token in tokens if token.type not in IGNORED for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - docstring_lines(ast.parse(source)))


def docstring_lines(tree: ast.Module) -> set[int]:
    documented = (node for node in ast.walk(tree) if isinstance(node, DOCUMENTED))
    firsts = (node.body[0] for node in documented if ast.get_docstring(node, clean=False) is not None)
    return {line for first in firsts for line in range(first.lineno, (first.end_lineno or first.lineno) + 1)}


def main() -> None:
    root = (Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent) / "src" / "lfo"
    counts: Counter[str] = Counter()
    for path in sorted(root.rglob("*.py")):
        counts[path.relative_to(root).parts[0]] += code_lines(path.read_text(encoding="utf-8"))
    for name, count in sorted(counts.items(), key=lambda each: -each[1]):
        print(f"{count:7,} {name}")
    print(f"{sum(counts.values()):7,} in all")


if __name__ == "__main__":
    main()
