"""A policy that can act: base, adapters, codecs, sampler and look-ahead, built from the config of a run.

    agent = load_agent("runs/x")                            # from a run folder of any engine
    rollouts = agent.roll_out(agent.tasks("val")[:10], greedy=True)
    (reply,) = agent.predict([(state, call)])               # the reply that its world model predicts

Training builds its agent with the same function (`build_agent`), so training and later use run the same code. Nothing
here trains or writes into a run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from transformers import PreTrainedTokenizerBase

from lfo.base_form import with_probed_form
from lfo.checkpoints import best_checkpoint, named_checkpoint, newest_checkpoint, refuse_damage, step_of
from lfo.config import RunConfig, from_yaml
from lfo.config.couplings import POLICY
from lfo.config.older import refuse_retired
from lfo.env.answers import tools_of
from lfo.env.interface import Environment, EnvironmentFactory, OffersLookahead, tasks_of
from lfo.env.patience import name_of
from lfo.errors import DamageError, DataError, UsageError
from lfo.loading import environment_of_run, limit_threads, load_base, load_tokenizer, pick_device
from lfo.model.adapters import DualAdapterModel
from lfo.model.lora_folder import CONFIG_FILE
from lfo.model.sampler import Sampler
from lfo.play import ending_tools, reply_store
from lfo.play.acting import acting_config
from lfo.play.ending_tools import EndingTools, learns_tools
from lfo.play.episode import RolloutRequest
from lfo.play.look_ahead import LookAhead
from lfo.play.memory_first import MemoryFirst
from lfo.play.predictors import make_lookahead, new_reply_store, world_model_codec
from lfo.play.reply_store import ReplyStore
from lfo.play.runner import Runner, RunnerConfig
from lfo.protocol.chat import ChatCodec
from lfo.protocol.world_model import WorldModelCodec, WorldModelState
from lfo.runs.folder import run_folder
from lfo.runs.reading import saved_config
from lfo.settings import dotted
from lfo.types import Rollout, ToolCall, Turn

BATCH = 64  # rollouts that run at the same time
REPLY_STORE_FILE = reply_store.FILE

T = TypeVar("T")
AdapterChoice = Literal["best", "last", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Agent:
    """A policy that acts, with its world model. Create it with `build_agent`, `load_agent` or `load_models`."""

    config: RunConfig
    make_environment: EnvironmentFactory
    tokenizer: PreTrainedTokenizerBase
    codec: ChatCodec
    world_model_codec: WorldModelCodec
    model: DualAdapterModel
    sampler: Sampler
    runner_config: RunnerConfig
    lookahead: LookAhead | None = None  # None: the run has no look-ahead
    reply_store: ReplyStore | MemoryFirst | None = None  # set if it answers look-ahead, at least at first
    ending_tools: EndingTools | None = None  # set if the run finds out itself which tools look-ahead may imagine
    adapters_folder: Path | None = None  # the folder of the loaded adapters; None: they are untrained

    def tasks(self, split: str) -> Sequence[Any]:
        """Return the fixed tasks of a split."""
        what = f"tasks of {name_of(self.make_environment)}"
        return self.runner_config.ask(lambda: tasks_of(self.make_environment(), split), what)

    def run(
        self,
        requests: Sequence[RolloutRequest],
        *,
        temperature: float | None = None,
        lookahead: bool = True,
        untrained: bool = False,
        on_turn: Callable[[Turn], None] | None = None,
    ) -> list[Rollout]:
        """Run all requests at the same time; return their rollouts in order. `untrained`: the base without adapters."""
        used = self.lookahead if lookahead and not untrained else None
        runner = Runner(self.make_environment, self.codec, config=self.runner_config, lookahead=used)
        play = partial(runner.run, temperature=temperature, on_turn=on_turn)
        if untrained:  # its own sampler, because nothing else needs the merged weights of the base
            sampler = _sampler(self.model, self.codec, self.config)
            return play(requests, sampler.session(slots=len(requests), adapters=()))
        rollouts: dict[int, Rollout] = {}
        for player, adapters in (("base", ()), ("policy", self.model.policy_adapters)):
            indices = [index for index, request in enumerate(requests) if request.player == player]
            if indices:
                slots = self.sampler.session(slots=len(indices), adapters=adapters)
                rollouts |= zip(indices, play([requests[index] for index in indices], slots), strict=True)
        return [rollouts[index] for index in range(len(requests))]

    def roll_out(
        self,
        tasks: Sequence[Any],
        *,
        greedy: bool,
        lookahead: bool = True,
        samples: int = 1,
        seed: int = 0,
        on_turn: Callable[[Turn], None] | None = None,
        on_batch: Callable[[int], None] = lambda done: None,
    ) -> list[Rollout]:
        """Return `samples` rollouts of each task, those of one task next to each other.

        A rollout depends on (seed, task, sample) only, whatever else runs in the batch. `on_turn` is called with each
        turn as it happens, `on_batch` with the number of rollouts that have just ended.
        """
        player = "base" if lookahead and self.config.looks_ahead_untrained else "policy"
        requests = [
            RolloutRequest(task=task, seeds=(seed, index, sample), look_ahead=lookahead, player=player)
            for index, task in enumerate(tasks)
            for sample in range(samples)
        ]
        rollouts = []
        for batch in batches(requests):
            rollouts += self.run(batch, temperature=0.0 if greedy else None, lookahead=lookahead, on_turn=on_turn)
            on_batch(len(batch))
        return rollouts

    def require_world_model(self) -> None:
        """Raise a `UsageError` if the world model of this run cannot predict the reply to a call in a state."""
        config = self.config
        if not self.model.world_model_adapters:
            raise UsageError(f"this run has no world model (algo={config.algo}); choose a run with algo=dual-lora")
        if config.world_model.input == "inline":
            raise UsageError(
                "this run's world model was trained inline, so it cannot predict the reply to a call in a given state; "
                "choose a run with world_model.input=state"
            )

    def on_written_queries(self) -> Agent:
        """Return this agent as a control: look-ahead asks what its environment names, not what the policy drafts."""
        if self.lookahead is None:
            raise UsageError("this run has no look-ahead, so nobody asks the environment's queries")
        made = self.runner_config.ask(self.make_environment)
        if not isinstance(made, OffersLookahead):
            raise UsageError(
                f"the environment {type(made).__name__} has no method lookahead_query, which names the calls"
            )
        return dataclasses.replace(self, lookahead=dataclasses.replace(self.lookahead, proposed_by="environment"))

    def predict(self, questions: Sequence[tuple[WorldModelState, ToolCall]]) -> list[str]:
        """Return the reply that the world model predicts for each (state, call)."""
        prompts = [self.world_model_codec.question_ids(state, call) for state, call in questions]
        return [self.world_model_codec.decode(answer) for answer in self.complete(prompts)]

    def complete(self, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """Return what the world model writes after each prompt, greedily."""
        answers = self.sampler.generate(
            prompts,
            adapters=self.model.world_model_adapters,
            max_new_tokens=self.config.world_model.reply_tokens,
            temperature=0.0,
        )
        return [answer.tokens for answer in answers]

    def load(self, folder: Path) -> None:
        """Load the adapters of a folder, and the reply store and ending tools if the run has them."""
        self.model.load(folder)
        self.sampler.refresh()
        if self.reply_store is not None:
            self.reply_store.load(folder / REPLY_STORE_FILE)
        if self.ending_tools is not None:
            self.ending_tools.load(folder / ending_tools.FILE)


def build_agent(
    config: RunConfig, make_environment: EnvironmentFactory, tokenizer: PreTrainedTokenizerBase, base: Any
) -> Agent:
    """Return an agent with untrained adapters on `base`; `base` is modified in place."""
    asks = RunnerConfig.of_run(config).ask
    tools = asks(lambda: tools_of(make_environment()), f"tools of {name_of(make_environment)}")
    codec = ChatCodec(tokenizer, tools, thinking=config.rollout.thinking)
    learnt_tools = EndingTools() if asks(lambda: learns_tools(make_environment(), config)) else None
    agent = _new_agent(config, make_environment, tokenizer, codec, base)
    parts = agent.config, make_environment, agent.world_model_codec, agent.complete
    store = new_reply_store(*parts)
    lookahead = make_lookahead(*parts, store, learnt_tools)
    return dataclasses.replace(agent, lookahead=lookahead, reply_store=store, ending_tools=learnt_tools)


def _new_agent(
    config: RunConfig,
    make_environment: EnvironmentFactory,
    tokenizer: PreTrainedTokenizerBase,
    codec: ChatCodec,
    base: Any,
) -> Agent:
    """Return an agent that does not look ahead. Its config says in which form the base is shown predicted replies."""
    model = DualAdapterModel.of_run(base, config)
    config = with_probed_form(config, codec, tokenizer, model)
    return Agent(
        config=config,
        make_environment=make_environment,
        tokenizer=tokenizer,
        codec=codec,
        world_model_codec=world_model_codec(config, tokenizer),
        model=model,
        sampler=_sampler(model, codec, config),
        runner_config=RunnerConfig.of_run(config),
    )


def _sampler(model: DualAdapterModel, codec: ChatCodec, config: RunConfig) -> Sampler:
    return Sampler(model, max_context=config.rollout.max_context, eos_ids=codec.ends)


def load_agent(
    run: str | Path,
    *,
    adapter: AdapterChoice = "last",
    device: str = "auto",
    levels: Sequence[int] | None = None,
    environment: EnvironmentFactory | None = None,
) -> Agent:
    """Load the agent of a run folder, or of one checkpoint (`runs/x/checkpoints/step-000050`).

    `adapter` selects the best checkpoint by evaluation, the newest one (or `adapters/` if there is none), or none: the
    untrained base. `levels` replaces the levels of the run, if its environment has levels. `environment` is an
    environment factory; pass it if the run got its environment from Python.
    """
    config, folder = _opened(Path(run), adapter)
    if levels is not None and "levels" in config.env_args:
        config = dataclasses.replace(config, env_args={**config.env_args, "levels": list(levels)})
    environment = environment_of_run(config) if environment is None else environment
    return _loaded(build_agent(config, environment, load_tokenizer(config.model), _base_of(config, device)), folder)


def load_models(run: str | Path, *, adapter: AdapterChoice = "last", device: str = "auto") -> Agent:
    """Load the agent of a run without making its environment: it can predict and be exported, but it cannot act."""
    config, folder = _opened(Path(run), adapter)
    tokenizer, base = load_tokenizer(config.model), _base_of(config, device)
    return _loaded(_new_agent(config, _no_environment, tokenizer, ChatCodec(tokenizer), base), folder)


def _no_environment() -> Environment:
    raise UsageError("this agent was loaded without its environment; load it with load_agent to let it act")


def _opened(run: Path, adapter: AdapterChoice) -> tuple[RunConfig, Path | None]:
    """Return the config of a run and the folder of the adapters that were chosen."""
    config = saved_config(run_folder(run))
    folder = None if adapter == "none" else adapters_of(run, adapter)
    return acting_config(config, folder), folder


def _base_of(config: RunConfig, device: str) -> Any:
    base = load_base(config.model, pick_device(device))
    limit_threads(base)
    return base


def _loaded(agent: Agent, folder: Path | None) -> Agent:
    if folder is not None:
        agent.load(folder)
    return dataclasses.replace(agent, adapters_folder=folder)


def adapters_of(run: Path, adapter: Literal["best", "last"] = "last") -> Path:
    """Return the folder that contains `policy` and `world_model` of a run or checkpoint, after verifying its files.

    `run` may be that folder itself. Damage is an error: other weights than those asked for would be worse.
    """
    run, checkpoint = run_and_checkpoint(run)
    folder = checkpoint or (_best_checkpoint(run) if adapter == "best" else newest_checkpoint(run))
    if folder is not None:
        try:
            refuse_damage(folder)
        except DamageError as error:
            raise DamageError(f"{error}; restore it from a copy, or name another checkpoint of {run}") from error
        return folder
    for folder in (run / "adapters", run):
        if (folder / "policy").is_dir():
            refuse_damage(folder)
            return folder
    raise DataError(f"{run} has no adapters yet: it contains neither a checkpoint nor a folder named adapters")


def _best_checkpoint(run: Path) -> Path:
    listed, named = best_checkpoint(run), named_checkpoint(run, "best")
    found = [listed.path] if listed else []
    found += [named] if named and named.exists() else []
    if not found:
        raise UsageError(f"{run} has no best checkpoint, because it was not evaluated on val; use --adapter last")
    return max(found, key=step_of)


def start_from(model: DualAdapterModel, init_from: str) -> None:
    """Load the adapters of a run; only the policy if the run has no other, or if the folder is a single PEFT LoRA."""
    folder = Path(init_from)
    if (folder / CONFIG_FILE).is_file():
        model.load_policy(folder)
        return
    adapters = adapters_of(folder)
    has_all = all((adapters / name).is_dir() for name in model.adapter_names)
    if (file := run_and_checkpoint(folder)[0] / "config.yaml").is_file():  # not a folder with adapters only
        saved = dotted(from_yaml(file).older)
        refuse_retired((each for each in saved if each[0] == "coupling"), f"init_from={folder}: ")
    if has_all:
        model.load(adapters)
    else:
        model.load_policy(adapters / POLICY)


def batches(things: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield parts of at most `BATCH`, as even as possible, so that the shuffled control always has several tasks.

    >>> [len(part) for part in batches(range(65))]
    [32, 33]
    """
    count = -(-len(things) // BATCH)
    for index in range(count):
        yield things[index * len(things) // count : (index + 1) * len(things) // count]


def run_and_checkpoint(path: Path) -> tuple[Path, Path | None]:
    """Return the run folder of a path, and the path itself if it is a checkpoint."""
    run = run_folder(path)
    return run, path if run != path else None
