"""The predictors of look-ahead: the world model, or a control that replaces it.

world_model   the prediction of the adapter: the product
truth         the real reply of the environment: the upper bound
shuffled      the prediction for another task: must not help
memory        the reply in the most similar situation so far: what a user would try instead of a world model
memory_first  the memory, until the world model predicts new replies as well
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import TYPE_CHECKING

from lfo.config import RunConfig
from lfo.env.answers import checked_step, id_of, opening_of
from lfo.env.interface import Environment, EnvironmentFactory, imagined_tools, same_meaning
from lfo.errors import EnvironmentFailed
from lfo.play.look_ahead import LookAhead, Predictor, Question
from lfo.play.memory_first import MemoryFirst
from lfo.play.reply_store import ReplyStore
from lfo.play.runner import RunnerConfig
from lfo.protocol.hermes import format_tool_call
from lfo.protocol.world_model import TARGET_TOKENS, WorldModelCodec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Complete = Callable[[Sequence[Sequence[int]]], Sequence[Sequence[int]]]  # prompts -> what the world model writes


def make_lookahead(
    config: RunConfig,
    make_environment: EnvironmentFactory,
    codec: WorldModelCodec,
    complete: Complete,
    store: ReplyStore | MemoryFirst | None = None,
    tools: Container[str] | None = None,
) -> LookAhead | None:
    """Return the look-ahead of a config, or None if it is off.

    `tools` are the tools that may be imagined, if neither config nor environment names them.
    """
    if config.lookahead == "off":
        return None
    if tools is None:
        asks = RunnerConfig.of_run(config).ask
        tools = asks(lambda: imagined_tools(make_environment(), config.world_model.predict))
    if config.source.is_true:
        predictor = true_reply_predictor(make_environment, RunnerConfig.of_run(config))
    elif store is not None:
        predictor = _each_once(store.answer)
    else:
        predictor = world_model_predictor(codec, complete)
        predictor = shuffled_predictor(predictor) if config.lookahead_source == "shuffled" else predictor
    if config.is_auto:
        predictor = _true_where_asked(predictor, true_reply_predictor(make_environment, RunnerConfig.of_run(config)))
    return LookAhead(
        predictor=predictor,
        tools=tools,
        drafts=config.imagine.drafts,
    )


def new_reply_store(
    config: RunConfig, make_environment: EnvironmentFactory, codec: WorldModelCodec, complete: Complete
) -> ReplyStore | MemoryFirst | None:
    """Return the empty store of replies that a run needs, if any."""
    if config.lookahead_source == "memory":
        return ReplyStore()
    if config.lookahead_source == "memory_first":
        asks = RunnerConfig.of_run(config).ask
        environment = asks(make_environment)

        def judge(predicted: str, actual: str) -> bool:
            return asks(partial(means, environment, predicted, actual))

        return MemoryFirst(store=ReplyStore(), world_model=world_model_predictor(codec, complete), judge=judge)
    return None


def means(judge: Environment, predicted: str, actual: str) -> bool:
    """Whether a predicted reply means the true one, or has its words if the environment cannot tell."""
    same = same_meaning(judge, predicted, actual)
    return predicted.split() == actual.split() if same is None else same


def world_model_codec(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> WorldModelCodec:
    """Return the codec of a run's world model; its questions leave room for a reply."""
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


def _each_once(answer: Predictor) -> Predictor:
    """Pass only distinct questions to `answer`: the rollouts of one task mostly ask the same."""

    def predict(questions: Sequence[Question]) -> list[str]:
        keys = [question.key for question in questions]
        distinct = dict(zip(keys, questions, strict=True))
        replies = dict(zip(distinct, answer(list(distinct.values())), strict=True))
        return [replies[key] for key in keys]

    return predict


def _true_where_asked(predictor: Predictor, truth: Predictor) -> Predictor:
    """Let `truth` answer the questions of seats that are shown true replies."""

    def predict(questions: Sequence[Question]) -> list[str]:
        answers = {
            asked: iter(answer(own) if (own := [each for each in questions if each.truth == asked]) else ())
            for asked, answer in ((False, predictor), (True, truth))
        }
        return [next(answers[question.truth]) for question in questions]

    return predict


def true_reply_predictor(make_environment: EnvironmentFactory, runner_config: RunnerConfig) -> Predictor:
    """Replay the real messages in a second environment, then make the imagined call there.

    If that environment fails, the reply is "".
    """

    def ask(question: Question) -> str:
        copy = make_environment()
        opening_of(copy, question.task)
        for message in question.messages:
            checked_step(copy, message)
        return checked_step(copy, format_tool_call(question.call)).observation[: runner_config.most_chars]

    def predict(questions: Sequence[Question]) -> list[str]:
        replies = runner_config.call_all([partial(ask, question) for question in questions])
        return ["" if isinstance(reply, EnvironmentFailed) else reply for reply in replies]

    return predict


def shuffled_predictor(predictor: Predictor) -> Predictor:
    """Give each task the reply predicted for the next task of the batch; "" if there is only one task."""

    def predict(questions: Sequence[Question]) -> list[str]:
        replies = predictor(questions)
        first: dict[str, str] = {}
        for question, reply in zip(questions, replies, strict=True):
            first.setdefault(id_of(question.task), reply)
        tasks = list(first)
        if len(tasks) < 2:
            return [""] * len(questions)
        following = {task: first[tasks[(index + 1) % len(tasks)]] for index, task in enumerate(tasks)}
        return [following[id_of(question.task)] for question in questions]

    return predict
