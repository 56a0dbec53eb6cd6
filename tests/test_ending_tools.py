"""The tools that may be imagined if nobody names them: those that end tasks."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lfo.agent import load_agent
from lfo.env.worlds.oracle import OracleCodes
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.play import ending_tools
from lfo.play.ending_tools import EndingTools, guess_ending_tools, learns_tools
from lfo.runs.folder import read_metrics
from lfo.types import Rollout, StopReason, ToolCall, Turn
from small_runs import small_config, small_trainer


class Nameless(OracleCodes):
    """The oracle world without a word about its tools."""

    @property
    def predicted_tools(self) -> Any:
        raise AttributeError


def rollout(*names: str, stop: StopReason = StopReason.DONE, imagined: str = "") -> Rollout:
    """A rollout that calls these tools one after the other; "" is a message without a call."""
    turns = [
        Turn(
            action="",
            observation="",
            call=ToolCall(name=name, arguments={}) if name else None,
            action_start=0,
            action_end=0,
            observation_start=0,
            observation_end=0,
            predicted=bool(name) and name == imagined,
        )
        for name in names
    ]
    return Rollout(
        task_id="t", opening=(), tokens=(), origins=(), logprobs=(), turns=tuple(turns), reward=0.0, stop=stop
    )


def tools_after(*rollouts: Rollout) -> list[str] | None:
    tools = EndingTools()
    tools.observe(rollouts)
    for name in ("look", "open", "pay"):
        assert (name in tools) == (tools.names is None or name in tools.names)
    return tools.names


def test_calls_that_end_tasks_may_be_imagined_and_look_ups_not():
    assert tools_after() == []
    assert tools_after(rollout("look", "open"), rollout("look", "look", "pay")) == ["open", "pay"]
    assert tools_after(rollout("look", "open", stop=StopReason.MAX_TURNS)) == [], "the environment did not end it"
    assert tools_after(rollout("look", "open", "pay", imagined="pay")) == ["open"], "what is imagined ends nothing"


def test_a_look_up_that_was_the_last_mistake_now_and_then_is_still_a_look_up():
    ended, others = rollout("look"), [rollout("look", "open")] * 8
    assert tools_after(ended, *others) == ["look", "open"]  # one of nine calls
    assert tools_after(ended, *others, *others) == ["open"]  # one of seventeen


def test_where_tasks_end_without_a_call_all_calls_may_be_imagined():
    assert tools_after(rollout("look", "")) is None
    assert tools_after(rollout("look", ""), rollout("open")) == ["open"]


def test_where_there_is_one_tool_its_calls_may_be_imagined_however_many_a_task_takes():
    assert tools_after(rollout(*["move"] * 30)) is None
    assert tools_after(rollout(*["move"] * 30, "look")) == ["look"]


def test_random_play_finds_them_before_the_policy_has_made_a_call():
    config = small_config("env=oracle-codes")
    tasks = Nameless().tasks("train")[:4]
    guess = guess_ending_tools(Nameless, tasks, config)
    assert guess.names == ["open_door"]
    tools = EndingTools()
    assert tools.names == []
    tools.first_guess = guess
    assert tools.names == ["open_door"]
    tools.observe([rollout("ask_oracle", stop=StopReason.MAX_TURNS)])
    assert tools.names is None, "what the policy did counts from then on"


def test_an_environment_that_fails_in_random_play_guesses_nothing():
    class Broken(Nameless):
        def reset(self, task: Any) -> Any:
            raise RuntimeError("no")

    assert guess_ending_tools(Broken, Nameless().tasks("train")[:2], small_config("env=oracle-codes")).names == []


class Endless(Nameless):
    """Its first reply is longer than any context; it counts the games and the messages that it gets."""

    games: ClassVar[int] = 0
    messages: ClassVar[int] = 0

    def reset(self, task: Any) -> Any:
        Endless.games += 1
        return super().reset(task)

    def step(self, message: str) -> Any:
        Endless.messages += 1
        return replace(super().step(message), observation="Go on. " * 100_000, done=False)


def test_random_play_reads_no_more_than_a_context_holds():
    tasks = Nameless().tasks("train")[:2]
    guess_ending_tools(Endless, tasks, small_config("env=oracle-codes", "rollout.max_context=1024"))
    assert Endless.games == ending_tools.GUESSES * len(tasks)
    assert Endless.messages == Endless.games, "each game ends with its first reply"


def test_an_environment_that_names_no_tools_imagines_from_the_first_evaluation_on(tmp_path: Path):
    settings = ("env=oracle-codes", "steps=1", "eval.every=1", "eval.tasks=4", f"output_dir={tmp_path / 'run'}")
    trainer = small_trainer(*settings, environment=Nameless)
    trainer.fit()
    assert trainer.backend.ending_tools.first_guess.names == ["open_door"]
    before_training = read_metrics(tmp_path / "run")[0]
    assert before_training["step"] == 0
    assert before_training["eval/val/drafts"] > 0


def test_a_run_killed_before_its_first_checkpoint_guesses_again(tmp_path: Path):
    run = tmp_path / "run"

    def trained(resume: bool) -> list[float]:
        settings = ("env=oracle-codes", "steps=1", "eval.every=1", "eval.tasks=2", f"output_dir={run}")
        small_trainer(*settings, environment=Nameless).fit(resume=resume)
        return [row["drafts"] for row in read_metrics(run) if row["step"]]

    undisturbed = trained(resume=False)
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(run / "adapters")
    first_row = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[0]
    (run / "metrics.jsonl").write_text(first_row)
    assert trained(resume=True) == undisturbed
    assert undisturbed[0] > 0


def test_it_is_kept_and_an_older_run_may_imagine_every_call(tmp_path: Path):
    tools, again = EndingTools(), EndingTools()
    tools.observe([rollout("look", "open")] * 3)
    tools.save(tmp_path / ending_tools.FILE)
    again.load(tmp_path / ending_tools.FILE)
    again.observe([rollout("look")])
    assert again.names == ["look", "open"]  # one of four calls: the three were kept
    again.load(tmp_path / "none.json")
    assert again.names is None


@pytest.mark.parametrize(
    ("environment", "settings", "learnt"),
    [
        (Nameless, (), True),
        (OracleCodes, ("world_model.predict=all",), True),
        (Nameless, ("world_model.predict=none",), True),  # an untrained world model is asked about the same calls
        (Nameless, ("world_model.predict=open_door",), False),
        (Nameless, ("lookahead=off",), False),
        (Nameless, ("policy.frozen=true", "world_model.from_logs=log.jsonl"), False),  # which rolls nothing out
        (OracleCodes, (), False),
        (PhoneCalls, (), False),
    ],
)
def test_a_run_finds_out_where_nobody_names_tools(environment: Any, settings: tuple[str, ...], learnt: bool):
    assert learns_tools(environment(), small_config(*settings)) == learnt


def test_a_trained_agent_may_imagine_what_its_run_found_out(tmp_path: Path):
    output = tmp_path / "run"
    trainer = small_trainer("env=oracle-codes", "steps=1", "eval.every=0", f"output_dir={output}", environment=Nameless)
    trainer.fit()
    agent = load_agent(output, environment=Nameless, device="cpu")
    assert agent.lookahead is not None
    assert agent.lookahead.tools is agent.ending_tools
    assert agent.ending_tools is not None
    assert agent.ending_tools.names == trainer.backend.ending_tools.names == ["open_door"]  # type: ignore[union-attr]
