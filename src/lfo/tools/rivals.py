"""Baselines of the world model without a language model, which predict replies from the same data.

lookup       the most frequent reply in the same cell of the law, which it is given: it cannot generalise
memory       the reply of the most similar situation: `rollout/reply_store.py`, as lookahead_source=memory
linear       logistic regression on the bag of words of state and call, one classifier for each fact; right if the
             facts with probability above 0.5 are those of the reply
linear_top4  the same classifiers with a weaker criterion: right if all facts are among the four likeliest
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from lfo.env.interface import EnvironmentFactory, same_meaning
from lfo.protocol.world_model import ObservedCall
from lfo.rollout.reply_store import ReplyStore, situation_of

PENALTY = 0.1  # of the squared weights; the best on val of 1e-4 to 1, by both criteria
TOP = 4
_WORD = re.compile(r"[a-z]+")


class Asked(Protocol):
    """A call with its reply and its cell of the law."""

    @property
    def observed(self) -> ObservedCall: ...
    @property
    def cell(self) -> tuple[str, ...]: ...


Judge = Callable[[Sequence[Asked]], float]  # calls -> share of right predictions
NAMES = ("lookup", "memory", "linear", "linear_top4")


def fit_rivals(heard: Sequence[Asked], make_environment: EnvironmentFactory) -> Mapping[str, Judge]:
    """Fit all of `NAMES` on the same replies."""
    facts, logits = classifier(heard)
    return {
        "lookup": partial(lookup, heard),
        "memory": partial(most_similar, heard, make_environment),
        "linear": lambda asked: _share(asked, likelier_than_not(facts, logits(asked)), frozenset.__eq__),
        "linear_top4": lambda asked: _share(asked, likeliest(facts, logits(asked)), frozenset.issuperset),
    }


def lookup(heard: Sequence[Asked], asked: Sequence[Asked]) -> float:
    known: dict[tuple[str, ...], Counter[frozenset[str]]] = defaultdict(Counter)
    for each in heard:
        known[each.cell][_facts(each)] += 1
    return fmean(each.cell in known and known[each.cell].most_common(1)[0][0] == _facts(each) for each in asked)


def most_similar(heard: Sequence[Asked], make_environment: EnvironmentFactory, asked: Sequence[Asked]) -> float:
    kept, judge = ReplyStore(), make_environment()
    kept.add(each.observed for each in heard)
    replies = kept.recall([(each.observed.state, each.observed.call) for each in asked])
    right = (same_meaning(judge, said, each.observed.reply) for said, each in zip(replies, asked, strict=True))
    return fmean(map(bool, right))


def likelier_than_not(facts: Sequence[str], logits: Tensor) -> list[frozenset[str]]:
    return [frozenset(fact for fact, logit in zip(facts, row, strict=True) if logit > 0) for row in logits.tolist()]


def likeliest(facts: Sequence[str], logits: Tensor) -> list[frozenset[str]]:
    best: list[list[int]] = logits.topk(min(TOP, len(facts)), dim=-1).indices.tolist()
    return [frozenset(facts[index] for index in row) for row in best]


def classifier(heard: Sequence[Asked]) -> tuple[list[str], Callable[[Sequence[Asked]], Tensor]]:
    """Return the facts heard so far, and a function that returns a logit of each fact for each call."""
    words = {word: index for index, word in enumerate(sorted(set().union(*map(_bag, heard))))}
    facts = sorted(set().union(*map(_facts, heard)))

    def features(some: Sequence[Asked]) -> Tensor:
        rows = torch.zeros(len(some), len(words) + 1)
        rows[:, -1] = 1.0
        for row, each in zip(rows, some, strict=True):
            row[[words[word] for word in _bag(each) if word in words]] = 1.0
        return rows

    inputs = features(heard)
    targets = torch.tensor([[float(fact in _facts(each)) for fact in facts] for each in heard])
    weights = torch.zeros(inputs.shape[1], len(facts), requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=300, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = binary_cross_entropy_with_logits(inputs @ weights, targets, reduction="sum")
        value = (value + PENALTY * weights.square().sum()) / len(heard)
        value.backward()
        return value

    optimizer.step(loss)
    return facts, lambda asked: (features(asked) @ weights).detach()


def _share(
    asked: Sequence[Asked],
    told: Sequence[frozenset[str]],
    is_right: Callable[[frozenset[str], frozenset[str]], bool],
) -> float:
    return fmean(is_right(some, _facts(each)) for some, each in zip(told, asked, strict=True))


def _bag(each: Asked) -> set[str]:
    return set(_WORD.findall(" ".join(situation_of(each.observed.state, each.observed.call)).lower()))


def _facts(each: Asked) -> frozenset[str]:
    facts = each.observed.facts
    return frozenset(facts.facts) if facts else frozenset()
