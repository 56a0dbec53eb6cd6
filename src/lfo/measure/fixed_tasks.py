"""Evaluate a policy on fixed tasks, greedily and with samples, and measure its look-ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any, Protocol

from lfo.config import RunConfig
from lfo.env.interface import DescribesReplies, EnvironmentFactory, OffersLookahead, same_meaning, tasks_of
from lfo.env.patience import name_of
from lfo.errors import EnvironmentFailed
from lfo.measure.repeated_tasks import judge
from lfo.measure.success import draft_metrics, rollout_metrics
from lfo.play.episode import RolloutRequest
from lfo.play.look_ahead import imagined, questions
from lfo.play.predictors import true_reply_predictor
from lfo.play.records import rollout_record, transcript_at
from lfo.play.runner import RunnerConfig, refuse_dead_environment
from lfo.statistics import paired_difference
from lfo.types import Rollout, RolloutGroup

FEW = 32  # tasks that are played in one batch, with look-ahead and without
SAMPLE_ROLLOUTS = 4  # of each split, saved for people to read


class Acts(Protocol):
    """`lfo.agent.Agent`."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def make_environment(self) -> EnvironmentFactory: ...
    @property
    def roll_out(self) -> Callable[..., list[Rollout]]: ...


def evaluate_splits(
    config: RunConfig,
    make_environment: EnvironmentFactory,
    splits: Sequence[str],
    roll_out: Callable[..., list[Rollout]],
    *,
    look_ahead: bool = True,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return metrics of greedy rollouts on the fixed tasks of each split, and some rollouts to read.

    `roll_out` is that of a backend. A run with look-ahead is also evaluated without it, which shows what the weights of
    the policy know. `look_ahead`: whether it has not ended.
    """
    sighted, asks = config.looks_ahead and look_ahead, RunnerConfig.of_run(config).ask
    row: dict[str, Any] = {}
    records: list[dict[str, Any]] = []
    for split in splits:
        what = f"tasks of {name_of(make_environment)}"
        tasks = asks(lambda split=split: tasks_of(make_environment(), split)[: config.eval.tasks], what)
        rollouts, alone = _played(config, tasks, sighted, roll_out)
        refuse_dead_environment(rollouts)
        metrics = rollout_metrics(rollouts) | draft_metrics(rollouts)
        if config.looks_ahead:
            metrics["success_blind"] = fmean(rollout.reward for rollout in alone)
        if sighted:
            metrics["drafts_informative"] = informative_drafts(config, make_environment, rollouts)
        if sighted and not config.source.is_true:
            metrics["lookahead_accuracy"] = lookahead_accuracy(config, make_environment, tasks, rollouts)
        row |= {f"eval/{split}/{name}": value for name, value in metrics.items()}
        records += [{"split": split, **rollout_record(rollout)} for rollout in rollouts[:SAMPLE_ROLLOUTS]]
    return row, records


def _played(
    config: RunConfig, tasks: Sequence[Any], sighted: bool, roll_out: Callable[..., list[Rollout]]
) -> tuple[list[Rollout], list[Rollout]]:
    """Return a greedy rollout of each task with look-ahead, if `sighted`, and one without, which is the same if not.

    Both run in one batch, where rows with equal tokens are computed once: the two rollouts of a task are the same until
    the first prediction. Many tasks run in two batches, so that no more rows need memory at once than there are tasks.
    """
    alone = [RolloutRequest(task=task, seeds=(0,), look_ahead=False) for task in tasks]
    if not sighted:
        played = roll_out(alone, temperature=0.0)
        return played, played
    player = "base" if config.looks_ahead_untrained else "policy"
    middle = len(tasks) // 2 if len(tasks) > FEW else 0
    looking: list[Rollout] = []
    blind: list[Rollout] = []
    for part in filter(None, (alone[:middle], alone[middle:])):
        both = [*(replace(request, look_ahead=True, player=player) for request in part), *part]
        played = roll_out(both, temperature=0.0)
        looking += played[: len(part)]
        blind += played[len(part) :]
    return looking, blind


def informative_drafts(
    config: RunConfig, make_environment: EnvironmentFactory, rollouts: Sequence[Rollout]
) -> float | None:
    """Return the share of rollouts that kept an imagined call which the environment's `lookahead_query` also names;
    None if it names none or fails. For evaluation only."""
    judge = RunnerConfig.of_run(config).ask(make_environment)
    if not isinstance(judge, OffersLookahead):
        return None

    def asks(rollout: Rollout) -> bool:
        drafts = [(index, turn.call) for index, turn in enumerate(rollout.turns) if turn.imagined]
        return any(call in questions(judge, transcript_at(rollout, index)) for index, call in drafts)

    verdicts = RunnerConfig.of_run(config).call_all([partial(asks, rollout) for rollout in rollouts])
    known = [verdict for verdict in verdicts if not isinstance(verdict, EnvironmentFailed)]
    return fmean(known) if known else None


def evaluate(
    agent: Acts,
    tasks: Sequence[Any],
    *,
    k: int,
    lookahead: bool = True,
    seed: int = 0,
    on_rollouts: Callable[[int], None] = lambda ended: None,
) -> dict[str, Any]:
    """Return `{"greedy": ..., "sampled": ...}`, each from `repeated_tasks.judge`, for `lfo eval`."""
    levels = [getattr(task, "level", None) for task in tasks]
    greedy = agent.roll_out(tasks, greedy=True, lookahead=lookahead, on_batch=on_rollouts)
    refuse_dead_environment(greedy)
    config = agent.config
    accuracy = None
    if lookahead and config.looks_ahead and not config.source.is_true:
        accuracy = lookahead_accuracy(config, agent.make_environment, tasks, greedy)
    sampled = agent.roll_out(tasks, greedy=False, lookahead=lookahead, samples=k, seed=seed, on_batch=on_rollouts)
    refuse_dead_environment(sampled)
    result = {"greedy": judge(_groups(greedy, 1), levels), "sampled": judge(_groups(sampled, k), levels)}
    if accuracy is not None:
        result["greedy"]["behaviour"]["lookahead_accuracy"] = accuracy
    result["greedy"]["solved"] = [rollout.succeeded for rollout in greedy]
    return result


def evaluate_paired(
    agent: Acts,
    tasks: Sequence[Any],
    solved_by_first: Sequence[bool],
    *,
    lookahead: bool = True,
    on_rollouts: Callable[[int], None] = lambda ended: None,
) -> dict[str, Any]:
    """Compare a second agent with a first one on the same tasks, each played greedily once.

    Returns the result of `paired_difference`: `{"rate": 0.81, "difference": 0.03, "interval": [0.011, 0.049], ...}`.
    """
    rollouts = agent.roll_out(tasks, greedy=True, lookahead=lookahead, on_batch=on_rollouts)
    refuse_dead_environment(rollouts)
    return paired_difference(solved_by_first, [rollout.succeeded for rollout in rollouts])


def lookahead_accuracy(
    config: RunConfig, make_environment: EnvironmentFactory, tasks: Sequence[Any], rollouts: Sequence[Rollout]
) -> float | None:
    """Return how often a predicted reply that stayed means the same as the true one; None if it is unknown."""
    runner_config = RunnerConfig.of_run(config)
    judge_of_replies = runner_config.ask(make_environment)
    asked = [pair for task, rollout in zip(tasks, rollouts, strict=True) for pair in imagined(rollout, task)]
    if not asked or not isinstance(judge_of_replies, DescribesReplies):
        return None
    truth = true_reply_predictor(make_environment, runner_config)([question for question, _ in asked])
    pairs = [(predicted, actual) for (_, predicted), actual in zip(asked, truth, strict=True)]
    verdicts = runner_config.ask(lambda: [same_meaning(judge_of_replies, *pair) for pair in pairs])
    known = [verdict for verdict in verdicts if verdict is not None]
    return fmean(known) if known else None


def _groups(rollouts: Sequence[Rollout], size: int) -> list[RolloutGroup]:
    """Group rollouts that are ordered by task."""
    parts = [tuple(rollouts[start : start + size]) for start in range(0, len(rollouts), size)]
    return [RolloutGroup(task_id=part[0].task_id, rollouts=part) for part in parts]
