"""A decoder for the Llama / Qwen2 / Qwen3 family that does not use the modules of transformers.

A refresh merges LoRA into fused weights, and keys and values are in a preallocated cache, so a step needs only a few
matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lfo.model.adapters import DualAdapterModel
from lfo.model.layers import PARTS_OF_LAYER, base_linear, is_llama_like, layer_linears
from lfo.model.turn_ops import Heads, rotate

_CAPACITY_STEP = 128
_WORTHWHILE_PREFIX = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # (H + K) x D, the weights of both norms
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class FusedDecoder:
    """Base and adapters of a Llama-like model, merged into separate weights."""

    def __init__(
        self,
        model: DualAdapterModel,
        adapters: Sequence[str],
        *,
        max_context: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.adapters = tuple(adapters)
        self.max_context = max_context
        self.device = model.device
        self.dtype = dtype or (torch.float32 if self.device.type == "cpu" else model.head.dtype)
        self._model = model
        body, config = model.causal_lm.model, model.config
        self.embedding = self._own(body.embed_tokens.weight)
        self.head = self._own(model.head)
        self.norm = self._own(body.norm.weight)
        positions = torch.arange(max_context, device=self.device)[None]
        cos, sin = body.rotary_emb(torch.zeros(1, device=self.device), positions)
        attention = body.layers[0].self_attn
        half = attention.head_dim // 2
        self.heads = Heads(
            queries=config.num_attention_heads,
            keys=config.num_key_value_heads,
            size=attention.head_dim,
            scaling=attention.scaling,
            epsilon=config.rms_norm_eps,
            cos_SD=cos[0].to(self.dtype),
            sin_SD=torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1).to(self.dtype),
        )
        self.layers: list[Any] = [self._make_layer(index, layer) for index, layer in enumerate(body.layers)]
        self.refresh()

    @staticmethod
    def supports(model: DualAdapterModel) -> bool:
        return is_llama_like(model.causal_lm)

    @torch.no_grad()
    def refresh(self) -> None:
        """Merge into the same tensors, so that their addresses stay."""
        deltas = self._model.deltas(self.adapters)
        for index, (layer, source) in enumerate(zip(self.layers, self._model.causal_lm.model.layers, strict=True)):
            modules = layer_linears(source)
            for part, names in PARTS_OF_LAYER.items():
                fused = getattr(layer, part)
                weights = [base_linear(modules[name]).weight for name in names]
                for name, weight, target in zip(names, weights, fused.split([len(w) for w in weights]), strict=True):
                    delta = deltas.get(f"model.layers.{index}.{name}")
                    if delta is None:
                        target.copy_(weight)
                    else:
                        target.copy_(torch.addmm(weight.to(delta.b.dtype), delta.b, delta.a, alpha=delta.scale))

    def cache(self, rows: int, context: int) -> Any:
        return FusedCache(self, rows)

    def forward(self, tokens_M: Tensor, positions_M: Tensor, attend: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Return hidden states after the final norm. `attend(layer, qkv)` returns M x (H * D)."""
        x, heads = F.embedding(tokens_M, self.embedding), self.heads
        cos_MD, sin_MD = heads.cos_SD[positions_M], heads.sin_SD[positions_M]
        width, epsilon = (x.shape[-1],), heads.epsilon
        for index, layer in enumerate(self.layers):
            normed = F.rms_norm(x, width, layer.input_norm, epsilon)
            qkv = F.linear(normed, layer.qkv, layer.qkv_bias).unflatten(-1, (-1, heads.size))
            rotate(qkv, cos_MD, sin_MD, layer.qk_norm, heads)
            x = x + F.linear(attend(index, qkv), layer.out, layer.out_bias)
            normed = F.rms_norm(x, width, layer.mlp_norm, epsilon)
            gate, up = F.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate).mul_(up), layer.down, layer.down_bias)
        return F.rms_norm(x, width, self.norm, epsilon)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head).float()

    def _own(self, weight: Tensor) -> Tensor:
        """Return the same tensor if dtype and device agree: only weights that LoRA changes are copied."""
        return weight.detach().to(device=self.device, dtype=self.dtype)

    def _qk_norm(self, attention: Any) -> Tensor | None:
        if not hasattr(attention, "q_norm"):
            return None
        query = attention.q_norm.weight.expand(self.heads.queries, -1)
        key = attention.k_norm.weight.expand(self.heads.keys, -1)
        return self._own(torch.cat([query, key]))

    def _make_layer(self, index: int, source: Any) -> Any:
        modules, fused = layer_linears(source), {}
        for part, names in PARTS_OF_LAYER.items():
            linears = [base_linear(modules[name]) for name in names]
            shape = (sum(linear.out_features for linear in linears), linears[0].in_features)
            fused[part] = torch.empty(shape, device=self.device, dtype=self.dtype)
            biases = [linear.bias for linear in linears]
            fused[f"{part}_bias"] = None if biases[0] is None else self._own(torch.cat(biases))
        return _Layer(
            input_norm=self._own(source.input_layernorm.weight),
            qk_norm=self._qk_norm(source.self_attn),
            mlp_norm=self._own(source.post_attention_layernorm.weight),
            **fused,
        )


class SlotCache:
    """Computes the new tokens of rows of different lengths, each in its slot of a cache.

    A common prefix is computed once. The subclass decides the memory layout of keys and values.
    """

    def __init__(self, decoder: FusedDecoder) -> None:
        self._decoder = decoder
        # On a CPU, fewer tokens fit into its cache and need less padding; a GPU needs many.
        self._pass_tokens = 2048 if decoder.device.type == "cpu" else 32768

    def _write(self, layer: int, slots_M: Tensor, positions_M: Tensor, key: Tensor, value: Tensor) -> None:
        """Write keys and values (M x K x D) into the cache."""
        raise NotImplementedError

    def _read(self, layer: int, slots_B: Tensor, span: int) -> tuple[Tensor, Tensor]:
        """Return the first `span` keys and values of some slots, each B x K x S x D."""
        raise NotImplementedError

    def _copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions from slots to others."""
        raise NotImplementedError

    def _fill(self, slots: Sequence[int], histories: Sequence[Sequence[int]], computed: Sequence[int]) -> Tensor:
        """Compute the new tokens of each history; return the hidden state after its last token, by slot."""
        decoder = self._decoder
        width = decoder.embedding.shape[1]
        hidden = torch.empty(max(slots) + 1, width, device=decoder.device, dtype=decoder.dtype)
        fresh: dict[tuple[int, ...], list[int]] = {}  # empty slots, by the tokens to compute
        jobs: list[tuple[int, int, Sequence[int]]] = []  # slot, first position, tokens
        for slot, history, start in zip(slots, histories, computed, strict=True):
            if start:
                jobs.append((slot, start, history[start:]))
            else:
                fresh.setdefault(tuple(history), []).append(slot)
        prefix = _common_prefix(list(fresh)) if len(fresh) > 1 else 0
        if prefix >= _WORTHWHILE_PREFIX:
            first, *others = [slots[0] for slots in fresh.values()]
            self._compute([(first, 0, next(iter(fresh))[:prefix])], hidden)
            self._copy([first] * len(others), others, prefix)
        else:
            prefix = 0
        jobs += [(slots[0], prefix, history[prefix:]) for history, slots in fresh.items()]

        jobs.sort(key=lambda job: (len(job[2]), job[1]))
        while jobs:
            size = max(1, min(len(jobs), self._pass_tokens // len(jobs[-1][2])))
            self._compute(jobs[-size:], hidden)
            del jobs[-size:]

        twins = [(slots[0], twin, len(history)) for history, slots in fresh.items() for twin in slots[1:]]
        if twins:
            sources, targets, lengths = zip(*twins, strict=True)
            self._copy(sources, targets, max(lengths))
            hidden[list(targets)] = hidden[list(sources)]
        return hidden

    def _compute(self, jobs: Sequence[tuple[int, int, Sequence[int]]], hidden: Tensor) -> None:
        """Compute tokens after those in the slots; write the hidden state of each job's last token for its slot."""
        decoder, heads = self._decoder, self._decoder.heads
        count, longest = len(jobs), max(len(tokens) for _, _, tokens in jobs)
        span = max(start + len(tokens) for _, start, tokens in jobs)
        tokens_M = self._tensor([token for _, _, tokens in jobs for token in tokens])
        jobs_M = self._tensor([job for job, (_, _, tokens) in enumerate(jobs) for _ in tokens])
        offsets_M = self._tensor([offset for _, _, tokens in jobs for offset in range(len(tokens))])
        slots_B, starts_B, lengths_B = (
            self._tensor(column) for column in zip(*((slot, start, len(t)) for slot, start, t in jobs), strict=True)
        )
        slots_M, positions_M = slots_B[jobs_M], starts_B[jobs_M] + offsets_M
        causal = all(start == 0 for _, start, _ in jobs)
        mask = None
        if not causal:
            last_BT = starts_B[:, None] + torch.arange(longest, device=decoder.device)
            mask = (torch.arange(span, device=decoder.device) <= last_BT[..., None])[:, None]
        group = heads.queries // heads.keys

        def attend(layer: int, qkv: Tensor) -> Tensor:
            query, key, value = qkv.split([heads.queries, heads.keys, heads.keys], dim=1)
            self._write(layer, slots_M, positions_M, key, value)
            padded = query.new_zeros(count, longest, heads.queries, heads.size)
            padded[jobs_M, offsets_M] = query
            keys, values = self._read(layer, slots_B, span)
            attended = F.scaled_dot_product_attention(
                padded.transpose(1, 2),
                keys.repeat_interleave(group, dim=1).contiguous(),
                values.repeat_interleave(group, dim=1),
                attn_mask=mask,
                is_causal=causal,
                scale=heads.scaling,
            )
            return attended.transpose(1, 2)[jobs_M, offsets_M].flatten(1)

        hidden_M = decoder.forward(tokens_M, positions_M, attend)
        hidden[slots_B] = hidden_M[lengths_B.cumsum(0) - 1]

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._decoder.device)


class FusedCache(SlotCache):
    """Keys and values of all rows. A row lives in a slot; the batch is the first slots, in order.

    Keys are stored transposed (D x S), which is faster for the product of one query with all keys. Memory is
    initialised with zeros: a masked position has weight 0, and 0 * NaN would be NaN.
    """

    def __init__(self, decoder: FusedDecoder, rows: int) -> None:
        super().__init__(decoder)
        self._slots = list(range(rows))  # by row
        self._rows = list(range(rows))  # by slot
        self._capacity = 0
        self._batch = 0
        self._longest = 0  # upper bound of the lengths in the batch, known without a device sync
        self._used = 0  # no position from here on was ever written
        self._positions_B = torch.empty(0, dtype=torch.long, device=decoder.device)
        self._span_step = 1 if decoder.device.type == "cpu" else 64
        self._keys = self._values = torch.empty(0)

    # ------------------------------------------------------------------ the batch

    @torch.inference_mode()
    def start(self, rows: Sequence[int], histories: Sequence[Sequence[int]], computed: Sequence[int]) -> Tensor:
        self._batch = len(rows)
        self._longest = max(map(len, histories))
        self._reserve(self._longest, ahead=_CAPACITY_STEP)
        self._arrange(rows)
        hidden = self._fill(range(len(rows)), histories, computed)
        self._positions_B = self._tensor([len(history) for history in histories])
        return self._decoder.logits(hidden)

    @torch.inference_mode()
    def step(self, tokens_B: Tensor) -> Tensor:
        decoder, heads, batch = self._decoder, self._decoder.heads, self._batch
        self._longest = min(self._longest + 1, decoder.max_context)
        self._reserve(self._longest)
        span = min(-(-self._longest // self._span_step) * self._span_step, self._capacity)
        # Finished rows that are still in the batch must not write past the end; what they write is never read.
        positions_B = self._positions_B.clamp(max=decoder.max_context - 1)
        slots_B = torch.arange(batch, device=decoder.device)
        behind_BS = torch.arange(span, device=decoder.device) > positions_B[:, None]
        bias_BS = torch.zeros(behind_BS.shape, device=decoder.device, dtype=decoder.dtype)
        bias_BS.masked_fill_(behind_BS, float("-inf"))
        bias = bias_BS.repeat_interleave(heads.keys, dim=0)[:, None]
        group = heads.queries // heads.keys

        def attend(layer: int, qkv: Tensor) -> Tensor:
            query, key, value = qkv.split([heads.queries, heads.keys, heads.keys], dim=1)
            self._write(layer, slots_B, positions_B, key, value)
            keys = self._keys[layer, :batch].flatten(0, 1)[:, :, :span]
            values = self._values[layer, :batch].flatten(0, 1)[:, :span]
            # The query heads of one key head are rows of one matrix, so keys are not repeated.
            query = query.reshape(batch * heads.keys, group, heads.size)
            weights = torch.baddbmm(bias, query, keys, alpha=heads.scaling).softmax(-1, dtype=torch.float32)
            return torch.bmm(weights.to(values.dtype), values).view(batch, -1)

        hidden = decoder.forward(tokens_B, positions_B, attend)
        self._positions_B = self._positions_B + 1
        return decoder.logits(hidden)

    @torch.inference_mode()
    def keep(self, alive: Sequence[bool]) -> list[int]:
        count = sum(alive)
        holes = [index for index in range(count) if not alive[index]]
        tail = [index for index in range(count, len(alive)) if alive[index]]
        self._move(tail + holes, holes + tail)
        order = list(range(count))
        for hole, index in zip(holes, tail, strict=True):
            order[hole] = index
        self._batch = count
        self._positions_B = self._positions_B[self._tensor(order)]
        return order

    # ------------------------------------------------------------------ slots and memory

    def _write(self, layer: int, slots_M: Tensor, positions_M: Tensor, key: Tensor, value: Tensor) -> None:
        self._keys[layer][slots_M, :, :, positions_M] = key
        self._values[layer][slots_M, :, positions_M] = value

    def _read(self, layer: int, slots_B: Tensor, span: int) -> tuple[Tensor, Tensor]:
        keys = self._keys[layer, :, :, :, :span][slots_B].transpose(2, 3)
        return keys, self._values[layer, :, :, :span][slots_B]

    def _arrange(self, rows: Sequence[int]) -> None:
        """Move `rows` into the first slots, in order; the rows there move to the free slots."""
        wanted = set(rows)
        displaced = [slot for slot in range(len(rows)) if self._rows[slot] not in wanted]
        vacated = [self._slots[row] for row in rows if self._slots[row] >= len(rows)]
        sources = [self._slots[row] for row in rows] + displaced
        self._move(sources, list(range(len(rows))) + vacated)

    def _move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Permute rows over slots; both sides have the same slots."""
        moves = [(source, target) for source, target in zip(sources, targets, strict=True) if source != target]
        if not moves:
            return
        moving = {target: self._rows[source] for source, target in moves}
        for target, row in moving.items():
            self._rows[target], self._slots[row] = row, target
        sources, targets = zip(*moves, strict=True)
        self._copy(sources, targets, self._used)

    def _copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        if not sources or not length:
            return
        source, target = self._tensor(sources), self._tensor(targets)
        for keys, values in zip(self._keys, self._values, strict=True):
            keys[target, :, :, :length] = keys[source, :, :, :length]
            values[target, :, :length] = values[source, :, :length]

    def _reserve(self, length: int, ahead: int = 0) -> None:
        """Grow the cache to `length` positions, plus some `ahead` if memory must be moved."""
        decoder, before = self._decoder, self._capacity
        self._used = max(self._used, length)
        if length <= before:
            return
        wanted = max(length + ahead, before + before // 2)
        self._capacity = min(-(-wanted // _CAPACITY_STEP) * _CAPACITY_STEP, decoder.max_context)
        shape = (len(decoder.layers), len(self._rows), decoder.heads.keys)
        options: dict[str, Any] = {"device": decoder.device, "dtype": decoder.dtype}
        keys = torch.zeros(*shape, decoder.heads.size, self._capacity, **options)
        values = torch.zeros(*shape, self._capacity, decoder.heads.size, **options)
        if before:
            keys[..., :before] = self._keys
            values[..., :before, :] = self._values
        self._keys, self._values = keys, values


def _common_prefix(histories: Sequence[tuple[int, ...]]) -> int:
    """Return the length of the common prefix, which leaves each at least one token."""
    low, high = min(histories), max(histories)
    shortest = min(map(len, histories)) - 1
    return next((index for index in range(shortest) if low[index] != high[index]), shortest)
