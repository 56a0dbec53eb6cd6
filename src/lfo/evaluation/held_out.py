"""The calls on which a world model is examined: a fixed pool of (state, call, true reply), the same in every run.

It depends on the environment and nothing else - not on the seed, the policy or the step - so that the curves of all
runs on the same data compare. In the phone-call world scripted players make the calls, so that every kind of reply
occurs; in any other world the untrained base plays. To them come the calls that look-ahead asks about, where the
environment has such. The tasks are the first of `val`, on which nobody trains.

All replies are written in one greedy batch and scored in one forward pass; to calls of
the kind that look-ahead asks about, further ones are sampled with numbers that the calls name, to tell how sure the
world model is. Nothing is trained, so a run is the same with and without an
examination.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, cast

from lfo.backend import Backend
from lfo.config import RunConfig
from lfo.env.interface import (
    Environment,
    EnvironmentFactory,
    OffersLookahead,
    describe_with,
    predicted_tools,
    same_meaning,
)
from lfo.env.phone_calls import PhoneCalls
from lfo.env.players import EVERY_REPLY, Player
from lfo.env.tasks import Task
from lfo.errors import EnvironmentFailed
from lfo.evaluation.certainty import calibration_metrics
from lfo.evaluation.world_model import OTHER, Prediction, lost_tokens, prediction_metrics
from lfo.protocol.hermes import format_tool_call
from lfo.protocol.world_model import (
    TARGET_TOKENS,
    ObservedCall,
    WorldModelCodec,
    is_heard,
    observed_calls,
    render_state,
    state_of,
)
from lfo.rollout.certainty import certainty, sampled_replies
from lfo.rollout.deliberation import Question
from lfo.rollout.predictors import true_reply_predictor
from lfo.rollout.records import rollout_from_texts, transcripts
from lfo.rollout.row import RolloutRequest
from lfo.rollout.runner import RunnerSettings
from lfo.rollout.samples import world_model_sample
from lfo.types import Rollout, StepResult

SPLIT = "val"
TASKS = 24
CALLS = 64
EXAMPLES = 5  # shown of each examination, of different categories as far as there are

PlaysTasks = Callable[[Sequence[Any]], Sequence[Rollout]]


class Examination:
    """The world model of a run on the held-out calls: what it writes, and how it takes the true replies."""

    def __init__(
        self,
        config: RunConfig,
        environment: EnvironmentFactory,
        codec: WorldModelCodec,
        backend: Backend,
        adapters: tuple[str, ...],
    ) -> None:
        self._config, self._environment, self._codec = config, environment, codec
        self._backend, self._adapters = backend, adapters

    @cached_property
    def calls(self) -> list[ObservedCall]:
        """The fixed pool, made at first need; a run that is evaluated on few tasks is examined on few calls."""
        settings, count = RunnerSettings.of_run(self._config), min(CALLS, self._config.eval.tasks)
        return held_out_calls(self._environment, settings, self._untrained, count=count)

    @cached_property
    def asked(self) -> list[ObservedCall]:
        """As many calls that look-ahead asks about, each of another task; where it asks about none, the pool."""
        settings, count = RunnerSettings.of_run(self._config), min(CALLS, self._config.eval.tasks)
        return asked_calls(self._environment, settings, self._untrained, count=count) or self.calls

    def _untrained(self, tasks: Sequence[Any]) -> list[Rollout]:
        """The bare base plays, blind, with the same random numbers in every run."""
        requests = [RolloutRequest(task=task, seeds=(0, place), blind=True) for place, task in enumerate(tasks)]
        return self._backend.roll_out(requests, temperature=1.0, untrained=True)

    def lost_tokens(self, rollouts: Sequence[Rollout], predict: Collection[str] | None) -> dict[str, float]:
        """How much of what was heard in these rollouts the world model neither learns nor predicts."""
        world = self._config.world_model
        heard = (turn for rollout in rollouts for turn in rollout.turns if is_heard(turn, predict))
        lengths = [self._codec.length(turn.observation) for turn in heard]
        return lost_tokens(lengths, learned=max(TARGET_TOKENS, world.reply_tokens), predicted=world.reply_tokens)

    def run(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The metrics under their names in a row, and some examples for a person to read."""
        codec, judge = self._codec, self._environment()
        prompts = [codec.question_ids(call.state, call.call) for call in self.calls]
        written = [codec.decode(ids) for ids in self._backend.complete(prompts)]
        rows = [codec.example(call.state, call.call, call.reply) for call in self.calls]
        scores = self._backend.score([world_model_sample(row, adapters=self._adapters) for row in rows])
        predictions = [
            Prediction(
                predicted=predicted,
                actual=call.reply,
                category=call.facts.category if call.facts else OTHER,
                same_meaning=same_meaning(judge, predicted, call.reply),
                tokens=score.tokens,
                hits=score.hits,
                loss=score.loss,
            )
            for call, predicted, score in zip(self.calls, written, scores, strict=True)
        ]
        measured = {**prediction_metrics(predictions), **self._calibration()}
        metrics = {f"world_model_eval/{name}": value for name, value in measured.items()}
        examples = [_example(call, made) for call, made in zip(self.calls, predictions, strict=True)]
        return metrics, _of_different_categories(examples, EXAMPLES)

    def _calibration(self) -> dict[str, Any]:
        """How far its certainty can be believed where it matters: of what look-ahead asks about."""
        codec, judge, complete = self._codec, self._environment(), self._backend.complete
        prompts = [codec.question_ids(call.state, call.call) for call in self.asked]
        expected = [codec.decode(ids) for ids in complete(prompts)]
        drawn = sampled_replies(complete, prompts, limit=self._config.world_model.reply_tokens)
        return calibration_metrics(
            [certainty(judge, each, map(codec.decode, some)) for each, some in zip(expected, drawn, strict=True)],
            [same_meaning(judge, each, call.reply) for each, call in zip(expected, self.asked, strict=True)],
        )


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
        plays = [(task, player) for task in tasks for player in EVERY_REPLY]
        rollouts = settings.call_all([partial(_play, environment, *play) for play in plays])
        played = [(task, rollout) for (task, _), rollout in zip(plays, rollouts, strict=True)]
    else:
        tools = None
        played = list(zip(tasks, base_policy(tasks), strict=True))
    played = [(task, rollout) for task, rollout in played if not isinstance(rollout, EnvironmentFailed)]
    made = (call for _, rollout in played for call in observed_calls(rollout, predict=tools))
    return _evenly([*_asked_calls(environment, settings, played), *made], count)


def asked_calls(
    environment: EnvironmentFactory, settings: RunnerSettings, base_policy: PlaysTasks, *, count: int = CALLS
) -> list[ObservedCall]:
    """The first call of each of so many tasks that look-ahead asks about; none where the environment has no such."""
    judge = environment()
    if not isinstance(judge, OffersLookahead):
        return []
    tasks = judge.tasks(SPLIT)[:count]
    if isinstance(judge, PhoneCalls):
        rollouts = settings.call_all([partial(_play, environment, task, EVERY_REPLY[0]) for task in tasks])
    else:
        rollouts = base_policy(tasks)
    played = [each for each in zip(tasks, rollouts, strict=True) if not isinstance(each[1], EnvironmentFailed)]
    return list(_asked_calls(environment, settings, played))


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


def _example(call: ObservedCall, made: Prediction) -> dict[str, Any]:
    return {
        "state": render_state(call.state),
        "action": format_tool_call(call.call),
        "predicted": made.predicted,
        "actual": made.actual,
        "category": made.category,
        "same_meaning": made.same_meaning,
        "token_accuracy": made.token_accuracy,
    }


def _of_different_categories(examples: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The first of each category, then the second of each, and so on."""
    seen: dict[str, int] = {}
    places = []
    for place, example in enumerate(examples):
        seen[example["category"]] = rank = seen.get(example["category"], 0) + 1
        places.append((rank, place))
    return [examples[place] for _, place in sorted(places)[:count]]


# --- scripted players, and what they say and hear ---------------------------------------------------------------------


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
