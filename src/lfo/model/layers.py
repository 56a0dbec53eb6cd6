"""The layers of the Llama / Qwen2 / Qwen3 family: their names, which models consist of them, and what all decoders do.

`lean` trains such models and `fused_decoder` decodes with them, both without the modules of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

_FAMILIES = {"llama", "qwen2", "qwen3"}
_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}  # others depend on the length of the row

# The linear layers of a transformer layer, grouped by input: those with the same input are computed together.
PARTS_OF_LAYER = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def layer_linears(layer: nn.Module) -> dict[str, Any]:
    """Return the linear layers of a transformer layer by name, with LoRA if they have it."""
    return {name: layer.get_submodule(name) for names in PARTS_OF_LAYER.values() for name in names}


def base_linear(module: Any) -> Any:
    """Return the plain linear layer under LoRA, or the module itself."""
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def base_linears(causal_lm: Any) -> list[Any]:
    """Return the plain linear layers of all transformer layers."""
    return [base_linear(module) for layer in causal_lm.model.layers for module in layer_linears(layer).values()]


def is_llama_like(causal_lm: Any) -> bool:
    """Whether a `...ForCausalLM` belongs to this family and has plain weights."""
    config = causal_lm.config
    if config.model_type not in _FAMILIES or config.hidden_act != "silu":
        return False
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        return False
    body = causal_lm.model
    if body.rotary_emb.rope_type not in _STATIC_ROPE:
        return False
    if 2 * body.rotary_emb.inv_freq.numel() != body.layers[0].self_attn.head_dim:
        return False
    # A quantised base has packed weights, which cannot be merged.
    return all(type(each) is nn.Linear and each.weight.is_floating_point() for each in base_linears(causal_lm))


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """The shape of attention, and the rotary embedding."""

    queries: int
    keys: int
    size: int
    scaling: float
    epsilon: float
    cos_SD: Tensor
    sin_SD: Tensor  # the first half negated: rotate_half(x) * sin == x.roll(half) * this


def rotate(qkv: Tensor, cos_MD: Tensor, sin_MD: Tensor, norm: Tensor | None, heads: Heads) -> None:
    """Norm (if the model has one) and rotate queries and keys, in place; values follow them."""
    qk = qkv[:, : heads.queries + heads.keys]
    if norm is not None:
        qk.copy_(F.rms_norm(qk, (heads.size,), None, heads.epsilon) * norm)
    rolled = qk.roll(heads.size // 2, -1)
    qk.mul_(cos_MD[:, None]).addcmul_(rolled, sin_MD[:, None])


def draw(logits_BV: Tensor, temperature: float, uniforms_B: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choose a token for each row: by inverting its distribution function at `uniforms_B`, or the likeliest one.

    >>> draw(torch.tensor([[0.0, 0.0]]).repeat(2, 1), 1.0, torch.tensor([0.49, 0.51]))[0].tolist()
    [0, 1]
    """
    if temperature == 0:
        logprobs_BV = logits_BV.log_softmax(-1)
        chosen_B = logits_BV.argmax(-1)
    else:
        if uniforms_B is None:
            raise ValueError("sampling needs uniform numbers")
        logprobs_BV = (logits_BV / temperature).log_softmax(-1)
        distribution_BV = logprobs_BV.exp().cumsum(-1)
        target_B1 = uniforms_B[:, None] * distribution_BV[:, -1:]
        # right=True: the first token whose sum exceeds the target, so a token of probability 0 is never chosen.
        chosen_B = torch.searchsorted(distribution_BV, target_B1, right=True)[:, 0].clamp(max=logits_BV.shape[-1] - 1)
    return chosen_B, logprobs_BV.gather(-1, chosen_B[:, None])[:, 0]
