"""What a run does when the rules of its environment change: it notices, says so, and forgets what it heard before.

A run that starts from another one (`init_from`) in the same world goes on with what that run has heard.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from lfo.checkpoints import is_checkpoint, newest_checkpoint, reading, refuse_damage
from lfo.config import RunConfig, from_yaml
from lfo.env.interface import Environment
from lfo.errors import EnvironmentFailed
from lfo.play.fresh import right_in
from lfo.play.memory_first import MemoryFirst
from lfo.play.reply_store import FILE as MEMORY_FILE
from lfo.play.reply_store import ReplyStore
from lfo.rows.replay import ReplayBuffer
from lfo.rows.samples import MiniBatches
from lfo.runs.folder import run_folder
from lfo.runs.rule_change import NOTICED, Watch
from lfo.types import RolloutGroup, StepPlan

REPLAY_FILE, STATE_FILE = "replay.safetensors", "state.json"  # of a checkpoint
FORGOTTEN = "what was heard before is forgotten"
Store = ReplyStore | MemoryFirst


def heed(
    watch: Watch,
    groups: Sequence[RolloutGroup],
    step: int,
    *,
    judge: Environment,
    asks: Callable[[Callable[[], list[float]]], list[float]],
) -> dict[str, Any]:
    """Compare the predictions of a step with what was really heard, before that is learned; return the metrics, with an
    alarm if one rings."""
    try:
        tested = [asks(lambda group=group: right_in(judge, group)) for group in groups]
    except EnvironmentFailed:  # it cannot describe a reply: there is nothing to compare
        return {}
    right = [fmean(each) for each in tested if each]
    if not right:
        return {}
    noticed = watch.hear(step=step, tasks=len(right), right=sum(right))
    figures = {"fresh_tasks": len(right), "fresh_right": fmean(right), "fresh_doubt": watch.doubt}
    if noticed is None:
        return figures
    return {**figures, NOTICED: asdict(noticed), "warnings": [f"{noticed.words}; {FORGOTTEN}"]}


def without_probes(plan: StepPlan, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Return the groups without rollouts that were shown true replies: those say nothing about predictions."""
    if "probe" not in plan.kinds:
        return list(groups)
    kept = [index for index, kind in enumerate(plan.kinds) if kind != "probe"]
    return [replace(group, rollouts=tuple(group.rollouts[index] for index in kept)) for group in groups]


def forget(mini_batches: MiniBatches, store: Store | None, before: int) -> None:
    """Forget replies and successes of before a step, so that none contradicts what holds since."""
    mini_batches.replay = mini_batches.replay.without(before)
    mini_batches.successes.forget(before)
    if store is not None:
        store.forget(before)


def go_on_from(config: RunConfig, mini_batches: MiniBatches, store: Store | None) -> Watch:
    """Take over what the run `init_from` has heard, if it is a run in the same world; return its watch.

    If only `env_args` differ, the world may be another one: then its watch alone is taken over.
    """
    folder = _checkpoint_to_go_on_from(config)
    if folder is None:
        return Watch()
    if same_world(config, folder):
        if config.world_model.from_logs is None and config.world_model.replay:
            with reading(folder / REPLAY_FILE) as file:
                mini_batches.replay = ReplayBuffer.load(file).aged()
        if store is not None and (folder / MEMORY_FILE).is_file():
            store.load(folder / MEMORY_FILE)
            store.age()
    with reading(folder / STATE_FILE) as file:
        watch = Watch(**json.loads(file.read_text(encoding="utf-8")).get("watch", {}))
    watch.settle()
    return watch


def same_world(config: RunConfig, checkpoint: Path) -> bool:
    """Whether the run of a checkpoint had the environment of this config, with the same arguments."""
    return from_yaml(run_folder(checkpoint) / "config.yaml", known_only=True).env_args == config.env_args


def _checkpoint_to_go_on_from(config: RunConfig) -> Path | None:
    path = Path(config.init_from or "")
    saved = run_folder(path) / "config.yaml"
    if not config.init_from or not saved.is_file():
        return None
    folder = path if is_checkpoint(path) else newest_checkpoint(path)
    if folder is None or not (folder / REPLAY_FILE).is_file():
        return None
    refuse_damage(folder)
    before = from_yaml(saved, known_only=True)
    same = (before.env, before.model, before.lookahead_source) == (config.env, config.model, config.lookahead_source)
    return folder if same and before.world_model.predict == config.world_model.predict else None
