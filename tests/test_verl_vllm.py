"""Both adapters in vLLM, as far as its code can be tested without a GPU."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lfo.config.couplings import POLICY, WORLD_MODEL
from lfo.engines.verl.config import BASE, forget_world_models, world_model_folder
from small_runs import fussy_calls, model_of, randomised, small_trainer


def test_a_resumed_run_keeps_the_world_model_that_its_servers_need(tmp_path: Path):
    """The run that was killed had come further than its last checkpoint, and has left later world models behind."""
    for step in (4, 19, 20):
        world_model_folder(tmp_path, step).mkdir(parents=True)
    present = world_model_folder(tmp_path, 5)
    present.mkdir()
    forget_world_models(present, world_model_folder(tmp_path, 4))
    assert {folder.name for folder in present.parent.iterdir()} == {"world_model-000004", "world_model-000005"}


@pytest.fixture
def vllm_lora(monkeypatch) -> Any:
    pytest.importorskip("verl", reason="verl is not installed: pip install -e '.[verl]'")
    pytest.importorskip("vllm", reason="vLLM is not installed: pip install -e '.[vllm]'")
    from vllm.lora import lora_model, peft_helper

    monkeypatch.setattr(lora_model, "PIN_MEMORY", torch.cuda.is_available())
    return SimpleNamespace(Model=lora_model.LoRAModel, Helper=peft_helper.PEFTHelper)


def product(lora: Any, name: str) -> torch.Tensor:
    """What a LoRA adds to a layer's weight, as vLLM would compute it."""
    layer = lora.loras[name]
    return (layer.lora_b.float() @ layer.lora_a.float()) * layer.scaling


@pytest.mark.verl
@pytest.mark.parametrize("coupling", ["separate", "shared"])
def test_vllm_reads_the_policy_that_is_trained(vllm_lora, coupling: str):
    from lfo.engines.verl.engine import policy_lora

    model = randomised(model_of(small_trainer(f"coupling={coupling}", "lora.rank=4", environment=fussy_calls)))
    tensors, config = policy_lora(model)
    helper = vllm_lora.Helper.from_dict(config)
    assert helper.r == 4
    lora = vllm_lora.Model.from_lora_tensors(1, dict(tensors), helper, device="cpu", dtype=torch.float32)
    deltas = model.deltas(model.policy_adapters)
    assert set(lora.loras) == set(deltas)
    for name, delta in deltas.items():
        torch.testing.assert_close(product(lora, name), delta.scale * delta.b @ delta.a, atol=1e-6, rtol=1e-5)


@pytest.mark.verl
def test_vllm_reads_the_world_model_from_its_folder(vllm_lora, tmp_path: Path):
    model = randomised(model_of(small_trainer("lora.rank=4", environment=fussy_calls)))
    model.export(tmp_path, "world_model")
    helper = vllm_lora.Helper.from_local_dir(str(tmp_path), max_position_embeddings=None)
    deltas = model.deltas(model.world_model_adapters)
    linears = {name.rsplit(".", 1)[-1] for name in deltas}
    lora = vllm_lora.Model.from_local_checkpoint(
        str(tmp_path), linears, helper, lora_model_id=2, device="cpu", dtype=torch.float32
    )
    for name, delta in deltas.items():
        torch.testing.assert_close(product(lora, name), delta.scale * delta.b @ delta.a, atol=1e-6, rtol=1e-5)


@pytest.mark.verl
def test_each_request_is_answered_with_the_adapter_that_it_wants(vllm_lora, tmp_path: Path):
    """At the same time, and by verl's own path through its server, with its limits."""
    from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID

    from lfo.engines.verl import vllm as ours

    asked: dict[str, Any] = {}

    class Engine:
        async def list_loras(self) -> set[int]:
            raise AssertionError("asked of the engine for every request")

        async def generate(
            self, *, prompt: Any, lora_request: Any, sampling_params: Any, request_id: str, **_: Any
        ) -> Any:
            await asyncio.sleep(0.01)  # others come in between
            asked[request_id] = lora_request, sampling_params.max_tokens
            logprobs = [{7: SimpleNamespace(logprob=-0.5)}]
            said = SimpleNamespace(token_ids=[7], logprobs=logprobs, finish_reason="stop", routed_experts=None)
            yield SimpleNamespace(outputs=[said], metrics=None)

    server = object.__new__(ours.DualLoraServer)
    run = {"coupling": "separate", "output_dir": str(tmp_path)}
    server.model_config = SimpleNamespace(lora_rank=4, lora={"rank": 4, "run": run}, processor=None)
    server.config = SimpleNamespace(
        max_model_len=10,
        full_determinism=False,
        mtp=None,
        enable_rollout_routing_replay=False,
        get=lambda name, default: default,
    )
    server.global_steps, server.replica_rank = 3, 0
    server._disaggregation_role, server._pd_decode_peers = "null", []
    server._submission_paused, server._rejecting, server._admitting = False, False, 0
    server.engine = ours.ByAdapter(Engine(), server)

    async def everybody() -> list[Any]:
        options = {"temperature": 1.0, "max_tokens": 50, "logprobs": True}
        names = (POLICY, WORLD_MODEL, BASE)
        asking = (server.generate([1, 2, 3], dict(options), name, adapter=name) for name in names)
        return await asyncio.gather(*map(asyncio.create_task, asking))

    answers = asyncio.run(everybody())
    assert [answer.log_probs for answer in answers] == [[-0.5]] * 3
    assert asked[POLICY][0].lora_int_id == VLLM_LORA_INT_ID
    assert asked[WORLD_MODEL][0].lora_path == str(world_model_folder(tmp_path, 3))
    assert asked[WORLD_MODEL][0].lora_int_id != VLLM_LORA_INT_ID
    assert asked[BASE][0] is None
    assert {limit for _, limit in asked.values()} == {7}, "no request leaves the context"


@pytest.mark.verl
def test_vllm_is_told_to_hold_two_loras(vllm_lora):
    from lfo.engines.verl import vllm as ours

    arguments = ours.vllm_async_server.build_cli_args_from_config({"enable_lora": True, "max_loras": 1})
    assert arguments == ["--enable_lora", "--max_loras", "2", "--max_cpu_loras", "4"]
