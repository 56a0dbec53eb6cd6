"""Sampling: sequences of tokens, each in its slot, that grow by given and by sampled tokens in turn.

    sampler = Sampler(model, max_context=1024, eos_ids=[2])
    session = sampler.session(slots=2, adapters=model.policy_adapters)
    session.extend([0, 1], [prompt, prompt])
    first, second = session.decode([0, 1], max_new_tokens=[64, 64], temperature=1.0, uniforms=numbers)
    session.extend([0], [observation])                     # continues slot 0
    (third,) = session.decode([0], max_new_tokens=[64], temperature=1.0, uniforms=more_numbers)
    sampler.refresh()                                      # after each optimizer step

A token is sampled by inverting the distribution function at a number in [0, 1) that the caller passes for that slot and
position. So a slot does not depend on the other slots of the batch, and the sampler has no random state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lfo.model.adapters import DualAdapterModel
from lfo.model.fast.decoder import Decoder, HFDecoder
from lfo.model.fast.fused_decoder import FusedDecoder
from lfo.model.fast.turn_decoder import TurnCache, TurnDecoder
from lfo.model.layers import draw
from lfo.types import Speech

# The largest fp32 number below 1: rounding a double must not exceed the end of the distribution.
_BELOW_ONE = 1.0 - 2.0**-24


class Sampler:
    """Creates sessions on a model. Reads the weights at the first use after each `refresh`."""

    def __init__(self, model: DualAdapterModel, *, max_context: int, eos_ids: Sequence[int]) -> None:
        self.model = model
        self.max_context = max_context
        self.vocabulary = model.head.shape[0]
        self.is_eos_V = torch.zeros(self.vocabulary, dtype=torch.bool, device=model.device)
        self.is_eos_V[list(eos_ids)] = True
        self.version = 0
        self._decoders: dict[tuple[str, ...], tuple[int, Decoder]] = {}  # with the version of its weights

    def refresh(self) -> None:
        """Use the changed adapters in new sessions; existing sessions become invalid."""
        self.version += 1

    def session(self, *, slots: int, adapters: Sequence[str], context: int | None = None) -> Session:
        """Return slots of up to `context` tokens, by default the whole context; a smaller one saves memory."""
        room = self.max_context if context is None else min(context, self.max_context)
        return Session(self, self._decoder(tuple(adapters)), slots, room)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        adapters: Sequence[str],
        max_new_tokens: int,
        temperature: float = 0.0,
        uniforms: Any = None,
    ) -> list[Speech]:
        """Return one completion of each prompt. Greedy completions of equal prompts are computed once."""
        asked = [tuple(prompt) for prompt in prompts]
        if temperature == 0:
            asked = list(dict.fromkeys(asked))
        if not asked:
            return []
        longest = max(map(len, asked)) + max_new_tokens
        session = self.session(slots=len(asked), adapters=adapters, context=longest)
        session.extend(range(len(asked)), asked)
        limits = [max_new_tokens] * len(asked)
        answers = session.decode(range(len(asked)), max_new_tokens=limits, temperature=temperature, uniforms=uniforms)
        if temperature == 0:
            by_prompt = dict(zip(asked, answers, strict=True))
            return [by_prompt[tuple(prompt)] for prompt in prompts]
        return answers

    def _decoder(self, adapters: tuple[str, ...]) -> Decoder:
        if adapters not in self._decoders:
            decoder = make_decoder(self.model, adapters, max_context=self.max_context)
            self._decoders[adapters] = self.version, decoder
        merged, decoder = self._decoders[adapters]
        if merged != self.version:
            decoder.refresh()
            self._decoders[adapters] = self.version, decoder
        return decoder


class Session:
    """Slots that grow together with one set of weights. Tokens are computed when a slot decodes, not before."""

    def __init__(self, sampler: Sampler, decoder: Decoder, slots: int, context: int) -> None:
        self._sampler = sampler
        self._version = sampler.version
        self._context = context
        self._cache = decoder.cache(slots, context)
        self._tokens: list[list[int]] = [[] for _ in range(slots)]
        self._computed = [0] * slots
        # On a GPU, checking for finished rows is a sync; on a CPU, a finished row costs time.
        self._check_every = 1 if sampler.model.device.type == "cpu" else 16

    def tokens(self, slot: int) -> tuple[int, ...]:
        """Return the tokens of the slot."""
        return tuple(self._tokens[slot])

    def room(self, slot: int) -> int:
        """Return how many more tokens fit."""
        return self._context - len(self._tokens[slot])

    def rewind(self, slot: int, length: int) -> None:
        """Keep the first `length` tokens of a slot."""
        del self._tokens[slot][length:]
        # The last token is computed at the next decode, as after `decode`.
        self._computed[slot] = max(0, min(self._computed[slot], length - 1))

    def extend(self, slots: Sequence[int], chunks: Sequence[Sequence[int]]) -> None:
        """Append tokens to slots."""
        for slot, chunk in zip(slots, chunks, strict=True):
            if len(chunk) > self.room(slot):
                raise ValueError(f"{len(chunk)} tokens do not fit: row {slot} has room for {self.room(slot)}")
            if chunk and not (min(chunk) >= 0 and max(chunk) < self._sampler.vocabulary):
                raise ValueError(f"row {slot} got a token outside the vocabulary of {self._sampler.vocabulary}")
        for slot, chunk in zip(slots, chunks, strict=True):
            self._tokens[slot].extend(chunk)

    @torch.inference_mode()
    def decode(
        self,
        slots: Sequence[int],
        *,
        max_new_tokens: Sequence[int],
        temperature: float,
        uniforms: Any = None,
    ) -> list[Speech]:
        """Sample tokens for each slot until an end token (which is kept), its limit, or a full context.

        `uniforms[i][k]` samples token k of `slots[i]`; it needs as many numbers as the slot's limit. Greedy decoding
        (temperature 0) needs none.
        """
        if self._version != self._sampler.version:
            raise RuntimeError("the sampler was refreshed after this session began; start a new session")
        if len(set(slots)) != len(slots):
            raise ValueError("a row may occur only once in a batch")
        limits = [min(limit, self.room(slot)) for slot, limit in zip(slots, max_new_tokens, strict=True)]
        speaking = [index for index, limit in enumerate(limits) if limit > 0]
        answers = [Speech(tokens=(), logprobs=(), stopped=False)] * len(slots)
        if not speaking:
            return answers
        if silent := [slots[index] for index in speaking if not self._tokens[slots[index]]]:
            raise ValueError(f"row {silent[0]} is empty; extend it before decoding")

        numbers = None if temperature == 0 else [uniforms[index] for index in speaking]
        spoken = self._speak(
            [slots[index] for index in speaking], [limits[index] for index in speaking], temperature, numbers
        )
        for index, answer in zip(speaking, spoken, strict=True):
            slot, answers[index] = slots[index], answer
            self._tokens[slot].extend(answer.tokens)
            self._computed[slot] = len(self._tokens[slot]) - 1  # the last token is not computed yet
        return answers

    def _speak(
        self, slots: list[int], limits: list[int], temperature: float, numbers: list[Any] | None
    ) -> list[Speech]:
        device, is_eos_V = self._sampler.model.device, self._sampler.is_eos_V
        steps = max(limits)
        limit_B = torch.tensor(limits, device=device)
        uniforms_KB = None if numbers is None else _uniforms(numbers, limits).to(device)
        histories, computed = [self._tokens[slot] for slot in slots], [self._computed[slot] for slot in slots]
        if isinstance(self._cache, TurnCache):
            said = self._cache.speak(
                slots,
                histories,
                computed,
                limits=limits,
                temperature=temperature,
                uniforms_KB=uniforms_KB,
                is_end_V=is_eos_V,
            )
            return [
                Speech(tokens=tuple(tokens), logprobs=tuple(logprobs), stopped=stopped)
                for tokens, logprobs, stopped in zip(*said, strict=True)
            ]
        tokens_KB = torch.zeros(steps, len(slots), dtype=torch.long, device=device)
        logprobs_KB = torch.zeros(steps, len(slots), device=device)
        index_B = torch.arange(len(slots), device=device)  # index in `slots` of each row of the shrinking batch
        done_B = torch.zeros(len(slots), dtype=torch.bool, device=device)

        logits_BV = self._cache.start(slots, histories, computed)
        for step in range(steps):
            chosen_B, logprob_B = draw(
                logits_BV, temperature, None if uniforms_KB is None else uniforms_KB[step, index_B]
            )
            tokens_KB[step, index_B] = chosen_B
            logprobs_KB[step, index_B] = logprob_B
            done_B = done_B | is_eos_V[chosen_B] | (limit_B[index_B] <= step + 1)
            if step + 1 == steps:
                break
            if (step + 1) % self._check_every == 0:
                alive = done_B.logical_not().tolist()
                if not any(alive):
                    break
                # Moving rows costs about as much as a step, so wait until an eighth of the batch has finished.
                if sum(alive) <= len(alive) * 7 // 8:
                    order = torch.tensor(self._cache.keep(alive), device=device)
                    index_B, chosen_B, done_B = index_B[order], chosen_B[order], done_B[order]
            # Finished rows get the same token, so that a cache can compute those with equal tokens once.
            logits_BV = self._cache.step(chosen_B.masked_fill(done_B, 0))

        # Drop the tokens after the first end token, sampled while the row waited to be removed.
        ends_KB = is_eos_V[tokens_KB]
        first_end_B = torch.where(ends_KB.any(0), ends_KB.int().argmax(0) + 1, steps + 1)
        lengths, stopped = torch.minimum(first_end_B, limit_B).tolist(), (first_end_B <= limit_B).tolist()
        return [
            Speech(tokens=tuple(tokens[:length]), logprobs=tuple(logprobs[:length]), stopped=stop)
            for tokens, logprobs, length, stop in zip(
                tokens_KB.T.tolist(), logprobs_KB.T.tolist(), lengths, stopped, strict=True
            )
        ]


def make_decoder(model: DualAdapterModel, adapters: Sequence[str], *, max_context: int) -> Decoder:
    """Return the fastest decoder that supports this model and samples from the policy that is trained."""
    if model.device.type == "cuda" and TurnDecoder.supports(model):
        return TurnDecoder(model, adapters, max_context=max_context)
    # It merges adapters into the weights: in bf16 small updates would vanish.
    exact = model.device.type == "cpu" or model.head.dtype == torch.float32
    if exact and FusedDecoder.supports(model):
        return FusedDecoder(model, adapters, max_context=max_context)
    return HFDecoder(model, adapters)


def _uniforms(numbers: Sequence[Any], limits: Sequence[int]) -> Tensor:
    """Return the random numbers as one tensor, row by step; 0 after the limit of a row."""
    uniforms_BK = torch.zeros(len(limits), max(limits), dtype=torch.float64)
    for index, (row, limit) in enumerate(zip(numbers, limits, strict=True)):
        if len(row) < limit:
            raise ValueError(f"{len(row)} uniform numbers are too few for {limit} tokens")
        uniforms_BK[index, :limit] = torch.as_tensor(row[:limit], dtype=torch.float64)
    if not bool(((uniforms_BK >= 0) & (uniforms_BK < 1)).all()):
        raise ValueError("uniform numbers must be in [0, 1)")
    return uniforms_BK.T.float().clamp(max=_BELOW_ONE)
