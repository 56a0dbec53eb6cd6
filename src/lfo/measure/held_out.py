"""Evaluate a world model on held-out calls: a fixed pool of (state, call, true reply), the same in every run.

The pool depends only on the environment, not on the seed, the policy or the step, so that the curves of all runs can be
compared. In the phone-call world scripted players make the calls, so that every kind of reply occurs; in any other
environment the untrained base plays. Calls that look-ahead asks about are added, if the environment names some.

The tasks are the first of `val`. Training draws none of them, but it may draw tasks that get the same replies. In the
phone-call world half of the tasks of `val` on level 2 have a company and a service of one of the first 480 training
tasks, so what a rep wants for them may have been learned, in other words (docs/RESULTS.md).

All replies are generated in one greedy batch and scored in one forward pass. Nothing is trained, so a run is the same
with and without this evaluation.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

from lfo.backend import Backend
from lfo.config import RunConfig
from lfo.env.answers import asked_call
from lfo.env.interface import (
    Environment,
    EnvironmentFactory,
    HasScriptedPlayers,
    OffersLookahead,
    describe_with,
    predicted_tools,
    same_meaning,
    tasks_of,
)
from lfo.env.recorder import Recorder
from lfo.errors import EnvironmentFailed
from lfo.measure.world_model import OTHER, Prediction, lost_tokens, prediction_metrics
from lfo.play.episode import RolloutRequest
from lfo.play.look_ahead import Question
from lfo.play.predictors import true_reply_predictor
from lfo.play.records import rollout_from_texts, transcripts
from lfo.play.runner import RunnerConfig
from lfo.protocol.hermes import format_tool_call
from lfo.protocol.world_model import (
    TARGET_TOKENS,
    ObservedCall,
    WorldModelCodec,
    is_observed_call,
    observed_calls,
    render_state,
)
from lfo.rows.samples import world_model_sample
from lfo.types import Rollout

SPLIT = "val"
TASKS = 24
CALLS = 64
EXAMPLES = 5  # saved predictions of each evaluation, of different categories if possible

PlaysTasks = Callable[[Sequence[Any]], Sequence[Rollout]]


class Examination:
    """Evaluates the world model of a run on the held-out calls: its replies, and its scores of the true ones."""

    def __init__(
        self,
        config: RunConfig,
        make_environment: EnvironmentFactory,
        codec: WorldModelCodec,
        backend: Backend,
        adapters: tuple[str, ...],
    ) -> None:
        self._config, self._make_environment, self._codec = config, make_environment, codec
        self._runner_config = RunnerConfig.of_run(config)
        self._backend, self._adapters = backend, adapters

    @cached_property
    def calls(self) -> list[ObservedCall]:
        """The fixed pool, created on first use; smaller if `eval.tasks` is small."""
        count = min(CALLS, self._config.eval.tasks)
        return held_out_calls(self._make_environment, self._runner_config, self._untrained, count=count)

    def _untrained(self, tasks: Sequence[Any]) -> list[Rollout]:
        """Play with the base, without look-ahead, with the same random numbers in every run."""
        requests = [RolloutRequest(task=task, seeds=(0, index), look_ahead=False) for index, task in enumerate(tasks)]
        return self._backend.roll_out(requests, temperature=1.0, untrained=True)

    def lost_tokens(self, rollouts: Sequence[Rollout], predict: Collection[str] | None) -> dict[str, float]:
        """Return which share of the replies the world model neither learns nor predicts, because they are too long."""
        world = self._config.world_model
        turns = (turn for rollout in rollouts for turn in rollout.turns if is_observed_call(turn, predict))
        lengths = [self._codec.length(turn.observation) for turn in turns]
        return lost_tokens(lengths, learned=max(TARGET_TOKENS, world.reply_tokens), predicted=world.reply_tokens)

    def run(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the metrics for a row, and some predictions to read."""
        codec, judge = self._codec, self._runner_config.ask(self._make_environment)
        prompts = [codec.question_ids(call.state, call.call) for call in self.calls]
        written = [codec.decode(ids) for ids in self._backend.complete(prompts)]
        examples = [codec.example(call.state, call.call, call.reply) for call in self.calls]
        scores = self._backend.score([world_model_sample(each, adapters=self._adapters) for each in examples])
        pairs = [(predicted, call.reply) for predicted, call in zip(written, self.calls, strict=True)]
        verdicts = self._runner_config.ask(lambda: [same_meaning(judge, *pair) for pair in pairs])
        predictions = [
            Prediction(
                predicted=predicted,
                actual=call.reply,
                category=call.facts.category if call.facts else OTHER,
                same_meaning=verdict,
                tokens=score.tokens,
                hits=score.hits,
                loss=score.loss,
            )
            for call, predicted, verdict, score in zip(self.calls, written, verdicts, scores, strict=True)
        ]
        metrics = {f"world_model_eval/{name}": value for name, value in prediction_metrics(predictions).items()}
        examples = [_example(call, made) for call, made in zip(self.calls, predictions, strict=True)]
        return metrics, _of_different_categories(examples, EXAMPLES)


def held_out_calls(
    make_environment: EnvironmentFactory, runner_config: RunnerConfig, base_policy: PlaysTasks, *, count: int = CALLS
) -> list[ObservedCall]:
    """Return at most `count` different calls, distributed over the kinds of replies as evenly as possible.

    `base_policy` returns one rollout of the untrained base for each task, in order, always the same.
    """
    judge = runner_config.ask(make_environment)
    tasks = runner_config.ask(lambda: tasks_of(judge, SPLIT)[:TASKS])
    if isinstance(judge, HasScriptedPlayers):
        tools = predicted_tools(judge)
        plays = [(task, player) for task in tasks for player in judge.scripted_players()]
        rollouts = runner_config.call_all([partial(_play, make_environment, *play) for play in plays])
        played = [(task, rollout) for (task, _), rollout in zip(plays, rollouts, strict=True)]
    else:
        tools = None
        played = list(zip(tasks, base_policy(tasks), strict=True))
    played = [(task, rollout) for task, rollout in played if not isinstance(rollout, EnvironmentFailed)]
    made = (call for _, rollout in played for call in observed_calls(rollout, predict=tools))
    return _evenly([*_asked_calls(make_environment, runner_config, played), *made], count)


def _asked_calls(
    make_environment: EnvironmentFactory, runner_config: RunnerConfig, played: Sequence[tuple[Any, Rollout]]
) -> Iterator[ObservedCall]:
    """Yield the first call of each rollout that look-ahead would ask about, with its true reply."""
    judge = runner_config.ask(make_environment)
    if not isinstance(judge, OffersLookahead):
        return
    answers = runner_config.call_all([partial(_question, judge, *play) for play in played])
    questions = [answer for answer in answers if isinstance(answer, Question)]
    for question, reply in zip(
        questions, true_reply_predictor(make_environment, runner_config)(questions), strict=True
    ):
        if reply:
            facts = describe_with(judge, reply)
            yield ObservedCall(state=question.state, call=question.call, reply=reply, facts=facts, asked=True)


def _question(judge: Environment, task: Any, rollout: Rollout) -> Question | None:
    for turns, transcript in transcripts(rollout):
        call = asked_call(judge, transcript)
        if call is not None:
            return Question.at(task, rollout.opening, turns, call)
    return None


def _evenly(calls: Iterable[ObservedCall], count: int) -> list[ObservedCall]:
    """Take one of each kind in turn, each call once; calls that look-ahead asks about are a separate kind."""
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
    """Return the first of each category, then the second of each, and so on."""
    seen: dict[str, int] = {}
    indices = []
    for index, example in enumerate(examples):
        seen[example["category"]] = rank = seen.get(example["category"], 0) + 1
        indices.append((rank, index))
    return [examples[index] for _, index in sorted(indices)[:count]]


def _play(make_environment: EnvironmentFactory, task: Any, player: Callable[[Any, Any], float]) -> Rollout:
    environment = make_environment()
    opening = environment.reset(task)
    recorder = Recorder(environment)
    reward = player(recorder, task)
    return rollout_from_texts(
        environment, task_id=task.id, opening=opening, exchanges=recorder.exchanges, reward=reward
    )
