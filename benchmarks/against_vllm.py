"""Compare our sampler with vLLM by model size and number of rows.

    lfo bench rollout --against vllm --device cuda
    lfo bench rollout --against vllm --device cuda --shapes smollm2-135m,qwen3-8b --rows 64

It uses random weights of each shape, one LoRA of rank 16, and groups of eight rows with the same prompt and number of
tokens. Both are on the GPU at the same time and alternate. It needs vLLM: see docs/VERL_INTEGRATION.md.
"""

from __future__ import annotations

import gc
import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks import speed
from benchmarks.memory import model_config
from lfo.errors import ConfigError, UsageError
from lfo.model.adapters import POLICY, DualAdapterModel
from lfo.model.sampler import Sampler
from lfo.tools.plan import SHAPES, cache_bytes_of_a_token

PROMPT, SHORT, LONG = 743, 16, 80  # tokens: a phone-call prompt, and turns whose difference is pure decoding
GROUP, RANK = 8, 16
REPEATS = 3
CACHE_ROOM = 1.25  # of vLLM's cache, beyond the rows at full length

Speak = Callable[[Sequence[Sequence[int]], int], int]


def require_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "--against vllm needs vLLM 0.24.0, which is not installed: pip install learn-from-observation[vllm]"
        )


def against_vllm(shapes: Sequence[str], rows: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield tokens per second and milliseconds of a decode step of both, for each shape and number of rows."""
    if unknown := [name for name in shapes if name not in SHAPES]:
        raise UsageError(f"--shapes has no {unknown[0]!r}; the shapes are {', '.join(SHAPES)}")
    require_vllm()
    for name in shapes:
        with tempfile.TemporaryDirectory() as folder:
            speakers = _speakers(name, Path(folder), max(rows))
            for count in rows:
                prompts = _prompts(SHAPES[name].vocabulary, count)
                yield {"shape": name, "rows": count, **_measured(speakers, prompts, REPEATS, torch.device("cuda"))}
            speakers.clear()
            gc.collect()
            torch.cuda.empty_cache()


def _speakers(name: str, folder: Path, rows: int) -> dict[str, Speak]:
    from benchmarks.bare_vllm import BareVllm  # vLLM is optional, and heavy

    config = model_config(SHAPES[name])
    with torch.device("cuda"):
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = DualAdapterModel.build(base, coupling="separate", seed=0, rank=RANK)
    config.save_pretrained(folder)
    model.export(folder / "policy", POLICY)
    context = PROMPT + LONG + 1
    cache_bytes = int(CACHE_ROOM * rows * context * cache_bytes_of_a_token(SHAPES[name]))
    theirs = BareVllm(folder, folder / "policy", rank=RANK, context=context, rows=rows, cache_bytes=cache_bytes)
    return {"lfo": sampler_of(model, context), "vllm": theirs.speak}


def sampler_of(model: DualAdapterModel, context: int) -> Speak:
    sampler = Sampler(model, max_context=context, eos_ids=[])

    def speak(prompts: Sequence[Sequence[int]], tokens: int) -> int:
        uniforms = np.random.default_rng(0).random((len(prompts), tokens))
        answers = sampler.generate(
            prompts, adapters=model.policy_adapters, max_new_tokens=tokens, temperature=1.0, uniforms=uniforms
        )
        return sum(len(answer.tokens) for answer in answers)

    return speak


def _prompts(vocabulary: int, rows: int) -> list[list[int]]:
    numbers = np.random.default_rng(rows)
    groups = [numbers.integers(10, vocabulary, PROMPT).tolist() for _ in range(-(-rows // GROUP))]
    return [groups[row // GROUP] for row in range(rows)]


def _measured(
    speakers: dict[str, Speak], prompts: Sequence[Sequence[int]], repeats: int, device: torch.device
) -> dict[str, Any]:
    """Return medians over alternating turns, after a warm-up."""
    seconds: dict[tuple[str, int], list[float]] = {(name, tokens): [] for name in speakers for tokens in (SHORT, LONG)}
    for repeat in range(repeats + 1):
        for name, tokens in seconds:
            taken, said = speed.seconds_of(lambda name=name, tokens=tokens: speakers[name](prompts, tokens), device)
            assert said == len(prompts) * tokens, f"{name} said {said} tokens"
            if repeat:
                seconds[name, tokens].append(taken)
    found: dict[str, Any] = {}
    for name in speakers:
        short, long = median(seconds[name, SHORT]), median(seconds[name, LONG])
        found[f"{name}_tokens_per_second"] = len(prompts) * LONG / long
        found[f"{name}_step_ms"] = 1e3 * (long - short) / (LONG - SHORT)
    if "vllm" in speakers and "lfo" in speakers:
        found["ratio"] = found["lfo_tokens_per_second"] / found["vllm_tokens_per_second"]
    return found
