"""Commands on a trained agent: a small real run, read back from its folder."""

import dataclasses
import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from lfo.agent import load_agent
from lfo.cli import main, rollouts
from lfo.cli.common import visible
from lfo.env.worlds.oracle import OracleCodes
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.errors import UsageError
from lfo.model.learner import Learner
from lfo.play.look_ahead import questions
from lfo.play.records import read_rollouts, rollout_from_texts, transcript_at
from lfo.protocol.world_model import observed_calls
from lfo.rows.samples import world_model_sample
from lfo.tools.surprise import inspect_calls, surprise_of_target
from lfo.types import Origin, Rollout, StopReason, ToolCall, Turn
from small_runs import model_of, randomised, small_trainer

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def lfo(monkeypatch, capsys):
    """Run `lfo ARGUMENTS` in this process: exit code, stdout, stderr."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lfo", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "100")
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """One step of training on two tasks, evaluated before and after it, from adapters that already do something."""
    folder = tmp_path_factory.mktemp("runs") / "x"
    trainer = small_trainer("steps=1", "eval.every=1", "eval.tasks=2", f"output_dir={folder}")
    randomised(model_of(trainer))
    trainer.fit()
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """Plain DAPO: a run without a world model."""
    folder = tmp_path_factory.mktemp("runs") / "plain"
    small_trainer("algo=dapo", "steps=1", f"output_dir={folder}").fit()
    return folder


# --- eval ------------------------------------------------------------------------------------------------------------


def test_eval_tells_success_pass_k_and_behaviour(lfo, run: Path):
    code, out, err = lfo("eval", run, "--tasks", "3", "--k", "2", "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert (result["split"], result["tasks"], result["k"], result["lookahead"]) == ("val", 3, 2, True)
    assert result["weights"].endswith("step-000001")
    assert result["greedy"]["by_level"]["2"]["tasks"] == 3
    assert set(result["sampled"]["pass_k"]) == {"1", "2"}
    assert result["sampled"]["pass_k"]["1"] == result["sampled"]["success"]
    low, high = result["greedy"]["success"]["interval"]
    assert 0 <= low <= result["greedy"]["success"]["rate"] <= high <= 1
    assert {"calls", "mistakes", "excess_fields", "lookahead_accuracy"} <= set(result["greedy"]["behaviour"])
    assert sum(result["sampled"]["behaviour"]["stops"].values()) == 6


def test_eval_gives_the_figures_that_training_wrote(lfo, run: Path):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    result = json.loads(lfo("eval", run, "--k", "1", "--json")[1])
    assert result["tasks"] == 2
    assert result["greedy"]["success"]["rate"] == rows[-1]["eval/val/success"]
    assert result["greedy"]["behaviour"]["tokens"] == rows[-1]["eval/val/tokens"]
    assert result["greedy"]["behaviour"]["lookahead_accuracy"] == rows[-1]["eval/val/lookahead_accuracy"]


def test_eval_for_people(lfo, run: Path):
    code, out, err = lfo("eval", run, "--tasks", "2", "--k", "2", "--adapter", "best", "--blind")
    assert (code, err) == (0, "")
    for words in (
        "on val: 2 tasks",
        "without look-ahead",
        "level 2, 2 tasks",
        "pass^2",
        "calls per task",
        "chosen on val",
    ):
        assert words in out


def test_eval_against_another_run_pairs_the_tasks(lfo, run: Path, plain: Path):
    """A run against itself differs nowhere; with look-ahead against blind it is what two separate evaluations say."""
    itself = json.loads(lfo("eval", run, "--tasks", "2", "--k", "1", "--json", "--against", run)[1])
    assert (itself["against"]["only_first"], itself["against"]["only_second"]) == (0, 0)
    assert itself["against"]["rate"] == itself["greedy"]["success"]["rate"]
    other = json.loads(lfo("eval", run, "--tasks", "2", "--k", "1", "--json", "--against", plain)[1])["against"]
    alone = json.loads(lfo("eval", plain, "--tasks", "2", "--k", "1", "--json")[1])
    assert (other["rate"], other["lookahead"]) == (alone["greedy"]["success"]["rate"], False)
    code, out, _ = lfo("eval", run, "--tasks", "2", "--k", "1", "--against", run)
    assert code == 0
    assert "+0.0 points" in " ".join(out.split())


def test_eval_on_written_queries_imagines_what_the_environment_names_and_nothing_else(lfo, run: Path):
    written = json.loads(lfo("eval", run, "--tasks", "3", "--k", "1", "--json", "--written-queries")[1])
    assert (written["lookahead"], written["queries"]) == (True, "environment")
    agent = load_agent(run).on_written_queries()
    rollouts = agent.roll_out(agent.tasks("val")[:3], greedy=True)
    assert written["greedy"]["solved"] == [rollout.succeeded for rollout in rollouts]
    asked = [(rollout, index) for rollout in rollouts for index, turn in enumerate(rollout.turns) if turn.imagined]
    assert asked
    for rollout, index in asked:
        turn = rollout.turns[index]
        assert turn.call in questions(agent.make_environment(), transcript_at(rollout, index))
        assert {rollout.origins[place] for place in range(turn.action_start, turn.action_end)} == {Origin.PREDICTED}
    code, out, _ = lfo("eval", run, "--tasks", "3", "--k", "1", "--written-queries", "--against", run)
    assert code == 0
    assert "with look-ahead that asks what the environment names" in " ".join(out.split())
    drafted = json.loads(lfo("eval", run, "--tasks", "3", "--k", "1", "--json")[1])
    assert drafted["queries"] == "policy"
    assert f"({drafted['greedy']['success']['rate']:.1%}, with look-ahead)" in " ".join(out.split())


def test_eval_on_written_queries_is_refused_where_nobody_asks_them(lfo, run: Path, plain: Path):
    fails_with_one_sentence(lfo("eval", run, "--written-queries", "--blind"), "exclude each other")
    fails_with_one_sentence(lfo("eval", plain, "--written-queries"), "has no look-ahead")
    silent = type("Silent", (PhoneCalls,), {"lookahead_query": None})
    with pytest.raises(UsageError, match="the environment Silent has no method lookahead_query"):
        load_agent(run, environment=silent).on_written_queries()


def test_eval_against_a_run_with_other_tasks_is_refused(lfo, run: Path, tmp_path: Path):
    shutil.copytree(run, other := tmp_path / "other")
    config = other / "config.yaml"
    config.write_text(config.read_text().replace("env_args:", "env_args:\n  law: 3", 1))
    fails_with_one_sentence(lfo("eval", run, "--tasks", "2", "--against", other), "different tasks")


def test_the_adapters_and_the_seed_matter(run: Path):
    trained, bare = load_agent(run), load_agent(run, adapter="none")
    tasks = trained.tasks("val")[:1]
    one = trained.roll_out(tasks, greedy=False, samples=2)
    assert trained.roll_out(tasks, greedy=False, samples=2) == one
    assert trained.roll_out(tasks, greedy=False, samples=2, seed=1) != one
    assert bare.roll_out(tasks, greedy=False, samples=2) != one
    assert [each.task_id for each in one] == [str(task.id) for task in tasks for _ in range(2)]


def test_without_lookahead_nothing_is_imagined(run: Path):
    agent = load_agent(run)
    for lookahead in (True, False):
        rollouts = agent.roll_out(agent.tasks("val")[:2], greedy=True, lookahead=lookahead)
        assert any(turn.predicted for rollout in rollouts for turn in rollout.turns) == lookahead


def test_an_unknown_split_is_exit_2_with_the_known_ones(lfo, run: Path):
    code, out, err = lfo("eval", run, "--split", "frob")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "train, val, test_unseen_companies" in err


# --- folders that cannot be used -------------------------------------------------------------------------------------

COMMANDS = (("eval",), ("rollouts",), ("run",), ("inspect",), ("probe",), ("export", "--out", "never-written"))


def fails_with_one_sentence(answer: tuple[int, str, str], words: str, *, expected: int = 2) -> None:
    code, out, err = answer
    assert (code, out, err.count("\n")) == (expected, "", 1), err
    assert err.startswith("lfo: ")
    assert words in err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_is_no_run(lfo, tmp_path: Path, command: tuple[str, ...]):
    fails_with_one_sentence(lfo(*command, tmp_path), f"{tmp_path} is not a run folder")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_without_weights_yet(lfo, run: Path, tmp_path: Path, command: tuple[str, ...]):
    shutil.copytree(run, tmp_path / "young", ignore=shutil.ignore_patterns("checkpoints", "adapters"))
    fails_with_one_sentence(lfo(*command, tmp_path / "young"), "has no adapters")


def test_a_corrupt_adapter(lfo, run: Path, tmp_path: Path):
    shutil.copytree(run / "adapters", tmp_path / "torn" / "adapters")
    shutil.copy(run / "config.yaml", tmp_path / "torn")
    weights = tmp_path / "torn" / "adapters" / "policy" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    fails_with_one_sentence(lfo("run", tmp_path / "torn"), "is damaged", expected=1)


def test_best_needs_an_evaluation(lfo, plain: Path):
    fails_with_one_sentence(lfo("eval", plain, "--adapter", "best"), "has no best checkpoint")


def test_a_world_of_ones_own_is_given_in_python(run: Path):
    """A run of `create_trainer` with an environment that its config cannot name."""
    agent = load_agent(run, environment=OracleCodes)
    assert agent.tasks("test_unseen_oracles")
    with pytest.raises(UsageError, match="test_unseen_oracles"):
        agent.tasks("frob")


def test_one_checkpoint_can_be_named(run: Path):
    named = load_agent(run / "checkpoints" / "step-000001")
    assert named.adapters_folder == run / "checkpoints" / "step-000001"
    assert named.config.output_dir == str(run)
    bare = load_agent(run / "checkpoints" / "step-000001", adapter="none")
    assert bare.adapters_folder is None


# --- rollouts and run ------------------------------------------------------------------------------------------------


def test_rollouts_are_shown_and_saved(lfo, run: Path, tmp_path: Path):
    file = tmp_path / "new" / "samples.jsonl"
    code, out, err = lfo("rollouts", run, "--num", "2", "--output", file)
    assert (code, err) == (0, "")
    assert "2 of 2: val-L2-0-000001" in out
    assert "imagined" in out
    assert f"saved in {file}" in out.replace("\n", " ")
    agent = load_agent(run)
    played = agent.roll_out(agent.tasks("val")[:2], greedy=False)
    read = read_rollouts(file, agent.make_environment())
    assert [each.task_id for each in read] == [each.task_id for each in played]
    for one, other in zip(read, played, strict=True):
        real = [turn for turn in other.turns if not turn.predicted]
        assert [(t.action, t.observation, t.call, t.asked, t.facts) for t in one.turns if not t.predicted] == [
            (t.action, t.observation, t.call, t.asked, t.facts) for t in real
        ]
    fails_with_one_sentence(lfo("rollouts", run, "--output", file), "already exists")


def test_rollouts_as_json_lines(lfo, run: Path):
    code, out, _ = lfo("rollouts", run, "--num", "2", "--json", "--greedy", "--split", "test_unseen_companies")
    records = [json.loads(line) for line in out.splitlines()]
    assert (code, len(records)) == (0, 2)
    assert {record["split"] for record in records} == {"test_unseen_companies"}
    assert any(turn["predicted"] for record in records for turn in record["turns"])


def test_more_rollouts_than_tasks(lfo, run: Path):
    fails_with_one_sentence(lfo("rollouts", run, "--num", "301"), "has only 300 tasks")


def test_run_shows_a_task_turn_by_turn(lfo, run: Path):
    code, out, err = lfo("run", run, "--task", "val-L2-0-000001")
    assert code == 0
    shown = [line.split()[0] for line in out.splitlines() if line.split()]
    assert shown.index("user") < shown.index("agent") < shown.index("imagined") < shown.index("expects")
    assert "Success" in out or "Failed" in out
    assert "--task val-L2-0-000001" in err
    record = json.loads(lfo("run", run, "--task", "val-L2-0-000001", "--json")[1])
    assert record["task_id"] == "val-L2-0-000001"
    assert record["success"] == (record["reward"] == 1)
    assert "imagined" not in lfo("run", run, "--task", "val-L2-0-000001", "--no-lookahead")[1]


def test_what_was_imagined_and_taken_back_is_told_from_what_was_kept(capsys):
    real = Turn(
        action="x",
        observation="Hello.",
        call=ToolCall(name="dial", arguments={"number": 7}),
        action_start=4,
        action_end=4,
        observation_start=4,
        observation_end=4,
    )
    kept = dataclasses.replace(real, observation="A pin?", predicted=True)
    back = dataclasses.replace(kept, observation="Who?", taken_back=True)
    rollout = Rollout(
        task_id="t",
        opening=(),
        tokens=(),
        origins=(),
        logprobs=(),
        turns=(kept, real),
        taken_back=(back,),
        reward=1.0,
        stop=StopReason.DONE,
    )
    rollouts._show([rollout], "title", None)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    said = ["imagined dial(number=7)", "expects Who?", "imagined and taken back"]
    said += ["imagined dial(number=7)", "expects A pin?", "agent dial(number=7)", "world Hello."]
    said.append("Success: 1 turn, 1 imagined, 1 imagined and taken back, ended by the world.")
    start = lines.index(said[0])
    assert lines[start : start + len(said)] == said


def test_run_draws_a_task_of_a_level_by_its_seed(lfo, run: Path):
    """Also of a level that the run was not trained on."""
    one, again, other = (json.loads(lfo("run", run, "--level", "3", "--seed", seed, "--json")[1]) for seed in "112")
    assert one == again
    assert one["level"] == 3
    assert one["task_id"] != other["task_id"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--task", "val-L2-0-999999"), "ids look like val-L2-0-000000"),
        (("--level", "7"), "levels must be some of"),
        (("--split", "frob"), "the splits are"),
    ],
)
def test_run_with_a_task_that_is_not_there(lfo, run: Path, options: tuple[str, ...], words: str):
    fails_with_one_sentence(lfo("run", run, *options), words)


def test_text_of_models_cannot_steer_the_terminal():
    assert visible("a\x1b[31mb\x07\u202ec\n") == "a\\x1b[31mb\\x07\\u202ec\n"
    assert visible("plain é text") == "plain é text"


# --- inspect ---------------------------------------------------------------------------------------------------------


def test_the_surprise_of_a_reply_is_what_the_learner_computes(run: Path):
    """Two ways to the same number: token by token here, and the loss of the row in training."""
    agent = load_agent(run)
    calls = [
        call
        for rollout in agent.roll_out(agent.tasks("val")[:3], greedy=True)
        for call in observed_calls(rollout, predict={"make_phone_call"})
    ]
    assert calls
    rows = [agent.world_model_codec.example(call.state, call.call, call.reply) for call in calls]
    adapters = agent.model.world_model_adapters
    scores = Learner(agent.model, agent.config).reply_scores(
        [world_model_sample(row, adapters=adapters) for row in rows]
    )
    for call, reply, score in zip(calls, inspect_calls(agent, calls), scores, strict=True):
        assert "".join(token.text for token in reply.tokens) == call.reply == reply.actual
        whole = sum(token.surprise for token in surprise_of_target(agent, call))
        assert whole == pytest.approx(score.loss, rel=1e-4)
        assert sum(token.surprise for token in reply.tokens) < whole  # the tags and the end of turn
        assert all(token.surprise >= 0 for token in reply.tokens)


def test_text_that_takes_several_tokens_a_character_is_put_together(run: Path):
    agent = load_agent(run)
    action = '<tool_call>{"name": "make_phone_call", "arguments": {}}</tool_call>'
    text = "Ünïcode: 数字 🙂 <|csr|>"
    rollout = rollout_from_texts(agent.make_environment(), task_id="", opening=(), exchanges=[(action, text)])
    (seen,) = observed_calls(rollout, predict=None)
    (reply,) = inspect_calls(agent, [seen])
    assert "".join(token.text for token in reply.tokens) == text


def test_inspect_shows_the_newest_rollouts_of_the_run(lfo, run: Path):
    code, out, err = lfo("inspect", run, "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["rollouts"] == str(run / "rollouts" / "step-000001.jsonl")
    for reply in result["replies"]:
        assert reply["state"].startswith("<|state|>")
        assert reply["call"]["name"] == "make_phone_call"
        assert "".join(token["text"] for token in reply["tokens"]) == reply["actual"]
    code, out, err = lfo("inspect", run, "--num", "1")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines() if line.strip()].count("actual") == 1
    assert "Mean surprise" in out


def test_inspect_reads_another_file(lfo, run: Path, tmp_path: Path):
    file = tmp_path / "samples.jsonl"
    assert lfo("rollouts", run, "--num", "4", "--output", file)[0] == 0
    assert json.loads(lfo("inspect", run, "--rollout", file, "--json")[1])["rollouts"] == str(file)
    file.write_text("{}\n")
    fails_with_one_sentence(lfo("inspect", run, "--rollout", file), f"{file}, line 1")
    fails_with_one_sentence(lfo("inspect", run, "--rollout", tmp_path / "none"), "cannot read")
    file.write_text("")
    fails_with_one_sentence(lfo("inspect", run, "--rollout", file), "contains no reply")


def test_inspect_needs_a_world_model_and_rollouts(lfo, run: Path, plain: Path, tmp_path: Path):
    fails_with_one_sentence(lfo("inspect", plain), "has no world model")
    shutil.copytree(run, tmp_path / "quiet", ignore=shutil.ignore_patterns("rollouts"))
    fails_with_one_sentence(lfo("inspect", tmp_path / "quiet"), "contains no rollouts")


# --- probe -----------------------------------------------------------------------------------------------------------


def test_probe_asks_the_shipped_cases(lfo, run: Path):
    code, out, err = lfo("probe", run, "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["passed"] + result["failed"] == len(result["cases"]) == 10
    assert result["passed"] == sum(case["passed"] for case in result["cases"])
    code, out, err = lfo("probe", run)
    assert (code, err) == (0, "")
    assert f"{result['passed']} of 10 cases passed" in out
    assert out.count("\nfailed ") == result["failed"]


def test_a_failed_case_is_an_error_only_when_strict(lfo, run: Path, tmp_path: Path):
    cases = tmp_path / "cases.yaml"
    case = "{{name: n, task: t, call: make_phone_call, expect: {{{}}}}}"
    cases.write_text(f"cases: [{case.format('reply: no rep ever says this')}]")
    assert lfo("probe", run, "--cases", cases)[0] == 0
    assert lfo("probe", run, "--cases", cases, "--strict")[0] == 1
    cases.write_text(f"cases: [{case.format('not: no rep ever says this')}]")
    assert lfo("probe", run, "--cases", cases, "--strict")[0] == 0
    cases.write_text(f"cases: [{case.format('reply: (')}]")
    fails_with_one_sentence(lfo("probe", run, "--cases", cases), "case 1 (n): reply is not a valid regular expression")


def test_probe_needs_a_world_model(lfo, plain: Path):
    fails_with_one_sentence(lfo("probe", plain), "has no world model")


# --- the names of the documents --------------------------------------------------------------------------------------


def test_the_scripts_are_the_commands(run: Path, tmp_path: Path, monkeypatch, capsys):
    def script(name: str, *arguments: str | Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            runpy.run_path(str(SCRIPTS / name), run_name="__main__")
        return int(exit_.value.code or 0), capsys.readouterr().out

    file, checkpoint = tmp_path / "samples.jsonl", run / "checkpoints" / "step-000001"
    options = ("--checkpoint", checkpoint, "--num_samples", "2", "--output", file, "--greedy")
    assert script("save_trajectories.py", *options)[0] == 0
    assert len(file.read_text().splitlines()) == 2
    code, out = script("inspect_world_model.py", "--checkpoint", checkpoint, "--rollout", file, "--json")
    assert code == 0
    assert json.loads(out)["rollouts"] == str(file)
    assert script("inspect_world_model.py", "--checkpoint", tmp_path)[0] == 2
