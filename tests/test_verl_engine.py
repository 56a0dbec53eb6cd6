"""The verl engine computes what the local one computes: losses, gradients, updates; with two ranks as with one."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lfo.model.learner import Learner
from lfo.tools.plan import SHAPES
from lfo.training import Trainer
from lfo.types import TrainingSample
from small_runs import SMALL, fussy_calls, model_of, randomised, small_trainer

pytest.importorskip("verl", reason="verl is not installed: pip install -e '.[verl]'")
pytestmark = pytest.mark.verl

CLOSE = 1e-4
UPDATES = 10
ODD_ROWS = ("rollout.group_size=5", "world_model.examples_per_mini_batch=3", "micro_batch_tokens=1")  # a rank idles
COUPLINGS = {
    "separate": ("coupling=separate",),
    "shared": ("coupling=shared",),
    "stacked": ("coupling=stacked",),
    "shared-inline": ("coupling=shared", "world_model.input=inline", "lookahead=false"),
    "stacked-inline": ("coupling=stacked", "world_model.input=inline", "lookahead=false"),
    "separate-kl-checkpointed": (
        "policy.kl=0.1",
        "rollout.group_size=5",
        "world_model.examples_per_mini_batch=3",
        "verl.actor_rollout_ref.model.enable_gradient_checkpointing=true",
        "micro_batch_tokens=700",  # many rounds, the last with an idle rank
    ),
    "shared-kl": ("coupling=shared", "policy.kl=0.1", *ODD_ROWS),
    "dapo": ("algo=dapo",),
}
# Updates that train the policy alone, with rows that could teach the world model too.
POLICY_ONLY = {
    "stacked-policy-only": ("coupling=stacked", *ODD_ROWS),
    "stacked-inline-policy-only": ("coupling=stacked", "world_model.input=inline", "lookahead=false", *ODD_ROWS),
}
# name -> (the guard that is taken away, settings); the result must then be wrong.
SABOTAGED = {
    "no-guard-switch": ("peft's set_adapter", COUPLINGS["separate"]),
    "no-guard-checkpoint": ("plain checkpointing", COUPLINGS["separate-kl-checkpointed"]),
    "no-guard-padding": ("padding with stale weights", COUPLINGS["separate-kl-checkpointed"]),
}
SETTINGS = ("engine=verl", "lora.rank=4", "lora.alpha=8", "policy.max_resamples=1", "rollout.max_turns=4")


def _start(trainer: Trainer, folder: Path) -> Path:
    """Adapters as after some training."""
    randomised(model_of(trainer)).save(folder / "start")
    return folder / "start"


def recorded_batches(trainer: Trainer, count: int) -> list[list[TrainingSample]]:
    """Mini-batches of real rollouts that train both losses, as many as there are updates."""
    batches: list[list[TrainingSample]] = []
    step = 0
    while len(batches) < count:
        collected = trainer.collect(step)
        plan = trainer.rows(step, collected, trainer.hear(collected.groups))
        batches += [list(samples) for samples in plan.mini_batches if any(any(row.policy_weights) for row in samples)]
        step += 1
    return batches[:count]


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
        watched.append(learner.update(samples, weight=weight, rate_factor=1.0))
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
    everything = {name: ("", settings) for name, settings in (COUPLINGS | POLICY_ONLY).items()} | SABOTAGED
    for name, (sabotage, settings) in everything.items():
        (folder / name).mkdir()
        trainer = small_trainer(*SETTINGS, *settings, environment=fussy_calls)
        updates = 1 if sabotage or name in POLICY_ONLY else UPDATES if name in ("separate", "shared", "stacked") else 2
        weight = 0.0 if name in POLICY_ONLY else trainer.state.weight
        cases[name] = local_run(trainer, folder / name, updates=updates, weight=weight)
        described[name] = {
            "sabotage": sabotage,
            "settings": [*SMALL, *SETTINGS, *settings],
            "weight": weight,
            "mini_batches": [[dataclasses.asdict(row) for row in rows] for rows in cases[name].batches],
        }
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


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", list(COUPLINGS))
def test_consecutive_updates_give_the_local_engines_adapters(runs, name: str, ranks: int):
    folder, cases = runs
    results = load_file(folder / name / f"results-{ranks}.safetensors")
    for key, weight in cases[name].weights.items():
        assert (results[key] - weight).abs().max() < CLOSE, key
        assert (cases[name].start[key] - weight).abs().max() > CLOSE, f"{key} was not trained"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", list(POLICY_ONLY))
def test_updates_of_the_policy_alone_leave_the_world_model_where_it_is(runs, name: str, ranks: int):
    """Also where a rank has no rows: gradients of zeros would let weight decay and momentum move it."""
    folder, cases = runs
    results = load_file(folder / name / f"results-{ranks}.safetensors")
    assert {key.split(".")[1] for key in results if key.startswith("gradient.")} == {"policy"}
    for key, weight in cases[name].weights.items():
        assert (results[key] - weight).abs().max() < CLOSE, key
        if key.startswith("weight.world_model."):
            assert torch.equal(results[key], cases[name].start[key]), key


def test_every_rank_holds_what_the_memory_plan_counts(runs):
    folder, _ = runs
    shape = SHAPES["tiny"]
    layers = shape.layers * shape.layer_parameters
    for ranks in (1, 2):
        results = load_file(folder / "separate" / f"results-{ranks}.safetensors")
        assert int(results["held"]) == layers // ranks + shape.embedding_parameters + shape.hidden


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_trainers_log_probs_are_the_samplers(runs, ranks: int):
    folder, cases = runs
    for name in ("separate", "shared", "stacked"):
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


@pytest.mark.parametrize(
    ("name", "ranks"), [("no-guard-switch", 1), ("no-guard-checkpoint", 1), ("no-guard-padding", 2)]
)
def test_without_its_guard_each_silent_failure_shows(runs, name: str, ranks: int):
    """PEFT freezing the other adapter, recomputing with the wrong one, an idle rank that trains a stale row: none of
    them raises anything, and the comparison above is what tells."""
    folder, cases = runs
    case, results = cases[name], load_file(folder / name / f"results-{ranks}.safetensors")
    wrong = [
        key
        for key, gradient in case.gradients.items()
        if key not in results or (results[key] - gradient).abs().max() > 10 * CLOSE
    ]
    assert wrong


def test_a_checkpoint_of_the_verl_engine_is_one_of_the_local_engine(runs):
    folder, cases = runs
    trainer = small_trainer(*SETTINGS, *COUPLINGS["stacked"], environment=fussy_calls)
    model_of(trainer).load(folder / "stacked" / "2")
    trainer.backend.learner.load(folder / "stacked" / "2" / "optimizer.safetensors")
    for name, weights in trainer.backend.learner.parameters.items():
        for place, weight in enumerate(weights):
            assert torch.allclose(weight, cases["stacked"].weights[f"weight.{name}.{place}"], atol=CLOSE)
            assert float(trainer.backend.learner._optimizer_of[weight].state[weight]["step"]) == UPDATES
