"""What the world model practises on: every reply received so far, and augmented copies. Works for any environment.

Swapped names. A word that occurs in few states, such as a name or a number, does not help in other tasks, but a small
model memorises the reply that came with it. So each time an example is drawn, such words are swapped for others of the
same kind. Only what the states have in common can then explain the reply. A word that the reply repeats stays.

    - search_company("Acme Bank"): Acme Bank, bank; Cards 555-4396      original
    - search_company("Zylo Bank"): Zylo Bank, bank; Cards 555-0187      one augmented copy

Weighted replies. The same content can be worded in many ways. A token that occurs in most replies is wording. A token
that occurs in few replies is content and gets a higher weight, by its inverse document frequency.

Both count occurrences in the examples that are drawn first: calls that look-ahead asks about, or all if there are none.
"""

from __future__ import annotations

import math
import os
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from lfo.env.interface import Environment
from lfo.errors import DataError
from lfo.play.records import read_rollouts
from lfo.protocol.world_model import WorldModelCodec, WorldModelExample
from lfo.types import RolloutGroup

MOST_ENCODERS = 4  # threads that tokenise replies; more would wait for the interpreter lock
FEW = 2  # a word is a name if it occurs in at most this many states,
FEW_SHARE = 0.02  # or in at most this share of them,
MOST_SHARE = 0.25  # but never if it occurs in more than this share: of a handful of states, every word would be one
WORD = re.compile(r"[^\W\d_]+|\d+")


@dataclass(slots=True)
class ReplayBuffer:
    """Every distinct reply received so far. Most environments are stationary, so old replies stay true; where the rules
    have changed (`lfo.runs.rule_change`), those that were not heard since are forgotten.

    A draw depends only on the buffer and the seeds, so a resumed run draws the same examples.
    """

    examples: dict[str, WorldModelExample] = field(default_factory=dict)
    heard: dict[str, int] = field(default_factory=dict)  # the step in which each was received last
    # Each example when it came and, if that was later, when it was first asked: who counts reads only what is new.
    news: list[WorldModelExample] = field(init=False, repr=False, compare=False)
    _keys: list[str] = field(init=False, repr=False, compare=False)
    _places: dict[str, int] = field(init=False, repr=False, compare=False)  # of each key in the list
    _asked: bytearray = field(init=False, repr=False, compare=False)  # of each key

    def __post_init__(self) -> None:
        given, heard = self.examples, self.heard
        self.examples, self.heard = {}, {}
        self.news, self._keys, self._places, self._asked = [], [], {}, bytearray()
        self.add(given.values())
        self.heard |= heard

    def __len__(self) -> int:
        return len(self.examples)

    def add(self, examples: Iterable[WorldModelExample], step: int = 0) -> int:
        """Add new examples and return their number. `asked` is never unset: a rollout that saw the predicted reply may
        make the same call later without asking."""
        before = len(self.examples)
        for example in examples:
            self.heard[example.key] = step
            known = self.examples.get(example.key)
            if known is None:
                self._places[example.key] = len(self._keys)
                self._keys.append(example.key)
                self._asked.append(example.asked)
            elif known.asked or not example.asked:
                continue
            self.examples[example.key] = example
            self._asked[self._places[example.key]] = example.asked
            self.news.append(example)
        return len(self.examples) - before

    def without(self, before: int) -> ReplayBuffer:
        """Return a buffer without the examples that were received last before this step."""
        heard = {key: step for key, step in self.heard.items() if step >= before}
        return ReplayBuffer({key: example for key, example in self.examples.items() if key in heard}, heard)

    def aged(self) -> ReplayBuffer:
        """Return the buffer as it is before the first step of another run."""
        return ReplayBuffer(dict(self.examples), dict.fromkeys(self.examples, -1))

    def draw(self, count: int, seeds: Sequence[int], *, asked_first: bool = False) -> list[WorldModelExample]:
        """Return at most `count` different examples, all with the same probability.

        With `asked_first`, calls that look-ahead asks about come before all others, because the world model will be
        asked about these. (With three quarters of such calls it learned half as fast: research/LOG.md.)
        """
        shuffled = np.random.default_rng(list(seeds)).permutation(len(self._keys))
        if asked_first:
            asked = np.frombuffer(bytes(self._asked), dtype=bool)[shuffled]
            shuffled = np.concatenate([shuffled[asked][:count], shuffled[~asked][:count]])
        return [self.examples[self._keys[index]] for index in shuffled[:count]]

    def save(self, path: Path) -> None:
        """Write the buffer as flat arrays. Token weights are 0 or 1."""
        examples = list(self.examples.values())
        arrays = {
            "lengths": np.array([len(each.tokens) for each in examples], dtype=np.int64),
            "tokens": np.array([token for each in examples for token in each.tokens], dtype=np.int32),
            "weights": np.array([weight for each in examples for weight in each.token_weights], dtype=np.uint8),
            "asked": np.array([each.asked for each in examples], dtype=np.uint8),
            "heard": np.array([self.heard.get(each.key, 0) for each in examples], dtype=np.int32),
            "keys": np.frombuffer(b"".join(bytes.fromhex(each.key) for each in examples), dtype=np.uint8),
        }
        save_file(arrays, path)

    @classmethod
    def load(cls, path: Path) -> ReplayBuffer:
        arrays = load_file(path)
        buffer = cls()
        ends = np.cumsum(arrays["lengths"])
        size = len(arrays["keys"]) // max(1, len(ends))
        heard = arrays.get("heard", np.zeros(len(ends), dtype=np.int32))  # older runs have none
        for index, end in enumerate(ends):
            start = end - arrays["lengths"][index]
            key = arrays["keys"][index * size : (index + 1) * size].tobytes().hex()
            tokens = tuple(map(int, arrays["tokens"][start:end]))
            weights = tuple(map(float, arrays["weights"][start:end]))
            asked = bool(arrays["asked"][index])
            example = WorldModelExample(tokens=tokens, token_weights=weights, key=key, asked=asked)
            buffer.add([example], int(heard[index]))
        return buffer


def examples_of_groups(
    groups: Sequence[RolloutGroup], codec: WorldModelCodec, *, predict: Collection[str] | None
) -> list[list[WorldModelExample]]:
    """Return the distinct world-model examples of each group."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    with ThreadPoolExecutor(min(MOST_ENCODERS, os.cpu_count() or 1)) as pool:
        examples = pool.map(partial(codec.examples_of, predict=predict), rollouts)
    by_group = []
    for group in groups:
        merged = ReplayBuffer()
        for of_rollout in islice(examples, len(group.rollouts)):
            merged.add(of_rollout)
        by_group.append(list(merged.examples.values()))
    return by_group


def logged_replies(
    path: str, environment: Environment, codec: WorldModelCodec, *, predict: Collection[str] | None
) -> ReplayBuffer:
    """Return the replies in the rollouts of a file."""
    replay = ReplayBuffer()
    for rollout in read_rollouts(path, environment):
        replay.add(codec.examples_of(rollout, predict=predict))
    if not replay:
        raise DataError(
            f"{path} contains no reply of a tool that world_model.predict names; choose other logs or tools"
        )
    return replay


# --- augmentation ----------------------------------------------------------------------------------------------------


def words(text: str) -> set[str]:
    """Return the distinct words and numbers of a text.

    >>> sorted(words("Cards 555-4396: unlock_card"))
    ['4396', '555', 'Cards', 'card', 'unlock']
    """
    return set(WORD.findall(text))


def names_among(counts: Mapping[str, int], states: int, *, share: float = FEW_SHARE) -> list[str]:
    """Return the sorted words that occur in few of the states, at most in this share of them.

    >>> names_among({"Acme": 1, "Zylo": 2, "bank": 3, "Task": 8}, states=8)
    ['Acme', 'Zylo']
    """
    most = min(max(FEW, share * states), MOST_SHARE * states)
    return sorted(word for word, count in counts.items() if count <= most)


def with_swapped_names(
    text: str, names: Mapping[bool, Sequence[str]], *, spare: Collection[str], chance: float, rng: np.random.Generator
) -> str:
    """Return the text with each name that is not in `spare` replaced, with probability `chance`, by a random one.

    All occurrences of a name get the same replacement. `names` maps False to words and True to numbers, sorted."""
    swapped: dict[str, str] = {}

    def swap(match: re.Match[str]) -> str:
        word = match[0]
        others = names[word.isdigit()]
        place = bisect_left(others, word)  # there may be many names, and a text has few
        if others[place : place + 1] != [word] or word in spare:
            return word
        if word not in swapped:
            swapped[word] = others[int(rng.integers(len(others)))] if rng.random() < chance else word
        return swapped[word]

    return WORD.sub(swap, text)


def weight_of_token(count: int, replies: int, *, wording: float) -> float:
    """Return the weight of a token that occurs in `count` of `replies`: about `wording` if in all, about 1 if in one.

    >>> [round(weight_of_token(count, 100, wording=0.05), 2) for count in (1, 10, 100)]
    [0.92, 0.52, 0.05]
    """
    rarity = math.log((replies + 1) / (count + 0.5)) / math.log(replies + 1)
    return wording + (1.0 - wording) * min(max(rarity, 0.0), 1.0)


class Practice:
    """Augments drawn examples. `swap_names` is a probability; `wording=1` weights all tokens equally."""

    def __init__(self, codec: WorldModelCodec, *, swap_names: float, wording: float) -> None:
        self._codec, self._chance, self._wording = codec, swap_names, wording
        self._counted: ReplayBuffer | None = None  # whose examples the counts below are of
        self._seen = 0  # news of that buffer that have been counted
        self._asked_only = False
        self._replies = 0
        self._replies_with: Counter[int] = Counter()  # token -> number of replies that contain it
        self._states_with: Counter[str] = Counter()  # word -> number of states that contain it
        self._words: list[str] = []  # of these states, sorted
        self._names: dict[bool, list[str]] = {}

    def of(
        self,
        drawn: Iterable[WorldModelExample],
        known: ReplayBuffer | Iterable[WorldModelExample],
        seeds: Sequence[int],
    ) -> list[WorldModelExample]:
        """Return the drawn examples, augmented with names and word counts of all `known` examples."""
        if not self._chance and self._wording == 1:
            return list(drawn)
        self._count(known if isinstance(known, ReplayBuffer) else ReplayBuffer({each.key: each for each in known}))
        rng = np.random.default_rng([*seeds, 1])  # other random numbers than those of the draw
        return [self._weighted(self._renamed(example, rng)) for example in drawn]

    def _count(self, known: ReplayBuffer) -> None:
        """Add what is new to the counts, which are those of all examples, or of all asked ones if there are any."""
        if known is not self._counted:
            self._counted, self._asked_only = known, False
            self._start_again()
        elif self._seen == len(known.news):
            return
        news = known.news[self._seen :]
        if not self._asked_only and any(example.asked for example in news):
            self._asked_only, news = True, known.news
            self._start_again()
        self._seen = len(known.news)
        first = [example for example in news if example.asked or not self._asked_only]
        self._replies += len(first)
        for example in first:
            self._replies_with.update(set(example.tokens[example.reply_start :]))
        if self._chance:
            self._count_words(first)

    def _count_words(self, examples: Sequence[WorldModelExample]) -> None:
        for example in examples:
            found = words(self._codec.prompt_text(example))
            self._words += [word for word in found if word not in self._states_with]
            self._states_with.update(found)
        self._words.sort()  # in linear time: nearly all are in order
        names = names_among({word: self._states_with[word] for word in self._words}, self._replies)
        self._names = {number: [name for name in names if name.isdigit() == number] for number in (False, True)}

    def _start_again(self) -> None:
        self._seen = self._replies = 0
        self._replies_with, self._states_with = Counter(), Counter()
        self._words, self._names = [], {}

    def _renamed(self, example: WorldModelExample, rng: np.random.Generator) -> WorldModelExample:
        if not self._chance:
            return example
        repeated = words(self._codec.reply_text(example))
        prompt = self._codec.prompt_text(example)
        text = with_swapped_names(prompt, self._names, spare=repeated, chance=self._chance, rng=rng)
        return self._codec.with_prompt(example, text)

    def _weighted(self, example: WorldModelExample) -> WorldModelExample:
        start = example.reply_start
        weights = (
            weight_of_token(self._replies_with[token], self._replies, wording=self._wording)
            for token in example.tokens[start:]
        )
        return replace(example, token_weights=(*example.token_weights[:start], *weights))
