"""Run a policy greedily on fixed tasks, and judge what its look-ahead was told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lfo.env.interface import DescribesReplies, EnvironmentFactory
from lfo.evaluation.world_model import same_meaning
from lfo.protocol.chat import ChatCodec
from lfo.rollout.predictors import true_reply_predictor
from lfo.rollout.runner import Predictor, Question, RolloutRequest, Rows, Runner, RunnerSettings
from lfo.types import Rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The rollouts of an evaluation, and every question that look-ahead asked with the reply it was given."""

    rollouts: tuple[Rollout, ...]
    asked: tuple[tuple[Question, str], ...]


def evaluate_tasks(
    tasks: Sequence[Any],
    rows: Rows,
    *,
    environment: EnvironmentFactory,
    codec: ChatCodec,
    settings: RunnerSettings,
    predictor: Predictor | None,
) -> Evaluation:
    """One greedy rollout for each task; `rows` are fresh rows of a sampler."""
    asked: list[tuple[Question, str]] = []

    def noting(questions: Sequence[Question]) -> Sequence[str]:
        assert predictor is not None
        replies = predictor(questions)
        asked.extend(zip(questions, replies, strict=True))
        return replies

    runner = Runner(environment, codec, settings=settings, predictor=noting if predictor else None)
    requests = [RolloutRequest(task=task, seeds=(0,)) for task in tasks]
    rollouts = runner.run(requests, rows, temperature=0.0)
    return Evaluation(rollouts=tuple(rollouts), asked=tuple(asked))


def lookahead_accuracy(
    asked: Sequence[tuple[Question, str]], environment: EnvironmentFactory, settings: RunnerSettings
) -> float | None:
    """How often a predicted reply means what would really have been said; None where nobody can tell."""
    judge = environment()
    if not asked or not isinstance(judge, DescribesReplies):
        return None
    truth = true_reply_predictor(environment, settings)([question for question, _ in asked])
    verdicts = [same_meaning(judge, predicted, actual) for (_, predicted), actual in zip(asked, truth, strict=True)]
    known = [verdict for verdict in verdicts if verdict is not None]
    return fmean(known) if known else None
