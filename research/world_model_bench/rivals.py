"""Baselines of the world model without a language model of their own, which predict replies from the same data.

lookup            the most frequent reply in the same cell of the law, which it is given: it cannot generalise
memory            the reply of the most similar situation: `play/reply_store.py`, as lookahead_source=memory
memory_embedding  the reply of the nearest situation in the frozen base: the mean of its last hidden states
memory_metric     the reply of the nearest situation in a learned metric: the logits of `linear`
linear            logistic regression on the words of task, directory and call, one classifier for each fact; right if
                  the likeliest facts, as many as their probabilities add up to, are those of the reply
linear_top4       the same classifiers with a weaker criterion: right if all facts are among the four likeliest
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from statistics import fmean
from typing import Protocol

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, normalize

from lfo.agent import world_model_codec
from lfo.config import RunConfig
from lfo.env.interface import EnvironmentFactory, same_meaning
from lfo.loading import load_base, load_tokenizer, pick_device
from lfo.play.reply_store import ReplyStore, columns_of, informativeness, occurrences, situation_of, terms_of
from lfo.protocol.world_model import ObservedCall

PENALTY = 0.03  # of the squared weights; 0.003 to 0.1 are equally good on val, 0.3 is worse
TOP = 4


class Asked(Protocol):
    """A call with its reply and its cell of the law."""

    @property
    def observed(self) -> ObservedCall: ...
    @property
    def cell(self) -> tuple[str, ...]: ...


Judge = Callable[[Sequence[Asked]], float]  # calls -> share of right predictions
Vectors = Callable[[Sequence[Asked]], Tensor]  # calls -> a row for each
NAMES = ("lookup", "memory", "memory_embedding", "memory_metric", "linear", "linear_top4")


def fit_rivals(heard: Sequence[Asked], make_environment: EnvironmentFactory, embed: Vectors) -> Mapping[str, Judge]:
    """Fit all of `NAMES` on the same replies."""
    facts, logits = classifier(heard)
    return {
        "lookup": partial(lookup, heard),
        "memory": partial(most_similar, heard, make_environment),
        "memory_embedding": lambda asked: _share(asked, nearest(heard, asked, embed), frozenset.__eq__),
        "memory_metric": lambda asked: _share(asked, nearest(heard, asked, logits), frozenset.__eq__),
        "linear": lambda asked: _share(asked, as_many_as_expected(facts, logits(asked)), frozenset.__eq__),
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


def nearest(heard: Sequence[Asked], asked: Sequence[Asked], vectors: Vectors) -> list[frozenset[str]]:
    """Return the facts of the situation with the smallest angle between the vectors, relative to the mean.

    Of equals the newest wins.
    """
    newest_first = heard[::-1]
    known, new = vectors(newest_first), vectors(asked)
    centre = known.mean(dim=0)
    best: list[int] = (normalize(new - centre) @ normalize(known - centre).T).argmax(dim=1).tolist()
    return [_facts(newest_first[index]) for index in best]


def frozen_embedding(config: RunConfig) -> Vectors:
    """Return a function that embeds calls: the base reads what the world model would read."""
    device = pick_device(config.device)
    codec, base = world_model_codec(config, load_tokenizer(config.model)), load_base(config.model, device)

    @cache
    @torch.no_grad()
    def embed(ids: tuple[int, ...]) -> Tensor:
        layers = base(torch.tensor([ids], device=device), output_hidden_states=True).hidden_states
        return layers[-1][0].mean(dim=0).float().cpu()

    return lambda some: torch.stack(
        [embed(tuple(codec.question_ids(each.observed.state, each.observed.call))) for each in some]
    )


def as_many_as_expected(facts: Sequence[str], logits: Tensor) -> list[frozenset[str]]:
    """Return the likeliest facts of each row, as many as their probabilities add up to."""
    counts: list[int] = logits.sigmoid().sum(dim=-1).round().int().tolist()
    ranked: list[list[int]] = logits.argsort(dim=-1, descending=True).tolist()
    return [
        frozenset(facts[index] for index in row[: max(1, count)]) for row, count in zip(ranked, counts, strict=True)
    ]


def likeliest(facts: Sequence[str], logits: Tensor) -> list[frozenset[str]]:
    best: list[list[int]] = logits.topk(min(TOP, len(facts)), dim=-1).indices.tolist()
    return [frozenset(facts[index] for index in row) for row in best]


def classifier(heard: Sequence[Asked]) -> tuple[list[str], Vectors]:
    """Return the facts heard so far, and a function that returns a logit of each fact for each call.

    The columns of informative words are scaled up, so that the penalty allows them larger weights.
    """
    words, known = columns_of(map(_words, heard)), columns_of(map(_facts, heard))
    facts = list(known)

    def found(some: Sequence[Asked]) -> csr_array:
        return occurrences([_words(each) for each in some], words)

    scale = np.sqrt(informativeness(found(heard), occurrences([_facts(each) for each in heard], known)))
    scale = scale / max(scale.max(), 1e-9)

    def features(some: Sequence[Asked]) -> Tensor:
        return torch.tensor(np.c_[found(some).toarray() * scale, np.ones(len(some))], dtype=torch.float32)

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


def _words(each: Asked) -> set[str]:
    return terms_of(situation_of(each.observed.state, each.observed.call))


def _facts(each: Asked) -> frozenset[str]:
    facts = each.observed.facts
    return frozenset(facts.facts) if facts else frozenset()
