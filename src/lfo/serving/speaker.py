"""The parts of a run that serving needs, with the local sampler or a vLLM server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from transformers import PreTrainedTokenizerBase

from lfo.agent import REPLY_STORE_FILE, Agent, adapters_of, saved_config
from lfo.base_form import with_stored_form
from lfo.config import RunConfig
from lfo.config.couplings import POLICY, WORLD_MODEL
from lfo.env.interface import EnvironmentFactory
from lfo.errors import UsageError
from lfo.loading import environment_of_run, load_tokenizer
from lfo.play import ending_tools
from lfo.play.ending_tools import EndingTools, learns_tools
from lfo.play.episode import SamplerSlots
from lfo.play.look_ahead import LookAhead
from lfo.play.memory_first import MemoryFirst
from lfo.play.predictors import make_lookahead, new_reply_store, world_model_codec
from lfo.play.runner import RunnerConfig
from lfo.protocol.chat import ChatCodec
from lfo.runs.folder import run_folder
from lfo.serving.upstream import Upstream, UpstreamSlots, completer


class SpeakingSlots(SamplerSlots, Protocol):
    """Slots of a sampler whose tokens can be read."""

    def tokens(self, slot: int) -> Sequence[int]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Speaker:
    """Create it with `local_speaker` or `upstream_speaker`."""

    config: RunConfig
    make_environment: EnvironmentFactory
    tokenizer: PreTrainedTokenizerBase
    codec: ChatCodec  # for the tools of the environment
    runner_config: RunnerConfig
    lookahead: LookAhead | None
    new_slots: Callable[[int], SpeakingSlots]  # number -> new slots that the policy continues


def local_speaker(agent: Agent) -> Speaker:
    # Of `algo=auto` whoever succeeds more often: the policy alone, which has no look-ahead, or the base with it.
    base_acts = agent.config.is_auto and agent.lookahead is not None

    def new_slots(slots: int) -> SpeakingSlots:
        return agent.sampler.session(slots=slots, adapters=() if base_acts else agent.model.policy_adapters)

    return Speaker(
        config=agent.config,
        make_environment=agent.make_environment,
        tokenizer=agent.tokenizer,
        codec=agent.codec,
        runner_config=agent.runner_config,
        # A policy that imitates has learned to act without look-ahead.
        lookahead=None if agent.config.looks_ahead_untrained and not base_acts else agent.lookahead,
        new_slots=new_slots,
    )


def upstream_speaker(
    run: Path, url: str, *, adapter: Literal["best", "last"] = "last", api_key: str = "", lookahead: bool = True
) -> Speaker:
    """Return the speaker of a run or checkpoint whose LoRAs a vLLM server has, under the names of `lfo export`."""
    config = saved_config(run_folder(run))

    def saved(name: str) -> Path:
        """Return a file beside the adapters; a run that needs none may be its config alone."""
        return adapters_of(run, adapter) / name

    make_environment, tokenizer = environment_of_run(config), load_tokenizer(config.model)
    codec = ChatCodec(tokenizer, make_environment().tools(), thinking=config.rollout.thinking)
    config = with_stored_form(config, codec)  # of a config that no run has written
    world = world_model_codec(config, tokenizer)
    upstream = Upstream(url, ends=codec.ends, api_key=api_key)
    complete = completer(upstream, WORLD_MODEL, config.world_model.reply_tokens)
    store = new_reply_store(config, make_environment, world, complete)
    if store is not None:
        store.load(saved(REPLY_STORE_FILE))
    from_memory = store is not None and not (isinstance(store, MemoryFirst) and store.handed_over)
    lookahead = lookahead and config.looks_ahead and not config.looks_ahead_untrained
    needed = {POLICY} | ({WORLD_MODEL} if lookahead and not from_memory else set())
    _refuse_missing(needed - set(upstream.models()), url)
    tools = None
    if learns_tools(make_environment(), config):
        tools = EndingTools()
        tools.load(saved(ending_tools.FILE))

    def new_slots(slots: int) -> SpeakingSlots:
        return UpstreamSlots(upstream, POLICY, slots=slots, context=config.rollout.max_context)

    return Speaker(
        config=config,
        make_environment=make_environment,
        tokenizer=tokenizer,
        codec=codec,
        runner_config=RunnerConfig.of_run(config),
        lookahead=make_lookahead(config, make_environment, world, complete, store, tools) if lookahead else None,
        new_slots=new_slots,
    )


def _refuse_missing(models: set[str], url: str) -> None:
    if POLICY in models:
        raise UsageError(f"{url} has no model {POLICY!r}; start vLLM with the --lora-modules that lfo export names")
    if WORLD_MODEL in models:
        raise UsageError(
            f"{url} has no model {WORLD_MODEL!r}, which look-ahead needs; export with --both, or serve with "
            "--no-lookahead"
        )
