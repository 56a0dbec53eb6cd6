"""Successful rollouts as samples to imitate, without the exchanges that were only shown, so that the policy learns to
act without them.

tokens    P0  D0 (expected) I0  A0  E0  A1 ...       D0: draft, I0: predicted reply or feedback, A0: the action after it
sample    P0                    A0  E0  A1 ...       as if nothing had been shown
weight     0                     1   0   1

A failed rollout can also be used in hindsight: if the agent had known the reply to its first call, it would have done
at once what it did after it. That call and its reply are cut out in the same way, and the sample ends with the next
call of the same tools.

Names can be swapped in what is imitated, so that the policy does not memorise what was right for which name.

    user: My account at Acme Bank ...   assistant: search_company("Acme Bank")        original
    user: My account at Zylo Bank ...   assistant: search_company("Zylo Bank")        one augmented copy

A name is a word that the environment wrote in few successes and that no agent wrote first: what an agent writes of its
own accord is its decision. A name is swapped in the whole sample, also where the agent repeats it. What it never
repeats may count by its value, such as a price: `copied` swaps only what it repeats.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load_file, save_file

from lfo.protocol.chat import ChatCodec
from lfo.rows.replay import WORD, names_among, words
from lfo.types import Origin, Rollout, TrainingSample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Part of the seed; the replay buffer has the index of a mini-batch in its place.
DRAW_STREAM, NAME_STREAM = 1_000_001, 1_000_002
FEW_SHARE = 0.05  # of the successes; more than in `replay`, because each task has one success, but many states


@dataclass(frozen=True, kw_only=True, slots=True)
class Success:
    """A rollout without shown exchanges, up to its last sampled token; `sampled` marks the sampled tokens."""

    tokens: tuple[int, ...]
    sampled: tuple[bool, ...]
    reward: float = 1.0  # less for the best rollout of a group in which none succeeded


def without_shown(rollout: Rollout) -> Success:
    """Remove every exchange that did not happen in this rollout, with the template around it.

    Such an exchange starts at its action and ends at the next action, so the prompt before it becomes the prompt of the
    next action.
    """
    starts = [turn.action_start for turn in rollout.turns]
    tokens: list[int] = []
    sampled: list[bool] = []
    start = 0
    for turn, end in zip(rollout.turns, [*starts[1:], len(rollout.tokens)], strict=True):
        stop = turn.action_start if turn.predicted else end
        tokens += rollout.tokens[start:stop]
        sampled += [origin == Origin.SAMPLED for origin in rollout.origins[start:stop]]
        start = end
    length = max((index + 1 for index, each in enumerate(sampled) if each), default=0)
    return Success(tokens=tuple(tokens[:length]), sampled=tuple(sampled[:length]), reward=min(1.0, rollout.reward))


def in_hindsight(rollout: Rollout, tools: Collection[str] | None) -> Rollout | None:
    """Return a failed rollout up to its second call of `tools` (None: all), with the first call marked as not made.

    Return None if it succeeded, if both calls are equal, if it did nothing between them, or if the first call shares
    its message with others: half of a message cannot be removed.
    """
    calls = [
        index
        for index, turn in enumerate(rollout.turns)
        if turn.call is not None and not turn.predicted and (tools is None or turn.call.name in tools)
    ]
    if rollout.succeeded or len(calls) < 2:
        return None
    first, second = calls[:2]
    turns, tokens = list(rollout.turns), len(rollout.tokens)
    between = [turn for turn in turns[first + 1 : second] if not turn.predicted]
    # In a message with several calls, only the first turn has action tokens.
    alone = all(turn.action_start < turn.action_end for turn in turns[first : first + 2])
    if turns[first].call == turns[second].call or not between or not alone:
        return None
    end = turns[second + 1].action_start if second + 1 < len(turns) else tokens
    turns[first] = replace(turns[first], predicted=True)
    return replace(
        rollout,
        turns=tuple(turns[: second + 1]),
        tokens=rollout.tokens[:end],
        origins=rollout.origins[:end],
        logprobs=rollout.logprobs[:end],
    )


def imitation_sample(success: Success, *, adapters: tuple[str, ...]) -> TrainingSample:
    weights = [float(each) for each in success.sampled]
    return TrainingSample.supervised(success.tokens, adapters=adapters, imitation_weights=weights)


@dataclass(slots=True)
class SuccessBuffer:
    """The newest success of each task. A draw depends only on the buffer and the seeds."""

    successes: dict[str, Success] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)  # the step of each

    def add(self, rollouts: Iterable[Rollout], step: int = 0) -> None:
        """Store successful rollouts, except those in which a call was made for the policy."""
        for rollout in rollouts:
            if rollout.succeeded:
                self._keep(rollout, step)

    def add_best(self, rollouts: Sequence[Rollout], least: float, step: int = 0) -> None:
        """Store the best rollout of a group in which none succeeded, if it has this reward and others have less."""
        best = max(rollouts, key=lambda rollout: rollout.reward)
        stored = self.successes.get(best.task_id)
        differs = best.reward > min(rollout.reward for rollout in rollouts)
        if best.turns and differs and least <= best.reward < 1.0 and (stored is None or stored.reward <= best.reward):
            self._keep(best, step)

    def add_in_hindsight(self, rollouts: Iterable[Rollout], tools: Collection[str] | None, step: int = 0) -> None:
        """Store failed rollouts in hindsight, for tasks without a stored success."""
        for rollout in rollouts:
            better = in_hindsight(rollout, tools)
            if better is not None and rollout.task_id not in self.successes:
                self._keep(better, step)

    def _keep(self, rollout: Rollout, step: int) -> None:
        success = without_shown(rollout)
        if success.tokens:
            self.successes[rollout.task_id] = success
            self.made[rollout.task_id] = step

    def forget(self, before: int) -> None:
        """Drop the successes of before this step: by other rules they may be none."""
        self.made = {task: step for task, step in self.made.items() if step >= before}
        self.successes = {task: success for task, success in self.successes.items() if task in self.made}

    def draw(self, count: int, seeds: Sequence[int], *, least: float | None = None) -> list[Success]:
        """Return at most `count` different successes, with at least this reward if one is named."""
        kept = [success for success in self.successes.values() if least is None or success.reward >= least]
        order = np.random.default_rng([*seeds, DRAW_STREAM]).permutation(len(kept))[:count]
        return [kept[index] for index in order]

    def save(self, path: Path) -> None:
        """Write the whole buffer as flat arrays."""
        successes, names = list(self.successes.values()), [task.encode() for task in self.successes]
        arrays = {
            "lengths": np.array([len(each.tokens) for each in successes], dtype=np.int64),
            "tokens": np.array([token for each in successes for token in each.tokens], dtype=np.int32),
            "sampled": np.array([sampled for each in successes for sampled in each.sampled], dtype=np.uint8),
            "rewards": np.array([each.reward for each in successes], dtype=np.float64),
            "made": np.array([self.made.get(task, 0) for task in self.successes], dtype=np.int32),
            "name_lengths": np.array([len(name) for name in names], dtype=np.int64),
            "names": np.frombuffer(b"".join(names), dtype=np.uint8),
        }
        save_file(arrays, path)

    @classmethod
    def load(cls, path: Path) -> SuccessBuffer:
        arrays = load_file(path)
        names = [name.tobytes().decode() for name in _split(arrays["names"], arrays["name_lengths"])]
        made = arrays.get("made", np.zeros(len(names), dtype=np.int32))  # older runs have none
        tokens = _split(arrays["tokens"], arrays["lengths"])
        sampled = _split(arrays["sampled"], arrays["lengths"])
        rewards = arrays.get("rewards", np.ones(len(names)))  # older runs have successes only
        return cls(
            {
                name: Success(tokens=tuple(map(int, ids)), sampled=tuple(map(bool, where)), reward=reward)
                for name, ids, where, reward in zip(names, tokens, sampled, map(float, rewards), strict=True)
            },
            dict(zip(names, map(int, made), strict=True)),
        )


def _split(values: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []


# --- swapped names ---------------------------------------------------------------------------------------------------


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
    copied: frozenset[str]  # those of them that the agent repeated
    decided: frozenset[str]  # words that the agent wrote first


class Renaming:
    """Swaps names in drawn successes, each with probability `chance`; `copied`: only those that the agent repeats."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chance: float, copied: bool = False) -> None:
        self._codec, self._chance, self._copied = ChatCodec(tokenizer), chance, copied
        self._control = frozenset(tokenizer.added_tokens_decoder)
        self._reads: dict[Success, _Read | None] = {}

    def of(self, drawn: Sequence[Success], known: Collection[Success], seeds: Sequence[int]) -> list[Success]:
        """Return the drawn successes with names swapped, given all `known` ones."""
        if not self._chance:
            return list(drawn)
        self._reads = {each: self._reads[each] if each in self._reads else self._read(each) for each in known}
        reads = [read for read in self._reads.values() if read is not None]
        decided = frozenset().union(*(read.decided for read in reads))
        counts = Counter(word for read in reads for word in read.given - decided)
        names = by_shape(names_among(counts, len(known), share=FEW_SHARE))
        rng = np.random.default_rng([*seeds, NAME_STREAM])
        return [self._renamed(success, names, rng) for success in drawn]

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
        """Draw another name for some names of a success: one that it does not have, and for each a different one."""
        swaps: dict[str, str] = {}
        mine = read.copied if self._copied else read.given
        for kind in names:
            present = [name for name in kind if name in mine and rng.random() < self._chance]
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
        """Return the texts and words of a success; None if a character has several tokens."""
        pieces: list[_Piece] = []
        given: set[str] = set()
        decided: set[str] = set()
        spoken: set[str] = set()
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
            spoken |= words(text) if by_agent else set()
        copied = frozenset(given & spoken)
        return _Read(pieces=tuple(pieces), given=frozenset(given), copied=copied, decided=frozenset(decided))
