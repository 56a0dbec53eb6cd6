"""Swap names in the successes that the policy imitates, so that it does not memorise what was right for which name.

    user: My account at Acme Bank ...   assistant: search_company("Acme Bank")        original
    user: My account at Zylo Bank ...   assistant: search_company("Zylo Bank")        one augmented copy

A name is a word that the environment wrote in few successes and that no agent wrote first: what an agent writes of its
own accord is its decision. A name is swapped in the whole row, also where the agent repeats it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from lfo.protocol.chat import ChatCodec
from lfo.rollout.practice import WORD, names_among, words
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """Neighbouring tokens of one writer, with the text of each."""

    ids: tuple[int, ...]
    texts: tuple[str, ...]
    by_agent: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    """A success as text."""

    pieces: tuple[_Piece, ...]
    given: frozenset[str]  # words that the environment wrote first
    decided: frozenset[str]  # words that the agent wrote first


class Renaming:
    """Swaps names in drawn successes, each with probability `chance`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chance: float) -> None:
        self._codec, self._chance = ChatCodec(tokenizer), chance
        self._control = frozenset(tokenizer.added_tokens_decoder)
        self._reads: dict[Success, _Read | None] = {}

    def of(
        self, drawn: Sequence[Sequence[Success]], known: Collection[Success], seeds: Sequence[int]
    ) -> list[list[Success]]:
        """Return the drawn successes of each mini-batch with names swapped, given all `known` ones."""
        if not self._chance:
            return [list(part) for part in drawn]
        self._reads = {each: self._reads[each] if each in self._reads else self._read(each) for each in known}
        reads = [read for read in self._reads.values() if read is not None]
        decided = frozenset().union(*(read.decided for read in reads))
        counts = Counter(word for read in reads for word in read.given - decided)
        names = by_shape(names_among(counts, len(known), share=FEW_SHARE))
        rng = np.random.default_rng([*seeds, STREAM])
        return [[self._renamed(success, names, rng) for success in part] for part in drawn]

    def _renamed(self, success: Success, names: list[list[str]], rng: np.random.Generator) -> Success:
        read = self._reads[success]
        if read is None:
            return success
        swaps = self._swaps(read, names, rng)
        tokens: list[int] = []
        sampled: list[bool] = []
        for piece in read.pieces:
            ids = self._swapped(piece, swaps)
            if ids is None:
                return success
            tokens += ids
            sampled += [piece.by_agent] * len(ids)
        return Success(tokens=tuple(tokens), sampled=tuple(sampled))

    def _swaps(self, read: _Read, names: list[list[str]], rng: np.random.Generator) -> dict[str, str]:
        """Draw another name for some names of a row: one that the row does not have, and for each a different one."""
        swaps: dict[str, str] = {}
        for kind in names:
            present = [name for name in kind if name in read.given and rng.random() < self._chance]
            others = [name for name in kind if name not in read.given | read.decided]
            # The agent may have written a name in another form, which would stay: 5551000 for 555-1000.
            present = [name for name in present if not any(name.casefold() in word.casefold() for word in read.decided)]
            drawn = rng.permutation(len(others))[: len(present)]
            swaps |= zip(present, (others[index] for index in drawn), strict=False)
        return swaps

    def _swapped(self, piece: _Piece, swaps: Mapping[str, str]) -> list[int] | None:
        """Return the ids with names swapped; None if a name has unusual tokens, which must not teach the agent others.

        Only the tokens of names change, because a text and the template around it were encoded apart: encoded together,
        their border could become other tokens."""
        text, ends = "".join(piece.texts), list(accumulate(map(len, piece.texts)))
        starts = [0, *ends[:-1]]
        ids: list[int] = []
        done = 0
        for match in WORD.finditer(text):
            if match[0] not in swaps:
                continue
            first, stop = bisect_right(starts, match.start()) - 1, bisect_left(starts, match.end())
            before, after = text[starts[first] : match.start()], text[match.end() : ends[stop - 1]]
            if first < done or self._codec.encode(before + match[0] + after) != list(piece.ids[first:stop]):
                return None
            ids += [*piece.ids[done:first], *self._codec.encode(before + swaps[match[0]] + after)]
            done = stop
        return [*ids, *piece.ids[done:]]

    def _read(self, success: Success) -> _Read | None:
        """Return the texts and words of a row; None if a character has several tokens."""
        pieces: list[_Piece] = []
        given: set[str] = set()
        decided: set[str] = set()
        marked = zip(success.tokens, success.sampled, strict=True)
        for (by_agent, control), run in groupby(marked, key=lambda each: (each[1], each[0] in self._control)):
            ids = tuple(token for token, _ in run)
            texts = tuple("" if control else self._codec.decode([token]) for token in ids)
            text = "".join(texts)
            if not control and text != self._codec.decode(ids):
                return None
            pieces.append(_Piece(ids=ids, texts=texts, by_agent=by_agent))
            mine, others = (decided, given) if by_agent else (given, decided)
            mine |= words(text) - others
        return _Read(pieces=tuple(pieces), given=frozenset(given), decided=frozenset(decided))
