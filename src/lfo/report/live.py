"""The current state of a run from its folder: progress, speed, remaining time and warnings. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from lfo.measure.gate import read_gate
from lfo.report.text import shown
from lfo.runs.advice import advise
from lfo.runs.costs import MetricsRows, number
from lfo.runs.reading import RunRecord

RECENT = 20  # steps for the current speed
WARNINGS = 5  # different ones, the latest
EVALUATION = "eval"


def now(record: RunRecord, process: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the card of a run on the page; `process` is its process, or None."""
    rows, config = record.rows, record.config
    last = rows[-1] if rows else {}
    evaluated = [(row["step"], value) for row in rows if (value := number(row.get("eval/val/success"))) is not None]
    if record.finished:
        state = "finished"
    elif config is None:
        state = "unusable"  # the problems of the page say why
    elif process is not None:
        state = "running" if rows else "starting"
    else:
        state = "not running"
    recent = [row for row in rows if row["step"] > 0][-RECENT:]
    return {
        "state": state,
        "step": last.get("step", 0),
        "steps": config.steps if config else None,
        "tasks": number(last.get("tasks_seen")) or 0,
        "success": evaluated[-1][1] if evaluated else None,
        "success_step": evaluated[-1][0] if evaluated else None,
        "phases": list(phases(recent).items()),
        "left": time_left(record) if state == "running" else None,
        "process": process,
        "warnings": [*([{"step": None, "words": shown(record.agent, 600)}] if record.agent else []), *warnings(record)],
    }


def phases(rows: MetricsRows) -> dict[str, float]:
    """Return the mean seconds per step of each phase, the longest first.

    >>> phases([{"seconds/rollout": 2.0, "seconds/update": 3.0}, {"seconds/rollout": 4.0, "seconds/eval": 8.0}])
    {'eval': 4.0, 'rollout': 3.0, 'update': 1.5}
    """
    names = {key for row in rows for key in row if key.startswith("seconds/") and key != "seconds/seen"}
    means = {name.partition("/")[2]: fmean(number(row.get(name)) or 0.0 for row in rows) for name in names}
    return dict(sorted(means.items(), key=lambda each: (-each[1], each[0])))


def time_left(record: RunRecord) -> float | None:
    """Return the remaining seconds at the current speed, with evaluations; None if unknown.

    Ten steps of 2 s done of 20, and an evaluation of 5 s at every tenth: 10 * 2 + 1 * 5 = 25.
    """
    config, steps = record.config, [row for row in record.rows if row["step"] > 0]
    if config is None or not steps:
        return None
    each = fmean(sum(phases([row]).values()) - _evaluation(row) for row in steps[-RECENT:])
    done = steps[-1]["step"]
    evaluations = [_evaluation(row) for row in record.rows if _evaluation(row)]
    every = config.eval.every
    ahead = -(-config.steps // every) - done // every if every else 0
    return (config.steps - done) * each + (ahead * fmean(evaluations[-3:]) if evaluations else 0.0)


def warnings(record: RunRecord) -> list[dict[str, Any]]:
    """Return the warnings of the run, each once with its latest step, and those of `lfo advise`."""
    latest: dict[str, int] = {}
    for row in record.rows:
        found_in_row: Any = row.get("warnings")
        for words in found_in_row if isinstance(found_in_row, list) else ():
            latest.pop(str(words), None)
            latest[str(words)] = row["step"]
    found: list[dict[str, Any]] = [{"step": step, "words": shown(words, 400)} for words, step in latest.items()]
    gate = read_gate(record.path)
    troubles = advise(record.rows, record.config, gate) if record.config and record.rows else ()
    found = found[-WARNINGS:]
    return found + [
        {"step": None, "words": shown(f"{each.name}: {each.figure}. {each.knob}.", 600)} for each in troubles
    ]


def _evaluation(row: Mapping[str, Any]) -> float:
    return number(row.get(f"seconds/{EVALUATION}")) or 0.0
