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

from lfo.engines.learner import Learner
from lfo.engines.local import Trainer
from lfo.model.adapters import DualAdapterModel
from lfo.types import TrainingSample
from small_runs import base, fussy_calls, randomised, small_config, small_trainer

pytest.importorskip("verl", reason="verl is not installed: pip install -e '.[verl]'")
pytestmark = pytest.mark.verl

CLOSE = 1e-4
UPDATES = 10
COUPLINGS = {
    "separate": ("coupling=separate",),
    "shared": ("coupling=shared",),
    "stacked": ("coupling=stacked",),
    "shared-inline": ("coupling=shared", "world_model.input=inline"),
    "stacked-inline": ("coupling=stacked", "world_model.input=inline"),
    "separate-kl-checkpointed": (
        "policy.kl=0.1",
        "verl.actor_rollout_ref.model.enable_gradient_checkpointing=true",
        "verl.actor_rollout_ref.actor.ppo_max_token_len_per_gpu=700",  # many rounds, the last with an idle rank
    ),
    "dapo": ("algo=dapo",),
}
SETTINGS = ("engine=verl", "lora.rank=4", "lora.alpha=8", "policy.max_resamples=1", "rollout.max_turns=4")


def fresh_model(trainer: Trainer) -> DualAdapterModel:
    config = trainer.config
    model = DualAdapterModel.build(
        base(),
        coupling=config.coupling,
        seed=0,
        rank=config.lora.rank,
        alpha=config.lora.alpha,
        with_world_model=config.algo == "dual-lora",
    )
    return randomised(model)


def recorded_batches(trainer: Trainer) -> list[list[TrainingSample]]:
    """Mini-batches of real rollouts that train both losses, as many as there are updates."""
    batches: list[list[TrainingSample]] = []
    step = 0
    while len(batches) < UPDATES:
        collected = trainer.collect(step)
        plan = trainer.recipe.plan(step, collected, trainer.recipe.hear(collected.groups))
        batches += [list(samples) for samples in plan.mini_batches if any(any(row.policy_weights) for row in samples)]
        step += 1
    return batches[:UPDATES]


@dataclasses.dataclass
class Case:
    watched: list[dict[str, float]]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    batches: list[list[TrainingSample]]


def local_run(trainer: Trainer, folder: Path) -> Case:
    """What the local learner makes of the recorded batches, from adapters that are left in `start`."""
    batches = recorded_batches(trainer)
    model = fresh_model(trainer)
    model.save(folder / "start")
    learner = Learner(model, trainer.config)
    watched, gradients = [], {}
    for number, samples in enumerate(batches):
        watched.append(learner.update(samples, weight=trainer.recipe.state.weight, rate_factor=1.0))
        if number == 0:
            gradients = {
                f"gradient.{name}.{place}": weight.grad.clone()
                for name, weights in learner.parameters.items()
                for place, weight in enumerate(weights)
                if weight.grad is not None
            }
    weights = {
        f"weight.{name}.{place}": weight.detach().clone()
        for name, weights in learner.parameters.items()
        for place, weight in enumerate(weights)
    }
    return Case(watched=watched, gradients=gradients, weights=weights, batches=batches)


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
    for name, settings in COUPLINGS.items():
        (folder / name).mkdir()
        trainer = small_trainer(*SETTINGS, *settings, environment=fussy_calls)
        cases[name] = local_run(trainer, folder / name)
        described[name] = {
            "settings": [*_small(), *SETTINGS, *settings],
            "weight": trainer.recipe.state.weight,
            "mini_batches": [[dataclasses.asdict(row) for row in rows] for rows in cases[name].batches],
        }
    (folder / "cases.json").write_text(json.dumps(described))
    run_ranks(folder, 1)
    run_ranks(folder, 2)
    return folder, cases


def _small() -> tuple[str, ...]:
    from small_runs import SMALL

    return SMALL


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
    assert max(gradient.abs().max() for gradient in gradients.values()) > 100 * CLOSE, "nothing was compared"
    for key, gradient in case.gradients.items():
        assert torch.allclose(gradients[key], gradient, atol=CLOSE), key


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", list(COUPLINGS))
def test_ten_updates_give_the_local_engines_adapters(runs, name: str, ranks: int):
    folder, cases = runs
    results = load_file(folder / name / f"results-{ranks}.safetensors")
    moved = 0.0
    start = load_file(folder / name / "start" / "policy" / "adapter_model.safetensors")
    assert start
    for key, weight in cases[name].weights.items():
        assert torch.allclose(results[key], weight, atol=CLOSE), key
        moved = max(moved, float(weight.abs().max()))
    assert moved > CLOSE


def test_both_adapters_move_and_the_policy_loss_spares_a_stacked_world_model(runs):
    _, cases = runs
    for name in ("separate", "stacked"):
        for adapter in ("policy", "world_model"):
            gradients = [value for key, value in cases[name].gradients.items() if key.startswith(f"gradient.{adapter}")]
            assert max(gradient.abs().max() for gradient in gradients) > 0


def test_the_trainers_log_probs_are_those_that_were_sampled(runs):
    """Of adapters that have not been randomised: the policy that sampled the recorded rollouts is the fresh one."""
    folder, cases = runs
    for ranks in (1, 2):
        results = load_file(folder / "separate" / f"results-{ranks}.safetensors")
        rows = [row for row in cases["separate"].batches[0] if any(row.policy_weights)]
        for place, row in enumerate(rows):
            assert len(results[f"logprobs.{place}"]) == len(row.tokens)
    one, two = (load_file(folder / "separate" / f"results-{ranks}.safetensors") for ranks in (1, 2))
    for key in (key for key in one if key.startswith("logprobs.")):
        assert torch.allclose(one[key], two[key], atol=CLOSE)


def test_a_checkpoint_of_the_verl_engine_is_one_of_the_local_engine(runs):
    folder, cases = runs
    trainer = small_trainer(*SETTINGS, *COUPLINGS["stacked"], environment=fussy_calls)
    trainer.model.load(folder / "stacked" / "2")
    trainer.learner.load(folder / "stacked" / "2" / "optimizer.safetensors")
    for name, weights in trainer.learner.parameters.items():
        for place, weight in enumerate(weights):
            assert torch.allclose(weight, cases["stacked"].weights[f"weight.{name}.{place}"], atol=CLOSE)
            assert float(trainer.learner._state(weight)["step"]) == UPDATES


def test_small_config_is_the_one_that_ranks_read():
    assert small_config(*SETTINGS).engine == "verl"
