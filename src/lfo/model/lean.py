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
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lfo.model.decoder import FusedDecoder, base_linear, layer_linears

if TYPE_CHECKING:
    from lfo.model.adapters import DualAdapterModel


@dataclass(frozen=True, kw_only=True, slots=True)
class _Linear:
    """A linear layer, and the LoRA of all adapters on it side by side: a second adapter launches nothing more."""

    weight: Tensor
    bias: Tensor | None
    rows: slice  # of the group's output
    ranks: slice  # of the group's A
    adapters: tuple[tuple[str, slice], ...]  # each with its share of these ranks
    b: Tensor  # rounded


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """Linear layers with one input: q, k, v; o; gate, up; down."""

    linears: tuple[_Linear, ...]
    a: Tensor  # R x W, scaled and rounded
    scale_R1: Tensor
    parameters: tuple[Tensor, ...]  # A and B of each LoRA, as they are trained


_FIXED = 3  # arguments before the parameters


class _Linears(torch.autograd.Function):
    """x -> all outputs side by side. `uses_MR`: 1 where a token's row has the adapter of that rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: _Group, uses_MR: Tensor | None, *parameters: Tensor) -> Tensor:
        y = x.new_empty(len(x), group.linears[-1].rows.stop)
        projected = x @ group.a.T
        if uses_MR is not None:
            projected.mul_(uses_MR)
        for linear in group.linears:
            part = y[:, linear.rows]
            torch.mm(x, linear.weight.T, out=part)
            if linear.bias is not None:
                part.add_(linear.bias)
            if linear.adapters:
                part.addmm_(projected[:, linear.ranks], linear.b.T)
        ctx.group, ctx.uses_MR = group, uses_MR
        ctx.save_for_backward(x, projected)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        gradient = gradient.contiguous()
        x, projected = ctx.saved_tensors
        group: _Group = ctx.group
        needs_x, *needs = ctx.needs_input_grad[:1] + ctx.needs_input_grad[_FIXED:]
        towards_x = None
        towards_projected = torch.empty_like(projected)
        answers_a: list[Tensor | None] = []
        answers_b: list[Tensor | None] = []
        for linear in group.linears:
            part = gradient[:, linear.rows]
            if needs_x:
                towards_x = part @ linear.weight if towards_x is None else towards_x.addmm_(part, linear.weight)
            if linear.adapters:
                torch.mm(part, linear.b, out=towards_projected[:, linear.ranks])
                of_linear = projected[:, linear.ranks]  # columns of one product would be copied into gradients
                answers_b += [_product(part.T, of_linear[:, ranks]) for _, ranks in linear.adapters]
        if answers_b:
            if ctx.uses_MR is not None:
                towards_projected.mul_(ctx.uses_MR)
            towards_a = _product(towards_projected.T, x).mul_(group.scale_R1)
            for linear in group.linears:
                answers_a += [towards_a[linear.ranks][ranks] for _, ranks in linear.adapters]
            if towards_x is not None:
                towards_x.addmm_(towards_projected, group.a)
        answers = [answer for pair in zip(answers_a, answers_b, strict=True) for answer in pair]
        return towards_x, None, None, *(each if needed else None for each, needed in zip(answers, needs, strict=True))


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
        self._copies: dict[tuple[str, ...], _Copies] = {}

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
            owners = [
                everyone.index(adapter)
                for linear in group.linears
                for adapter, ranks in linear.adapters
                for _ in range(ranks.start, ranks.stop)
            ]
            uses[name] = has_MA[:, owners].to(group.a.dtype)
        return uses

    # ------------------------------------------------------------------ adapters

    @torch.no_grad()
    def _rounded(self, adapters: tuple[str, ...]) -> list[dict[str, _Group]]:
        """The groups of every layer, with the present weights of these adapters."""
        if adapters not in self._groups:
            self._copies[adapters] = _Copies()
            layers = self._model.causal_lm.model.layers
            self._groups[adapters] = [self._make_groups(layer, adapters) for layer in layers]
        self._copies[adapters].refresh()
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
        found = [[name for name in adapters if name in getattr(module, "lora_A", {})] for module in modules]
        sizes = [
            [len(module.lora_A[name].weight) for name in names] for module, names in zip(modules, found, strict=True)
        ]
        first = base_linear(modules[0]).weight
        all_a = first.new_zeros(sum(map(sum, sizes)), first.shape[1])
        scales: list[float] = []
        linears, parameters, row, rank = [], [], 0, 0
        for module, names, ranks in zip(modules, found, sizes, strict=True):
            linear = base_linear(module)
            out = len(linear.weight)
            b = linear.weight.new_empty(out, sum(ranks))
            places = [slice(end - size, end) for size, end in zip(ranks, accumulate(ranks), strict=True)]
            a = all_a[rank : rank + sum(ranks)]
            for name, place in zip(names, places, strict=True):
                a_source, b_source = module.lora_A[name].weight, module.lora_B[name].weight
                scale = module.scaling[name]
                self._copies[adapters].add(a_source.detach(), scale, a[place])
                self._copies[adapters].add(b_source.detach(), 1.0, b[:, place])
                parameters += [a_source, b_source]
                scales += [scale] * (place.stop - place.start)
            linears.append(
                _Linear(
                    weight=linear.weight,
                    bias=linear.bias,
                    rows=slice(row, row + out),
                    ranks=slice(rank, rank + sum(ranks)),
                    adapters=tuple(zip(names, places, strict=True)),
                    b=b,
                )
            )
            row, rank = row + out, rank + sum(ranks)
        return _Group(
            linears=tuple(linears),
            a=all_a,
            scale_R1=torch.tensor(scales, device=first.device)[:, None],
            parameters=tuple(parameters),
        )


@dataclass(slots=True)
class _Copies:
    """Where the trained weights go, scaled and rounded, at the beginning of each forward: two launches for them all."""

    sources: list[Tensor] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)

    def add(self, source: Tensor, scale: float, target: Tensor) -> None:
        self.sources.append(source)
        self.scales.append(scale)
        self.targets.append(target)

    def refresh(self) -> None:
        if self.sources:
            scaled = torch._foreach_mul(self.sources, self.scales)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_copy_(self.targets, scaled)  # pyright: ignore[reportPrivateImportUsage]


def _norm(x: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
