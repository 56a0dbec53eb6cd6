"""Feedback-guided sampling: run the rollouts of a task in two waves and show the second what the first received.

A rollout of the second wave sees one exchange of another rollout of its task, at the same turn as there.
The exchange has the format of an imagined one: no loss trains the reply, and evaluations use no feedback. The only
difference is that the reply is true, not predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from lfo.play.episode import Feedback, RolloutRequest
from lfo.types import Rollout, StepPlan


def roll_out_in_waves(
    plan: StepPlan,
    requests: Sequence[RolloutRequest],
    roll_out: Callable[[Sequence[RolloutRequest]], Sequence[Rollout]],
    *,
    tools: Collection[str] | None,
) -> list[Rollout]:
    """Return one rollout for each request, in order; only replies of `tools` are shown (None: all)."""
    size, first = len(plan.seats), plan.first_wave
    groups = [requests[start : start + size] for start in range(0, len(requests), size)]
    early = list(roll_out([request for group in groups for request in group[:first]]))
    waves = [early[index * first : (index + 1) * first] for index in range(len(groups))]
    feedbacks = [feedback_from(wave, tools=tools) for wave in waves]
    if plan.feedback == "other_task":
        feedbacks = _of_another_task([wave[0].task_id for wave in waves], feedbacks)
    late = iter(
        roll_out(
            [
                replace(request, feedback=feedback)
                for group, feedback in zip(groups, feedbacks, strict=True)
                for request in group[first:]
            ]
        )
    )
    return [rollout for wave in waves for rollout in (*wave, *(next(late) for _ in range(size - first)))]


def _of_another_task(task_ids: Sequence[str], feedbacks: Sequence[Feedback | None]) -> list[Feedback | None]:
    """Give each group the feedback of the next group with another task; None if all groups have the same task.

    An environment with few tasks may have the same task twice in one draw.
    """
    shown: list[Feedback | None] = []
    for index, own in enumerate(task_ids):
        following = (*range(index + 1, len(task_ids)), *range(index))
        shown.append(next((feedbacks[other] for other in following if task_ids[other] != own), None))
    return shown


def feedback_from(rollouts: Sequence[Rollout], *, tools: Collection[str] | None) -> Feedback | None:
    """Return the exchange to show: of the first real calls of `tools` in failed rollouts, the earliest one.

    The earlier a call is made, the more its reply says about what still has to be done.
    """
    found: list[Feedback] = []
    for rollout in rollouts:
        real = [turn for turn in rollout.turns if not turn.predicted]
        calls = [
            Feedback(after=index, action=turn.action, observation=turn.observation)
            for index, turn in enumerate(real)
            if turn.call is not None and turn.observation and (tools is None or turn.call.name in tools)
        ]
        if calls and not rollout.succeeded:
            found.append(calls[0])
    return min(found, key=lambda each: each.after, default=None)
