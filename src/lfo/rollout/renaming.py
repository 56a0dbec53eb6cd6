"""Swap names in the successes that the policy imitates, so that it does not memorise what was right for which name.

    user: My account at Acme Bank ...   assistant: search_company("Acme Bank")        original
    user: My account at Zylo Bank ...   assistant: search_company("Zylo Bank")        one augmented copy

A name is a word that the environment wrote in few successes, as in `practice`. It is swapped in the whole row, also
where the agent repeats it. A word that the agent wrote first is its decision and stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from lfo.protocol.chat import ChatCodec
from lfo.rollout.practice import name_swapper, names_among, words
from lfo.rollout.successes import Success

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STREAM = 1_000_002  # part of the seed: other random numbers than those of the draw
FEW_SHARE = 0.05  # of the successes; more than in `practice`, because each task has one success, but many states


def by_shape(names: Iterable[str]) -> list[list[str]]:
    """Group names that look alike, so that the agent can copy them: numbers by length, words by case, single letters.

    >>> by_shape(["X", "Acme", "17", "Zylo", "42", "555"])
    [['X'], ['Acme', 'Zylo'], ['17', '42'], ['555']]
    """
    shapes: dict[tuple[Any, ...], list[str]] = {}
    for name in names:
        shape = (len(name),) if name.isdigit() else (name.isupper(), name[0].isupper(), len(name) == 1)
        shapes.setdefault(shape, []).append(name)
    return list(shapes.values())


class Renaming:
    """Swaps names in drawn successes, each with probability `chance`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chance: float) -> None:
        self._codec, self._chance = ChatCodec(tokenizer), chance
        self._control = frozenset(tokenizer.added_tokens_decoder)
        self._given: dict[Success, frozenset[str]] = {}  # the words that the environment wrote

    def of(
        self, drawn: Sequence[Sequence[Success]], known: Collection[Success], seeds: Sequence[int]
    ) -> list[list[Success]]:
        """Return the drawn successes of each mini-batch with names swapped, given all `known` ones."""
        if not self._chance:
            return [list(part) for part in drawn]
        self._given = {success: self._given.get(success) or self._words(success)[0] for success in known}
        counts = Counter(word for given in self._given.values() for word in given)
        names = by_shape(names_among(counts, len(known), share=FEW_SHARE))
        rng = np.random.default_rng([*seeds, STREAM])
        return [[self._renamed(success, names, rng) for success in part] for part in drawn]

    def _renamed(self, success: Success, names: list[list[str]], rng: np.random.Generator) -> Success:
        _, decided = self._words(success)
        swap = name_swapper(names, spare=decided, chance=self._chance, rng=rng)
        tokens: list[int] = []
        sampled: list[bool] = []
        for ids, by_agent, control in self._pieces(success):
            text = "" if control else self._codec.decode(ids)
            renamed = swap(text)
            if renamed != text:
                if self._codec.encode(text) != ids:
                    return success  # the agent wrote a word in unusual tokens: do not teach it others
                ids = self._codec.encode(renamed)
            tokens += ids
            sampled += [by_agent] * len(ids)
        return Success(tokens=tuple(tokens), sampled=tuple(sampled))

    def _words(self, success: Success) -> tuple[frozenset[str], frozenset[str]]:
        """Return the words that the environment wrote first, and those that the agent wrote first."""
        given: set[str] = set()
        decided: set[str] = set()
        for ids, by_agent, control in self._pieces(success):
            if not control:
                mine, others = (decided, given) if by_agent else (given, decided)
                mine |= words(self._codec.decode(ids)) - others
        return frozenset(given), frozenset(decided)

    def _pieces(self, success: Success) -> list[tuple[list[int], bool, bool]]:
        """Return runs of ids with whether the agent sampled them, and whether they are control tokens, which stay."""
        marked = zip(success.tokens, success.sampled, strict=True)
        runs = groupby(marked, key=lambda each: (each[1], each[0] in self._control))
        return [([token for token, _ in run], by_agent, control) for (by_agent, control), run in runs]
