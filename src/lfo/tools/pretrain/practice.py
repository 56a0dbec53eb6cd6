"""What a base practises in an environment: random play, and reading where replies say what to do.

    practise(make_environment, tokenizer, config, form=..., progress=...) -> Practice

Half of the rows say nothing of what to do: rollouts of random play, and random decisive calls after look-ups. The other
half shows a reply that names it. Rows are as long as the rollouts need; steps are as many as the budget of tokens
allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lfo.env.answers import id_of, tools_of
from lfo.env.interface import EnvironmentFactory, tasks_of
from lfo.env.patience import ask
from lfo.errors import ConfigError
from lfo.protocol.chat import ChatCodec
from lfo.protocol.shown import ShownForm
from lfo.protocol.world_model import WorldModelCodec
from lfo.tools.pretrain.drill import TIMEOUT, Drill, drill
from lfo.tools.pretrain.exploring import explore
from lfo.tools.pretrain.lessons import Experience
from lfo.tools.pretrain.reading import Reading, Row
from lfo.tools.pretrain.recipe import PretrainConfig, Progress, end_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENS = 1_400_000  # of all batches: four minutes on a core, with the embedded base
FEWER_TOKENS = 700_000  # for the general base, which reads already
STEPS = (150, 900)  # fewest and most
PLAYED = 0.125  # share of rows that are rollouts of random play, where there is something to read
FEWEST_ROWS = 0.5  # least share of practice rows for which there is room


@dataclass(frozen=True, kw_only=True, slots=True)
class Practice:
    """Rows to train on, for how many steps, and what it took to make them."""

    tokens: np.ndarray  # rows x longest row
    wanted: np.ndarray  # which of them the base says
    steps: int
    figures: Mapping[str, Any]
    warnings: tuple[str, ...] = ()


def practise(
    make_environment: EnvironmentFactory,
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainConfig,
    *,
    form: ShownForm,
    progress: Progress,
    reading: bool = True,
    timeout: float = TIMEOUT,
    budget: int = TOKENS,
) -> Practice:
    """Play in the environment and return the rows; `config.steps` 0: as many steps as the budget allows."""
    end, warnings = end_of(tokenizer), []
    rows: list[Row] = []
    tasks: list[Any] = []
    found, figures = None, {}
    if reading:
        progress("finding out", 0, 1, "")
        environment = ask(make_environment, timeout=timeout)
        every = tasks_of(environment, "train")
        found = explore(make_environment, every, timeout=timeout, seed=config.seed)
        tasks = [task for task in every if id_of(task) in found.used]  # no other ones: each is charged
        progress("finding out", 1, 1, f"{found.rollouts:,} rollouts, success in {found.solved} of {found.tasks} tasks")
        warnings += _warnings(found)
    readable = found is not None and bool(found.explained or found.looks)
    if found is not None and readable and not config.conversations:
        config = replace(config, conversations=found.tasks)
    played = drill(make_environment, tokenizer, config, progress, tasks=tasks, timeout=timeout)
    rows = _trimmed(played)
    steps = config.steps or _steps(rows, config, budget)
    if readable:
        assert found is not None
        codec = ChatCodec(tokenizer, tools_of(make_environment()))
        maker = Reading(
            experience=found,
            tools=codec.tools,
            codec=codec,
            world_model=WorldModelCodec(tokenizer, state_tokens=config.row),
            form=form,
            seed=config.seed,
        )
        sample = maker.rows(64, config.row)
        if len(sample) < FEWEST_ROWS * 64:
            raise ConfigError(
                f"{64 - len(sample)} of 64 practice rows are longer than {config.row} tokens; try a larger --row"
            )
        steps = config.steps or _steps(sample, config, budget)
        made = maker.rows(math.ceil(steps * config.batch * (1 - PLAYED)), config.row)
        share = math.ceil(len(made) * PLAYED / (1 - PLAYED))
        rows = [*made, *(rows[index % len(rows)] for index in range(share))]
        figures = {"longest_state": maker.longest_state()}
    figures = {**_figures(found, played), **figures, "rows": len(rows), "steps": steps}
    return Practice(steps=steps, figures=figures, warnings=tuple(warnings), **_arrays(rows, end))


def _steps(rows: list[Row], config: PretrainConfig, budget: int) -> int:
    """Return how many steps the budget of tokens allows; a batch is as long as its longest row."""
    longest = np.sort([len(tokens) for tokens, _ in rows])[-max(1, len(rows) // config.batch) :].mean()
    fewest, most = STEPS
    return int(min(most, max(fewest, budget / (longest * config.batch))))


def _trimmed(played: Drill) -> list[Row]:
    """Return the rows of random play up to their last call: what follows it changes nothing."""
    rows = []
    for tokens, wanted in zip(played.tokens, played.wanted, strict=True):
        length = int(np.flatnonzero(wanted)[-1]) + 1
        rows.append((tokens[:length].tolist(), wanted[:length].tolist()))
    return rows


def _arrays(rows: list[Row], end: int) -> dict[str, np.ndarray]:
    longest = max(len(tokens) for tokens, _ in rows)
    tokens, wanted = np.full((len(rows), longest), end, dtype=np.int32), np.zeros((len(rows), longest), dtype=bool)
    for index, (ids, mask) in enumerate(rows):
        tokens[index, : len(ids)], wanted[index, : len(ids)] = ids, mask
    return {"tokens": tokens, "wanted": wanted}


def _figures(found: Experience | None, played: Drill) -> dict[str, Any]:
    figures = {"tasks": played.tasks, "rollouts": played.rollouts, "calls": played.turns, "broken": played.broken}
    if found is None:
        return figures
    explained = found.explained
    return {
        **figures,
        "tasks": len(found.used | played.used),
        "rollouts": played.rollouts + found.rollouts,
        "broken": played.broken + found.broken,
        "solved": found.solved,
        "lessons": len(explained),
        "unverified": sum(not lesson.verified for lesson in explained),
        "look_ups": found.looks,
    }


def _warnings(found: Experience) -> list[str]:
    explained = found.explained
    if not explained:
        return [
            f"no reply in {found.rollouts:,} rollouts names what would have been right, so there is nothing to read: "
            "the base practises the syntax of calls only"
        ]
    if not any(lesson.verified for lesson in explained):
        return [
            f"no call succeeded in {found.rollouts:,} rollouts, so the base practises to use what replies name, "
            "unverified; if a task needs several calls or values that no reply names, look-ahead will not help it"
        ]
    return []
