"""`turn_ops` in Triton, for one token of each row of a batch, without host syncs, so that a graph can capture it.

Imported only if there is a GPU. One program processes one row or a part of it; sums are in fp32 for every dtype of the
weights. `tests/test_turn_kernels.py` compares each function with its definition, on a GPU or with TRITON_INTERPRET=1.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lfo.model.fast.turn_ops import Heads, TurnTensors

_TILE = 16_384  # numbers of a tile of LoRA's A that one program holds
_KEY_BLOCK = 64
_PARTS = 4  # programs that share the cache of one row and key head
_VOCABULARY_BLOCK = 4096


@triton.jit
def _widen(
    x, extra, a, out, x_stride, out_stride, width, rank, epsilon,
    MODE: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """MODE 1: RMS norm, with `extra` its weight; 2: silu(first half) * second half; 3: parts of attention joined,
    with `extra` their maxima and sums. Each tile of ranks is a separate program, which computes the row again."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    ranks = tile * RANKS + tl.arange(0, RANKS)
    wanted = ranks < rank
    # Loaded first, because it does not depend on the row.
    weights = tl.load(
        a + ranks[:, None] * width + columns[None, :], mask=wanted[:, None] & inside[None, :], other=0.0
    ).to(tl.float32)
    if MODE == 3:
        head, heads = columns // D, width // D
        top = tl.full([BLOCK], float("-inf"), tl.float32)
        for part in tl.static_range(PARTS):
            stats = extra + ((row * PARTS + part) * heads + head) * 2
            top = tl.maximum(top, tl.load(stats, mask=inside, other=0.0))
        held = tl.zeros([BLOCK], tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(PARTS):
            stats = extra + ((row * PARTS + part) * heads + head) * 2
            share = tl.exp(tl.load(stats, mask=inside, other=0.0) - top)
            total += share * tl.load(stats + 1, mask=inside, other=1.0)
            held += share * tl.load(x + (row * PARTS + part) * width + columns, mask=inside, other=0.0)
        held = held / total
    else:
        held = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if MODE == 1:
        mean = tl.sum(held * held, 0) / width
        held = held * (1.0 / tl.sqrt(mean + epsilon))
        held *= tl.load(extra + columns, mask=inside, other=0.0).to(tl.float32)
    if MODE == 2:
        up = tl.load(x + row * x_stride + width + columns, mask=inside, other=0.0).to(tl.float32)
        held = held * tl.sigmoid(held) * up
    rounded = held.to(out.dtype.element_ty)
    if tile == 0:
        tl.store(out + row * out_stride + columns, rounded, mask=inside)
    projected = tl.sum(weights * rounded.to(tl.float32)[None, :], 1)
    tl.store(out + row * out_stride + width + ranks, projected.to(out.dtype.element_ty), mask=wanted)


def _run_widen(
    mode: int, rows: int, x: Tensor, extra: Tensor, a_RW: Tensor, width: int, *, epsilon: float = 0.0, size: int = 1,
    parts: int = 1,
) -> Tensor:  # fmt: skip
    out = a_RW.new_empty(rows, width + len(a_RW))
    block = triton.next_power_of_2(width)
    ranks = min(16, max(1, _TILE // block))
    _widen[(rows, max(1, -(-len(a_RW) // ranks)))](
        x, extra, a_RW, out, x.stride(0), out.stride(0), width, len(a_RW), epsilon,
        MODE=mode, BLOCK=block, RANKS=ranks, D=size, PARTS=parts, num_warps=8 if block >= 1024 else 4,
    )  # fmt: skip
    return out


def widen_norm(x_MW: Tensor, weight_W: Tensor, a_RW: Tensor, epsilon: float) -> Tensor:
    return _run_widen(1, len(x_MW), x_MW, weight_W, a_RW, x_MW.shape[1], epsilon=epsilon)


def widen_gate(gate_up: Tensor, a_RW: Tensor) -> Tensor:
    return _run_widen(2, len(gate_up), gate_up, gate_up, a_RW, gate_up.shape[1] // 2)


@triton.jit
def _turn(pointer, columns, heads, inside, norm, cos, sin, epsilon, NORM: tl.constexpr, D: tl.constexpr):
    """Return queries or keys of some heads (heads x D) after norm and rotation, in fp32."""
    partner = (columns + D // 2) % D
    index, other = heads[:, None] * D + columns[None, :], heads[:, None] * D + partner[None, :]
    straight = tl.load(pointer + index, mask=inside[:, None], other=0.0).to(tl.float32)
    crossed = tl.load(pointer + other, mask=inside[:, None], other=0.0).to(tl.float32)
    if NORM:
        factor = 1.0 / tl.sqrt(tl.sum(straight * straight, 1) / D + epsilon)
        straight *= factor[:, None] * tl.load(norm + index, mask=inside[:, None], other=0.0).to(tl.float32)
        crossed *= factor[:, None] * tl.load(norm + other, mask=inside[:, None], other=0.0).to(tl.float32)
    return straight * cos[None, :] + crossed * sin[None, :]


@triton.jit
def _attend(
    qkv, norm, keys, values, slots, positions, cos, sin, out, stats, qkv_stride, slot_stride, head_stride,
    scaling, epsilon,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Several programs read a part of the cache of a row each; `_widen` joins their results."""
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + row)
    position = tl.load(positions + slot)
    kind = keys.dtype.element_ty
    columns = tl.arange(0, D)
    cosine = tl.load(cos + position * D + columns).to(tl.float32)
    sine = tl.load(sin + position * D + columns).to(tl.float32)
    group: tl.constexpr = QUERIES // KEYS
    members = tl.arange(0, GROUP)
    inside = members < group
    mine = qkv + row * qkv_stride
    query = _turn(mine, columns, head * group + members, inside, norm, cosine, sine, epsilon, NORM, D).to(kind)
    here = slot * slot_stride + head * head_stride
    top = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    gathered = tl.zeros([GROUP, D], tl.float32)
    if part == 0:
        # The key and value of this token: stored for later, and used from registers now.
        one = tl.arange(0, 1)
        key = _turn(mine, columns, QUERIES + head + one, one < 1, norm, cosine, sine, epsilon, NORM, D).to(kind)
        value = tl.load(mine + (QUERIES + KEYS + head) * D + columns)
        index = here + position * D + columns
        tl.store(keys + index[None, :], key)
        tl.store(values + index, value)
        top = tl.sum(query.to(tl.float32) * key.to(tl.float32), 1) * scaling
        total += 1.0
        gathered += value.to(tl.float32)[None, :]
    share = tl.cdiv(position, PARTS)
    end = tl.minimum(position, (part + 1) * share)
    for first in range(part * share, end, BLOCK):
        span = first + tl.arange(0, BLOCK)
        known = span < end
        indices = here + span[:, None] * D + columns[None, :]
        block = tl.load(keys + indices, mask=known[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(block), input_precision=PRECISION) * scaling
        scores = tl.where(known[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        faded = tl.exp(top - higher)
        total = total * faded + tl.sum(weights, 1)
        block = tl.load(values + indices, mask=known[:, None], other=0.0)
        gathered = gathered * faded[:, None] + tl.dot(weights.to(kind), block, input_precision=PRECISION)
        top = higher
    index = (row * PARTS + part) * QUERIES + head * group + members
    tl.store(out + index[:, None] * D + columns[None, :], gathered, mask=inside[:, None])
    tl.store(stats + index * 2, top, mask=inside)
    tl.store(stats + index * 2 + 1, total, mask=inside)


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
    rows, width = len(qkv), heads.queries * heads.size
    found = torch.empty(rows, _PARTS, width, device=qkv.device, dtype=torch.float32)
    stats = torch.empty(rows, _PARTS, heads.queries, 2, device=qkv.device, dtype=torch.float32)
    _attend[(rows, heads.keys, _PARTS)](
        qkv, qkv if norm is None else norm, keys, values, slots_B, position_L, heads.cos_SD, heads.sin_SD, found, stats,
        qkv.stride(0), keys.stride(0), keys.stride(1), heads.scaling, heads.epsilon,
        QUERIES=heads.queries, KEYS=heads.keys,
        GROUP=max(16, triton.next_power_of_2(heads.queries // heads.keys)),  # the minimum of a matrix unit
        D=heads.size, BLOCK=_KEY_BLOCK, NORM=norm is not None, PRECISION="ieee", PARTS=_PARTS,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return _run_widen(3, rows, found, stats, a_RW, width, size=heads.size, parts=_PARTS)


@triton.jit
def _say(
    logits, slots, last, position, said, limit, done, temperature, uniforms, tokens, logprobs, is_end,
    vocabulary, room, logits_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    speaks = tl.load(done + slot) == 0
    index = tl.load(said + slot)
    heat = tl.load(temperature)
    scale = tl.where(heat > 0, 1.0 / tl.where(heat > 0, heat, 1.0), 1.0)
    mine = logits + row * logits_stride
    columns = tl.arange(0, BLOCK)

    top = float("-inf")
    likeliest = 0
    for first in range(0, vocabulary, BLOCK):
        inside = first + columns < vocabulary
        scores = tl.load(mine + first + columns, mask=inside, other=float("-inf")) * scale
        high = tl.max(scores, 0)
        likeliest = tl.where(high > top, first + tl.argmax(scores, 0), likeliest)
        top = tl.maximum(top, high)

    total = 0.0
    for first in range(0, vocabulary, BLOCK):
        inside = first + columns < vocabulary
        scores = tl.load(mine + first + columns, mask=inside, other=float("-inf")) * scale
        total += tl.sum(tl.exp(scores - top), 0)

    # The same sums in the same order, to find the block in which the distribution function passes the target.
    target = tl.load(uniforms + slot * room + tl.minimum(index, room - 1)) * total
    running, found, before = 0.0, -1, 0.0
    for first in range(0, vocabulary, BLOCK):
        inside = first + columns < vocabulary
        scores = tl.load(mine + first + columns, mask=inside, other=float("-inf")) * scale
        after = running + tl.sum(tl.exp(scores - top), 0)
        hit = (found < 0) & (after > target)
        before = tl.where(hit, running, before)
        found = tl.where(hit, first, found)
        running = after
    first = tl.maximum(found, 0)
    inside = first + columns < vocabulary
    scores = tl.load(mine + first + columns, mask=inside, other=float("-inf")) * scale
    weights = tl.exp(scores - top)
    passed = tl.sum(((before + tl.cumsum(weights, 0) <= target) & inside).to(tl.int32), 0)
    # Rounding may move the target past the end of its block: then take the likeliest token there.
    within = tl.where(passed < tl.minimum(BLOCK, vocabulary - first), passed, tl.argmax(scores, 0))
    chosen = tl.where((heat > 0) & (found >= 0), first + within, likeliest)

    logprob = tl.load(mine + chosen) * scale - top - tl.log(total)
    noted = slot * room + index
    tl.store(tokens + noted, chosen.to(tl.int64), mask=speaks)
    tl.store(logprobs + noted, logprob, mask=speaks)
    tl.store(last + slot, chosen.to(tl.int64), mask=speaks)
    tl.store(position + slot, tl.load(position + slot) + 1, mask=speaks)
    tl.store(said + slot, index + 1, mask=speaks)
    ends = (tl.load(is_end + chosen) != 0) | (index + 1 >= tl.load(limit + slot))
    tl.store(done + slot, ends.to(tl.int64), mask=speaks)


def say(logits_BV: Tensor, slots_B: Tensor, turn: TurnTensors) -> None:
    _say[(len(slots_B),)](
        logits_BV, slots_B, turn.last_L, turn.position_L, turn.said_L, turn.limit_L, turn.done_L, turn.temperature,
        turn.uniforms_LN, turn.tokens_LN, turn.logprobs_LN, turn.is_end_V.view(torch.uint8),
        logits_BV.shape[1], turn.uniforms_LN.shape[1], logits_BV.stride(0),
        BLOCK=min(_VOCABULARY_BLOCK, triton.next_power_of_2(logits_BV.shape[1])), num_warps=8,
    )  # fmt: skip
