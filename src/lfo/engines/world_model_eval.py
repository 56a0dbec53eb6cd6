"""Examine a world model on the held-out calls: what it writes, and how it takes the true reply, token by token.

    examination = WorldModelExamination(agent, learner)
    metrics, examples = examination.run()

All replies are written in one greedy batch and scored in one forward pass. Nothing is drawn at random and nothing is
trained, so a run is the same with and without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from lfo.agent import Agent
from lfo.evaluation.held_out import CALLS, held_out_calls
from lfo.evaluation.world_model import OTHER, Prediction, prediction_metrics, same_meaning
from lfo.model.learner import Learner
from lfo.model.sampler import Sampler
from lfo.protocol.hermes import format_tool_call
from lfo.protocol.world_model import ObservedCall, render_state
from lfo.rollout.runner import RolloutRequest
from lfo.rollout.samples import world_model_sample
from lfo.types import Rollout

EXAMPLES = 5  # shown of each examination, of different categories as far as there are


class WorldModelExamination:
    def __init__(self, agent: Agent, learner: Learner) -> None:
        self._agent = agent
        self._learner = learner

    @cached_property
    def calls(self) -> list[ObservedCall]:
        """The fixed pool, made at first need; a run that is evaluated on few tasks is examined on few calls."""
        agent = self._agent
        count = min(CALLS, agent.config.eval.tasks)
        return held_out_calls(agent.environment, agent.settings, self._untrained_rollouts, count=count)

    def run(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The metrics under their names in a row, and some examples for a person to read."""
        predictions = self._predictions()
        metrics = {f"world_model_eval/{name}": value for name, value in prediction_metrics(predictions).items()}
        examples = [_example(call, made) for call, made in zip(self.calls, predictions, strict=True)]
        return metrics, _of_different_categories(examples, EXAMPLES)

    def _predictions(self) -> list[Prediction]:
        agent, judge = self._agent, self._agent.environment()
        written = agent.predict([(call.state, call.call) for call in self.calls])
        rows = [agent.world_model_codec.example(call.state, call.call, call.reply) for call in self.calls]
        scores = self._learner.reply_scores(
            [world_model_sample(row, adapters=agent.model.world_model_adapters) for row in rows]
        )
        return [
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

    def _untrained_rollouts(self, tasks: Sequence[Any]) -> list[Rollout]:
        """The bare base plays, blind, with the same random numbers in every run."""
        agent = self._agent
        # A sampler of its own, because the base's merged weights are needed only here.
        sampler = Sampler(agent.model, max_context=agent.sampler.max_context, eos_ids=[agent.codec.end_of_turn])
        requests = [RolloutRequest(task=task, seeds=(0, place), blind=True) for place, task in enumerate(tasks)]
        rows = sampler.session(rows=len(requests), adapters=())
        return agent.runner(lookahead=False).run(requests, rows, temperature=1.0)


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
