"""The phone-call world from outside: replies of tools, rewards, leaks, and that no text breaks it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lfo.env.interface import DescribesReplies, Environment, OffersLookahead
from lfo.env.worlds.oracle import OracleCodes
from lfo.env.worlds.phone import reps
from lfo.env.worlds.phone.environment import PhoneCalls, lookahead_query
from lfo.env.worlds.phone.fields import ALTERNATIVE, FIELDS, REFERENCE
from lfo.env.worlds.phone.generator import generate
from lfo.env.worlds.phone.players import informed, informed_form
from lfo.env.worlds.phone.rules import law, stand_ins
from lfo.env.worlds.phone.tasks import LEVEL, Task
from lfo.env.worlds.phone.world import company
from lfo.errors import UsageError
from lfo.protocol.hermes import MAX_MESSAGE_CHARS, format_tool_call
from lfo.types import Message, StepResult, ToolCall

TASKS = {level: PhoneCalls(levels=(level,)).stream("train", 3).take(40) for level in LEVEL}


def call(name: str, /, **arguments: object) -> str:
    return format_tool_call(ToolCall(name=name, arguments=arguments))


def start(task: Task) -> PhoneCalls:
    environment = PhoneCalls()
    environment.reset(task)
    return environment


def number_of(task: Task, place: int = 0) -> str:
    return company(0, task.company).department(task.errands[place].kind).number


def right_values(task: Task) -> dict[str, str]:
    return {name: task.profile[name] for name in informed_form(task) if name in task.profile}


def phone(environment: PhoneCalls, number: str, values: dict[str, str]) -> StepResult:
    return environment.step(call("make_phone_call", phone_number=number, auth_info=values))


# --- what an environment is ------------------------------------------------------------------------------------------


def test_it_is_an_environment_with_both_extras() -> None:
    environment = PhoneCalls()
    assert isinstance(environment, Environment)
    assert isinstance(environment, DescribesReplies)
    assert isinstance(environment, OffersLookahead)
    assert [each["function"]["name"] for each in environment.tools()] == [
        "search_company",
        "auth_info_form",
        "make_phone_call",
    ]


def test_it_is_single_use() -> None:
    environment = start(TASKS[1][0])
    with pytest.raises(UsageError):
        environment.reset(TASKS[1][0])
    assert environment.step("I give up.").done
    with pytest.raises(UsageError):
        environment.step("Hello?")


def test_unknown_splits_and_levels_are_refused() -> None:
    with pytest.raises(UsageError, match="no split"):
        PhoneCalls().tasks("test")
    for levels in ((), (0,), (1, 7), (2, 2)):
        with pytest.raises(UsageError, match="levels"):
            PhoneCalls(levels=levels)


def test_tasks_come_from_a_folder(tmp_path: Path) -> None:
    generate(tmp_path / "data", num_companies=20, num_train_tasks=12, num_val_tasks=6, seed=5, levels=(2, 3))
    environment = PhoneCalls(data=tmp_path / "data")
    assert (environment.world.seed, environment.world.companies, environment.world.unseen_companies) == (5, 20, 10)
    assert [task.level for task in environment.tasks("train")] == [2, 3] * 6
    by_seed = PhoneCalls(seed=5, companies=20, unseen_companies=10, levels=(2, 3), counts={"train": 12})
    assert list(environment.tasks("train")) == list(by_seed.tasks("train"))
    only = PhoneCalls(data=str(tmp_path / "data"), levels=(3,))
    assert {task.level for task in only.tasks("test_unseen_rules")} == {3}
    with pytest.raises(UsageError, match=r"\[2, 3\]"):
        PhoneCalls(data=tmp_path / "data", levels=(1,))
    task = environment.tasks("val")[0]
    environment.reset(task)
    assert informed(environment, task) == 1.0


# --- tools -----------------------------------------------------------------------------------------------------------


def test_search_is_forgiving_and_suggests() -> None:
    task = TASKS[1][0]
    environment = start(task)
    shown = environment.step(call("search_company", name=f"  {task.company_name.upper()} ")).observation
    assert shown == company(0, task.company).directory()
    close = environment.step(call("search_company", name=task.company_name[:-1])).observation
    assert task.company_name in close
    assert environment.step(call("search_company", name="@@@@")).observation == 'No company is called "@@@@".'
    assert environment.mistakes == 0


def test_the_form_gives_values_once() -> None:
    task = TASKS[1][0]
    missing = next(name for name in FIELDS if name not in task.profile)
    wanted = [*right_values(task), missing]
    environment = start(task)
    answers = json.loads(environment.step(call("auth_info_form", fields=wanted)).observation)
    assert answers == right_values(task) | {"unavailable": [missing]}
    again = environment.step(call("auth_info_form", fields=wanted))
    assert again.info["mistake"]
    assert "already" in again.observation


@pytest.mark.parametrize("level", LEVEL)
def test_a_form_with_too_many_fields_is_refused_and_used_up(level: int) -> None:
    task = TASKS[level][0]
    limit = task.limits.max_fields
    environment = start(task)
    first = environment.step(call("auth_info_form", fields=list(FIELDS)[: limit + 1]))
    assert first.observation == f"That is more than {limit} details. I will not fill in any form."
    assert not first.info["mistake"]
    assert environment.step(call("auth_info_form", fields=list(FIELDS)[:1])).info["mistake"]
    # A name that is repeated counts once.
    names = list(FIELDS)[:limit]
    assert json.loads(start(task).step(call("auth_info_form", fields=names * 2)).observation)


def test_a_bad_field_name_uses_nothing_up() -> None:
    task = TASKS[2][0]
    environment = start(task)
    for message in (
        call("auth_info_form", fields=["acount_number"]),
        call("auth_info_form", fields=[]),
        call("make_phone_call", phone_number=number_of(task), auth_info={"shoe_size": "44"}),
        call("make_phone_call", phone_number=number_of(task)),
        call("make_phone_call", phone_number=number_of(task), auth_info={"account_number": 5}),
    ):
        result = environment.step(message)
        assert result.info["mistake"]
        assert (result.info["calls"], environment.form, environment.failures) == (0, None, {})


def test_an_empty_number_is_a_wrong_number() -> None:
    for level in LEVEL:
        environment = start(TASKS[level][0])
        for number in ("", " ", "555-0000"):
            assert phone(environment, number, {}).info["category"] == "refusal"


# --- checks, locks, order, references --------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVEL)
def test_failed_checks_lock_a_department_for_good(level: int) -> None:
    task = TASKS[level][0]
    environment = start(task)
    number = number_of(task)
    for _ in range(task.limits.failures_to_lock):
        assert phone(environment, number, {}).info["category"] in ("auth_failure", "unclear")
    assert phone(environment, number, right_values(task)).info["category"] == "lockout"
    assert environment.reward() == 0.0


def test_on_level_6_the_first_detail_decides() -> None:
    for task in TASKS[6]:
        (errand,) = task.errands
        industry = company(0, task.company).industry
        accepted = errand.accepted(industry, 0)
        lawful = law(industry, errand.kind, sensitive=False).identifier
        assert {errand.requires[0], lawful} <= accepted & task.profile.keys()
        assert task.profile.keys() == FIELDS.keys()
        other = next(name for name in task.profile if name not in accepted | {*errand.requires})
        for name, value in task.profile.items():
            first = phone(start(task), number_of(task), {name: value, other: task.profile[other]})
            assert first.reward == (name in accepted)
            assert phone(start(task), number_of(task), {name: value + "0"}).reward == 0.0
        all_that_is_asked = {name: task.profile[name] for name in (other, lawful, *errand.requires)}
        second = phone(start(task), number_of(task), all_that_is_asked)
        assert second.reward == 0.0
        assert second.info["requested"] == errand.requires
        assert phone(start(task), number_of(task), {}).info["requested"] == errand.requires


@pytest.mark.parametrize("seed", range(4))
def test_every_field_stands_in_in_one_industry(seed: int) -> None:
    dealt = [name for names in stand_ins(seed).values() for name in names]
    assert sorted(dealt) == sorted(FIELDS)
    assert {len(names) for names in stand_ins(seed).values()} == {5, 6}


def test_an_empty_call_names_everything_that_is_required() -> None:
    for task in TASKS[2]:
        result = phone(start(task), number_of(task), {})
        assert result.info["requested"] == task.errands[0].requires
        facts = reps.describe(result.observation)
        assert facts is not None
        assert facts.facts == task.errands[0].requires


def test_one_wrong_value_is_a_failed_check_that_names_only_it() -> None:
    task = TASKS[2][0]
    wrong = task.errands[0].requires[0]
    values = right_values(task) | {wrong: "0"}
    assert phone(start(task), number_of(task), values).info["requested"] == (wrong,)


def test_level_1_can_be_read_out_and_then_done() -> None:
    task = TASKS[1][0]
    environment = start(task)
    asked = phone(environment, number_of(task), {}).info["requested"]
    values = json.loads(environment.step(call("auth_info_form", fields=list(asked))).observation)
    values.pop("unavailable", None)
    last = phone(environment, number_of(task), values)
    assert (last.reward, last.done, last.info["category"]) == (1.0, True, "success")
    assert last.info["form_before_call"] is False


def test_an_alternative_is_accepted() -> None:
    task = next(
        task
        for task in TASKS[4]
        if len(task.errands) == 1 and any(name not in task.profile for name in task.errands[0].requires)
    )
    missing = next(name for name in task.errands[0].requires if name not in task.profile)
    told = phone(start(task), number_of(task), {}).observation
    assert ALTERNATIVE[missing].replace("_", " ") in told
    assert phone(start(task), number_of(task), right_values(task)).reward == 1.0


def test_the_second_department_wants_the_reference_of_the_first() -> None:
    for task in TASKS[3][:10]:
        environment = start(task)
        reply = phone(environment, number_of(task, 0), right_values(task)).observation
        reference = reply.rsplit(" ", 1)[1].rstrip(".")
        without = start(task)
        phone(without, number_of(task, 0), right_values(task))
        assert phone(without, number_of(task, 1), right_values(task)).info["requested"] == (REFERENCE,)
        last = phone(environment, number_of(task, 1), right_values(task) | {REFERENCE: reference})
        assert (last.reward, last.done) == (1.0, True)


def test_independent_errands_are_done_in_the_order_of_the_wish() -> None:
    task = next(task for task in TASKS[4] if len(task.errands) == 2)
    environment = start(task)
    early = phone(environment, number_of(task, 1), right_values(task))
    assert early.info["category"] == "routing_violation"
    assert not early.info["department_order"]
    assert phone(environment, number_of(task, 0), right_values(task)).info["category"] == "success"
    assert phone(environment, number_of(task, 0), right_values(task)).info["category"] == "refusal"
    assert phone(environment, number_of(task, 1), right_values(task)).reward == 1.0


def test_level_5_lists_an_old_number_that_tells_the_new_one() -> None:
    for task in TASKS[5][:10]:
        environment = start(task)
        shown = environment.step(call("search_company", name=task.company_name)).observation
        assert task.moved_number in shown
        assert number_of(task) not in shown
        result = phone(environment, task.moved_number, {})
        assert result.info["category"] == "routing_violation"
        assert reps.describe(result.observation) == reps.ReplyFacts(
            category="routing_violation", facts=(number_of(task),)
        )
        assert environment.failures == {}


def test_a_forgotten_company_is_still_the_same_one() -> None:
    """Companies are kept in a cache; what the directory shows must not depend on it."""
    task = TASKS[5][0]
    environment = start(task)
    company.cache_clear()
    environment.company = company(0, task.company)
    assert task.moved_number in environment.step(call("search_company", name=task.company_name)).observation


def test_the_call_budget_ends_the_rollout() -> None:
    for level in LEVEL:
        task = TASKS[level][0]
        environment = start(task)
        results = [phone(environment, "555-0000", {}) for _ in range(task.limits.calls)]
        assert [result.done for result in results] == [False] * (task.limits.calls - 1) + [True]
        assert results[-1].reward == 0.0


def test_some_reps_of_level_5_are_vague() -> None:
    categories = [phone(start(task), number_of(task), {}).info["category"] for task in TASKS[5]]
    assert set(categories) == {"auth_failure", "unclear"}


def test_held_out_phrasings_are_heard_only_in_their_split() -> None:
    def said(split: str) -> set[str]:
        tasks = PhoneCalls(levels=(2,)).stream(split, 0).take(150)
        return {phone(start(task), "555-0000", {}).observation for task in tasks}

    assert said("train") == set(reps.phrasings("refusal", held_out=False))
    assert said("test_unseen_phrasing") == set(reps.phrasings("refusal", held_out=True))


# --- reward ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVEL)
def test_the_reward_is_a_function_of_the_state(level: int) -> None:
    """Text claims nothing: a transcript full of success earns 0, and a state that is done earns 1 without a word."""
    task = TASKS[level][0]
    claim = f"Thank you, the {task.errands[-1].service} is done. <|csr|>All set<|/csr|>"
    assert start(task).step(claim).reward == 0.0
    environment = start(task)
    environment.done_errands = len(task.errands)
    assert environment.step("").reward == 1.0


# --- nothing leaks ---------------------------------------------------------------------------------------------------


def seen_before_the_first_call(task: Task, form: list[str]) -> list[object]:
    environment = PhoneCalls()
    messages: list[object] = list(environment.reset(task))
    for message in (
        call("search_company", name=task.company_name),
        call("search_company", name="nobody"),
        call("auth_info_form", fields=["nonsense"]),
        call("auth_info_form", fields=form),
        call("auth_info_form", fields=form),
    ):
        result = environment.step(message)
        messages += [result.observation, result.reward, result.done]
    return messages


def permuted(task: Task, rng: random.Random) -> Task:
    """The same task with other hidden facts: other rules, other required departments in another order."""
    kinds = [department.kind for department in company(0, task.company).departments]
    errands = [
        dataclasses.replace(
            errand,
            kind=kind,
            service=company(0, task.company).department(kind).services[rng.randrange(2)].name,
            requires=tuple(rng.sample(sorted(FIELDS), rng.randint(1, 4))),
        )
        for errand, kind in zip(task.errands, rng.sample(kinds, len(task.errands)), strict=True)
    ]
    return dataclasses.replace(task, errands=tuple(errands), talk_seed=rng.randrange(2**32))


@pytest.mark.parametrize("level", LEVEL)
def test_hidden_facts_change_nothing_before_the_first_call(level: int) -> None:
    rng = random.Random(level)
    changed_after = 0
    for task in TASKS[level][:15]:
        form = rng.sample(sorted(FIELDS), task.limits.max_fields)
        other = permuted(task, rng)
        assert seen_before_the_first_call(other, form) == seen_before_the_first_call(task, form)
        replies = [phone(start(each), number_of(task), {}).observation for each in (task, other)]
        changed_after += replies[0] != replies[1]
    assert changed_after > 5  # the negative control: after the first call they do differ


# --- look-ahead ------------------------------------------------------------------------------------------------------


def transcript_of(task: Task, *messages: str) -> list[Message]:
    environment = PhoneCalls()
    transcript = list(environment.reset(task))
    for message in messages:
        observation = environment.step(message).observation
        name = json.loads(message.split("\n")[1])["name"]
        transcript += [
            Message(role="assistant", content=message),
            Message(role="tool", content=observation, name=name),
        ]
    return transcript


@pytest.mark.parametrize("level", LEVEL)
def test_lookahead_names_the_departments_of_the_wish_in_order(level: int) -> None:
    for task in TASKS[level][:10]:
        assert lookahead_query(transcript_of(task)) is None
        transcript = transcript_of(task, call("search_company", name=task.company_name))
        asked = []
        while query := lookahead_query(transcript):
            assert query.name == "make_phone_call"
            assert query.arguments["auth_info"] == {}
            asked.append(query.arguments["phone_number"])
            transcript.append(Message(role="assistant", content=format_tool_call(query), predicted=True))
            transcript.append(Message(role="tool", name=query.name, content="I need your pin.", predicted=True))
        first = task.moved_number or number_of(task)
        assert asked == [first, *(number_of(task, place) for place in range(1, len(task.errands)))]


def test_lookahead_is_over_once_the_form_is_spent() -> None:
    task = TASKS[3][0]
    transcript = transcript_of(
        task, call("search_company", name=task.company_name), call("auth_info_form", fields=["account_number"])
    )
    assert lookahead_query(transcript) is None


def test_lookahead_is_a_pure_function_of_the_transcript() -> None:
    rng = random.Random(0)
    for task in itertools.chain.from_iterable(tasks[:4] for tasks in TASKS.values()):
        transcript = transcript_of(task, call("search_company", name=task.company_name))
        before = list(transcript)
        # From an environment that never started, one that plays a permuted task, and one that plays another task.
        environments = (PhoneCalls(), start(permuted(task, rng)), start(TASKS[1][-1]))
        queries = [environment.lookahead_query(transcript) for environment in environments]
        assert queries == [lookahead_query(transcript)] * 3
        assert transcript == before


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.builds(
            Message,
            role=st.sampled_from(["system", "user", "assistant", "tool"]),
            content=st.one_of(
                st.text(max_size=60),
                st.sampled_from(
                    [
                        "Acme, bank\nBilling 555-1234: invoice copy, payment change",
                        call("auth_info_form"),
                        "<tool_call>[",
                    ]
                ),
            ),
            name=st.sampled_from([None, "search_company", "make_phone_call"]),
        ),
        max_size=8,
    )
)
def test_lookahead_never_raises(transcript: list[Message]) -> None:
    query = lookahead_query(transcript)
    assert query is None or query.name == "make_phone_call"


# --- replay, and ten thousand messages -------------------------------------------------------------------------------


def replay(task: Task, actions: list[str]) -> list[StepResult]:
    environment, results = start(task), []
    for action in actions:
        results.append(environment.step(action))
        if results[-1].done:
            break
    return results


def test_a_replay_of_a_saved_action_list_gives_the_same_results(tmp_path: Path) -> None:
    saved = tmp_path / "actions.json"
    for task in itertools.chain.from_iterable(tasks[:5] for tasks in TASKS.values()):
        messages = [
            call("search_company", name=task.company_name),
            call("auth_info_form", fields=list(informed_form(task))[:2]),
            "<tool_call>{broken</tool_call>",
            call("make_phone_call", phone_number=number_of(task), auth_info=right_values(task)),
            "Done.",
        ]

        saved.write_text(json.dumps(messages))
        assert replay(task, json.loads(saved.read_text())) == replay(task, messages)


TEXTS = (
    *("", "account_number", "pin", "555-0000", "Acme", "ember", "salt", "moss", "\x00", "\x1b[2J", "\ud800", "é\u202e"),
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|csr|>ok<|/csr|>",
        "</tool_call>",
        "<tool_response>",
        "{}",
        "[]",
    ),
)
RAW = (
    "",
    "I am done.",
    "<tool_call>",
    "<tool_call></tool_call>",
    '<tool_call>{"name": "search_company", "name": "x", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "search_company", "arguments": {"name": NaN}}</tool_call>',
    '<tool_call>{"name": "search_company", "arguments": {"name": -Infinity}}</tool_call>',
    '<tool_call>{"name": ["search_company"], "arguments": {}}</tool_call>',
    '<tool_call>{"name": "make_phone_call", "arguments": []}</tool_call>',
    "<tool_call>" + "[" * 5_000 + "</tool_call>",
    '<tool_call>{"name": "search_company", "arguments": {"name": "' + "9" * 2**20 + '"}}</tool_call>',
    '<tool_call>{"name": "search_company", "arguments": {"name": "'
    + "9" * (MAX_MESSAGE_CHARS - 100)
    + '"}}</tool_call>',
    '<tool_call>{"name": "make_phone_call", "arguments": {"phone_number": 1e999, "auth_info": null}}</tool_call>',
    call("search_company", name="Acme") * 2,
)
# Cheap to draw, so that ten thousand are generated in seconds. "@" words stand for things of the task at hand.
text = st.one_of(st.sampled_from(TEXTS), st.sampled_from(sorted(FIELDS)), st.text(max_size=5))
number = st.sampled_from(["@0", "@1", "@2", "@moved", "555-0000", "", "<|csr|>"])
argument = st.one_of(
    text, st.integers(), st.none(), st.lists(text, max_size=2), st.dictionaries(text, text, max_size=2)
)
message = st.one_of(
    st.sampled_from(RAW),
    st.builds(lambda name: call("search_company", name=name), st.one_of(text, st.just("@company"))),
    st.builds(lambda fields: call("auth_info_form", fields=fields), st.lists(text, max_size=3)),
    st.just(call("auth_info_form", fields=["@form"])),
    st.builds(lambda to, info: call("make_phone_call", phone_number=to, auth_info=info), number, st.just({"@": ""})),
    st.builds(
        lambda to, info: call("make_phone_call", phone_number=to, auth_info=info),
        number,
        st.dictionaries(text, text, max_size=2),
    ),
    st.builds(lambda words: call("open_door", words=words), st.lists(text, max_size=3)),
    st.builds(lambda tool, key, value: call(tool, **{key: value}), text, text, argument),
    st.builds(lambda body: f"<tool_call>{body}</tool_call>", text),
)
MESSAGES_IN_ALL, PER_EXAMPLE = 10_000, 50
generated = 0


def fill_in(message: str, environment: PhoneCalls) -> str:
    """Replace the "@" words, so that generated messages reach deep states too."""
    if "@" not in message:
        return message
    task = environment.task
    for place in range(3):
        message = message.replace(f'"@{place}"', f'"{number_of(task, place % len(task.errands))}"')
    values = json.dumps(right_values(task) | {REFERENCE: (environment.references or [""])[-1]})
    return (
        message.replace("@moved", task.moved_number)
        .replace("@company", task.company_name)
        .replace('["@form"]', json.dumps(list(informed_form(task))))
        .replace('{"@": ""}', values)
    )


def refuse_corruption(calls: PhoneCalls) -> None:
    limits = calls.task.limits
    assert 0 <= calls.done_errands <= len(calls.task.errands)
    assert 0 <= calls.calls <= limits.calls
    assert sum(calls.failures.values()) + calls.done_errands <= calls.calls
    assert all(0 < count <= limits.failures_to_lock for count in calls.failures.values())
    assert all(calls.task.profile[name] == value for name, value in calls.values.items() if name != REFERENCE)
    assert calls.form is not None or set(calls.values) <= {REFERENCE}
    assert len(calls.form or ()) <= limits.max_fields or not set(calls.values) - {REFERENCE}
    assert (calls.reward() == 1.0) == (calls.done_errands == len(calls.task.errands))


@settings(
    max_examples=MESSAGES_IN_ALL // PER_EXAMPLE + 10,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
@given(first=st.integers(0, 39), script=st.lists(message, min_size=PER_EXAMPLE, max_size=PER_EXAMPLE))
def play_both(first: int, script: list[str]) -> None:
    global generated
    levels = itertools.cycle(LEVEL)
    doors = OracleCodes().tasks("train")
    calls, oracle = start(TASKS[next(levels)][first]), OracleCodes()
    oracle.reset(doors[first])
    for each in script:
        generated += 1
        before = calls.mistakes, calls.calls, dict(calls.failures)
        result = calls.step(fill_in(each, calls))
        refuse_corruption(calls)
        assert isinstance(result.observation, str)
        assert len(result.observation) < 2_000
        assert result.reward in (0.0, 1.0)
        assert result.reward <= result.done
        if result.info["mistake"]:  # counted, and nothing else happened
            assert (calls.mistakes, calls.calls, calls.failures) == (before[0] + 1, before[1], before[2])
        if result.done:
            calls = start(TASKS[next(levels)][first])
        answer = oracle.step(each)
        assert answer.reward in (0.0, 1.0)
        if answer.done:
            oracle = OracleCodes()
            oracle.reset(doors[(first * 7 + generated) % len(doors)])


def test_ten_thousand_messages_never_raise_and_never_corrupt_a_state() -> None:
    play_both()
    assert generated >= MESSAGES_IN_ALL
