"""The same request in other words: what the world model needs in order to read requests that are worded in a new way.

Requests of one environment are often worded in a few ways. A small model then learns where in the sentence the word
stands that decides, and what stands beside it; in another wording it finds nothing. So each time an example is drawn,
the words around are left out, replaced by others, or moved:

    Please send my books to Norway. My name is Ada Adams.      original
    books send erstlin to Norway. is Ada                        one augmented copy

Words that tell something stay: those that go along with what replies say, by counting, and those that the reply repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

SURE = 14.0  # least likelihood ratio of a word that tells something: by chance in one of 5,000 pairs
FEWEST = 3  # states that have a word, or lack it
MOST_WORDS = 400  # words of each kind that are compared
MOST_NOISE = 0.6  # share of the other words that change, at most
MOVED = 0.5  # share of texts whose parts change places
PARTS = 4  # at most


def telling_words(
    states: Sequence[Collection[str]], replies: Sequence[Collection[str]]
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the words of states that go along with words of their replies, or with their absence, and the latter.

    >>> states = [{"send", "books"}, {"ship", "seeds"}] * 8 + [{"ship", "books"}, {"send", "seeds"}] * 8
    >>> tell, told = telling_words(states, [{"No", "red" if "books" in each else "blue"} for each in states])
    >>> sorted(tell), sorted(told)
    (['books', 'seeds'], ['blue', 'red'])
    """
    words, said = _table(states), _table(replies)
    if not words or not said:
        return frozenset(), frozenset()
    has_NW, says_NR = np.stack(list(words.values()), axis=1), np.stack(list(said.values()), axis=1)
    count, ratio_WR = len(states), np.zeros((len(words), len(said)))
    for one_NW in (has_NW, 1 - has_NW):
        for other_NR in (says_NR, 1 - says_NR):
            both_WR = one_NW.T @ other_NR
            expected_WR = one_NW.sum(0)[:, None] * other_NR.sum(0)[None, :] / count
            ratio_WR += 2 * both_WR * np.log(np.where(both_WR > 0, both_WR / np.maximum(expected_WR, 1e-9), 1.0))
    return _sure(words, ratio_WR.max(axis=1)), _sure(said, ratio_WR.max(axis=0))


def _sure(words: Iterable[str], ratios: np.ndarray) -> frozenset[str]:
    return frozenset(word for word, ratio in zip(words, ratios, strict=True) if ratio > SURE)


def _table(bags: Sequence[Collection[str]]) -> dict[str, np.ndarray]:
    """Return for each word that tells bags apart which of them have it, the most frequent first."""
    counts: dict[str, int] = {}
    for bag in bags:
        for word in bag:
            counts[word] = counts.get(word, 0) + 1
    kept = sorted((word for word, n in counts.items() if FEWEST <= n <= len(bags) - FEWEST), key=lambda w: (-counts[w], w))
    return {word: np.array([word in bag for bag in bags], dtype=float) for word in kept[:MOST_WORDS]}


def reworded(
    text: str, *, stays: Callable[[str], bool], another: Callable[[], str], rng: np.random.Generator
) -> str:
    """Return the text with some pieces that need not stay left out or replaced, new ones between, and parts moved."""
    noise = rng.random() * MOST_NOISE
    pieces: list[str] = []
    for piece in text.split():
        if rng.random() < noise / 2:
            pieces.append(another())
        if stays(piece) or rng.random() >= noise:
            pieces.append(piece)
        elif rng.random() < 0.5:
            pieces.append(another())
    if len(pieces) > 1 and rng.random() < MOVED:
        cuts = np.sort(rng.choice(len(pieces) - 1, size=min(len(pieces) - 1, int(rng.integers(1, PARTS))), replace=False) + 1)
        parts = np.split(np.arange(len(pieces)), cuts)
        pieces = [pieces[index] for part in rng.permutation(len(parts)) for index in parts[part]]
    return " ".join(pieces)
