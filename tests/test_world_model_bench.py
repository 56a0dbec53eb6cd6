"""The world-model bench: replies as in training, rivals checked by hand, correct shares."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch

from benchmarks.__main__ import numbers_in
from lfo.env.worlds.oracle import OracleCodes
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.errors import UsageError
from lfo.play.look_ahead import Question
from lfo.play.predictors import true_reply_predictor
from lfo.play.runner import RunnerConfig
from lfo.protocol.world_model import ObservedCall, WorldModelState, render_target
from lfo.types import ReplyFacts, ToolCall
from research.world_model_bench import bench, rivals
from research.world_model_bench.bench import Heard, record, share_right
from research.world_model_bench.variants import make_variant
from small_runs import small_config, small_trainer, tokenizer


def calls(level: int) -> PhoneCalls:
    return PhoneCalls(levels=(level,))


def two() -> PhoneCalls:
    return calls(2)


class Elsewhere:
    """A world of somebody else."""


def heard(words: str, facts: tuple[str, ...], cell: str = "") -> Heard:
    state = WorldModelState(task=words, step=1, actions=(), collected={})
    call = ToolCall(name="make_phone_call", arguments={})
    told = ReplyFacts(category="auth_failure", facts=facts)
    return Heard(observed=ObservedCall(state=state, call=call, reply="", facts=told), cell=(cell,))


def test_a_task_gives_the_call_that_look_ahead_asks_about_with_its_true_reply():
    task = two().tasks("train")[0]
    (only,) = record(two, [task])
    observed, errand = only.observed, task.errands[0]
    assert observed.call.arguments["auth_info"] == {}
    assert observed.facts == ReplyFacts(category="auth_failure", facts=errand.requires)
    assert observed.state.actions[0][0] == f'search_company("{task.company_name}")'
    assert observed.asked
    assert only.cell[1] == errand.service


def test_of_two_departments_both_are_asked_in_the_state_before_any_call():
    for task in calls(3).tasks("train")[:5]:
        first, second = record(lambda: calls(3), [task])
        assert first.observed.state == second.observed.state
        assert first.observed.call != second.observed.call
        assert [first.cell[1], second.cell[1]] == [errand.service for errand in task.errands]


def test_oracles_are_recorded_too():
    task = OracleCodes().tasks("train")[0]
    (only,) = record(OracleCodes, [task])
    assert only.observed.facts is not None
    assert set(only.observed.facts.facts) == set(task.code)
    assert only.cell == (task.order, task.colour)


def test_the_lookup_knows_what_it_heard_and_nothing_else():
    known = [heard("a", ("pin",), "x"), heard("b", ("zip",), "x"), heard("c", ("pin",), "x")]
    asked = [heard("a", ("pin",), "x"), heard("a", ("zip",), "x"), heard("a", ("pin",), "y")]
    assert rivals.lookup(known, asked) == pytest.approx(1 / 3)


def test_the_linear_classifier_puts_parts_together():
    """bank -> account, telecom -> contract; billing -> zip, refunds -> payment: the fourth combination follows."""
    law = {"bank": "account", "telecom": "contract", "billing": "zip", "refunds": "payment"}

    def case(*words: str) -> Heard:
        return heard(" ".join(words), tuple(law[word] for word in words), " ".join(words))

    known = [case("bank", "billing"), case("bank", "refunds"), case("telecom", "billing")] * 3
    judges = rivals.fit_rivals(known, two, lambda some: torch.ones(len(some), 1))
    assert tuple(judges) == rivals.NAMES
    new = [case("telecom", "refunds")]
    assert judges["linear"](new) == judges["linear_top4"](new) == 1.0
    assert judges["lookup"](new) == judges["memory_metric"](new) == 0.0
    assert judges["memory_metric"](known) == 1.0
    wrong = [heard("telecom refunds", ("account", "zip"))]
    assert judges["linear"](wrong) == 0.0


def test_the_nearest_is_the_one_in_the_same_direction_from_the_mean():
    """Around the mean (10, 10): zip lies above, the two of pin and tax below, to the left and to the right."""
    places = {"a": (10.0, 12.0), "b": (9.0, 9.0), "c": (11.0, 9.0), "asked": (10.2, 9.8), "old": (9.0, 9.0)}

    def vectors(some) -> torch.Tensor:
        return torch.tensor([places[each.observed.state.task] for each in some])

    known = [heard("a", ("zip",)), heard("b", ("pin",)), heard("c", ("tax",))]
    assert rivals.nearest(known, [heard("asked", ())], vectors) == [{"tax"}]
    twice = [heard("old", ("older",)), *known]
    assert rivals.nearest(twice, [heard("b", ())], vectors) == [{"pin"}], "the newest of equals"


def test_as_many_facts_are_named_as_their_probabilities_add_up_to():
    chances = torch.tensor([[0.7, 0.4, 0.6], [0.1, 0.2, 0.1], [0.9, 0.9, 0.9]])  # sums 1.7, 0.4 and 2.7
    told = rivals.as_many_as_expected(["pin", "tax", "zip"], chances.logit())
    assert told == [{"pin", "zip"}, {"tax"}, {"pin", "tax", "zip"}]


def test_the_frozen_base_embeds_what_the_world_model_reads():
    one, other = record(two, two().tasks("val")[:2])
    embed = rivals.frozen_embedding(small_config())
    (first, second), (again,) = embed([one, other]), embed([one])
    assert first.ndim == 1
    assert first.equal(again)
    assert not first.equal(second)


def test_all_true_facts_are_among_the_four_that_most_samples_name():
    only, *rest = record(two, two().tasks("val")[:20])
    reply, true = only.observed.reply, bench.facts_in(two(), only.observed.reply)
    others = [each.observed.reply for each in rest if not true & bench.facts_in(two(), each.observed.reply)]
    share = partial(bench.share_among_likeliest, two(), [only])
    assert share([[*others, *[reply] * len(others)]]) == 1.0
    assert share([[*others, *others, reply]]) == 0.0
    assert share([["", "?"]]) == 0.0


def test_of_facts_that_as_many_samples_name_the_first_by_name_count():
    """In whatever order a set of them is: it differs between processes."""

    class Words(OracleCodes):
        def describe_reply(self, reply: str) -> ReplyFacts:
            return ReplyFacts(category="words", facts=tuple(reply.split()))

    letters = [chr(ord("a") + index) for index in range(26)]
    for letter in letters:
        only = heard("", ())
        only = replace(only, observed=replace(only.observed, reply=letter))
        assert bench.share_among_likeliest(Words(), [only], [[" ".join(letters)]]) == float(letter in "abcd")


def test_right_is_what_means_the_same(monkeypatch):
    trainer = small_trainer(environment=two)
    asked = record(two, two().tasks("val")[:6])
    ask = make_variant("none", trainer).ask
    truth = [trainer.codec.target_ids(each.observed.reply) for each in asked]
    monkeypatch.setattr(trainer.backend, "complete", lambda prompts: truth)
    assert share_right(trainer, asked, ask=ask) == 1.0
    monkeypatch.setattr(trainer.backend, "complete", lambda prompts: truth[1:] + truth[:1])
    assert share_right(trainer, asked, ask=ask) < 0.5


def test_a_trial_follows_the_run_that_it_stands_for():
    said: list[str] = []
    settings = ["rollout.prompts=4", "steps=2", "world_model.examples_per_mini_batch=2"]
    result = bench.bench_world_model(settings, seeds=2, points=(4, 8), calls=5, say=said.append)
    assert len(said) == len(result["trials"]) == 2
    assert result["calls"] == dict.fromkeys(("val", "test_unseen_companies", "test_unseen_rules"), 5)
    assert set(result["mean"]) == {"world_model", *rivals.NAMES}
    assert all(len(shares["val"]) == 2 for shares in result["mean"].values())
    one, other = (each["memory"]["val"] for each in result["trials"])
    assert result["mean"]["memory"]["val"] == pytest.approx([(a + b) / 2 for a, b in zip(one, other, strict=True)])
    assert result["seconds_a_step"] > 0
    alone = bench.bench_world_model(settings, seeds=2, points=(4, 8), calls=5, rivals_only=True)
    assert alone["mean"] == {name: result["mean"][name] for name in rivals.NAMES}


def test_what_is_most_alike_stands_before_the_prompt_and_never_the_example_itself():
    trainer = small_trainer("world_model.swap_names=0", "world_model.wording=1", environment=two)
    variant, codec = make_variant("retrieve-1", trainer), trainer.codec
    known = [record(two, [task])[0].observed for task in two().tasks("train")[:4]]
    examples = [codec.example(each.state, each.call, each.reply, asked=True) for each in known]
    question = codec.prompt_text(examples[0])
    assert variant.ask(known[0]) == codec.question_ids(known[0].state, known[0].call), "nothing was heard yet"
    trainer.mini_batches.replay.add(examples)
    before, _, rest = tokenizer().decode(variant.ask(known[0])).rpartition(question)
    assert (before, rest) == (f"{question}{render_target(known[0].reply)}\n\n", ""), "it has heard this very exchange"
    (practised,) = trainer.mini_batches.practice.of(examples[:1], examples, (0,))
    text = codec.prompt_text(practised)
    assert text.endswith(question)
    assert text.count(question) == 1, "its own reply would tell it all"
    assert sum(known[place].reply in text for place in (1, 2, 3)) == 1
    assert practised.tokens[practised.reply_start :] == examples[0].tokens[examples[0].reply_start :]


def test_again_goes_on_with_the_same_replies_after_the_last_task(monkeypatch):
    trainer = small_trainer("policy.frozen=true", environment=two)
    monkeypatch.setattr(bench, "create_trainer", lambda *parts: trainer)
    learnt: list[tuple[int, int]] = []
    monkeypatch.setattr(bench, "_learn", lambda _, step, new: learnt.append((step, len(new))))
    prompts = trainer.config.rollout.prompts
    some = {"val": record(two, two().tasks("val")[:2])}
    bench.trial(
        trainer.config, two, some, points=(2 * prompts,), variant="again-3", embed=lambda some: torch.ones(len(some), 1)
    )
    assert learnt == [(0, prompts), (1, prompts), (2, 0), (3, 0), (4, 0), (5, 0)]


def test_a_variant_that_there_is_not_is_refused():
    with pytest.raises(UsageError, match="leave one out"):
        bench.bench_world_model(["steps=5"], points=(40,), calls=1, variant="again-2", rivals_only=True)
    with pytest.raises(UsageError, match="must be none, retrieve-1"):
        bench.bench_world_model(["steps=5"], points=(40,), calls=1, variant="retrieve-0")


def test_the_updates_are_those_of_the_loop(monkeypatch):
    """As many mini-batches as the run has, with as many rows each, drawn from what was heard so far."""
    trainer = small_trainer("rollout.mini_batch_prompts=1", "policy.frozen=true", environment=two)
    learnt = []
    monkeypatch.setattr(trainer.backend, "learn", lambda parts, **settings: learnt.append(parts))
    tasks = two().tasks("train")[: trainer.config.rollout.prompts]
    bench._learn(trainer, 0, [record(two, [task]) for task in tasks])
    assert len(trainer.mini_batches.replay) == len(tasks)
    ((*mini_batches,),) = learnt
    most = min(len(tasks), trainer.config.world_model.examples_per_mini_batch)
    assert [len(rows) for rows in mini_batches] == [most] * len(tasks)


@pytest.mark.parametrize(
    ("settings", "points", "words"),
    [
        (["steps=2"], (40,), "steps=2 draws fewer than 40 tasks"),
        ([], (12,), "multiples of rollout.prompts=8, not 12"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(settings, points, words: str):
    with pytest.raises(UsageError, match=words):
        bench.bench_world_model(settings, points=points, calls=1)


def test_a_world_that_nobody_can_record_is_refused():
    with pytest.raises(UsageError, match="records phone-calls and oracle-codes, not Elsewhere"):
        bench._kind(cast(Any, Elsewhere))


@pytest.mark.parametrize("text", ["", "80,40", "40,x", "0,8", "8,8", "²"])
def test_points_are_rising_numbers(text: str):
    assert numbers_in("8, 16", "--tasks") == [8, 16]
    with pytest.raises(UsageError, match="increasing numbers"):
        numbers_in(text, "--tasks")


def test_the_recorded_reply_is_the_one_that_a_run_shown_the_truth_would_see():
    task = two().tasks("val")[3]
    (only,) = record(two, [task])
    trainer = small_trainer(environment=two)
    search = f'<tool_call>{{"name": "search_company", "arguments": {{"name": "{task.company_name}"}}}}</tool_call>'
    question = Question(task=task, state=only.observed.state, call=only.observed.call, messages=(search,))
    told = true_reply_predictor(two, RunnerConfig.of_run(trainer.config))([question])
    assert told == [only.observed.reply]
