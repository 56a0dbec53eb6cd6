"""Trainings on verl in one process, run by tests/test_verl_fit.py; not a test.

    python tests/verl_fits.py FOLDER

Writes run folders, and what else is to be looked at into FOLDER/results.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lfo.config import RunConfig, load_config
from lfo.engines import create_trainer
from lfo.env.oracle import OracleCodes
from lfo.errors import WorkError
from lfo.rollout.records import rollout_record
from small_runs import SMALL, tokenizer
from verl_worlds import BreakingWorld, TalkativeWorld

FOLDER = Path(sys.argv[1])
RESULTS: dict[str, Any] = {}


def config(*settings: str) -> RunConfig:
    return load_config([*SMALL, "engine=verl", *settings])


def steps_beside_the_local_engine() -> None:
    """Three steps, rows and rollouts as they are; then servers that are not told of the new weights."""
    from lfo.engines.verl.trainer import _RemoteSteps

    settings = config("coupling=stacked", "policy.max_resamples=1", "steps=5", "rollout.max_context=1536")
    trainer = create_trainer(settings, TalkativeWorld, tokenizer())
    with trainer._cluster() as cluster:  # type: ignore[union-attr]
        loop = _RemoteSteps(trainer, cluster)
        rollouts: list[Any] = []
        roll_out = loop._roll_out

        def noting(requests: Sequence[Any], step: int) -> list[Any]:
            found = roll_out(requests, step)
            rollouts.extend(found)
            return found

        loop._roll_out = noting  # type: ignore[method-assign]
        RESULTS["rows"] = [loop.step(step) for step in range(3)]
        RESULTS["rollouts"] = [
            {
                "tokens": rollout.tokens,
                "record": rollout_record(rollout),
                "spans": [(turn.observation_start, turn.observation_end) for turn in rollout.turns],
            }
            for rollout in rollouts
        ]
        cluster.after_learning = lambda step: None
        try:
            for step in range(3, 5):
                loop.step(step)
            RESULTS["stale"] = "nobody noticed"
        except WorkError as error:
            RESULTS["stale"] = str(error)


def two_ranks_in_another_world() -> None:
    settings = config(
        "coupling=shared",
        "world_model.predict=all",
        "policy.dynamic_sampling=false",  # every group trains, so that log-probs are compared in every step
        "eval.every=1",
        "steps=2",
        "verl.trainer.n_gpus_per_node=2",
        f"output_dir={FOLDER / 'oracle'}",
    )
    RESULTS["oracle"] = create_trainer(settings, OracleCodes, tokenizer()).fit()


def an_environment_that_breaks() -> None:
    settings = config(
        "algo=dapo",
        "steps=3",
        "rollout.environment_retries=0",
        "verl.algorithm.rollout_correction.bypass_mode=false",
        f"output_dir={FOLDER / 'broken'}",
    )
    RESULTS["broken"] = create_trainer(settings, partial(BreakingWorld, levels=(2,)), tokenizer()).fit()


if __name__ == "__main__":
    import ray

    from lfo.engines.verl.settings import prepare_environment, verl_config
    from lfo.engines.verl.trainer import start_ray

    prepare_environment(config())
    start_ray(verl_config(config("verl.trainer.n_gpus_per_node=2")))
    for work in (steps_beside_the_local_engine, two_ranks_in_another_world, an_environment_that_breaks):
        work()
        (FOLDER / "results.json").write_text(json.dumps(RESULTS))
    ray.shutdown()
