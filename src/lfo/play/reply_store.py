"""A store of the replies received so far, searched by text similarity: what to try before training a world model.

    store = ReplyStore()
    store.add(calls)                       # ObservedCalls
    store.recall([(state, call)])          # -> for each, the reply in the most similar situation

A situation has three texts: the task, the earlier actions and replies that concern the call, and the call. Its terms
are the words of each text. The similarity of two situations is the cosine of their terms, weighted by how much a term
says about the words of the replies so far (`informativeness`). TF-IDF decides between equals, then the newest wins.
Replies of before a change of rules are forgotten (`lfo.runs.rule_change`).
Nothing here is made for one environment. research/LOG.md lists the alternatives that were tried; this was the best.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import coo_array, csr_array
from scipy.special import xlogy

from lfo.errors import DataError
from lfo.play.look_ahead import Question
from lfo.protocol.hermes import format_tool_call
from lfo.protocol.world_model import ObservedCall, WorldModelState, concerning, observed_calls
from lfo.types import Rollout, ToolCall

SIGNIFICANT = 6.63  # of 2 n times the mutual information of two words: by chance above it in one case of a hundred
TIE = 0.01  # weight of the TF-IDF similarity
TERMS_AT_ONCE = 512  # bounds the memory: each of them has a figure for every word of the replies
_WORD = re.compile(r"\w+")
_MAX_CHARS = 8_000  # of one text; the parts of a state are already cut there
_MAX_REPLY_CHARS = 1_000  # of a shown reply; more could fill the context of the policy

Situation = tuple[str, ...]  # task, earlier actions and replies, call
_TEXTS = 3
FILE = "memory.json"  # next to the adapters; the name is older than the class


def situation_of(state: WorldModelState, call: ToolCall) -> Situation:
    before = " ".join(f"{action} {observation}" for action, observation in concerning(state, call).actions)
    return state.task[:_MAX_CHARS], before[-_MAX_CHARS:], format_tool_call(call)[:_MAX_CHARS]


def terms_of(texts: Iterable[str]) -> set[str]:
    """Return the words of several texts. The same word in another text is another term.

    >>> sorted(terms_of(["Pay the bill", "bill"]))
    ['0 bill', '0 pay', '0 the', '1 bill']
    """
    return {f"{index} {word}" for index, text in enumerate(texts) for word in _WORD.findall(text.lower())}


def columns_of(bags: Iterable[Iterable[str]]) -> dict[str, int]:
    return {term: column for column, term in enumerate(sorted(set().union(*bags)))}


def occurrences(bags: Sequence[Iterable[str]], columns: Mapping[str, int]) -> csr_array:
    """Return a matrix `[bag, column]` of zeros and ones; terms without a column are ignored."""
    known = [sorted(columns[term] for term in bag if term in columns) for bag in bags]
    ends = np.cumsum([0, *map(len, known)])
    found = np.array([column for row in known for column in row], dtype=np.int64)
    return csr_array((np.ones(len(found)), found, ends), shape=(len(bags), len(columns)))


def informativeness(terms: csr_array, words: csr_array) -> np.ndarray:
    """Return how much each term says about the words of the reply: the sum of its mutual information, in nats, with
    all words that it occurs with significantly (a G-test)."""
    rows = terms.T.tocsr()
    parts = (rows[first : first + TERMS_AT_ONCE] for first in range(0, len(rows.indptr) - 1, TERMS_AT_ONCE))
    return np.concatenate([np.zeros(0), *(_informativeness(part, words) for part in parts)])


def _informativeness(terms: csr_array, words: csr_array) -> np.ndarray:
    """Return `informativeness` of some terms, which are rows here."""
    count, of_terms, of_words = len(words.indptr) - 1, terms.sum(axis=1), words.sum(axis=0)
    pairs = coo_array(terms @ words)
    both, term, word = pairs.data, of_terms[pairs.row], of_words[pairs.col]
    cells = both, term - both, word - both, count - term - word + both
    margins = term, count - term, word, count - word
    information = (sum(xlogy(n, n) for n in cells) - sum(xlogy(n, n) for n in margins)) / count + np.log(count)
    significant = np.where(2 * count * information > SIGNIFICANT, information, 0.0)
    return np.bincount(pairs.row, weights=significant, minlength=len(of_terms))


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredReply:
    situation: Situation
    reply: str


class Similarity:
    """The similarity of a situation to stored ones."""

    def __init__(self, stored: Sequence[StoredReply]) -> None:
        bags, replies = ([terms_of(each.situation) for each in stored], [terms_of([each.reply]) for each in stored])
        self._columns, words = columns_of(bags), columns_of(replies)
        terms = occurrences(bags, self._columns)
        rarity = np.log((1 + len(stored)) / (1 + terms.sum(axis=0))) + 1
        self._weights = informativeness(terms, occurrences(replies, words)), rarity
        self._stored = [_directions(terms, weights) for weights in self._weights]

    def __call__(self, situations: Sequence[Situation]) -> np.ndarray:
        """Return the similarities as an array `[situation, stored situation]`."""
        asked = occurrences([terms_of(each) for each in situations], self._columns)
        informative, rare = (
            (_directions(asked, weights) @ stored.T).toarray()
            for weights, stored in zip(self._weights, self._stored, strict=True)
        )
        return informative + TIE * rare


def _directions(terms: csr_array, weights: np.ndarray) -> csr_array:
    """Return weighted rows of length 1; a row without weight stays 0."""
    weighted = terms.multiply(weights).tocsr()
    lengths = np.sqrt(weighted.multiply(weighted).sum(axis=1))
    return weighted.multiply(1 / np.where(lengths > 0, lengths, 1)[:, None]).tocsr()


@dataclass
class ReplyStore:
    """Every distinct (situation, reply), in the order in which they were first received."""

    replies: dict[StoredReply, int] = field(default_factory=dict)  # the step in which each was received last
    _similarity: Similarity | None = None  # to all replies; computed on first use after `add`

    def __len__(self) -> int:
        return len(self.replies)

    def observe(self, rollouts: Iterable[Rollout], step: int = 0) -> None:
        """Store the calls that look-ahead asks about. Storing all calls was not better and five times as slow."""
        self.add((call for rollout in rollouts for call in observed_calls(rollout) if call.asked), step)

    def add(self, calls: Iterable[ObservedCall], step: int = 0) -> None:
        for each in calls:
            reply = each.reply[:_MAX_REPLY_CHARS]
            self._keep(StoredReply(situation=situation_of(each.state, each.call), reply=reply), step)

    def _keep(self, stored: StoredReply, step: int) -> None:
        if stored not in self.replies:
            self._similarity = None
        self.replies[stored] = step

    def forget(self, before: int) -> None:
        """Drop the replies that were received last before this step."""
        self.replies = {stored: step for stored, step in self.replies.items() if step >= before}
        self._similarity = None

    def age(self) -> None:
        """Take all replies as received before the first step of another run."""
        self.replies = dict.fromkeys(self.replies, -1)

    def answer(self, questions: Sequence[Question]) -> list[str]:
        """Answer each question of look-ahead; see `recall`."""
        return self.recall([(question.state, question.call) for question in questions])

    def recall(self, questions: Sequence[tuple[WorldModelState, ToolCall]]) -> list[str]:
        """Return the reply in the most similar situation, for each question; "" while the store is empty."""
        if not self.replies or not questions:
            return [""] * len(questions)
        newest_first = list(self.replies)[::-1]
        self._similarity = self._similarity or Similarity(newest_first)
        similarity = self._similarity([situation_of(*question) for question in questions])
        return [newest_first[best].reply for best in np.argmax(similarity, axis=1)]

    @property
    def records(self) -> list[list[Any]]:
        return [[*stored.situation, stored.reply, step] for stored, step in self.replies.items()]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.records), encoding="utf-8")

    def load(self, path: Path) -> None:
        """Load what `save` wrote; the same questions then get the same replies."""
        try:
            records = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(damaged(path)) from error
        self.add_records(records, path)

    def add_records(self, records: Any, path: Path) -> None:
        """Add records that were read from `path`."""
        if not isinstance(records, list):
            raise DataError(damaged(path))
        for record in records:
            texts, step = (record[: _TEXTS + 1], record[_TEXTS + 1 :]) if isinstance(record, list) else ([], [])
            if [*map(type, texts)] != [str] * (_TEXTS + 1) or [*map(type, step)] not in ([int], []):  # older: no step
                raise DataError(damaged(path))
            self._keep(StoredReply(situation=tuple(texts[:-1]), reply=texts[-1]), *(step or [0]))


def damaged(path: Path) -> str:
    return f"{path} is damaged: it is not a store of replies"
