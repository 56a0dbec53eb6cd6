"""Feedback-guided sampling: the rollouts of a task in two waves, the second shown what the first heard.

What is shown is one exchange of another rollout of the same task, at the point of the task at which it happened, in the
shape of an imagined one: it did not happen in this rollout, no loss sees the reply, and nobody is told of it at an
evaluation. Only the reply is true where look-ahead's is expected.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from lfo.config import RunConfig
from lfo.rollout.row import Feedback, RolloutRequest
from lfo.rollout.tasks import first_wave
from lfo.types import Rollout


def roll_out_in_waves(
    config: RunConfig,
    requests: Sequence[RolloutRequest],
    roll_out: Callable[[Sequence[RolloutRequest]], Sequence[Rollout]],
    *,
    tools: Collection[str] | None,
) -> list[Rollout]:
    """One rollout for each request, in order; `tools` are those whose replies are worth showing, None: all."""
    size, first = config.rollout.group_size, first_wave(config)
    groups = [requests[start : start + size] for start in range(0, len(requests), size)]
    early = list(roll_out([request for group in groups for request in group[:first]]))
    waves = [early[place * first : (place + 1) * first] for place in range(len(groups))]
    heard = [told(wave, tools=tools) for wave in waves]
    if config.feedback == "other_task":
        heard = [*heard[1:], *heard[:1]]
    late = iter(
        roll_out(
            [
                replace(request, feedback=feedback)
                for group, feedback in zip(groups, heard, strict=True)
                for request in group[first:]
            ]
        )
    )
    return [rollout for wave in waves for rollout in (*wave, *(next(late) for _ in range(size - first)))]


def told(rollouts: Sequence[Rollout], *, tools: Collection[str] | None) -> Feedback | None:
    """What the next wave is shown: of all first real calls of such a tool, in rollouts that failed, the one that was
    made after the fewest turns. The less was done before a call, the more its reply tells about what to do."""
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
