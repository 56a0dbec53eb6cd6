"""Random play as rows to train on: every call, and nothing else, is what a base should say.

Random calls, drawn from the schemas or from the moves of the environment, are played in real rollouts of `train`. They
are not filtered by success.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lfo.env.interface import EnvironmentFactory, NamesMoves, tasks_of
from lfo.env.patience import call_all, name_of
from lfo.env.random_play import random_call
from lfo.env.seeds import stream
from lfo.errors import ConfigError, EnvironmentFailed, WorkError
from lfo.protocol.chat import ChatCodec
from lfo.protocol.hermes import format_tool_call
from lfo.tools.pretrain.recipe import PretrainConfig, Progress, end_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_TURNS = 16
ROLLOUTS = 400
MOST_BROKEN = 24  # rollouts that fail at the beginning
TIMEOUT = 30.0  # seconds of one rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class Drill:
    """Rows of random play; `wanted` marks the tokens of calls and their ends."""

    tokens: np.ndarray  # rows x row
    wanted: np.ndarray
    used: frozenset[str]  # ids of the tasks
    turns: int
    rollouts: int
    broken: int  # rollouts in which the environment failed

    @property
    def tasks(self) -> int:
        return len(self.used)


def drill(
    make_environment: EnvironmentFactory,
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainConfig,
    progress: Progress,
    *,
    tasks: Sequence[Any] = (),
    timeout: float = TIMEOUT,
) -> Drill:
    """Play these tasks, or those of train, at random, and encode the rollouts as the policy would see them."""
    environment = make_environment()
    codec, tasks = ChatCodec(tokenizer, environment.tools()), tasks or tasks_of(environment, "train")
    end, config = end_of(tokenizer), replace(config, conversations=config.conversations or ROLLOUTS)
    tokens = np.full((config.conversations, config.row), end, dtype=np.int32)
    wanted = np.zeros(tokens.shape, dtype=bool)
    used: set[str] = set()
    name = name_of(make_environment)
    rows = turns = broken = 0
    for number in range(config.conversations):
        task = tasks[stream(config.seed, "task", number).randrange(len(tasks))]
        game = partial(_rollout, make_environment, codec, task, config, number)
        (outcome,) = call_all([game], timeout=timeout, retries=0, workers=1, what=f"a rollout in {name}")
        if isinstance(outcome, EnvironmentFailed):
            broken += 1
            if not rows and broken in (MOST_BROKEN, config.conversations):
                raise WorkError(f"the first {broken} rollouts of random play failed: {outcome}; see lfo check-env")
            continue
        ids, mask, played = outcome
        used.add(str(task.id))
        if played:
            tokens[rows, : len(ids)], wanted[rows, : len(ids)] = ids, mask
            rows, turns = rows + 1, turns + played
        progress("random play", number + 1, config.conversations, f"{turns} calls")
    if rows < config.batch:
        raise ConfigError(
            f"{config.conversations} rollouts gave {rows} rows with a call, fewer than a batch of {config.batch}: "
            f"an opening and a call must fit into {config.row} tokens; try more --conversations or a larger --row"
        )
    return Drill(
        tokens=tokens[:rows],
        wanted=wanted[:rows],
        used=frozenset(used),
        turns=turns,
        rollouts=config.conversations,
        broken=broken,
    )


def _rollout(
    make_environment: EnvironmentFactory, codec: ChatCodec, task: Any, config: PretrainConfig, number: int
) -> tuple[list[int], list[bool], int]:
    """Return token ids, the mask of the calls, and the number of complete calls."""
    environment = make_environment()
    tools, opening = environment.tools(), tuple(environment.reset(task))
    transcript = "\n".join(message.content for message in opening)
    ids = list(codec.opening(opening).ids)
    mask, played = [False] * len(ids), 0
    for turn in range(MAX_TURNS):
        moves = environment.moves() if isinstance(environment, NamesMoves) else ()
        call = random_call(tools, transcript=transcript, random=stream(config.seed, number, turn), moves=moves)
        message = format_tool_call(call)
        said = [*codec.encode_message(message), codec.end_of_turn]
        if len(ids) + len(said) >= config.row:
            break
        ids, mask, played = [*ids, *said], mask + [True] * len(said), played + 1
        result = environment.step(message)
        if result.done:
            break
        transcript = f"{transcript}\n{result.observation}"
        after = codec.after_action(result.observation, stopped=True).ids
        ids, mask = [*ids, *after], mask + [False] * len(after)
    return ids[: config.row], mask[: config.row], played
