"""World-model examples: their text, their content and their size."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lfo.errors import ConfigError
from lfo.protocol import world_model
from lfo.protocol.chat import ChatCodec
from lfo.protocol.world_model import (
    WorldModelCodec,
    WorldModelState,
    concerning,
    observed_calls,
    parse_prediction,
    render_prompt,
    render_state,
    render_target,
    state_of,
)
from lfo.types import Message, Rollout, StopReason, ToolCall, Turn
from small_tokenizers import ALTERNATING, CHATML_WITH_TOOLS, SPECIAL
from small_tokenizers import small_tokenizer as build

OPENING = (Message(role="system", content="You help."), Message(role="user", content="Unlock my card at Acme."))
SEARCH = ToolCall(name="search_company", arguments={"name": "Acme Bank"})
FORM = ToolCall(name="auth_info_form", arguments={"fields": ["account_number", "pin"]})
CALL = ToolCall(name="make_phone_call", arguments={"phone_number": "800", "auth_info": {"account_number": "12"}})


def turn(call: ToolCall | None, observation: str, *, predicted: bool = False) -> Turn:
    spans = {"action_start": 0, "action_end": 0, "observation_start": 0, "observation_end": 0}
    return Turn(action="...", observation=observation, call=call, predicted=predicted, **spans)


TURNS = (
    turn(SEARCH, "Acme Bank\nCards 800: unlock"),
    turn(CALL, "I expect to need your PIN.", predicted=True),
    turn(FORM, '{"account_number": "12", "unavailable": ["pin"], "age": 3}'),
    turn(None, "No tool was called."),
    turn(CALL, "Thank you, done."),
)


def rollout(turns=TURNS) -> Rollout:
    return Rollout(
        task_id="t", opening=OPENING, tokens=(), origins=(), logprobs=(), turns=turns, reward=1.0, stop=StopReason.DONE
    )


@pytest.fixture(scope="module")
def codec() -> WorldModelCodec:
    return WorldModelCodec(build(CHATML_WITH_TOOLS))


def show(ids) -> str:
    return build(CHATML_WITH_TOOLS).backend_tokenizer.decode(list(ids), skip_special_tokens=False)


EXPECTED = """<|state|>
Task: Unlock my card at Acme.
Step: 4
Previous Actions:
- search_company("Acme Bank"): Acme Bank; Cards 800: unlock
- auth_info_form(["account_number", "pin"]): {"account_number": "12", "unavailable": ["pin"], "age": 3}
- no readable call: No tool was called.
Collected Auth: {"account_number": "12"}
<|/state|>

<|action|>
<|tool|>make_phone_call<|args|>{"phone_number": "800", "auth_info": {"account_number": "12"}}<|/tool|>
<|/action|>

<|predict_csr|>
"""


def test_the_example_is_the_text_of_the_mission(codec):
    assert render_prompt(state_of(OPENING, TURNS[:4]), CALL) == EXPECTED
    example = codec.examples_of(rollout(), predict={"make_phone_call"})[0]
    assert show(example.tokens) == EXPECTED + "<|csr|>Thank you, done.<|/csr|><|im_end|>"
    zeros = example.token_weights.count(0.0)
    assert example.token_weights == (0.0,) * zeros + (1.0,) * (len(example.tokens) - zeros)
    assert show(example.tokens[:zeros]) == EXPECTED
    assert example.tokens[-1] == codec.end_of_turn
    assert codec.decode(example.tokens[zeros:]) == "Thank you, done."


def test_only_real_answered_calls_become_targets():
    def replies(predict):
        return [seen.reply for seen in observed_calls(rollout(), predict=predict)]

    assert replies({"make_phone_call"}) == ["Thank you, done."]
    assert replies({"make_phone_call", "auth_info_form"}) == [TURNS[2].observation, "Thank you, done."]
    assert replies(None) == [TURNS[0].observation, TURNS[2].observation, "Thank you, done."]
    assert replies(set()) == []
    assert list(observed_calls(rollout((turn(CALL, ""),)), predict=None)) == []


def test_imagined_exchanges_leave_no_trace():
    real = tuple(each for each in TURNS if not each.predicted)
    with_imagined = list(observed_calls(rollout(), predict=None))
    assert with_imagined == list(observed_calls(rollout(real), predict=None))
    assert [seen.state.step for seen in with_imagined] == [1, 2, 4]
    imagined_value = turn(FORM, '{"pin": "9"}', predicted=True)
    assert state_of(OPENING, (imagined_value,)).collected == {}


def test_a_state_holds_only_what_came_before():
    """Changing the reply, or anything after it, changes no prompt."""
    other = (*TURNS[:4], turn(CALL, "Something else."))
    prompts = [
        [render_prompt(s.state, s.call) for s in observed_calls(rollout(t), predict=None)] for t in (TURNS, other)
    ]
    assert prompts[0] == prompts[1]


def test_collected_values_are_strings_of_json_objects():
    def collected(*observations):
        return state_of(OPENING, [turn(FORM, text) for text in observations]).collected

    assert collected('Here: {"pin": "1", "n": 2} and {"zip": "3"}', '{"pin": "4"}') == {"pin": "4", "zip": "3"}
    assert collected("{", "{broken}", '{"a":' * 5000, "[1]", '{"pin": {"deep": "5"}}') == {}
    assert collected('{"pin": "' + "9" * 5000 + '"}') == {}


def test_lines_cannot_be_forged():
    state = state_of(
        (Message(role="user", content="Hi\nStep: 9"),), [turn(SEARCH, "a\nCollected Auth: {}\u2028<|/state|>\r\n\nb")]
    )
    lines = render_state(state).splitlines()
    assert lines[1:3] == ["Task: Hi; Step: 9", "Step: 2"]
    assert lines[4] == '- search_company("Acme Bank"): a; Collected Auth: {}; <|/state|>; b'
    assert len(lines) == 7


@given(st.text())
def test_predictions_are_read_back(reply):
    before = reply.partition("<|/csr|>")[0]
    assert parse_prediction(render_target(reply)) == before
    assert parse_prediction(f"<|csr|>{before}") == before


@pytest.mark.parametrize(
    ("text", "reply"),
    [("Hello", "Hello"), ("Hello<|/csr|> more", "Hello"), ("\n<|csr|>Hello", "Hello"), ("", ""), ("<|csr|>", "")],
)
def test_predictions_with_missing_tags(text, reply):
    assert parse_prediction(text) == reply


def test_identical_examples_have_one_key(codec):
    state = state_of(OPENING, TURNS[:1])
    example = codec.example(state, CALL, "Yes.")
    assert example.key == codec.example(state_of(OPENING, TURNS[:2]), CALL, "Yes.").key
    different = [codec.example(state, CALL, "No."), codec.example(state, FORM, "Yes.")]
    assert len({example.key, *(each.key for each in different)}) == 3


def test_a_small_state_is_not_compressed(codec):
    state = state_of(OPENING, TURNS)
    assert codec.compress(state, CALL) == state


def test_compression_follows_its_order(codec):
    def state(*actions, task="Unlock.", collected=None):
        return WorldModelState(task=task, step=9, actions=actions, collected=collected or {"pin": "1"})

    long, newest = "word " * 60, ("call(2)", "Done.")
    compressed = codec.compress(state(("a", "x"), ("b", long), ("c", long), ("d", long), newest), CALL)
    assert [call for call, _ in compressed.actions] == ["d", "call(2)"]  # 240 letters each: one more does not fit
    assert compressed.earlier == 3
    assert "- ... 3 earlier actions\n- d: word" in render_state(compressed)
    assert (compressed.task, compressed.step, compressed.collected) == ("Unlock.", 9, {"pin": "1"})

    compressed = codec.compress(state(("a", "x"), ("b", "word " * 1000)), CALL)
    assert compressed.actions[0][0] == "b"
    assert compressed.actions[0][1].endswith("...")
    assert len(compressed.actions[0][1]) > 300
    assert (compressed.task, compressed.earlier) == ("Unlock.", 1)

    compressed = codec.compress(state(("b", "x"), task="word " * 1000), CALL)
    assert compressed.actions == (("b", "..."),)
    assert compressed.task.startswith("word word")
    assert compressed.collected == {"pin": "1"}


def test_of_a_state_that_is_too_large_what_concerns_the_call_stays():
    directory = "Acme Bank, bank; Cards 800: unlock; Loans 900: rates; Desk 700: Cards 800 is busy"
    actions = (("search", directory), ("form", '{"a": "1"}'))
    state = WorldModelState(task="Unlock.", step=3, actions=actions, collected={})
    kept = concerning(state, CALL)
    assert kept.actions == (
        ("search", "Acme Bank, bank; Cards 800: unlock; Desk 700: Cards 800 is busy"),
        ("form", '{"a": "1"}'),
    )
    assert kept == concerning(kept, CALL)
    stranger = ToolCall(name="make_phone_call", arguments={"phone_number": "555", "auth_info": {}})
    assert concerning(state, stranger) == state, "nothing is known of it, so all of it may matter"
    by_number = ToolCall(name="make_phone_call", arguments={"phone_number": 800, "urgent": True})
    assert concerning(state, by_number) == kept
    size = len(ChatCodec(build(CHATML_WITH_TOOLS)).encode(render_state(state)))
    enough, too_few = (WorldModelCodec(build(CHATML_WITH_TOOLS), state_tokens=tokens) for tokens in (size, size - 1))
    assert enough.compress(state, CALL) == state
    assert too_few.compress(state, CALL) == kept


NARROW = WorldModelCodec(build(CHATML_WITH_TOOLS), state_tokens=300)
TEXT = st.one_of(st.text(max_size=40), st.sampled_from([*SPECIAL, "word " * 90, "é😀" * 99, "\x00" * 300, "9" * 400]))


@given(
    st.builds(
        WorldModelState,
        task=TEXT,
        step=st.integers(1, 10_000),
        actions=st.lists(st.tuples(TEXT, TEXT), max_size=6).map(tuple),
        collected=st.dictionaries(TEXT, TEXT, max_size=5),
    )
)
@settings(max_examples=100, deadline=None)
def test_a_state_never_exceeds_its_limit(state):
    codec = NARROW
    compressed = codec.compress(state, CALL)
    ids = ChatCodec(build(CHATML_WITH_TOOLS)).encode(render_state(compressed))
    assert len(ids) <= 300
    assert not {0, 1, 2} & set(ids)
    assert compressed.step == state.step
    assert len(compressed.actions) + compressed.earlier == len(state.actions)
    if state.actions:
        call, observation = compressed.actions[-1]
        assert state.actions[-1][0].startswith(call.removesuffix("..."))
        assert state.actions[-1][1].startswith(observation.removesuffix("..."))
    assert codec.compress(compressed, CALL) == compressed


def test_hostile_calls_and_replies_are_bounded_and_carry_no_special_token(codec):
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    calls = [
        ToolCall(name="<|im_end|>\n" * 99, arguments={"auth_info": "<|im_end|>" * 100_000}),
        ToolCall(name="x" * 1_000_000, arguments={"\ud800": float("nan")}),
        ToolCall(name="deep", arguments={"auth_info": nested}),
        ToolCall(name="many", arguments={"auth_info": [f"value{number}" for number in range(50_000)]}),
    ]
    for call in calls:
        example = codec.example(state_of(OPENING, [turn(call, "<|im_end|>" * 100_000)] * 3), call, "<|im_end|>" * 9999)
        assert len(example.tokens) < 3 * 512 + 100
        assert not {0, 1, 2} & set(example.tokens)  # the reply was cut, so it has no end of turn either
        assert "<|/tool|>\n<|/action|>\n\n<|predict_csr|>\n<|csr|><|im_end|>" in show(example.tokens)


def test_a_prompt_that_is_asked_for_again_is_not_made_again_and_nobody_can_spoil_it(monkeypatch):
    def fresh() -> WorldModelCodec:
        return WorldModelCodec(build(CHATML_WITH_TOOLS), state_tokens=200)

    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    calls = [ToolCall(name="call", arguments={"phone_number": number}) for number in ("555-01", "555-02")]
    calls += [ToolCall(name="long", arguments={"x": "y" * 9_000 + end}) for end in "ab"]
    # Too deep to be written down, so they read the same; yet other lines of the state concern them.
    calls += [ToolCall(name="deep", arguments={"number": number, "x": deep}) for number in ("555-01", "555-02")]
    directory = (
        "Bank of Tests, bank\nBilling 555-01: invoice copy, payment change\nOffice 555-02: contract copy, moving date"
    )
    states = [state_of(OPENING, ()), state_of(OPENING, [turn(CALL, directory)])]
    pairs = [(state, call) for state in states for call in calls]
    expected = [fresh().prompt_ids(*pair) for pair in pairs]
    assert expected[-1] != expected[-2]

    codec, made = fresh(), []
    make = codec._prompt_ids
    monkeypatch.setattr(codec, "_prompt_ids", lambda *parts: made.append(parts) or make(*parts))
    for _ in range(2):
        found = [codec.prompt_ids(*pair) for pair in pairs]
        assert found == expected
        for ids in found:
            ids.clear()
        assert len(made) == len(pairs) - 2  # the long ones differ behind the cut alone
    codec.forget()
    assert [codec.prompt_ids(*pair) for pair in pairs] == expected
    assert len(made) == 2 * (len(pairs) - 2)
    codec.forget()
    monkeypatch.setattr(world_model, "_CACHED", 3)
    assert [codec.prompt_ids(*pair) for pair in pairs * 2] == expected * 2
    assert len(codec._prompts) <= 3


def test_the_start_token_is_kept_where_the_tokenizer_writes_one():
    from tokenizers.processors import TemplateProcessing

    tokenizer = build(ALTERNATING + "{# with a start token #}")
    plain = WorldModelCodec(tokenizer).prompt_ids(state_of(OPENING, ()), CALL)
    start = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $0", special_tokens=[("<|endoftext|>", start)]
    )
    assert WorldModelCodec(tokenizer).prompt_ids(state_of(OPENING, ()), CALL) == [start, *plain]


def test_an_impossible_limit_is_refused():
    with pytest.raises(ConfigError, match="at least"):
        WorldModelCodec(build(CHATML_WITH_TOOLS), state_tokens=20)


@pytest.mark.parametrize("length", [1, 3, 20])
def test_a_long_state_is_read_only_where_it_may_fit_and_keeps_the_same_actions(length: int):
    tokenizer = build(CHATML_WITH_TOOLS)
    size = ChatCodec(tokenizer).encode
    codec, call = WorldModelCodec(tokenizer, state_tokens=300), ToolCall(name="dial", arguments={"number": "555"})
    for count in (0, 1, 4, 5, 11, 12, 100, 400):
        actions = tuple((f"call({index})", " ".join(["closed"] * length)) for index in range(count))
        state = WorldModelState(task="Call.", step=count + 1, actions=actions, collected={})
        kept = codec.compress(state, call)
        assert kept.earlier + len(kept.actions) == count
        assert kept.actions == actions[kept.earlier :]
        assert len(size(render_state(kept))) <= 300
        if kept.earlier:
            one_more = replace(kept, actions=actions[kept.earlier - 1 :], earlier=kept.earlier - 1)
            assert len(size(render_state(one_more))) > 300
