"""Rollouts in each model's own form, with thoughts and several calls in a message: sampled tokens are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from lfo.env.tool_environment import ToolEnvironment, tool
from lfo.model.adapters import DualAdapterModel
from lfo.model.sampler import Sampler, Session
from lfo.objectives.losses import fused_token_logprobs
from lfo.play.episode import RolloutRequest
from lfo.play.feedback import feedback_from
from lfo.play.look_ahead import EXPECTED, LookAhead, Question
from lfo.play.records import rollout_record
from lfo.play.runner import Runner, RunnerConfig
from lfo.protocol.chat import ChatCodec
from lfo.protocol.hermes import format_tool_call
from lfo.protocol.world_model import WorldModelCodec, observed_calls
from lfo.rows.samples import policy_sample
from lfo.rows.successes import without_shown
from lfo.types import Message, Observed, Origin, Rollout, Speech, StopReason, ToolCall
from small_runs import randomised
from small_tokenizers import FAMILIES, family_tokenizer

THOUGHT = "Red or blue? <tool_call> perhaps."


@dataclass(frozen=True)
class Hunt:
    id: str = "hunt"


class Rooms(ToolEnvironment):
    """Doors that can be opened, and one that leads out; it notes what it hears."""

    max_mistakes = 2

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.heard: list[str] = []

    def tasks(self, split: str) -> list[Hunt]:
        return [Hunt()]

    def start(self, task: Hunt) -> list[Message]:
        return [Message(role="user", content="Find the way out.")]

    def step(self, message: str) -> Any:
        self.heard.append(message)
        return super().step(message)

    @tool
    def open_door(self, colour: str) -> str:
        """Open a door.

        colour: of the door
        """
        self.opened.append(colour)
        return f'Behind the {colour} door it is "dark".'

    def finished(self) -> bool:
        return self.opened[-1:] == ["white"]

    def reward(self) -> float:
        return float(self.finished())


def door(colour: str) -> ToolCall:
    return ToolCall(name="open_door", arguments={"colour": colour})


class Prompted:
    """Slots of the real sampler that say given texts: it is given the numbers at which its own distribution draws them.

    A text is token ids of the model's own form, end of turn included.
    """

    def __init__(self, session: Session, model: DualAdapterModel, said: Sequence[Sequence[Sequence[int]]]) -> None:
        self.session, self.model = session, model
        self.said = [list(map(list, texts)) for texts in said]
        self.extend, self.rewind, self.room = session.extend, session.rewind, session.room

    def decode(self, slots, *, max_new_tokens, temperature, uniforms) -> list[Speech]:
        texts = [self.said[slot].pop(0) for slot in slots]
        numbers = [self.numbers(self.session.tokens(slot), ids) for slot, ids in zip(slots, texts, strict=True)]
        answers = self.session.decode(
            slots, max_new_tokens=[len(ids) for ids in texts], temperature=temperature, uniforms=numbers
        )
        assert [list(answer.tokens) for answer in answers] == texts
        return answers

    @torch.no_grad()
    def numbers(self, before: Sequence[int], ids: Sequence[int]) -> list[float]:
        tokens_BT = torch.tensor([[*before, *ids]])
        hidden_BTD = self.model.hidden(tokens_BT, self.model.policy_adapters)
        logits_TV = hidden_BTD[0, len(before) - 1 : -1].double() @ self.model.head.double().T
        chances_TV = logits_TV.softmax(-1)
        chosen_T1 = torch.tensor(ids)[:, None]
        middle = chances_TV.cumsum(-1).gather(1, chosen_T1) - chances_TV.gather(1, chosen_T1) / 2
        return middle[:, 0].tolist()


@dataclass
class Played:
    codec: ChatCodec
    model: DualAdapterModel
    rollouts: list[Rollout]
    environments: list[Rooms]


def small_llama(tokenizer: PreTrainedTokenizerBase) -> DualAdapterModel:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=2048, **shape)
    return randomised(DualAdapterModel.build(LlamaForCausalLM(config), coupling="separate", seed=0, rank=4, alpha=8))


def play(
    family: str,
    said: Sequence[Sequence[Sequence[ToolCall] | str]],
    *,
    lookahead: LookAhead | None = None,
    **request: Any,
) -> Played:
    """Rollouts whose policies say these messages: calls, written in the family's form, or text; each after a thought
    where the family thinks."""
    tokenizer = family_tokenizer(family)
    thinking = family == "thinking"
    codec, model = ChatCodec(tokenizer, Rooms().tools(), thinking=thinking), small_llama(tokenizer)

    def ids(message: Sequence[ToolCall] | str) -> list[int]:
        text = message if isinstance(message, str) else codec.form.render(message)
        thought = f"{THOUGHT}\n</think>\n\n" if thinking else ""
        return [*tokenizer.encode(thought + text, add_special_tokens=False), codec.end_of_turn]

    sampler = Sampler(model, max_context=2048, eos_ids=codec.ends)
    session = sampler.session(slots=len(said), adapters=model.policy_adapters)
    slots = Prompted(session, model, [[ids(message) for message in messages] for messages in said])
    environments: list[Rooms] = []

    def environment() -> Rooms:
        environments.append(Rooms())
        return environments[-1]

    settings = RunnerConfig(max_turns=len(said[0]), max_turn_tokens=400, environment_workers=1)
    runner = Runner(environment, codec, config=settings, lookahead=lookahead)
    requests = [RolloutRequest(task=Hunt(), seeds=(place,), **request) for place in range(len(said))]
    return Played(codec, model, runner.run(requests, slots), environments)


def trained_logprobs(played: Played, rollout: Rollout) -> torch.Tensor:
    tokens_BT = torch.tensor([rollout.tokens])
    with torch.no_grad():
        hidden_BTD = played.model.hidden(tokens_BT, played.model.policy_adapters)
        return fused_token_logprobs(hidden_BTD, played.model.head, tokens_BT, temperature=1.0)[0][0]


TWO_AND_ONE = [[door("red"), door("blue")], [door("white")]]
EACH = pytest.mark.parametrize("family", FAMILIES)


@EACH
def test_two_calls_in_a_message_are_made_in_order_and_sampled_is_trained(family: str):
    played = play(family, [TWO_AND_ONE, [[door("green")], [door("white"), door("red")]]])
    (first, second), codec = played.rollouts, played.codec
    for rollout in played.rollouts:
        sampled = torch.tensor(rollout.origins) == Origin.SAMPLED
        recorded = torch.tensor(rollout.logprobs)
        assert (trained_logprobs(played, rollout) - recorded)[sampled].abs().max() < 1e-4
        assert recorded[sampled].max() < -1, "they are log-probs of a policy that has learned nothing"
        assert recorded[~sampled].abs().max() == 0
    assert [rollout.stop for rollout in played.rollouts] == [StopReason.DONE] * 2
    assert [rollout.reward for rollout in played.rollouts] == [1.0, 1.0]
    assert [environment.opened for environment in played.environments] == [["red", "blue", "white"], ["green", "white"]]
    assert [turn.call for turn in first.turns] == [door("red"), door("blue"), door("white")]
    assert [turn.action for turn in first.turns] == [format_tool_call(turn.call) for turn in first.turns if turn.call]
    assert [turn.call for turn in second.turns] == [door("green"), door("white")], "the end leaves out what follows"

    sample = policy_sample(first, 1.0, adapters=("policy",), observed=Observed(tools=None))
    assert sample is not None
    observed = [place for turn in first.turns for place in range(turn.observation_start, turn.observation_end)]
    assert [place for place, weight in enumerate(sample.world_model_weights) if weight] == observed
    assert [place for place, weight in enumerate(sample.policy_weights) if weight] == [
        place for place, origin in enumerate(first.origins) if origin == Origin.SAMPLED
    ]
    message = codec.read(first.tokens[first.turns[0].action_start : first.turns[0].action_end])
    assert message.calls == (door("red"), door("blue"))
    assert first.turns[1].action_start == first.turns[1].action_end == first.turns[1].observation_start
    for turn in first.turns:
        heard = codec.decode(first.tokens[turn.observation_start : turn.observation_end])
        assert heard.replace("\\", "") == turn.observation
    assert without_shown(first).tokens == first.tokens[: max(where(first)) + 1], "nothing was shown, nothing is cut"


def where(rollout: Rollout) -> list[int]:
    return [place for place, origin in enumerate(rollout.origins) if origin == Origin.SAMPLED]


def test_thoughts_are_sampled_and_trained_and_nobody_else_hears_them():
    played = play("thinking", [TWO_AND_ONE])
    (rollout,), (environment,) = played.rollouts, played.environments
    text = played.codec.decode(
        [rollout.tokens[place] for place in where(rollout) if rollout.tokens[place] not in played.codec.ends]
    )
    assert text.count(THOUGHT) == 2, "sampled, and kept in the rollout"
    assert [turn.thought for turn in rollout.turns] == [THOUGHT, "", THOUGHT]
    seen = [*environment.heard, *(turn.action + turn.observation for turn in rollout.turns)]
    codec = WorldModelCodec(family_tokenizer("thinking"))
    for example in codec.examples_of(rollout, predict=None):
        seen += [codec.prompt_text(example), codec.reply_text(example)]
    assert len(seen) == 3 + 3 + 2 * 3
    assert not any("Red or blue" in each for each in seen)
    assert [turn.get("thought") for turn in rollout_record(rollout)["turns"]] == [THOUGHT, None, THOUGHT]


def test_a_rollout_with_thoughts_and_several_calls_travels_between_processes():
    """As the verl engine sends it: plain data on the wire."""
    msgspec = pytest.importorskip("msgspec")
    played = play("thinking", [TWO_AND_ONE, [format_tool_call(door("red"))[:-4], [door("white")]]])
    for rollout in played.rollouts:
        wire = msgspec.json.encode(msgspec.to_builtins(rollout))
        assert msgspec.convert(msgspec.json.decode(wire), Rollout) == rollout


def test_a_thought_without_an_end_is_no_call_and_no_answer():
    tokenizer = family_tokenizer("thinking")
    codec = ChatCodec(tokenizer, Rooms().tools(), thinking=True)
    said = codec.read(tokenizer.encode(THOUGHT + format_tool_call(door("red")), add_special_tokens=False))
    assert (said.calls, said.message) == ((), "")


@EACH
def test_calls_of_which_one_cannot_be_read_are_not_made(family: str):
    good = play(family, [[[door("red")]]])
    text = good.codec.form.render([door("red"), door("blue")])
    cut = text[: text.rindex("blue") + 2]
    played = play(family, [[cut, [door("white")]]])
    (rollout,), (environment,) = played.rollouts, played.environments
    assert environment.opened == ["white"]
    assert rollout.turns[0].call is None
    assert "tool call" in rollout.turns[0].observation or "parameter" in rollout.turns[0].observation
    assert environment.mistakes == 1
    assert [seen.call for seen in observed_calls(rollout)] == [door("white")]


def test_each_call_is_an_exchange_for_the_world_model_and_for_feedback():
    (rollout,) = play("mistral", [[*TWO_AND_ONE[:1], [door("green")]]]).rollouts
    steps = [
        (seen.state.step, seen.call.arguments["colour"], len(seen.state.actions)) for seen in observed_calls(rollout)
    ]
    assert steps == [(1, "red", 0), (2, "blue", 1), (3, "green", 2)]
    feedback = feedback_from([rollout], tools=None)
    assert feedback is not None
    shown = play("mistral", [[[door("white")]]], feedback=feedback)
    (turn, _), codec = shown.rollouts[0].turns, shown.codec
    assert turn.feedback
    ids = shown.rollouts[0].tokens[turn.action_start : turn.action_end]
    assert codec.read(ids).calls == (door("red"),), "in the family's own form"
    assert codec.decode(ids).startswith("[TOOL_CALLS]")


@EACH
def test_one_call_may_be_imagined_and_several_are_made(family: str):
    asked: list[Question] = []

    def predictor(questions: Sequence[Question]) -> list[str]:
        asked.extend(questions)
        return ["Only a wall." for _ in questions]

    # It drafts the red door, is told of a wall, and opens two others instead, which nobody imagines.
    lookahead = LookAhead(predictor=predictor, most=2)
    played = play(family, [[[door("red")], [door("blue"), door("white")]]], lookahead=lookahead)
    (rollout,), (environment,) = played.rollouts, played.environments
    assert [question.call for question in asked] == [door("red")]
    assert environment.opened == ["blue", "white"]
    assert [(turn.predicted, turn.call) for turn in rollout.turns] == [
        (True, door("red")),
        (False, door("blue")),
        (False, door("white")),
    ]
    shown = rollout.tokens[rollout.turns[0].observation_start : rollout.turns[0].observation_end]
    assert played.codec.decode(shown) == EXPECTED + "Only a wall."
    sampled = torch.tensor(rollout.origins) == Origin.SAMPLED
    assert (trained_logprobs(played, rollout) - torch.tensor(rollout.logprobs))[sampled].abs().max() < 1e-4
