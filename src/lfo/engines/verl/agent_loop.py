"""Our runner as an agent loop of verl: one rollout of one task, with a server that samples the tokens.

verl runs many loops in parallel, in its agent-loop workers. Environment, protocol, look-ahead and seeds are the same as
with the local engine; only the sampler is a server (`ServedSlot`). The runner turns an environment that raises into a
failed rollout; nothing is caught here.
"""

# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgspec
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

from lfo.config import RunConfig, from_mapping
from lfo.engines.verl.config import AGENT_LOOP, BASE, SAMPLER, run_name, sampling_parameters
from lfo.env.answers import tools_of
from lfo.env.by_name import hold_as_data
from lfo.env.interface import EnvironmentFactory, Scripted
from lfo.loading import environment_factory
from lfo.model.adapters import POLICY, WORLD_MODEL
from lfo.play.episode import RolloutRequest
from lfo.play.look_ahead import LookAhead
from lfo.play.predictors import make_lookahead, world_model_codec
from lfo.play.runner import Runner, RunnerConfig
from lfo.protocol.chat import ChatCodec
from lfo.protocol.world_model import WorldModelCodec
from lfo.types import Origin, Rollout, Speech

# Each rollout has its own thread, which mostly waits for its server. All rollouts of a step must run at the same time,
# so that servers get the requests of a turn together; asyncio's default pool has about as many threads as cores.
MOST_AT_ONCE = 1024
_threads = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="rollout")


class RolloutOutput(AgentLoopOutput):
    """verl's output with the rollout as an extra field."""

    rollout: Any = None

    def as_dict(self) -> dict[str, Any]:
        fields = super().as_dict()
        fields["rollout"] = msgspec.to_builtins(self.rollout)  # plain data; `Cluster` rebuilds the rollout
        return fields


class ServedSlot:
    """The one slot of a rollout, which a server continues: a `lfo.play.episode.SamplerSlots` with the tokens here."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self._tokens: list[int] = []

    def room(self, slot: int) -> int:
        return self._loop.run_config.rollout.max_context - len(self._tokens)

    def rewind(self, slot: int, length: int) -> None:
        del self._tokens[length:]

    def extend(self, slots: Sequence[int], chunks: Sequence[Sequence[int]]) -> None:
        for chunk in chunks:
            self._tokens.extend(chunk)

    def decode(
        self, slots: Sequence[int], *, max_new_tokens: Sequence[int], temperature: float, uniforms: Any
    ) -> list[Speech]:
        if not slots:
            return []
        limit = min(max_new_tokens[0], self.room(0))
        if limit <= 0:
            return [Speech(tokens=(), stopped=False)]
        said = self._loop.ask(
            self._tokens, self._loop.adapter, limit=limit, temperature=temperature, uniforms=uniforms[0]
        )
        self._tokens.extend(said.tokens)
        return [said]


class ScriptedSlot(ServedSlot):
    """The slot of an untrained base: it samples a message, to take the real time, and the words of the script then
    replace it."""

    def __init__(self, loop: Any, environment: Scripted) -> None:
        super().__init__(loop)
        self._environment = environment

    def decode(self, slots: Sequence[int], **options: Any) -> list[Speech]:
        before = len(self._tokens)
        if not super().decode(slots, **options):
            return []
        del self._tokens[before:]
        words = self._loop.words(self._environment.scripted_words())
        self._tokens.extend(words)
        return [Speech(tokens=words, logprobs=(0.0,) * len(words), stopped=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """What all rollouts of a process share; creating a codec takes longer than many rollouts."""

    config: RunConfig
    make_environment: EnvironmentFactory
    codec: ChatCodec
    world_model_codec: WorldModelCodec
    runner_config: RunnerConfig
    scripted: bool  # the messages of the policy are replaced: see `ScriptedSlot`


_parts: dict[str, _Parts] = {}


def _parts_of(config: Any, tokenizer: Any) -> _Parts:
    name = run_name(config.actor_rollout_ref.rollout)
    if name not in _parts:
        run = from_mapping(cast(Any, OmegaConf.to_container(config.actor_rollout_ref.model.lora.run, resolve=True)))
        hold_as_data(Path(run.output_dir))  # as in the process that started this one
        make_environment = config.lfo.environment or environment_factory(run)
        example = make_environment()
        _parts[name] = _Parts(
            config=run,
            make_environment=make_environment,
            codec=ChatCodec(tokenizer, tools_of(example), thinking=run.rollout.thinking),
            world_model_codec=world_model_codec(run, tokenizer),
            runner_config=RunnerConfig.of_run(run, environment_workers=1),  # one environment in each loop
            scripted=isinstance(example, Scripted),
        )
    return _parts[name]


@register(AGENT_LOOP)
class RunnerLoop(AgentLoopBase):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._parts = _parts_of(self.config, self.tokenizer)
        self.run_config = self._parts.config

    async def run(self, sampling_params: dict[str, Any], **fields: Any) -> AgentLoopOutput:
        """Run one rollout of `task`; verl's session id is its index in the group."""
        member = int(fields["session_id"])
        self._event_loop = asyncio.get_running_loop()
        self._request_id = f"{fields['uid']}-{member}"
        request = replace(msgspec.convert(fields["requests"][member], RolloutRequest), task=fields["task"])
        self.adapter = POLICY if request.player == "policy" and fields["looks_ahead"] else BASE
        parts, lookahead = self._parts, None
        if fields["looks_ahead"]:
            lookahead = make_lookahead(
                parts.config, parts.make_environment, parts.world_model_codec, self._complete, tools=fields["tools"]
            )
        rollout = await self._event_loop.run_in_executor(
            _threads, self._play, request, fields["temperature"], lookahead
        )
        return _output(rollout)

    def _play(self, request: RolloutRequest, temperature: float | None, lookahead: LookAhead | None) -> Rollout:
        parts, make_environment, slots = self._parts, self._parts.make_environment, ServedSlot(self)
        if parts.scripted:
            one: Any = make_environment()
            make_environment, slots = (lambda: one), ScriptedSlot(self, one)
        runner = Runner(make_environment, parts.codec, config=parts.runner_config, lookahead=lookahead)
        (rollout,) = runner.run([request], slots, temperature=temperature)
        return rollout

    def words(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a message with this text."""
        return (*self._parts.codec.encode_message(text), self._parts.codec.end_of_turn)

    def _complete(self, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """Complete all prompts in parallel, one request for each."""
        limit = self.run_config.world_model.reply_tokens

        async def everybody() -> list[Speech]:
            asked = [
                self._answer(prompt, WORLD_MODEL, f"-{index}", limit=limit, temperature=0.0, uniforms=())
                for index, prompt in enumerate(prompts)
            ]
            return await asyncio.gather(*asked)

        return [said.tokens for said in asyncio.run_coroutine_threadsafe(everybody(), self._event_loop).result()]

    def ask(self, tokens: Sequence[int], adapter: str, **options: Any) -> Speech:
        """Let the server continue these tokens; called from the thread of the rollout, with options of `_answer`."""
        return asyncio.run_coroutine_threadsafe(self._answer(tokens, adapter, **options), self._event_loop).result()

    async def _answer(
        self,
        tokens: Sequence[int],
        adapter: str,
        part: str = "",
        *,
        limit: int,
        temperature: float,
        uniforms: Sequence[float],
    ) -> Speech:
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
        return Speech(tokens=tuple(output.token_ids), logprobs=tuple(output.log_probs or ()), stopped=stopped)


def _output(rollout: Rollout) -> RolloutOutput:
    """Return the fields that verl needs: prompt, response, mask of sampled tokens, and reward."""
    sampled = [int(origin == Origin.SAMPLED) for origin in rollout.origins]
    start = sampled.index(1) if 1 in sampled else len(sampled)
    nothing = start == len(sampled)  # the rollout ended before the policy spoke
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
