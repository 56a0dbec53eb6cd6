"""Decoders: from token ids and a cache to the logits of the next token. `sampler` chooses the tokens.

This module has the interface of decoders and `HFDecoder`, which runs any architecture with the model's own forward:
correct but slow. `fused_decoder` runs the Llama / Qwen2 / Qwen3 family; `turn_decoder` runs it on a GPU, whole turns at
a time.

    cache = decoder.cache(rows, context)
    logits_BV = cache.start(rows, histories, computed)    # these rows are the batch
    logits_BV = cache.step(tokens_B)                      # one more token for every row of the batch
    order = cache.keep(alive)                             # remove finished rows; the batch is batch[order]

Shape suffixes, in all of them: B rows of the batch, U of them that differ, M tokens of a ragged batch laid end to end,
T tokens of its longest row, S cached positions, H query heads, K key heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lfo.model.adapters import DualAdapterModel
from lfo.objectives.losses import logits_of


class DecoderCache(Protocol):
    """The cached rows; `step` continues the last batch started."""

    def start(self, rows: Sequence[int], histories: Sequence[Sequence[int]], computed: Sequence[int]) -> Tensor:
        """Make `rows` the batch, compute the new tokens of each history and return the logits after its last token.

        `computed` tokens of each history were computed by earlier calls; at least one is new.
        """
        ...

    def step(self, tokens_B: Tensor) -> Tensor:
        """Append one token to every row of the batch and return the logits after it."""
        ...

    def keep(self, alive: Sequence[bool]) -> list[int]:
        """Shrink the batch to the rows alive; return the old index of each."""
        ...


class Decoder(Protocol):
    def refresh(self) -> None:
        """Use the current weights of the adapters; earlier caches are invalid."""
        ...

    def cache(self, rows: int, context: int) -> DecoderCache:
        """Return a cache for `rows` rows of up to `context` tokens."""
        ...


class HFDecoder:
    """Uses the model's own forward with its adapters. Each turn recomputes its rows, padded on the left."""

    def __init__(self, model: DualAdapterModel, adapters: Sequence[str]) -> None:
        self.model = model
        self.adapters = tuple(adapters)

    def refresh(self) -> None:
        """Do nothing: no weights are copied."""

    def cache(self, rows: int, context: int) -> HFCache:
        return HFCache(self)


class HFCache:
    """The cache of the current batch only."""

    def __init__(self, decoder: HFDecoder) -> None:
        self._decoder = decoder
        self._past: Any = None
        self._mask_BS = torch.empty(0)

    def start(self, rows: Sequence[int], histories: Sequence[Sequence[int]], computed: Sequence[int]) -> Tensor:
        longest = max(map(len, histories))
        padding = [longest - len(history) for history in histories]
        device = self._decoder.model.device
        tokens = [[0] * pad + list(history) for pad, history in zip(padding, histories, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
        self._past = None
        self._mask_BS = torch.tensor(mask, device=device)
        positions = (self._mask_BS.cumsum(1) - 1).clamp(min=0)
        return self._forward(torch.tensor(tokens, device=device), positions)

    def step(self, tokens_B: Tensor) -> Tensor:
        positions = self._mask_BS.sum(1, keepdim=True)
        self._mask_BS = F.pad(self._mask_BS, (0, 1), value=1)
        return self._forward(tokens_B[:, None], positions)

    def keep(self, alive: Sequence[bool]) -> list[int]:
        order = [index for index, lives in enumerate(alive) if lives]
        order_B = torch.tensor(order, device=self._mask_BS.device)
        self._past.batch_select_indices(order_B)
        self._mask_BS = self._mask_BS[order_B]
        return order

    @torch.no_grad()
    def _forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        decoder = self._decoder
        with decoder.model.active(decoder.adapters):
            output = decoder.model.causal_lm.get_decoder()(
                input_ids=tokens,
                attention_mask=self._mask_BS,
                position_ids=positions,
                past_key_values=self._past,
                use_cache=True,
            )
        self._past = output.past_key_values
        return logits_of(output.last_hidden_state[:, -1], decoder.model.head).float()  # as in training
