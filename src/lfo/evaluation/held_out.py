"""The calls on which a world model is examined: a fixed pool of (state, call, true reply), the same in every run.

It depends on the environment and nothing else - not on the seed, the policy or the step - so that the curves of all
runs on the same data compare. In the phone-call world scripted players make the calls, so that every kind of reply
occurs; in any other world the untrained base plays. To them come the calls that look-ahead asks about, where the
environment has such. The tasks are the first of `val`, on which nobody trains.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

from lfo.env.interface import Environment, EnvironmentFactory, OffersLookahead, predicted_tools
from lfo.env.phone_calls import PhoneCalls
from lfo.env.players import PLAYERS, Player, Session, informed_form
from lfo.env.seeds import stream
from lfo.env.tasks import Task
from lfo.errors import EnvironmentFailed
from lfo.evaluation.world_model import describe_with
from lfo.protocol.world_model import ObservedCall, observed_calls, state_of
from lfo.rollout.predictors import true_reply_predictor
from lfo.rollout.records import rollout_from_texts, transcripts
from lfo.rollout.runner import Question, RunnerSettings
from lfo.types import Rollout, StepResult

SPLIT = "val"
TASKS = 24
CALLS = 64

PlaysTasks = Callable[[Sequence[Any]], Sequence[Rollout]]


def held_out_calls(
    environment: EnvironmentFactory, settings: RunnerSettings, base_policy: PlaysTasks, *, count: int = CALLS
) -> list[ObservedCall]:
    """At most `count` different calls, as evenly over the kinds of replies as these tasks allow.

    `base_policy` answers one rollout for each task, in order: of the untrained base, always the same.
    """
    judge = environment()
    tasks = judge.tasks(SPLIT)[:TASKS]
    if isinstance(judge, PhoneCalls):
        tools = predicted_tools(judge)
        plays = [(task, player) for task in tasks for player in _SCRIPTS]
        rollouts = settings.call_all([partial(_play, environment, *play) for play in plays])
        played = [(task, rollout) for (task, _), rollout in zip(plays, rollouts, strict=True)]
    else:
        tools = None
        played = list(zip(tasks, base_policy(tasks), strict=True))
    played = [(task, rollout) for task, rollout in played if not isinstance(rollout, EnvironmentFailed)]
    made = (call for _, rollout in played for call in observed_calls(rollout, predict=tools))
    return _evenly([*_asked_calls(environment, settings, played), *made], count)


def _asked_calls(
    environment: EnvironmentFactory, settings: RunnerSettings, played: Sequence[tuple[Any, Rollout]]
) -> Iterator[ObservedCall]:
    """The first call of each rollout that look-ahead would have asked about, with what would have been heard."""
    judge = environment()
    if not isinstance(judge, OffersLookahead):
        return
    answers = settings.call_all([partial(_question, judge, *play) for play in played])
    questions = [answer for answer in answers if isinstance(answer, Question)]
    for question, reply in zip(questions, true_reply_predictor(environment, settings)(questions), strict=True):
        if reply:
            facts = describe_with(judge, reply)
            yield ObservedCall(state=question.state, call=question.call, reply=reply, facts=facts, asked=True)


def _question(judge: OffersLookahead, task: Any, rollout: Rollout) -> Question | None:
    for turns, transcript in transcripts(rollout):
        call = judge.lookahead_query(transcript)
        if call is not None:
            said = tuple(turn.action for turn in turns)
            return Question(task=task, state=state_of(rollout.opening, turns), call=call, messages=said)
    return None


def _evenly(calls: Iterable[ObservedCall], count: int) -> list[ObservedCall]:
    """One of each kind in turn, no call twice; those that look-ahead asks about are a kind of their own."""
    different: dict[str, ObservedCall] = {}
    for call in calls:
        different.setdefault(repr((call.state, call.call)), call)
    kinds: dict[tuple[str, bool], list[ObservedCall]] = defaultdict(list)
    for call in different.values():
        kinds[call.facts.category if call.facts else "", call.asked].append(call)
    turns = itertools.zip_longest(*(kinds[kind] for kind in sorted(kinds)))
    return [call for turn in turns for call in turn if call is not None][:count]


# --- the phone-call world: who makes the calls -----------------------------------------------------------------------


def _careless(environment: PhoneCalls, task: Task) -> float:
    """Collects a part of what is needed, and calls the right department, a wrong one and a number that nobody has."""
    rng = stream(task.talk_seed, "careless player")
    session = Session(environment, task)
    numbers = session.numbers()
    needed = informed_form(task)
    values = session.form(rng.sample(needed, rng.randint(1, max(1, len(needed) - 1))))
    right = numbers[task.errands[0].service]
    wrong = rng.choice(sorted(set(numbers.values()) - {right}) or [right])
    nobody = next(n for n in iter(lambda: f"555-{rng.randrange(1000, 10_000)}", "") if n not in numbers.values())
    for number in rng.sample([right, wrong, nobody], 3):
        session.tool("make_phone_call", phone_number=number, auth_info=values)
    return session.end()


_SCRIPTS: tuple[Player, ...] = (PLAYERS["reader"], PLAYERS["informed"], PLAYERS["random"], _careless)


class _Recorder:
    """Stands before an environment and notes what is said."""

    def __init__(self, environment: Environment, task: Any) -> None:
        self.environment = environment
        self.opening = environment.reset(task)
        self.exchanges: list[tuple[str, str]] = []

    def step(self, message: str) -> StepResult:
        result = self.environment.step(message)
        self.exchanges.append((message, result.observation))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.environment, name)


def _play(environment: EnvironmentFactory, task: Task, player: Player) -> Rollout:
    recorder = _Recorder(environment(), task)
    reward = player(cast(PhoneCalls, recorder), task)
    return rollout_from_texts(
        recorder.environment, task_id=task.id, opening=recorder.opening, exchanges=recorder.exchanges, reward=reward
    )
