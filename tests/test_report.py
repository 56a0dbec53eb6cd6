"""The payload of the report against values computed by hand, its empty states, its limits, and `lfo report`."""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lfo.cli import main
from lfo.errors import UsageError
from lfo.report.curves import Member, curve, interval, points
from lfo.report.page import render
from lfo.report.payload import build, find_runs_and_studies
from lfo.report.samples import ROLLOUTS_PER_RUN
from lfo.report.text import as_script_json
from lfo.runs.costs import training_seconds
from made_runs import prediction, rollout, world_model_row, write_large_set, write_run


def payload_of(*folders: Path) -> dict[str, Any]:
    return build(find_runs_and_studies(folders))


def member(rows: list[dict[str, Any]], *, run: int = 0, counts: bool = True) -> Member:
    return Member(run=run, group=0, rows=rows, seconds=training_seconds(rows), counts=counts)


def row(step: int, value: float, tasks: int | None = None, seconds: float = 1.0) -> dict[str, Any]:
    return {"step": step, "tasks_seen": 8 * step if tasks is None else tasks, "x": value, "seconds/update": seconds}


# Curves


def test_the_band_is_the_t_interval_of_the_mean_over_seeds():
    # Mean 0.5, deviation 0.1, three seeds: 4.302653 * 0.1 / sqrt(3) = 0.248414.
    seeds = [member([row(10, value)], run=run) for run, value in enumerate((0.4, 0.5, 0.6))]
    (line,) = curve("x", "x", seeds, "number")["lines"]
    assert line["mean"]["y"] == [0.5]
    assert line["mean"]["low"] == [pytest.approx(0.251586, abs=1e-5)]
    assert line["mean"]["high"] == [pytest.approx(0.748414, abs=1e-5)]


def test_one_seed_and_seeds_that_agree_have_no_interval_and_a_share_ends_at_its_bounds():
    assert interval([0.5], "share") == (0.5, None, None)
    assert interval([0.5, 0.5], "share") == (0.5, None, None)
    # Two seeds, 12.7062 * 0.0707107 / sqrt(2) = 0.63531 on either side.
    assert interval([0.8, 0.9], "share") == (0.85, pytest.approx(0.21469, abs=1e-5), 1)
    assert interval([0.8, 0.9], "number")[2] == pytest.approx(1.4853, abs=1e-4)


def test_seeds_meet_by_step_at_their_mean_tasks_and_time_as_far_as_all_go():
    one = member([row(0, 0.0), row(10, 0.2, tasks=80, seconds=10), row(20, 0.6, tasks=160, seconds=10)])
    two = member([row(0, 0.0), row(10, 0.4, tasks=100, seconds=20)], run=1)
    (line,) = curve("x", "x", [one, two], "share")["lines"]
    assert line["mean"]["tasks"] == [0, 90]
    assert line["mean"]["seconds"] == [1, 16]  # (1 + 10 and 1 + 20) / 2
    assert line["mean"]["y"] == [0, 0.3]
    assert line["runs"][0]["y"] == [0, 0.2, 0.6], "each run is drawn to its own end"


def test_a_run_that_does_not_count_is_drawn_but_is_in_no_mean():
    (line,) = curve("x", "x", [member([row(1, 0.2)]), member([row(1, 0.8)], run=1, counts=False)], "share")["lines"]
    assert line["mean"]["y"] == [0.2]
    assert [run["open"] for run in line["runs"]] == [False, True]


def test_time_counts_training_and_not_evaluation():
    rows = [
        {"seconds/eval": 50.0},
        {"seconds/rollout": 2.0, "seconds/update": 1.0, "seconds/seen": 3.0},
        {"seconds/update": None},
    ]
    assert training_seconds(rows) == [0.0, 3.0, 3.0]


def test_many_steps_are_drawn_as_means_of_neighbours_at_the_same_places_in_every_run():
    rows = [row(step, float(step)) for step in range(1, 9)]
    times = training_seconds(rows)
    assert [(point.step, point.value) for point in points(rows, times, "x", limit=8)] == [(n, n) for n in range(1, 9)]
    assert [(point.step, point.value) for point in points(rows, times, "x", limit=4)] == [
        (2, 1.5),
        (4, 3.5),
        (6, 5.5),
        (8, 7.5),
    ]
    gap = [each for each in rows if each["step"] != 4]  # a metric that one step did not report
    assert [point.step for point in points(gap, training_seconds(gap), "x", limit=4)] == [2, 4, 6, 8]


def test_values_that_are_no_numbers_are_no_points():
    rows = [row(1, 0.5), {**row(2, 0.0), "x": None}, {**row(3, 0.0), "x": "?"}, {**row(4, 0.0), "x": True}, row(5, 0.7)]
    assert [point.value for point in points(rows, training_seconds(rows), "x")] == [0.5, 0.7]


# The page's content


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Three seeds of dual-LoRA, there in 320, 400 and 480 tasks, and of plain DAPO, in three times as many."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(3):
        at = 40 + 10 * seed
        write_run(
            folder / f"dual-{seed}",
            f"seed={seed}",
            steps=100,
            success=lambda step, at=at: 0.7 * (step >= at) + 0.01 * at / 10,
            extra=lambda step: world_model_row(step, 0.9) if step % 10 == 0 else {},
            rollouts={100: [rollout(f"val-{seed}-{n}", reward=n % 2) for n in range(4)]},
            predictions={90: [prediction("old", "old")], 100: [prediction("a pin", "a name", same=False)]},
        )
        write_run(
            folder / f"dapo-{seed}",
            "algo=dapo",
            f"seed={seed}",
            steps=200,
            success=lambda s, at=at: 0.7 * (s >= 3 * at),
        )
    return folder


@pytest.fixture(scope="module")
def payload(folder: Path) -> dict[str, Any]:
    return payload_of(folder)


def test_groups_runs_and_the_headline(payload):
    assert [group["name"] for group in payload["groups"]] == ["dual-LoRA", "plain DAPO"]
    assert [group["colour"] for group in payload["groups"]] == [0, 1]
    assert payload["headline"] == "Dual-LoRA needs 3.0 times fewer tasks than plain DAPO to get to 70 % of the ceiling."
    assert payload["lede"].startswith("3 seeds of each, paired; ")
    assert "within 480 tasks on all 3 seeds, plain DAPO within 1,440 tasks on all 3 seeds" in payload["lede"]
    assert {run["state"] for run in payload["runs"]} == {"finished"}
    run = payload["runs"][3]
    assert (run["name"], run["group"], run["tasks"], run["seconds"]) == ("dual-0", 0, 800.0, 200.0)
    assert run["success"] == pytest.approx(0.74)
    assert payload["problems"] == payload["notes"] == []


def test_every_group_can_be_told_apart_and_those_of_more_seeds_come_first(tmp_path: Path):
    for rank in range(1, 12):
        write_run(tmp_path / f"rank-{rank}", f"lora.rank={rank}")
    write_run(tmp_path / "plain", "algo=dapo")
    write_run(tmp_path / "second", "lora.rank=5", "seed=1")
    groups = payload_of(tmp_path)["groups"]
    assert (groups[0]["name"], groups[-1]["name"]) == ("dual-LoRA, rank=5", "plain DAPO")
    assert (groups[-1]["colour"], groups[-1]["dash"]) == (1, 0)
    assert len({(group["colour"], group["dash"]) for group in groups}) == len(groups) == 12


def test_the_comparison_table(payload):
    table = payload["comparison"][0]["tables"][0]
    rows = table["rows"]
    assert table["title"].startswith("Tasks to a share of the ceiling (")
    assert table["columns"] == ["group", "seeds", "50%", "70%", "90%", "ratio", "val", "unseen"]
    assert [row["group"] for row in rows] == [0, 1]
    # Geometric means: (320 * 400 * 480) ** (1/3) = 394.6, three times that for the baseline.
    assert [row["cells"][2] for row in rows] == ["395", "1184"]
    assert [row["cells"][3] for row in rows] == ["> 800", "> 1600"]
    assert [row["cells"][4] for row in rows] == ["3.0", "-"]
    assert [row["cells"][0] for row in rows] == ["3", "3"]


def test_the_page_the_text_and_the_json_show_the_same_comparison(folder, payload, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lfo", "compare", str(folder), "--json"])
    with pytest.raises(SystemExit):
        main()
    told = json.loads(capsys.readouterr().out)
    (shown,) = payload["comparison"]
    names = {"dual-lora": 0, "dapo": 1}
    assert [table["title"].replace("plain DAPO", "dapo") for table in shown["tables"]] == list(told["tables"])
    for table, (columns, *rows) in zip(shown["tables"], told["tables"].values(), strict=True):
        assert table["columns"] == columns
        assert {row["group"]: row["cells"] for row in table["rows"]} == {names[name]: cells for name, *cells in rows}
    assert len(shown["words"]) == len(told["sentences"])
    monkeypatch.setattr(sys, "argv", ["lfo", "compare", str(folder)])
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        main()
    out = " ".join(capsys.readouterr().out.split())  # a title is as wide as its table
    assert all(title in out for title in told["tables"])
    assert all(sentence in out for sentence in told["sentences"])


def test_learning_curve_and_ceiling(payload):
    (chart,) = payload["success"]
    assert 0.85 < chart["ceiling"] < 0.95
    assert chart["title"] == "val: new tasks, known companies"
    assert chart["lines"][0]["mean"]["tasks"][:3] == [0, 80, 160]
    assert chart["lines"][0]["mean"]["seconds"][:3] == [0, 20, 40]
    assert chart["lines"][0]["mean"]["y"][0] == 0.05


def test_success_by_split_and_level(payload):
    (row,) = payload["levels"]
    assert (row["label"], row["note"]) == ("val", "new tasks, known companies, level 2")
    assert row["marks"][0]["values"] == [0.74, 0.75, 0.76]
    assert row["marks"][0]["low"] == pytest.approx(0.75 - 4.302653 * 0.01 / 3**0.5, abs=1e-5)


def test_several_levels_have_a_row_each(tmp_path: Path):
    levels = {"1": 0.9, "3": 0.1}
    write_run(tmp_path / "run", extra=lambda step: {"eval/val/success_by_level": levels} if step % 10 == 0 else {})
    assert [(row["note"].rpartition(", ")[2], row["marks"][0]["mean"]) for row in payload_of(tmp_path)["levels"]] == [
        ("all levels", 0.4),
        ("level 1", 0.9),
        ("level 3", 0.1),
    ]


def test_the_world_model_over_training_by_category_and_in_examples(payload):
    assert payload["world_model"][0]["title"] == "meaning right, held-out calls"
    assert [chart["title"] for chart in payload["categories"]] == [
        "meaning right",
        "tokens right",
        "BLEU",
        "perplexity",
    ]
    first = payload["categories"][0]["rows"][0]
    assert (first["label"], first["note"], first["marks"][0]["mean"]) == ("wrong department", "26 replies", 0.9)
    assert [(example["step"], example["predicted"], example["same_meaning"]) for example in payload["examples"]] == [
        (100, "a pin", False)
    ] * 3


def test_rollouts_share_their_texts(payload):
    items, texts = payload["rollouts"]["items"], payload["rollouts"]["texts"]
    assert len(items) == 12
    assert len(texts) == len(set(texts))
    item = items[0]
    assert texts[item["opening"][1][1]] == "Do val-0-0."
    assert [turn["predicted"] for turn in item["turns"]] == [True, False]
    assert texts[item["turns"][0]["observation"]] == "I need your pin."
    assert (item["step"], item["level"], item["reward"], item["turns"][1]["category"]) == (
        100,
        "2",
        0.0,
        "auth_failure",
    )


def test_a_target_never_reached_is_a_bound_in_words(tmp_path: Path):
    for seed in range(2):
        write_run(tmp_path / f"a{seed}", f"seed={seed}", steps=20, success=lambda step: 0.8 * (step >= 10))
        write_run(tmp_path / f"b{seed}", "algo=dapo", f"seed={seed}", steps=80, success=lambda step: 0.0)
    payload = payload_of(tmp_path)
    assert payload["headline"] == (
        "Dual-LoRA got to 70 % of the ceiling within 80 tasks on both seeds; "
        "plain DAPO did not in 640 tasks on either seed."
    )
    assert "at least 8.0 times fewer tasks: a bound" in payload["lede"]
    assert "2 paired seeds, too few for an interval" in payload["lede"]
    assert payload["comparison"][0]["tables"][0]["rows"][0]["cells"][4] == "≥ 8.0"


def test_an_upper_bound_is_told_as_one(tmp_path: Path):
    for seed in range(5):
        write_run(tmp_path / f"a{seed}", f"seed={seed}", steps=50, success=lambda step: 0.0)
        write_run(tmp_path / f"b{seed}", "algo=dapo", f"seed={seed}", success=lambda step: 0.8 * (step >= 10))
    cell = payload_of(tmp_path)["comparison"][0]["tables"][0]["rows"][0]["cells"][4]
    assert cell == "≤ 0.2 (below 0.2)"  # 80 tasks against more than 400


def test_one_way_of_training_is_told_without_a_comparison(tmp_path: Path):
    write_run(tmp_path / "run")
    payload = payload_of(tmp_path)
    assert payload["headline"] == (
        "Dual-LoRA succeeds in 40 % of val after 160 tasks, where 91 % is the ceiling (1 seed)."
    )


def test_controls_are_never_the_headline(tmp_path: Path):
    write_run(tmp_path / "truth", "lookahead_source=truth", success=lambda step: 1.0 * (step > 0))
    write_run(tmp_path / "frozen", "world_model.only=true", success=lambda step: 1.0 * (step > 0))
    write_run(tmp_path / "learned", steps=30, success=lambda step: 0.7 * (step > 10))
    write_run(tmp_path / "plain", "algo=dapo", steps=30, success=lambda step: 0.7 * (step > 10))
    payload = payload_of(tmp_path)
    assert payload["headline"].startswith("Dual-LoRA needs 1.0 times")
    (controls,) = (words for words in payload["comparison"][0]["words"] if words.startswith("Controls"))
    assert "dual-LoRA, frozen policy" in controls
    assert "dual-LoRA, true look-ahead" in controls


def test_ratios_stand_in_every_cost_beside_tasks(tmp_path: Path):
    """Steps of 8 tasks, 8 rollouts each, 2 s; those of plain DAPO sample 100 tokens, those of dual-LoRA 400."""
    for algo, at, tokens in (("dapo", 40, 100), ("dual-lora", 10, 400)):
        write_run(
            tmp_path / algo,
            f"algo={algo}",
            steps=50,
            success=lambda step, at=at: 0.8 * (step >= at),
            extra=lambda step, tokens=tokens: {"sampled_tokens": tokens, "seconds/seen": 2.0 * step} if step else {},
        )
    costs = payload_of(tmp_path)["comparison"][0]["tables"][2]
    assert costs["title"].startswith("Times less than plain DAPO to ")
    assert costs["columns"] == ["group", "tasks", "rollouts", "sampled tokens", "seconds"]
    assert [row["group"] for row in costs["rows"]] == [0], "the baseline is what they are less than"
    assert costs["rows"][0]["cells"] == ["4.0", "4.0", "1.0", "4.0"]
    write_run(tmp_path / "alone" / "run")
    alone = payload_of(tmp_path / "alone")["comparison"][0]["tables"]
    assert not any(table["title"].startswith("Times less") for table in alone)


def test_a_target_met_at_the_last_evaluation_only_is_not_reached_and_it_is_said(tmp_path: Path):
    write_run(tmp_path / "late", success=lambda step: 0.8 * (step >= 20))
    found = payload_of(tmp_path)["comparison"][0]
    assert found["tables"][0]["rows"][0]["cells"][2] == "> 160"
    assert found["tables"][1]["rows"][0]["cells"][0] == "0/1", "no seed got there"
    assert "late reached 64% only at its last evaluation, which a second one must confirm" in found["words"][-1]


def test_blind_success_stands_beside_success(tmp_path: Path):
    blind = "eval/val/success_blind"
    write_run(tmp_path / "one", extra=lambda step: {blind: 0.01 * step} if step % 10 == 0 else {})
    write_run(tmp_path / "plain", "algo=dapo")
    payload = payload_of(tmp_path)
    (chart,) = payload["success"]
    assert [(line["group"], line["runs"][0]["y"]) for line in chart["blind"]] == [(0, [0, 0.1, 0.2])]
    assert [(row["label"], row["note"]) for row in payload["levels"]][1] == ("blind", "val, without look-ahead")
    assert [(mark["group"], mark["mean"]) for mark in payload["levels"][1]["marks"]] == [(0, 0.2)]
    by_split = payload["comparison"][0]["tables"][3]
    assert by_split["columns"][-1] == "val blind"
    assert [row["cells"][-1] for row in by_split["rows"]] == ["20%", "-"]


def test_drafts_are_charted_and_rollouts_tell_which_were_taken_back(tmp_path: Path):
    record = rollout()
    record["turns"].insert(0, {**record["turns"][0], "taken_back": True})
    figures = {"drafts": 1.5, "drafts_kept": 0.4, "eval/val/drafts_informative": 0.3}
    write_run(tmp_path / "run", extra=lambda step: figures if step % 10 == 0 else {}, rollouts={20: [record]})
    payload = payload_of(tmp_path)
    assert [chart["title"] for chart in payload["training"]][-3:] == [
        "imagined calls per rollout",
        "imagined calls that were kept",
        "rollouts with informative calls, val",
    ]
    turns = payload["rollouts"]["items"][0]["turns"]
    assert [(turn["predicted"], turn["taken_back"]) for turn in turns] == [(True, True), (True, False), (False, False)]


def test_runs_of_different_tasks_share_neither_chart_nor_table(tmp_path: Path):
    for level in (2, 3):
        for algo in ("dapo", "dual-lora"):
            write_run(tmp_path / f"{algo}-{level}", f"levels={level}", f"algo={algo}", success=lambda step: step / 20)
    write_run(tmp_path / "third", "levels=3", "coupling=shared")
    payload = payload_of(tmp_path)
    assert [(chart["title"], len(chart["lines"])) for chart in payload["success"]] == [
        ("val: new tasks, known companies (phone-calls, level 2, 200 tasks)", 2),
        ("val: new tasks, known companies (phone-calls, level 3, 200 tasks)", 3),
    ]
    assert [len(found["tables"][0]["rows"]) for found in payload["comparison"]] == [2, 3]
    assert "the largest of several sets of runs" in payload["lede"]


def test_runs_that_were_not_all_evaluated_on_every_split_still_share_those_they_have(tmp_path: Path):
    write_run(tmp_path / "one")
    more = {"eval/test_unseen_companies/success": 0.3}
    write_run(tmp_path / "two", "algo=dapo", "eval.splits=val,test_unseen_companies", extra=lambda step: more)
    titles = {chart["title"]: len(chart["lines"]) for chart in payload_of(tmp_path)["success"]}
    assert list(titles.values()) == [2, 1]


def test_a_split_that_is_evaluated_at_the_end_only_has_a_figure_and_no_curve(tmp_path: Path):
    last = {"eval/test_unseen_rules/success": 0.3}
    write_run(tmp_path / "one", "eval.final_splits=test_unseen_rules", extra=lambda step: last if step else {})
    payload = payload_of(tmp_path)
    assert [chart["title"] for chart in payload["success"]] == ["val: new tasks, known companies"]
    assert [row["label"] for row in payload["levels"]] == ["val", "test_unseen_rules"]


def test_runs_of_an_unknown_world_have_curves_but_no_comparison(tmp_path: Path):
    write_run(tmp_path / "run", "env=my_world:Safes", "world_model.predict=all")
    payload = payload_of(tmp_path)
    assert len(payload["success"]) == 1
    assert payload["success"][0]["ceiling"] is None
    assert "Not compared: the tasks of the evaluation of" in payload["comparison"][0]["words"][0]
    assert payload["headline"] == "Runs evaluated so far: 1."


def test_an_ablation_has_its_own_chart_with_failed_and_missing_cells(tmp_path: Path):
    write_run(tmp_path / "main")
    study = tmp_path / "ablations" / "weight"
    write_run(study / "0-s0", "world_model.weight=0", success=lambda step: 0.1)
    write_run(study / "1-s0", "world_model.weight=1", success=lambda step: 0.7 * (step >= 10))
    for seed, reached in enumerate((10, 99, 20)):
        run, own = study / f"3-s{seed}", f"seed={seed}"
        write_run(run, own, steps=30, success=lambda step, reached=reached: 0.7 * (step >= reached))
    cells = [
        {"value": "0", "seed": 0, "run": "0-s0", "status": "done", "error": ""},
        {"value": "1", "seed": 0, "run": "1-s0", "status": "done", "error": ""},
        {"value": "1", "seed": 1, "run": "1-s1", "status": "failed", "error": "the loss is NaN"},
        {"value": "2", "seed": 0, "run": "2-s0", "status": "missing", "error": ""},
        *({"value": "3", "seed": seed, "run": f"3-s{seed}", "status": "done", "error": ""} for seed in range(3)),
    ]
    (study / "ablation.json").write_text(
        json.dumps({"study": "weight", "setting": "world_model.weight", "cells": cells})
    )
    payload = payload_of(tmp_path)
    (ablation,) = payload["ablations"]
    assert ablation["title"] == "world_model.weight"
    assert [(row["label"], [mark["mean"] for mark in row["marks"]], row["note"]) for row in ablation["rows"]] == [
        ("0", [0.1], "70 % of ceiling not reached"),
        ("1", [0.7], "70 % of ceiling: 80 tasks"),
        ("2", [], ""),
        ("3", [0.46667], "70 % of ceiling: 80, 160 tasks on 2 of 3 seeds"),
    ]
    assert ablation["failed"] == [
        "world_model.weight=1, seed 1: failed: the loss is NaN",
        "world_model.weight=2, seed 0: not run yet",
    ]
    assert [group["name"] for group in payload["groups"]] == ["dual-LoRA"], "cells stay out of the other charts"


# What is missing, damaged or unfinished

junk = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2000) | st.floats(-1, 2) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["2", "success", "count"]), inner),
    max_leaves=4,
)
METRICS = ("tasks_seen", "seconds/update", "warnings", "entropy", "eval/val/success", "eval/val/success_by_level")
METRICS += ("world_model_eval/by_category", "world_model_eval/bleu", "eval/val/lookahead_accuracy")


@settings(max_examples=30, deadline=None)
@given(rows=st.lists(st.dictionaries(st.sampled_from(METRICS), junk), min_size=1, max_size=4), data=junk, record=junk)
def test_whatever_a_file_holds_the_page_is_made(rows, data, record):
    with TemporaryDirectory() as name:
        run = write_run(Path(name) / "run", steps=1, every=1, rollouts={1: [{"task_id": record, "turns": [record]}]})
        lines = [json.dumps({"step": step, **row}) + "\n" for step, row in enumerate(rows)]
        (run / "metrics.jsonl").write_text("".join(lines))
        (run / "data.json").write_text(json.dumps({"environment": data, "splits": {"val": data}}))
        render(payload_of(Path(name)))


def test_damaged_empty_and_unfinished_runs_cost_only_themselves(tmp_path: Path):
    write_run(tmp_path / "good")
    write_run(tmp_path / "good-1", "seed=1")
    damaged = write_run(tmp_path / "damaged", "seed=2") / "metrics.jsonl"
    damaged.write_text(damaged.read_text().replace('"step": 3,', '"step": 3', 1))
    write_run(tmp_path / "empty", "seed=3", finished=False)
    (tmp_path / "empty" / "metrics.jsonl").unlink()
    going = write_run(tmp_path / "going", "seed=4", finished=False) / "metrics.jsonl"
    going.write_text("".join(going.read_text().splitlines(keepends=True)[:12]) + '{"step": 12, "ta')
    bad = write_run(tmp_path / "bad-rollouts", "seed=5", rollouts={10: [rollout(), {"no": "rollout"}]}) / "rollouts"
    (bad / "step-000020.jsonl").write_text("nonsense\n{}\n")

    payload = payload_of(tmp_path)
    words = "\n".join(payload["problems"])
    assert "damaged/metrics.jsonl, line 4: not a JSON object" in words
    assert "empty has no metrics yet" in words
    assert "step-000020.jsonl, line 1: not a JSON object" in words
    assert "step-000010.jsonl: 1 of its records are not rollouts and are left out" in words
    assert len(payload["problems"]) == 4
    assert payload["notes"] == [
        f"{tmp_path / 'going'} has not ended: step 11 of 20; until then it is drawn dashed and left out of means"
    ]
    states = {run["name"]: run["state"] for run in payload["runs"]}
    assert (states["damaged"], states["empty"], states["going"]) == ("unusable", "unusable", "not ended")
    (line,) = payload["success"][0]["lines"]
    assert len(line["runs"]) == 4
    assert len(payload["rollouts"]["items"]) == 1
    render(payload)


def test_the_same_run_twice_counts_once(tmp_path: Path):
    write_run(tmp_path / "a" / "run")
    write_run(tmp_path / "b" / "run")
    payload = payload_of(tmp_path)
    assert payload["notes"] == [
        f"{tmp_path / 'b' / 'run'} has the same config and seed as {tmp_path / 'a' / 'run'} and is left out"
    ]
    assert [run["name"] for run in payload["runs"]] == ["a/run", "b/run"]


def test_a_run_without_evaluations_has_words_instead_of_curves(tmp_path: Path):
    write_run(tmp_path / "run", "eval.every=0", every=1000)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "tasks_seen": 8}\n')
    payload = payload_of(tmp_path)
    assert payload["headline"] == "Nothing has been evaluated after training yet."
    assert payload["success"] == payload["levels"] == payload["training"] == []
    render(payload)


def test_many_rollouts_are_capped_with_words_and_spread_over_the_steps(tmp_path: Path):
    files = {step: [rollout(f"{step}-{n}") for n in range(30)] for step in range(0, 201, 10)}
    write_run(tmp_path / "run", rollouts=files)
    rollouts = payload_of(tmp_path)["rollouts"]
    assert len(rollouts["items"]) == ROLLOUTS_PER_RUN
    steps = [item["step"] for item in rollouts["items"]]
    assert steps == sorted(steps, reverse=True)
    assert {0, 100, 200} < set(steps)
    assert "at most 200 rollouts of a run are here" in rollouts["about"]
    assert "1 run has more on disk" in rollouts["about"]


def test_a_long_message_is_cut_with_words(tmp_path: Path):
    write_run(tmp_path / "run", rollouts={10: [rollout(reply="x" * 10_000)]})
    longest = max(payload_of(tmp_path)["rollouts"]["texts"], key=len)
    assert longest == "x" * 4000 + " … (6,000 more characters)"


def test_a_quarter_of_20_runs_of_500_steps_with_200_rollouts_is_under_a_quarter_of_30_megabytes(tmp_path: Path):
    write_large_set(tmp_path, runs=5, steps=500, rollouts=200)
    payload = payload_of(tmp_path)
    assert len(payload["rollouts"]["items"]) == 1000
    assert len(render(payload).encode()) < 30e6 / 4


def test_texts_that_are_long_and_all_different_stay_within_the_budget(tmp_path: Path, monkeypatch):
    budget = 1_000_000
    monkeypatch.setattr("lfo.report.payload.BUDGET", budget)
    for number in range(4):
        records = [rollout(f"{n}", reply=f"{number}-{n} " + "<é>" * 1300) for n in range(40)]
        write_run(tmp_path / str(number), f"seed={number}", rollouts={10: records})
    rollouts = payload_of(tmp_path)["rollouts"]
    assert {item["run"] for item in rollouts["items"]} == {0, 1, 2, 3}, "every run has its share"
    assert "4 runs have more on disk" in rollouts["about"]
    assert 0.8 * budget < len(as_script_json(rollouts)) < 1.2 * budget


# Finding runs, and the command


def test_the_current_folder_has_its_name(tmp_path: Path, monkeypatch):
    write_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    assert [run["name"] for run in payload_of(Path("."))["runs"]] == ["run"]


def test_folders_of_runs_are_searched_and_the_insides_of_runs_are_not(tmp_path: Path):
    write_run(tmp_path / "a" / "run")
    (tmp_path / "a" / "run" / "checkpoints" / "inner").mkdir(parents=True)
    (tmp_path / "a" / "run" / "checkpoints" / "inner" / "config.yaml").write_text("")
    write_run(tmp_path / "b")
    (tmp_path / "nothing").mkdir()
    found = find_runs_and_studies([tmp_path, tmp_path / "nothing", tmp_path / "b"])
    assert found.runs == (tmp_path / "a" / "run", tmp_path / "b")
    with pytest.raises(UsageError, match=r"the folder .* does not exist"):
        find_runs_and_studies([tmp_path / "missing"])
    with pytest.raises(UsageError, match="there is no run in"):
        find_runs_and_studies([tmp_path / "nothing"])


@pytest.fixture
def lfo(monkeypatch, capsys):
    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lfo", "report", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return run


def test_the_command_writes_the_page_and_says_what_it_shows(lfo, folder: Path, tmp_path: Path):
    page = tmp_path / "new folder" / "page.html"
    code, out, err = lfo(folder, "-o", page)
    assert (code, err) == (0, "")
    assert out.splitlines()[0].startswith("Dual-LoRA needs 3.0 times fewer tasks")
    assert f"{page}: 6 runs, 12 rollouts, 0." in out
    first = page.read_text(encoding="utf-8")
    assert first.startswith("<!doctype html>")
    page.write_text("an older page")
    code, out, err = lfo(folder / "dual-0", folder / "dapo-0", "-o", page, "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert (result["path"], result["runs"], result["groups"]) == (str(page), 2, ["dual-LoRA", "plain DAPO"])
    assert result["bytes"] == page.stat().st_size
    assert [file.name for file in page.parent.iterdir()] == ["page.html"], "nothing else is left behind"


def test_the_command_names_what_is_wrong_and_still_writes_the_page(lfo, tmp_path: Path):
    write_run(tmp_path / "good")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.yaml").write_text("steps: [")
    code, _, err = lfo(tmp_path, "-o", tmp_path / "page.html")
    assert code == 0
    assert "damaged" in err
    assert err.startswith("lfo: ")
    assert (tmp_path / "page.html").is_file()


def test_mistakes_are_one_sentence_and_exit_2(lfo, folder: Path, tmp_path: Path):
    assert lfo(tmp_path / "missing") == (2, "", f"lfo: the folder {tmp_path / 'missing'} does not exist\n")
    code, _, err = lfo(tmp_path)
    assert (code, err) == (2, f"lfo: there is no run in {tmp_path}: no folder in it contains a config.yaml\n")
    code, _, err = lfo(folder, "-o", tmp_path)
    assert (code, err) == (2, f"lfo: {tmp_path} is a folder; name a file, such as -o {tmp_path / 'report.html'}\n")


def test_a_page_that_cannot_be_written_is_exit_1(lfo, folder: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    code, _, err = lfo(folder, "-o", tmp_path / "file" / "page.html")
    assert code == 1
    assert err.startswith(f"lfo: cannot write {tmp_path / 'file' / 'page.html'}: ")
