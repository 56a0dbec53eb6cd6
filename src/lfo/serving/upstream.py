"""A vLLM server instead of our sampler: it has the base and both LoRAs, and continues the tokens of an episode.

    vllm serve BASE --enable-lora --lora-modules policy=policy world_model=world_model     in the folder of `lfo export`
    lfo serve runs/x --upstream http://localhost:8001

Episodes and look-ahead stay here. Requests go to `/v1/completions` with token ids in both directions
(`return_token_ids`, vLLM 0.10.2 or later), so that nothing is tokenised twice. vLLM uses its own random numbers:
sampled messages differ from the local sampler, greedy ones do not, up to rounding.
"""

from __future__ import annotations

import json
import logging
import urllib.error
import urllib.request
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from lfo.errors import WorkError
from lfo.play.predictors import Complete
from lfo.types import Speech

PATIENCE = 300.0  # seconds to wait for one completion
AT_ONCE = 64

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed(Speech):
    """The empty message of a prompt that the server refused or failed on."""

    tokens: tuple[int, ...] = ()
    stopped: bool = False
    error: WorkError


class Upstream:
    """Completions of a server; `ends` are the ids that end a message, the usual one first."""

    def __init__(self, url: str, *, ends: Sequence[int], api_key: str = "") -> None:
        self._url, self.ends, self._key = url.rstrip("/").removesuffix("/v1"), tuple(ends), api_key
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="upstream")

    def models(self) -> list[str]:
        answer = self._ask("/v1/models")
        try:
            return [each["id"] for each in answer["data"]]
        except (KeyError, TypeError):
            raise WorkError(f"{self._url}/v1/models names no models: is it the address of a vLLM server?") from None

    def complete(
        self,
        model: str,
        prompts: Sequence[Sequence[int]],
        *,
        limits: Sequence[int],
        temperature: float,
        seeds: Sequence[int],
    ) -> list[Speech]:
        """Return the completions of all prompts, requested in parallel; an error fails only its own prompt."""

        def one(prompt: Sequence[int], limit: int, seed: int) -> Speech:
            body = {
                "model": model,
                "prompt": list(prompt),
                "max_tokens": limit,
                "temperature": temperature,
                "seed": seed,
                "stop_token_ids": list(self.ends),
                "return_token_ids": True,
            }
            try:
                return self._read(self._ask("/v1/completions", body), limit)
            except WorkError as error:
                logger.warning("%s", error)  # look-ahead goes on without this completion and tells nobody
                return Failed(error=error)

        return list(self._pool.map(one, prompts, limits, seeds))

    def _read(self, answer: Any, limit: int) -> Speech:
        try:
            choice = answer["choices"][0]
            tokens, stopped = array("i", choice["token_ids"]).tolist(), choice["finish_reason"] == "stop"
            if min(tokens, default=0) < 0:
                raise ValueError("an id is negative")
        except (KeyError, TypeError, ValueError, IndexError, OverflowError):
            raise WorkError(f"{self._url} returned no token ids: lfo serve needs vLLM 0.10.2 or later") from None
        if stopped and (not tokens or tokens[-1] not in self.ends):
            tokens.append(self.ends[0])
        return Speech(tokens=tuple(tokens[:limit]), logprobs=(0.0,) * min(len(tokens), limit), stopped=stopped)

    def _ask(self, path: str, body: Any = None) -> Any:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self._url + path, data=data, headers=headers)  # refuses what is no address
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                words = error.read(300).decode(errors="replace")
            raise WorkError(f"{self._url}{path} answered {error.code}: {words}") from error
        except (OSError, ValueError, HTTPException) as error:
            raise WorkError(f"{self._url}{path} cannot be reached: {getattr(error, 'reason', error)}") from error


class UpstreamSlots:
    """Slots that a model of the server continues; the server caches them."""

    def __init__(self, upstream: Upstream, model: str, *, slots: int, context: int) -> None:
        self._upstream, self._model, self._context = upstream, model, context
        self._tokens: list[list[int]] = [[] for _ in range(slots)]

    def tokens(self, slot: int) -> Sequence[int]:
        return tuple(self._tokens[slot])

    def room(self, slot: int) -> int:
        return self._context - len(self._tokens[slot])

    def rewind(self, slot: int, length: int) -> None:
        del self._tokens[slot][length:]

    def extend(self, slots: Sequence[int], chunks: Sequence[Sequence[int]]) -> None:
        for slot, chunk in zip(slots, chunks, strict=True):
            self._tokens[slot].extend(chunk)

    def decode(
        self, slots: Sequence[int], *, max_new_tokens: Sequence[int], temperature: float, uniforms: Any
    ) -> list[Speech]:
        limits = [min(limit, self.room(slot)) for slot, limit in zip(slots, max_new_tokens, strict=True)]
        seeds = [int(numbers[0] * 2**31) for numbers in uniforms]
        prompts = [self._tokens[slot] for slot in slots]
        said = self._upstream.complete(self._model, prompts, limits=limits, temperature=temperature, seeds=seeds)
        self.extend(slots, [each.tokens for each in said])
        return said


def completer(upstream: Upstream, model: str, limit: int) -> Complete:
    """Return a function that completes prompts with the world model. A failed completion becomes an empty reply."""

    def complete(prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        count = len(prompts)
        said = upstream.complete(model, prompts, limits=[limit] * count, temperature=0.0, seeds=[0] * count)
        return [upstream.ends[:1] if isinstance(each, Failed) else each.tokens for each in said]

    return complete
