#!/usr/bin/env python3
"""Write the tables of settings in docs/TRAINING.md from `lfo.config.knobs`.

scripts/knob_tables.py             writes them
scripts/knob_tables.py --check     exit code 1 where docs/TRAINING.md has others
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from lfo.config.knobs import KNOBS, marked

PAGE = Path(__file__).parent.parent / "docs" / "TRAINING.md"


def with_tables(page: str) -> str:
    """The page with both tables made anew, between their marks."""
    main = marked("main")
    for title, names in (("main", main), ("advanced", [name for name in KNOBS if name not in main])):
        page, count = re.subn(
            rf"(<!-- knobs: {title} -->\n).*?(<!-- end -->)",
            lambda found, names=names: f"{found[1]}{table(names)}{found[2]}",
            page,
            flags=re.DOTALL,
        )
        if count != 1:
            raise SystemExit(f"{PAGE} has {count} places for the table of {title} knobs")
    return page


def table(names: Iterable[str]) -> str:
    rows = ["| name | default | values | meaning |", "|---|---|---|---|"]
    for name in names:
        knob = KNOBS[name]
        rows.append(f"| `{name}` | {_default(knob.default)} | {_values(knob)} | {knob.description} |")
    return "".join(f"{row}\n" for row in rows)


def _default(value: Any) -> str:
    """
    >>> [_default(each) for each in (True, 1e-4, 2.0, "val", None, ("val", "test"), {"levels": [2]})]
    ['true', '0.0001', '2', '`val`', 'none', '`val,test`', '`levels=2`']
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, dict):
        value = [f"{name}={','.join(map(str, each))}" for name, each in value.items()]
    text = value if isinstance(value, str) else ",".join(map(str, value or ()))
    return f"`{text}`" if text else "none"


def _values(knob: FieldInfo) -> str:
    """What it may be: its choices, or its range."""
    if "Literal" in str(knob.annotation):
        return ", ".join(f"`{word}`" for word in re.findall(r"'([^']+)'", str(knob.annotation)))
    if knob.annotation is bool:
        return "true, false"
    limits = (("from", "ge"), ("above", "gt"), ("to", "le"))
    found = (f"{word} {getattr(each, name)}" for each in knob.metadata for word, name in limits if hasattr(each, name))
    return " ".join(found)


if __name__ == "__main__":
    before = PAGE.read_text(encoding="utf-8")
    after = with_tables(before)
    if "--check" in sys.argv[1:]:
        sys.exit(before != after)
    PAGE.write_text(after, encoding="utf-8")
