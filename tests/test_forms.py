"""The form in which predicted replies are told (`imagine.form`): the same for everything that a run does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from lfo.agent import load_agent
from lfo.base_form import form_of, stored_form, with_stored_form
from lfo.cli import common
from lfo.cli.children import ChildRun
from lfo.config import experiment, from_yaml, load_config, to_yaml
from lfo.engines import create_trainer
from lfo.env.worlds.oracle import OracleCodes
from lfo.errors import ConfigError
from lfo.loading import load_tokenizer, model_source
from lfo.model.catalog import PROVENANCE
from lfo.objectives.losses import fused_token_logprobs
from lfo.play.episode import Feedback
from lfo.play.records import rollout_record
from lfo.protocol.chat import ChatCodec
from lfo.protocol.shown import SHOWN_FORMS
from lfo.protocol.world_model import WorldModelCodec, render_state, state_of
from lfo.rows.samples import policy_sample
from lfo.rows.successes import without_shown
from lfo.tools.model_card import model_card
from lfo.train.loop import Trainer
from lfo.types import Message, Observed, Origin, Rollout, ToolCall
from small_runs import (
    fussy_calls,
    model_of,
    random_base,
    randomised,
    requests_of,
    small_config,
    small_trainer,
    tokenizer,
)
from small_tokenizers import CHATML_WITH_TOOLS, TOOLS, family_tokenizer, small_tokenizer
from test_deliberation import A, Asking, B, Played, play, say
from test_resume import KILLED, SETTINGS, adapters, lfo, rows, start

FORMS = pytest.mark.parametrize("form", list(SHOWN_FORMS))


# --- which form --------------------------------------------------------------------------------------------------


# A small tokenizer needs more tokens for the same text.
FOR_CHARACTERS = (
    "rollout.max_context=4096",
    "rollout.max_turn_tokens=24",
    "rollout.max_turns=2",
    "world_model.state_tokens=256",
)


class Oracles(OracleCodes):
    """A few tasks, so that it is quick."""

    def tasks(self, split: str) -> Sequence[Any]:
        return super().tasks(split)[:4]


def trainer_on(model: str, *overrides: str) -> Trainer:
    config = small_config(f"model={model}", *FOR_CHARACTERS, "steps=1", *overrides)
    return create_trainer(config, Oracles, load_tokenizer(model))


def test_a_base_without_a_form_is_probed_once_and_a_resumed_run_keeps_the_form(tmp_path: Path):
    """A random base acts on nothing, so it gets the form that most instruct models act on."""
    model = random_base(tmp_path / "base", small_tokenizer(CHATML_WITH_TOOLS))
    trainer = trainer_on(model, f"output_dir={tmp_path / 'run'}")
    assert trainer.config.imagine.form == "user"
    notes = json.loads((tmp_path / "base" / PROVENANCE).read_text())
    assert notes == {"form": "user", "form_probe": {"user": 0.0, "tool": 0.0, "mark": 0.0}}
    trainer.fit()
    (tmp_path / "base" / PROVENANCE).write_text('{"form": "tool"}')
    assert trainer_on(model).config.imagine.form == "tool"
    assert trainer_on(model, "imagine.form=mark").config.imagine.form == "mark"
    assert load_config([], run=tmp_path / "run").imagine.form == "user"
    agent = load_agent(tmp_path / "run", environment=Oracles)
    assert (agent.config.imagine.form, agent.runner_config.form) == ("user", "user")


def test_a_template_that_refuses_a_user_after_a_call_falls_back_to_the_tool(tmp_path: Path):
    model = random_base(tmp_path / "base", family_tokenizer("mistral"))
    assert trainer_on(model, "algo=dapo").config.imagine.form == "auto", "nothing is shown"
    assert stored_form(model) is None
    trainer = trainer_on(model, f"output_dir={tmp_path / 'run'}")
    assert trainer.config.imagine.form == "tool"
    assert trainer.fit()["steps"] == 1
    with pytest.raises(ConfigError, match=r"does not allow a user message after a call.*set imagine\.form=tool"):
        trainer_on(model, "imagine.form=user")


def test_a_template_that_drops_thoughts_before_a_user_message_has_none_after_a_draft():
    known = {thinking: ChatCodec(family_tokenizer("thinking"), TOOLS, thinking=thinking) for thinking in (False, True)}
    assert {thinking: codec.lets_user_follow_draft for thinking, codec in known.items()} == {False: True, True: False}


def test_where_nothing_can_be_probed_the_stored_form_is_taken_or_the_usual_one(tmp_path: Path, caplog):
    codec = ChatCodec(small_tokenizer(CHATML_WITH_TOOLS), TOOLS)
    for form, found in (("tool", "tool"), (None, "user")):
        config = small_config(f"model={random_base(tmp_path / str(form), small_tokenizer(CHATML_WITH_TOOLS), form)}")
        assert with_stored_form(config, codec).imagine.form == found
    assert caplog.text.count("nobody has probed") == 1
    assert stored_form(config.model) is None, "a guess is not stored"


def test_a_stored_form_that_the_template_refuses_with_thoughts_gives_way(tmp_path: Path):
    model = random_base(tmp_path, family_tokenizer("thinking"), "user")
    codecs = {thinking: ChatCodec(family_tokenizer("thinking"), TOOLS, thinking=thinking) for thinking in (False, True)}
    found = {thinking: with_stored_form(small_config(f"model={model}"), codec) for thinking, codec in codecs.items()}
    assert {thinking: config.imagine.form for thinking, config in found.items()} == {False: "user", True: "tool"}
    with pytest.raises(ConfigError, match=r"set imagine\.form=tool"):
        with_stored_form(small_config(f"model={model}", "imagine.form=user"), codecs[True])


@pytest.mark.parametrize("notes", ["[]", '"mark"', '{"form": "shout"}', '{"form": ["mark"]}'])
def test_notes_that_hold_no_known_form_are_refused_in_one_sentence(tmp_path: Path, notes: str):
    model = random_base(tmp_path, small_tokenizer(CHATML_WITH_TOOLS))
    (tmp_path / PROVENANCE).write_text(notes)
    with pytest.raises(ConfigError, match="must be"):
        stored_form(model)


def old_run(folder: Path, *overrides: str) -> Path:
    """The folder of a run that was trained before there were forms, on a base that has words today."""
    base = random_base(folder / "base", small_tokenizer(CHATML_WITH_TOOLS), "user")
    config = small_config(f"model={base}", "env=oracle-codes", *FOR_CHARACTERS, *overrides)
    tree = OmegaConf.create(to_yaml(config))
    del tree["imagine"]["form"]
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(tree))
    return folder


def test_a_run_from_before_there_were_forms_has_the_mark(tmp_path: Path):
    run = old_run(tmp_path)
    assert from_yaml(run / "config.yaml").imagine.form == "mark"
    assert load_config([], run=run).imagine.form == "mark", "resumed"
    agent = load_agent(run, adapter="none")
    assert (agent.config.imagine.form, agent.runner_config.form) == ("mark", "mark")


def test_runs_that_show_nothing_are_one_experiment_whatever_the_form(tmp_path: Path):
    for overrides, same in ((("algo=dapo",), True), (("algo=dapo", "feedback=own"), False), ((), False)):
        before = from_yaml(old_run(tmp_path / "-".join(("run", *overrides)), *overrides) / "config.yaml")
        now = replace(before, imagine=replace(before.imagine, form="auto"))
        assert (experiment(before) == experiment(now)) == same


def test_a_child_that_has_found_its_form_is_the_run_that_is_wanted(tmp_path: Path):
    overrides = ("preset=tiny", "steps=3")
    found = load_config([*overrides, f"output_dir={tmp_path}", "imagine.form=mark"])
    (tmp_path / "config.yaml").write_text(to_yaml(found))
    assert ChildRun.wanted("run", tmp_path, overrides).started
    with pytest.raises(Exception, match=r"was trained with imagine\.form=mark, not user"):
        ChildRun.wanted("run", tmp_path, (*overrides, "imagine.form=user"))


@pytest.mark.parametrize("form", ["tool", "user"])
def test_after_kill_9_a_run_with_words_goes_on_as_if_undisturbed_although_its_base_has_changed(
    form: str, tmp_path: Path
):
    base = tmp_path / "base"
    shutil.copytree(model_source("tiny"), base)

    def settings(run: str) -> list[str]:
        (base / PROVENANCE).write_text(json.dumps({"form": form}))
        return [*SETTINGS, f"model={base}", f"output_dir={tmp_path / run}"]

    assert lfo("train", *settings("whole")) == 0
    process = start(KILLED, "update", "4", "train", *settings("run"))
    process.communicate(timeout=300)
    (base / PROVENANCE).write_text('{"form": "mark"}')
    assert lfo("train", "--resume", str(tmp_path / "run")) == 0
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert from_yaml(whole / "config.yaml").imagine.form == from_yaml(run / "config.yaml").imagine.form == form
    assert rows(run) == rows(whole)
    assert adapters(run) == adapters(whole)


# --- what is sampled is what is trained --------------------------------------------------------------------------


def check_rows(trainer: Trainer, rollouts: Sequence[Rollout], words: str) -> None:
    """Sampled log-probs are the learner's, and no loss is on a token that was told."""
    model, temperature = model_of(trainer), trainer.config.rollout.temperature
    largest, checked = 0.0, 0
    for rollout in rollouts:
        sample = policy_sample(rollout, 1.0, adapters=("policy",), observed=Observed(tools=None))
        assert sample is not None
        tokens_BT = torch.tensor([sample.tokens])
        with torch.no_grad():
            hidden_BTD = model.hidden(tokens_BT, model.policy_adapters)
            logprobs_BT, _ = fused_token_logprobs(hidden_BTD, model.head, tokens_BT, temperature=temperature)
        sampled = torch.tensor(sample.policy_weights) > 0
        largest = max(largest, float((logprobs_BT[0] - torch.tensor(sample.logprobs))[sampled].abs().max()))
        checked += int(sampled.sum())
        assert [origin == Origin.SAMPLED for origin in rollout.origins[: len(sample.tokens)]] == sampled.tolist()
        for turn in rollout.turns:
            told = range(turn.observation_start, min(turn.observation_end, len(sample.tokens)))
            if turn.predicted:
                assert words in trainer.backend.agent.codec.decode(rollout.tokens[told.start : turn.observation_end])
                assert not any(sample.policy_weights[place] or sample.world_model_weights[place] for place in told)
    assert checked > 100
    assert largest < 1e-4


def words_of(form: str) -> str:
    return {"mark": "(expected) ", "tool": "has not been made", "user": "has not been made"}[form]


@FORMS
def test_sampled_log_probs_are_the_trainers_in_every_form(form: str):
    trainer = small_trainer(f"imagine.form={form}", "feedback=own", "seed=3", environment=fussy_calls)
    randomised(model_of(trainer))
    trainer.backend.sync(0)
    rollouts = [rollout for rollout in trainer.collect(trainer.plan(0)).rollouts if rollout.tokens]
    shown = [turn for rollout in rollouts for turn in rollout.turns if turn.predicted]
    assert {turn.feedback for turn in shown} == {True, False}, "feedback and look-ahead"
    check_rows(trainer, rollouts, words_of(form))


class Curious(Oracles):
    """Names a call before every first turn, so that a base that calls nothing is shown something too."""

    def lookahead_query(self, transcript: Sequence[Message]) -> ToolCall | None:
        known = any(message.role in ("assistant", "tool") for message in transcript)
        return None if known else ToolCall(name="open_door", arguments={"words": ["ash"]})


@FORMS
def test_sampled_log_probs_are_the_trainers_on_an_instruct_model_in_every_form(form: str, tmp_path: Path):
    model = random_base(tmp_path, small_tokenizer(CHATML_WITH_TOOLS), form)
    config = small_config(f"model={model}", "lookahead_source=truth", *FOR_CHARACTERS)
    trainer = create_trainer(config, Curious, load_tokenizer(model))
    assert trainer.config.imagine.form == form
    trainer.backend.agent = trainer.backend.agent.on_written_queries()
    randomised(model_of(trainer))
    trainer.backend.sync(0)
    requests = [replace(each, look_ahead=True) for each in _requests(trainer)]
    told = Feedback(after=0, action=say("x", "open_door"), observation="It is shut.")
    rollouts = trainer.backend.roll_out([*requests, *(replace(each, feedback=told) for each in requests)])
    assert {turn.feedback for rollout in rollouts for turn in rollout.turns if turn.predicted} == {True, False}
    check_rows(trainer, rollouts, words_of(form))


def _requests(trainer: Trainer) -> list[Any]:
    return requests_of(trainer.config, trainer.make_environment())


# --- nothing told stays where it must not ------------------------------------------------------------------------

TOLD = Feedback(after=1, action=say("c"), observation="You said c.")


def shown_and_told(form: str) -> Played:
    """A is imagined, B made, then feedback is told, and D made."""
    return play(A, B, say("d"), turns=2, form=form, feedback=TOLD, most=1)


@FORMS
def test_a_row_that_is_imitated_is_one_that_was_shown_nothing(form: str):
    shown, blind = shown_and_told(form).rollout, play(B, say("d"), turns=2, blind=True).rollout
    assert [(turn.predicted, turn.feedback) for turn in shown.turns] == [
        (True, False),
        (False, False),
        (True, True),
        (False, False),
    ]
    assert without_shown(shown) == without_shown(blind)
    assert len(without_shown(blind).tokens) < len(shown.tokens)


@FORMS
def test_neither_states_nor_world_model_rows_nor_records_depend_on_the_form(form: str):
    codec, known = WorldModelCodec(tokenizer()), shown_and_told("mark").rollout
    shown = shown_and_told(form).rollout
    assert codec.examples_of(shown, predict=None) == codec.examples_of(known, predict=None)
    assert render_state(state_of(shown.opening, shown.turns)) == render_state(state_of(known.opening, known.turns))
    assert rollout_record(shown) == rollout_record(known), "files hold the replies, not the words around them"


class Reading(Asking):
    """Notes every transcript that it is asked about."""

    transcripts: list[Any]

    def lookahead_query(self, transcript: Sequence[Message]) -> ToolCall | None:
        self.transcripts.append(transcript)
        return super().lookahead_query(transcript)


@FORMS
def test_an_environment_reads_the_same_transcripts_in_every_form(form: str):
    read: dict[str, list[Any]] = {}
    for each in ("mark", form):
        kind = type("Reads", (Reading,), {"transcripts": read.setdefault(each, [])})
        read[each].clear()
        play(A, B, turns=2, environment=kind, proposed_by="environment", form=each, feedback=TOLD)
    assert read[form] == read["mark"]
    told = [message for message in read[form][-1] if message.predicted]
    assert {message.role for message in told} == {"assistant", "tool"}
    assert not any(message.role == "user" for message in read[form][-1][1:])


# --- what people and clients are told ----------------------------------------------------------------------------


def test_a_checked_draft_is_displayed_as_one(capsys):
    rollout = play(say("x").replace('"words": "x"', '"word": "x"'), A, A, form="user").rollout
    assert [(turn.predicted, turn.checked) for turn in rollout.turns] == [(True, True), (False, False)]
    console = common.titled("")
    for turn in rollout.turns:
        common.print_turn(console, turn)
    common.print_outcome(console, rollout)
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith('flaw say has no argument "word"') for line in shown)
    assert any(line.startswith("checked say(word=") for line in shown)
    assert any("1 turn, 1 imagined and taken back, 1 checked" in line for line in shown)
    record = rollout_record(rollout)
    assert [turn.get("checked", False) for turn in record["turns"]] == [True, False, False]


@pytest.mark.parametrize(
    ("form", "role", "words"),
    [
        ("mark", "tool", '"(expected) A refund'),
        ("tool", "tool", "That call has not been made. Its expected reply is: "),
        ("user", "user", "That call has not been made. Its expected reply is: "),
    ],
)
def test_a_model_card_describes_the_form_of_its_run(tmp_path: Path, form: str, role: str, words: str):
    agent = small_trainer(f"imagine.form={form}").backend.agent
    (tmp_path / "config.yaml").write_text(to_yaml(agent.config))
    card = model_card(agent, tmp_path, "adapters", own_world_model=True).partition("## Look-ahead")[2]
    exchange = card[card.index('[\n      {\n        "role": "assistant"') :]
    assert words in exchange
    assert exchange.count(f'"role": "{role}"') == 1
    assert ("(expected)" in card) == (form == "mark")
    assert ("as a user message" in card) == (form == "user")


def test_a_run_that_shows_nothing_has_the_form_of_its_base(tmp_path: Path):
    assert form_of(small_config("lookahead=off")).name == "mark"
    unknown = small_config("lookahead=off", f"model={random_base(tmp_path, small_tokenizer(CHATML_WITH_TOOLS))}")
    assert form_of(unknown).name == "tool"
