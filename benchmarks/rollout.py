"""Measure the sampler on one CPU thread or on a GPU, beside transformers' generate() and the bandwidth floor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks import speed
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.loading import load_base, load_tokenizer, pick_device
from lfo.model.adapters import DualAdapterModel
from lfo.model.sampler import Sampler
from lfo.protocol.chat import ChatCodec
from lfo.protocol.hermes import format_tool_call
from lfo.types import ToolCall

FIXED = (16, 80)  # tokens of two turns of fixed length: their difference is pure decoding


def bench_rollout(
    *,
    model: str = "tiny",
    device: str = "cpu",
    tasks: int = 8,
    group_size: int = 8,
    max_new_tokens: int = 160,
    repeats: int = 3,
) -> dict[str, Any]:
    """Return sampled tokens per second of both samplers, on the same prompts and adapter.

    `speedup` is for real turns of the policy, which have different lengths. `speedup_fixed_length` has the same number
    of tokens in every row and shows the cost of a token alone. `floor_fraction` compares a decode step with reading
    every weight and all keys and values once, at the bandwidth of a plain copy.
    """
    torch.set_num_threads(1)
    target = pick_device(device)
    tokenizer = load_tokenizer(model)
    codec = ChatCodec(tokenizer, PhoneCalls().tools())
    dual = DualAdapterModel.build(load_base(model, target), coupling="separate", seed=0)
    prompts = [prompt for prompt in _prompts(codec, tasks) for _ in range(group_size)]
    room = max(map(len, prompts)) + max(max_new_tokens, *FIXED)
    natural = Sampler(dual, max_context=room, eos_ids=[codec.end_of_turn])
    endless = Sampler(dual, max_context=room, eos_ids=[])
    samplers = {"ours": natural, "ours_short": endless, "ours_fixed": endless}
    limits = {"ours": max_new_tokens, "generate": max_new_tokens, "ours_short": FIXED[0]}
    limits |= dict.fromkeys(("ours_fixed", "generate_fixed"), FIXED[1])

    def speak(name: str, limit: int, seed: int) -> int:
        if name in samplers:
            return _sample(samplers[name], prompts, limit, seed)
        return _generate(dual, codec, prompts, limit, seed, fixed=name == "generate_fixed")

    times, speeds = _in_turns(speak, limits, repeats, target)
    rate = {name: median(values) for name, values in speeds.items()}
    step = (median(times["ours_fixed"]) - median(times["ours_short"])) / (FIXED[1] - FIXED[0])
    cached = sum(map(len, prompts)) + len(prompts) * sum(FIXED) / 2
    bandwidth = speed.copy_bandwidth(target)
    floor = speed.bytes_of_a_step(dual, cached) / bandwidth
    return {
        "device": target.type,
        "model": model,
        "tokens_per_second": rate["ours"],
        "generate_tokens_per_second": rate["generate"],
        "speedup": rate["ours"] / rate["generate"],
        "fixed_length_tokens_per_second": rate["ours_fixed"],
        "generate_fixed_length_tokens_per_second": rate["generate_fixed"],
        "speedup_fixed_length": rate["ours_fixed"] / rate["generate_fixed"],
        "step_seconds": step,
        "step_tokens_per_second": len(prompts) / step,
        "floor_step_seconds": floor,
        "floor_tokens_per_second": len(prompts) / floor,
        "floor_fraction": floor / step,
        "copy_bandwidth": bandwidth,
        "peak_memory": speed.peak_memory(target),
        "batch": len(prompts),
        "prompt_tokens": sum(map(len, prompts)) / len(prompts),
        "max_new_tokens": max_new_tokens,
    }


def _in_turns(
    speak: Callable[[str, int, int], int], limits: Mapping[str, int], repeats: int, device: torch.device
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return seconds and tokens per second of each sampler; the first repetition is a warm-up."""
    times: dict[str, list[float]] = defaultdict(list)
    speeds: dict[str, list[float]] = defaultdict(list)
    for repeat in range(repeats + 1):
        for name, limit in limits.items():
            short = 4 if repeat == 0 and name.startswith("generate") else limit
            seconds, tokens = speed.seconds_of(partial(speak, name, short, repeat), device)
            if repeat:
                times[name].append(seconds)
                speeds[name].append(tokens / seconds)
    return times, speeds


def _prompts(codec: ChatCodec, tasks: int) -> list[list[int]]:
    """Return prompts of the policy after it has seen the directory."""
    prompts = []
    for task in PhoneCalls(levels=(2,)).tasks("val")[:tasks]:
        environment = PhoneCalls(levels=(2,))
        opening = environment.reset(task)
        search = format_tool_call(ToolCall(name="search_company", arguments={"name": task.company_name}))
        shown = codec.after_action(environment.step(search).observation, stopped=False)
        prompts.append([*codec.opening(opening).ids, *codec.encode(search), *shown.ids])
    return prompts


def _sample(sampler: Sampler, prompts: Sequence[Sequence[int]], limit: int, seed: int) -> int:
    uniforms = np.random.default_rng(seed).random((len(prompts), limit))
    adapters = sampler.model.policy_adapters
    answers = sampler.generate(prompts, adapters=adapters, max_new_tokens=limit, temperature=1.0, uniforms=uniforms)
    return sum(len(answer.tokens) for answer in answers)


@torch.inference_mode()
def _generate(
    model: DualAdapterModel, codec: ChatCodec, prompts: Sequence[Sequence[int]], limit: int, seed: int, *, fixed: bool
) -> int:
    longest, end = max(map(len, prompts)), codec.end_of_turn
    tokens = torch.tensor([[end] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    torch.manual_seed(seed)
    with model.active(model.policy_adapters):
        rows = model.causal_lm.generate(
            input_ids=tokens,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=limit,
            min_new_tokens=limit if fixed else None,
            eos_token_id=end,
            pad_token_id=end,
        )[:, longest:]
    ends = (rows == end).int()
    # Count the tokens of a row up to its first end of turn, without the padding.
    return int((ends.cumsum(1) - ends == 0).sum())
