"""The verl engine computes the same as the local one: losses, gradients, updates, with one or two ranks."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lfo.model.learner import Learner
from lfo.rows.successes import imitation_sample, without_shown
from lfo.tools.plan import SHAPES
from lfo.train.loop import Trainer
from lfo.types import Rollout, TrainingSample
from small_runs import SMALL, fussy_calls, model_of, randomised, small_trainer

pytest.importorskip("verl", reason="verl is not installed: pip install -e '.[verl]'")
pytestmark = pytest.mark.verl

CLOSE = 1e-4
TINY = 1e-3  # of the largest gradient of its tensor
UPDATES = 4
ODD_ROWS = ("rollout.group_size=5", "world_model.examples_per_mini_batch=3", "micro_batch_tokens=1")  # a rank idles
IMITATION = ("internalise.rows=2", "internalise.teacher=policy")
COUPLINGS = {
    "separate": ("coupling=separate",),
    "shared": ("coupling=shared",),
    "shared-inline": ("coupling=shared", "world_model.input=inline", "lookahead=false"),
    "separate-checkpointed": (
        "rollout.group_size=5",
        "world_model.examples_per_mini_batch=3",
        "verl.actor_rollout_ref.model.enable_gradient_checkpointing=true",
        "micro_batch_tokens=700",  # many rounds, the last with an idle rank
    ),
    "shared-odd": ("coupling=shared", *ODD_ROWS),
    "dapo": ("algo=dapo",),
    "separate-imitation": IMITATION,
    "separate-imitation-odd": (*IMITATION, *ODD_ROWS),
}
# Updates that train the policy alone, with rows that could teach the world model too.
POLICY_ONLY = {
    "policy-only": ODD_ROWS,
    "imitation-only": (*IMITATION, *ODD_ROWS),
}
# name -> (the guard that is taken away, the case it guards, with how many ranks); the result must then be wrong.
SABOTAGED = {
    "no-guard-switch": ("peft's set_adapter", "separate", 1),
    "no-guard-checkpoint": ("plain checkpointing", "separate-checkpointed", 1),
    "no-guard-padding": ("padding with stale weights", "separate-checkpointed", 2),
}
SETTINGS = ("engine=verl", "lora.rank=4", "policy.max_resamples=1", "rollout.max_turns=4")


def _start(trainer: Trainer, folder: Path) -> Path:
    """Adapters as after some training."""
    randomised(model_of(trainer)).save(folder / "start")
    return folder / "start"


def recorded_batches(trainer: Trainer, count: int) -> list[list[TrainingSample]]:
    """Mini-batches of real rollouts that train both losses, as many as there are updates."""
    batches: list[list[TrainingSample]] = []
    step = 0
    while len(batches) < count:
        collected = trainer.collect(trainer.plan(step))
        made = trainer.samples(trainer.plan(step), collected, trainer.store_replies(collected.groups))
        drawn = [samples for samples in made if any(any(row.policy_weights) for row in samples)]
        batches += [[*samples, *imitated(trainer, collected.rollouts)] for samples in drawn]
        step += 1
    return batches[:count]


def imitated(trainer: Trainer, rollouts: Sequence[Rollout]) -> list[TrainingSample]:
    """Rows to imitate beside those of the other losses, an odd number of them, where the case has such."""
    count, adapters = 3 if trainer.config.internalise.rows else 0, model_of(trainer).policy_adapters
    return [imitation_sample(without_shown(rollout), adapters=adapters) for rollout in rollouts[:count]]


@dataclasses.dataclass
class Case:
    start: dict[str, torch.Tensor]
    watched: list[dict[str, float]]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    batches: list[list[TrainingSample]]


def local_run(trainer: Trainer, folder: Path, updates: int, weight: float) -> Case:
    """What the local learner makes of the recorded batches, from adapters that are left in `start`."""
    # The policy that samples is the one that is trained: log-probs must agree.
    model_of(trainer).load(_start(trainer, folder))
    trainer.backend.agent.sampler.refresh()
    batches = recorded_batches(trainer, updates)
    learner = Learner(model_of(trainer), trainer.config)
    start = _weights(learner)
    watched, gradients = [], {}
    for number, samples in enumerate(batches):
        watched.append(learner.update(samples, world_model_weight=weight, rate_factor=1.0))
        if number == 0:
            gradients = {
                f"gradient.{name}.{place}": weight.grad.clone()
                for name, weights in learner.parameters.items()
                for place, weight in enumerate(weights)
                if weight.grad is not None
            }
    return Case(start=start, watched=watched, gradients=gradients, weights=_weights(learner), batches=batches)


def _weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {
        f"weight.{name}.{place}": weight.detach().clone()
        for name, weights in learner.parameters.items()
        for place, weight in enumerate(weights)
    }


def run_ranks(folder: Path, ranks: int) -> None:
    script = Path(__file__).parent / "verl_ranks.py"
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", script, folder, str(rank), str(ranks)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)[-3000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, dict[str, Case]]:
    folder = tmp_path_factory.mktemp("ranks")
    cases: dict[str, Case] = {}
    described: dict[str, Any] = {}
    for name, settings in (COUPLINGS | POLICY_ONLY).items():
        (folder / name).mkdir()
        trainer = small_trainer(*SETTINGS, *settings, environment=fussy_calls)
        updates = 1 if name in POLICY_ONLY else UPDATES if name in ("separate", "shared") else 2
        weight = 0.0 if name in POLICY_ONLY else trainer.state.weight
        cases[name] = local_run(trainer, folder / name, updates=updates, weight=weight)
        described[name] = {
            "ranks": [1, 2],
            "sabotage": "",
            "settings": [*SMALL, *SETTINGS, *settings],
            "weight": weight,
            "mini_batches": [[dataclasses.asdict(row) for row in rows] for rows in cases[name].batches],
        }
    for name, (sabotage, of, ranks) in SABOTAGED.items():
        shutil.copytree(folder / of, folder / name)
        first = {"mini_batches": described[of]["mini_batches"][:1]}
        described[name] = {**described[of], **first, "ranks": [ranks], "sabotage": sabotage}
    (folder / "cases.json").write_text(json.dumps(described))
    run_ranks(folder, 1)
    run_ranks(folder, 2)
    return folder, cases


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", list(COUPLINGS))
def test_losses_and_gradients_are_the_local_engines(runs, name: str, ranks: int):
    folder, cases = runs
    case = cases[name]
    (watched, *_) = json.loads((folder / name / f"watched-{ranks}.json").read_text())
    assert watched.keys() == case.watched[0].keys()
    for key, value in case.watched[0].items():
        assert watched[key] == pytest.approx(value, abs=CLOSE), key
    results = load_file(folder / name / f"results-{ranks}.safetensors")
    gradients = {key: value for key, value in results.items() if key.startswith("gradient.")}
    assert gradients.keys() == case.gradients.keys()
    largest = max(gradient.abs().max() for gradient in gradients.values())
    for key, gradient in case.gradients.items():
        assert (gradients[key] - gradient).abs().max() < CLOSE * min(1.0, largest), key


def assert_same_updates(case: Case, results: Mapping[str, torch.Tensor]) -> None:
    """The adapters went where the local engine's went, wherever their first gradient was not tiny.

    AdamW divides a gradient by its own size: next to zero, the last digit of a float decides which way a weight goes,
    and that digit is another one on another CPU.
    """
    for key, weight in case.weights.items():
        if (gradient := case.gradients.get(key.replace("weight.", "gradient."))) is None:
            assert torch.equal(results[key], case.start[key]), f"{key} was trained"
            continue
        sound = gradient.abs() > TINY * gradient.abs().max()
        assert sound.float().mean() > 0.1, f"{key}: nothing is compared"
        assert (results[key] - weight)[sound].abs().max() < CLOSE, key
        assert (case.start[key] - weight)[sound].abs().median() > CLOSE, f"{key} was not trained"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", list(COUPLINGS))
def test_consecutive_updates_give_the_local_engines_adapters(runs, name: str, ranks: int):
    folder, cases = runs
    assert cases[name].gradients.keys() == {key.replace("weight.", "gradient.") for key in cases[name].weights}
    assert_same_updates(cases[name], load_file(folder / name / f"results-{ranks}.safetensors"))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", list(POLICY_ONLY))
def test_updates_of_the_policy_alone_leave_the_world_model_where_it_is(runs, name: str, ranks: int):
    """Also where a rank has no rows: gradients of zeros would let weight decay and momentum move it."""
    folder, cases = runs
    results = load_file(folder / name / f"results-{ranks}.safetensors")
    assert {key.split(".")[1] for key in results if key.startswith("gradient.")} == {"policy"}
    assert_same_updates(cases[name], results)


def test_every_rank_holds_what_the_memory_plan_counts(runs):
    folder, _ = runs
    shape = SHAPES["tiny"]
    layers = shape.layers * shape.layer_parameters
    for ranks in (1, 2):
        results = load_file(folder / "separate" / f"results-{ranks}.safetensors")
        assert int(results["held"]) == layers // ranks + shape.embedding_parameters + shape.hidden
        assert bool(results["runs_lean"]) is (ranks == 1), "one rank does not shard, so our own forward can run"


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_trainers_log_probs_are_the_samplers(runs, ranks: int):
    folder, cases = runs
    for name in ("separate", "shared"):
        results = load_file(folder / name / f"results-{ranks}.safetensors")
        rows = [row for row in cases[name].batches[0] if any(row.policy_weights)]
        for place, row in enumerate(rows):
            weighted = torch.tensor(row.policy_weights) > 0
            gap = (results[f"logprobs.{place}"] - torch.tensor(row.logprobs))[weighted].abs().max()
            assert gap < CLOSE, f"{name}: a server with the trainer's adapters would have sampled with others"


@pytest.mark.parametrize("name", list(COUPLINGS))
def test_after_a_sync_a_server_samples_with_the_trainers_weights(runs, name: str):
    folder, _ = runs
    results = load_file(folder / name / "results-1.safetensors")
    assert len(results["served"]) == len(results["trained"]) > 0
    assert (results["served"] - results["trained"]).abs().max() < CLOSE


@pytest.mark.parametrize("name", list(SABOTAGED))
def test_without_its_guard_each_silent_failure_shows(runs, name: str):
    """PEFT freezing the other adapter, recomputing with the wrong one, an idle rank that trains a stale row: none of
    them raises anything, and the comparison above is what tells."""
    folder, cases = runs
    _, of, ranks = SABOTAGED[name]
    case, results = cases[of], load_file(folder / name / f"results-{ranks}.safetensors")
    wrong = [
        key
        for key, gradient in case.gradients.items()
        if key not in results or (results[key] - gradient).abs().max() > 10 * CLOSE
    ]
    assert wrong


def test_a_checkpoint_of_the_verl_engine_is_one_of_the_local_engine(runs):
    folder, _ = runs
    results = load_file(folder / "separate" / "results-2.safetensors")
    trainer = small_trainer(*SETTINGS, *COUPLINGS["separate"], environment=fussy_calls)
    model_of(trainer).load(folder / "separate" / "2")
    trainer.backend.learner.load(folder / "separate" / "2" / "optimizer.safetensors")
    for name, weights in trainer.backend.learner.parameters.items():
        for place, weight in enumerate(weights):
            assert torch.equal(weight, results[f"weight.{name}.{place}"])
            assert float(trainer.backend.learner.optimizer.state[weight]["step"]) == UPDATES
