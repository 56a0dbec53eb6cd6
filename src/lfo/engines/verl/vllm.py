"""Both adapters in vLLM: the policy as verl's own LoRA, the world model as a second LoRA selected by name.

verl sends one LoRA with a fixed id to its servers and uses it for every request. The world model goes through a folder
instead: before each sync the first rank writes it as a PEFT folder below the run folder (`world_model_folder`), and a
request for it names the folder of the server's current step. vLLM loads it once and evicts the oldest.

Otherwise a request works as in verl, with its limits and its lock while weights change. Only the engine below gets
another adapter (`ByAdapter`).
"""

# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import os
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout import vllm_async_server
from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID
from vllm.lora.request import LoRARequest
from vllm.model_executor.models import registry
from vllm.sampling_params import RequestOutputKind

from lfo.config.couplings import POLICY, coupling_of
from lfo.engines.verl.config import BASE, run_name, world_model_folder

FIRST_ID = 1_000  # ids of the world models, one for each step; verl's LoRA has the id 123
_arguments_of = vllm_async_server.build_cli_args_from_config
_wanted: ContextVar[str] = ContextVar("adapter", default=POLICY)  # the adapter of the current request


def _with_room_for_both(arguments: Mapping[str, Any]) -> Any:
    """Allow two LoRAs in a batch, where verl allows one, and keep older ones in the CPU cache."""
    return _arguments_of({**arguments, "max_loras": 2, "max_cpu_loras": 4})


vllm_async_server.build_cli_args_from_config = _with_room_for_both


# vLLM inspects the class of a model in a subprocess, which imports everything again (17 s), so that CUDA is not
# initialised in this process. Here it may be: this process spawns its engines and never forks.
registry._run_in_subprocess = lambda look: look()


class ByAdapter:
    """vLLM's engine, with the adapter that each request selects."""

    def __init__(self, engine: Any, server: Any) -> None:
        self._engine = engine
        self._server = server

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def list_loras(self) -> set[int]:
        """Return the id of the policy without asking the engine, which would answer only between two steps. verl calls
        this before every request, and weights are synced before the first rollout, so the policy is always loaded."""
        return {VLLM_LORA_INT_ID}

    def generate(self, *, sampling_params: Any, lora_request: Any = None, **options: Any) -> Any:
        """Generate with the selected adapter, and without an answer for each token and without text: verl reads only
        the tokens of the last answer."""
        sampling_params.output_kind, sampling_params.detokenize = RequestOutputKind.FINAL_ONLY, False
        return self._engine.generate(sampling_params=sampling_params, lora_request=self._lora(lora_request), **options)

    def _lora(self, policy: Any) -> Any:
        adapter, run = _wanted.get(), self._server.model_config.lora["run"]
        if adapter == BASE:
            return None
        if adapter == POLICY or coupling_of(run["coupling"]).is_shared:
            return policy
        step = int(self._server.global_steps or 0)
        folder = world_model_folder(Path(run["output_dir"]), step)
        return LoRARequest(lora_name=f"{adapter}-{step}", lora_int_id=FIRST_ID + step, lora_path=str(folder))


class DualLoraServer(vllm_async_server.vLLMHttpServer):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        os.environ["VERL_RAY_JOB_ID"] = run_name(self.config)  # part of the socket's name: `worker.own_socket`

    async def run_server(self, args: Any) -> None:
        await super().run_server(args)
        self.engine: Any = ByAdapter(self.engine, self)

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        adapter: str = POLICY,
        **options: Any,
    ) -> TokenOutput:
        _wanted.set(adapter)  # valid in this asyncio task only, and each request is one task
        return await super().generate(prompt_ids, sampling_params, request_id, **options)
