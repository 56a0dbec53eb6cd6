"""Who answers when look-ahead asks what will be heard: the world model, or a control in its place.

world_model   what the adapter expects: the product
truth         what the environment would really say: the upper bound
shuffled      what the world model expects in another task: must not help
memory        what was heard in the most similar situation so far: what a user would try instead of a world model
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial
from typing import TYPE_CHECKING

from lfo.config import RunConfig
from lfo.env.interface import EnvironmentFactory, predicted_tools
from lfo.errors import EnvironmentFailed
from lfo.protocol.hermes import format_tool_call
from lfo.protocol.world_model import TARGET_TOKENS, WorldModelCodec
from lfo.rollout.certainty import Complete
from lfo.rollout.deliberation import LookAhead, Predictor, Question
from lfo.rollout.reply_memory import ReplyMemory
from lfo.rollout.runner import RunnerSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make_lookahead(
    config: RunConfig,
    environment: EnvironmentFactory,
    codec: WorldModelCodec,
    complete: Complete,
    memory: ReplyMemory | None = None,
    tools: Container[str] | None = None,
) -> LookAhead | None:
    """How a run looks ahead, by its settings; None where it does not. `tools`: whose calls may be imagined, where the
    run had to find out."""
    if config.lookahead == "off":
        return None
    return LookAhead(
        predictor=_predictor(config, environment, codec, complete, memory),
        proposed_by=config.lookahead,
        tools=predicted_tools(environment(), config.world_model.predict) if tools is None else tools,
        drafts=config.imagine.drafts,
    )


def _predictor(
    config: RunConfig,
    environment: EnvironmentFactory,
    codec: WorldModelCodec,
    complete: Complete,
    memory: ReplyMemory | None,
) -> Predictor:
    if config.lookahead_source == "truth":
        return true_reply_predictor(environment, RunnerSettings.of_run(config))
    if memory is not None:
        return memory_predictor(memory)
    predictor = world_model_predictor(codec, complete)
    return shuffled_predictor(predictor) if config.lookahead_source == "shuffled" else predictor


def world_model_codec(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> WorldModelCodec:
    """The codec of a run's world model; its questions leave room for a reply."""
    world, context = config.world_model, config.rollout.max_context
    return WorldModelCodec(
        tokenizer,
        state_tokens=world.state_tokens,
        target_tokens=max(TARGET_TOKENS, world.reply_tokens),
        question_tokens=context - world.reply_tokens,
    )


def world_model_predictor(codec: WorldModelCodec, complete: Complete) -> Predictor:
    def answer(questions: Sequence[Question]) -> list[str]:
        prompts = [codec.question_ids(question.state, question.call) for question in questions]
        return [codec.decode_for_policy(ids) for ids in complete(prompts)]

    return _each_once(answer)


def memory_predictor(memory: ReplyMemory) -> Predictor:
    """What the memory holds at the moment of the question; nothing while it is empty."""
    return _each_once(lambda questions: memory.recall([(question.state, question.call) for question in questions]))


def _each_once(answer: Predictor) -> Predictor:
    """The rollouts of one task mostly ask the same: `answer` is given distinct questions."""

    def predict(questions: Sequence[Question]) -> list[str]:
        keys = [question.key for question in questions]
        distinct = dict(zip(keys, questions, strict=True))
        replies = dict(zip(distinct, answer(list(distinct.values())), strict=True))
        return [replies[key] for key in keys]

    return predict


def true_reply_predictor(environment: EnvironmentFactory, settings: RunnerSettings) -> Predictor:
    """Asks a second environment in which everything that was said is said again, then the imagined call.

    Where that environment fails there is nothing to tell.
    """

    def ask(question: Question) -> str:
        copy = environment()
        copy.reset(question.task)
        for message in question.messages:
            copy.step(message)
        return copy.step(format_tool_call(question.call)).observation

    def predict(questions: Sequence[Question]) -> list[str]:
        replies = settings.call_all([partial(ask, question) for question in questions])
        return ["" if isinstance(reply, EnvironmentFailed) else reply for reply in replies]

    return predict


def shuffled_predictor(predictor: Predictor) -> Predictor:
    """Gives every task the reply that was predicted for the next task of the batch; a task alone hears nothing."""

    def predict(questions: Sequence[Question]) -> list[str]:
        replies = predictor(questions)
        first: dict[str, str] = {}
        for question, reply in zip(questions, replies, strict=True):
            first.setdefault(question.task.id, reply)
        tasks = list(first)
        if len(tasks) < 2:
            return [""] * len(questions)
        following = {task: first[tasks[(place + 1) % len(tasks)]] for place, task in enumerate(tasks)}
        return [following[question.task.id] for question in questions]

    return predict
