"""Metrics of predicted replies, each against a case computed by hand."""

from __future__ import annotations

import math

import pytest

from lfo.env.interface import same_meaning
from lfo.env.worlds.oracle import OracleCodes
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.measure.world_model import Prediction, corpus_bleu, prediction_metrics


def test_bleu_of_cases_computed_by_hand():
    # 4 of 5 words, 3 of 4 pairs, 2 of 3 triples, 1 of 2 quadruples: the fourth root of 1/5.
    assert corpus_bleu(["a b c d e"], ["a b c d f"]) == pytest.approx(100 * 0.2**0.25)
    # Everything right but a word short: the brevity penalty alone.
    assert corpus_bleu(["a b c d"], ["a b c d e"]) == pytest.approx(100 * math.exp(1 - 5 / 4))
    # Of a corpus, counts are added up before they are divided: 9/10, 7/8, 5/6, 3/4.
    both = corpus_bleu(["a b c d e", "p q r s t"], ["a b c d f", "p q r s t"])
    assert both == pytest.approx(100 * (9 / 10 * 7 / 8 * 5 / 6 * 3 / 4) ** 0.25)
    assert corpus_bleu(["a b c d ."], ["a b c d ."]) == pytest.approx(100)
    assert corpus_bleu([""], ["a b c d e"]) == 0.0


def test_all_metrics_overall_and_by_category():
    predictions = [
        Prediction(
            predicted="a b c d e",
            actual="a b c d f",
            category="auth_failure",
            same_meaning=False,
            tokens=4,
            hits=3,
            loss=4 * math.log(2),
        ),
        Prediction(
            predicted=" p q r s t",
            actual="p q r s t\n",
            category="success",
            same_meaning=True,
            tokens=12,
            hits=12,
            loss=12 * math.log(4),
        ),
        Prediction(predicted="p q r s t", actual="p q r s t", tokens=4, hits=0, loss=0.0),
    ]
    metrics = prediction_metrics(predictions)
    assert metrics["token_accuracy"] == pytest.approx(15 / 20), "over tokens, not over replies"
    # 4 tokens at 2, 12 at 4 and 4 at 1: two to the power (4 + 24) / 20.
    assert metrics["perplexity"] == pytest.approx(2 ** (28 / 20))
    assert metrics["bleu"] == pytest.approx(100 * (14 / 15 * 11 / 12 * 8 / 9 * 5 / 6) ** 0.25)
    assert metrics["semantic_accuracy"] == 0.5, "of the two that somebody could judge"
    assert metrics["exact"] == pytest.approx(2 / 3), "space around a reply says nothing"
    assert list(metrics["by_category"]) == ["auth_failure", "other", "success"]
    assert metrics["by_category"]["auth_failure"] == pytest.approx(
        {
            "count": 1,
            "token_accuracy": 0.75,
            "perplexity": 2.0,
            "bleu": 100 * 0.2**0.25,
            "semantic_accuracy": 0.0,
            "exact": 0.0,
        }
    )
    assert metrics["by_category"]["success"]["perplexity"] == pytest.approx(4.0)
    assert "semantic_accuracy" not in metrics["by_category"]["other"]


def test_nothing_predicted_shows_nothing_and_a_hopeless_prediction_is_still_a_number():
    assert prediction_metrics([]) == {}
    hopeless = Prediction(predicted="", actual="a", tokens=1, hits=0, loss=1e6)
    assert math.isfinite(prediction_metrics([hopeless])["perplexity"])


@pytest.mark.parametrize(
    ("predicted", "actual", "same"),
    [
        ("Our system asks me for your account pin.", "I have to ask you for your account pin.", True),
        ("I have to ask you for your account pin.", "I have to ask you for your date of birth.", False),
        ("What is missing here is your account pin.", "Your access is blocked for now.", False),
        ("Your access is blocked for now.", "The system has locked this request.", True),
        ("Call me maybe", "The system has locked this request.", False),
        ("", "The system has locked this request.", False),
        ("The system has locked this request.", '{"account_pin": "1234"}', None),  # nobody can say what that means
        (
            "I have to ask you for your account pin and your date of birth.",
            "I have to ask you for your date of birth and your account pin.",
            True,
        ),
        ("You have reached Cards. Another department does this.", "Sorry, Loans cannot do this for you.", True),
        ("Please call 555-1000 instead.", "Our direct line is 555-1001.", False),
    ],
)
def test_replies_mean_the_same_when_category_and_requested_fields_are_equal(predicted: str, actual: str, same):
    assert same_meaning(PhoneCalls(), predicted, actual) is same


def test_another_world_has_meanings_of_its_own_and_some_have_none():
    one, other = (
        "This door wanted ash and dusk. It stays shut.",
        "No. I waited for dusk and ash. The door remains shut.",
    )
    assert same_meaning(OracleCodes(), one, other) is True
    assert same_meaning(OracleCodes(), "The door swings open.", other) is False

    class Mute:
        tasks = tools = reset = step = None

    assert same_meaning(Mute(), one, one) is None  # type: ignore[arg-type]
