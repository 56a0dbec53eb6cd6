"""A decoder for the Llama / Qwen2 / Qwen3 family that does not use the modules of transformers.

A refresh merges LoRA into fused weights, and keys and values are in a preallocated cache, so a step needs only a few
matrix products.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lfo.model.adapters import DualAdapterModel
from lfo.model.fast.row_tree import common_prefix
from lfo.model.layers import PARTS_OF_LAYER, Heads, base_linear, is_llama_like, layer_linears, rotate

_CAPACITY_STEP = 128
_WORTHWHILE_PREFIX = 16
_NO_SLOT = _NO_TOKEN = -1


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
        self, model: DualAdapterModel, adapters: Sequence[str], *, max_context: int, dtype: torch.dtype | None = None
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
        self._free: list[Any] = []  # memory of ended sessions, for new ones
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
        """Reuse the memory of an earlier session on a CPU: the system needs longer to give memory than to copy it."""
        memory = next((memory for memory in self._free if memory.slots >= rows), None)
        if memory is None:
            self._free.clear()
            memory = _Memory(self, rows)
        else:
            self._free.remove(memory)
        cache = FusedCache(self, rows, memory)
        if self.device.type == "cpu":
            weakref.finalize(cache, self._free.append, memory)
        return cache

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
        prefix = common_prefix(list(fresh)) if len(fresh) > 1 else 0
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
    """Keys and values of all rows. Rows with equal tokens share a slot until their tokens differ.

    rows 0, 1, 2, all with prompt 7 8     slot 0: 7 8              start: one slot computes for all three
    they sample 5, 5, 9                   slot 0: 7 8 5            step: row 2 gets a copy of the slot
                                          slot 1: 7 8 9

    The batch computes the first slots. Keys are stored transposed (D x S), which is faster for the product of one query
    with all keys.
    """

    def __init__(self, decoder: FusedDecoder, rows: int, memory: _Memory) -> None:
        super().__init__(decoder)
        self._memory = memory
        self._slots = [_NO_SLOT] * rows  # by row
        self._batch: list[int] = []  # rows
        self._lengths: list[int] = []  # of the rows in the slots of the batch
        self._used = 0  # no position from here on was written in this session
        self._span_step = 1 if decoder.device.type == "cpu" else 64

    # ------------------------------------------------------------------ the batch

    @torch.inference_mode()
    def start(self, rows: Sequence[int], histories: Sequence[Sequence[int]], computed: Sequence[int]) -> Tensor:
        self._reserve(max(map(len, histories)), ahead=_CAPACITY_STEP)
        equal: dict[tuple[int, ...], list[int]] = {}  # indices of rows, by history
        for index, history in enumerate(histories):
            equal.setdefault(tuple(history), []).append(index)
        sources = [max(indices, key=lambda index: computed[index]) for indices in equal.values()]
        starts = [computed[index] for index in sources]
        slots = self._arrange(rows, [self._slots[rows[index]] for index in sources])
        for slot, indices in zip(slots, equal.values(), strict=True):
            for index in indices:
                self._slots[rows[index]] = slot
        self._batch = list(rows)
        hidden = self._fill(slots, list(equal), starts)
        lengths = dict(zip(slots, map(len, equal), strict=True))
        self._lengths = [lengths[slot] for slot in range(len(slots))]
        return self._of_rows(self._decoder.logits(hidden))

    @torch.inference_mode()
    def step(self, tokens_B: Tensor) -> Tensor:
        decoder, heads = self._decoder, self._decoder.heads
        tokens_U = self._branch(tokens_B.tolist())
        count = len(tokens_U)
        # Finished rows that are still in the batch must not write past the end; what they write is never read.
        positions = [min(length, decoder.max_context - 1) for length in self._lengths]
        longest = max(positions) + 1
        self._reserve(longest)
        span = min(-(-longest // self._span_step) * self._span_step, self._memory.capacity)
        positions_U = self._tensor(positions)
        slots_U = torch.arange(count, device=decoder.device)
        behind_US = torch.arange(span, device=decoder.device) > positions_U[:, None]
        bias_US = torch.zeros(behind_US.shape, device=decoder.device, dtype=decoder.dtype)
        bias_US.masked_fill_(behind_US, float("-inf"))
        bias = bias_US.repeat_interleave(heads.keys, dim=0)[:, None]
        group = heads.queries // heads.keys

        def attend(layer: int, qkv: Tensor) -> Tensor:
            query, key, value = qkv.split([heads.queries, heads.keys, heads.keys], dim=1)
            self._write(layer, slots_U, positions_U, key, value)
            keys = self._memory.keys[layer, :count].flatten(0, 1)[:, :, :span]
            values = self._memory.values[layer, :count].flatten(0, 1)[:, :span]
            # The query heads of one key head are rows of one matrix, so keys are not repeated.
            query = query.reshape(count * heads.keys, group, heads.size)
            weights = torch.baddbmm(bias, query, keys, alpha=heads.scaling).softmax(-1, dtype=torch.float32)
            return torch.bmm(weights.to(values.dtype), values).view(count, -1)

        hidden = decoder.forward(self._tensor(tokens_U), positions_U, attend)
        self._lengths = [length + 1 for length in self._lengths]
        return self._of_rows(decoder.logits(hidden))

    @torch.inference_mode()
    def keep(self, alive: Sequence[bool]) -> list[int]:
        order = [index for index, lives in enumerate(alive) if lives]
        self._batch = [self._batch[index] for index in order]
        living = sorted({self._slots[row] for row in self._batch})
        slots = dict(zip(living, self._arrange(self._batch, living), strict=True))
        for row in self._batch:
            self._slots[row] = slots[self._slots[row]]
        self._lengths = [self._lengths[slot] for slot in sorted(slots, key=lambda slot: slots[slot])]
        return order

    def _of_rows(self, logits_UV: Tensor) -> Tensor:
        slots = [self._slots[row] for row in self._batch]
        return logits_UV if slots == list(range(len(logits_UV))) else logits_UV[slots]

    def _branch(self, tokens: Sequence[int]) -> list[int]:
        """Give rows of one slot with different next tokens slots of their own; return the next token of each slot."""
        next_tokens = [_NO_TOKEN] * len(self._lengths)
        branches: dict[tuple[int, int], int] = {}  # slots, by slot until now and next token
        parents: list[int] = []  # of the new slots
        for row, token in zip(self._batch, tokens, strict=True):
            slot = self._slots[row]
            if (slot, token) not in branches:
                if next_tokens[slot] == _NO_TOKEN:
                    branches[slot, token] = slot
                    next_tokens[slot] = token
                else:
                    branches[slot, token] = len(next_tokens)
                    next_tokens.append(token)
                    parents.append(slot)
            self._slots[row] = branches[slot, token]
        if parents:
            first = len(self._lengths)
            self._copy(parents, range(first, first + len(parents)), max(self._lengths))
            self._lengths += [self._lengths[slot] for slot in parents]
        return next_tokens

    # ------------------------------------------------------------------ slots and memory

    def _write(self, layer: int, slots_M: Tensor, positions_M: Tensor, key: Tensor, value: Tensor) -> None:
        self._memory.keys[layer][slots_M, :, :, positions_M] = key
        self._memory.values[layer][slots_M, :, positions_M] = value

    def _read(self, layer: int, slots_B: Tensor, span: int) -> tuple[Tensor, Tensor]:
        keys = self._memory.keys[layer, :, :, :, :span][slots_B].transpose(2, 3)
        return keys, self._memory.values[layer, :, :, :span][slots_B]

    def _arrange(self, rows: Sequence[int], sources: Sequence[int]) -> list[int]:
        """Copy these slots to the first slots; return the new slot of each.

        Slots of other rows move: the batch needs as many slots as it has rows if no two of them share one.
        """
        kept = {source for source in sources if 0 <= source < len(sources)}
        free = iter(sorted(set(range(len(sources))) - kept))
        targets: list[int] = []
        for source in sources:
            targets.append(source if source in kept else next(free))
            kept.discard(source)  # a second history that begins in this slot needs a copy

        batch = set(rows)
        others = {slot for row, slot in enumerate(self._slots) if row not in batch and slot != _NO_SLOT}
        vacant = iter(sorted(set(range(len(rows), len(self._slots))) - others))
        moved = {slot: next(vacant) for slot in sorted(others) if slot < len(rows)}
        self._slots = [slot if row in batch else moved.get(slot, slot) for row, slot in enumerate(self._slots)]
        pairs = [*zip(sources, targets, strict=True), *moved.items()]
        pairs = [(source, target) for source, target in pairs if source not in (target, _NO_SLOT)]
        self._copy([source for source, _ in pairs], [target for _, target in pairs], self._used)
        return targets

    def _copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        if not sources or not length:
            return
        source, target = self._tensor(sources), self._tensor(targets)
        for keys, values in zip(self._memory.keys, self._memory.values, strict=True):
            keys[target, :, :, :length] = keys[source, :, :, :length]
            values[target, :, :length] = values[source, :, :length]

    def _reserve(self, length: int, ahead: int = 0) -> None:
        """Grow the cache to `length` positions, plus some `ahead` if memory must be moved."""
        if length > self._memory.capacity:
            self._memory.grow(length + ahead, used=sorted(set(self._slots) - {_NO_SLOT}))
        self._used = max(self._used, length)


class _Memory:
    """Keys and values of `slots` rows. New memory has zeros and reused memory finite numbers: a masked position has
    weight 0, and 0 * NaN would be NaN."""

    def __init__(self, decoder: FusedDecoder, slots: int) -> None:
        self.slots = slots
        self.keys = self.values = torch.empty(0)
        self._heads, self._layers, self._max_context = decoder.heads, len(decoder.layers), decoder.max_context
        self._device, self._dtype = decoder.device, decoder.dtype

    @property
    def capacity(self) -> int:
        """How many tokens a row may have."""
        return self.keys.shape[-1]

    def grow(self, length: int, used: Sequence[int]) -> None:
        """Make room for rows of `length` tokens, and keep the contents of the `used` slots."""
        before = self.capacity
        wanted = max(length, before + before // 2)
        capacity = min(-(-wanted // _CAPACITY_STEP) * _CAPACITY_STEP, self._max_context)
        shape = (self._layers, self.slots, self._heads.keys)
        keys = self._zeros((*shape, self._heads.size, capacity))
        values = self._zeros((*shape, capacity, self._heads.size))
        if used:
            for layer in range(self._layers):
                keys[layer, used, ..., :before] = self.keys[layer, used]
                values[layer, used, :, :before] = self.values[layer, used]
        self.keys, self.values = keys, values

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        if self._device.type != "cpu":
            return torch.zeros(shape, device=self._device, dtype=self._dtype)
        # torch.zeros would write all of it, numpy lets the system give memory when it is used: most slots never are.
        zeros = np.zeros(math.prod(shape) * self._dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(zeros).view(self._dtype).view(shape)
