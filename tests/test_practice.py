"""Practice: which words are swapped or kept, the token weights, and that nothing else changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from lfo.protocol.world_model import WorldModelCodec, WorldModelExample, WorldModelState
from lfo.rows.replay import Practice, ReplayBuffer, names_among, weight_of_token, with_swapped_names, words
from lfo.types import ToolCall
from small_runs import small_trainer, tokenizer

NAMES = ("Acme", "Zylo", "Quorra", "Bexley", "Dunmore", "Felix", "Garnet", "Holt")


@pytest.fixture(scope="module")
def codec() -> WorldModelCodec:
    return WorldModelCodec(tokenizer())


def heard(codec: WorldModelCodec, *, reply: str = "I need your pin.", asked: bool = True) -> list[WorldModelExample]:
    """Eight calls, each about a company of its own and a number of its own."""
    examples = []
    for place, name in enumerate(NAMES):
        state = WorldModelState(task=f"Call {name} Bank.", step=1, actions=(), collected={})
        call = ToolCall(name="make_phone_call", arguments={"phone_number": f"555-40{place}", "auth_info": {}})
        examples.append(codec.example(state, call, reply.format(name=name), asked=asked))
    return examples


def practised(codec: WorldModelCodec, examples: Sequence[WorldModelExample], seed: int = 0, **settings: float):
    practice = Practice(codec, **{"swap_names": 0.0, "wording": 1.0, **settings})
    return practice.of(examples, examples, (seed,))


def test_a_word_of_few_states_is_a_name_unless_few_states_are_all():
    assert names_among({"Acme": 2, "bank": 3}, states=100) == ["Acme"]
    assert names_among({"Acme": 4, "Zylo": 5, "bank": 200}, states=200) == ["Acme"]  # 2 % of 200 states
    assert names_among({"Acme": 1, "Zylo": 1, "bank": 2}, states=4) == ["Acme", "Zylo"]
    assert names_among({"Acme": 1, "bank": 3}, states=3) == []


def test_a_name_is_swapped_alike_everywhere_and_numbers_for_numbers():
    names = {False: ["Acme", "Zylo"], True: ["17", "4396"]}
    for seed in range(20):
        rng = np.random.default_rng(seed)
        text = with_swapped_names("Acme, Acme 555-4396", names, spare=(), chance=1.0, rng=rng)
        first, second, number = text.replace(",", "").split(" ")
        assert first == second
        assert first in names[False]
        assert number.removeprefix("555-") in names[True]


def test_a_swap_needs_its_chance_and_spares_what_the_reply_says():
    names, rng = {False: ["Zylo"], True: []}, np.random.default_rng(0)
    known = {False: ["Acme", "Zylo"], True: []}
    assert with_swapped_names("Acme", known, spare=(), chance=0.0, rng=rng) == "Acme"
    assert with_swapped_names("Acme", names, spare=(), chance=1.0, rng=rng) == "Acme"  # no name here
    texts = {with_swapped_names("Acme", known, spare=(), chance=0.5, rng=rng) for _ in range(40)}
    assert texts == {"Acme", "Zylo"}
    assert {with_swapped_names("Acme", known, spare={"Acme"}, chance=1.0, rng=rng) for _ in range(20)} == {"Acme"}


def test_practice_swaps_names_in_the_prompt_and_leaves_the_reply(codec):
    examples = heard(codec)
    changed = 0
    for seed in range(5):
        for before, after in zip(examples, practised(codec, examples, seed, swap_names=1.0), strict=True):
            assert after.tokens[after.reply_start :] == before.tokens[before.reply_start :]
            assert after.key == before.key
            assert after.asked == before.asked
            assert sum(after.token_weights) == sum(before.token_weights)
            here, there = words(codec.prompt_text(before)), words(codec.prompt_text(after))
            assert {"Bank", "Call", "555", "make", "phone"} <= there
            assert there - here <= {*NAMES, *(f"40{place}" for place in range(8))}
            changed += here != there
    assert changed > 30  # of 40; a name may be swapped for itself


def test_a_name_that_the_reply_repeats_stays(codec):
    examples = heard(codec, reply="This is {name}.")
    for name, after in zip(NAMES, practised(codec, examples, swap_names=1.0), strict=True):
        assert name in words(codec.prompt_text(after))


def test_the_same_seeds_practise_the_same_and_others_do_not(codec):
    examples = heard(codec)
    once = practised(codec, examples, 3, swap_names=1.0)
    assert practised(codec, examples, 3, swap_names=1.0) == once
    assert practised(codec, examples, 4, swap_names=1.0) != once


def test_turned_off_nothing_changes(codec):
    examples = heard(codec)
    assert practised(codec, examples) == examples


def test_what_all_replies_say_weighs_least():
    weights = [weight_of_token(count, 100, wording=0.05) for count in (1, 2, 10, 50, 100)]
    assert weights == sorted(weights, reverse=True)
    assert weights[-1] == pytest.approx(0.05 + 0.95 * math.log(101 / 100.5) / math.log(101))
    assert weight_of_token(100, 100, wording=1.0) == 1.0
    assert weight_of_token(0, 1, wording=0.0) == 1.0  # never heard among those that count


def test_the_fact_weighs_more_than_the_wording_and_the_prompt_nothing(codec):
    same, other = heard(codec), heard(codec, reply="I need your passport number.")[:1]
    *_, odd = practised(codec, [*same[1:], *other], wording=0.05)
    start = odd.reply_start
    assert set(odd.token_weights[:start]) == {0.0}
    assert min(odd.token_weights[start:]) > 0.0
    common = set(same[0].tokens[same[0].reply_start :])
    told = [
        weight
        for token, weight in zip(odd.tokens[start:], odd.token_weights[start:], strict=True)
        if token not in common
    ]
    said = [
        weight for token, weight in zip(odd.tokens[start:], odd.token_weights[start:], strict=True) if token in common
    ]
    assert told
    assert said
    assert min(told) > max(said)


def test_calls_that_look_ahead_asks_about_are_what_counts(codec):
    """Eight others about one company do not make its name a common word."""
    examples = heard(codec)
    others = [replace(example, key=f"{place}", asked=False) for place, example in enumerate(examples[:1] * 8)]
    practice = Practice(codec, swap_names=1.0, wording=1.0)
    (after,) = practice.of(examples[:1], [*examples, *others], (1,))
    assert "Acme" not in words(codec.prompt_text(after))


def test_a_prompt_is_read_back_and_put_before_the_same_reply(codec):
    example = heard(codec)[0]
    assert codec.with_prompt(example, codec.prompt_text(example)) == example
    assert codec.reply_text(example) == "I need your pin."


def test_a_run_trains_on_practised_rows():
    trainer = small_trainer("world_model.swap_names=1", "world_model.wording=0.05")
    groups = trainer.draw(trainer.plan(0), 0)
    heard_now = trainer.store_replies(groups)
    fresh = [each for examples in heard_now for each in examples]
    rows = trainer.mini_batches._example_samples(0, 0, fresh)
    assert rows
    assert all(len(set(row.world_model_weights)) > 2 for row in rows)


def test_counts_that_grow_with_a_buffer_are_those_of_the_whole_buffer(codec: WorldModelCodec):
    buffer, growing = ReplayBuffer(), Practice(codec, swap_names=0.9, wording=0.05)
    made = [each for reply in ("No.", "I need your pin.", "{name} is closed.") for each in heard(codec, reply=reply)]
    made = [replace(each, asked=False) for each in made]
    for index, each in enumerate(made):
        # Late in the run the first calls are asked about: then only these count, also those that were known before.
        later = [] if index < 12 else [replace(each, asked=True), replace(made[index - 12], asked=True)]
        buffer.add([each, *later])
        known = list(buffer.examples.values())
        whole = Practice(codec, swap_names=0.9, wording=0.05).of(known[:3], known, (index,))
        assert growing.of(known[:3], buffer, (index,)) == whole
