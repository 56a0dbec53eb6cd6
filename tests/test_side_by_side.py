"""The table of two runs: counts, censoring, and the summary."""

import json
from pathlib import Path
from typing import Any

import pytest

from lfo.config import load_config, to_yaml
from lfo.errors import DataError
from lfo.evaluation.runs import RunRecord, read_run
from lfo.evaluation.sample_efficiency import VAL, compare
from lfo.evaluation.side_by_side import as_json, conclusion, table

UNSEEN = "eval/test_unseen_companies/success"
NAMES = {"dapo": "plain", "dual-lora": "dual"}
DATA = {  # so 63 % is the target
    "environment": "phone-calls",
    "levels": [2],
    "splits": {"val": {"tasks": 100, "fingerprint": "a" * 16, "ceiling": 0.9}},
}
SETTINGS = ("preset=tiny", "steps=2", "eval.splits=val,test_unseen_companies")


def run_of(algo: str, curve: dict[int, float], *, unseen: float | None, seconds: float) -> RunRecord:
    """A run with the seconds, and what it can do on unseen companies, in its last row."""
    rows: list[dict[str, Any]] = [
        {"step": step, "tasks_seen": tasks, VAL: success} for step, (tasks, success) in enumerate(curve.items())
    ]
    rows[-1] |= {"seconds/update": seconds, **({} if unseen is None else {UNSEEN: unseen})}
    config = load_config([*SETTINGS, f"algo={algo}"])
    return RunRecord(path=Path(algo), config=config, rows=tuple(rows), data=DATA, finished=True)


PLAIN = run_of("dapo", {0: 0.0, 80: 0.05, 160: 0.1}, unseen=0.04, seconds=30.4)
DUAL = run_of("dual-lora", {0: 0.0, 80: 0.63, 120: 0.7, 160: 0.5}, unseen=None, seconds=50.0)


def written(folder: Path, *rows: dict, torn: str = "") -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(load_config(SETTINGS)))
    (folder / "data.json").write_text(json.dumps(DATA))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)
    return folder


def test_an_arm_is_told_from_the_rows_that_hold_an_evaluation(tmp_path: Path):
    run = written(
        tmp_path / "run",
        {"step": 0, "tasks_seen": 0, VAL: 0.0, UNSEEN: 0.01, "seconds/eval": 2.0},
        {
            "step": 1,
            "tasks_seen": 8,
            "success": 0.9,
            "seconds/rollout": 1.0,
            "seconds/update": 0.5,
            "seconds/seen": 1.5,
        },
        {"step": 2, "tasks_seen": 16, VAL: 0.25, UNSEEN: 0.125, "seconds/eval": 2.0, "tokens_per_second": 1000.0},
        {"step": 3, "tasks_seen": 24, "success": 1.0, "seconds/rollout": 1.0},
        torn='{"step": 4, "tasks_',
    )
    assert as_json(compare([read_run(run)]))["arms"] == {
        "dual-lora": {
            "val": [{"tasks_seen": 0, "success": 0.0}, {"tasks_seen": 16, "success": 0.25}],
            "test_unseen_companies": 0.125,
            "tasks_to_target": None,
            "tasks_seen": 16,
            "seconds": 6.5,
        }
    }


def test_a_run_without_an_evaluation_or_without_metrics_is_named(tmp_path: Path):
    run = written(tmp_path / "run", {"step": 1, "tasks_seen": 8, "success": 0.5})
    with pytest.raises(DataError, match=f"{run} contains no evaluation"):
        compare([read_run(run)])
    (run / "metrics.jsonl").unlink()
    with pytest.raises(DataError, match=f"{run} has no metrics yet"):
        compare([read_run(run)])


def test_the_table_has_a_row_for_every_evaluation_of_either_arm():
    longer = run_of("dapo", {0: 0.02, 240: 0.3}, unseen=0.5, seconds=1.0)
    assert table(compare([DUAL, longer])) == [
        ("val after 0 tasks", "0%", "2%"),
        ("val after 80 tasks", "63%", "-"),
        ("val after 120 tasks", "70%", "-"),
        ("val after 160 tasks", "50%", "-"),
        ("val after 240 tasks", "-", "30%"),
        ("unseen companies, zero-shot", "-", "50%"),
        ("information ceiling", "90.0%", "90.0%"),
        ("tasks to 70% of the ceiling", "80", "not reached in 240 tasks"),
        ("seconds", "50", "1"),
    ]


def test_the_conclusion_says_who_needed_how_many_tasks_whoever_was_better():
    words = conclusion(compare([PLAIN, DUAL]), NAMES)
    assert "dual needed 80 tasks and plain more than 160;" in words
    assert "ended at 50% and 10% success on val, - and 4% on unseen companies" in words
    assert "one seed" in words
    assert "plain needed more than 160 tasks and dual 80;" in conclusion(compare([DUAL, PLAIN]), NAMES)


def test_programs_are_told_the_same():
    result = json.loads(json.dumps(as_json(compare([PLAIN, DUAL]))))
    assert result["ceiling"] == 0.9
    assert result["target"] == pytest.approx(0.63)
    assert result["arms"]["dapo"]["tasks_to_target"] is None
    assert result["arms"]["dual-lora"]["tasks_to_target"] == 80
    assert result["arms"]["dual-lora"]["val"][1] == {"tasks_seen": 80, "success": 0.63}
    assert result["arms"]["dapo"]["test_unseen_companies"] == 0.04
