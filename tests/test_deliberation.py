"""Look-ahead proposed by the policy: what is imagined, what stays in the episode, and what is taken back."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lfo.config import flatten, from_yaml, load_config, to_yaml
from lfo.env.interface import NamesPredictedTools, OffersLookahead
from lfo.env.tool_environment import ToolEnvironment, tool
from lfo.env.worlds.oracle import OracleCodes
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.measure.fixed_tasks import evaluate_splits, informative_drafts
from lfo.measure.success import draft_metrics
from lfo.model import sampler as sampler_module
from lfo.model.fast.turn_decoder import TurnCache, TurnDecoder
from lfo.model.sampler import Sampler, make_decoder
from lfo.objectives.advantages import group_advantages
from lfo.objectives.losses import fused_token_logprobs
from lfo.play.episode import Episode, Feedback, RolloutRequest
from lfo.play.look_ahead import EXPECTED, MAX_IMAGINED, Deliberation, LookAhead, Question
from lfo.play.predictors import make_lookahead
from lfo.play.records import rollout_record
from lfo.play.runner import Runner, RunnerConfig
from lfo.protocol.chat import ChatCodec
from lfo.protocol.hermes import format_tool_call
from lfo.protocol.world_model import WorldModelCodec
from lfo.rows.samples import mark_first_calls, mark_imagined, policy_sample
from lfo.types import Message, Observed, Origin, Rollout, RolloutGroup, Speech, StepResult, StopReason, ToolCall, Turn
from small_runs import fussy_calls, model_of, randomised, requests_of, small_config, small_trainer, tokenizer
from test_sampler import EOS, VOCABULARY, make_model


def schema(name: str) -> dict[str, Any]:
    words = {"type": "object", "properties": {"words": {"type": "string"}}, "required": ["words"]}
    return {"type": "function", "function": {"name": name, "description": "Do it.", "parameters": words}}


TOOLS = (schema("say"), schema("look"))


def call_of(words: str, name: str = "say") -> ToolCall:
    return ToolCall(name=name, arguments={"words": words})


def say(words: str, name: str = "say") -> str:
    return format_tool_call(call_of(words, name))


A, B, C, D = map(say, "abcd")
NO_CALL = "I think that I shall say nothing."
ENDLESS = say("and so on " * 40)  # runs past `LIMIT`
RAMBLING = B + "and so on " * 40  # too, after a call that could be read
LIMIT = 60


@dataclass(frozen=True)
class Chore:
    id: str = "chore"


class Listener:
    """An environment that notes all that it hears."""

    def __init__(self, heard: list[str]) -> None:
        self.heard = heard

    def tasks(self, split: str) -> Sequence[Chore]:
        return (Chore(),)

    def tools(self) -> Sequence[Any]:
        return TOOLS

    def reset(self, task: Chore) -> Sequence[Message]:
        return (Message(role="user", content="Talk to me."),)

    def step(self, message: str) -> StepResult:
        self.heard.append(message)
        return StepResult(observation=f"Reply {len(self.heard)}.")


class Asking(Listener):
    """Names the call `look("question")` before every turn."""

    def lookahead_query(self, transcript: Sequence[Message]) -> ToolCall | None:
        return None if transcript[-1].predicted else call_of("question", "look")


class Script:
    """Slots whose policy says given texts, one after the other, each with log-probs of its own."""

    def __init__(self, codec: ChatCodec, *said: Sequence[str], room: int = 10_000) -> None:
        self.codec, self.context = codec, room
        self.said = [iter(texts) for texts in said]
        self.kept: list[list[int]] = [[] for _ in said]
        self.spoken: list[list[Speech]] = [[] for _ in said]
        self.temperatures: list[float] = []
        self.uniforms: list[float] = []

    def extend(self, slots: Sequence[int], chunks: Sequence[Sequence[int]]) -> None:
        for slot, chunk in zip(slots, chunks, strict=True):
            self.kept[slot] += chunk
            assert len(self.kept[slot]) <= self.context

    def rewind(self, slot: int, length: int) -> None:
        assert length <= len(self.kept[slot])
        del self.kept[slot][length:]

    def room(self, slot: int) -> int:
        return self.context - len(self.kept[slot])

    def decode(self, slots, *, max_new_tokens, temperature, uniforms) -> list[Speech]:
        self.temperatures.append(temperature)
        for slot, limit, numbers in zip(slots, max_new_tokens, uniforms, strict=True):
            ids = [*self.codec.encode(next(self.said[slot])), self.codec.end_of_turn][: min(limit, self.room(slot))]
            self.kept[slot] += ids
            self.uniforms.append(float(numbers[0]))
            number = len(self.spoken[slot]) + 1
            logprobs = tuple(-number - place / 1000 for place in range(len(ids)))
            stopped = bool(ids) and ids[-1] == self.codec.end_of_turn
            self.spoken[slot].append(Speech(tokens=tuple(ids), logprobs=logprobs, stopped=stopped))
        return [self.spoken[slot][-1] for slot in slots]


@dataclass
class Played:
    rollout: Rollout
    slots: Script
    heard: list[str]
    asked: list[Question]
    watched: list[Turn]

    def kept(self) -> tuple[Any, ...]:
        """What is in the rollout, and in the sampler's slot."""
        rollout = self.rollout
        return rollout.tokens, rollout.origins, rollout.logprobs, rollout.turns, self.slots.kept

    @property
    def turns(self) -> list[tuple[str, bool]]:
        return [(turn.action, turn.predicted) for turn in self.rollout.turns]


def play(
    *said: str,
    turns: int = 1,
    room: int = 10_000,
    temperature: float = 1.0,
    reply: Callable[[Question], str] = lambda question: f"You said {question.call.arguments['words']}.",
    environment: Callable[[list[str]], Any] = Listener,
    seeds: tuple[int, ...] = (0,),
    blind: bool = False,
    imagine: int | None = None,
    picks: bool = False,
    feedback: Feedback | None = None,
    form: str = "mark",
    **lookahead: Any,
) -> Played:
    codec, heard, asked, watched = ChatCodec(tokenizer(), TOOLS), [], [], []

    def predict(questions: Sequence[Question]) -> list[str]:
        asked.extend(questions)
        return [reply(question) for question in questions]

    runner = Runner(
        partial(environment, heard),
        codec,
        config=RunnerConfig(max_turns=turns, max_turn_tokens=LIMIT, environment_retries=0, form=form),
        lookahead=LookAhead(predictor=predict, **lookahead),
    )
    slots = Script(codec, said, room=room)
    shown = {"look_ahead": not blind, "imagine": imagine, "picks": picks, "feedback": feedback}
    request = RolloutRequest(task=Chore(), seeds=seeds, **shown)
    (rollout,) = runner.run([request], slots, temperature=temperature, on_turn=watched.append)
    return Played(rollout=rollout, slots=slots, heard=heard, asked=asked, watched=watched)


# --- the environment -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("proposed_by", ["policy", "environment"])
@pytest.mark.parametrize("seed", range(12))
def test_an_imagined_call_never_reaches_the_environment(seed: int, proposed_by: Any):
    draw = np.random.default_rng(seed)
    texts = [say(words, name) for words in "abc" for name in ("say", "look")] + [NO_CALL, ENDLESS, RAMBLING]
    said = [texts[place] for place in draw.choice(len(texts), 200, p=[0.15] * 6 + [0.05, 0.02, 0.03])]
    played = play(
        *said,
        turns=6,
        most=int(draw.integers(1, 9)),
        drafts=int(draw.integers(1, 4)),
        tools=[None, ("say",), ("say", "look")][seed % 3],
        room=[10_000, 500, 700][seed // 3 % 3],
        seeds=(seed,),
        environment=Asking,
        proposed_by=proposed_by,
    )
    cut_off = played.rollout.stop in (StopReason.TURN_OVERFLOW, StopReason.CONTEXT_OVERFLOW)
    real = [turn for turn in played.rollout.turns if not turn.predicted]
    unheard = [turn for turn in real if not turn.observation]
    assert len(unheard) <= cut_off
    assert played.heard == [turn.action for turn in real if turn.observation]
    assert [turn.observation for turn in real if turn.observation] == [
        f"Reply {number + 1}." for number in range(len(played.heard))
    ]
    assert played.rollout.tokens[: len(played.slots.kept[0])] == tuple(played.slots.kept[0])
    everything = sum(len(speech.tokens) for speech in played.slots.spoken[0])
    assert played.rollout.sampled_count == everything, "what left the rollout was sampled too"
    assert len(set(played.slots.uniforms)) == len(played.slots.uniforms), "no random number serves twice"


# --- what stays, and what leaves -------------------------------------------------------------------------------


def test_another_call_after_the_expected_reply_keeps_the_exchange():
    played = play(A, B, most=1)
    assert played.turns == [(A, True), (B, False)]
    assert played.heard == [B]
    imagined, real = played.rollout.turns
    assert (imagined.observation, real.observation) == ("You said a.", "Reply 1.")
    assert (played.rollout.taken_back, played.rollout.discarded_tokens) == ((), 0)
    assert [turn.action for turn in played.watched] == [A, B]
    decode = ChatCodec(tokenizer(), TOOLS).decode
    tokens = played.rollout.tokens
    assert decode(tokens[imagined.action_start : imagined.action_end]) == A
    assert decode(tokens[imagined.observation_start : imagined.observation_end]) == f"{EXPECTED}You said a."
    assert decode(tokens[real.action_start : real.action_end]) == B


def test_only_what_was_said_for_real_is_told_to_the_predictor():
    played = play(A, B, C, D, say("e"), turns=2, most=3)
    assert played.turns == [(A, True), (B, True), (C, True), (D, False), (say("e"), False)]
    assert [question.messages for question in played.asked] == [(), (), ()]
    assert all(question.state.actions == () for question in played.asked)
    later = play(A, A, B, C, turns=2, most=1)
    assert later.turns == [(A, False), (B, True), (C, False)]
    assert [question.messages for question in later.asked] == [(), (A,)]


# The last two leave room for the expected reply and none to finish another call.
@pytest.mark.parametrize(("second", "narrow"), [(A, 0), (NO_CALL, 0), (ENDLESS, 0), (RAMBLING, 0), (B, 10), (B, 1)])
def test_an_exchange_after_which_no_other_call_follows_leaves_no_trace(second: str, narrow: int, monkeypatch):
    room = 10_000
    if narrow:
        kept = play(A, B, most=1).rollout.turns[-1]
        room = kept.action_start + narrow
    before, after = [], []

    def snapshot(episode: Episode) -> tuple[Any, ...]:
        assert episode.speech is not None
        speech = (episode.speech.tokens, episode.speech.logprobs, episode.speech.stopped)
        streams = (tuple(episode.tokens), tuple(episode.origins), tuple(episode.logprobs))
        sampled = tuple(episode.slots.kept[episode.slot])  # type: ignore[attr-defined]
        return (*streams, tuple(episode.turns), tuple(episode.transcript), speech, sampled)

    reconsider = Deliberation.reconsider

    def watching(self, batch, *arguments):
        before.extend(map(snapshot, batch))
        reconsider(self, batch, *arguments)
        after.extend(map(snapshot, batch))

    monkeypatch.setattr(Deliberation, "reconsider", watching)
    played, plain = play(A, second, room=room), play(A, room=room, blind=True)
    assert before[:1] == after[:1]
    assert len(before) == 2
    assert played.kept() == plain.kept()
    assert played.heard == plain.heard == [A]
    (gone,) = played.rollout.taken_back
    (turn,) = played.rollout.turns
    assert (gone.action, gone.observation, gone.call) == (A, "You said a.", turn.call)
    assert (gone.predicted, gone.taken_back, turn.predicted, turn.taken_back) == (True, True, False, False)
    assert {gone.action_start, gone.action_end, gone.observation_start, gone.observation_end} == {turn.action_start}
    assert played.rollout.discarded_tokens == len(played.slots.spoken[0][1].tokens) > 0
    assert played.rollout.sampled_count == plain.rollout.sampled_count + played.rollout.discarded_tokens
    assert [each.taken_back for each in played.watched] == [True, False]
    recorded = [(each["action"], each["taken_back"]) for each in rollout_record(played.rollout)["turns"]]
    assert recorded == [(A, True), (A, False)], "in the order in which it happened"


def test_an_expected_reply_that_does_not_fit_is_not_shown():
    fits = play(A, blind=True).rollout.turns[0]
    room = fits.action_end + 5
    played, plain = play(A, room=room), play(A, room=room, blind=True)
    assert played.kept() == plain.kept()
    assert (played.rollout.taken_back, played.rollout.discarded_tokens) == ((), 0)
    assert len(played.asked) == len(played.slots.spoken[0]) == 1, "nobody speaks after what is not there"


def test_a_draft_that_cannot_be_read_is_the_turn():
    for text in (NO_CALL, "<tool_call>\nnot json\n</tool_call>"):
        played = play(text, B)
        assert (played.heard, played.asked) == ([text], [])


def test_a_call_that_was_imagined_before_this_turn_is_not_imagined_again():
    played = play(A, B, A, most=5)
    assert played.turns == [(A, True), (B, True), (A, False)]
    assert [question.call for question in played.asked] == [call_of("a"), call_of("b")]


# --- how much is imagined --------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_no_more_exchanges_stay_in_a_rollout_than_allowed(most: int):
    played = play(*(say(f"call {number}") for number in range(40)), turns=4, most=most)
    predicted = [turn.predicted for turn in played.rollout.turns]
    assert (sum(predicted), predicted.count(False)) == (most, 4)
    first = min(most, MAX_IMAGINED - 1)
    assert predicted[: first + 1] == [True] * first + [False]


@pytest.mark.parametrize("imagine", [1, 2])
def test_an_explorer_imagines_so_many_calls_and_then_makes_the_next_for_real(imagine: int):
    calls = [say(f"call {number}") for number in range(9)]
    played = play(*calls, turns=2, most=4, imagine=imagine)
    assert played.turns == [*((call, True) for call in calls[:imagine]), *((c, False) for c in calls[imagine:][:2])]
    blind = play(*calls, turns=2, most=4, blind=True)
    assert blind.turns == [(calls[0], False), (calls[1], False)]
    assert (blind.asked, blind.rollout.discarded_tokens) == ([], 0)


def test_an_exchange_that_was_taken_back_uses_up_nothing():
    played = play(A, A, B, C, most=1, turns=2)
    assert played.turns == [(A, False), (B, True), (C, False)]


def test_the_call_that_a_rollout_has_prepared_is_made_and_not_imagined():
    look = say("a", "look")
    played = play(A, look, B, C, D, turns=3, most=2, tools=("say",))
    assert played.turns == [(A, True), (look, False), (B, False), (C, True), (D, False)]
    assert [question.call for question in played.asked] == [call_of("a"), call_of("c")], "after B it may ask again"
    unprepared = play(A, B, look, C, turns=2, most=3, tools=("say",))
    assert unprepared.turns == [(A, True), (B, True), (look, False), (C, False)], "two questions before one turn"


@pytest.mark.parametrize(
    ("reply", "second", "imagined"),
    [
        ("Say Moss, not a!", say("moss"), False),
        ("You want_moss.", say("moss"), False),  # as in the name of a field
        ("Say moss, not a!", say("salt"), True),
        ("Talk, a!", say("talk"), True),  # the user's word
        ("Say a.", say("a", "look"), True),  # the policy's own
    ],
)
def test_a_call_that_names_what_the_expected_reply_brought_up_is_made(reply: str, second: str, imagined: bool):
    played = play(A, second, D, most=2, reply=lambda question: reply)
    assert played.turns == [(A, True), (second, True), (D, False)] if imagined else [(A, True), (second, False)]


def test_a_draft_that_does_not_fit_its_tool_is_checked_and_never_imagined():
    wrong = format_tool_call(ToolCall(name="say", arguments={"word": "a"}))
    played = play(wrong, A, B, most=1)
    assert played.turns == [(wrong, True), (A, True), (B, False)], "a check uses up no imagined exchange"
    assert [question.call for question in played.asked] == [call_of("a")]
    assert (played.heard, [turn.checked for turn in played.rollout.turns]) == ([B], [True, False, False])
    flaw, checked = 'say has no argument "word"; its arguments are: words.', played.rollout.turns[0]
    assert checked.observation == flaw
    assert draft_metrics([played.rollout]) == {"drafts": 1.0, "drafts_kept": 1.0}
    (told,) = (turn for turn in rollout_record(played.rollout)["turns"] if turn.get("checked"))
    assert told["observation"] == flaw
    told_ids = played.rollout.tokens[checked.observation_start : checked.observation_end]
    assert ChatCodec(tokenizer(), TOOLS).decode(told_ids) == EXPECTED + flaw
    again = play(wrong, wrong, most=1)
    assert (again.turns, again.heard, again.asked) == ([(wrong, False)], [wrong], []), "it is made if it is insisted on"
    assert play(wrong, blind=True).heard == [wrong]


WRONG = format_tool_call(ToolCall(name="say", arguments={"word": "a"}))
REPEATS = "<tool_response>\nReply 1.\n</tool_response>"


@pytest.mark.parametrize("form", ["tool", "user"])
@pytest.mark.parametrize("wrong", [WRONG, "<tool_call>{say}</tool_call>"], ids=["misfit", "unreadable"])
def test_a_policy_that_only_repeats_the_error_of_a_real_call_is_told_to_make_another(form: str, wrong: str):
    insisted = (wrong, wrong) if wrong == WRONG else (wrong,)  # what cannot be read is made at once
    played = play(*insisted, REPEATS, B, B, turns=2, form=form)
    assert played.turns == [(wrong, False), (REPEATS, True), (B, False)]
    assert played.heard == [wrong, B]
    told = played.rollout.turns[1]
    assert (told.checked, told.call, told.observation) == (True, None, "Reply 1.")
    told_ids = played.rollout.tokens[told.observation_start : told.observation_end]
    assert ChatCodec(tokenizer(), TOOLS).decode(told_ids) == "The last call failed: Reply 1. Make the right call now."
    assert not any(
        played.rollout.origins[place] == Origin.SAMPLED for place in range(told.observation_start, told.observation_end)
    )
    assert play(*insisted, REPEATS, REPEATS, turns=2, form=form).heard == [wrong, REPEATS], "it may insist"


def test_what_repeats_a_reply_that_is_no_error_is_an_answer_and_nobody_else_is_told():
    assert play(A, A, REPEATS, turns=2, form="user").heard == [A, REPEATS]
    assert play(WRONG, WRONG, f"{REPEATS} So I stop.", turns=2, form="user").heard == [WRONG, f"{REPEATS} So I stop."]
    assert play(WRONG, WRONG, REPEATS, turns=2).heard == [WRONG, REPEATS], "a base with the mark"
    assert play(WRONG, REPEATS, turns=2, form="user", blind=True).heard == [WRONG, REPEATS]


def test_a_flaw_that_names_a_word_is_no_prediction_that_a_call_uses():
    wrong = format_tool_call(ToolCall(name="say", arguments={}))  # "say needs the argument words."
    right = say("argument")
    played = play(wrong, right, right, most=1)
    assert [question.call for question in played.asked] == [call_of("argument")]


PAINT = {"type": "object", "properties": {"words": {"enum": ["red", "blue", "white"]}}, "required": ["words"]}


@pytest.mark.parametrize(
    ("reply", "imagined"), [("It must be one of: red, blue, white.", True), ("It must be blue, not red.", False)]
)
def test_a_reply_that_lists_every_allowed_value_is_not_used_by_a_call_with_one_of_them(
    reply: str, imagined: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(TOOLS[0]["function"], "parameters", PAINT)
    red, blue = say("red"), say("blue")
    played = play(red, blue, say("white"), most=2, reply=lambda question: reply)
    assert len(played.asked) == (2 if imagined else 1)


def sights(*settings: str, step: int = 5) -> list[tuple[bool, int | None]]:
    config = small_config("rollout.group_size=8", "rollout.prompts=1", *settings)
    requests = requests_of(config, PhoneCalls(), step)
    return [(not request.look_ahead, request.imagine) for request in requests]


def test_explorers_stand_on_the_rungs_of_a_ladder():
    sighted, blind = (False, None), (True, None)
    assert sights() == [blind, (False, 1), blind, (False, 1), *[sighted] * 4]
    assert sights("exploration.blind_share=0.25") == [blind] * 2 + [sighted] * 6, "one alone has no peers"
    assert sights("lookahead=off") == [blind] * 8
    assert sights("world_model.schedule=explore_first:6") == [blind] * 8


def test_rollouts_are_compared_with_those_that_might_imagine_equally_much():
    base = play(A, blind=True).rollout
    sight = [(True, None), (False, 1), (False, 2), (False, None)]
    rollouts = [
        replace(base, look_ahead=not blind, imagine=imagine, reward=float(reward))
        for reward, (blind, imagine) in enumerate(sight)
        for _ in range(2)
    ]
    group = RolloutGroup(task_id="chore", rollouts=tuple(rollouts))
    assert len(set(group.conditions)) == 4
    equal = group_advantages(group.rewards, conditions=group.conditions)
    assert list(equal) == [0.0] * 8, "within each condition all are alike"
    one = replace(group, rollouts=(replace(rollouts[0], reward=1.0), *rollouts[1:]))
    changed = group_advantages(one.rewards, conditions=one.conditions)
    assert [advantage != 0 for advantage in changed] == [True, True] + [False] * 6
    for (blind, imagine), rollout in zip(sight, rollouts[::2], strict=True):
        played = play(*map(say, "abcdefg"), blind=blind, imagine=imagine).rollout
        assert (played.look_ahead, played.imagine) == (rollout.look_ahead, rollout.imagine)


# --- several drafts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_first_candidate_whose_expected_reply_changes_what_is_said_is_kept(temperature: float):
    played = play(A, A, B, B, C, D, most=1, drafts=4, temperature=temperature)
    assert played.turns == [(C, True), (D, False)]
    assert [turn.action for turn in played.rollout.taken_back] == [A, B]
    assert played.heard == [D]
    spoken = [len(speech.tokens) for speech in played.slots.spoken[0]]
    assert played.rollout.discarded_tokens == sum(spoken[:4]), "the first draft and what followed the others"
    assert played.rollout.sampled_count == sum(spoken)
    imagined, real = played.rollout.turns
    for turn, speech in ((imagined, 4), (real, 5)):
        said = played.slots.spoken[0][speech]
        assert played.rollout.logprobs[turn.action_start : turn.action_end + 1] == said.logprobs
    drafted = temperature or 1.0  # a greedy candidate would be the first one again
    assert played.slots.temperatures == [temperature, temperature, drafted, temperature, drafted, temperature]
    assert len(set(played.slots.uniforms)) == 6


def picked(*said: str, turns: int = 1, drafts: int = 4, picks: bool = True, blind: bool = True) -> list[str]:
    played = play(*said, turns=turns, drafts=drafts, picks=picks, blind=blind, tools=("say",))
    assert played.asked == [], "nothing is imagined"
    assert played.rollout.tokens[: len(played.slots.kept[0])] == tuple(played.slots.kept[0])
    assert played.rollout.sampled_count == sum(len(speech.tokens) for speech in played.slots.spoken[0])
    return played.heard


def test_an_explorer_makes_the_first_candidate_that_others_would_imagine():
    look, other = say("a", "look"), say("b", "look")
    assert picked(look, other, NO_CALL, A) == [A]
    assert picked(look, other, NO_CALL, A, drafts=3) == [look], "no candidate calls the tool: the first draft"
    assert picked(A) == [A]
    assert picked(look, A, other, turns=2) == [A, other], "once in a rollout"
    assert picked(look, picks=False) == [look]


def test_blind_explorers_pick_among_candidates_where_there_are_several():
    def picking(*settings: str) -> list[bool]:
        config = small_config("rollout.group_size=8", "rollout.prompts=1", *settings)
        return [request.picks for request in requests_of(config, PhoneCalls(), 5)]

    assert picking("imagine.drafts=2") == [True, False] * 2 + [False] * 4
    assert not any(picking())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "others", [(B, B, C, C), (B, NO_CALL, A), (NO_CALL, ENDLESS), (RAMBLING, say("x", "look")), (C, RAMBLING, A)]
)
def test_where_no_candidate_changes_anything_the_first_draft_is_the_turn(others: Sequence[str], temperature: float):
    one = play(A, A, temperature=temperature, tools=("say",))
    several = play(A, A, *others, drafts=3, temperature=temperature, tools=("say",))
    assert several.kept() == one.kept()
    assert several.heard == [A]
    spoken = [len(speech.tokens) for speech in several.slots.spoken[0]]
    assert several.rollout.discarded_tokens == sum(spoken[1:])
    assert several.rollout.sampled_count == sum(spoken)


def test_a_kept_draft_needs_no_other_candidate():
    played = play(A, B, B, drafts=3)
    assert played.turns == [(A, True), (B, False)]
    assert len(played.slots.spoken[0]) == 3, "A, B, and B again after its own expected reply"


def test_rows_decide_for_themselves():
    codec = ChatCodec(tokenizer(), TOOLS)
    heard: list[str] = []
    lookahead = LookAhead(predictor=lambda questions: ["Well."] * len(questions), most=1, drafts=2)
    settings = RunnerConfig(max_turns=1, max_turn_tokens=LIMIT)
    said = ((A, A, B, B), (NO_CALL, NO_CALL), (A, A, B, C), (A, B), (D,))
    requests = [RolloutRequest(task=Chore(), seeds=(number,), look_ahead=number != 4) for number in range(5)]
    runner = Runner(partial(Listener, heard), codec, config=settings, lookahead=lookahead)
    slots = Script(codec, *said)
    rollouts = runner.run(requests, slots)
    assert [[(turn.action, turn.predicted) for turn in rollout.turns] for rollout in rollouts] == [
        [(A, False)],
        [(NO_CALL, False)],
        [(B, True), (C, False)],
        [(A, True), (B, False)],
        [(D, False)],
    ]
    assert sorted(heard) == sorted((A, NO_CALL, C, B, D))
    for rollout, kept in zip(rollouts, slots.kept, strict=True):
        assert rollout.tokens[: len(kept)] == tuple(kept)


# --- what is trained -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [1, 2])
def test_a_draft_is_trained_as_it_was_sampled_and_an_expected_reply_never(drafts: int):
    played = play(A, B, most=1, drafts=drafts)
    rollout, (imagined, real) = played.rollout, played.rollout.turns
    for turn, speech in zip((imagined, real), played.slots.spoken[0], strict=True):
        span = slice(turn.action_start, turn.action_end + 1)
        assert rollout.tokens[span] == speech.tokens
        assert rollout.logprobs[span] == speech.logprobs
        assert set(rollout.origins[span]) == {Origin.SAMPLED}
    expected = range(imagined.observation_start, imagined.observation_end)
    assert {rollout.origins[place] for place in expected} == {Origin.PREDICTED}
    for advantage in (0.5, None):
        sample = policy_sample(rollout, advantage, adapters=("policy",), observed=Observed(tools=None))
        assert sample is not None
        for place in range(len(sample.tokens)):
            sampled = advantage is not None and rollout.origins[place] == Origin.SAMPLED
            heard = real.observation_start <= place < real.observation_end
            assert (sample.policy_weights[place], sample.world_model_weights[place]) == (sampled, heard)
            assert sample.advantages[place] == (advantage if sampled else 0.0)
    examples = WorldModelCodec(tokenizer()).examples_of(rollout, predict=None)
    assert len(examples) == 1, "of what was really heard"


@pytest.mark.parametrize("drafts", [1, 2])
def test_sampled_log_probs_are_the_trainers_with_drafts_in_the_row(drafts: int):
    trainer = small_trainer(f"imagine.drafts={drafts}", "seed=3", environment=fussy_calls)
    model = randomised(model_of(trainer))
    trainer.backend.sync(0)
    rollouts = trainer.collect(trainer.plan(0)).rollouts
    assert any(turn.predicted for rollout in rollouts for turn in rollout.turns), "some were kept"
    assert any(rollout.taken_back and not rollout.turns[0].predicted for rollout in rollouts), "and some taken back"
    checked = 0
    for rollout in rollouts:
        tokens_BT = torch.tensor([rollout.tokens])
        with torch.no_grad():
            hidden_BTD = model.hidden(tokens_BT, model.policy_adapters)
            logprobs_BT, _ = fused_token_logprobs(hidden_BTD, model.head, tokens_BT, temperature=1.0)
        sampled = torch.tensor(rollout.origins) == Origin.SAMPLED
        recorded = torch.tensor(rollout.logprobs)
        assert (logprobs_BT[0] - recorded)[sampled].abs().max() < 1e-4
        assert recorded[~sampled].abs().max() == 0
        assert rollout.sampled_count == int(sampled.sum()) + rollout.discarded_tokens
        checked += int(sampled.sum())
    assert checked > 200
    assert sum(rollout.discarded_tokens for rollout in rollouts) > 0


# --- slots that go back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "decoder"), [("qwen3", make_decoder), ("gpt_neox", make_decoder), ("qwen3", None)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_slot_that_went_back_goes_on_like_a_fresh_one(family: str, decoder: Any, temperature: float, monkeypatch):
    monkeypatch.setattr(sampler_module, "make_decoder", decoder or TurnDecoder)
    model = make_model(family)
    sampler = Sampler(model, max_context=200, eos_ids=EOS)
    generator = np.random.default_rng(1)

    def tokens(count: int) -> list[int]:
        return generator.integers(5, VOCABULARY, count).tolist()

    def decode(session: Any, slots: Sequence[int], numbers: Any) -> list[Speech]:
        return session.decode(slots, max_new_tokens=[12] * len(slots), temperature=temperature, uniforms=numbers)

    def session_of(count: int) -> Any:
        session = sampler.session(slots=count, adapters=model.policy_adapters)
        assert isinstance(session._cache, TurnCache) == (decoder is None)
        return session

    session = session_of(3)
    session.extend([0, 1, 2], [tokens(20), tokens(31), tokens(7)])
    decode(session, [0, 1, 2], generator.random((3, 12)))
    session.extend([0, 1], [tokens(9), tokens(4)])
    decode(session, [0, 1], generator.random((2, 12)))
    for back, more in ((0, 3), (1, 0), (5, 6), (14, 0), (30, 2), (10_000, 1)):
        lengths = [max(1, len(session.tokens(slot)) - back) for slot in range(3)]
        for slot, length in enumerate(lengths):
            whole = session.tokens(slot)
            session.rewind(slot, length)
            assert session.tokens(slot) == whole[:length]
            assert session.room(slot) == 200 - length
        session.extend([0, 1, 2], [tokens(more) for _ in range(3)])
        fresh = session_of(3)
        fresh.extend([0, 1, 2], [session.tokens(slot) for slot in range(3)])
        numbers = generator.random((3, 12))
        for one, other in zip(decode(session, [0, 1, 2], numbers), decode(fresh, [0, 1, 2], numbers), strict=True):
            assert (one.tokens, one.stopped) == (other.tokens, other.stopped)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


# In a process of its own: verl must not be imported here.
SERVED = """
import json
from types import SimpleNamespace
from lfo.engines.verl.agent_loop import ServedSlot
from lfo.types import Speech

asked, room = [], []

def ask(tokens, adapter, **options):
    asked.append(list(tokens))
    return Speech(tokens=(7, 8, 9), logprobs=(0.0,) * 3, stopped=True)

rollout = SimpleNamespace(max_context=20)
slot = ServedSlot(SimpleNamespace(ask=ask, adapter="policy", run_config=SimpleNamespace(rollout=rollout)))
for chunk in ([1, 2, 3], [4, 5], [6]):
    slot.extend([0], [chunk])
    slot.decode([0], max_new_tokens=[9], temperature=1.0, uniforms=[[0.5] * 9])
    if len(asked) == 2:
        room.append(slot.room(0))
        slot.rewind(0, 4)
        room.append(slot.room(0))
print(json.dumps([asked, room]))
"""


@pytest.mark.verl
def test_a_served_slot_goes_back_too():
    pytest.importorskip("verl", reason="verl is not installed: pip install -e '.[verl]'")
    command = [sys.executable, "-W", "ignore", "-c", SERVED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    asked, room = json.loads(done.stdout.splitlines()[-1])
    assert asked == [[1, 2, 3], [1, 2, 3, 7, 8, 9, 4, 5], [1, 2, 3, 7, 6]]
    assert room == [9, 16]


# --- what is practised first -----------------------------------------------------------------------------------


def test_real_calls_that_the_group_imagined_in_the_same_state_are_marked_and_no_others():
    dreamer = play(A, B, most=1).rollout
    assert [turn.predicted for turn in dreamer.turns] == [True, False]
    same = play(A, A, turns=2, blind=True).rollout  # A first, where it was imagined, and again in another state
    other = play(C, A, turns=2, blind=True).rollout
    gone = play(D, D).rollout  # D was imagined and taken back, and then made
    named = play(say("a", "look"), blind=True).rollout

    def marks(*rollouts: Rollout) -> list[list[bool]]:
        group = RolloutGroup(task_id="chore", rollouts=rollouts)
        marked = mark_imagined(group)
        assert [replace(each, asked=False) for rollout in marked.rollouts for each in rollout.turns] == [
            turn for rollout in rollouts for turn in rollout.turns
        ]
        return [[turn.asked for turn in rollout.turns] for rollout in marked.rollouts]

    assert marks(dreamer, same, other, named) == [[False, False], [True, False], [False, False], [False]]
    assert marks(same, other, named) == [[False, False], [False, False], [False]]
    assert marks(gone) == [[False]], "only what stayed in a rollout"
    second = play(C, C, A, B, turns=2, most=1).rollout  # imagines A after C
    assert [turn.action for turn in second.turns] == [C, A, B]
    assert marks(second, other, same) == [[False, False, False], [False, True], [False, False]]


def test_where_nobody_names_the_calls_other_arguments_are_asked_about_too():
    dreamer, same = play(A, B, most=1).rollout, play(A, A, turns=2, blind=True).rollout
    other, gone = play(C, A, turns=2, blind=True).rollout, play(D, D).rollout
    marked = mark_imagined(RolloutGroup(task_id="chore", rollouts=(dreamer, same, other)), any_arguments=True)
    marks = [[turn.asked for turn in rollout.turns] for rollout in marked.rollouts]
    assert marks == [[False, True], [True, False], [True, False]], "in the state of the imagined call only"
    alone = mark_imagined(RolloutGroup(task_id="chore", rollouts=(gone, other)), any_arguments=True)
    assert not any(turn.asked for rollout in alone.rollouts for turn in rollout.turns), "what was taken back"


def test_where_nothing_asked_was_heard_the_first_calls_are_marked_for_a_memory():
    first = play(B, A, turns=2, blind=True).rollout
    gone = play(D, D).rollout  # imagined, taken back and made
    kept = play(A, C, most=1).rollout  # C was said because of the prediction for A
    quiet = play(NO_CALL, blind=True).rollout

    def marks(*rollouts: Rollout, tools: Any = None) -> list[list[bool]]:
        marked = mark_first_calls(mark_imagined(RolloutGroup(task_id="chore", rollouts=rollouts)), tools)
        return [[turn.asked for turn in rollout.turns] for rollout in marked.rollouts]

    assert marks(first, gone, kept, quiet) == [[True, False], [True], [False, False], [False]]
    assert marks(first, gone, tools=("look",)) == [[False, False], [False]]
    asked = play(A, blind=True).rollout
    assert marks(first, asked, kept) == [[False, False], [True], [False, False]], "one that was asked about is enough"


@pytest.mark.parametrize(("source", "filled"), [("memory", True), ("world_model", False)])
def test_a_memory_fills_in_groups_of_two_although_nothing_imagined_is_kept(source: str, filled: bool):
    settings = ["rollout.group_size=2", "rollout.prompts=2", "policy.frozen=true"]
    settings += ["world_model.weight=0"] if source == "memory" else []
    trainer = small_trainer(f"lookahead_source={source}", *settings, environment=fussy_calls)
    groups = trainer.draw(trainer.plan(0), 0)
    unmarked = [mark_imagined(replace_marks(group)) for group in groups]
    assert (groups != unmarked) == filled
    if filled:
        trainer.store_replies(groups)
        assert len(trainer.backend.reply_store) > 0
        assert trainer.step(1)["memory_size"] > 0, "a frozen policy without a world model goes on"


def test_what_a_group_has_imagined_is_marked_in_training():
    trainer = small_trainer("seed=3", environment=fussy_calls)
    groups = trainer.draw(trainer.plan(0), 0)
    assert groups == [mark_imagined(replace_marks(group)) for group in groups]
    assert any(turn.asked for group in groups for rollout in group.rollouts for turn in rollout.turns)


def replace_marks(group: RolloutGroup) -> RolloutGroup:
    """The group with nothing marked."""
    return replace(
        group,
        rollouts=tuple(
            replace(rollout, turns=tuple(replace(turn, asked=False) for turn in rollout.turns))
            for rollout in group.rollouts
        ),
    )


# --- which calls, in which environments ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tools", "imagined"),
    [(None, [True, True]), (("say",), [True, False]), (("look",), [False, True]), ((), [False, False])],
)
def test_only_calls_of_the_named_tools_are_imagined(tools, imagined: list[bool]):
    for name, expected in zip(("say", "look"), imagined, strict=True):
        played = play(say("x", name), D, tools=tools, most=1)
        assert bool(played.asked) == expected
        assert played.turns == ([(say("x", name), True), (D, False)] if expected else [(say("x", name), False)])


class Queryless(OracleCodes):
    """Oracle codes as somebody writes them who never heard of look-ahead."""

    lookahead_query = None  # type: ignore[assignment]
    predicted_tools = None  # type: ignore[assignment]

    def __getattribute__(self, name: str) -> Any:
        if name in ("lookahead_query", "predicted_tools"):
            raise AttributeError(name)
        return super().__getattribute__(name)


class Lockers(ToolEnvironment):
    """A new small world: every locker has a number, told after the only try."""

    def tasks(self, split: str) -> list[Chore]:
        return [Chore(id=f"{split}-{number}") for number in range(3)]

    def start(self, task: Chore) -> list[Message]:
        self.number, self.tried = str(len(task.id)), ""
        return [Message(role="user", content="Open the locker.")]

    @tool
    def turn_dial(self, number: str) -> str:
        """Turn the dial. There is one try only.

        number: where to
        """
        self.tried = number
        return "Open." if self.reward() else f"Shut; it was {self.number}."

    def finished(self) -> bool:
        return bool(self.tried)

    def reward(self) -> float:
        return float(self.tried == self.number)


def safes(tmp_path: Path, monkeypatch) -> Any:
    """README's example, without a question of its own."""
    import importlib
    import re

    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    (tmp_path / "readme_world.py").write_text(re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "readme_world", raising=False)
    return type("Safes", (importlib.import_module("readme_world").Safes,), {"lookahead_query": None})


@pytest.mark.parametrize("world", ["safes", "oracle-codes", "lockers"])
def test_an_environment_that_says_nothing_of_look_ahead_has_it(world: str, tmp_path: Path, monkeypatch):
    environment: Any = {"oracle-codes": Queryless, "lockers": Lockers}.get(world) or safes(tmp_path, monkeypatch)
    made = environment()
    assert not isinstance(made, OffersLookahead)
    assert not isinstance(made, NamesPredictedTools)
    name, wrong, right = {
        "safes": ("open_safe", {"dial": "south", "key": "tin"}, {"dial": "north", "key": "iron"}),
        "oracle-codes": (
            "open_door",
            {"words": ["ash", "dusk"]},
            {"words": list(OracleCodes().tasks("train")[0].code)},
        ),
        "lockers": ("turn_dial", {"number": "1"}, {"number": "7"}),
    }[world]
    guess, answer = (format_tool_call(ToolCall(name=name, arguments=arguments)) for arguments in (wrong, right))
    codec, world_model = ChatCodec(tokenizer(), made.tools()), WorldModelCodec(tokenizer())
    config = small_config()
    lookahead = make_lookahead(
        config, environment, world_model, lambda prompts: [world_model.target_ids(f"It was {right}.") for _ in prompts]
    )
    assert lookahead is not None
    assert (lookahead.proposed_by, lookahead.tools) == ("policy", None)
    runner = Runner(environment, codec, config=RunnerConfig(max_turns=2), lookahead=lookahead)
    request = RolloutRequest(task=made.tasks("train")[0], seeds=(0,))
    (rollout,) = runner.run([request], Script(codec, (guess, answer)))
    assert [(turn.action, turn.predicted) for turn in rollout.turns] == [(guess, True), (answer, False)]
    assert (rollout.stop, rollout.reward) == (StopReason.DONE, 1.0)


@pytest.mark.parametrize(
    ("predict", "tools"),
    [
        ("default", {"make_phone_call"}),
        ("none", {"make_phone_call"}),
        ("auth_info_form", {"auth_info_form"}),
        ("all", None),
    ],
)
def test_an_untrained_world_model_is_asked_about_the_calls_of_a_trained_one(predict: str, tools: set[str] | None):
    config = small_config(f"world_model.predict={predict}")
    lookahead = make_lookahead(config, PhoneCalls, WorldModelCodec(tokenizer()), lambda prompts: [])
    assert lookahead is not None
    assert lookahead.tools == tools


@pytest.mark.parametrize("environment", [Queryless, Lockers])
def test_a_step_of_training_runs_where_nothing_is_said_of_look_ahead(environment: Any):
    trainer = small_trainer("env=oracle-codes", environment=environment)
    first, second = trainer.step(0), trainer.step(1)
    assert first["stops"].get("environment_error", 0) == 0
    assert first["drafts"] == 0, "nobody knows yet which calls end a task"
    if environment is Queryless:  # whose tools the embedded base can call
        assert trainer.backend.ending_tools.names == ["open_door"]
        assert second["drafts"] > 0
    evaluated = trainer.evaluate()
    assert evaluated["eval/val/drafts_informative"] is None


# --- settings --------------------------------------------------------------------------------------------------


def older(tmp_path: Path, *, lookahead: str, only: str = "false") -> Path:
    """The config of a run from before the policy could propose: no `imagine`, no `policy.frozen`."""
    lines = []
    for line in to_yaml(load_config(["preset=tiny", "steps=7"])).splitlines():
        if line.startswith("lookahead:"):
            line = f"lookahead: {lookahead}"
        if line.startswith("  frozen:"):
            continue
        lines.append(line)
        if line.startswith("world_model:"):
            lines.append(f"  only: {only}")
    start = lines.index("imagine:")
    end = next(place for place in range(start + 1, len(lines)) if not lines[place].startswith(" "))
    path = tmp_path / "config.yaml"
    path.write_text("\n".join(lines[:start] + lines[end:]) + "\n")
    return path


@pytest.mark.parametrize("known_only", [False, True])
def test_a_run_of_an_older_version_is_read_as_what_it_was(tmp_path: Path, known_only: bool):
    read = partial(from_yaml, known_only=known_only)
    first = read(older(tmp_path, lookahead="true"))
    assert (first.lookahead, first.older, flatten(first)["lookahead"], first.steps) == (
        "policy",
        {"lookahead": "environment"},
        "environment",
        7,
    )
    assert read(older(tmp_path, lookahead="false")).lookahead == "off"
    assert read(tmp_path / "config.yaml").policy.frozen is False
    assert read(older(tmp_path, lookahead="true", only="true")).policy.frozen is True
    path = tmp_path / "now.yaml"
    for value in ("policy", "off"):
        path.write_text(to_yaml(load_config(["preset=tiny", f"lookahead={value}"])))
        assert read(path).lookahead == value
    for rest in ("", "lookahead_source: world_model\nimagine: {most: 1}\n"):
        path.write_text(f"lookahead: true\n{rest}")
        assert read(path).lookahead == "policy", "written today, by hand"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("true", "policy"),
        ("True", "policy"),
        ("policy", "policy"),
        ("false", "off"),
        ("off", "off"),
    ],
)
def test_what_is_typed_for_lookahead(typed: str, meant: str):
    assert load_config([f"lookahead={typed}"]).lookahead == meant


def test_policy_frozen_has_an_older_name():
    assert load_config(["world_model.only=true"]) == load_config(["policy.frozen=true"])
    assert load_config(["world_model.only=true"]).policy.frozen is True


def test_tools_that_may_be_imagined_are_checked_before_a_run():
    with pytest.raises(Exception, match=r"world_model\.predict=open_dor: .* no tool 'open_dor'; .* is open_door"):
        small_trainer("env=oracle-codes", "world_model.predict=open_dor", environment=OracleCodes)
    lookaheads = [
        small_trainer("env=oracle-codes", *settings, environment=OracleCodes).backend.agent.lookahead
        for settings in ((), ("world_model.predict=ask_oracle",))
    ]
    assert [each.tools for each in lookaheads] == [{"open_door"}, {"ask_oracle"}]


# --- evaluation ------------------------------------------------------------------------------------------------


def evaluated(environment: Any, *settings: str, drafted: ToolCall | None = None) -> dict[str, Any]:
    """Metrics of val where sighted rollouts succeed and half of the blind ones do; `drafted` is imagined in half."""
    numbers = itertools.count()

    def roll_out(requests: Sequence[RolloutRequest], *, temperature: float) -> list[Rollout]:
        assert temperature == 0
        rollouts = []
        for request, number in zip(requests, numbers, strict=False):
            reward = float(number % 2) if not request.look_ahead else 1.0
            opening = tuple(environment().reset(request.task))
            turn = replace(play(A, blind=True).rollout.turns[0], call=drafted, predicted=True)
            turns = (turn,) if drafted and number % 2 and request.look_ahead else ()
            ahead = request.look_ahead
            rollout = replace(play(A, blind=True).rollout, look_ahead=ahead, reward=reward, opening=opening)
            gone = (replace(turn, taken_back=True),) if drafted and request.look_ahead else ()
            rollouts.append(replace(rollout, turns=turns, taken_back=gone))
        return rollouts

    config = small_config("env=oracle-codes", "eval.tasks=4", *settings)
    row, _ = evaluate_splits(config, environment, ("val",), roll_out)
    return {name.removeprefix("eval/val/"): value for name, value in row.items()}


class Eager(OracleCodes):
    """Asks at once."""

    def lookahead_query(self, transcript: Sequence[Message]) -> ToolCall | None:
        return ToolCall(name="open_door", arguments={"words": []})


def test_evaluation_tells_what_the_policy_does_sighted_and_blind_and_what_it_imagines():
    asked = ToolCall(name="open_door", arguments={"words": []})
    row = evaluated(Eager, drafted=asked)
    assert (row["success"], row["success_blind"]) == (1.0, 0.5)
    assert (row["drafts"], row["drafts_kept"]) == (1.5, pytest.approx(1 / 3))
    assert row["drafts_informative"] == 0.5
    assert evaluated(Eager, drafted=replace(asked, arguments={"words": ["ash"]}))["drafts_informative"] == 0.0
    assert evaluated(Queryless, drafted=asked)["drafts_informative"] is None
    none = evaluated(Eager)
    assert (none["drafts"], none["drafts_informative"]) == (0.0, 0.0)
    assert "drafts_kept" not in none
    off = evaluated(Eager, "lookahead=off")
    assert off["success"] == 0.5
    assert {"success_blind", "drafts", "drafts_informative"}.isdisjoint(off)


def test_a_real_evaluation_tells_it_too():
    row = small_trainer("eval.tasks=4").evaluate()
    for name in ("success", "success_blind", "drafts", "drafts_informative"):
        assert row[f"eval/val/{name}"] >= 0
    assert row["eval/val/drafts"] > 0


def test_blind_rollouts_have_no_drafts():
    blind = play(A, blind=True).rollout
    assert draft_metrics([blind]) == {}
    assert draft_metrics([blind, play(A, B, most=1).rollout, play(A, A).rollout]) == {"drafts": 1.0, "drafts_kept": 0.5}
    assert informative_drafts(small_config(), Queryless, [blind]) is None
