"""Two runs -> a table: what is counted, what is censored, and what the words say."""

import json
from pathlib import Path

import pytest

from lfo.errors import DataError
from lfo.evaluation.side_by_side import SEEN, UNSEEN, Arm, as_json, conclusion, read_arm, table

CEILING = 0.9  # so 63 % is the target

PLAIN = Arm(name="plain", curve={0: 0.0, 80: 0.05, 160: 0.1}, unseen=0.04, seconds=30.4)
DUAL = Arm(name="dual", curve={0: 0.0, 80: 0.63, 160: 0.5}, unseen=None, seconds=50.0)


def written(folder: Path, *rows: dict, torn: str = "") -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)
    return folder


def test_an_arm_is_read_from_the_rows_that_hold_an_evaluation(tmp_path: Path):
    run = written(
        tmp_path / "run",
        {"step": 0, "tasks_seen": 0, SEEN: 0.0, UNSEEN: 0.01, "seconds/eval": 2.0},
        {"step": 1, "tasks_seen": 8, "success": 0.9, "seconds/rollout": 1.0, "seconds/update": 0.5},
        {"step": 2, "tasks_seen": 16, SEEN: 0.25, UNSEEN: 0.125, "seconds/eval": 2.0, "tokens_per_second": 1000.0},
        {"step": 3, "tasks_seen": 24, "success": 1.0, "seconds/rollout": 1.0},
        torn='{"step": 4, "tasks_',
    )
    arm = read_arm("x", run)
    assert arm == Arm(name="x", curve={0: 0.0, 16: 0.25}, unseen=0.125, seconds=6.5)
    assert (arm.tasks_seen, arm.success) == (16, 0.25)


def test_a_run_without_an_evaluation_or_without_metrics_is_named(tmp_path: Path):
    run = written(tmp_path / "run", {"step": 1, "tasks_seen": 8, "success": 0.5})
    with pytest.raises(DataError, match=f"{run} holds no evaluation"):
        read_arm("x", run)
    with pytest.raises(DataError, match="cannot read"):
        read_arm("x", tmp_path)


def test_the_target_is_reached_at_its_first_evaluation_even_if_it_is_lost_again():
    assert DUAL.tasks_to(0.63) == 80
    assert DUAL.tasks_to(0.64) is None
    assert DUAL.tasks_to(0.0) == 0
    assert PLAIN.tasks_to(0.63) is None


def test_the_table_has_a_row_for_every_evaluation_of_either_arm():
    longer = Arm(name="longer", curve={0: 0.02, 240: 0.3}, unseen=0.5, seconds=1.0)
    assert table([DUAL, longer], CEILING) == [
        ("val after 0 tasks", "0%", "2%"),
        ("val after 80 tasks", "63%", "-"),
        ("val after 160 tasks", "50%", "-"),
        ("val after 240 tasks", "-", "30%"),
        ("unseen companies, zero-shot", "-", "50%"),
        ("information ceiling", "90.0%", "90.0%"),
        ("tasks to 70% of the ceiling", "80", "not reached in 240 tasks"),
        ("seconds", "50", "1"),
    ]


def test_the_conclusion_says_who_needed_how_many_tasks_whoever_was_better():
    words = conclusion(PLAIN, DUAL, CEILING)
    assert "dual needed 80 tasks and plain more than 160;" in words
    assert "ended at 50% and 10% success on val, - and 4% on unseen companies" in words
    assert "one seed" in words
    assert "plain needed more than 160 tasks and dual 80;" in conclusion(DUAL, PLAIN, CEILING)


def test_programs_are_told_the_same():
    result = json.loads(json.dumps(as_json({"dapo": PLAIN, "dual-lora": DUAL}, CEILING)))
    assert result["ceiling"] == CEILING
    assert result["target"] == pytest.approx(0.63)
    assert result["arms"]["dapo"]["tasks_to_target"] is None
    assert result["arms"]["dual-lora"]["tasks_to_target"] == 80
    assert result["arms"]["dual-lora"]["val"][1] == {"tasks_seen": 80, "success": 0.63}
    assert result["arms"]["dapo"]["test_unseen_companies"] == 0.04
