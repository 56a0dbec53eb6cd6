"""Rewording: which words tell something, what changes in a prompt and what never does."""

from __future__ import annotations

import numpy as np
import pytest

from lfo.protocol.world_model import WorldModelCodec, WorldModelExample, WorldModelState
from lfo.rows.replay import Practice
from lfo.rows.rewording import reworded, telling_words, texts_of, with_other_texts, words
from lfo.types import ToolCall
from small_runs import tokenizer

LAW = {"books": "red", "seeds": "blue", "lamps": "green"}
REQUESTS = ("Please send the {what} of {name} today.", "{name} here, post my {what}.")
REFUSED = ("Refused. It needs a {label} label.", "A {label} label would have been right.")


@pytest.fixture(scope="module")
def codec() -> WorldModelCodec:
    return WorldModelCodec(tokenizer())


@pytest.fixture(scope="module")
def heard(codec: WorldModelCodec) -> list[WorldModelExample]:
    """Sixty requests, each of somebody else, and what was told; every tenth call was right by chance."""
    dice, examples = np.random.default_rng(0), []
    for number in range(60):
        what, name = sorted(LAW)[number % 3], f"{'ABCDEFGHIJ'[number % 10]}{'aeiouy'[number // 10]}nn"
        request = REQUESTS[dice.integers(2)].format(what=what, name=name)
        state = WorldModelState(task=request, step=2, actions=(("ask(1)", f"Shop of {name}."),), collected={})
        reply = "All right." if number % 10 == 9 else REFUSED[dice.integers(2)].format(label=LAW[what])
        examples.append(codec.example(state, ToolCall(name="ship", arguments={"label": "grey"}), reply, asked=True))
    return examples


def test_words_that_go_along_with_replies_tell_something_and_others_do_not():
    dice = np.random.default_rng(1)
    states = [{sorted(LAW)[index % 3], ("send", "post")[dice.integers(2)], f"n{index}"} for index in range(60)]
    replies = [{next(LAW[word] for word in state if word in LAW), ("No", "Never")[dice.integers(2)]} for state in states]
    assert telling_words(states, replies) == (frozenset(LAW), frozenset(LAW.values()))
    shuffled = [replies[index] for index in dice.permutation(60)]
    assert telling_words(states, shuffled) == (frozenset(), frozenset())
    assert telling_words(states[:2], replies[:2]) == (frozenset(), frozenset())
    assert telling_words([], []) == (frozenset(), frozenset())


def test_only_texts_of_a_state_change_and_what_is_json_stays():
    prompt = '<|state|>\nTask: Go.\nStep: 2\n- a("b"): Yes.\n- d(): {"e": 1}\n<|/state|>\n\n<|action|>\nTask: x'
    assert texts_of(prompt) == "Go.\nYes."
    changed = with_other_texts(prompt, lambda text: f"+{text}")
    assert changed == prompt.replace("Go.", "+Go.").replace("Yes.", "+Yes.")


def test_pieces_that_stay_stay_and_others_go_come_and_move():
    text, seen = "Please send my books to Norway today", set()
    for seed in range(40):
        rng = np.random.default_rng(seed)
        made = reworded(text, stays={"books", "Norway"}.__contains__, another=lambda: "zug", rng=rng)
        assert {"books", "Norway"} <= set(made.split()) <= {*text.split(), "zug"}
        seen.add(made)
    assert any("zug" in made for made in seen)
    assert any("Please" not in made for made in seen)
    assert any(made.split().index("Norway") < made.split().index("books") for made in seen)


def test_practice_keeps_what_decides_the_call_and_the_reply(codec, heard):
    practice, changed = Practice(codec, swap_names=0.0, wording=1.0, reword=1.0), 0
    for before, after in zip(heard, practice.of(heard, heard, (0,)), strict=True):
        one, other = codec.prompt_text(before), codec.prompt_text(after)
        assert (words(one) & LAW.keys()) <= words(other)
        assert one.partition("<|action|>")[2] == other.partition("<|action|>")[2]
        assert codec.reply_text(before) == codec.reply_text(after)
        changed += one != other
    assert changed > 40
    assert practice.of(heard, heard, (0,)) == practice.of(heard, heard, (0,)), "a resumed run draws the same"


def test_without_a_chance_nothing_is_counted_or_weighed(codec, heard):
    plain, off = (Practice(codec, swap_names=0.5, wording=0.05, **more) for more in ({}, {"reword": 0.0}))
    assert plain.of(heard, heard, (3,)) == off.of(heard, heard, (3,))
