"""Both adapters in vLLM: the policy as verl's own LoRA, the world model as a second one that is asked for by name.

Not run so far: no machine that tests this project has vLLM. Written against verl 0.9.1's server and vLLM's documented
`LoRARequest(lora_name, lora_int_id, lora_path)`.

verl sends one LoRA to its servers, under one fixed id. The world model goes by way of a folder instead: before each
sync the first rank writes it as a PEFT folder below the run's (`world_model_folder`), and a request for it names the
folder of the server's present step. vLLM loads it once.
"""

# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout import vllm_async_server
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest

from lfo.engines.verl.settings import BASE, world_model_folder
from lfo.model.couplings import POLICY, coupling_of

FIRST_ID = 1_000  # verl's own LoRA has the id 123
_arguments_of = vllm_async_server.build_cli_args_from_config


def _with_room_for_both(arguments: Mapping[str, Any]) -> Any:
    """verl allows one LoRA in a batch; here two are alive at the same time, and an older one may still be cached."""
    return _arguments_of({**arguments, "max_loras": 2, "max_cpu_loras": 4})


vllm_async_server.build_cli_args_from_config = _with_room_for_both


class DualLoraServer(vllm_async_server.vLLMHttpServer):
    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        adapter: str = POLICY,
        **options: Any,
    ) -> TokenOutput:
        run = self.model_config.lora["run"]
        if adapter == POLICY or (adapter != BASE and coupling_of(run["coupling"]).is_shared):
            return await super().generate(prompt_ids, sampling_params, request_id, **options)
        lora = None
        if adapter != BASE:
            step = int(self.global_steps or 0)
            folder = world_model_folder(Path(run["output_dir"]), step)
            lora = LoRARequest(lora_name=f"{adapter}-{step}", lora_int_id=FIRST_ID + step, lora_path=str(folder))
        parameters = SamplingParams(**{**sampling_params, "logprobs": 0})
        final = None
        async for output in self.engine.generate(
            TokensPrompt(prompt_token_ids=list(prompt_ids)),
            parameters,
            request_id=f"{request_id}-{adapter}",
            lora_request=lora,
        ):
            final = output
        assert final is not None
        said: Any = final.outputs[0]
        logprobs: list[Any] = [
            each[token].logprob for token, each in zip(said.token_ids, said.logprobs or (), strict=True)
        ]
        return TokenOutput(
            token_ids=list(said.token_ids),
            log_probs=logprobs,
            stop_reason="completed",
            extra_fields={"global_steps": self.global_steps},
        )


class DualLoraReplica(vllm_async_server.vLLMReplica):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.server_class = ray.remote(DualLoraServer)
