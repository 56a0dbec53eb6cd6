"""Metrics of predicted replies, overall and by reply category.

| metric              | asks                                                                                        |
|---------------------|---------------------------------------------------------------------------------------------|
| `token_accuracy`    | with the true reply up to here, was the likeliest next token the true one?                  |
| `perplexity`        | between how many equally likely tokens was it undecided, on average?                        |
| `bleu`              | how many words and phrases do the written replies share with the true ones, 0 to 100?       |
| `semantic_accuracy` | do the written and the true reply mean the same: one category and the same requested fields? |
| `exact`             | are they the same text?                                                                     |

An environment chooses among many phrasings at random, so `bleu` and `exact` have a ceiling below 100 %; meaning does
not. `semantic_accuracy` needs an environment with `DescribesReplies`. This module uses no model: the caller fills in
`Prediction`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

OTHER = "other"  # the category of a reply that the environment cannot describe


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A predicted reply and the true one.

    `Prediction(predicted="I need your pin.", actual="Give me your pin.", category="auth_failure", same_meaning=True,
    tokens=8, hits=6, loss=4.2)`
    """

    predicted: str
    actual: str
    category: str = OTHER
    same_meaning: bool | None = None  # None: unknown
    tokens: int  # of the true reply
    hits: int  # how many of them were the likeliest token, given the true tokens before
    loss: float  # the sum of their negative log-probs

    @property
    def token_accuracy(self) -> float:
        return self.hits / self.tokens


def prediction_metrics(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return the metrics of all predictions and of each category; unknown metrics are left out."""
    if not predictions:
        return {}
    by_category: dict[str, list[Prediction]] = defaultdict(list)
    for each in predictions:
        by_category[each.category].append(each)
    categories = {name: {"count": len(some), **_metrics(some)} for name, some in sorted(by_category.items())}
    return {**_metrics(predictions), "by_category": categories}


def _metrics(predictions: Sequence[Prediction]) -> dict[str, float]:
    tokens = sum(each.tokens for each in predictions)
    loss = sum(each.loss for each in predictions) / tokens
    known = [each.same_meaning for each in predictions if each.same_meaning is not None]
    return {
        "token_accuracy": sum(each.hits for each in predictions) / tokens,
        "perplexity": math.exp(min(loss, 700.0)),  # exp of more is not finite
        "bleu": corpus_bleu([each.predicted for each in predictions], [each.actual for each in predictions]),
        **({"semantic_accuracy": fmean(known)} if known else {}),
        "exact": fmean(each.predicted.strip() == each.actual.strip() for each in predictions),
    }


def lost_tokens(lengths: Sequence[int], *, learned: int, predicted: int) -> dict[str, float]:
    """Return the share of reply tokens beyond the limits of learning and prediction; `lengths` are those of replies.

    >>> lost_tokens([10, 30], learned=20, predicted=5)
    {'reply_tokens': 20.0, 'reply_tokens_unlearned': 0.25, 'reply_tokens_unpredicted': 0.75}
    """
    if not lengths:
        return {}
    lost = [sum(max(0, length - limit) for length in lengths) / sum(lengths) for limit in (learned, predicted)]
    return {
        "reply_tokens": fmean(lengths),
        "reply_tokens_unlearned": lost[0],
        "reply_tokens_unpredicted": lost[1],
    }


def corpus_bleu(predicted: Sequence[str], actual: Sequence[str]) -> float:
    """Return the corpus BLEU, 0 to 100, with the defaults of sacrebleu (13a tokens, exponential smoothing)."""
    return float(_bleu().corpus_score(list(predicted), [list(actual)]).score)


@cache
def _bleu() -> Any:
    from sacrebleu.metrics.bleu import BLEU  # slow to import, and rarely needed

    return BLEU(force=True)  # no warning about texts that end in a separate period
