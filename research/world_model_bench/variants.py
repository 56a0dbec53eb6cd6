"""Experimental variants of learning from few replies, which only the bench has.

none        as in training
retrieve-k  put the k most similar exchanges so far before the prompt, in training and in every question
again-k     after the last task, go on until k times as many updates are made, from the same replies
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lfo.errors import UsageError
from lfo.protocol.world_model import ObservedCall, WorldModelCodec, WorldModelExample, render_target
from lfo.rows.replay import Practice, ReplayBuffer, words
from lfo.train.loop import Trainer

RETRIEVE, AGAIN = re.compile(r"retrieve-([1-9])"), re.compile(r"again-([1-9])")

Ask = Callable[[ObservedCall], list[int]]  # the prompt of a question


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    ask: Ask
    again: int = 1  # how many times as many updates are made before the last measurement


def make_variant(name: str, trainer: Trainer) -> Variant:
    """Return how a trial makes prompts; `retrieve-k` also replaces the practice of the trainer."""
    codec = trainer.codec

    def ask(observed: ObservedCall) -> list[int]:
        return codec.question_ids(observed.state, observed.call)

    if name == "none":
        return Variant(ask=ask)
    if found := RETRIEVE.fullmatch(name):
        retrieval = Retrieval(codec, int(found[1]), trainer.mini_batches.practice, trainer.mini_batches.replay.examples)
        trainer.mini_batches.practice = retrieval
        return Variant(ask=retrieval.ask)
    if found := AGAIN.fullmatch(name):
        return Variant(ask=ask, again=int(found[1]))
    raise UsageError(f"--variant must be none, retrieve-1 to -9 or again-1 to -9, not {name!r}")


class Retrieval(Practice):
    """Practice with similar exchanges before each prompt, by the cosine of TF-IDF bags of words."""

    def __init__(
        self, codec: WorldModelCodec, count: int, practice: Practice, examples: dict[str, WorldModelExample]
    ) -> None:
        self._codec, self._most, self._practice, self._examples = codec, count, practice, examples
        self._bags: dict[str, set[str]] = {}  # of all examples, by key

    def of(
        self,
        drawn: Iterable[WorldModelExample],
        known: ReplayBuffer | Iterable[WorldModelExample],
        seeds: Sequence[int],
    ) -> list[WorldModelExample]:
        drawn, text_of = list(drawn), self._codec.prompt_text
        practised = self._practice.of(drawn, known, seeds)
        return [
            self._codec.with_prompt(now, self._before(text_of(each), each.key) + text_of(now))
            for each, now in zip(drawn, practised, strict=True)
        ]

    def ask(self, observed: ObservedCall) -> list[int]:
        asked = self._codec.example(observed.state, observed.call, "")
        text = self._codec.prompt_text(asked)
        with_similar = self._codec.with_prompt(asked, self._before(text, asked.key) + text)
        return list(with_similar.tokens[: with_similar.reply_start])

    def _before(self, prompt: str, key: str) -> str:
        """Return the most similar other exchanges, the most similar last."""
        for each in self._examples.values():
            if each.key not in self._bags:
                self._bags[each.key] = words(self._codec.prompt_text(each))
        others = {name: bag for name, bag in self._bags.items() if name != key}
        best = most_similar(words(prompt), others, self._most)
        exchanges = (self._examples[name] for name in reversed(best))
        return "".join(
            f"{self._codec.prompt_text(each)}{render_target(self._codec.reply_text(each))}\n\n" for each in exchanges
        )


def most_similar(bag: set[str], others: dict[str, set[str]], count: int) -> list[str]:
    """Return the names of the most similar bags, the most similar first.

    >>> most_similar({"bank", "card"}, {"a": {"bank", "loan"}, "b": {"bank", "card"}, "c": {"loan"}}, 2)
    ['b', 'a']
    """
    bags_with = Counter(word for other in others.values() for word in other)
    weight = {word: math.log((1 + len(others)) / (0.5 + count)) ** 2 for word, count in bags_with.items()}

    def similarity(name: str) -> float:
        other = others[name]
        size = sum(weight[word] for word in other) * sum(weight.get(word, 0.0) for word in bag)
        return sum(weight[word] for word in other & bag) / math.sqrt(size) if size else 0.0

    return sorted(others, key=lambda name: (-similarity(name), name))[:count]
