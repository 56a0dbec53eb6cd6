"""The training forward of the Llama / Qwen2 / Qwen3 family with LoRA, in few operations. Small models need it: on a GPU
launching the modules of transformers and peft takes several times longer than computing them, on a CPU a fifth longer.

    hidden_BTD = LeanForward(model)(tokens_BT, [("policy",), ("world_model",)], lengths=[900, 200])

The same function as `DualAdapterModel.hidden_of_modules`, gradients included: a test compares
them. Rows of different lengths and with different adapters run together: tokens are packed, padded for attention
alone, and each row sees its own adapters only. Adapters stay fp32 and are rounded to the base's dtype once per
forward; their gradients are summed in fp32.

Shape suffixes: B rows, T tokens of the longest, M tokens of all rows laid end to end, W width of an input, R ranks
of all LoRA on it, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lfo.model.decoder import FusedDecoder, base_linear, layer_linears

if TYPE_CHECKING:
    from lfo.model.adapters import DualAdapterModel


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lora:
    """One adapter on one of the linear layers that share an input, rounded to the dtype that computes."""

    adapter: str
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


_FIXED = 3  # arguments before the parameters


class _Linears(torch.autograd.Function):
    """x -> all outputs side by side. `uses_MR`: 1 where a token's row has the adapter of that rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: _Group, uses_MR: Tensor | None, *parameters: Tensor) -> Tensor:
        y = x.new_empty(len(x), sum(len(weight) for weight in group.weights))
        first = 0
        for weight, bias in zip(group.weights, group.biases, strict=True):
            part = y[:, first : first + len(weight)]
            torch.mm(x, weight.T, out=part)
            if bias is not None:
                part.add_(bias)
            first += len(weight)
        projected = x @ group.a.T
        if uses_MR is not None:
            projected.mul_(uses_MR)
        for lora in group.loras:
            y[:, lora.rows].addmm_(projected[:, lora.ranks], lora.b.T, alpha=lora.scale)
        ctx.group, ctx.uses_MR = group, uses_MR
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
            if ctx.needs_input_grad[_FIXED + 2 * place + 1]:
                answers[2 * place + 1] = _product(part.T, projected[:, lora.ranks]).mul_(lora.scale)
            torch.mm(part, lora.b * lora.scale, out=towards_projected[:, lora.ranks])
        if ctx.uses_MR is not None:
            towards_projected.mul_(ctx.uses_MR)
        if any(ctx.needs_input_grad[_FIXED::2]):
            towards_a = _product(towards_projected.T, x)
            for place, lora in enumerate(group.loras):
                if ctx.needs_input_grad[_FIXED + 2 * place]:
                    answers[2 * place] = towards_a[lora.ranks]
        if towards_x is not None and group.loras:
            towards_x.addmm_(towards_projected, group.a)
        return towards_x, None, None, *answers


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


class _Spread(torch.autograd.Function):
    """Packed tokens into their places among zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places_M: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(places_M)
        return x.new_zeros(count, *x.shape[1:]).index_copy_(0, places_M, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].index_select(0, *ctx.saved_tensors), None, None


class _Pack(torch.autograd.Function):
    """The other way round; no place occurs twice, so nothing has to be summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places_M: Tensor) -> Tensor:
        ctx.save_for_backward(places_M)
        ctx.count = len(x)
        return x.index_select(0, places_M)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), (places_M,) = gradients, ctx.saved_tensors
        return gradient.new_zeros(ctx.count, *gradient.shape[1:]).index_copy_(0, places_M, gradient), None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """Where the packed tokens stand in B x T; `places_M` is None where there is no padding."""

    rows: int
    length: int
    places_M: Tensor | None

    def spread(self, x: Tensor) -> Any:
        """M x ... -> B x T x ..."""
        if self.places_M is not None:
            x = cast(Tensor, _Spread.apply(x, self.places_M, self.rows * self.length))
        return x.unflatten(0, (self.rows, self.length))

    def pack(self, x: Tensor) -> Any:
        """B x T x ... -> M x ..."""
        x = x.flatten(0, 1)
        return x if self.places_M is None else _Pack.apply(x, self.places_M)


class LeanForward:
    """Holds no weights of its own but the rounded ones of the adapters that a forward uses."""

    def __init__(self, model: DualAdapterModel) -> None:
        self._model = model
        self._config = model.config
        self._groups: dict[tuple[str, ...], list[dict[str, _Group]]] = {}
        self._copies: dict[tuple[str, ...], tuple[list[Tensor], list[Tensor]]] = {}

    @staticmethod
    def supports(model: DualAdapterModel) -> bool:
        whole = not hasattr(model.head, "placements")  # weights sharded over several GPUs have them
        return whole and FusedDecoder.supports(model)

    def __call__(
        self, tokens_BT: Tensor, adapters: Sequence[Sequence[str]], *, lengths: Sequence[int] | None = None
    ) -> Tensor:
        """Hidden states after the final norm, B x T x D, each row with its own `adapters`; on padding they are void."""
        body = self._model.causal_lm.model
        rows, length = tokens_BT.shape
        lengths = [length] * rows if lengths is None else list(lengths)
        layout, positions_M = self._layout(lengths, length, tokens_BT.device)
        everyone = tuple(dict.fromkeys(name for row in adapters for name in row))
        groups = self._rounded(everyone)
        uses = self._uses(groups[0], adapters, everyone, lengths, tokens_BT.device)

        x = F.embedding(layout.pack(tokens_BT), body.embed_tokens.weight)
        cos, sin = body.rotary_emb(x, torch.arange(length, device=x.device)[None])
        half = cos.shape[-1] // 2
        cos, sin = cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)
        turn = cos[positions_M][:, None], sin[positions_M][:, None]
        for layer, linears in zip(body.layers, groups, strict=True):

            def linear(x: Tensor, name: str, linears: dict[str, _Group] = linears) -> Any:
                return _Linears.apply(x, linears[name], uses[name], *linears[name].parameters)

            qkv = linear(_norm(x, layer.input_layernorm), "qkv")
            x = x + linear(self._attend(qkv, layer.self_attn, turn, layout), "out")
            gate, up = linear(_norm(x, layer.post_attention_layernorm), "gate_up").chunk(2, -1)
            x = x + linear(F.silu(gate) * up, "down")
        return layout.spread(_norm(x, body.norm))

    def _attend(self, qkv: Tensor, attention: Any, turn: tuple[Tensor, Tensor], layout: _Layout) -> Tensor:
        queries, keys = self._config.num_attention_heads, self._config.num_key_value_heads
        qk, value = qkv.unflatten(-1, (-1, attention.head_dim)).split([queries + keys, keys], 1)
        if hasattr(attention, "q_norm"):
            query, key = qk.split([queries, keys], 1)
            query = layout.spread(cast(Tensor, _Rotate.apply(_norm(query, attention.q_norm), *turn)))
            key = layout.spread(cast(Tensor, _Rotate.apply(_norm(key, attention.k_norm), *turn)))
        else:
            query, key = layout.spread(cast(Tensor, _Rotate.apply(qk, *turn))).split([queries, keys], 2)
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            layout.spread(value).transpose(1, 2),
            is_causal=True,  # padding stands behind a row: nobody sees it
            scale=attention.scaling,
            enable_gqa=queries != keys,
        )
        return layout.pack(attended.transpose(1, 2)).flatten(1)

    @staticmethod
    def _layout(lengths: Sequence[int], length: int, device: torch.device) -> tuple[_Layout, Tensor]:
        rows = len(lengths)
        positions = torch.arange(length).expand(rows, -1)
        real = positions < torch.tensor(lengths)[:, None]
        places = None if min(lengths) == length else real.flatten().nonzero()[:, 0].to(device)
        return _Layout(rows=rows, length=length, places_M=places), positions[real].to(device)

    @staticmethod
    def _uses(
        groups: dict[str, _Group],
        adapters: Sequence[Sequence[str]],
        everyone: Sequence[str],
        lengths: Sequence[int],
        device: torch.device,
    ) -> dict[str, Tensor | None]:
        """For each group: which tokens go through which ranks; None where all go through all."""
        if all(set(row) == set(everyone) for row in adapters):
            return dict.fromkeys(groups)
        has_BA = torch.tensor([[float(name in row) for name in everyone] for row in adapters])
        has_MA = has_BA.repeat_interleave(torch.tensor(lengths), dim=0).to(device)
        uses: dict[str, Tensor | None] = {}
        for name, group in groups.items():
            owners = [everyone.index(lora.adapter) for lora in group.loras for _ in range(lora.b.shape[1])]
            uses[name] = has_MA[:, owners].to(group.a.dtype)
        return uses

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
                    found.append((adapter, rows, module.scaling[adapter], a, b))
        ranks = sum(len(a) for _, _, _, a, _ in found)
        all_a = weights[0].new_zeros(ranks, weights[0].shape[1])
        sources, targets = self._copies[adapters]
        loras, rank = [], 0
        for adapter, rows, scale, a, b in found:
            rounded = torch.empty_like(b, dtype=all_a.dtype)
            ranks_here = slice(rank, rank + len(a))
            lora = _Lora(adapter=adapter, rows=rows, ranks=ranks_here, scale=scale, b=rounded)
            sources += [a.detach(), b.detach()]
            targets += [all_a[lora.ranks], rounded]
            rank += len(a)
            loras.append(lora)
        return _Group(
            weights=weights,
            biases=tuple(linear.bias for linear in linears),
            loras=tuple(loras),
            a=all_a,
            parameters=tuple(weight for _, _, _, a, b in found for weight in (a, b)),
        )


def _norm(x: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
