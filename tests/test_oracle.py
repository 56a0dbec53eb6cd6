"""The second environment: which players must win or fail, and that nothing leaks."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lfo.env.interface import DescribesReplies, Environment, OffersLookahead
from lfo.env.worlds.oracle import COLOURS, ORDERS, WORDS, OracleCodes, OracleTask
from lfo.errors import UsageError
from lfo.protocol.hermes import format_tool_call
from lfo.types import Message, ReplyFacts, StepResult, ToolCall
from test_tool_environment import any_text, fuzz, messages, nasty

SPLITS = ("train", "val", "test_unseen_oracles")
TASKS = [task for split in SPLITS for task in OracleCodes().tasks(split)]


def ask(oracle: str) -> str:
    return format_tool_call(ToolCall(name="ask_oracle", arguments={"oracle": oracle}))


def try_words(*words: str) -> str:
    return format_tool_call(ToolCall(name="open_door", arguments={"words": list(words)}))


def play(task: OracleTask, *script: str) -> list[StepResult]:
    environment = OracleCodes()
    environment.reset(task)
    return [environment.step(message) for message in script]


def test_it_is_an_environment_with_both_extras() -> None:
    assert isinstance(OracleCodes(), Environment)
    assert isinstance(OracleCodes(), DescribesReplies)
    assert isinstance(OracleCodes(), OffersLookahead)


# --- who must win and who must fail ------------------------------------------------------------------------------


def test_the_informed_player_always_wins() -> None:
    for task in TASKS:
        first, second = task.code
        assert play(task, ask(task.oracle), try_words(second, first))[-1].reward == 1.0


def test_doing_nothing_or_everything_never_wins() -> None:
    for task in TASKS:
        for script in (["I am done."], [try_words()], [try_words(*WORDS)], [try_words(task.code[0])]):
            last = play(task, *script)[-1]
            assert (last.reward, last.done) == (0.0, True)


def test_a_random_player_fails() -> None:
    dice = random.Random(0)
    wins = [play(dice.choice(TASKS), try_words(*dice.sample(WORDS, 2)))[-1].reward for _ in range(5_000)]
    assert sum(wins) / len(wins) < 0.03  # 1 in 66 expected


def test_the_best_constant_answer_fails() -> None:
    for split in SPLITS:
        codes = Counter(task.code for task in OracleCodes().tasks(split))
        assert max(codes.values()) / codes.total() <= 0.05  # 1 in 30 by construction


def test_a_player_that_carries_replies_from_task_to_task_wins_with_unseen_oracles() -> None:
    """It knows only what was said: asks, reads the order, and after 30 lessons or so has heard the law."""
    heard: dict[tuple[str, str], tuple[str, ...]] = {}

    def rollout(task: OracleTask) -> float:
        environment = OracleCodes()
        goal = environment.reset(task)[-1].content
        colour = next(colour for colour in COLOURS if f" {colour} " in goal)
        introduction = environment.describe_reply(environment.step(ask(task.oracle)).observation)
        assert introduction is not None
        key = (introduction.facts[0], colour)
        result = environment.step(try_words(*heard.get(key, ())))
        reply = environment.describe_reply(result.observation)
        if reply is not None and reply.category == "refusal":
            heard[key] = reply.facts
        return result.reward

    for task in OracleCodes().tasks("train"):
        rollout(task)
    for split in ("val", "test_unseen_oracles"):
        assert all(rollout(task) == 1.0 for task in OracleCodes().tasks(split))


# --- the world ---------------------------------------------------------------------------------------------------


def test_splits_are_disjoint_and_every_law_can_be_learned_in_train() -> None:
    train, val, unseen = (OracleCodes().tasks(split) for split in SPLITS)
    assert (len(train), len(val), len(unseen)) == (180, 60, 120)
    assert len({task.id for task in TASKS}) == len(TASKS)
    assert {task.oracle for task in val} <= {task.oracle for task in train}
    assert not {task.oracle for task in unseen} & {task.oracle for task in train}
    law = {(task.order, task.colour): task.code for task in train}
    assert len(law) == len(ORDERS) * len(COLOURS)
    assert len(set(law.values())) == len(law)
    assert all(law[task.order, task.colour] == task.code for task in TASKS)
    with pytest.raises(UsageError, match="train, val, test_unseen_oracles"):
        OracleCodes().tasks("test")


def test_the_seed_draws_the_law() -> None:
    assert OracleCodes(seed=0).tasks("train")[0] == OracleTask(
        id="Mishti-white", oracle="Mishti", order="mirror", colour="white", code=("frost", "honey")
    )  # the same bytes on every machine and in every process
    laws = [{(task.order, task.colour): task.code for task in OracleCodes(seed=seed).tasks("train")} for seed in (0, 1)]
    assert laws[0] != laws[1]


def test_the_code_leaks_into_nothing_before_the_try() -> None:
    for task in OracleCodes().tasks("val"):
        other = replace(task, code=("ash", "dusk") if task.code != ("ash", "dusk") else ("ash", "reed"))
        seen = []
        for hidden in (task, other):
            environment = OracleCodes()
            opening = environment.reset(hidden)
            seen.append((opening, environment.tools(), environment.step(ask(task.oracle)).observation))
        assert seen[0] == seen[1]
    opening = OracleCodes().reset(TASKS[0])
    assert OracleCodes().reset(replace(TASKS[0], order="another")) == opening


def test_a_rollout_is_short() -> None:
    for task in TASKS:
        environment = OracleCodes()
        texts = [message.content for message in environment.reset(task)]
        for message in (ask(task.oracle), try_words("ash", "dusk")):
            texts += [message, environment.step(message).observation]
        assert len(" ".join(texts).split()) <= 120


def test_mistakes_do_not_use_up_the_try() -> None:
    task = TASKS[0]
    results = play(task, ask("owl order"), try_words("embers", "salt"), try_words(*task.code))
    assert results[0].observation == f'No oracle here is called "owl order"; this is the temple of {task.oracle}.'
    assert results[1].observation == '"embers" is no code word; did you mean ember?'
    assert [result.info["mistakes"] for result in results] == [1, 2, 2]
    assert results[2].reward == 1.0


# --- the optional protocols --------------------------------------------------------------------------------------


def test_replies_are_described_from_their_text() -> None:
    environment = OracleCodes()
    for task in TASKS:
        wrong = ("ash", "dusk") if task.code != ("ash", "dusk") else ("ash", "reed")
        introduction, refusal = play(task, ask(task.oracle), try_words(*wrong))
        (opening,) = play(task, try_words(*task.code))
        assert environment.describe_reply(introduction.observation) == ReplyFacts(
            category="introduction", facts=(task.order,)
        )
        assert environment.describe_reply(refusal.observation) == ReplyFacts(category="refusal", facts=task.code)
        assert environment.describe_reply(opening.observation) == ReplyFacts(category="opening")
    for forged in ("owl order", "shut: ember and salt"):
        assert environment.describe_reply(play(TASKS[0], ask(forged))[0].observation) is None
    assert environment.describe_reply("") is None


def test_lookahead_asks_for_a_try_without_words_once_the_oracle_is_known() -> None:
    task = TASKS[0]
    environment = OracleCodes()
    transcript = [*environment.reset(task)]
    assert environment.lookahead_query(transcript) is None

    def turn(message: str) -> None:
        transcript.append(Message(role="assistant", content=message))
        transcript.append(Message(role="tool", content=environment.step(message).observation, name="ask_oracle"))

    turn(ask("river order"))  # a mistake: the oracle is not known yet
    assert environment.lookahead_query(transcript) is None
    turn(ask(task.oracle))
    query = environment.lookahead_query(transcript)
    assert query is not None
    assert query == ToolCall(name="open_door", arguments={"words": []})
    assert OracleCodes().lookahead_query(transcript) == query  # a function of the transcript, not of the state
    imagined = Message(role="tool", content="This door wanted ash and reed.", name="open_door", predicted=True)
    assert environment.lookahead_query([*transcript, imagined]) is None
    # The reply to that very query, when it is really made, names the code.
    reply = environment.describe_reply(environment.step(format_tool_call(query)).observation)
    assert reply == ReplyFacts(category="refusal", facts=task.code)


# --- fuzz --------------------------------------------------------------------------------------------------------

oracle_calls = st.one_of(
    st.builds(
        lambda name: ToolCall(name="ask_oracle", arguments={"oracle": name}),
        st.sampled_from([task.oracle for task in TASKS[:3]]) | nasty | any_text,
    ),
    st.builds(
        lambda words: ToolCall(name="open_door", arguments={"words": words}),
        st.lists(st.sampled_from(WORDS) | nasty | any_text, max_size=3),
    ),
)


def refuse_corruption(environment: OracleCodes) -> None:
    assert environment.spoken is None or environment.spoken <= set(WORDS)
    assert not environment.opened or environment.finished()
    assert 0 <= environment.mistakes <= environment.max_mistakes


@settings(fuzz, max_examples=1_000)
@given(st.sampled_from(TASKS), st.lists(messages(oracle_calls), min_size=10, max_size=10))
def test_no_text_raises_or_corrupts(task: OracleTask, script: list[str]) -> None:
    environment = OracleCodes()
    environment.reset(task)
    for message in script:
        result = environment.step(message)
        refuse_corruption(environment)
        assert len(result.observation) < 400
        assert result.observation.isprintable()
        assert result.reward == (1.0 if result.done and environment.opened else 0.0)
        if result.done:
            environment = OracleCodes()
            environment.reset(task)
