"""vLLM without verl, for `lfo bench rollout --against vllm`.

It has the options of verl's server: bf16, LoRA, compilation and graphs. Weights are random ("dummy"), so a folder with
a config.json is enough.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from lfo.engines.verl.config import GRAPH_SIZES


class BareVllm:
    """One model with one adapter. `cache_bytes` are for keys and values: vLLM then need not measure what other
    processes leave free. `compilation` has vLLM's own options."""

    def __init__(
        self,
        model: Path,
        adapter: Path,
        *,
        rank: int,
        context: int,
        rows: int,
        cache_bytes: int,
        compilation: Mapping[str, Any] | None = None,
    ) -> None:
        self._lora = LoRARequest(lora_name="policy", lora_int_id=1, lora_path=str(adapter))
        self._engine: Any = LLM(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enable_lora=True,
            max_loras=1,
            max_lora_rank=rank,
            max_model_len=context,
            max_num_seqs=rows,
            kv_cache_memory_bytes=cache_bytes,
            gpu_memory_utilization=0.05,  # what must be free at the start
            enable_prefix_caching=True,
            compilation_config={
                "cudagraph_capture_sizes": [size for size in GRAPH_SIZES if size <= max(rows, 8)],
                **(compilation or {}),
            },
        )

    def speak(self, prompts: Sequence[Sequence[int]], tokens: int) -> int:
        """Clear the prefix cache, generate a fixed number of tokens after each prompt and return their total."""
        self._engine.reset_prefix_cache()
        return self.go_on(prompts, tokens)

    def go_on(self, prompts: Sequence[Sequence[int]], tokens: int) -> int:
        """Generate like `speak`, with the prefix cache of earlier prompts."""
        parameters = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        answers = self._engine.generate(asked, parameters, use_tqdm=False, lora_request=self._lora)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)
