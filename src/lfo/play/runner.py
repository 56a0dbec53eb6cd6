"""Run rollouts: tasks in, finished rollouts out, with any environment and any sampler.

All rollouts of a batch run turn by turn together: the policy speaks, looks ahead (`deliberation`), and then all
environments reply in parallel. Within a turn, a rollout that has finished speaking leaves the sampler's batch; a
finished rollout leaves for good. Because turns are synchronous, a batch depends only on its seeds and not on how fast
an environment replies.

An environment that raises or hangs ends its own rollout, with a reason. Only this module catches such failures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from lfo.config import RunConfig
from lfo.env.answers import MOST_REWARD, checked_step, described, opening_of
from lfo.env.interface import DescribesReplies, Environment, EnvironmentFactory
from lfo.env.patience import ask, call_all, name_of, naming
from lfo.errors import ConfigError, EnvironmentFailed
from lfo.play.episode import CHARS_A_TOKEN, Episode, RolloutRequest, SamplerSlots, sample
from lfo.play.look_ahead import Deliberation, LookAhead, show_exchange
from lfo.protocol.chat import ChatCodec, ParsedMessage, Tokens
from lfo.protocol.hermes import read_tool_call
from lfo.protocol.shown import SHOWN_FORMS, ShownForm
from lfo.types import Message, ReplyFacts, Rollout, StepResult, StopReason, ToolCall, Turn, exchanged

ENVIRONMENT_FAILURES = frozenset({StopReason.ENVIRONMENT_ERROR, StopReason.ENVIRONMENT_TIMEOUT})
RETRIES = 2  # retries of a call to an environment that raised, except of a step

Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerConfig:
    max_turns: int = 16
    max_turn_tokens: int = 160
    environment_timeout: float = 30.0
    temperature: float = 1.0
    environment_retries: int = RETRIES
    environment_workers: int = 16  # environments that step at the same time
    max_context: int = 8192  # tokens of a rollout
    form: str = "mark"  # how the policy is told of imagined replies and feedback

    @property
    def most_chars(self) -> int:
        """The most characters of a reply, or of an opening."""
        return CHARS_A_TOKEN * self.max_context

    @classmethod
    def of_run(cls, config: RunConfig, **others: Any) -> RunnerConfig:
        """Return the runner config of a run; `others` override single values."""
        shared = ("max_turns", "max_turn_tokens", "temperature", "environment_timeout", "max_context")
        values = {name: getattr(config.rollout, name) for name in shared}
        return cls(**(values | {"environment_retries": RETRIES, "form": config.imagine.form} | others))

    @property
    def shown(self) -> ShownForm:
        """The form itself; `auto` must have become a form before anything is shown (`lfo.base_form`)."""
        return SHOWN_FORMS[self.form]

    def call_all(
        self, calls: Sequence[Callable[[], Any]], *, repeatable: bool = True, what: str = "the environment"
    ) -> list[Any]:
        """Run calls to environments in parallel; return each result, or an `EnvironmentFailed`, in order.

        A repeatable call makes a new environment or only asks one, so it is retried if it raised. A step is not
        repeatable: it may have acted before it raised. A failure says `what` raised or did not answer.
        """
        return call_all(
            calls,
            timeout=self.environment_timeout,
            retries=self.environment_retries if repeatable else 0,
            workers=self.environment_workers,
            what=what,
        )

    def ask(self, call: Callable[[], Answer], what: str = "the environment") -> Answer:
        """Return the answer of one call outside of rollouts, which may load data first; raise its failure."""
        return ask(call, timeout=self.environment_timeout, what=what)


class Runner:
    """Runs batches of rollouts; `lookahead=None` turns look-ahead off."""

    def __init__(
        self,
        make_environment: EnvironmentFactory,
        codec: ChatCodec,
        *,
        config: RunnerConfig,
        lookahead: LookAhead | None = None,
    ) -> None:
        self._make_environment = make_environment
        self._codec = codec
        self.config = config
        self._lookahead = lookahead

    def run(
        self,
        requests: Sequence[RolloutRequest],
        slots: SamplerSlots,
        *,
        temperature: float | None = None,
        on_turn: Callable[[Turn], None] | None = None,
    ) -> list[Rollout]:
        """Return one rollout for each request, in order; `slots` are new slots of a sampler, one for each request.

        `on_turn` is called with each turn, including imagined ones, as soon as it is over.
        """
        temperature = self.config.temperature if temperature is None else temperature
        batch = [
            Episode(slot=slot, request=request, slots=slots, most_chars=self.config.most_chars, on_turn=on_turn)
            for slot, request in enumerate(requests)
        ]
        self._reset_environments(batch)
        proposed_by = self._lookahead.proposed_by if self._lookahead else None
        deliberation = self._deliberation(slots)
        for turn in range(self.config.max_turns):
            alive = [episode for episode in batch if episode.stop is None]
            if not alive:
                break
            self._show_feedback(alive)
            if deliberation and proposed_by == "environment":
                deliberation.look_ahead(alive)
            self._sample_messages([episode for episode in alive if episode.stop is None], slots, turn, temperature)
            if deliberation and proposed_by == "policy":
                deliberation.reconsider([episode for episode in alive if episode.stop is None], turn, temperature)
            self._step_environments([episode for episode in alive if episode.stop is None])
        for episode in batch:
            episode.stop = episode.stop or StopReason.MAX_TURNS
        return [episode.finished() for episode in batch]

    def _deliberation(self, slots: SamplerSlots) -> Deliberation | None:
        if self._lookahead is None:
            return None
        limit, call = self.config.max_turn_tokens, self.config.call_all
        shown = self.config.shown
        return Deliberation(self._lookahead, self._codec, slots, form=shown, max_turn_tokens=limit, call_all=call)

    def _reset_environments(self, batch: Sequence[Episode]) -> None:
        name = name_of(self._make_environment)

        def start(episode: Episode) -> tuple[Environment, tuple[Message, ...]]:
            with naming(f"the constructor of {name}"):
                environment = self._make_environment()
            with naming(task := f"a task of {name_of(environment)}"):
                episode.identify(task)
            return environment, opening_of(environment, episode.request.task)

        starts = [partial(start, episode) for episode in batch]
        outcomes = self.config.call_all(starts, what=f"the constructor or reset of {name}")
        for episode, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, EnvironmentFailed):
                episode.fail(outcome)
                continue
            episode.environment, opening = outcome
            episode.opening = tuple(replace(each, content=each.content[: episode.most_chars]) for each in opening)
            episode.transcript = list(episode.opening)
            episode.cut = int(sum(len(each.content) for each in opening) > episode.most_chars)
            if episode.cut or not self._write_opening(episode):
                episode.stop = episode.stop or StopReason.CONTEXT_OVERFLOW

    def _write_opening(self, episode: Episode) -> bool:
        """Write the opening messages; return False if there is no room, or if the template rejects them."""
        try:
            return episode.write(self._codec.opening(episode.opening)) is not None
        except ConfigError as error:
            episode.fail(EnvironmentFailed(f"reset of {name_of(episode.environment)}: {error}"))
            return False

    def _show_feedback(self, alive: Sequence[Episode]) -> None:
        """Show episodes their feedback once they have had as many real turns as it requires, if there is room."""
        for episode in alive:
            feedback, real = episode.request.feedback, sum(not turn.predicted for turn in episode.turns)
            if feedback is not None and feedback.after <= real and not any(turn.feedback for turn in episode.turns):
                action, reply, form = feedback.action, feedback.observation, self.config.shown
                show_exchange(episode, self._codec, action, reply, form=form, feedback=True)

    def _sample_messages(self, batch: Sequence[Episode], slots: SamplerSlots, turn: int, temperature: float) -> None:
        speeches = sample(batch, slots, (turn,), limit=self.config.max_turn_tokens, temperature=temperature)
        for episode, speech in zip(batch, speeches, strict=True):
            episode.say(speech)
            if not speech.stopped:
                full = slots.room(episode.slot) <= 0
                episode.stop = StopReason.CONTEXT_OVERFLOW if full else StopReason.TURN_OVERFLOW
                said = self._codec.read(speech.tokens)
                self._record_turns(episode, said, [_Exchange(message=said.message)], None)

    def _step_environments(self, alive: Sequence[Episode]) -> None:
        """Send each environment the message of its episode, call by call, and record the replies.

        All environments receive their first call in parallel, then those that are not done their second, and so on.
        """
        said = {each.slot: self._codec.read(each.speech.tokens) for each in alive if each.speech is not None}
        messages = {slot: each.messages for slot, each in said.items()}
        exchanges: dict[int, list[_Exchange]] = {episode.slot: [] for episode in alive}
        for position in range(max(map(len, messages.values()), default=0)):
            calling = [episode for episode in alive if episode.stop is None and position < len(messages[episode.slot])]
            steps = [partial(self._step, episode, messages[episode.slot][position]) for episode in calling]
            name = name_of(calling[0].environment) if calling else "the environment"
            outcomes = self.config.call_all(steps, repeatable=False, what=f"step of {name}")
            for episode, outcome in zip(calling, outcomes, strict=True):
                exchange = _Exchange(message=messages[episode.slot][position])
                if isinstance(outcome, EnvironmentFailed):
                    episode.fail(outcome)
                else:
                    exchange = outcome
                    self._count(episode, outcome)
                exchanges[episode.slot].append(exchange)
                episode.transcript += exchanged(str(exchange.message), exchange.observation, exchange.call)
        for episode in alive:
            self._append_replies(episode, said[episode.slot], exchanges[episode.slot])

    def _step(self, episode: Episode, message: str) -> _Exchange:
        assert episode.environment is not None
        result = checked_step(episode.environment, message)
        cut = len(result.observation) > episode.most_chars
        if cut:
            result = replace(result, observation=result.observation[: episode.most_chars])
        describes = isinstance(episode.environment, DescribesReplies)
        facts = described(episode.environment, result.observation) if describes else None
        return _Exchange(message=message, result=result, facts=facts, cut=cut)

    def _count(self, episode: Episode, exchange: _Exchange) -> None:
        """Add the result of a step to its episode."""
        assert exchange.result is not None
        episode.info, episode.cut = dict(exchange.result.info), episode.cut + exchange.cut
        if abs(episode.reward + exchange.result.reward) > MOST_REWARD:
            what = f"step of {name_of(episode.environment)}"
            episode.fail(EnvironmentFailed(f"{what} returned rewards that exceed {MOST_REWARD:g} in sum"))
            return
        episode.reward += exchange.result.reward
        episode.stop = StopReason.DONE if exchange.result.done else None

    def _append_replies(self, episode: Episode, said: ParsedMessage, exchanges: Sequence[_Exchange]) -> None:
        """Append all replies to one message to the episode, and the prompt for the next message."""
        replies = [exchange.result.observation for exchange in exchanges if exchange.result is not None]
        if episode.stop is StopReason.DONE and not replies[-1]:
            replies.pop()  # nothing to learn from an empty last reply, and no message follows it
        fits = sum(map(len, replies)) <= episode.most_chars and not any(exchange.cut for exchange in exchanges)
        piece = self._codec.after_action(*replies, stopped=True) if replies and fits else None
        if piece is None:
            written = None
            episode.stop = episode.stop or (None if fits else StopReason.CONTEXT_OVERFLOW)
        elif episode.stop is None:
            written = episode.write(piece)
            if written is None:
                episode.stop = StopReason.CONTEXT_OVERFLOW
        else:  # the world model learns from the last reply, but no message follows it
            end = piece.content_end
            last = Tokens(ids=piece.ids[:end], origins=piece.origins[:end], spans=piece.spans)
            written = episode.append(last) if end < episode.slots.room(episode.slot) else None
        self._record_turns(episode, said, exchanges, None if written is None or piece is None else (written, piece))

    def _record_turns(
        self, episode: Episode, said: ParsedMessage, exchanges: Sequence[_Exchange], written: tuple[int, Tokens] | None
    ) -> None:
        """Record the turns of one message; `written` is where its observations start, and their tokens."""
        assert episode.speech is not None
        speech_end = written[0] if written else len(episode.tokens)
        start, action_end = speech_end - len(episode.speech.tokens), speech_end - (1 if episode.speech.stopped else 0)
        spans = [(written[0] + begin, written[0] + end) for begin, end in written[1].spans] if written else []
        for index, exchange in enumerate(exchanges):
            begin, end = spans[index] if index < len(spans) else (len(episode.tokens), len(episode.tokens))
            episode.add(
                Turn(
                    action=str(exchange.message),
                    observation=exchange.observation,
                    call=exchange.call,
                    action_start=begin if index else start,
                    action_end=begin if index else action_end,
                    observation_start=begin,
                    observation_end=end,
                    facts=exchange.facts,
                    thought="" if index else said.thought,
                )
            )


@dataclass(kw_only=True, slots=True)
class _Exchange:
    """One message to an environment and its result; None if the environment failed or was not called."""

    message: str
    result: StepResult | None = None
    facts: ReplyFacts | None = None
    cut: bool = False  # the reply is longer than any context, and only its beginning is here

    @property
    def call(self) -> ToolCall | None:
        return read_tool_call(self.message)

    @property
    def observation(self) -> str:
        return self.result.observation if self.result else ""


def opening_is_too_long(rollout: Rollout) -> bool:
    """Whether the opening and the tools do not fit into the context, so that the policy was never asked."""
    return rollout.stop == StopReason.CONTEXT_OVERFLOW and not rollout.turns


def refuse_dead_environment(rollouts: Sequence[Rollout]) -> None:
    """Raise an `EnvironmentFailed` if no rollout could start or go on; a single failed rollout is data."""
    if rollouts and all(rollout.stop in ENVIRONMENT_FAILURES for rollout in rollouts):
        raise EnvironmentFailed(f"the environment failed in all {len(rollouts)} rollouts: {rollouts[0].error}")
    if rollouts and all(map(opening_is_too_long, rollouts)):
        raise EnvironmentFailed(
            f"opening and tools of all {len(rollouts)} rollouts exceed rollout.max_context: raise it; lfo check-env "
            "shows their length"
        )
