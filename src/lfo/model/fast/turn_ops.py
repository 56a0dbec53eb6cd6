"""The operations of a decode step besides matrix products, in torch: the reference of `turn_kernels`.

`turn_kernels` has the same functions in Triton, for a GPU; these run anywhere, on any number of rows. A *wide* row is
an input followed by its projections onto A of LoRA: one product with `[W | scale * B]` is then the whole linear layer,
and the adapters keep their precision (merged into bf16 weights, a small update would vanish).

Shape suffixes: as in `decoder`; W width of a layer's input, R rank of its LoRA, L slots, N tokens of a turn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lfo.model.layers import Heads, draw, rotate


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnTensors:
    """The state of the rows of a turn, by slot, on the device; changed in place."""

    last_L: Tensor  # the next input token
    position_L: Tensor  # and its position
    said_L: Tensor  # the number of sampled tokens
    limit_L: Tensor
    done_L: Tensor  # 1 if a row has ended; its state no longer changes
    temperature: Tensor  # one number; 0 = the likeliest token
    uniforms_LN: Tensor
    tokens_LN: Tensor
    logprobs_LN: Tensor
    is_end_V: Tensor


def widen(x_MW: Tensor, a_RW: Tensor) -> Tensor:
    return torch.cat([x_MW, F.linear(x_MW, a_RW)], dim=-1) if len(a_RW) else x_MW


def widen_norm(x_MW: Tensor, weight_W: Tensor, a_RW: Tensor, epsilon: float) -> Tensor:
    return widen(F.rms_norm(x_MW, weight_W.shape, weight_W, epsilon), a_RW)


def widen_gate(gate_up: Tensor, a_RW: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return widen(F.silu(gate) * up, a_RW)


def attend(
    qkv: Tensor,
    norm: Tensor | None,
    keys: Tensor,
    values: Tensor,
    slots_B: Tensor,
    position_L: Tensor,
    a_RW: Tensor,
    heads: Heads,
) -> Tensor:
    """Attend with one query for each row to its slot of the cache; store the new key and value there.

    `keys` and `values` are L x K x S x D.
    """
    positions_B = position_L[slots_B]
    qkv = qkv.unflatten(-1, (-1, heads.size))
    rotate(qkv, heads.cos_SD[positions_B], heads.sin_SD[positions_B], norm, heads)
    query, key, value = qkv.split([heads.queries, heads.keys, heads.keys], dim=1)
    keys[slots_B, :, positions_B] = key
    values[slots_B, :, positions_B] = value
    visible_BS = torch.arange(keys.shape[2], device=keys.device) <= positions_B[:, None]
    group = heads.queries // heads.keys
    attended = F.scaled_dot_product_attention(
        query[:, :, None],
        keys[slots_B].repeat_interleave(group, dim=1),
        values[slots_B].repeat_interleave(group, dim=1),
        attn_mask=visible_BS[:, None, None],
        scale=heads.scaling,
    )
    return widen(attended.flatten(1), a_RW)


def say(logits_BV: Tensor, slots_B: Tensor, turn: TurnTensors) -> None:
    """Sample a token for every row that has not ended, store it, and make it the next input."""
    said_B = turn.said_L[slots_B]
    uniforms_B = turn.uniforms_LN[slots_B, said_B.clamp(max=turn.uniforms_LN.shape[1] - 1)]
    chosen_B, logprobs_B = draw(logits_BV, turn.temperature.item(), uniforms_B)
    speaks_B = turn.done_L[slots_B] == 0
    slots_B, said_B, chosen_B, logprobs_B = (each[speaks_B] for each in (slots_B, said_B, chosen_B, logprobs_B))
    turn.tokens_LN[slots_B, said_B] = chosen_B
    turn.logprobs_LN[slots_B, said_B] = logprobs_B
    turn.last_L[slots_B] = chosen_B
    turn.position_L[slots_B] += 1
    turn.said_L[slots_B] = said_B + 1
    ends_B = turn.is_end_V[chosen_B] | (said_B + 1 >= turn.limit_L[slots_B])
    turn.done_L[slots_B] = ends_B.to(turn.done_L.dtype)
