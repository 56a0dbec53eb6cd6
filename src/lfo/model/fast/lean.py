"""The training forward of the Llama / Qwen2 / Qwen3 family with LoRA, in few operations. It is faster for small models:
on a GPU, kernel launches of transformers and peft take several times longer than the work, on a CPU a fifth longer.

    hidden_BTD = LeanForward(model.causal_lm)(tokens_BT, [("policy",), ("world_model",)], tree=batch.tree)

It computes the same as `DualAdapterModel.hidden_of_modules`, with the same gradients; a test compares them. Rows of
different lengths and with different adapters run in one batch, each with its own adapters only. Tokens are packed, and
common prefixes of rows computed once (`row_tree`). Only attention sees rows with all their tokens and padding, except
rows that repeat others. Adapters stay fp32 and are rounded to the base's dtype once per forward; their gradients are
summed in fp32.

Shape suffixes: B rows, T tokens of the longest, K tokens of all rows, M of them that are computed, W width of an
input, R ranks of all LoRA on it, H heads, D head size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lfo.model.fast.row_tree import RowTree
from lfo.model.layers import PARTS_OF_LAYER, base_linear, base_linears, is_llama_like, layer_linears


@dataclass(frozen=True, kw_only=True, slots=True)
class _Linear:
    """A linear layer, and the concatenated LoRA of all its adapters, which is one product."""

    weight: Tensor
    bias: Tensor | None
    b: Tensor  # scaled and rounded, as in the sampler
    b_turned: Tensor  # the same, transposed
    adapter_count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """Linear layers with one input: q, k, v; o; gate, up; down.

    Views are made by one split into these sizes: on a GPU the host limits the speed of an update.
    """

    linears: tuple[_Linear, ...]
    widths: tuple[int, ...]  # of each linear's output
    ranks: tuple[int, ...]  # on each linear
    adapters: tuple[tuple[str, int], ...]  # on each linear in turn, with its rank
    ranks_of_adapters: tuple[int, ...]
    a: Tensor  # R x W, rounded
    a_turned: Tensor
    scale_R: Tensor
    parameters: tuple[Tensor, ...]  # A and B of each LoRA, as they are trained


_FIXED = 3  # arguments before the parameters


class _Linears(torch.autograd.Function):
    """Compute all outputs, concatenated. `uses_MR`: 1 where the row of a token has the adapter of that rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: _Group, uses_MR: Tensor | None, *parameters: Tensor) -> Tensor:
        y = x.new_empty(len(x), sum(group.widths))
        projected = x @ group.a_turned
        if uses_MR is not None:
            projected.mul_(uses_MR)
        parts = zip(
            group.linears, y.split_with_sizes(group.widths, 1), projected.split_with_sizes(group.ranks, 1), strict=True
        )
        for linear, part, of_linear in parts:
            torch.mm(x, linear.weight.T, out=part)
            if linear.bias is not None:
                part.add_(linear.bias)
            if linear.adapter_count:
                part.addmm_(of_linear, linear.b_turned)
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
        # One product for each adapter: columns of a common product would have to be copied to become gradients.
        scaled = iter((projected * group.scale_R).split_with_sizes(group.ranks_of_adapters, 1))
        towards_b: list[Tensor] = []
        parts = zip(
            group.linears,
            gradient.split_with_sizes(group.widths, 1),
            towards_projected.split_with_sizes(group.ranks, 1),
            strict=True,
        )
        for linear, part, of_linear in parts:
            if needs_x:
                towards_x = part @ linear.weight if towards_x is None else towards_x.addmm_(part, linear.weight)
            if linear.adapter_count:
                torch.mm(part, linear.b, out=of_linear)
                turned = part.T
                towards_b += [_product(turned, of_adapter) for of_adapter in islice(scaled, linear.adapter_count)]
        answers: list[Tensor] = []
        if group.parameters:
            if ctx.uses_MR is not None:
                towards_projected.mul_(ctx.uses_MR)
            towards_a = _product(towards_projected.T, x).split_with_sizes(group.ranks_of_adapters)
            answers = [gradient for pair in zip(towards_a, towards_b, strict=True) for gradient in pair]
            if towards_x is not None:
                towards_x.addmm_(towards_projected, group.a)
        return towards_x, None, None, *(each if needed else None for each, needed in zip(answers, needs, strict=True))


def _product(one: Tensor, other: Tensor) -> Tensor:
    """Multiply with an fp32 result, for every dtype of the factors."""
    if one.device.type == "cuda" and one.dtype != torch.float32:
        return torch.mm(one, other, out_dtype=torch.float32)
    return (one @ other).float()


def _apply(linears: dict[str, _Group], name: str, x: Tensor, uses: dict[str, Tensor | None]) -> Any:
    return _Linears.apply(x, linears[name], uses[name], *linears[name].parameters)


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
    """Scatter packed tokens into a tensor of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places_K: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(places_K)
        return x.new_zeros(count, *x.shape[1:]).index_copy_(0, places_K, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].index_select(0, *ctx.saved_tensors), None, None


class _Pack(torch.autograd.Function):
    """Gather tokens; no index occurs twice, so the backward needs no sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, indices_M: Tensor) -> Tensor:
        ctx.save_for_backward(indices_M)
        ctx.count = len(x)
        return x.index_select(0, indices_M)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), (indices_M,) = gradients, ctx.saved_tensors
        return gradient.new_zeros(ctx.count, *gradient.shape[1:]).index_copy_(0, indices_M, gradient), None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Repetitions:
    """Where the nodes of a tree occur among its tokens."""

    nodes_K: Tensor  # the node of each token
    tokens_K: Tensor  # the tokens sorted by node
    starts_M: Tensor  # where the tokens of each node start there

    @classmethod
    def of(cls, tree: RowTree, device: torch.device) -> _Repetitions:
        nodes_K = tree.nodes_BT[tree.real_BT]
        tokens_K = nodes_K.argsort(kind="stable")
        starts_M = np.searchsorted(nodes_K[tokens_K], np.arange(len(tree.firsts_M)))
        nodes, tokens, starts = (torch.from_numpy(each).to(device) for each in (nodes_K, tokens_K, starts_M))
        return cls(nodes_K=nodes, tokens_K=tokens, starts_M=starts)


class _Repeat(torch.autograd.Function):
    """Repeat nodes where they occur. Their gradients are summed without atomics, so always in the same order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, repetitions: _Repetitions) -> Tensor:
        ctx.repetitions = repetitions
        return x.index_select(0, repetitions.nodes_K)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), repetitions = gradients, ctx.repetitions
        summed = F.embedding_bag(repetitions.tokens_K, gradient.flatten(1), repetitions.starts_M, mode="sum")
        return summed.unflatten(1, gradient.shape[1:]), None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """Where the packed tokens, which are the nodes of a tree, are in B x T."""

    rows: int
    length: int
    repetitions: _Repetitions | None  # None if each token has its own node
    places_K: Tensor | None  # where the tokens are; None if there is no padding
    firsts_M: Tensor | None  # where each node is; None if packing changes nothing

    @classmethod
    def of(cls, tree: RowTree, device: torch.device) -> _Layout:
        rows, length = tree.real_BT.shape
        full, shares = bool(tree.real_BT.all()), tree.shares
        return cls(
            rows=rows,
            length=length,
            repetitions=_Repetitions.of(tree, device) if shares else None,
            places_K=None if full else torch.from_numpy(tree.real_BT.ravel().nonzero()[0]).to(device),
            firsts_M=None if full and not shares else torch.from_numpy(tree.firsts_M).to(device),
        )

    def spread(self, x: Tensor) -> Any:
        """M x ... -> B x T x ..., with zeros on padding."""
        if self.repetitions is not None:
            x = cast(Tensor, _Repeat.apply(x, self.repetitions))
        if self.places_K is not None:
            x = cast(Tensor, _Spread.apply(x, self.places_K, self.rows * self.length))
        return x.unflatten(0, (self.rows, self.length))

    def pack(self, x: Tensor) -> Any:
        """B x T x ... -> M x ..."""
        x = x.flatten(0, 1)
        return x if self.firsts_M is None else _Pack.apply(x, self.firsts_M)


class LeanForward:
    """The forward; it stores only the rounded adapter weights."""

    def __init__(self, causal_lm: Any) -> None:
        self._body = causal_lm.model
        self._config = causal_lm.config
        self._groups: dict[tuple[str, ...], list[dict[str, _Group]]] = {}
        self._copies: dict[tuple[str, ...], _Copies] = {}

    @staticmethod
    def supports(causal_lm: Any) -> bool:
        # Sharded weights have placements: this rank has only a part of them.
        return is_llama_like(causal_lm) and not any(
            hasattr(each.weight, "placements") for each in (causal_lm.get_output_embeddings(), *base_linears(causal_lm))
        )

    def __call__(
        self,
        tokens_BT: Tensor,
        adapters: Sequence[Sequence[str]],
        *,
        tree: RowTree | None = None,
        wanted_BT: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states after the final norm, B x T x D, each row with its own `adapters`.

        `tree` tells padding, and which tokens are computed once; None: every token is computed. Hidden states are zeros
        on padding and where they are not wanted (a mask on the host): in the last layer only attention needs all.
        """
        body, device = self._body, tokens_BT.device
        rows, length = tokens_BT.shape
        tree = RowTree.unshared([length] * rows) if tree is None else tree
        assert tree.real_BT.shape == tokens_BT.shape
        layout, attention_layout = _Layout.of(tree, device), _Layout.of(tree.without_repeated_rows(), device)
        rows_M, positions_M = (torch.from_numpy(each).to(device) for each in np.divmod(tree.firsts_M, length))
        everyone = tuple(dict.fromkeys(name for row in adapters for name in row))
        groups = self._rounded(everyone)
        uses = self._uses(groups[0], adapters, everyone, rows_M)

        x = F.embedding(layout.pack(tokens_BT), body.embed_tokens.weight)
        cos, sin = body.rotary_emb(x, torch.arange(length, device=x.device)[None])
        half = cos.shape[-1] // 2
        cos, sin = cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)
        turn = cos[positions_M][:, None], sin[positions_M][:, None]
        last = body.layers[-1]
        for layer, linears in zip(body.layers, groups, strict=True):
            linear = partial(_apply, linears)
            qkv = linear("qkv", _norm(x, layer.input_layernorm), uses)
            attended = self._attend(qkv, layer.self_attn, turn, attention_layout)
            if layer is last and wanted_BT is not None:
                wanted_tree, chosen = tree.of_wanted(wanted_BT.numpy())
                layout, chosen_M = _Layout.of(wanted_tree, device), torch.from_numpy(chosen).to(device)
                x, attended = (cast(Tensor, _Pack.apply(each, chosen_M)) for each in (x, attended))
                uses = {name: None if use is None else use[chosen_M] for name, use in uses.items()}
            x = x + linear("out", attended, uses)
            gate, up = linear("gate_up", _norm(x, layer.post_attention_layernorm), uses).chunk(2, -1)
            x = x + linear("down", F.silu(gate) * up, uses)
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
            is_causal=True,  # padding is at the end of a row, so no token sees it
            scale=attention.scaling,
            enable_gqa=queries != keys,
        )
        return layout.pack(attended.transpose(1, 2)).flatten(1)

    @staticmethod
    def _uses(
        groups: dict[str, _Group],
        adapters: Sequence[Sequence[str]],
        everyone: Sequence[str],
        rows_M: Tensor,
    ) -> dict[str, Tensor | None]:
        """Return, for each group, which tokens use which ranks; None if all tokens use all ranks."""
        if all(set(row) == set(everyone) for row in adapters):
            return dict.fromkeys(groups)
        has_BA = torch.tensor([[float(name in row) for name in everyone] for row in adapters])
        has_MA = has_BA.to(rows_M.device)[rows_M]
        uses: dict[str, Tensor | None] = {}
        for name, group in groups.items():
            owners = [everyone.index(adapter) for adapter, rank in group.adapters for _ in range(rank)]
            uses[name] = has_MA[:, owners].to(group.a.dtype)
        return uses

    # ------------------------------------------------------------------ adapters

    @torch.no_grad()
    def _rounded(self, adapters: tuple[str, ...]) -> list[dict[str, _Group]]:
        """Return the groups of every layer, with the current weights of these adapters."""
        if adapters not in self._groups:
            self._copies[adapters] = _Copies()
            self._groups[adapters] = self._make_groups(adapters, self._copies[adapters])
        self._copies[adapters].refresh()
        return self._groups[adapters]

    def _make_groups(self, adapters: tuple[str, ...], copies: _Copies) -> list[dict[str, _Group]]:
        layers = [layer_linears(layer) for layer in self._body.layers]
        alike: dict[Any, list[tuple[int, Any]]] = defaultdict(list)
        for number, modules in enumerate(layers):
            for name, module in modules.items():
                alike[name, base_linear(module).weight.shape, _present(module, adapters)].append((number, module))
        all_b: dict[tuple[int, str], Tensor] = {}
        for (name, shape, present), found in alike.items():
            # The same layer of all depths is in one tensor, so that one copy fills it.
            b = base_linear(found[0][1]).weight.new_empty(len(found), shape[0], sum(rank for _, rank, _ in present))
            first = 0
            for adapter, rank, scale in present:
                sources = [module.lora_B[adapter].weight for _, module in found]
                copies.columns.append((sources, scale, b[:, :, first : first + rank]))
                first += rank
            all_b |= {(number, name): b[index] for index, (number, _) in enumerate(found)}
        return [
            {
                part: self._make_group([(modules[name], all_b[number, name]) for name in names], adapters, copies)
                for part, names in PARTS_OF_LAYER.items()
            }
            for number, modules in enumerate(layers)
        ]

    @staticmethod
    def _make_group(parts: Sequence[tuple[Any, Tensor]], adapters: tuple[str, ...], copies: _Copies) -> _Group:
        first = base_linear(parts[0][0]).weight
        a = first.new_zeros(sum(b.shape[1] for _, b in parts), first.shape[1])
        linears, owners, parameters, scales = [], [], [], []
        for module, b in parts:
            linear, present = base_linear(module), _present(module, adapters)
            for adapter, rank, scale in present:
                parameters += [module.lora_A[adapter].weight, module.lora_B[adapter].weight]
                copies.sources.append(module.lora_A[adapter].weight)
                copies.targets.append(a[len(scales) : len(scales) + rank])
                scales += [scale] * rank
                owners.append((adapter, rank))
            linears.append(
                _Linear(
                    weight=linear.weight,
                    bias=linear.bias,
                    b=b,
                    b_turned=b.T,
                    adapter_count=len(present),
                )
            )
        return _Group(
            linears=tuple(linears),
            widths=tuple(len(linear.weight) for linear in linears),
            ranks=tuple(b.shape[1] for _, b in parts),
            adapters=tuple(owners),
            ranks_of_adapters=tuple(rank for _, rank in owners),
            a=a,
            a_turned=a.T,
            scale_R=torch.tensor(scales, device=first.device, dtype=first.dtype),
            parameters=tuple(parameters),
        )


def _present(module: Any, adapters: Sequence[str]) -> tuple[tuple[str, int, float], ...]:
    """Return name, rank and scale of these adapters on a layer."""
    found = getattr(module, "lora_A", {})
    return tuple((name, len(found[name].weight), module.scaling[name]) for name in adapters if name in found)


@dataclass(slots=True)
class _Copies:
    """Copies the trained weights, scaled and rounded, at the start of each forward, in few kernel launches.

    One launch can copy many tensors only if each has the memory layout of its target. A's do, because they are rows.
    B's are columns and are copied through one tensor for all layers.
    """

    sources: list[Tensor] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)
    columns: list[tuple[list[Tensor], float, Tensor]] = field(default_factory=list)  # sources, scale, target

    def refresh(self) -> None:
        if self.sources:
            torch._foreach_copy_(self.targets, self.sources)  # pyright: ignore[reportPrivateImportUsage]
        for sources, scale, target in self.columns:
            target.copy_(torch.stack(sources).mul_(scale))


def _norm(x: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
