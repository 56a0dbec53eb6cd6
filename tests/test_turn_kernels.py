"""Each Triton kernel computes the same as its definition in torch, on random numbers."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from lfo.model.fast import turn_kernels, turn_ops
from lfo.model.fast.turn_ops import Heads, TurnTensors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]


def close(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> bool:
    one, other = one.double(), other.double()
    return bool((one - other).norm() <= (1e-4 if dtype == torch.float32 else 1e-2) * other.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "rank"), [(576, 48), (1536, 16), (40, 0)])
def test_widening(width: int, rank: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(7, width, generator=generator).to(DEVICE, dtype)
    weight = torch.randn(width, generator=generator).to(DEVICE, dtype)
    a = torch.randn(rank, width, generator=generator).to(DEVICE, dtype)
    assert close(turn_kernels.widen_norm(x, weight, a, 1e-5), turn_ops.widen_norm(x, weight, a, 1e-5), dtype)
    gate_up = torch.randn(7, 2 * width, generator=generator).to(DEVICE, dtype)
    assert close(turn_kernels.widen_gate(gate_up, a), turn_ops.widen_gate(gate_up, a), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("queries", "keys", "size", "norm"), [(9, 3, 64, False), (4, 2, 32, True), (8, 8, 16, False)])
def test_attention(queries: int, keys: int, size: int, norm: bool, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(queries)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    angles = torch.rand(300, size // 2, generator=generator) * 6
    heads = Heads(
        queries=queries,
        keys=keys,
        size=size,
        scaling=size**-0.5,
        epsilon=1e-6,
        cos_SD=angles.cos().repeat(1, 2).to(DEVICE, dtype),
        sin_SD=torch.cat([-angles.sin(), angles.sin()], 1).to(DEVICE, dtype),
    )
    caches = [random(6, keys, 300, size), random(6, keys, 300, size)]
    qkv, a = random(4, (queries + 2 * keys) * size), random(16, queries * size)
    weights = random(queries + keys, size) if norm else None
    slots = torch.tensor([3, 0, 5, 1], device=DEVICE)
    positions = torch.tensor([0, 299, 1, 130, 7, 64], device=DEVICE)
    answers = []
    for ops in (turn_kernels, turn_ops):
        held = [cache.clone() for cache in caches]
        answers.append((ops.attend(qkv.clone(), weights, *held, slots, positions, a, heads), *held))
    for kernel, definition in zip(*answers, strict=True):
        assert close(kernel, definition, dtype)


@pytest.mark.parametrize("vocabulary", [53, 9000])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_saying(vocabulary: int, temperature: float):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(64, vocabulary, generator=generator) * 3).to(DEVICE)
    slots = torch.randperm(80, generator=generator)[:64].to(DEVICE)
    uniforms = torch.rand(80, 5, generator=generator).to(DEVICE)
    ends = (torch.rand(vocabulary, generator=generator) < 0.3).to(DEVICE)
    turns = []
    for ops in (turn_kernels, turn_ops):
        counts = torch.arange(80, device=DEVICE) % 4
        turn = TurnTensors(
            last_L=torch.full((80,), -1, device=DEVICE),
            position_L=torch.arange(80, device=DEVICE),
            said_L=counts,
            limit_L=torch.full((80,), 3, device=DEVICE),
            done_L=(torch.arange(80, device=DEVICE) % 5 == 0).long(),
            temperature=torch.tensor([temperature], device=DEVICE),
            uniforms_LN=uniforms,
            tokens_LN=torch.full((80, 5), -1, device=DEVICE),
            logprobs_LN=torch.zeros(80, 5, device=DEVICE),
            is_end_V=ends,
        )
        ops.say(logits, slots, turn)
        turns.append(turn)
    kernel, definition = turns
    for name in ("last_L", "position_L", "said_L", "done_L", "tokens_LN"):
        assert torch.equal(getattr(kernel, name), getattr(definition, name)), name
    assert torch.allclose(kernel.logprobs_LN, definition.logprobs_LN, atol=1e-4)
    assert (kernel.last_L >= 0).sum() > 40
