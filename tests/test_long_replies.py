"""An environment with long replies: the beginning of each is learned and predicted, lost tokens are counted, and rows
stay short."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lfo.measure.world_model import lost_tokens
from lfo.play.look_ahead import EXPECTED
from lfo.protocol.world_model import CUT_SHORT, WorldModelCodec, observed_calls, render_target
from lfo.types import ToolCall
from small_runs import FussyCalls, model_of, small_trainer, tokenizer, weights

CALL = ToolCall(name="make_phone_call", arguments={"phone_number": "555-0100"})


class Chatterbox(FussyCalls):
    """Reps who go on for thousands of tokens."""

    def step(self, message: str):
        result = super().step(message)
        if result.info.get("tool") != "make_phone_call":
            return result
        return replace(result, observation=f"{result.observation} {'By the way, I had soup today. ' * 600}".strip())


def long_run(*settings: str):
    trainer = small_trainer("levels=2", "world_model.predict=make_phone_call", *settings, environment=Chatterbox)
    before = weights(model_of(trainer), "world_model").clone()
    row = trainer.step(0)
    return trainer, row, before


def test_training_in_a_world_that_talks_for_thousands_of_tokens():
    trainer, row, before = long_run("world_model.reply_tokens=12")
    replies = list(trainer.mini_batches.replay.examples.values())
    assert replies, "somebody called"
    assert row["reply_tokens"] > 3_000
    assert row["reply_tokens_unlearned"] == pytest.approx(1 - 512 / row["reply_tokens"], abs=1e-3)
    assert row["reply_tokens_unpredicted"] == pytest.approx(1 - 12 / row["reply_tokens"], abs=1e-3)
    assert not weights(model_of(trainer), "world_model").equal(before), "it has learned"
    # Whatever is heard, a row holds a state, a call and the first tokens of a reply.
    end = trainer.codec.end_of_turn
    for example in replies:
        target = example.tokens[example.reply_start :]
        assert len(target) == 512
        assert end not in target, "it must not learn to stop where the reply was cut"
        assert len(example.tokens) <= trainer.config.world_model.state_tokens + 512 + 512
    text = trainer.codec.reply_text(replies[0])
    assert not text.startswith("By the way"), "the beginning is what the rep has to say"


def test_the_policy_is_told_that_an_expected_reply_was_cut_short():
    trainer, _, _ = long_run("world_model.reply_tokens=12", "exploration.blind_share=0")
    groups = trainer.draw(trainer.plan(1), 0)
    imagined = [
        turn for group in groups for rollout in group.rollouts for turn in (*rollout.turns, *rollout.taken_back)
    ]
    shown = [turn for turn in imagined if turn.predicted]
    assert shown
    assert all(turn.observation.endswith(CUT_SHORT) for turn in shown)
    kept = [
        (rollout, turn) for group in groups for rollout in group.rollouts for turn in rollout.turns if turn.predicted
    ]
    for rollout, turn in kept:
        text = tokenizer().decode(rollout.tokens[turn.observation_start : turn.observation_end])
        assert text == EXPECTED + turn.observation
    # What was expected is no target, cut short or not.
    heard = [call.reply for group in groups for rollout in group.rollouts for call in observed_calls(rollout)]
    assert not any(CUT_SHORT in reply for reply in heard)


def test_only_what_has_no_end_was_cut_short():
    codec = WorldModelCodec(tokenizer())
    whole, ids = "I need your pin.", codec.target_ids("I need your pin.")
    assert codec.decode_for_policy(ids) == codec.decode(ids) == whole
    assert codec.decode_for_policy(ids[:-1]) == whole, "its tag has ended it"
    assert codec.decode_for_policy(ids[:6]) == codec.decode(ids[:6]) + CUT_SHORT


@pytest.mark.parametrize(("limit", "words"), [(8, 3), (8, 4_000), (2_000, 4_000), (2_000, 50)])
def test_the_first_tokens_of_a_reply_are_learned(limit: int, words: int):
    codec = WorldModelCodec(tokenizer(), target_tokens=limit)
    reply = "soup " * words
    every = WorldModelCodec(tokenizer(), target_tokens=10**6).target_ids(reply)
    target = codec.target_ids(reply)
    assert target == (every if len(every) - 1 <= limit else every[:limit])
    assert codec.length(reply) == pytest.approx(len(every) - 1, rel=0.01)


def test_a_megabyte_costs_no_more_than_a_page():
    codec = WorldModelCodec(tokenizer(), target_tokens=64)
    read: list[int] = []
    encode = codec._encode
    codec._encode = lambda text: read.append(len(text)) or encode(text)  # type: ignore[assignment]
    codec.target_ids("soup " * 200_000)
    assert codec.length("soup " * 200_000) > 200_000
    assert max(read) <= 8_000 < len(render_target("soup " * 200_000))


def test_what_is_lost_is_a_share_of_all_tokens_of_replies():
    assert lost_tokens([], learned=1, predicted=1) == {}
    assert lost_tokens([5, 5], learned=5, predicted=5)["reply_tokens_unlearned"] == 0
    assert lost_tokens([100], learned=40, predicted=10) == {
        "reply_tokens": 100,
        "reply_tokens_unlearned": 0.6,
        "reply_tokens_unpredicted": 0.9,
    }
