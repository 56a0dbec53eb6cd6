"""The gate: can look-ahead help this base in this environment, if every prediction is right?

    alone          an untrained base plays training tasks greedily
    true_replies   the same, with look-ahead that shows the reply which the environment would really give
    feedback       the same, shown the first reply that it received when it failed alone

A world model can at best predict the true reply. Where the true reply does not help, no world model can.

    measure_gate(config, tasks, roll_out) -> {"alone": {"success": 0.03, "low": ..., "high": ..., "n": 64}, ...,
                                              "helps": True, "verdict": "shown the true reply it succeeds in ..."}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from lfo.atomic import write_json_atomic
from lfo.config import RunConfig
from lfo.measure.foretelling import foretelling
from lfo.measure.success import draft_metrics
from lfo.play.episode import RolloutRequest
from lfo.play.feedback import feedback_from
from lfo.play.runner import refuse_dead_environment
from lfo.protocol.schemas import misfit
from lfo.statistics import paired_difference, wilson
from lfo.types import Rollout

GATE_FILE = "gate.json"  # in the folder of a run
SAMPLED_SEED = 1
GAIN = 0.1  # least gain in success that counts as help, if its interval is above 0
SOLVED = 0.9  # success alone from which little is left to learn
CALLS = 0.5  # least share of rollouts with a valid call: a base below cannot act, whatever it is shown
KEPT = 0.1  # least share of imagined exchanges that stay: below, the base does not act on what it reads
BROKEN = 0.2  # by how much fewer rollouts have a valid call when they are sampled, for a warning

Play = Callable[[Sequence[RolloutRequest], float], Sequence[Rollout]]  # requests, temperature -> rollouts


def measure_gate(
    config: RunConfig,
    tasks: Sequence[Any],
    play: Play,
    *,
    tools: Sequence[Mapping[str, Any]],
    imagines: Callable[[Sequence[Rollout]], Callable[[str], bool]],
    progress: Callable[[int], None] = lambda played: None,
) -> dict[str, Any]:
    """Play these tasks four times and judge. `play` looks ahead with true replies, except where that is off;
    `imagines` returns, after the first rollouts, which tools look-ahead may imagine."""

    def rollouts(requests: Sequence[RolloutRequest], temperature: float = 0.0) -> list[Rollout]:
        played = list(play(requests, temperature))
        refuse_dead_environment(played)
        progress(len(played))
        return played

    plain = [RolloutRequest(task=task, seeds=(0,), look_ahead=False) for task in tasks]
    alone = rollouts(plain)
    sampled = rollouts(
        [RolloutRequest(task=task, seeds=(SAMPLED_SEED, index), look_ahead=False) for index, task in enumerate(tasks)],
        config.rollout.temperature,
    )
    may_imagine = imagines([*alone, *sampled])
    shown = rollouts([RolloutRequest(task=task, seeds=(0,)) for task in tasks])
    told = _with_feedback(tasks, alone, may_imagine, rollouts)
    figures = {
        "alone": _player(alone),
        "sampled": {**_player(sampled), "temperature": config.rollout.temperature},
        "true_replies": _player(shown),
        "feedback": _player(told),
        "gain": _gain(shown, alone),
        "gain_of_feedback": _gain(told, alone),
        "callers": {"greedy": _callers(alone, tools), "sampled": _callers(sampled, tools)},
        "drafts_kept": None,
        **draft_metrics(shown),
        "form": config.imagine.form,
        "before_the_call": foretelling([*alone, *sampled], may_imagine),
    }
    return {**figures, **judged(figures)}


def _with_feedback(
    tasks: Sequence[Any],
    alone: Sequence[Rollout],
    may_imagine: Callable[[str], bool],
    play: Callable[[Sequence[RolloutRequest]], Sequence[Rollout]],
) -> list[Rollout]:
    """Play the tasks again that failed, with a reply of the first time; the others keep their rollout."""
    called = {turn.call.name for rollout in alone for turn in rollout.turns if turn.call is not None}
    named = {name for name in called if may_imagine(name)}
    again = {
        index: RolloutRequest(task=task, seeds=(0,), look_ahead=False, feedback=feedback)
        for index, (task, rollout) in enumerate(zip(tasks, alone, strict=True))
        if (feedback := feedback_from([rollout], tools=named)) is not None
    }
    second = dict(zip(again, play(list(again.values())) if again else (), strict=True))
    return [second.get(index, rollout) for index, rollout in enumerate(alone)]


def _callers(rollouts: Sequence[Rollout], tools: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of rollouts with a valid call of these tools."""
    calls = [[turn.call for turn in rollout.turns if turn.call is not None] for rollout in rollouts]
    return fmean(any(misfit(call, tools) is None for call in made) for made in calls)


def _player(rollouts: Sequence[Rollout]) -> dict[str, float]:
    success = fmean(rollout.succeeded for rollout in rollouts)
    low, high = wilson(success, len(rollouts))
    reward = fmean(rollout.reward for rollout in rollouts)
    return {"success": success, "low": low, "high": high, "n": len(rollouts), "reward": reward}


def _gain(with_help: Sequence[Rollout], alone: Sequence[Rollout]) -> dict[str, Any]:
    found = paired_difference([each.succeeded for each in with_help], [each.succeeded for each in alone])
    return {name: found[name] for name in ("difference", "interval")}


# --- of a run ----------------------------------------------------------------------------------------------------


def write_gate(run: Path, gate: Mapping[str, Any]) -> None:
    """Keep the gate of the base and the environment of a run in its folder, for `lfo advise`."""
    write_json_atomic(run / GATE_FILE, dict(gate))


def read_gate(run: Path) -> dict[str, Any] | None:
    """Return `helps` and `verdict` of what `write_gate` wrote; None if nobody measured it, or if the file is damaged.

    They are judged anew from the numbers, whatever words the file has.
    """
    try:
        found = judged(json.loads((run / GATE_FILE).read_bytes()))
        return {name: found[name] for name in ("helps", "verdict")}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return None


# --- the verdict -------------------------------------------------------------------------------------------------


def judged(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return `helps` (None: these tasks cannot tell), the `verdict` in one sentence, and `warnings`.

    Pure: the figures of `measure_gate` decide.
    """
    helps, then = _decided(figures)
    shown, alone = figures["true_replies"], figures["alone"]
    found = f"shown the true reply it succeeds in {_count(shown)} of {shown['n']} tasks, alone in {_count(alone)}"
    return {"helps": helps, "verdict": f"{found}: {then}", "warnings": list(_warnings(figures, helps))}


def _decided(figures: Mapping[str, Any]) -> tuple[bool | None, str]:
    if figures["alone"]["success"] >= SOLVED:
        return False, "little is left to learn"
    if _is_gain(figures["gain"]):
        return True, "look-ahead can help; what is left is learning to predict"
    if figures["gain"]["difference"] >= GAIN:
        return None, "a gain is not shown with so few tasks; measure with more (--gate TASKS)"
    return False, f"look-ahead cannot help this base here, however good the predictions: {_reason(figures)}"


def _is_gain(gain: Mapping[str, Any]) -> bool:
    return gain["difference"] >= GAIN and gain["interval"][0] > 0


def _reason(figures: Mapping[str, Any]) -> str:
    callers = figures["callers"]["greedy"]
    if callers < CALLS:
        return (
            f"it makes a valid call of these tools in {callers:.0%} of its rollouts; teach it their syntax "
            "(lfo pretrain env=NAME) or take an instruct model"
        )
    kept = figures["drafts_kept"]
    if kept is None:
        return "it drafts no call of a tool that may be imagined (world_model.predict)"
    if kept < KEPT:
        return f"it keeps {kept:.0%} of what it imagines, so it does not act on what it reads"
    return "it makes other calls after it has read the reply, and they succeed no more often"


def _warnings(figures: Mapping[str, Any], helps: bool | None) -> Sequence[str]:
    warnings = []
    told, callers, before = figures["feedback"], figures["callers"], figures["before_the_call"]
    if helps is False and _is_gain(figures["gain_of_feedback"]):
        warnings.append(
            f"shown a real reply of its own failure it succeeds in {_count(told)} of {told['n']} tasks: "
            "feedback=own can help in training"
        )
    if callers["greedy"] - callers["sampled"] >= BROKEN:
        warnings.append(
            f"{callers['greedy']:.0%} of its greedy rollouts have a valid call, {callers['sampled']:.0%} of those that "
            f"are sampled at temperature {figures['sampled']['temperature']:g}: lower rollout.temperature"
        )
    if helps and before is not None and not before["foretold"]:
        looked = f"other tools were called before in {before['after_others']:.0%} of the cases"
        warnings.append(
            f"what stands before a call of {before['tool']} is not shown to tell its reply ({before['calls']} calls, "
            f"p = {before['p']:.2f}; {looked}): a world model cannot predict from what was not looked up, and "
            "few calls show little (--gate TASKS)"
        )
    return warnings


def _count(player: Mapping[str, float]) -> int:
    return round(player["success"] * player["n"])
