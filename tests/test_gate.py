"""Whether look-ahead can help a base: what is measured, and the verdict."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lfo.cli import main
from lfo.config import load_config, to_yaml
from lfo.env.worlds.oracle import OracleCodes
from lfo.loading import load_tokenizer
from lfo.measure.foretelling import FEWEST, foretelling
from lfo.measure.gate import judged, measure_gate, read_gate, write_gate
from lfo.play.episode import RolloutRequest
from lfo.protocol.hermes import format_tool_call
from lfo.report.live import warnings
from lfo.runs.reading import read_run
from lfo.statistics import paired_difference, wilson
from lfo.tools.gate import gate_of, shown_the_truth
from lfo.types import Message, Rollout, StopReason, ToolCall, Turn

DIAL = {"type": "object", "properties": {"number": {"type": "string"}}, "required": ["number"]}
TOOLS = [{"type": "function", "function": {"name": "dial", "description": "Dial.", "parameters": DIAL}}]


class Task:
    def __init__(self, number: int) -> None:
        self.id, self.number = f"task-{number}", str(number % 7)


def call(number: str) -> ToolCall:
    return ToolCall(name="dial", arguments={"number": number})


def turn(made: ToolCall | None, observation: str, **marks: Any) -> Turn:
    action = format_tool_call(made) if made else "I give up."
    spans = dict.fromkeys(("action_start", "action_end", "observation_start", "observation_end"), 0)
    return Turn(action=action, observation=observation, call=made, **spans, **marks)


def rollout(task_id: str, *turns: Turn, opening: str = "", blind: bool = True, taken_back: Any = ()) -> Rollout:
    right = turns[-1].observation == "Connected."
    return Rollout(
        task_id=task_id,
        opening=(Message(role="user", content=opening),),
        tokens=(1,),
        origins=(0,),
        logprobs=(0.0,),
        turns=turns,
        taken_back=taken_back,
        look_ahead=not blind,
        reward=float(right),
        stop=StopReason.DONE,
    )


def reader(request: RolloutRequest, temperature: float) -> Rollout:
    """Plays 0 unless told; has an invalid call at temperature 1."""
    task, wrong = request.task, call("0")
    refusal = f"Refused: dial {task.number}."
    if temperature:
        return rollout(task.id, turn(ToolCall(name="dial", arguments={}), "dial needs the argument number."))
    if request.look_ahead:
        told = turn(wrong, refusal, predicted=True)
        return rollout(task.id, told, turn(call(task.number), "Connected."), blind=False)
    if request.feedback is not None:
        assert request.feedback.observation == refusal
        told = turn(wrong, refusal, predicted=True, feedback=True)
        return rollout(task.id, told, turn(call(task.number), "Connected."))
    return rollout(task.id, turn(wrong, "Connected." if task.number == "0" else refusal))


def parrot(request: RolloutRequest, temperature: float) -> Rollout:
    """Makes the same call whatever it is shown; what it imagines is taken back."""
    alone = reader(replace(request, look_ahead=False, feedback=None), 0.0)
    if not request.look_ahead:
        return alone
    return replace(alone, look_ahead=True, taken_back=(turn(call("0"), "Refused.", predicted=True, taken_back=True),))


def measured(player: Callable[[RolloutRequest, float], Rollout], tasks: int = 28) -> dict[str, Any]:
    played: list[int] = []

    def play(requests: Sequence[RolloutRequest], temperature: float) -> list[Rollout]:
        return [player(request, temperature) for request in requests]

    result = measure_gate(
        load_config(),
        [Task(number) for number in range(tasks)],
        play,
        tools=TOOLS,
        imagines=lambda rollouts: {"dial"}.__contains__,
        progress=played.append,
    )
    assert sum(played) <= 4 * tasks
    return result


def test_a_base_that_acts_on_true_replies_can_be_helped():
    result = measured(reader)
    assert [result[name]["success"] for name in ("alone", "true_replies", "feedback")] == [4 / 28, 1.0, 1.0]
    assert (result["alone"]["low"], result["alone"]["high"]) == wilson(4 / 28, 28)
    assert (result["drafts"], result["drafts_kept"], result["helps"]) == (1.0, 1.0, True)
    assert result["verdict"].startswith(
        "shown the true reply it succeeds in 28 of 28 tasks, alone in 4: look-ahead can"
    )
    assert result["callers"] == {"greedy": 1.0, "sampled": 0.0}
    assert any("lower rollout.temperature" in warning for warning in result["warnings"])


def test_a_base_that_repeats_its_call_cannot_be_helped():
    result = measured(parrot)
    assert result["true_replies"]["success"] == result["alone"]["success"] == 4 / 28
    assert (result["helps"], result["drafts_kept"]) == (False, 0.0)
    assert "it keeps 0% of what it imagines" in result["verdict"]


def figures(alone: int, shown: int, *, n: int = 20, **others: Any) -> dict[str, Any]:
    def player(solved: int) -> dict[str, float]:
        low, high = wilson(solved / n, n)
        return {"success": solved / n, "low": low, "high": high, "n": n, "reward": solved / n}

    def gain(solved: int) -> dict[str, Any]:
        return paired_difference([index < solved for index in range(n)], [index < alone for index in range(n)])

    told = others.pop("told", alone)
    return {
        "alone": player(alone),
        "sampled": {**player(alone), "temperature": 1.0},
        "true_replies": player(shown),
        "feedback": player(told),
        "gain": gain(shown),
        "gain_of_feedback": gain(told),
        "callers": {"greedy": 1.0, "sampled": 1.0},
        "drafts_kept": 1.0,
        "before_the_call": None,
        **others,
    }


@pytest.mark.parametrize(
    ("found", "helps", "words"),
    [
        (figures(1, 16), True, "what is left is learning to predict"),
        (figures(19, 20), False, "little is left to learn"),
        (figures(2, 5), None, "a gain is not shown with so few tasks"),
        (figures(2, 3), False, "they succeed no more often"),
        (figures(1, 1, drafts_kept=0.05), False, "it does not act on what it reads"),
        (figures(1, 1, drafts_kept=None), False, "drafts no call"),
        (figures(0, 0, callers={"greedy": 0.1, "sampled": 0.1}), False, "lfo pretrain env=NAME"),
    ],
)
def test_the_verdict(found: dict[str, Any], helps: bool | None, words: str):
    assert judged(found)["helps"] is helps
    assert words in judged(found)["verdict"]


def test_feedback_that_helps_where_look_ahead_does_not_is_said():
    assert "feedback=own" in judged(figures(1, 1, told=15))["warnings"][0]
    assert judged(figures(1, 15, told=15))["warnings"] == []


def test_a_reply_that_cannot_be_foretold_is_said_where_true_replies_help():
    before = {"tool": "serve", "calls": 40, "after_others": 0.25, "p": 0.6, "foretold": False}
    (warning,) = judged(figures(1, 15, before_the_call=before))["warnings"]
    assert "a call of serve is not shown to tell its reply" in warning
    assert "25%" in warning
    assert judged(figures(1, 1, before_the_call=before))["warnings"] == []


# --- whether the prompt tells the reply ---------------------------------------------------------------------------


def played(number: int, says: Callable[[str], str], answer: Callable[[str], str], looked_up: str = "") -> Rollout:
    kind = random.Random(number).choice(["salt", "sugar", "flour", "rice"])
    opening = f"Order {1000 + number}: {says(kind)}"
    before = [turn(ToolCall(name="look", arguments={}), f"It is {kind}.")] if looked_up else []
    return rollout(f"task-{number}", *before, turn(call("0"), f"Refused: {answer(kind)}"), opening=opening)


ANSWERS = {"salt": "shelf seven", "sugar": "shelf nine", "flour": "cellar two", "rice": "attic four"}


def about(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    found = foretelling(rollouts, {"dial"}.__contains__)
    assert found is not None
    return found


def test_replies_that_follow_from_the_opening_or_from_a_look_up_are_foretold():
    stated = about([played(number, lambda kind: f"bring {kind}.", ANSWERS.__getitem__) for number in range(40)])
    assert (stated["tool"], stated["calls"], stated["after_others"]) == ("dial", 40, 0.0)
    assert stated["foretold"]
    assert stated["similarity"] > stated["by_chance"]
    looked_up = [played(number, lambda kind: "bring it.", ANSWERS.__getitem__, "yes") for number in range(40)]
    assert about(looked_up)["foretold"]
    assert about(looked_up)["after_others"] == 1.0


def test_replies_whose_cause_is_not_in_the_prompt_are_not():
    hidden = [played(number, lambda kind: "bring it.", ANSWERS.__getitem__) for number in range(40)]
    assert not about(hidden)["foretold"]
    dice = random.Random(5)
    lawless = [played(number, str, lambda kind: dice.choice(list(ANSWERS.values()))) for number in range(40)]
    assert not about(lawless)["foretold"]


def test_another_rollout_of_the_same_task_foretells_nothing():
    twice = [played(number // 2, lambda kind: "bring it.", ANSWERS.__getitem__) for number in range(80)]
    assert not about(twice)["foretold"]


def test_few_calls_say_nothing():
    few = [played(number, str, ANSWERS.__getitem__) for number in range(FEWEST - 1)]
    assert foretelling(few, {"dial"}.__contains__) is None
    assert foretelling([played(0, str, str)] * FEWEST, {"dial"}.__contains__) is None, "one task"
    assert foretelling([], {"dial"}.__contains__) is None


# --- the real thing -----------------------------------------------------------------------------------------------


class Nameless(OracleCodes):
    """Names no tools to imagine."""

    def lookahead_tools(self) -> Any:
        return None


@pytest.mark.parametrize("environment", [OracleCodes, Nameless])
def test_the_embedded_base_acts_on_what_a_door_would_say(environment: type[OracleCodes]):
    config = load_config(["env=oracle-codes", "algo=dapo", "lookahead=off"])
    result = gate_of(config, environment, load_tokenizer(config.model), tasks=8)
    assert result["alone"]["success"] == 0.0
    assert result["true_replies"]["success"] == result["feedback"]["success"] == 1.0
    assert (result["helps"], result["form"], result["model"]) == (True, "mark", "tiny")


@pytest.mark.parametrize(
    "settings",
    [
        ("rollout.group_size=2", "policy.frozen=true", "lookahead_source=memory", "world_model.weight=0"),
        ("rollout.group_size=2", "algo=dapo"),
        ("rollout.max_context=80", "rollout.max_turn_tokens=40", "world_model.reply_tokens=40"),
    ],
)
def test_every_run_has_a_gate(settings: tuple[str, ...]):
    config = load_config(["preset=tiny", *settings])
    assert shown_the_truth(config).rollout == config.rollout


def test_check_env_shows_it(monkeypatch, capsys):
    def lfo(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["lfo", "check-env", "env=oracle-codes", "--episodes", "4", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        assert not exit_.value.code
        return capsys.readouterr().out

    shown = lfo("--gate", "6")
    assert "the gate: tiny" in shown
    assert "shown the true reply it succeeds in 6 of 6 tasks, alone in 0" in shown
    assert json.loads(lfo("--gate", "6", "--json"))["gate"]["helps"] is True
    assert "gate" not in json.loads(lfo("--gate", "0", "--json"))


# --- of a run ------------------------------------------------------------------------------------------------------


def test_the_gate_of_a_run_is_kept_in_its_folder_for_advise(tmp_path: Path, monkeypatch, capsys):
    def lfo(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["lfo", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        shown = capsys.readouterr()
        assert not exit_.value.code, shown.err
        return shown.out

    run = tmp_path / "run"
    run.mkdir()
    config = load_config(["preset=tiny", "env=oracle-codes", f"output_dir={run}"])
    (run / "config.yaml").write_text(to_yaml(config))
    (run / "metrics.jsonl").write_text('{"step": 1, "tasks_seen": 8}\n')
    measured = json.loads(lfo("check-env", "--run", str(run), "--episodes", "4", "--gate", "6", "--json"))["gate"]
    assert read_gate(run) == {"helps": True, "verdict": measured["verdict"]}
    assert "gate failed" not in lfo("advise", str(run))
    write_gate(run, figures(1, 1, drafts_kept=0.0))
    assert "gate failed: shown the true reply it succeeds in 1 of 20 tasks, alone in 1: look-ahead cannot" in lfo(
        "advise", str(run)
    )
    assert warnings(read_run(run))[0]["words"].startswith("gate failed: "), "the page of lfo watch"
    monkeypatch.setattr(sys, "argv", ["lfo", "check-env", "--run", str(run), "env=oracle-codes"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "[" * 10_000, '{"alone": 1}'),
        json.dumps(figures(1, 1, gain={"difference": "much", "interval": []})),
        json.dumps(figures(1, 1) | {"alone": {"success": 0.1, "n": "\x1b[2J"}}),
        json.dumps(figures(1, 1) | {"alone": {"success": float("nan"), "n": 4}}),
    ],
)
def test_a_damaged_gate_is_none(tmp_path: Path, text: str):
    (tmp_path / "gate.json").write_text(text)
    assert read_gate(tmp_path) is None
    assert read_gate(tmp_path / "nowhere") is None


def test_the_words_of_a_gate_are_never_those_of_its_file(tmp_path: Path):
    found = figures(1, 1, drafts_kept=0.0)
    write_gate(tmp_path, {**found, "helps": True, "verdict": "\x1b[2J", "warnings": ["\x1b"]})
    assert read_gate(tmp_path) == {name: judged(found)[name] for name in ("helps", "verdict")}
