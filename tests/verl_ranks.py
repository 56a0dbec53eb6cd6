"""One rank of the verl engine, run in its own process by tests/test_verl_engine.py; not a test.

    python tests/verl_ranks.py FOLDER RANK RANKS

For each case in FOLDER/cases.json: create the engine as verl does, load the adapters, make the recorded updates, and
write losses, gradients of the first update, the adapters after the last one, and how much of the base this rank has. A
case names its numbers of ranks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lfo.config import RunConfig, load_config
from lfo.engines.verl import learner
from lfo.engines.verl.config import prepare_environment, verl_config
from lfo.model.adapters import DualAdapterModel
from lfo.model.fast.lean import LeanForward
from lfo.types import TrainingSample

FOLDER, RANK, RANKS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
NOISE = 1e-7  # relative; the tests must hold on every CPU


def read_samples(rows: list[dict[str, Any]]) -> list[TrainingSample]:
    return [TrainingSample(**{**row, "adapters": tuple(row["adapters"])}) for row in rows]


def make_engine(settings: list[str]) -> Any:
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine import EngineRegistry

    import lfo.engines.verl.engine  # noqa: F401  registers

    tree = verl_config(load_config(settings))
    actor = omega_conf_to_dataclass(tree.actor_rollout_ref.actor)
    actor.engine.max_token_len_per_gpu = actor.ppo_max_token_len_per_gpu  # as verl's worker does
    engine = EngineRegistry.new(
        model_type=tree.actor_rollout_ref.model.model_type,
        backend=actor.strategy,
        model_config=omega_conf_to_dataclass(tree.actor_rollout_ref.model),
        engine_config=actor.engine,
        optimizer_config=actor.optim,
        checkpoint_config=actor.checkpoint,
    )
    engine.initialize()
    return engine


def sabotage(what: str) -> None:
    """Take one guard away; the test shows that the result is then wrong."""
    if what == "peft's set_adapter":

        def switch(self: Any, adapters: tuple[str, ...]) -> None:
            if adapters:
                self.peft_model.base_model.set_adapter(list(adapters))  # turns requires_grad off on all others
            self._active = adapters

        DualAdapterModel._switch = switch  # type: ignore[method-assign]
    elif what == "plain checkpointing":

        def enable(self: Any) -> None:
            self.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
            self.gradient_checkpointing = True

        DualAdapterModel._enable_gradient_checkpointing = enable  # type: ignore[method-assign]
    elif what == "padding with stale weights":
        learner.empty_part = lambda sample: sample
    else:
        raise ValueError(what)


def after_a_sync(engine: Any, config: RunConfig, prompt: Sequence[int]) -> dict[str, torch.Tensor]:
    """The log-probs of a continuation: as a rollout server samples it with new weights, and as the trainer says."""
    from lfo.engines.verl.rollout import SamplerServer

    weights, _ = engine.get_per_tensor_param()
    count = 24
    sampling = {"temperature": 1.0, "max_tokens": count, "uniforms": [(0.37 * place) % 1 for place in range(count)]}

    async def served() -> Any:
        server = SamplerServer(dataclasses.asdict(config), ends=(0,), visible_devices="")
        await server.update_weights({name: tensor.numpy() for name, tensor in weights}, step=1)
        return await server.generate(list(prompt), sampling, "after-a-sync")

    said = asyncio.run(served())
    before, tokens = [0.0] * len(prompt), (*prompt, *said.token_ids)
    row = TrainingSample(
        tokens=tokens,
        adapters=engine.model.policy_adapters,
        logprobs=[0.0] * len(tokens),
        advantages=[0.0] * len(tokens),
        policy_weights=[*before, *[1.0] * len(said.token_ids)],
        world_model_weights=[0.0] * len(tokens),
    )
    (logprobs,) = engine.policy_logprobs([row])
    return {"served": torch.tensor(said.log_probs), "trained": logprobs[len(prompt) :].clone()}


def held_of_base(engine: Any) -> int:
    """Numbers of the frozen base that lie on this rank."""
    weights = [weight for weight in engine.model.peft_model.parameters() if not weight.requires_grad]
    return sum((weight.to_local() if hasattr(weight, "to_local") else weight).numel() for weight in weights)


@torch.no_grad()
def as_on_another_cpu(engine: Any) -> None:
    """Change the last digit of the frozen weights, as other kernels change that of what is computed from them."""
    generator = torch.Generator().manual_seed(RANK)
    for weight in engine.model.peft_model.parameters():
        if not weight.requires_grad:
            mine = weight.to_local() if hasattr(weight, "to_local") else weight
            mine.mul_(1 + NOISE * torch.randn(mine.shape, generator=generator))


def run(name: str, case: dict[str, Any]) -> None:
    if case.get("sabotage"):
        sabotage(case["sabotage"])
    engine = make_engine(case["settings"])
    engine.model.load(FOLDER / name / "start")
    as_on_another_cpu(engine)
    results: dict[str, torch.Tensor] = {}
    watched: list[dict[str, float]] = []
    batches = [read_samples(rows) for rows in case["mini_batches"]]
    logprobs = engine.policy_logprobs([row for row in batches[0] if any(row.policy_weights)])
    for place, rows in enumerate(logprobs):
        results[f"logprobs.{place}"] = rows
    for number, samples in enumerate(batches):
        watched.append(engine.learn(samples, world_model_weight=case["weight"], rate_factor=1.0))
        if number == 0:
            for adapter, weights in engine.learner.parameters.items():
                for place, weight in enumerate(weights):
                    if weight.grad is not None:
                        results[f"gradient.{adapter}.{place}"] = weight.grad.clone()
    for adapter, weights in engine.learner.parameters.items():
        for place, weight in enumerate(weights):
            results[f"weight.{adapter}.{place}"] = weight.detach().clone()
    results["held"] = torch.tensor(held_of_base(engine))
    results["runs_lean"] = torch.tensor(LeanForward.supports(engine.model.causal_lm))
    if RANKS == 1:
        results |= after_a_sync(engine, load_config(case["settings"]), batches[0][0].tokens[:40])
    (FOLDER / name / f"{RANKS}").mkdir(exist_ok=True)
    engine.save_checkpoint(str(FOLDER / name / f"{RANKS}"))
    if RANK == 0:
        save_file(results, FOLDER / name / f"results-{RANKS}.safetensors")
        (FOLDER / name / f"watched-{RANKS}.json").write_text(json.dumps(watched))


if __name__ == "__main__":
    torch.set_num_threads(1)
    prepare_environment(load_config(["preset=tiny", "engine=verl"]))
    store = torch.distributed.FileStore(str(FOLDER / f"store-{RANKS}"), RANKS)
    torch.distributed.init_process_group("gloo", store=store, rank=RANK, world_size=RANKS)
    cases = json.loads((FOLDER / "cases.json").read_text())
    for name, case in cases.items():
        if RANKS not in case["ranks"]:
            continue
        original = DualAdapterModel._switch, DualAdapterModel._enable_gradient_checkpointing, learner.empty_part
        run(name, case)
        DualAdapterModel._switch, DualAdapterModel._enable_gradient_checkpointing, learner.empty_part = original
    torch.distributed.destroy_process_group()
