"""Trainings on verl in one process, run by tests/test_verl_fit.py; not a test.

    python tests/verl_fits.py FOLDER

Writes run folders, and other results to FOLDER/results.json.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from lfo.config import RunConfig, load_config
from lfo.engines import create_trainer
from lfo.engines.verl import config as engine_config
from lfo.env.worlds.oracle import OracleCodes
from lfo.errors import WorkError
from lfo.play.ending_tools import EndingTools
from lfo.play.episode import RolloutRequest
from lfo.play.records import rollout_record
from lfo.protocol.shown import SHOWN_FORMS
from lfo.protocol.world_model import WorldModelCodec
from lfo.types import Rollout
from small_runs import SMALL, requests_of, tokenizer
from verl_worlds import TalkativeWorld, ToolWorld, form_requests, shown, told_requests

FOLDER = Path(sys.argv[1])
RESULTS: dict[str, Any] = {}


def config(*overrides: str) -> RunConfig:
    return load_config([*SMALL, "engine=verl", *overrides])


def described(rollout: Rollout) -> dict[str, Any]:
    """A rollout as the tests read it, with what the world model would be trained to say."""
    codec = WorldModelCodec(tokenizer(), state_tokens=config().world_model.state_tokens)
    return {
        "tokens": rollout.tokens,
        "record": rollout_record(replace(rollout, taken_back=())),  # as many turns as spans
        "spans": [(turn.observation_start, turn.observation_end) for turn in rollout.turns],
        "targets": [
            [token for token, weight in zip(example.tokens, example.token_weights, strict=True) if weight]
            for example in codec.examples_of(rollout, predict=None)
        ],
    }


def steps_beside_the_local_engine() -> None:
    """Three steps, rows and rollouts as they are; then servers that are not told of the new weights."""
    trainer = create_trainer(
        config("rollout.group_size=8", "policy.max_resamples=1", "steps=6", "seed=1"),
        TalkativeWorld,
        tokenizer(),
    )
    backend: Any = trainer.backend
    with backend.running(FOLDER):
        cluster = backend.cluster
        RESULTS["forms"] = rollouts_in_every_form(trainer, cluster)
        RESULTS["tokenizer"] = cluster._config.actor_rollout_ref.model.tokenizer_path
        rollouts: list[Any] = []
        roll_out = backend.roll_out

        def noting(requests: Sequence[Any], **options: Any) -> list[Any]:
            found = roll_out(requests, **options)
            rollouts.extend(found)
            return found

        backend.roll_out = noting
        RESULTS["rows"] = [trainer.step(step) for step in range(2)]
        cluster.after_learning = lambda step: None
        RESULTS["rows"].append(trainer.step(2))
        RESULTS["rollouts"] = [described(rollout) for rollout in rollouts]
        try:
            for step in range(3, 6):  # only a step that trains the policy can tell
                trainer.step(step)
            RESULTS["stale"] = "nobody noticed"
        except WorkError as error:
            RESULTS["stale"] = str(error)
        RESULTS["through_tools"] = rollouts_through_verls_tools(trainer, cluster)
        requests = requests_of(trainer.config, trainer.make_environment())
        told = roll_out(told_requests(requests), temperature=0.0)
        RESULTS["told"] = [[each.tokens, each.untrained, each.feedback, shown(each)] for each in told]
        played = roll_out(requests)
        RESULTS["imagine"] = [[request.imagine for request in requests], [each.imagine for each in played]]
        backend.ending_tools = EndingTools()  # it has heard nothing, so nothing may be imagined
        RESULTS["imagined"] = [drafts_in(played), drafts_in(roll_out(requests))]


def drafts_in(rollouts: Sequence[Rollout]) -> int:
    return sum(turn.predicted for rollout in rollouts for turn in (*rollout.turns, *rollout.taken_back))


def looped(trainer: Any, cluster: Any, parts: Any, requests: Sequence[RolloutRequest], **more: Any) -> list[Rollout]:
    """The rollouts of an agent loop in this process that shares these parts."""
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap

    from lfo.engines.verl import agent_loop

    tree = cluster._config
    agent_loop._parts[_server_of(tree)] = parts
    player = cast(Any, agent_loop.RunnerLoop)(
        DictConfigWrap(tree), cluster._client, tokenizer(), None, None, DictConfigWrap(tree.data)
    )
    found = []
    for request in requests:
        fields = {
            "session_id": 0,
            "uid": "loop",
            "adapter": ["policy"],
            "looks_ahead": True,
            "temperature": None,
            "task": request.task,
            "requests": [asdict(replace(request, task=None))],
            "tools": None,
        }
        found.append(asyncio.run(player.run({"temperature": 1.0}, **(fields | more))).rollout)
    return found


def _server_of(tree: Any) -> str:
    return tree.actor_rollout_ref.rollout.engine_kwargs[engine_config.SAMPLER].servers


def rollouts_in_every_form(trainer: Any, cluster: Any) -> dict[str, list[list[Any]]]:
    """Greedily, before anything is trained; some requests are told what another rollout has heard."""
    from lfo.engines.verl import agent_loop

    parts, found = agent_loop._parts_of(cluster._config, tokenizer()), {}
    requests = form_requests(requests_of(trainer.config, trainer.make_environment()))
    for form in SHOWN_FORMS:
        told = replace(parts, runner_config=replace(parts.runner_config, form=form))
        rollouts = looped(trainer, cluster, told, requests, temperature=0.0)
        found[form] = [[each.tokens, each.origins, rollout_record(each)] for each in rollouts]
    agent_loop._parts[_server_of(cluster._config)] = parts
    return found


def rollouts_through_verls_tools(trainer: Any, cluster: Any) -> dict[str, list[dict[str, Any]]]:
    """The same agent loop in a world that answers by way of verl's tools: with our limit, and with verl's own."""
    from lfo.engines.verl import agent_loop

    tree = cluster._config
    limits = {
        "ours": tree.actor_rollout_ref.rollout.multi_turn,
        "verl's": engine_config._defaults().actor_rollout_ref.rollout.multi_turn,
    }
    parts = agent_loop._parts_of(tree, tokenizer())
    requests = requests_of(trainer.config, trainer.make_environment())[:4]
    found = {}
    for whose, limit in limits.items():
        through = replace(parts, make_environment=partial(ToolWorld, limit=limit))
        found[whose] = [described(each) for each in looped(trainer, cluster, through, requests)]
    return found


def two_ranks_in_another_world() -> None:
    """In another world, with replies told in words."""
    chosen = config(
        "imagine.form=user",
        "coupling=shared",
        "world_model.predict=all",
        "policy.max_resamples=-1",  # every group trains, so that log-probs are compared in every step
        "eval.every=1",
        "steps=2",
        "verl.trainer.n_gpus_per_node=2",
        f"output_dir={FOLDER / 'oracle'}",
    )
    trainer = create_trainer(chosen, OracleCodes, tokenizer())
    roll_out, rollouts = trainer.backend.roll_out, []

    def noting(requests: Sequence[Any], **options: Any) -> list[Any]:
        found = roll_out(requests, **options)
        rollouts.extend(found)
        return found

    trainer.backend.roll_out = noting  # type: ignore[method-assign]
    RESULTS["oracle"] = trainer.fit()
    RESULTS["words"] = [
        [any(turn.predicted for turn in rollout.turns), tokenizer().decode(rollout.tokens)] for rollout in rollouts
    ]


if __name__ == "__main__":
    engine_config.prepare_environment(config())
    import ray
    import transfer_queue

    from lfo.engines.verl.backend import start_ray

    tree = engine_config.verl_config(config("verl.trainer.n_gpus_per_node=2"))
    start_ray(tree)
    transfer_queue.init(tree.transfer_queue)  # for both trainings
    for work in (steps_beside_the_local_engine, two_ranks_in_another_world):
        work()
        (FOLDER / "results.json").write_text(json.dumps(RESULTS))
    transfer_queue.close()
    ray.shutdown()
