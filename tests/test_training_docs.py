"""docs/TRAINING.md has the tables that are made from the knobs, and the main one is short."""

import importlib.util
from pathlib import Path

from lfo.config.knobs import KNOBS, marked

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "TRAINING.md").read_text(encoding="utf-8")

_spec = importlib.util.spec_from_file_location("knob_tables", ROOT / "scripts" / "knob_tables.py")
assert _spec is not None
assert _spec.loader is not None
knob_tables = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(knob_tables)


def test_the_tables_are_those_of_the_knobs():
    assert knob_tables.with_tables(TEXT) == TEXT, "run scripts/knob_tables.py"


def test_a_table_says_default_range_and_help():
    rows = knob_tables.table(["world_model.weight", "lookahead", "eval.splits", "policy.learning_rate", "env_args"])
    cells = [row.strip("| ").split(" | ") for row in rows.splitlines()[2:]]
    assert [row[:3] for row in cells] == [
        ["`world_model.weight`", "1", "from 0 to 2"],
        ["`lookahead`", "`policy`", "`policy`, `off`"],
        ["`eval.splits`", "`val`", ""],
        ["`policy.learning_rate`", "0.0001", "above 0 to 1"],
        ["`env_args`", "`levels=2`", ""],
    ]
    assert cells[0][3] == KNOBS["world_model.weight"].description


def test_the_main_table_is_short():
    assert len(marked("main")) <= 25
