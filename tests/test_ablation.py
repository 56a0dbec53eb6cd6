"""Ablations: the cells of each study, and a real grid that is stopped, killed and resumed without repeating work."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from children import start_as_in_a_terminal
from lfo.cli import main
from lfo.cli.ablate import _defaults
from lfo.config import differences, load_config
from lfo.errors import ConfigError, UsageError
from lfo.report.picture import draw_curves, mean_curve, spread_out
from lfo.runs.ablation import STUDIES, Cell, done_before, grid, overrides_of, results, table
from lfo.runs.folder import read_metrics

BASE = ("preset=tiny", "steps=60")

# The grid


def test_the_grid_has_every_value_with_every_seed_and_all_values_of_a_seed_before_the_next():
    cells = grid("weight", ["0", "0.5"], 2)
    assert [(cell.value, cell.seed, cell.run) for cell in cells] == [
        ("0", 0, "0-s0"),
        ("0.5", 0, "0.5-s0"),
        ("0", 1, "0-s1"),
        ("0.5", 1, "0.5-s1"),
    ]
    assert {cell.status for cell in cells} == {"missing"}
    assert len(grid("weight", None, 3)) == 6 * 3
    assert len(grid("coupling", None, 1)) == 4


@pytest.mark.parametrize("study", STUDIES)
def test_every_cell_of_every_study_is_a_valid_run_and_only_its_own_settings_vary(study: str):
    varied = {
        "weight": {"world_model.weight"},
        "predict": {"world_model.predict"},
        "rank": {"lora.rank"},
        "schedule": {"world_model.schedule"},
        "coupling": {"coupling", "lookahead"},
    }[study]
    configs = [load_config(overrides_of(study, cell, BASE)) for cell in grid(study, None, 2)]
    found = {name for one in configs for other in configs for name in differences(one, other)}
    assert found == varied | {"seed"}
    assert len({str(config) for config in configs}) == len(configs)


def test_a_study_of_another_world_asks_for_none_of_this_ones_splits():
    assert load_config(_defaults(["env=oracle-codes"])).eval.splits == ("val",)
    for here in ([], ["env=phone-calls"], ["steps=3"]):
        assert load_config(_defaults(here)).eval.splits == ("val", "test_unseen_companies")


def test_a_file_keeps_its_settings_and_gets_the_defaults_that_it_lacks(tmp_path: Path):
    def config(text: str, *overrides: str):
        (tmp_path / "config.yaml").write_text(text)
        given = (f"config={tmp_path / 'config.yaml'}", *overrides)
        return load_config((*_defaults(given), *given))

    full = config("preset: default\nsteps: 7\nenv_args: {levels: [3]}\neval: {every: 4, splits: [val]}")
    assert (full.preset, full.steps, full.env_args["levels"]) == ("default", 7, [3])
    assert (full.eval.every, full.eval.splits) == (4, ("val",))
    assert config("steps: 7", "steps=9").steps == 9
    short = config("levels: [3]")
    assert (short.preset, short.steps, short.env_args["levels"]) == ("tiny", 60, [3])
    assert short.eval.splits == ("val", "test_unseen_companies")
    assert config("env: world:World").env_args == {}


def test_a_value_may_stand_for_several_settings():
    def config(study: str, value: str):
        return load_config(overrides_of(study, Cell(value=value, seed=3, run=""), BASE))

    assert config("rank", "64").lora.alpha == 128
    assert config("schedule", "world_model_first").world_model.schedule == "world_model_first:12"
    assert config("schedule", "explore_first").world_model.schedule == "explore_first:12"
    assert config("schedule", "hierarchical").world_model.schedule == "hierarchical:2"
    for value in ("make_phone_call+auth_info_form", "phone_form"):  # as it is written today, and as it was
        assert config("predict", value).world_model.predict == "make_phone_call,auth_info_form"
    assert (config("coupling", "shared").coupling, config("coupling", "shared").lookahead) == ("shared", "off")
    assert config("coupling", "shared+lookahead").lookahead == "policy"
    assert config("weight", "0").lookahead == "policy"  # a control, not plain DAPO
    assert config("weight", "0").seed == 3


@pytest.mark.parametrize(
    ("study", "value", "words"),
    [
        ("weight", "5", "world_model.weight must be less than or equal to 2"),
        ("rank", "big", "a rank must be a whole number"),
        ("coupling", "shared+lookback", "a coupling must be written as shared or shared\\+lookahead"),
        ("coupling", "glued", "coupling must be one of"),
    ],
)
def test_a_value_that_means_nothing_is_refused(study: str, value: str, words: str):
    with pytest.raises(ConfigError, match=words):
        load_config(overrides_of(study, Cell(value=value, seed=0, run=""), BASE))


def test_a_grid_refuses_what_cannot_name_a_folder():
    for values in ([], ["../x"], ["0", "0"], ["a b"]):
        with pytest.raises(UsageError):
            grid("weight", values, 1)


def test_runs_of_earlier_commands_are_found_and_unfinished_ones_left_alone(tmp_path: Path):
    for name in ("0.3-s1/adapters", "0.5-s0/adapters", "1-s0/checkpoints", "notes/adapters"):
        (tmp_path / name).mkdir(parents=True)
    assert done_before(tmp_path, grid("weight", ["0.5"], 1)) == [Cell(value="0.3", seed=1, run="0.3-s1", status="done")]


# The picture


def test_the_mean_is_over_the_evaluations_that_all_runs_have():
    assert mean_curve([{0: 0.0, 8: 0.2, 16: 0.5}, {0: 0.2, 8: 0.4}]) == {0: 0.1, 8: pytest.approx(0.3)}
    assert mean_curve([{0: 0.0}, {8: 0.4}]) == {0: 0.0}


def test_the_picture_names_every_group_and_trusts_no_text():
    drawn = draw_curves(
        {"<b>": [{0: 0.0, 80: 0.5}], "empty": [{}], "two": [{0: 0.1}, {0: 0.2}]}, title="a & b", ceiling=0.9
    )
    assert "&lt;b&gt; (1 seed)" in drawn
    assert "two (2 seeds)" in drawn
    assert "a &amp; b" in drawn
    assert "<b>" not in drawn
    assert "empty" not in drawn
    assert drawn.count("information ceiling") == 1
    assert "information ceiling" not in draw_curves({}, title="nothing yet")


def test_labels_are_kept_apart_and_inside():
    assert spread_out([10, 12, 50], gap=5, last=100) == [10, 15, 50]
    assert spread_out([98, 98, 98], gap=5, last=100) == [90, 95, 100]


# The real thing

SMALL = (
    "rollout.prompts=1",
    "rollout.group_size=4",
    "rollout.mini_batch_prompts=1",
    "rollout.max_context=420",
    "eval.tasks=2",
    "eval.every=4",
    "checkpoint_every=1",
)


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    """`lfo ablate weight` with one small run for each value."""
    arguments = ("--seeds", "1", "--steps", "4", "--output-dir", str(folder), *options, *SMALL)
    return start_as_in_a_terminal(
        [sys.executable, "-c", "from lfo.cli import main; main()", "ablate", "weight", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def wait_for(happened: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    for _ in range(30_000):
        if happened():
            return
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise AssertionError("it never happened")


def steps(run: Path) -> list[int]:
    return [row["step"] for row in read_metrics(run)] if (run / "metrics.jsonl").is_file() else []


def read_cells(study: Path) -> list[dict]:
    return json.loads((study / "ablation.json").read_text())["cells"]


def children_of(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def lfo(monkeypatch, capsys, tmp_path: Path):
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lfo", "ablate", *arguments, "--output-dir", str(tmp_path), *SMALL])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return run


@pytest.mark.skipif(not Path(f"/proc/self/task/{os.getpid()}/children").is_file(), reason="looks for children in /proc")
def test_a_grid_that_is_stopped_and_killed_goes_on_and_a_failed_cell_does_not_stop_the_others(lfo, tmp_path: Path):
    study = tmp_path / "weight"
    first, second, broken = study / "0-s0", study / "0.5-s0", study / "1-s0"
    one_by_one = ("--values", "0,0.5", "--jobs", "1")

    process = start(tmp_path, *one_by_one)  # stopped by a person, as soon as the first cell has begun
    wait_for(lambda: children_of(process), process)
    (child,) = children_of(process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out) == (130, "")
    assert "interrupted after 0 of 2 cells; the same command resumes" in err
    wait_for(lambda: not is_alive(child))
    assert [cell["status"] for cell in read_cells(study)] == ["missing", "missing"]

    process = start(tmp_path, *one_by_one)  # killed in the second cell, and its child too
    wait_for(lambda: len(steps(second)) > 1, process)
    (child,) = children_of(process)
    process.kill()
    with contextlib.suppress(ProcessLookupError):  # it may have seen its parent's end already
        os.kill(child, signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not is_alive(child))
    assert [cell["status"] for cell in read_cells(study)] == ["done", "missing"]
    finished = {path: path.stat().st_mtime_ns for path in first.rglob("*")}

    broken.mkdir()
    (broken / "notes.txt").write_text("not a run")
    process = start(tmp_path, "--values", "0,0.5,1", "--jobs", "2", "--json")
    out, err = process.communicate()
    assert process.returncode == 1
    assert "weight 0.5, seed 0: done" in err
    assert "weight 0, seed 0" not in err, "a finished cell was run again"
    assert {path: path.stat().st_mtime_ns for path in first.rglob("*")} == finished
    assert steps(second) == list(range(5)), "each step once"
    result = json.loads(out)
    assert [cell["status"] for cell in result["cells"]] == ["done", "done", "failed"]
    assert "is not empty; choose another output_dir" in result["cells"][2]["error"]
    assert err.splitlines()[-1].startswith(f"lfo: 1 of 3 cells failed, {broken} with: ")
    assert [(value["value"], value["tasks_seen"]) for value in result["values"]] == [("0", 4), ("0.5", 4)]
    assert read_cells(study) == result["cells"]
    assert "0.5 (1 seed)" in (study / "ablation.svg").read_text()

    # Another command sees what is there, and refuses to mix it with other settings.
    cells = grid("weight", ["2"], 1)
    cells += done_before(study, cells)
    assert [row[:2] for row in table("weight", cells, results(study, cells))] == [
        ("world_model.weight", "seeds"),
        ("2", "0 of 1"),
        ("0", "1"),
        ("0.5", "1"),
    ]
    code, _, err = lfo("weight", "--values", "2", "--seeds", "1", "--steps", "2")
    assert (code, "0-s0 was trained with steps=4, not 2; choose another --output-dir" in err) == (2, True)
    assert not (study / "2-s0").exists()


def test_a_child_ends_with_its_parent():
    waits = (
        "import time; from lfo.cli import children; children.end_with_parent(); print(1, flush=True); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == b"1\n"
        assert child.poll() is None
        child.stdin.close()  # as the kernel does for a parent that is gone
        assert child.wait() == -signal.SIGTERM


def test_nothing_starts_when_a_cell_is_wrong(lfo, tmp_path: Path):
    code, _, err = lfo("weight", "--values", "0,9")
    assert (code, err) == (2, "lfo: world_model.weight must be less than or equal to 2, not 9\n")
    code, _, err = lfo("rank", "lora.rnak=3")
    assert (code, err) == (2, "lfo: there is no setting 'lora.rnak'; the nearest is lora.rank: write lora.rank=3\n")
    assert list(tmp_path.iterdir()) == []
