"""Our runner as an agent loop of verl's: one rollout of one task against whatever serves the tokens.

verl runs many of these at the same time, in its agent-loop workers. Environment, protocol, look-ahead and seeds are
those of the local engine; only the rows lie elsewhere (`ServedRows`). An environment that raises ends its own rollout
as data, in the runner; here nothing is caught.
"""

# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

from lfo.config import RunConfig, from_mapping
from lfo.engines.verl.settings import AGENT_LOOP, SAMPLER, run_name, sampling_parameters
from lfo.env.interface import EnvironmentFactory
from lfo.env.scripted import ScriptedCalls
from lfo.loading import environment_factory
from lfo.model.adapters import POLICY, WORLD_MODEL
from lfo.protocol.chat import ChatCodec
from lfo.protocol.world_model import WorldModelCodec
from lfo.rollout.deliberation import LookAhead
from lfo.rollout.predictors import make_lookahead, world_model_codec
from lfo.rollout.row import Feedback, RolloutRequest
from lfo.rollout.runner import Runner, RunnerSettings
from lfo.types import Origin, Rollout

# Each rollout in a thread of its own, which mostly waits for its server: all rollouts of a step are under way together,
# so that servers see the requests of a turn at once. asyncio's own threads would be as few as the machine has cores.
MOST_AT_ONCE = 1024
_threads = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="rollout")


class RolloutOutput(AgentLoopOutput):
    """verl's output, which carries the rollout itself beside the fields that verl knows."""

    rollout: Any = None

    def as_dict(self) -> dict[str, Any]:
        fields = super().as_dict()
        fields["rollout"] = msgspec.to_builtins(self.rollout)  # plain data on the wire; `Cluster` builds it again
        return fields


@dataclass(frozen=True, kw_only=True, slots=True)
class _Said:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    stopped: bool


class ServedRows:
    """One row that a server continues: what `lfo.rollout.runner.Rows` asks for, with the row held here."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self._tokens: list[int] = []

    def room(self, row: int) -> int:
        return self._loop.run_config.rollout.max_context - len(self._tokens)

    def rewind(self, row: int, length: int) -> None:
        del self._tokens[length:]

    def extend(self, rows: Sequence[int], chunks: Sequence[Sequence[int]]) -> None:
        for chunk in chunks:
            self._tokens.extend(chunk)

    def decode(
        self, rows: Sequence[int], *, max_new_tokens: Sequence[int], temperature: float, uniforms: Any
    ) -> list[_Said]:
        if not rows:
            return []
        limit = min(max_new_tokens[0], self.room(0))
        if limit <= 0:
            return [_Said(tokens=(), logprobs=(), stopped=False)]
        said = self._loop.ask(
            self._tokens, self._loop.adapter, limit=limit, temperature=temperature, uniforms=uniforms[0]
        )
        self._tokens.extend(said.tokens)
        return [said]


class ScriptedRows(ServedRows):
    """The row of a base that cannot speak: it says something, for the time that takes, and the script's words then
    stand in its place."""

    def __init__(self, loop: Any, environment: ScriptedCalls) -> None:
        super().__init__(loop)
        self._environment = environment

    def decode(self, rows: Sequence[int], **options: Any) -> list[_Said]:
        before = len(self._tokens)
        if not super().decode(rows, **options):
            return []
        del self._tokens[before:]
        words = self._loop.words(self._environment.words)
        self._tokens.extend(words)
        return [_Said(tokens=words, logprobs=(0.0,) * len(words), stopped=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """What all rollouts of a process share; making a codec takes longer than many a rollout."""

    config: RunConfig
    environment: EnvironmentFactory
    codec: ChatCodec
    world_model_codec: WorldModelCodec
    settings: RunnerSettings
    scripted: bool  # what the policy says is replaced: see `ScriptedRows`


_parts: dict[str, _Parts] = {}


def _parts_of(config: Any, tokenizer: Any) -> _Parts:
    name = run_name(config.actor_rollout_ref.rollout)
    if name not in _parts:
        run = from_mapping(cast(Any, OmegaConf.to_container(config.actor_rollout_ref.model.lora.run, resolve=True)))
        environment = config.lfo.environment or environment_factory(run)
        example = environment()
        _parts[name] = _Parts(
            config=run,
            environment=environment,
            codec=ChatCodec(tokenizer, example.tools(), thinking=run.rollout.thinking),
            world_model_codec=world_model_codec(run, tokenizer),
            settings=RunnerSettings.of_run(run, environment_workers=1),  # one environment in each loop
            scripted=isinstance(example, ScriptedCalls),
        )
    return _parts[name]


@register(AGENT_LOOP)
class RunnerLoop(AgentLoopBase):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._parts = _parts_of(self.config, self.tokenizer)
        self.run_config = self._parts.config

    async def run(self, sampling_params: dict[str, Any], **fields: Any) -> AgentLoopOutput:
        """One rollout of `task`: the one whose place in its group is verl's session."""
        member = int(fields["session_id"])
        self._event_loop = asyncio.get_running_loop()
        self._request_id = f"{fields['uid']}-{member}"
        self.adapter = str(fields["adapter"][member])
        feedback = fields["feedback"][member]
        request = RolloutRequest(
            task=fields["task"],
            seeds=tuple(fields["seeds"][member]),
            blind=bool(fields["blind"][member]),
            imagine=fields["imagine"][member],
            picks=bool(fields["picks"][member]),
            inquiry=int(fields["inquiry"][member]),
            untrained=bool(fields["untrained"][member]),
            feedback=None if feedback is None else Feedback(**feedback),
        )
        parts, lookahead = self._parts, None
        if fields["looks_ahead"]:
            lookahead = make_lookahead(
                parts.config, parts.environment, parts.world_model_codec, self._complete, tools=fields["tools"]
            )
        rollout = await self._event_loop.run_in_executor(
            _threads, self._play, request, fields["temperature"], lookahead
        )
        return _output(rollout)

    def _play(self, request: RolloutRequest, temperature: float | None, lookahead: LookAhead | None) -> Rollout:
        parts, environment, rows = self._parts, self._parts.environment, ServedRows(self)
        if parts.scripted:
            one: Any = environment()
            environment, rows = (lambda: one), ScriptedRows(self, one)
        runner = Runner(environment, parts.codec, settings=parts.settings, lookahead=lookahead)
        (rollout,) = runner.run([request], rows, temperature=temperature)
        return dataclasses.replace(rollout, info=_scalars(rollout.info))

    def words(self, text: str) -> tuple[int, ...]:
        """What the policy would have had to say for this text."""
        return (*self._parts.codec.encode_message(text), self._parts.codec.end_of_turn)

    def _complete(
        self, prompts: Sequence[Sequence[int]], uniforms: Sequence[Sequence[float]] | None = None
    ) -> list[tuple[int, ...]]:
        """All at the same time, each as a request of its own."""
        limit, temperature = self.run_config.world_model.reply_tokens, 0.0 if uniforms is None else 1.0

        async def everybody() -> list[_Said]:
            asked = [
                self._answer(prompt, WORLD_MODEL, f"-{place}", limit=limit, temperature=temperature, uniforms=numbers)
                for place, (prompt, numbers) in enumerate(zip(prompts, uniforms or [()] * len(prompts), strict=True))
            ]
            return await asyncio.gather(*asked)

        return [said.tokens for said in asyncio.run_coroutine_threadsafe(everybody(), self._event_loop).result()]

    def ask(
        self, tokens: Sequence[int], adapter: str, *, limit: int, temperature: float, uniforms: Sequence[float]
    ) -> _Said:
        """Let the server continue a row; called from the rollout's own thread."""
        asking = self._answer(tokens, adapter, limit=limit, temperature=temperature, uniforms=uniforms)
        return asyncio.run_coroutine_threadsafe(asking, self._event_loop).result()

    async def _answer(
        self,
        tokens: Sequence[int],
        adapter: str,
        part: str = "",
        *,
        limit: int,
        temperature: float,
        uniforms: Sequence[float],
    ) -> _Said:
        server, ends = self.rollout_config.name, self._parts.codec.ends
        parameters = sampling_parameters(
            server,
            limit=limit,
            temperature=temperature,
            uniforms=uniforms,
            ends=ends,
            repeatable=self.rollout_config.full_determinism,
        )
        options: dict[str, Any] = {"adapter": adapter} if server == SAMPLER or adapter != POLICY else {}
        output = await self.server_manager.generate(
            self._request_id + part, prompt_ids=list(tokens), sampling_params=parameters, **options
        )
        stopped = bool(output.token_ids) and output.token_ids[-1] in self._parts.codec.ends
        return _Said(tokens=tuple(output.token_ids), logprobs=tuple(output.log_probs or ()), stopped=stopped)


def _output(rollout: Rollout) -> RolloutOutput:
    """What verl wants to know of a rollout: where the response begins, what was sampled, and the reward."""
    sampled = [int(origin == Origin.SAMPLED) for origin in rollout.origins]
    start = sampled.index(1) if 1 in sampled else len(sampled)
    nothing = start == len(sampled)  # it ended before the policy spoke
    return RolloutOutput(
        prompt_ids=list(rollout.tokens[:start]) or [0],
        response_ids=[0] if nothing else list(rollout.tokens[start:]),
        response_mask=[0] if nothing else sampled[start:],
        response_logprobs=[0.0] if nothing else list(rollout.logprobs[start:]),
        reward_score=rollout.reward,
        num_turns=len(rollout.turns),
        metrics=AgentLoopMetrics(),
        extra_fields={"reward_extra_info": {"reward": rollout.reward}, "min_global_steps": 0, "max_global_steps": 0},
        rollout=rollout,
    )


def _scalars(info: Any) -> dict[str, Any]:
    """What an environment says last may be anything; only plain values travel."""
    return {key: value for key, value in info.items() if isinstance(value, str | int | float | bool | None)}
