"""A store of the replies received so far, searched by text similarity: what to try before training a world model.

    store = ReplyStore()
    store.add(calls)                       # ObservedCalls
    store.recall([(state, call)])          # -> for each, the reply in the most similar situation

A situation has three texts: the task, the earlier actions and replies that concern the call, and the call. The
similarity of two situations is the mean cosine similarity of these texts, as TF-IDF vectors over character n-grams of
their words: standard text retrieval, with nothing made for one environment. Of equally similar situations the newest
wins. Nothing here is trained. docs/LOG.md lists the alternatives that were tried; this was the best.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
from scipy.sparse import csr_array

from lfo.errors import DataError
from lfo.protocol.hermes import format_tool_call
from lfo.protocol.world_model import ObservedCall, WorldModelState, concerning, observed_calls
from lfo.types import Rollout, ToolCall

NGRAMS = (3, 4, 5)
_WORD = re.compile(r"\w+")
_MAX_CHARS = 8_000  # of one text; the parts of a state are already cut there
_MAX_REPLY_CHARS = 1_000  # of a shown reply; more could fill the context of the policy

Situation = tuple[str, ...]  # task, earlier actions and replies, call


def situation_of(state: WorldModelState, call: ToolCall) -> Situation:
    before = " ".join(f"{action} {observation}" for action, observation in concerning(state, call).actions)
    return state.task[:_MAX_CHARS], before[-_MAX_CHARS:], format_tool_call(call)[:_MAX_CHARS]


@lru_cache(maxsize=65536)
def _ngrams_of_word(word: str) -> tuple[str, ...]:
    """Return the n-grams of a word with a space on each side.

    >>> _ngrams_of_word("pin")
    (' pi', 'pin', 'in ', ' pin', 'pin ', ' pin ')
    """
    padded = f" {word} "
    return tuple(padded[at : at + size] for size in NGRAMS for at in range(len(padded) - size + 1)) or (padded,)


def ngrams(text: str) -> Iterator[str]:
    for word in _WORD.findall(text.lower()):
        yield from _ngrams_of_word(word)


class TextIndex:
    """Distinct texts, and the cosine similarity of other texts to each, as TF-IDF vectors.

    A term that occurs in d of n texts has the weight ln((1 + n) / (1 + d)) + 1, times its count in the text.
    """

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}  # text -> its row
        self._terms: dict[str, int] = {}  # term -> its column
        self._counts: list[dict[int, int]] = []  # of each row
        self._idf = np.zeros(0)  # of each column
        self._vectors: csr_array | None = None  # of all rows; computed on first use after `add`

    def add(self, text: str) -> int:
        """Return the row of a text; add it if it is new."""
        row = self._rows.setdefault(text, len(self._counts))
        if row == len(self._counts):
            terms = Counter(ngrams(text)).items()
            self._counts.append({self._terms.setdefault(term, len(self._terms)): count for term, count in terms})
            self._vectors = None
        return row

    def similarities(self, texts: Sequence[str]) -> np.ndarray:
        """Return the similarities as an array `[text, row]`, from 0 to 1."""
        if self._vectors is None:
            texts_with = Counter(column for row in self._counts for column in row)
            found_in = np.array([texts_with[column] for column in range(len(self._terms))])
            self._idf = np.log((1 + len(self._counts)) / (1 + found_in)) + 1
            self._vectors = self._tf_idf(self._counts)
        known = [
            {self._terms[term]: count for term, count in Counter(ngrams(text)).items() if term in self._terms}
            for text in texts
        ]
        return (self._vectors @ self._tf_idf(known).toarray().T).T

    def _tf_idf(self, counts: Sequence[dict[int, int]]) -> csr_array:
        """Return rows of length 1; a row without terms stays empty."""
        sizes = np.array([len(row) for row in counts])
        rows = np.repeat(np.arange(len(counts)), sizes)
        columns = np.array([column for row in counts for column in row], dtype=np.int64)
        values = np.array([count for row in counts for count in row.values()]) * self._idf[columns]
        lengths = np.sqrt(np.bincount(rows, weights=values**2, minlength=len(counts)))
        ends = np.concatenate([[0], np.cumsum(sizes)])
        return csr_array((values / lengths[rows], columns, ends), shape=(len(counts), len(self._terms)))


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredReply:
    situation: Situation
    reply: str


@dataclass(slots=True)
class ReplyStore:
    """Every distinct (situation, reply), in the order in which they were first received."""

    replies: dict[StoredReply, tuple[int, ...]] = field(default_factory=dict)  # -> the row of each text in its index
    indexes: tuple[TextIndex, ...] = field(default_factory=lambda: (TextIndex(), TextIndex(), TextIndex()))

    def __len__(self) -> int:
        return len(self.replies)

    def observe(self, rollouts: Iterable[Rollout]) -> None:
        """Store the calls that look-ahead asks about. Storing all calls was not better and five times as slow."""
        self.add(call for rollout in rollouts for call in observed_calls(rollout) if call.asked)

    def add(self, calls: Iterable[ObservedCall]) -> None:
        for each in calls:
            self._keep(StoredReply(situation=situation_of(each.state, each.call), reply=each.reply[:_MAX_REPLY_CHARS]))

    def _keep(self, stored: StoredReply) -> None:
        if stored not in self.replies:
            texts = zip(self.indexes, stored.situation, strict=True)
            self.replies[stored] = tuple(index.add(text) for index, text in texts)

    def recall(self, questions: Sequence[tuple[WorldModelState, ToolCall]]) -> list[str]:
        """Return the reply in the most similar situation, for each question; "" while the store is empty."""
        if not self.replies or not questions:
            return [""] * len(questions)
        newest_first = list(self.replies)[::-1]
        rows = np.array(list(self.replies.values())[::-1])
        asked = zip(*(situation_of(*question) for question in questions), strict=True)  # all tasks, histories, calls
        similarity = sum(
            index.similarities(texts)[:, rows[:, part]]
            for part, (index, texts) in enumerate(zip(self.indexes, asked, strict=True))
        )
        return [newest_first[best].reply for best in np.argmax(similarity, axis=1)]

    def save(self, path: Path) -> None:
        records = [[*stored.situation, stored.reply] for stored in self.replies]
        path.write_text(json.dumps(records), encoding="utf-8")

    def load(self, path: Path) -> None:
        """Load what `save` wrote; the same questions then get the same replies."""
        try:
            records = [tuple(record) for record in json.loads(path.read_text(encoding="utf-8"))]
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{path} is damaged: it is not a store of replies") from error
        for record in records:
            if len(record) != len(self.indexes) + 1 or not all(isinstance(text, str) for text in record):
                raise DataError(f"{path} is damaged: it is not a store of replies")
            self._keep(StoredReply(situation=record[:-1], reply=record[-1]))
