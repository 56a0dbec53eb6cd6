"""Everything that can be set about a run, its presets, and how settings are read and checked.

    load_config(["preset=tiny", "coupling=shared", "world_model.weight=0.5"]) -> RunConfig

Later settings win over earlier ones: defaults, then the preset, then what the algorithm implies, then the
file named by `config=FILE`, then the overrides in their order. OmegaConf parses and merges (so
`output_dir=runs/${algo}-${seed}` works); what comes out is a tree of frozen dataclasses whose annotations are
checked (`settings`). A config is data: nothing here looks at a model, a run or a device.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lfo.errors import ConfigError
from lfo.settings import did_you_mean, hints_of, leaves, parse, typed


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Both adapters have the same shape. There is no dropout: sampled and trained log-probs would not agree."""

    rank: int = 16
    alpha: float = 32.0  # the update is scaled by alpha / rank
    targets: str = "all-linear"  # or module names with commas: q_proj,v_proj,o_proj

    @property
    def target_modules(self) -> str | list[str]:
        """`targets` as peft wants it."""
        return self.targets if self.targets == "all-linear" else [name.strip() for name in self.targets.split(",")]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    prompts: int = 8  # tasks in one step
    group_size: int = 8  # rollouts of each task
    mini_batch_prompts: int = 2  # tasks in one optimizer update; divides prompts
    max_turns: int = 16
    temperature: float = 1.0
    max_context: int = 1024  # tokens of a whole rollout
    max_turn_tokens: int = 160  # tokens of one message of the policy
    environment_timeout: float = 30.0  # seconds that one reset or step may take
    environment_retries: int = 2  # how often one reset or step that raised is tried again; a late one is not
    environment_workers: int = 16  # environments that step at the same time


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig:
    learning_rate: float = 1e-4
    clip_low: float = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.28
    entropy: float = 0.0  # coefficient of the entropy bonus
    entropy_share: float = 1.0  # share of the sampled tokens, the most uncertain first, that get the bonus
    kl: float = 0.0  # coefficient of the KL divergence from the base model
    scale_by_std: bool = True  # divide advantages by the standard deviation of their group
    dynamic_sampling: bool = True  # replace groups whose rewards are all equal
    max_resamples: int = 1  # how often a step may draw tasks anew before it takes what it has
    overlong_buffer: int = 0  # tokens before max_context over which reward is taken away; 0 = no shaping


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldModelConfig:
    weight: float = 1.0  # total loss = policy loss + weight * world-model loss
    learning_rate: float = 5e-4
    input: Literal["state", "inline"] = "state"  # rows of their own, or the observation tokens of the rollout itself
    predict: Literal["phone", "phone_form", "all", "none"] = "phone"  # whose replies are predicted
    state_tokens: int = 512  # the state is compressed to so many tokens
    reply_tokens: int = 96  # a predicted reply ends there at the latest
    replay: bool = True  # keep every reply heard and train on it again
    examples_per_mini_batch: int = 32  # cap on fresh and replayed examples together
    schedule: Literal["joint", "alternating", "world_model_first", "hierarchical"] = "joint"
    first_steps: int = 0  # world_model_first: steps before the policy begins to learn
    every: int = 1  # hierarchical: the world model learns in every so many-th step
    adaptive_weight: bool = False  # let prediction accuracy and success set the weight
    only: bool = False  # train the world model and leave the policy as it is
    from_logs: str | None = None  # with `only`: a file of rollouts to learn from, instead of rolling out


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplorationConfig:
    blind_share: float = 0.5  # share of each group that acts without look-ahead
    blind_steps: int = 0  # first steps in which every rollout does
    inquiries: bool = True  # where look-ahead has several questions, blind rollouts take turns in really asking them


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0  # largest gradient norm of each adapter
    warmup_steps: int = 10
    separate: bool = False  # one AdamW for each adapter instead of one for both


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    every: int = 10  # steps between evaluations; 0 = never
    tasks: int = 100  # fixed tasks of each split
    splits: tuple[str, ...] = ("val",)
    final_splits: tuple[str, ...] = ()  # evaluated after the last step only, beside `splits`


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One run, completely: with this, the code and a machine, it can be repeated."""

    preset: Literal["default", "tiny", "smollm2-135m", "documents", "qwen3-8b-8x24gb", "qwen3-1.7b-1gpu"] = "default"
    algo: Literal["dual-lora", "dapo"] = "dual-lora"
    engine: Literal["local", "verl"] = "local"
    model: str = "tiny"  # the embedded base, a fetched one, a folder or a hub id
    env: str = "phone-calls"  # or oracle-codes, or package.module:Class
    env_args: Mapping[str, Any] = field(default_factory=dict)  # given to the environment's class
    levels: tuple[int, ...] = (2,)  # of the phone-call world, 1 to 5
    coupling: Literal["separate", "shared", "stacked"] = "separate"  # how the adapters meet
    lookahead: bool = True  # show the policy what the world model expects to hear
    lookahead_source: Literal["world_model", "truth", "shuffled", "memory"] = "world_model"  # all others are controls
    surprise: float = 0.0  # coefficient of the reward for prediction error
    steps: int = 100
    seed: int = 0
    output_dir: str = "runs/latest"
    init_from: str | None = None  # run whose adapters this one starts from
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 0  # CPU threads; 0 = let torch decide
    micro_batch_tokens: int = 16_384  # in one forward and backward; a matter of memory and speed alone
    checkpoint_every: int = 10  # steps
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()  # who is told of every row of metrics beside the file
    lora: LoraConfig = field(default_factory=LoraConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    world_model: WorldModelConfig = field(default_factory=WorldModelConfig)
    exploration: ExplorationConfig = field(default_factory=ExplorationConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    verl: Mapping[str, Any] = field(default_factory=dict)  # engine=verl: its own settings, beside those made of ours


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    # The embedded base on a laptop without a GPU.
    "tiny": {
        "model": "tiny",
        "device": "cpu",
        "threads": 1,
        "policy.learning_rate": 5e-4,
        "policy.max_resamples": 0,
        # Many small updates teach the world model most for the same work. A state without room for a whole directory
        # is cut to what concerns the call, which is cheaper, and learned in half the tasks.
        "rollout.mini_batch_prompts": 1,
        "world_model.learning_rate": 2e-3,
        "world_model.examples_per_mini_batch": 3,
        "world_model.state_tokens": 112,
        "optimizer.warmup_steps": 3,
    },
    # A real language model on one GPU: lfo models fetch smollm2-135m, lfo pretrain --base smollm2-135m
    "smollm2-135m": {
        "model": "smollm2-135m-warm",
        "micro_batch_tokens": 24_576,  # a mini-batch in one pass: launching takes longer than computing
        "rollout.max_context": 2048,  # the tools alone are described in about 500 of its tokens
        "policy.learning_rate": 3e-5,  # at 1e-4 one policy of three forgot on levels 2 to 4 what it could
        "policy.max_resamples": 0,
        "world_model.learning_rate": 2e-3,
        "world_model.examples_per_mini_batch": 12,
        "world_model.state_tokens": 128,
        "optimizer.warmup_steps": 3,
    },
    # The numbers of the project's first documents but for their dropout of 0.05, kept for reproduction: at this rate
    # LoRA does not learn.
    "documents": {
        "coupling": "separate",
        "lookahead": False,
        "lora.targets": "q_proj,v_proj,o_proj",
        "policy.learning_rate": 1e-6,
        "world_model.learning_rate": 1e-6,
        "world_model.weight": 0.5,
        "world_model.replay": False,
        "exploration.blind_share": 0.0,
    },
    # Eight GPUs of 24 GB: the base sharded over all of them, rollouts in vLLM on pairs of them.
    "qwen3-8b-8x24gb": {
        "engine": "verl",
        "model": "Qwen/Qwen3-8B",
        "device": "cuda",
        "micro_batch_tokens": 8192,
        "rollout.max_context": 8192,
        "rollout.max_turn_tokens": 1024,
        "eval.every": 20,
        "steps": 500,
        "verl.trainer.n_gpus_per_node": 8,
        "verl.actor_rollout_ref.rollout.name": "vllm",
        "verl.algorithm.rollout_correction.bypass_mode": False,  # vLLM's log-probs are not exactly the trainer's
        "verl.actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
        "verl.actor_rollout_ref.rollout.gpu_memory_utilization": 0.6,
        "verl.actor_rollout_ref.actor.fsdp_config.optimizer_offload": True,
    },
    # One GPU, no vLLM: rollouts by the sampler of this package.
    "qwen3-1.7b-1gpu": {
        "engine": "verl",
        "model": "Qwen/Qwen3-1.7B",
        "device": "cuda",
        "rollout.max_context": 4096,
        "rollout.max_turn_tokens": 512,
        "steps": 300,
    },
}

# What an algorithm implies, whatever the preset says; plain DAPO is dual-LoRA without its world model.
ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "dual-lora": {},
    "dapo": {
        "lookahead": False,
        "world_model.weight": 0.0,
        "world_model.replay": False,
        "exploration.blind_share": 0.0,
    },
}

SHIPPED_ENVIRONMENTS = ("phone-calls", "oracle-codes")

# Closed ranges of every number; None = unbounded. Numbers in POSITIVE must also not be 0.
RANGES: Mapping[str, tuple[float, float | None]] = {
    "levels": (1, 5),
    "surprise": (0, None),
    "steps": (1, None),
    "seed": (0, 2**32 - 1),
    "threads": (0, None),
    "micro_batch_tokens": (1, None),
    "checkpoint_every": (1, None),
    "lora.rank": (1, None),
    "lora.alpha": (0, None),
    "rollout.prompts": (1, None),
    "rollout.group_size": (2, None),
    "rollout.mini_batch_prompts": (1, None),
    "rollout.max_turns": (1, None),
    "rollout.temperature": (0, None),
    "rollout.max_context": (1, None),
    "rollout.max_turn_tokens": (1, None),
    "rollout.environment_timeout": (0, None),
    "rollout.environment_retries": (0, None),
    "rollout.environment_workers": (1, None),
    "policy.learning_rate": (0, 1),
    "policy.clip_low": (0, 1),
    "policy.clip_high": (0, None),
    "policy.entropy": (0, None),
    "policy.entropy_share": (0, 1),
    "policy.kl": (0, None),
    "policy.max_resamples": (0, None),
    "policy.overlong_buffer": (0, None),
    "world_model.weight": (0, 2),
    "world_model.learning_rate": (0, 1),
    "world_model.state_tokens": (32, None),
    "world_model.reply_tokens": (1, None),
    "world_model.examples_per_mini_batch": (1, None),
    "world_model.first_steps": (0, None),
    "world_model.every": (1, None),
    "exploration.blind_share": (0, 1),
    "exploration.blind_steps": (0, None),
    "optimizer.betas": (0, 0.999999),
    "optimizer.weight_decay": (0, None),
    "optimizer.clip": (0, None),
    "optimizer.warmup_steps": (0, None),
    "eval.every": (0, None),
    "eval.tasks": (1, None),
}
POSITIVE = frozenset(
    {
        "lora.alpha",
        "rollout.temperature",
        "rollout.environment_timeout",
        "policy.learning_rate",
        "policy.clip_low",
        "policy.clip_high",
        "policy.entropy_share",
        "world_model.learning_rate",
        "optimizer.clip",
    }
)


# Reading


def load_config(overrides: Sequence[str] = ()) -> RunConfig:
    """The config that `name=value` settings describe, checked; `preset=` and `config=FILE` may be among them."""
    files: list[tuple[str, Any]] = []  # what they say gives way to what is typed beside them
    assignments: list[tuple[str, Any]] = []
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or not name:
            raise ConfigError(f"a setting is written name=value, which {override!r} is not")
        if name == "config":
            files += _read_assignments(Path(text))
        else:
            assignments.append((name, parse(text, _annotation(name))))
    return _resolve([*files, *assignments])


def from_yaml(path: str | Path, *, known_only: bool = False) -> RunConfig:
    """Read a saved or hand-written file; what it leaves out comes from its preset and the defaults.

    `known_only` passes over settings that there are not, for reading runs of an older version.
    """
    return _resolve(_read_assignments(Path(path), known_only=known_only))


def from_mapping(settings: Mapping[str, Any]) -> RunConfig:
    """The config whose `dataclasses.asdict` this is, checked."""
    config = typed(settings, RunConfig, "")
    validate(config)
    return config


def to_yaml(config: RunConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


def flatten(config: RunConfig) -> dict[str, Any]:
    """Every setting under the dotted name that a user types."""
    return dict(_flatten(dataclasses.asdict(config)))


def differences(one: RunConfig, other: RunConfig) -> dict[str, tuple[Any, Any]]:
    """The settings in which two configs differ, by dotted name."""
    ones, others = flatten(one), flatten(other)
    return {name: (ones[name], others[name]) for name in ones if ones[name] != others[name]}


# Settings that do not change the experiment, but for the seed, over which experiments are repeated.
BESIDE_THE_EXPERIMENT = (
    "seed",
    "output_dir",
    "preset",
    "device",
    "threads",
    "micro_batch_tokens",
    "checkpoint_every",
    "trackers",
    "eval.every",
)


def fingerprint(config: RunConfig, without: Sequence[str] = BESIDE_THE_EXPERIMENT) -> str:
    """16 hex digits that two configs share exactly when they agree in all settings but `without`.

    The default leaves out what does not change the experiment, so runs that differ by seed alone belong together.
    A part's name ("eval") leaves out all of it.
    """
    settings = flatten(config)
    for name in without:
        dropped = [key for key in settings if key == name or key.startswith(f"{name}.")]
        if not dropped:
            raise ConfigError(_unknown(name))
        for key in dropped:
            del settings[key]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def experiment(config: RunConfig) -> str:
    """The fingerprint by which runs are one experiment; plain DAPO has no world model, so its settings do not count,
    and how often a run is evaluated counts only where that sets the world model's weight."""
    without = {*BESIDE_THE_EXPERIMENT, *(("world_model",) if config.algo == "dapo" else ())}
    if config.world_model.adaptive_weight:
        without.remove("eval.every")
    return fingerprint(config, sorted(without))


# Checking


def validate(config: RunConfig) -> None:
    """Raise a ConfigError, one sentence, for the first thing that is wrong with a config."""
    typed(dataclasses.asdict(config), RunConfig, "")
    settings = flatten(config)
    for name, (low, high) in RANGES.items():
        values = settings[name] if isinstance(settings[name], tuple) else (settings[name],)
        for value in values:
            if value < low or (high is not None and value > high) or (name in POSITIVE and value == 0):
                lower = f"above {low}" if name in POSITIVE else f"at least {low}"
                raise ConfigError(
                    f"{name} must be {lower}{f' and at most {high}' if high is not None else ''}, not {value}"
                )
    for holds, sentence in _relations(config):
        if not holds:
            raise ConfigError(sentence)


def _relations(c: RunConfig) -> Iterator[tuple[bool, str]]:
    """What must hold between settings, each with the sentence for a user whose config breaks it."""
    r, w = c.rollout, c.world_model
    yield (
        c.env in SHIPPED_ENVIRONMENTS or re.fullmatch(r"[\w.]+:\w+", c.env) is not None,
        f"env must be {' or '.join(SHIPPED_ENVIRONMENTS)} or package.module:Class, not {c.env!r}"
        + did_you_mean(c.env, SHIPPED_ENVIRONMENTS),
    )
    yield bool(c.model.strip()), "model must name the embedded base (tiny), a folder or a hub id"
    yield bool(c.output_dir.strip()), "output_dir must name a folder"
    yield len(c.levels) > 0, "levels must name at least one level"
    for name, values in (("levels", c.levels), ("trackers", c.trackers)):
        yield len(set(values)) == len(values), f"{name} names something twice: {', '.join(map(str, values))}"
    splits = (*c.eval.splits, *c.eval.final_splits)
    yield len(set(splits)) == len(splits), f"the splits of eval name something twice: {', '.join(splits)}"
    yield len(c.eval.splits) > 0, "eval.splits must name at least one split; eval.every=0 turns evaluation off"
    yield (
        c.eval.every > 0 or not c.eval.final_splits,
        "eval.every=0 turns evaluation off, that of eval.final_splits too; leave them out or set eval.every",
    )
    yield all(part.strip() for part in c.lora.targets.split(",")), "lora.targets must be all-linear or module names"
    yield (
        c.engine != "verl" or c.lora.alpha.is_integer(),
        f"lora.alpha must be a whole number with engine=verl, not {c.lora.alpha:g}",
    )
    yield (
        r.prompts % r.mini_batch_prompts == 0,
        f"rollout.mini_batch_prompts={r.mini_batch_prompts} does not divide rollout.prompts={r.prompts}",
    )
    yield (
        r.max_turn_tokens < r.max_context,
        f"rollout.max_turn_tokens={r.max_turn_tokens} leaves no room in rollout.max_context={r.max_context}",
    )
    yield (
        w.reply_tokens < r.max_context,
        f"world_model.reply_tokens={w.reply_tokens} leaves no room in rollout.max_context={r.max_context}",
    )
    yield (
        c.policy.overlong_buffer < r.max_context,
        f"policy.overlong_buffer={c.policy.overlong_buffer} must be below rollout.max_context={r.max_context}",
    )
    yield (
        w.input != "inline" or c.coupling in ("shared", "stacked"),
        "world_model.input=inline needs coupling=shared or coupling=stacked, and lookahead=false",
    )
    yield (
        w.input != "inline" or not c.lookahead or c.lookahead_source != "world_model",
        "world_model.input=inline trains no world model that look-ahead could ask: it needs lookahead=false",
    )
    yield (
        w.schedule != "world_model_first" or 1 <= w.first_steps <= c.steps,
        f"world_model.schedule=world_model_first needs world_model.first_steps from 1 to steps={c.steps}",
    )
    yield (
        w.first_steps == 0 or w.schedule == "world_model_first",
        "world_model.first_steps needs world_model.schedule=world_model_first",
    )
    yield (
        w.schedule != "hierarchical" or w.every >= 2,
        "world_model.schedule=hierarchical needs world_model.every of at least 2",
    )
    yield w.every == 1 or w.schedule == "hierarchical", "world_model.every needs world_model.schedule=hierarchical"
    sighted = r.group_size - round(r.group_size * c.exploration.blind_share)
    yield (
        not c.lookahead or w.only or sighted != 1,
        f"rollout.group_size={r.group_size} with exploration.blind_share={c.exploration.blind_share:g} leaves one "
        "rollout with look-ahead, which has none to be compared with; use a larger group or a smaller share",
    )
    yield not w.adaptive_weight or c.eval.every > 0, "world_model.adaptive_weight=true needs eval.every above 0"
    yield not w.only or w.weight > 0, "world_model.only=true needs world_model.weight above 0"
    yield not w.only or w.predict != "none", "world_model.only=true has nothing to learn with world_model.predict=none"
    yield (
        w.from_logs is None or w.only,
        "world_model.from_logs needs world_model.only=true: logs teach the world model and not the policy",
    )
    yield (
        w.from_logs is None or (w.replay and w.input == "state"),
        "world_model.from_logs needs world_model.replay=true and world_model.input=state",
    )
    yield (
        c.lookahead_source == "world_model" or c.lookahead,
        f"lookahead_source={c.lookahead_source} needs lookahead=true",
    )
    yield (
        c.lookahead_source != "memory" or w.from_logs is None,
        "lookahead_source=memory hears nothing with world_model.from_logs, which rolls nothing out",
    )
    for name, used in (
        ("lookahead=true", c.lookahead),
        (f"world_model.weight={w.weight:g}", w.weight > 0),
        ("world_model.only=true", w.only),
        ("world_model.adaptive_weight=true", w.adaptive_weight),
        (f"surprise={c.surprise:g}", c.surprise > 0),
    ):
        yield not used or c.algo == "dual-lora", f"{name} needs algo=dual-lora"
    yield (
        not c.surprise or (w.input == "state" and w.weight > 0 and w.predict != "none"),
        "surprise needs a world model that learns: world_model.weight above 0, world_model.input=state and "
        "world_model.predict other than none",
    )


# The machinery: names, values, types


def _resolve(assignments: Sequence[tuple[str, Any]]) -> RunConfig:
    """Lay the assignments over the tables that they choose, and check what comes out."""
    hints, given = hints_of(RunConfig), dict(assignments)
    preset = typed(given.get("preset", "default"), hints["preset"], "preset")
    algo = typed(given.get("algo", "dual-lora"), hints["algo"], "algo")
    tree = dataclasses.asdict(RunConfig())
    for name, value in (*PRESETS[preset].items(), *ALGORITHMS[algo].items(), *assignments):
        _assign(tree, name, value)
    try:
        settings = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"a setting cannot be resolved: {str(error).splitlines()[0]}") from error
    config = typed(settings, RunConfig, "")
    validate(config)
    return config


def _assign(tree: dict[str, Any], name: str, value: Any) -> None:
    *path, last = name.split(".")
    for key in path:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{name} cannot be set: {key} holds a value already")
    tree[last] = value


def _read_assignments(path: Path, *, known_only: bool = False) -> list[tuple[str, Any]]:
    try:
        tree = OmegaConf.to_container(OmegaConf.create(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from error
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"the config {path}{line} is not valid YAML") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"the config {path} must be a mapping of settings")
    settings = _flatten(tree) if known_only else _merging(_flatten(tree))
    assignments = [(name, value) for name, value in settings if name in LEAVES or not known_only]
    for name, _ in assignments:
        try:
            _annotation(name)
        except ConfigError as error:
            raise ConfigError(f"{error} (in {path})") from error
    return assignments


LEAVES = leaves(RunConfig)
PARTS = frozenset(name.partition(".")[0] for name in LEAVES if "." in name)


def _flatten(tree: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if name in PARTS and isinstance(value, Mapping):
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        else:
            yield str(name), value


def dotted(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a nested mapping by their dotted names.

    >>> list(dotted({"trainer": {"nnodes": 2, "logger": []}, "seed": 0}))
    [('trainer.nnodes', 2), ('trainer.logger', []), ('seed', 0)]
    """
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _merging(settings: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Settings of verl one by one, so that a file adds to those of its preset, as the command line does."""
    for name, value in settings:
        yield from dotted({name: value}) if name == "verl" else [(name, value)]


def _annotation(name: str) -> Any:
    if name in LEAVES:
        return LEAVES[name]
    if name.startswith(("env_args.", "verl.")):
        return Any
    if name in PARTS:
        inner = ", ".join(leaf for leaf in LEAVES if leaf.startswith(f"{name}."))
        raise ConfigError(f"{name} is a group of settings; set one of {inner}")
    raise ConfigError(_unknown(name))


def _unknown(name: str) -> str:
    def likeness(leaf: str) -> float:
        whole = SequenceMatcher(None, name, leaf).ratio()
        return whole + SequenceMatcher(None, name.rpartition(".")[2], leaf.rpartition(".")[2]).ratio()

    return f"there is no setting {name!r}; the nearest is {max(LEAVES, key=likeness)}"
