"""Auto: what succeeded so far decides who plays, what is shown to whom, and how the policy learns.

own       the policy alone: what the run is for
explore   the base alone: makes the informative calls for real, so that the world model hears new replies
look      the base with look-ahead
probe     the base with look-ahead by the TRUE reply: what a perfect prediction would give; until that is decided
feed      the base, shown a real reply that another rollout of its group received

The policy imitates what succeeds in any seat. A way of helping that is not shown to help is given up for good, and so
is one that no longer gives more than the policy alone. Where imitation no longer improves the policy and its groups
still differ, DAPO has a trial. All decisions follow from the record of outcomes, which is part of the state of a run:

    [{"phase": "imitate", "groups": [{"own": [0.0, 1.0], "explore": [0.0, 0.0], "probe": [1.0], "feed": [1.0]}]}]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, pvariance
from typing import Any

import numpy as np

from lfo.algorithms.internalise import first_tasks
from lfo.config import RunConfig
from lfo.play.runner import ENVIRONMENT_FAILURES
from lfo.statistics import GainTest
from lfo.types import RolloutGroup, Seat, Situation, StepPlan

WORTH, LEAST = 0.2, 0.05  # gain in success that is worth a seat; near a success of 0 already the smaller one
FADES = 0.8  # of recent counts, each step
LATELY, PATIENCE = 96, 320  # groups that show whether help still pays; that predictions have to become useful
FIRST = 80  # groups in which predictions are only learned; without a true reply in them, probes end
TRIAL = 64  # groups that show whether the policy still improves, and of a trial of DAPO
SOLVED, ALIKE = 0.95, 0.2  # success from which nothing else is tried; least share of groups that differ
LACKING = 0.1  # share of groups without a success below which more are worth little
SEED = 2_000_003
HELP = ("look", "feed")
SEATS = {
    "own": Seat(look_ahead=False),
    "explore": Seat(look_ahead=False, picks=True, player="base"),
    "look": Seat(player="base"),
    "probe": Seat(player="base", truth=True),
    "feed": Seat(look_ahead=False, player="base"),
}
NAMES = ("the policy alone", "the base alone", "look-ahead", "true replies", "feedback")
WORDS = dict(zip(SEATS, NAMES, strict=True))
ORDER = ("own", "explore", "feed", "probe", "look", "own", "explore", "probe")  # the first ones, in a small group


def adapt(plan: StepPlan, config: RunConfig, situation: Situation) -> StepPlan:
    """Return the plan with the seats and the losses that the record of outcomes suggests."""
    known = read(situation.outcomes)
    begun = situation.success_tasks >= first_tasks(situation.train_tasks)
    phase = "dapo" if known.tries_dapo else "imitate" if begun else "begin"
    kinds = _kinds(known, config, plan.step, phase)
    return replace(
        plan,
        seats=tuple(SEATS[kind] for kind in kinds),
        kinds=kinds,
        first_wave=len(kinds) - kinds.count("feed"),
        feedback="own" if "feed" in kinds else "off",
        phase=phase,
        reinforces=phase != "imitate",
        imitates=phase == "imitate",
        imitated_from=known.rate("own"),
        predicts=plan.predicts and "look" not in known.given_up,
        looks_ahead=known.acts == "look",
        agent=in_words(known),
    )


def _kinds(known: Known, config: RunConfig, step: int, phase: str) -> tuple[str, ...]:
    """Return who takes the seats of a group, those with feedback last: they are shown what the others received."""
    size, rng = config.rollout.group_size, np.random.default_rng([config.seed, step, SEED])
    helping = [kind for kind in HELP if kind not in known.given_up and (kind != "look" or config.looks_ahead)]
    deciding = known.tests["probe"].helps is None and "look" in helping and not known.cannot_probe
    present = {"own", *helping} | ({"explore"} if helping else set()) | ({"probe"} if deciding else set())
    order = ("own", "explore", "look") if phase == "dapo" else ORDER
    seats = [kind for kind in order if kind in present]
    while len(seats) < size:
        # Free seats go where successes come from, by Thompson sampling. Where a group hardly ever lacks one, they go to
        # look-ahead: its real calls, too, teach what to predict.
        drawn = {kind: rng.beta(1 + won, 1 + lost) for kind in ("own", *helping) for won, lost in [known.recent[kind]]}
        lacking = math.prod(1 - known.rate(kind) for kind in seats)
        best = max(drawn, key=drawn.__getitem__) if lacking > LACKING else ("look" if "look" in helping else "own")
        seats.append("own" if phase == "dapo" else best)
    return tuple(sorted(seats[:size], key=list(SEATS).index))


def seat_metrics(outcomes: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the mean reward of each kind of seat in a step."""
    found = {kind: [reward for group in outcomes["groups"] for reward in group.get(kind, ())] for kind in SEATS}
    return {"success_by_seat": {kind: fmean(rewards) for kind, rewards in found.items() if rewards}}


def outcomes_of(plan: StepPlan, groups: Sequence[RolloutGroup]) -> dict[str, Any]:
    """Return the record of a step: the reward in each seat, 0 to 1. Where the environment failed there is none."""
    found: list[dict[str, list[float]]] = []
    for group in groups:
        rewards: dict[str, list[float]] = {}
        for kind, rollout in zip(plan.kinds, group.rollouts, strict=True):
            # What no copy of the environment could answer says nothing about true replies.
            imagined = [turn for turn in (*rollout.turns, *rollout.taken_back) if turn.imagined]
            unanswered = kind == "probe" and any(not turn.observation for turn in imagined)
            if rollout.stop not in ENVIRONMENT_FAILURES and not unanswered:
                rewards.setdefault(kind, []).append(min(1.0, max(0.0, rollout.reward)))
        found.append(rewards)
    return {"phase": plan.phase, "groups": found}


# --- what the record says ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Known:
    groups: int = 0
    tests: dict[str, GainTest] = field(default_factory=lambda: {kind: GainTest() for kind in ("look", "probe", "feed")})
    recent: dict[str, list[float]] = field(default_factory=lambda: {kind: [0.0, 0.0] for kind in SEATS})
    given_up: dict[str, str] = field(default_factory=dict)  # what, and why
    own: list[tuple[float, bool]] = field(default_factory=list)  # each group of this phase: reward, if it differs
    tries_dapo: bool = False
    before: float = 0.0  # success of the policy alone when the trial of DAPO began

    @property
    def cannot_probe(self) -> bool:
        return self.groups >= FIRST and not self.tests["probe"].gains

    def rate(self, kind: str) -> float:
        won, lost = self.recent[kind]
        return won / (won + lost) if won + lost else 0.0

    @property
    def acts(self) -> str:
        """Who acts after this: whoever succeeds more often in training, not by a hair. Evaluations have no say."""
        return "look" if "look" not in self.given_up and self.rate("look") > self.rate("own") + LEAST else "own"


def read(outcomes: Sequence[Mapping[str, Any]]) -> Known:
    """Return what the record of all steps so far says, decided step by step as in the run."""
    known = Known()
    for step in outcomes:
        alone = "own" if known.rate("own") > known.rate("explore") else "explore"
        worth = min(WORTH, LEAST + known.rate(alone))
        for group in step["groups"]:
            known.groups += 1
            base = group.get(alone) or group.get("own")
            for kind, test in known.tests.items():
                if base and kind in group and (kind != "look" or known.groups > FIRST):
                    test.add(fmean(group[kind]) - fmean(base), worth)
            if (own := group.get("own")) and step["phase"] != "begin":
                known.own.append((fmean(own), len(set(own)) > 1))
        for kind, counts in known.recent.items():
            rewards = [reward for group in step["groups"] for reward in group.get(kind, ())]
            counts[:] = FADES * counts[0] + sum(rewards), FADES * counts[1] + len(rewards) - sum(rewards)
        for kind in [each for each in HELP if each not in known.given_up]:
            if why := _why_not(known, kind, worth):
                known.given_up[kind] = why
        _try_dapo(known)
    return known


def _why_not(known: Known, kind: str, worth: float) -> str:
    """Return why a way of helping is given up now; "": it is not."""
    own, probes = known.tests[kind], kind == "look" and not known.cannot_probe
    proof, shown = (known.tests["probe"], "shown true replies") if probes else (own, "with it")
    if proof.helps is False and not own.helps:
        gain = fmean(proof.gains[: proof.after])
        return f"{shown} the base gains {100 * gain:+.0f} points over acting alone, after {proof.after} groups"
    caught_up = known.rate("own") >= known.rate("probe" if known.rate("probe") and probes else kind) / 2
    if proof.helps and (caught_up or len(own.gains) >= PATIENCE) and not own.pays(min(worth, WORTH / 2), LATELY):
        gain = fmean(own.gains[-LATELY:])
        return f"it gains {100 * gain:+.0f} points over acting alone in {LATELY} groups, after {known.groups}"
    return ""


def _try_dapo(known: Known) -> None:
    """Begin a trial of DAPO where the policy has stopped to improve, and end it unless it improves the policy."""
    lately, before = known.own[-TRIAL:], known.own[-2 * TRIAL : -TRIAL]
    now = fmean(reward for reward, _ in lately or [(0.0, False)])
    if known.tries_dapo and len(lately) == TRIAL:
        spread = pvariance(reward for reward, _ in lately)
        if now - known.before < 1.64 * math.sqrt(2 * max(spread, 0.03) / TRIAL):
            known.given_up["dapo"] = f"in {TRIAL} groups the policy alone went from {known.before:.0%} to {now:.0%}"
            known.tries_dapo = False
        known.own, known.before = [], now
    elif len(before) == TRIAL and "dapo" not in known.given_up and now < SOLVED:
        differs = fmean(differ for _, differ in lately)
        if now <= fmean(reward for reward, _ in before) and differs >= ALIKE:
            known.tries_dapo, known.before, known.own = True, now, []


def in_words(known: Known) -> str:
    """Return who acts, and what was given up and why, in one sentence."""
    rates = [f"{WORDS[kind]} {known.rate(kind):.0%}" for kind in SEATS if sum(known.recent[kind])]
    who = "the base with look-ahead acts" if known.acts == "look" else "the policy alone acts"
    lost = [f"{WORDS.get(kind, 'DAPO')} was given up: {why}" for kind, why in known.given_up.items()]
    return "; ".join([f"{who} (success in training lately: {', '.join(rates) or 'none yet'})", *lost])
