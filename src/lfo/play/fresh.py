"""Predictions of look-ahead beside the real replies that a step happens to hear: a test that costs no prediction.

Explorers make the calls that others of their group imagine, and a draft that look-ahead takes back is made. Whenever
call and state of a prediction and of a real reply are the same, the prediction was tested, before anything is learned
from the reply.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from statistics import fmean

from lfo.env.interface import Environment, same_meaning
from lfo.play.look_ahead import asked_at
from lfo.types import Rollout, RolloutGroup


def predictions_met(group: RolloutGroup) -> Iterator[tuple[str, list[str]]]:
    """Yield each prediction in a group whose call was also made in the same state, with the real replies to it."""
    said: dict[Hashable, str] = {}
    for rollout in group.rollouts:
        said |= _said(rollout)
    heard: dict[Hashable, list[str]] = defaultdict(list)
    for rollout in group.rollouts if said else ():
        for index, turn in enumerate(rollout.turns):
            if turn.call is not None and not turn.predicted and turn.observation:
                heard[asked_at(rollout, index).key].append(turn.observation)
    yield from ((said[key], heard[key]) for key in said if key in heard)


def _said(rollout: Rollout) -> Iterator[tuple[Hashable, str]]:
    """Yield each question of a rollout with its prediction, kept or taken back."""
    drafts = {turn.action_start: turn for turn in rollout.taken_back if turn.imagined}
    for index, turn in enumerate(rollout.turns):
        if turn.call is None:
            continue
        draft = turn if turn.imagined else drafts.get(turn.action_start)  # a draft taken back became the real turn
        if draft is not None and draft.call == turn.call:
            yield asked_at(rollout, index).key, draft.observation


def agreement(judge: Environment, predicted: str, actual: str) -> float:
    """Return how right a prediction was: 1 or 0 if the environment describes its replies, else the share of words that
    both have.

    >>> shared_words("I need your zip code", "I need your pin")
    0.6666666666666666
    """
    same = same_meaning(judge, predicted, actual)
    return shared_words(predicted, actual) if same is None else float(same)


def shared_words(one: str, other: str) -> float:
    """Return the share of the words of two texts that both have, counted twice (Dice)."""
    ones, others = Counter(one.split()), Counter(other.split())
    total = ones.total() + others.total()
    return 2 * (ones & others).total() / total if total else 1.0


def right_in(judge: Environment, group: RolloutGroup) -> list[float]:
    """Return how right each tested prediction of a group was."""
    return [
        fmean(agreement(judge, predicted, actual) for actual in replies)
        for predicted, replies in predictions_met(group)
    ]
