"""The measured peak speed of this machine and the minimum work of a step: the floors of the benches."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from lfo.model.adapters import DualAdapterModel

REPEATS = 7  # timed repetitions after a warm-up


def seconds_of(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Return seconds and result of a call: CPU time on a CPU, which other programs do not change."""
    if device.type == "cpu":
        started = time.process_time()
        result = work()
        return time.process_time() - started, result
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    result = work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - started, result


def copy_bandwidth(device: torch.device, *, repeats: int = REPEATS) -> float:
    """Return the bytes per second, read plus written, of one large copy."""
    size = 1 << (32 if device.type == "cuda" else 26)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = [seconds_of(lambda: target.copy_(source), device)[0] for _ in range(repeats + 1)]
    return 2 * size / median(times[1:])


def arithmetic_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of one large matrix product."""
    size = 8192 if device.type == "cuda" else 512
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    times = [seconds_of(lambda: one @ other, device)[0] for _ in range(REPEATS + 1)]
    return 2 * size**3 / median(times[1:])


def linear_parameters(model: DualAdapterModel) -> int:
    """Return the number of base weights that every token uses, without the head, which few tokens use."""
    linears = (module for module in model.causal_lm.get_decoder().modules() if isinstance(module, torch.nn.Linear))
    return sum(linear.weight.numel() for linear in linears if not linear.weight.requires_grad)


def bytes_of_a_step(model: DualAdapterModel, cached_tokens: float) -> float:
    """Return the bytes that one decode step must read: every weight, and keys and values of all rows."""
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * size * cached_tokens
    return (linear_parameters(model) + model.head.numel() + cached) * model.head.element_size()


def training_operations(model: DualAdapterModel, *, tokens: float, predictions: float) -> float:
    """Return the operations of one update: forward, and backward to the activations only; LoRA is negligible.

    `predictions`: the tokens with a loss, which are the only ones that use the head.
    """
    return 4 * (linear_parameters(model) * tokens + model.head.numel() * predictions)


def sampling_operations(model: DualAdapterModel, *, tokens: float, sampled: float) -> float:
    return 2 * (linear_parameters(model) * tokens + model.head.numel() * sampled)


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Return the peak bytes: on a GPU of all tensors since the last reset, on a CPU of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
