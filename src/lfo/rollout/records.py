"""Rollouts as JSON that a person, a page or another program can read; and back."""

from __future__ import annotations

from typing import Any

from lfo.types import Rollout


def rollout_record(rollout: Rollout) -> dict[str, Any]:
    """Everything but the tokens."""
    return {
        "task_id": rollout.task_id,
        "reward": rollout.reward,
        "stop": rollout.stop.value,
        "error": rollout.error,
        "blind": rollout.blind,
        "level": rollout.info.get("level"),
        "opening": [{"role": message.role, "content": message.content} for message in rollout.opening],
        "turns": [
            {
                "predicted": turn.predicted,
                "action": turn.action,
                "observation": turn.observation,
                "tool": turn.call.name if turn.call else None,
                "category": turn.facts.category if turn.facts else None,
                "facts": list(turn.facts.facts) if turn.facts else [],
            }
            for turn in rollout.turns
        ],
    }
