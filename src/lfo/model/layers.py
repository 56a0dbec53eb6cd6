"""The layers of the Llama / Qwen2 / Qwen3 family: their names, and which models consist of them.

`lean` trains such models and `fused_decoder` decodes with them, both without the modules of transformers.
"""

from __future__ import annotations

from typing import Any

from torch import nn

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
