"""docs/TRAINING.md names every setting, with its real default, and no other."""

import re
from pathlib import Path

from lfo.config import RunConfig, flatten

TEXT = (Path(__file__).parent.parent / "docs" / "TRAINING.md").read_text(encoding="utf-8")
TABLE = TEXT.partition("## All settings")[2].partition("\n## ")[0]
ROWS = [line.strip("| ").split(" | ") for line in TABLE.splitlines() if line.startswith("| `")]
NAMES = set(flatten(RunConfig()))


def documented() -> dict[str, str]:
    """Name -> default as written; a row may hold two settings with two defaults."""
    found = {}
    for names, default, *_ in ROWS:
        listed = [name for name in re.findall(r"`([\w.]+)`", names) if name in NAMES]
        defaults = default.split(", ") if len(listed) > 1 else [default]
        found |= dict(zip(listed, defaults, strict=True))
    return found


def test_every_setting_is_in_the_table():
    assert NAMES - set(documented()) == set()


def test_the_defaults_are_the_real_ones():
    real = flatten(RunConfig())
    for name, written in documented().items():
        value, words = real[name], written.strip("`")
        if words == "none":
            assert not value, name
        elif isinstance(value, bool):
            assert words == str(value).lower(), name
        elif isinstance(value, tuple):
            assert words.split() == [str(each) for each in value], name
        elif isinstance(value, str):
            assert words == value, name
        else:
            assert float(words) == value, name
