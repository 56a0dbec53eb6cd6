"""The same request in other words: what the world model needs in order to read requests that are worded in a new way.

Requests of one environment are often worded in a few ways. A small model then learns where in the sentence the word
stands that decides, and what stands beside it; in another wording it finds nothing. So each time an example is drawn,
the words around are left out, replaced by others, or moved:

    Please send my books to Norway. My name is Ada Adams.      original
    books send erstlin to Norway. is Ada                       one augmented copy

Words that tell something stay: those that go along with what replies say, by counting, and those that the reply
repeats. (More weight on the tokens of what is told made predictions worse: research/LOG.md.)
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property, partial

import numpy as np

from lfo.protocol.world_model import WorldModelCodec, WorldModelExample

SURE = 14.0  # least likelihood ratio of a word that tells something: by chance in one of 5,000 pairs
FEWEST = 3  # states that have a word, or lack it
MOST_WORDS = 400  # words of states, and of replies, that are compared
MOST_NOISE = 0.6  # share of the other words that change, at most
MOVED = 0.5  # share of texts whose parts change places
MOST_PARTS = 4
WORD = re.compile(r"[^\W\d_]+|\d+")
_STATE_END = "<|/state|>"
_TEXTS = re.compile(r"^(Task: |- .*?\): )(?![\[{])(.+)$", re.MULTILINE)  # what is JSON stays


class Rewording:
    """Words requests anew, with this chance."""

    def __init__(self, codec: WorldModelCodec, chance: float) -> None:
        self._codec, self._chance = codec, chance
        self._telling: frozenset[str] = frozenset()  # words of states
        self._told: frozenset[str] = frozenset()  # words of replies

    def count(self, exchanges: Iterable[tuple[str, str]]) -> None:
        """Find the words that matter in these prompts and replies.

        Equal states count once: a task that was played eight times says nothing about the names in it.
        """
        said: dict[str, set[str]] = defaultdict(set)
        for prompt, reply in exchanges:
            said[texts_of(prompt)] |= words(reply)
        self._telling, self._told = telling_words([words(state) for state in said], list(said.values()))

    def of(self, example: WorldModelExample, rng: np.random.Generator) -> WorldModelExample:
        """Return the example, perhaps with another wording of its state before the same reply."""
        if rng.random() >= self._chance:
            return example
        kept = self._telling | words(self._codec.reply_text(example))

        def stays(piece: str) -> bool:
            return any(word in kept or word.isdigit() for word in words(piece))

        change = partial(reworded, stays=stays, another=partial(self._any_word, rng), rng=rng)
        return self._codec.with_prompt(example, with_other_texts(self._codec.prompt_text(example), change))

    def _any_word(self, rng: np.random.Generator) -> str:
        chosen = rng.integers(len(self._pieces), size=int(rng.integers(1, 4)))
        return "".join(self._pieces[index] for index in chosen)

    @cached_property
    def _pieces(self) -> list[str]:
        """The words and parts of words of the vocabulary, in small letters."""
        texts = (self._codec.text([token]).strip() for token in range(self._codec.vocabulary))
        return sorted({text for text in texts if text.isalpha() and text.islower()}) or ["a"]


def words(text: str) -> set[str]:
    """Return the distinct words and numbers of a text.

    >>> sorted(words("Cards 555-4396: unlock_card"))
    ['4396', '555', 'Cards', 'card', 'unlock']
    """
    return set(WORD.findall(text))


# --- which words matter ----------------------------------------------------------------------------------------------


def telling_words(
    states: Sequence[Collection[str]], replies: Sequence[Collection[str]]
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the words of states that go along with words of their replies, or with their absence; and the latter.

    >>> states = [{"send", "books"}, {"ship", "seeds"}] * 8 + [{"ship", "books"}, {"send", "seeds"}] * 8
    >>> telling, told = telling_words(states, [{"No", "red" if "books" in each else "blue"} for each in states])
    >>> sorted(telling), sorted(told)
    (['books', 'seeds'], ['blue', 'red'])
    """
    words_W, has_NW = _table(states)
    words_R, says_NR = _table(replies)
    if not words_W or not words_R:
        return frozenset(), frozenset()
    ratio_WR = np.zeros((len(words_W), len(words_R)))
    for one_NW in (has_NW, 1 - has_NW):
        for other_NR in (says_NR, 1 - says_NR):
            both_WR = one_NW.T @ other_NR
            by_chance_WR = one_NW.sum(0)[:, None] * other_NR.sum(0)[None, :] / len(states)
            ratio_WR += 2 * both_WR * np.log(np.where(both_WR > 0, both_WR / by_chance_WR, 1.0))
    sure_WR = ratio_WR > SURE
    return (
        frozenset(word for word, sure in zip(words_W, sure_WR.any(1), strict=True) if sure),
        frozenset(word for word, sure in zip(words_R, sure_WR.any(0), strict=True) if sure),
    )


def _table(bags: Sequence[Collection[str]]) -> tuple[list[str], np.ndarray]:
    """Return the words that tell bags apart, the most frequent first, and which bags have them."""
    counts = Counter(word for bag in bags for word in bag)
    kept = [word for word in sorted(counts) if FEWEST <= counts[word] <= len(bags) - FEWEST]
    kept = sorted(kept, key=lambda word: -counts[word])[:MOST_WORDS]
    return kept, np.array([[word in bag for word in kept] for bag in bags], dtype=float).reshape(len(bags), len(kept))


# --- texts -----------------------------------------------------------------------------------------------------------


def texts_of(prompt: str) -> str:
    """Return the task and the observations of a prompt.

    >>> texts_of('<|state|>\\nTask: Open it.\\n- look("safe"): A red safe.\\n<|/state|>')
    'Open it.\\nA red safe.'
    """
    return "\n".join(found[2] for found in _TEXTS.finditer(prompt.partition(_STATE_END)[0]))


def with_other_texts(prompt: str, change: Callable[[str], str]) -> str:
    """Return a prompt whose task and observations are changed.

    >>> with_other_texts('<|state|>\\nTask: Open it.\\n- look("safe"): A red safe.\\n<|/state|>', str.upper)
    '<|state|>\\nTask: OPEN IT.\\n- look("safe"): A RED SAFE.\\n<|/state|>'
    """
    state, end, rest = prompt.partition(_STATE_END)
    return _TEXTS.sub(lambda found: found[1] + change(found[2]), state) + end + rest


def reworded(text: str, *, stays: Callable[[str], bool], another: Callable[[], str], rng: np.random.Generator) -> str:
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
        count = min(int(rng.integers(2, MOST_PARTS + 1)), len(pieces))
        cuts = np.sort(rng.choice(len(pieces) - 1, size=count - 1, replace=False) + 1)
        parts = np.split(np.arange(len(pieces)), cuts)
        pieces = [pieces[index] for part in rng.permutation(len(parts)) for index in parts[part]]
    return " ".join(pieces)
