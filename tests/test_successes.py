"""Successes without shown exchanges: cut exactly, one for each task, drawn at most once a step, imitated alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lfo.model.learner import Learner
from lfo.play.episode import Feedback
from lfo.protocol.chat import ChatCodec
from lfo.rows.samples import deal, policy_sample
from lfo.rows.successes import Success, SuccessBuffer, imitation_sample, in_hindsight, without_shown
from lfo.types import Origin, Rollout, TrainingSample
from small_runs import gradient, small_config, small_model, tokenizer, weights
from test_deliberation import ENDLESS, NO_CALL, TOOLS, A, Asking, B, C, play, say

# --- the cut ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("proposed_by", ["policy", "environment"])
@pytest.mark.parametrize("seed", range(10))
def test_a_cut_row_is_the_one_in_which_nothing_was_ever_shown(seed: int, proposed_by: Any):
    """Token for token: the same words are said again, blind, in a row of its own."""
    draw = np.random.default_rng(seed)
    texts = [say(words, name) for words in "abc" for name in ("say", "look")] + [NO_CALL, ENDLESS]
    played = play(
        *[texts[place] for place in draw.choice(len(texts), 200, p=[0.15] * 6 + [0.08, 0.02])],
        turns=6,
        most=int(draw.integers(1, 9)),
        drafts=int(draw.integers(1, 4)),
        seeds=(seed,),
        environment=Asking,
        proposed_by=proposed_by,
        feedback=Feedback(after=int(draw.integers(0, 4)), action=B, observation="Heard."),
    )
    rollout = played.rollout
    assert any(turn.predicted for turn in rollout.turns)
    said = [turn.action for turn in rollout.turns if not turn.predicted]
    alone = play(*said, turns=6, blind=True, environment=Asking, proposed_by=proposed_by).rollout
    cut = without_shown(rollout)
    last = max(place for place, origin in enumerate(alone.origins) if origin == Origin.SAMPLED)
    assert cut.tokens == alone.tokens[: last + 1]
    assert cut.sampled == tuple(origin == Origin.SAMPLED for origin in alone.origins[: last + 1])


def test_by_hand():
    codec = ChatCodec(tokenizer(), TOOLS)
    played = play(A, B, C, turns=2, most=1)
    assert played.turns == [(A, True), (B, False), (C, False)]
    opening, end = codec.opening(played.rollout.opening).ids, codec.end_of_turn
    reply = codec.after_action("Reply 1.", stopped=True).ids
    first, second = [*codec.encode(B), end], [*codec.encode(C), end]
    cut = without_shown(played.rollout)
    assert cut.tokens == (*opening, *first, *reply, *second)
    trained = [False] * len(opening) + [True] * len(first) + [False] * len(reply) + [True] * len(second)
    assert cut.sampled == tuple(trained)


LOOK = say("a", "look")


def test_in_hindsight_the_first_call_was_never_made():
    """Token for token the row of an agent that looked at once, and then made the second call."""
    failed = play(LOOK, A, LOOK, B, C, turns=5, blind=True).rollout
    assert not failed.succeeded
    better = in_hindsight(failed, {"say"})
    assert better is not None
    alone = play(LOOK, LOOK, B, turns=3, blind=True).rollout
    cut, wanted = without_shown(better), without_shown(alone)
    replies = [place for place, each in enumerate(wanted.sampled) if not each]
    assert cut.sampled == wanted.sampled
    assert len(replies) > 0
    assert [token for token, each in zip(cut.tokens, cut.sampled, strict=True) if each] == [
        token for token, each in zip(wanted.tokens, wanted.sampled, strict=True) if each
    ]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ((LOOK, A, LOOK, A), "what it heard did not change the call"),
        ((LOOK, A, B, LOOK), "it did nothing about it"),
        ((LOOK, A, LOOK, LOOK), "it did not call again"),
        ((LOOK, LOOK, LOOK, LOOK), "it called nobody"),
    ],
)
def test_there_is_no_hindsight_where(said: tuple[str, ...], why: str):
    rollout = play(*said, turns=4, blind=True).rollout
    assert in_hindsight(rollout, {"say"}) is None, why


def test_there_is_no_hindsight_for_half_of_a_message():
    """Of several calls in one message all turns but the first have no tokens of an action."""
    failed = play(LOOK, A, LOOK, B, turns=4, blind=True).rollout
    assert in_hindsight(failed, {"say"}) is not None
    first = next(place for place, turn in enumerate(failed.turns) if turn.call and turn.call.name == "say")
    for place in (first, first + 1):
        turns = list(failed.turns)
        turns[place] = replace(turns[place], action_start=turns[place].action_end)
        assert in_hindsight(replace(failed, turns=tuple(turns)), {"say"}) is None


def test_what_was_only_imagined_between_two_calls_is_nothing_done():
    failed = play(LOOK, A, LOOK, B, turns=4, blind=True).rollout
    first, called, between, again = failed.turns
    imagined = replace(between, predicted=True)
    assert in_hindsight(replace(failed, turns=(first, called, imagined, again)), {"say"}) is None


def test_a_success_is_kept_before_any_hindsight():
    failed = play(LOOK, A, LOOK, B, turns=4, blind=True).rollout
    won = replace(play(LOOK, B, turns=2, blind=True).rollout, reward=1.0)
    assert in_hindsight(replace(failed, reward=1.0), {"say"}) is None
    buffer = SuccessBuffer()
    buffer.add_in_hindsight([failed], None)  # every tool: what was heard first is the look
    assert not buffer.successes
    buffer.add_in_hindsight([failed], {"say"})
    assert len(buffer.successes) == 1
    buffer.add([won])
    buffer.add_in_hindsight([failed], {"say"})
    assert list(buffer.successes.values()) == [without_shown(won)]


def test_a_rollout_to_which_nothing_was_shown_stays_as_it_is():
    rollout = play(A, B, turns=2, blind=True).rollout
    cut, row = without_shown(rollout), policy_sample(rollout, 1.0, adapters=("policy",))
    assert row is not None
    assert (cut.tokens, tuple(map(float, cut.sampled))) == (tuple(row.tokens), tuple(row.policy_weights))


# --- the buffer ------------------------------------------------------------------------------------------------


def won(task: str, words: str = "a", **changes: Any) -> Rollout:
    return replace(play(say(words), blind=True).rollout, **{"task_id": task, "reward": 1.0, **changes})


def test_the_newest_success_of_each_task_is_kept_and_nothing_else():
    buffer = SuccessBuffer()
    buffer.add([won("1"), won("2", reward=0.9), won("1", "b"), won("1", "c", reward=0.0)])
    assert buffer.successes == {"1": without_shown(won("1", "b"))}


def filled(count: int) -> SuccessBuffer:
    rows = {
        f"Täsk {place}": Success(tokens=(7, place, 9), sampled=(False, True, place % 2 == 0)) for place in range(count)
    }
    return SuccessBuffer(rows)


@pytest.mark.parametrize(
    ("kept", "sizes"), [(0, [0, 0, 0, 0]), (1, [1, 0, 0, 0]), (6, [2, 1, 2, 1]), (12, [3, 3, 3, 3]), (40, [3, 3, 3, 3])]
)
def test_a_step_makes_at_most_one_pass_in_even_parts(kept: int, sizes: list[int]):
    buffer = filled(kept)
    drawn = buffer.draw(12, (0, 5))
    assert [len(part) for part in deal([[success] for success in drawn], 4)] == sizes
    assert len({success.tokens for success in drawn}) == len(drawn)
    assert buffer.draw(12, (0, 5)) == drawn
    assert kept < 12 or buffer.draw(12, (0, 6)) != drawn


@pytest.mark.parametrize("count", [0, 1, 5])
def test_the_buffer_survives_the_disk_in_its_order(count: int, tmp_path: Path):
    buffer = filled(count)
    buffer.save(tmp_path / "successes.safetensors")
    back = SuccessBuffer.load(tmp_path / "successes.safetensors")
    assert list(back.successes.items()) == list(buffer.successes.items())
    assert back.draw(4, (3,)) == buffer.draw(4, (3,))


# --- the loss --------------------------------------------------------------------------------------------------


def row(*, policy: bool = False, world: bool = False, imitation: bool = False, length: int = 9) -> TrainingSample:
    on, off = (0.0, *[1.0] * (length - 1)), (0.0,) * length
    return TrainingSample(
        tokens=tuple(range(11, 11 + length)),
        adapters=("world_model",) if world else ("policy",),
        logprobs=(-3.0,) * length,
        advantages=(0.5,) * length,
        policy_weights=on if policy else off,
        world_model_weights=on if world else off,
        imitation_weights=on if imitation else (),
    )


def learner(*settings: str, coupling: str = "separate") -> Learner:
    return Learner(small_model(coupling), small_config("lookahead=false", f"coupling={coupling}", *settings))


def updated(*rows: TrainingSample, weight: float = 1.0, settings: tuple[str, ...] = ()) -> tuple[Any, Learner]:
    mine = learner(*settings)
    return mine.update(rows, world_model_weight=weight, rate_factor=1.0), mine


def test_imitation_is_a_mean_over_its_own_tokens():
    alone, _ = updated(row(imitation=True))
    with torch.no_grad():
        model, tokens = learner().model, torch.tensor([row().tokens])
        logits = model.hidden(tokens, ("policy",))[0, :-1] @ model.head.T
        by_hand = torch.nn.functional.cross_entropy(logits, tokens[0, 1:])
    assert alone["imitation_loss"] == pytest.approx(float(by_hand), rel=1e-4)
    beside, _ = updated(row(imitation=True), row(policy=True, length=30), row(world=True, length=20))
    assert beside["imitation_loss"] == pytest.approx(alone["imitation_loss"], rel=1e-4)
    assert beside["policy_loss"] == pytest.approx(updated(row(policy=True, length=30))[0]["policy_loss"], rel=1e-4)
    assert {"imitation_accuracy", "world_model_loss"} <= beside.keys()


def test_imitation_leaves_the_world_model_alone_and_is_no_world_model_loss():
    watched, mine = updated(row(imitation=True), weight=0.0)
    assert "world_model_loss" not in watched
    assert gradient(mine.model, "world_model") is None
    assert not torch.equal(weights(mine.model, "policy"), weights(learner().model, "policy"))


def test_updates_that_imitate_have_a_rate_of_their_own(monkeypatch):
    """AdamW's first step is the rate, whatever the gradient."""
    monkeypatch.setattr("lfo.model.learner.WEIGHT_DECAY", 0.0)
    settings = ("policy.learning_rate=1e-3", "internalise.learning_rate=4e-3")
    begin = weights(learner().model, "policy")

    def moved(*rows: TrainingSample) -> float:
        return float((weights(updated(*rows, settings=settings)[1].model, "policy") - begin).abs().median())

    assert moved(row(policy=True)) == pytest.approx(1e-3, rel=1e-2)
    assert moved(row(imitation=True)) == pytest.approx(4e-3, rel=1e-2)


def test_a_success_as_a_row_trains_what_was_sampled_and_nothing_else():
    sample = imitation_sample(Success(tokens=(5, 6, 7), sampled=(False, True, False)), adapters=("policy",))
    assert sample.imitation_weights == [0.0, 1.0, 0.0]
    assert not any((*sample.policy_weights, *sample.world_model_weights, *sample.advantages))
    with pytest.raises(ValueError, match="first token"):
        replace(sample, imitation_weights=(1.0, 0.0, 0.0))
    with pytest.raises(ValueError, match="as many entries as it has tokens"):
        replace(sample, imitation_weights=(0.0,))
