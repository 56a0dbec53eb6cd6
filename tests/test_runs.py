"""Reading runs for comparison: their tasks, and a clear message for every defect of a folder."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from lfo.cli.children import ChildRun
from lfo.config import load_config, to_yaml
from lfo.env.worlds.oracle import OracleCodes
from lfo.env.worlds.phone.ceiling import mean_ceiling
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.runs.data import describe_data, predicted_by
from lfo.runs.reading import find_runs, read_run

RESULTS = Path(__file__).parent.parent / "research" / "results"
CONFIG = load_config(["preset=tiny", "levels=2", "steps=2", "eval.tasks=5", "eval.splits=val,test_unseen_companies"])


STUDIES = sorted({path.relative_to(RESULTS).parts[0] for path in RESULTS.glob("**/config.yaml")})


@pytest.mark.parametrize("study", STUDIES)
def test_every_committed_study_opens(study: str):
    """Its runs are compared and reported again, those of retired arms too."""
    runs = list(map(read_run, find_runs([RESULTS / study])))
    assert runs
    assert [run.problem for run in runs if run.problem] == []
    assert all(run.rows and run.config for run in runs)


def phone_calls(**options):
    return lambda: PhoneCalls(levels=(2,), **options)


def written(folder: Path, *rows: dict, config=CONFIG, torn: str = "") -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)
    return folder


# What a run was evaluated on


def test_data_names_the_tasks_of_each_evaluated_split_and_their_ceiling():
    data = describe_data(CONFIG, phone_calls())
    assert (data["environment"], data["levels"]) == ("phone-calls", [2])
    assert list(data["splits"]) == ["val", "test_unseen_companies"]
    val = data["splits"]["val"]
    assert val["tasks"] == 5
    assert val["ceiling"] == mean_ceiling(PhoneCalls(levels=(2,)).tasks("val")[:5])
    assert len(val["fingerprint"]) == 16
    assert val["fingerprint"] != data["splits"]["test_unseen_companies"]["fingerprint"]
    assert data == describe_data(CONFIG, phone_calls()) == json.loads(json.dumps(data))


def test_other_tasks_have_another_fingerprint():
    def val(*overrides: str, **options) -> str:
        config = load_config(["preset=tiny", "eval.tasks=5", *overrides])
        return describe_data(config, phone_calls(**options))["splits"]["val"]["fingerprint"]

    assert val() == val("seed=7", "steps=3", "algo=dapo")
    assert len({val(), val("eval.tasks=4"), val(seed=1), val(companies=50)}) == 4


def test_a_world_without_a_ceiling_has_none_and_nothing_is_described_where_nothing_is_evaluated():
    config = load_config(["preset=tiny", "env=oracle-codes", "world_model.predict=all"])
    data = describe_data(config, OracleCodes)
    assert (data["environment"], data["levels"]) == ("oracle-codes", [])
    assert data["splits"]["val"]["ceiling"] is None
    assert describe_data(load_config(["preset=tiny", "eval.every=0"]), phone_calls())["splits"] == {}


def test_an_environment_that_raises_is_described_by_its_task_ids():
    class Broken(PhoneCalls):
        def reset(self, task):
            raise OSError("no network")

    whole = describe_data(CONFIG, phone_calls())["splits"]["val"]
    broken = describe_data(CONFIG, lambda: Broken(levels=(2,)))["splits"]["val"]
    assert broken["tasks"] == whole["tasks"]
    assert broken["fingerprint"] != whole["fingerprint"]


# Reading


def test_a_run_is_read_with_its_own_description(tmp_path: Path):
    run = written(tmp_path / "run", {"step": 0}, {"step": 2})
    (run / "data.json").write_text(json.dumps({"environment": "x", "levels": [], "splits": {}}))
    record = read_run(run)
    assert record.config == CONFIG
    assert [row["step"] for row in record.rows] == [0, 2]
    assert record.data == {"environment": "x", "levels": [], "splits": {}}
    assert (record.name, record.problem, record.note, record.finished) == ("run", "", "", True)


def test_a_run_without_a_description_is_read_and_no_environment_is_made(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(PhoneCalls, "__init__", lambda *_, **__: pytest.fail("made"))
    run = written(tmp_path / "run", {"step": 2})
    assert (read_run(run).data, read_run(run).problem) == (None, "")
    (run / "data.json").write_text("{torn")
    assert (read_run(run).data, read_run(run).problem) == (None, "")


@pytest.mark.parametrize(
    ("settings", "data", "tools"),
    [
        (("world_model.predict=all",), {"predicted_tools": ["search_company"]}, ["search_company"]),
        ((), None, ("make_phone_call",)),
        (("world_model.predict=search_company, make_phone_call",), {}, ["search_company", "make_phone_call"]),
        (("world_model.predict=all",), {}, None),
        (("env=nobody.has:This",), {"predicted_tools": None}, None),
    ],
)
def test_what_a_run_predicts_is_known_from_its_folder(settings, data, tools):
    assert predicted_by(load_config(["preset=tiny", *settings]), data) == tools


def test_a_run_of_an_older_version_is_read_without_the_settings_that_are_gone(tmp_path: Path):
    run = written(tmp_path / "run", {"step": 2})
    with open(run / "config.yaml", "a") as file:
        file.write("long_gone: 3\n")
    record = read_run(run)
    assert (record.config, record.problem) == (CONFIG, "")


def test_a_run_in_progress_says_how_far_it_is(tmp_path: Path):
    record = read_run(written(tmp_path / "run", {"step": 1}, torn='{"step": 2, "tas'))
    assert [row["step"] for row in record.rows] == [1]
    assert (record.finished, record.problem) == (False, "")
    assert record.note == f"{tmp_path}/run has not ended: step 1 of 2"


def test_a_run_that_was_given_more_steps_has_not_ended_though_its_adapters_are_there(tmp_path: Path):
    run = written(tmp_path / "run", {"step": 1})
    (run / "adapters").mkdir()
    child = ChildRun(name="run", folder=run, overrides=(), config=CONFIG)
    assert (read_run(run).finished, child.finished) == (False, False)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 2}\n')
    assert (read_run(run).finished, child.finished) == (True, True)
    (run / "adapters").rmdir()
    assert child.finished is False, "its adapters are still to be written"


def test_the_script_of_the_experiments_starts_a_run_goes_on_with_it_and_leaves_one_that_has_ended(tmp_path: Path):
    script = Path(__file__).parent.parent / "research" / "train_once.sh"

    def trained(name: str) -> str:
        settings = {"FOLDER": str(tmp_path), "COMMON": "preset=tiny steps=2", "LFO": "echo"}
        return subprocess.check_output([script, name, "seed=1"], env={**os.environ, **settings}, text=True)

    assert trained("new") == f"train preset=tiny steps=2 output_dir={tmp_path}/new seed=1\n"
    rows = {"step": 0, "tasks_seen": 0}, {"step": 1, "tasks_seen": 8}, {"step": 2, "tasks_seen": 16}
    for name, so_far, adapters in (("killed", rows[:2], False), ("longer", rows[:2], True), ("late", rows, False)):
        run = written(tmp_path / name, *so_far)
        if adapters:
            (run / "adapters").mkdir()
        assert trained(name) == f"train --resume {run}\n"
    (written(tmp_path / "ended", *rows) / "adapters").mkdir()
    assert trained("ended") == ""


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda run: (run / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n'), "line 2: not a JSON obj"),
        (lambda run: (run / "metrics.jsonl").write_bytes(b"\xff\xfe\x00\n\n"), "line 1: not a JSON object"),
        (lambda run: (run / "metrics.jsonl").write_text('{"success": 1}\n'), "line 1: this row of metrics has no st"),
        (lambda run: (run / "metrics.jsonl").write_text(""), "has no metrics yet"),
        (lambda run: (run / "metrics.jsonl").unlink(), "has no metrics yet"),
        (lambda run: (run / "config.yaml").write_text("steps: [\n"), "is not valid YAML"),
        (lambda run: (run / "config.yaml").write_text("steps: none\n"), "steps must be a valid integer"),
        (lambda run: (run / "config.yaml").write_bytes(b"\xff\xfe\x00"), "is not valid YAML"),
        (lambda run: (run / "config.yaml").unlink(), "is not a run folder: it has no config.yaml"),
    ],
)
def test_a_run_that_cannot_be_used_says_why(tmp_path: Path, damage, words):
    run = written(tmp_path / "run", {"step": 1})
    damage(run)
    record = read_run(run)
    assert words in record.problem
    assert "\n" not in record.problem
    assert (record.rows, record.note, record.finished) == ((), "", False)
