"""The small changes of a Python file that `scripts/mutate.py` draws from, each an exact span of the source.

Nothing is changed where nothing can notice it: in texts, logs, annotations, imports, decorators, `raise` and `assert`.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

COMPARISONS: Mapping[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
ARITHMETIC: Mapping[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
}
FUNCTIONS: Mapping[str, str] = {"min": "max", "max": "min", "any": "all", "all": "any"}
INVISIBLE_ARGUMENTS = {"strict", "indent"}  # of zip and of JSON
LOGS = {"logger", "logging", "warnings"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """`Change(path="src/lfo/runs/folder.py", function="RunDirectory.close", start=4012, end=4018, text="is", file="9f86d0")`

    The bytes of the file from `start` to `end` become `text`.
    """

    path: str
    function: str  # its qualified name; "" outside of functions
    start: int
    end: int
    text: str
    file: str  # a digest of the unchanged file

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


def changes_of(path: str, source: bytes) -> list[Change]:
    """Return all changes of a file, in the order of the source."""
    return sorted(Finder(path, source).changes, key=lambda change: (change.start, change.end, change.text))


class Finder(ast.NodeVisitor):
    """Finds the changes of a file."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source, self.file = path, source, hashlib.sha256(source).hexdigest()[:12]
        self.lines = [0, *(match.end() for match in re.finditer(b"\n", source))]
        self.scope: list[str] = []
        self.changes: list[Change] = []
        self.visit(ast.parse(source))

    # --- how a change is written -----------------------------------------------------------------------------

    def span(self, node: Any) -> tuple[int, int]:
        return self.lines[node.lineno - 1] + node.col_offset, self.lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.source[start:end].decode()

    def replace(self, start: int, end: int, text: str) -> None:
        function = ".".join(self.scope).removesuffix(".<locals>")
        self.changes.append(Change(path=self.path, function=function, start=start, end=end, text=text, file=self.file))

    def become(self, node: ast.AST, text: str) -> None:
        self.replace(*self.span(node), text)

    def swap(self, left: ast.AST, right: ast.AST, old: str, new: str) -> None:
        """Replace the operator between two operands."""
        start, end = self.span(left)[1], self.span(right)[0]
        words = r"\s+".join(map(re.escape, old.split()))
        if found := re.search(rf"(?<![\w<>=!*/]){words}(?![\w<>=*/])".encode(), self.source[start:end]):
            self.replace(start + found.start(), start + found.end(), new)

    # --- where nothing is changed, and names ------------------------------------------------------------------

    def skip(self, node: ast.AST) -> None:
        pass

    visit_Raise = visit_Assert = visit_JoinedStr = visit_Import = visit_ImportFrom = skip

    def visit_FunctionDef(self, node: Any) -> None:
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        self.inside(node, node.name, "<locals>")

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.inside(node, node.name)

    def inside(self, node: Any, *names: str) -> None:
        self.scope += names
        for statement in node.body:
            self.visit(statement)
        del self.scope[-len(names) :]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in INVISIBLE_ARGUMENTS:
            self.visit(node.value)

    # --- what is changed --------------------------------------------------------------------------------------

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, right, operator in zip(operands, operands[1:], node.ops, strict=False):
            self.swap(left, right, *COMPARISONS[type(operator)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in ARITHMETIC and not any(map(_is_text, (node.left, node.right))):
            self.swap(node.left, node.right, *ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if type(node.op) in ARITHMETIC:
            old, new = ARITHMETIC[type(node.op)]
            start = self.source.index(old.encode(), self.span(node.target)[1])
            self.replace(start, start + len(old), new)
        self.visit(node.value)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        names = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.swap(left, right, *names)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.become(node, f"({self.text(node.operand)})")
        self.generic_visit(node)

    def negate(self, node: Any) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if not isinstance(node.test, ast.Compare | ast.UnaryOp | ast.Constant):  # they have changes of their own
            self.become(node.test, f"(not ({self.text(node.test)}))")
        self.generic_visit(node)

    visit_If = visit_While = visit_IfExp = negate

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            if not isinstance(test, ast.Compare | ast.UnaryOp):
                self.become(test, f"(not ({self.text(test)}))")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.become(node, str(not node.value))
        elif isinstance(node.value, int):
            self.become(node, str(node.value + 1 if node.value < 16 else node.value * 2))
        elif isinstance(node.value, float):
            self.become(node, repr(node.value * 2 or 1.0))

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            if self.text(node).split(".")[0] in LOGS:
                return
            self.become(node, "pass")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not isinstance(node.value, ast.Constant):
            self.become(node, "return None")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = self.text(node.func)
        if name in FUNCTIONS:
            self.become(node.func, FUNCTIONS[name])
        elif name in ("sorted", "reversed"):
            self.become(node, f"list({self.text(node.args[0])})")
        self.generic_visit(node)

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound in (node.lower, node.upper):
            if bound is not None and not isinstance(bound, ast.Constant | ast.UnaryOp):
                self.become(bound, f"({self.text(bound)}) + 1")
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self.become(node, "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self.become(node, "break")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
