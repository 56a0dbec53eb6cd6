"""The training forward of the Llama / Qwen2 / Qwen3 family with LoRA, in few operations: what a small model on a GPU
needs, where launching the modules of transformers and peft takes several times longer than computing them.

    hidden_BTD = LeanForward(model)(tokens_BT, ("policy",))

The same function as `DualAdapterModel.hidden` computes through the modules, gradients included: a test compares
them. Adapters stay fp32 and are rounded to the base's dtype once per forward; their gradients are summed in fp32.

Shape suffixes: B rows, T tokens, M = B * T, W width of an input, R ranks of all LoRA on it, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lfo.model.decoder import FusedDecoder, base_linear, layer_linears

if TYPE_CHECKING:
    from lfo.model.adapters import DualAdapterModel


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lora:
    """One adapter on one of the linear layers that share an input, rounded to the dtype that computes."""

    rows: slice  # of the output
    ranks: slice  # of A of the whole group
    scale: float
    b: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """Linear layers with one input: q, k, v; o; gate, up; down."""

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    loras: tuple[_Lora, ...]
    a: Tensor  # R x W, rounded
    parameters: tuple[Tensor, ...]  # A and B of each LoRA, as they are trained


class _Linears(torch.autograd.Function):
    """x -> all outputs side by side."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: _Group, *parameters: Tensor) -> Tensor:
        y = x.new_empty(len(x), sum(len(weight) for weight in group.weights))
        first = 0
        for weight, bias in zip(group.weights, group.biases, strict=True):
            part = y[:, first : first + len(weight)]
            torch.mm(x, weight.T, out=part)
            if bias is not None:
                part.add_(bias)
            first += len(weight)
        projected = x @ group.a.T
        for lora in group.loras:
            y[:, lora.rows].addmm_(projected[:, lora.ranks], lora.b.T, alpha=lora.scale)
        ctx.group = group
        ctx.save_for_backward(x, projected)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        gradient = gradient.contiguous()
        x, projected = ctx.saved_tensors
        group: _Group = ctx.group
        towards_x, first = None, 0
        if ctx.needs_input_grad[0]:
            for weight in group.weights:
                part = gradient[:, first : first + len(weight)]
                towards_x = part @ weight if towards_x is None else towards_x.addmm_(part, weight)
                first += len(weight)
        towards_projected = torch.empty_like(projected)
        answers: list[Tensor | None] = [None] * len(group.parameters)
        for place, lora in enumerate(group.loras):
            part = gradient[:, lora.rows]
            if ctx.needs_input_grad[2 + 2 * place + 1]:
                answers[2 * place + 1] = _product(part.T, projected[:, lora.ranks]).mul_(lora.scale)
            torch.mm(part, lora.b * lora.scale, out=towards_projected[:, lora.ranks])
        if any(ctx.needs_input_grad[2::2]):
            towards_a = _product(towards_projected.T, x)
            for place, lora in enumerate(group.loras):
                if ctx.needs_input_grad[2 + 2 * place]:
                    answers[2 * place] = towards_a[lora.ranks]
        if towards_x is not None and group.loras:
            towards_x.addmm_(towards_projected, group.a)
        return towards_x, None, *answers


def _product(one: Tensor, other: Tensor) -> Tensor:
    """In fp32, whatever the factors are in."""
    if one.device.type == "cuda" and one.dtype != torch.float32:
        return torch.mm(one, other, out_dtype=torch.float32)
    return (one @ other).float()


class _Rotate(torch.autograd.Function):
    """Rotary position embedding, `rotate_half` as a roll: the sine's first half is negated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        cos, sin = ctx.saved_tensors
        return (gradient * cos).add_((gradient * sin).roll(gradient.shape[-1] // 2, -1)), None, None


class LeanForward:
    """Holds no weights of its own but the rounded ones of the adapters that a forward uses."""

    def __init__(self, model: DualAdapterModel) -> None:
        self._model = model
        self._config = model.config
        self._groups: dict[tuple[str, ...], list[dict[str, _Group]]] = {}
        self._copies: dict[tuple[str, ...], tuple[list[Tensor], list[Tensor]]] = {}

    supports = staticmethod(FusedDecoder.supports)

    def __call__(self, tokens_BT: Tensor, adapters: Sequence[str]) -> Tensor:
        body = self._model.causal_lm.model
        groups = self._rounded(tuple(adapters))
        rows, length = tokens_BT.shape
        x = F.embedding(tokens_BT, body.embed_tokens.weight).flatten(0, 1)
        positions = torch.arange(length, device=x.device)[None]
        cos, sin = body.rotary_emb(x, positions)
        half = cos.shape[-1] // 2
        cos, sin = cos[0, :, None], torch.cat([-sin[0, :, None, :half], sin[0, :, None, half:]], -1)
        for layer, linears in zip(body.layers, groups, strict=True):
            normed = _norm(x, layer.input_layernorm)
            x = x + self._linear(self._attend(normed, linears, layer.self_attn, cos, sin, rows), linears["out"])
            gate, up = self._linear(_norm(x, layer.post_attention_layernorm), linears["gate_up"]).chunk(2, -1)
            x = x + self._linear(F.silu(gate) * up, linears["down"])
        return _norm(x, body.norm).unflatten(0, (rows, length))

    def _attend(self, x: Tensor, linears: Any, attention: Any, cos: Tensor, sin: Tensor, rows: int) -> Tensor:
        queries, keys = self._config.num_attention_heads, self._config.num_key_value_heads
        qkv = self._linear(x, linears["qkv"]).view(rows, -1, queries + 2 * keys, attention.head_dim)
        qk, value = qkv.split([queries + keys, keys], 2)
        if hasattr(attention, "q_norm"):
            query, key = qk.split([queries, keys], 2)
            query = _Rotate.apply(_norm(query, attention.q_norm), cos, sin)
            key = _Rotate.apply(_norm(key, attention.k_norm), cos, sin)
        else:
            query, key = _Rotate.apply(qk, cos, sin).split([queries, keys], 2)  # pyright: ignore[reportOptionalMemberAccess]
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            scale=attention.scaling,
            enable_gqa=queries != keys,
        )
        return attended.transpose(1, 2).reshape(len(x), -1)

    @staticmethod
    def _linear(x: Tensor, group: _Group) -> Any:
        return _Linears.apply(x, group, *group.parameters)

    # ------------------------------------------------------------------ adapters

    @torch.no_grad()
    def _rounded(self, adapters: tuple[str, ...]) -> list[dict[str, _Group]]:
        """The groups of every layer, with the present weights of these adapters."""
        if adapters not in self._groups:
            self._copies[adapters] = ([], [])
            layers = self._model.causal_lm.model.layers
            self._groups[adapters] = [self._make_groups(layer, adapters) for layer in layers]
        sources, targets = self._copies[adapters]
        if targets:
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
        return self._groups[adapters]

    def _make_groups(self, layer: Any, adapters: tuple[str, ...]) -> dict[str, _Group]:
        modules = dict(layer_linears(layer))
        parts = {
            "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "out": ("self_attn.o_proj",),
            "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
            "down": ("mlp.down_proj",),
        }
        return {name: self._make_group([modules[each] for each in names], adapters) for name, names in parts.items()}

    def _make_group(self, modules: Sequence[Any], adapters: tuple[str, ...]) -> _Group:
        linears = [base_linear(module) for module in modules]
        weights = tuple(linear.weight for linear in linears)
        found = []
        first = 0
        for module, weight in zip(modules, weights, strict=True):
            rows, first = slice(first, first + len(weight)), first + len(weight)
            for adapter in adapters:
                if adapter in getattr(module, "lora_A", {}):
                    a, b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
                    found.append((rows, module.scaling[adapter], a, b))
        ranks = sum(len(a) for _, _, a, _ in found)
        all_a = weights[0].new_zeros(ranks, weights[0].shape[1])
        sources, targets = self._copies[adapters]
        loras, rank = [], 0
        for rows, scale, a, b in found:
            rounded = torch.empty_like(b, dtype=all_a.dtype)
            lora = _Lora(rows=rows, ranks=slice(rank, rank + len(a)), scale=scale, b=rounded)
            sources += [a.detach(), b.detach()]
            targets += [all_a[lora.ranks], rounded]
            rank += len(a)
            loras.append(lora)
        return _Group(
            weights=weights,
            biases=tuple(linear.bias for linear in linears),
            loras=tuple(loras),
            a=all_a,
            parameters=tuple(weight for _, _, a, b in found for weight in (a, b)),
        )


def _norm(x: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
