"""Certainty, bins and the calibration error, against values computed by hand."""

from __future__ import annotations

import pytest

from lfo.env.phone_calls import PhoneCalls
from lfo.evaluation.certainty import Bin, calibration_metrics, expected_calibration_error, reliability, together
from lfo.rollout.certainty import SAMPLES, certainty, sampled_replies

PIN, OTHER_WORDS, ZIP = "I have to ask you for your tax number.", "Our system asks me for your tax number.", "I have."


def test_certainty_is_agreement_in_meaning_not_in_words():
    world = PhoneCalls()
    assert certainty(world, PIN, [PIN, OTHER_WORDS, ZIP, "?"]) == 0.5
    assert certainty(world, PIN, [OTHER_WORDS]) == 1.0
    assert certainty(world, PIN, []) is None
    assert certainty(world, "nothing that a rep says", [PIN]) is None


def test_bins_hold_what_is_alike_and_their_edges_belong_above():
    diagram = reliability([0.0, 0.05, 0.1, 1.0, 0.95], [False, True, True, True, False])
    assert diagram == [
        Bin(certainty=pytest.approx(0.025), right=0.5, count=2),
        Bin(certainty=pytest.approx(0.1), right=1.0, count=1),
        Bin(certainty=pytest.approx(0.975), right=0.5, count=2),
    ]


def test_the_calibration_error_weighs_bins_by_what_is_in_them():
    diagram = [Bin(certainty=0.9, right=0.5, count=3), Bin(certainty=0.2, right=0.2, count=1)]
    assert expected_calibration_error(diagram) == pytest.approx(0.3)


def test_who_is_always_right_and_sure_has_no_error():
    assert expected_calibration_error(reliability([1.0] * 4, [True] * 4)) == 0.0
    assert expected_calibration_error(reliability([1.0] * 4, [False] * 4)) == 1.0


def test_diagrams_of_several_seeds_become_one():
    one = [Bin(certainty=0.125, right=0.0, count=2), Bin(certainty=1.0, right=1.0, count=2)]
    other = [Bin(certainty=1.0, right=0.5, count=6)]
    assert together([one, other]) == [
        Bin(certainty=0.125, right=0.0, count=2),
        Bin(certainty=1.0, right=pytest.approx(0.625), count=8),
    ]


def test_predictions_that_nobody_can_judge_are_in_no_diagram():
    metrics = calibration_metrics([0.5, None, 0.5, 1.0], [True, True, False, None])
    assert metrics == {"calibration_error": 0.0, "reliability": [{"certainty": 0.5, "right": 0.5, "count": 2}]}
    assert calibration_metrics([None], [True]) == {}


def test_sampled_replies_depend_on_their_prompt_alone():
    asked: list[tuple[list[int], list[float]]] = []

    def complete(prompts, uniforms):
        asked.extend((list(prompt), list(row)) for prompt, row in zip(prompts, uniforms, strict=True))
        return [(*prompt, int(1e6 * row[0])) for prompt, row in zip(prompts, uniforms, strict=True)]

    first, second = sampled_replies(complete, [[1, 2], [3]], limit=5)
    assert len(first) == len(second) == SAMPLES
    assert {reply[:-1] for reply in first} == {(1, 2)}
    assert len(set(first)) == SAMPLES, "each sample has numbers of its own"
    assert {len(row) for _, row in asked} == {5}
    assert sampled_replies(complete, [[3]], limit=5) == [second]
    assert sampled_replies(complete, [], limit=5) == []
