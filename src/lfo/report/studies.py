"""Ablations on the page, read from `ablation.json`: runs that differ in one config value."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lfo.report.curves import mark
from lfo.report.text import shown
from lfo.report.words import percent
from lfo.runs.costs import number
from lfo.runs.reading import RunRecord
from lfo.runs.sample_efficiency import TARGET_SHARE, curve, tasks_to

ABLATION_FILE = "ablation.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyResult:
    """The result of an ablation: what was varied, and the status of each run."""

    path: Path
    setting: str
    cells: Sequence[Mapping[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> StudyResult:
        content = json.loads((folder / ABLATION_FILE).read_bytes())
        cells = [cell for cell in content["cells"] if isinstance(cell, dict) and "value" in cell]
        return cls(path=folder, setting=str(content["setting"]), cells=cells)

    def chart(self, records: Sequence[RunRecord]) -> dict[str, Any]:
        """Return a chart of the success at the end by value."""
        by_path = {record.path: record for record in records}
        values: dict[str, list[RunRecord]] = {}
        failed = []
        for cell in self.cells:
            value, seed, status = shown(cell["value"], 60), cell.get("seed"), cell.get("status")
            record = by_path.get(self.path / str(cell.get("run")))
            values.setdefault(value, [])
            if status == "done" and record is not None and curve(record.rows):
                values[value].append(record)
            else:
                why = {
                    "failed": f"failed: {cell.get('error') or 'it said nothing'}",
                    "done": "contains no evaluation",
                }
                failed.append(shown(f"{self.setting}={value}, seed {seed}: {why.get(str(status), 'not run yet')}", 400))
        return {
            "title": shown(self.setting, 100),
            "about": f"Success on val at the end, for each value of {shown(self.setting, 100)}.",
            "rows": [_row(value, records) for value, records in values.items()],
            "failed": failed,
        }


def _row(value: str, records: Sequence[RunRecord]) -> dict[str, Any]:
    ceiling = number(described(records[0].data, "val").get("ceiling")) if records else None
    curves = [curve(record.rows) for record in records]
    ends = [list(each.values())[-1] for each in curves]
    found = [tasks_to(each, TARGET_SHARE * (ceiling or 1.0)) for each in curves]
    there = sorted(int(each.tasks) for each in found if not each.censored)
    note = f"{percent(TARGET_SHARE)} of ceiling not reached" if found else ""
    if there:
        some = "" if len(there) == len(found) else f" on {len(there)} of {len(found)} seeds"
        note = f"{percent(TARGET_SHARE)} of ceiling: {', '.join(map(str, there))} tasks{some}"
    marks = [mark(None, ends, "share")] if ends else []
    return {"label": value, "note": note, "ceiling": ceiling, "marks": marks}


def described(data: Mapping[str, Any] | None, split: str) -> Mapping[str, Any]:
    """Return the description of a split in `data.json`; empty if it is damaged or missing."""
    found = ((data or {}).get("splits") or {}).get(split)
    return found if isinstance(found, Mapping) else {}
