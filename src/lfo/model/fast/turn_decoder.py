"""Decode whole turns on a GPU, with steps captured as CUDA graphs that never wait for the host.

A step feeds the last token of each row, reads the cache, samples the next token and stores it, all on the device. The
host replays graphs some steps ahead and reads flags to find which rows have ended. Rows stay in their slots of a cache
of fixed size. A batch is a list of slots, so removing a row moves no data, and one graph for each power of two is
enough.

LoRA is not merged: see `turn_ops`. A refresh copies only A and B.

On a CPU the same steps run without graphs and with `turn_ops` instead of `turn_kernels`; tests use this.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lfo.model.adapters import DualAdapterModel, LoraDelta
from lfo.model.fast import turn_ops
from lfo.model.fast.fused_decoder import FusedDecoder, SlotCache
from lfo.model.fast.turn_ops import TurnTensors
from lfo.model.layers import PARTS_OF_LAYER, base_linear, layer_linears

_AHEAD = 2  # steps that are queued while the host reads the flags of an earlier one
_SMALLEST_BATCH, _SMALLEST_CONTEXT = 8, 256
_RANK_STEP = 16  # columns after an input; matrix units need multiples of 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Wide:
    """A linear layer with LoRA, or several with one input: `[W | scale * B]` and A. B has a block for each."""

    weight: Tensor  # out x (in + rank)
    a: Tensor  # rank x in
    bias: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class WideLayer:
    input_norm: Tensor
    mlp_norm: Tensor
    qk_norm: Tensor | None
    qkv: Wide
    out: Wide
    gate_up: Wide
    down: Wide


class TurnDecoder(FusedDecoder):
    """Base and adapters of a Llama-like model, for `TurnCache`."""

    def __init__(
        self, model: DualAdapterModel, adapters: Sequence[str], *, max_context: int, dtype: torch.dtype | None = None
    ) -> None:
        self._ops: Any = turn_ops
        if model.device.type == "cuda":
            from lfo.model.fast import turn_kernels  # needs Triton

            self._ops = turn_kernels
        super().__init__(model, adapters, max_context=max_context, dtype=dtype)

    @staticmethod
    def supports(model: DualAdapterModel) -> bool:
        if not FusedDecoder.supports(model) or find_spec("triton") is None:
            return False
        size = model.causal_lm.model.layers[0].self_attn.head_dim
        return size >= 16 and size & (size - 1) == 0

    # ------------------------------------------------------------------ weights

    def _make_layer(self, index: int, source: Any) -> Any:
        deltas = self._model.deltas(self.adapters)
        modules = layer_linears(source)

        def wide(part: str) -> Wide:
            linears = [base_linear(modules[name]) for name in PARTS_OF_LAYER[part]]
            rank = sum(len(delta.a) for _, delta in self._present(deltas, index, part))
            rank = -(-rank // _RANK_STEP) * _RANK_STEP
            width = linears[0].in_features
            options: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
            weight = torch.zeros(sum(each.out_features for each in linears), width + rank, **options)
            weight[:, :width] = torch.cat([each.weight.detach() for each in linears])
            biases = [each.bias for each in linears if each.bias is not None]
            bias = self._own(torch.cat(biases)) if biases else None
            return Wide(weight=weight, a=torch.zeros(rank, width, **options), bias=bias)

        return WideLayer(
            input_norm=self._own(source.input_layernorm.weight),
            mlp_norm=self._own(source.post_attention_layernorm.weight),
            qk_norm=self._qk_norm(source.self_attn),
            **{part: wide(part) for part in PARTS_OF_LAYER},
        )

    @torch.no_grad()
    def refresh(self) -> None:
        """Write into the same tensors, because graphs contain their addresses."""
        deltas = self._model.deltas(self.adapters)
        for index, (layer, source) in enumerate(zip(self.layers, self._model.causal_lm.model.layers, strict=True)):
            modules = layer_linears(source)
            for part, names in PARTS_OF_LAYER.items():
                wide: Wide = getattr(layer, part)
                present = dict(self._present(deltas, index, part))
                row, column = 0, wide.a.shape[1]
                for name in names:
                    rows = base_linear(modules[name]).out_features
                    if name in present:
                        delta = present[name]
                        rank, first = len(delta.a), column - wide.a.shape[1]
                        wide.a[first : first + rank] = delta.a
                        wide.weight[row : row + rows, column : column + rank] = delta.scale * delta.b
                        column += rank
                    row += rows

    @staticmethod
    def _present(deltas: dict[str, LoraDelta], index: int, part: str) -> list[tuple[str, LoraDelta]]:
        found = ((name, deltas.get(f"model.layers.{index}.{name}")) for name in PARTS_OF_LAYER[part])
        return [(name, delta) for name, delta in found if delta is not None]

    # ------------------------------------------------------------------ computing

    def forward(self, tokens_M: Tensor, positions_M: Tensor, attend: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Compute many tokens of few rows, for `SlotCache`."""
        cos_MD, sin_MD = self.heads.cos_SD[positions_M], self.heads.sin_SD[positions_M]

        def turned(index: int, qkv: Tensor) -> Tensor:
            layer: Any = self.layers[index]
            qkv = qkv.unflatten(-1, (-1, self.heads.size))
            turn_ops.rotate(qkv, cos_MD, sin_MD, layer.qk_norm, self.heads)
            return turn_ops.widen(attend(index, qkv), layer.out.a)

        return self._run(tokens_M, turned, turn_ops)

    def step(self, slots_B: Tensor, memory: TurnMemory) -> None:
        """Compute one more token for the rows in these slots."""
        turn = memory.turn

        def attend(index: int, qkv: Tensor) -> Tensor:
            layer: Any = self.layers[index]
            keys, values = memory.keys[index], memory.values[index]
            return self._ops.attend(qkv, layer.qk_norm, keys, values, slots_B, turn.position_L, layer.out.a, self.heads)

        hidden = self._run(turn.last_L[slots_B], attend, self._ops)
        self._ops.say(self.logits(hidden), slots_B, turn)

    def say(self, hidden: Tensor, slots_B: Tensor, memory: TurnMemory) -> None:
        """Sample the first token of a turn."""
        self._ops.say(self.logits(hidden), slots_B, memory.turn)

    def logits(self, hidden: Tensor) -> Tensor:
        if hidden.device.type == "cuda" and hidden.dtype != torch.float32:
            return torch.mm(hidden, self.head.T, out_dtype=torch.float32)  # not rounded to bf16
        return F.linear(hidden, self.head).float()

    def _run(self, tokens_M: Tensor, attend: Callable[[int, Tensor], Tensor], ops: Any) -> Tensor:
        x, epsilon = F.embedding(tokens_M, self.embedding), self.heads.epsilon
        for index, layer in enumerate(self.layers):
            wide = ops.widen_norm(x, layer.input_norm, layer.qkv.a, epsilon)
            wide = attend(index, F.linear(wide, layer.qkv.weight, layer.qkv.bias))
            _add_linear(x, wide, layer.out)
            wide = ops.widen_norm(x, layer.mlp_norm, layer.gate_up.a, epsilon)
            wide = ops.widen_gate(F.linear(wide, layer.gate_up.weight, layer.gate_up.bias), layer.down.a)
            _add_linear(x, wide, layer.down)
        return ops.widen_norm(x, self.norm, self.norm.new_empty(0, len(self.norm)), epsilon)

    # ------------------------------------------------------------------ memory

    def cache(self, rows: int, context: int) -> Any:
        """Reuse memory and its graphs in later sessions, because capturing takes longer than a turn."""
        context = min(_power_of_two(context, _SMALLEST_CONTEXT), self.max_context)
        fitting = [memory for memory in self._free if memory.rows >= rows and memory.context >= context]
        if fitting:
            memory = min(fitting, key=lambda each: each.rows * each.context)
            self._free.remove(memory)
        else:
            # At least as large as what it replaces; else two sizes would evict each other repeatedly.
            rows = max([_power_of_two(rows), *(memory.rows for memory in self._free)])
            context = max([context, *(memory.context for memory in self._free)])
            self._free.clear()
            memory = TurnMemory(self, rows, context)
        cache = TurnCache(self, memory)
        weakref.finalize(cache, self._free.append, memory)
        return cache


def _add_linear(x: Tensor, wide: Tensor, linear: Wide) -> None:
    x.addmm_(wide, linear.weight.T)
    if linear.bias is not None:
        x.add_(linear.bias)


class TurnMemory:
    """The cache of `rows` rows of up to `context` tokens, the tensors of their turn, and the CUDA graphs that use both.

    The last slot is unused: it fills a batch up to the size of a graph.
    """

    @torch.inference_mode()
    def __init__(self, decoder: TurnDecoder, rows: int, context: int) -> None:
        self.rows, self.context = rows, context
        slots, device = rows + 1, decoder.device
        shape = (len(decoder.layers), slots, decoder.heads.keys, context, decoder.heads.size)
        self.keys = torch.zeros(shape, device=device, dtype=decoder.dtype)
        self.values = torch.zeros(shape, device=device, dtype=decoder.dtype)

        def numbers(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(shape, device=device, dtype=dtype)

        self.turn = TurnTensors(
            last_L=numbers(slots),
            position_L=numbers(slots),
            said_L=numbers(slots),
            limit_L=numbers(slots),
            done_L=torch.ones(slots, device=device, dtype=torch.long),
            temperature=numbers(1, dtype=torch.float32),
            uniforms_LN=numbers(slots, context, dtype=torch.float32),
            tokens_LN=numbers(slots, context),
            logprobs_LN=numbers(slots, context, dtype=torch.float32),
            is_end_V=numbers(len(decoder.head), dtype=torch.bool),
        )
        self._decoder = weakref.ref(decoder)
        self._steps: dict[int, tuple[Tensor, Callable[[], Any]]] = {}
        self._pool: Any = None

    def prepared(self, slots: Sequence[int]) -> Callable[[], Any]:
        """Return a function that computes one step for these slots."""
        size = _power_of_two(len(slots))
        if size not in self._steps:
            self._steps[size] = self._capture(size)
        slots_B, step = self._steps[size]
        slots_B.copy_(torch.tensor([*slots, *[self.rows] * (size - len(slots))]), non_blocking=True)
        return step

    def _capture(self, size: int) -> tuple[Tensor, Callable[[], Any]]:
        decoder = self._decoder()
        assert decoder is not None
        slots_B = torch.full((size,), self.rows, device=decoder.device)  # the unused slot: warming up changes no row

        def step() -> None:
            decoder.step(slots_B, self)

        if decoder.device.type != "cuda":
            return slots_B, step
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles kernels and allocates workspaces
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        self._pool = self._pool or graph.pool()
        return slots_B, graph.replay


class TurnCache(SlotCache):
    """Rows in a `TurnMemory`; row i is in slot i."""

    def __init__(self, decoder: TurnDecoder, memory: TurnMemory) -> None:
        super().__init__(decoder)
        self._turns = decoder
        self._memory = memory

    @torch.inference_mode()
    def speak(
        self,
        rows: Sequence[int],
        histories: Sequence[Sequence[int]],
        computed: Sequence[int],
        *,
        limits: Sequence[int],
        temperature: float,
        uniforms_KB: Tensor | None,
        is_end_V: Tensor,
    ) -> tuple[list[list[int]], list[list[float]], list[bool]]:
        """Return tokens and log-probs of one turn of each row, and whether it ended with an end token."""
        memory, turn = self._memory, self._memory.turn
        slots_B = self._tensor(rows)
        hidden = self._fill(rows, histories, computed)
        steps = max(limits)
        turn.position_L[slots_B] = self._tensor([len(history) - 1 for history in histories])
        turn.limit_L[slots_B] = self._tensor(limits)
        turn.said_L[slots_B] = 0
        turn.done_L[slots_B] = 0
        turn.temperature.fill_(temperature)
        turn.is_end_V.copy_(is_end_V)
        if uniforms_KB is not None:
            turn.uniforms_LN[slots_B, :steps] = uniforms_KB.T
        self._turns.say(hidden[slots_B], slots_B, memory)

        flags = _Flags(turn.done_L)
        speaking = list(rows)
        step = memory.prepared(speaking) if steps > 1 else None
        for _ in range(steps - 1):
            assert step is not None
            step()
            done = flags.look()
            if done is None:
                continue
            alive = [row for row in speaking if not done[row]]
            if not alive:
                break
            if _power_of_two(len(alive)) < _power_of_two(len(speaking)):
                speaking = alive
                step = memory.prepared(speaking)

        said = turn.said_L[slots_B].tolist()
        tokens, logprobs = (each[slots_B, :steps].tolist() for each in (turn.tokens_LN, turn.logprobs_LN))
        stopped = turn.is_end_V[turn.last_L[slots_B]].tolist()
        pairs = zip(tokens, logprobs, said, strict=True)
        cut = [(words[:count], numbers[:count]) for words, numbers, count in pairs]
        return [words for words, _ in cut], [numbers for _, numbers in cut], stopped

    # ------------------------------------------------------------------ memory

    def _write(self, layer: int, slots_M: Tensor, positions_M: Tensor, key: Tensor, value: Tensor) -> None:
        self._memory.keys[layer][slots_M, :, positions_M] = key
        self._memory.values[layer][slots_M, :, positions_M] = value

    def _read(self, layer: int, slots_B: Tensor, span: int) -> tuple[Tensor, Tensor]:
        return self._memory.keys[layer, :, :, :span][slots_B], self._memory.values[layer, :, :, :span][slots_B]

    def _copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        source, target = self._tensor(sources), self._tensor(targets)
        for cache in (self._memory.keys, self._memory.values):
            for layer in cache:
                layer[target, :, :length] = layer[source, :, :length]


class _Flags:
    """The flags of ended slots, `_AHEAD` steps old: they are copied while the device continues."""

    def __init__(self, done_L: Tensor) -> None:
        self._done_L = done_L
        self._cuda = done_L.device.type == "cuda"
        self._copies = [torch.empty(done_L.shape, dtype=torch.long, pin_memory=self._cuda) for _ in range(_AHEAD + 1)]
        self._events = [torch.cuda.Event() for _ in self._copies] if self._cuda else []
        self._looks = 0

    def look(self) -> list[int] | None:
        """Start a copy; return the oldest one in flight, or None at first."""
        index = self._looks % len(self._copies)
        self._copies[index].copy_(self._done_L, non_blocking=True)
        if self._cuda:
            self._events[index].record()
        self._looks += 1
        if self._looks <= _AHEAD:
            return None
        oldest = self._looks % len(self._copies)
        if self._cuda:
            self._events[oldest].synchronize()
        return self._copies[oldest].tolist()


def _power_of_two(number: int, smallest: int = _SMALLEST_BATCH) -> int:
    """Round up to a power of two: the size of a graph for a number of rows, or of a cache for a number of tokens."""
    return max(smallest, 1 << (number - 1).bit_length())
