"""Declare every setting of a run: name, type, default, range and one line of help.

`scripts/knob_tables.py` writes the tables of docs/TRAINING.md from these declarations. A config is data: nothing here
looks at a model, an environment or a device. The constructor checks types and ranges, then calls `checks`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from lfo.config import checks
from lfo.config.algorithms import ALGORITHMS
from lfo.config.sources import SOURCES, Source, SourceName
from lfo.env.worlds.shipped import SHIPPED
from lfo.settings import dotted

# Default arguments of the environments in this package.
SHIPPED_ENVIRONMENTS: Mapping[str, Mapping[str, Any]] = {name: each.arguments for name, each in SHIPPED.items()}

SCHEDULE = r"^(joint|alternating|adaptive|(world_model_first|explore_first|hierarchical):[1-9]\d*)$"
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0, le=1)]
Factor = Annotated[float, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]


def knob(default: Any, text: str, *, main: bool = False, beside: bool = False, **limits: Any) -> Any:
    """Declare a setting.

    `main`: users often change it. `beside`: it does not distinguish experiments (it does not change results, or is the
    seed).
    """
    return Field(default, description=text, json_schema_extra={"main": main, "beside": beside}, **limits)


def _words(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class LoraConfig:
    """Both adapters have the same shape. There is no dropout: sampled and trained log-probs would not agree."""

    rank: Count = knob(16, "rank of each adapter; alpha is twice the rank", main=True)
    targets: str = knob("all-linear", "which layers have adapters: `all-linear`, or names with commas")

    @property
    def alpha(self) -> float:
        """The update is scaled by alpha / rank, which is 2."""
        return 2.0 * self.rank

    @property
    def target_modules(self) -> str | list[str]:
        """`targets` in the form that peft expects."""
        return self.targets if self.targets == "all-linear" else [name.strip() for name in self.targets.split(",")]


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class RolloutConfig:
    prompts: Count = knob(8, "tasks in one step", main=True)
    group_size: int = knob(8, "rollouts of each task", main=True, ge=2)
    mini_batch_prompts: Count = knob(
        2, "tasks in an update if all teach; a step makes `rollout.prompts` / this many updates"
    )
    max_turns: Count = knob(16, "messages of the policy in one rollout", main=True)
    max_context: Count = knob(1024, "tokens of a whole rollout; more ends it", main=True)
    max_turn_tokens: Count = knob(160, "tokens of one message, its thought included; more ends the rollout", main=True)
    temperature: Above0 = knob(1.0, "of sampling")
    thinking: bool = knob(False, "let the model think before it speaks, where its chat template knows thoughts")
    environment_timeout: Above0 = knob(30.0, "seconds that one reset or step of an environment may take")


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class PolicyConfig:
    learning_rate: Rate = knob(1e-4, "of the policy adapter; with `coupling=shared` of the one adapter", main=True)
    frozen: bool = knob(False, "train the world model alone: the control that shows what RL adds", main=True)
    max_resamples: int = knob(1, "most redraws of tasks in a step if groups teach nothing; -1 keeps such groups", ge=-1)
    overlong_buffer: Whole = knob(0, "tokens before `rollout.max_context` over which reward falls linearly; 0 is off")


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class WorldModelConfig:
    weight: float = knob(1.0, "total loss = policy loss + weight * world-model loss", main=True, ge=0, le=2)
    learning_rate: Rate = knob(5e-4, "of the world-model adapter", main=True)
    lora_plus: Above0 = knob(1.0, "LoRA+: B matrices of its adapter learn at so many times the rate of A matrices")
    input: Literal["state", "inline"] = knob("state", "rows of their own, or the observation tokens of the rollout")
    predict: str = knob("default", "tools whose replies it learns: as the environment says, `all`, `none`, or names")
    user_turns: Factor = knob(0.0, "with `input=inline`: weight of answers to messages that call no tool")
    other_replies: Factor = knob(0.0, "with `input=inline`: weight of replies to other calls and to broken ones")
    state_tokens: int = knob(
        512, "tokens of a state; a longer one is cut to what concerns the call, then further", ge=32
    )
    reply_tokens: Count = knob(96, "tokens of a predicted reply at most: see Long replies")
    replay: bool = knob(True, "keep every reply received and train on it again")
    examples_per_mini_batch: Count = knob(32, "most world-model examples in one update, new and replayed", main=True)
    swap_names: Share = knob(0.0, "chance that a rare word of a state is swapped for another in training")
    wording: Share = knob(1.0, "weight of tokens that every reply contains; tokens that few replies contain weigh 1")
    schedule: str = knob("joint", "when policy and world model learn: see Schedules", pattern=SCHEDULE)
    from_logs: str | None = knob(None, "with `policy.frozen`: a file of rollouts to learn from: see From logs")


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class ImagineConfig:
    """What is imagined, and how it is shown."""

    form: Literal["auto", "mark", "tool", "user"] = knob(
        "auto", "how the policy is told of a predicted reply; `auto`: as this base acts on it (docs/YOUR_MODEL.md)"
    )
    drafts: int = knob(1, "drafts of a turn at most; sampling stops when a prediction changes the turn", ge=1, le=16)


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class ExplorationConfig:
    blind_share: Share = knob(0.5, "share of each group that explores: imagines less than the others, or nothing")


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class InternaliseConfig:
    """Imitation of successful rollouts, without the predictions or feedback that they were shown."""

    rows: Whole = knob(0, "successes in one mini-batch that the policy imitates; 0 is off: see Into the weights")
    learning_rate: Rate = knob(1e-3, "of the policy adapter in updates that imitate")
    until: Whole = knob(0, "steps after which look-ahead and world model end, and DAPO alone goes on; 0 is never")
    swap_names: Share = knob(0.0, "chance that a rare word of a success is swapped for another when it is imitated")
    teacher: Literal["base", "policy", "hindsight"] = knob("base", "who gives what is imitated: see Into the weights")


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class OptimizerConfig:
    warmup_steps: Whole = knob(10, "linear; then a cosine to a tenth of the rate at `steps`")
    constant: bool = knob(False, "keep the rates after the warm-up, so that a run does not depend on `steps`")


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class EvalConfig:
    every: Whole = knob(10, "steps between evaluations; 0 is never", main=True, beside=True)
    tasks: Count = knob(200, "fixed tasks of each split, played greedily; with look-ahead and without", main=True)
    splits: tuple[str, ...] = knob(("val",), "what is evaluated, with commas", main=True, min_length=1)
    final_splits: tuple[str, ...] = knob((), "splits that are evaluated after the last step only")


Preset = Literal["default", "tiny", "smollm2-135m", "documents", "qwen3-8b-8x24gb", "qwen3-1.7b-1gpu"]
Feedback = Literal["off", "own", "other_task"]
Tracker = Literal["tensorboard", "wandb"]


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class RunConfig:
    """All settings of one run: enough to repeat it with the same code on the same machine."""

    preset: Preset = knob("default", "where the values start from: see Presets", main=True, beside=True)
    algo: str = knob("dual-lora", f"what is trained: {_words(ALGORITHMS)}; see Presets", main=True)
    engine: Literal["local", "verl"] = knob("local", "who trains: one process, or many (docs/VERL_INTEGRATION.md)")
    model: str = knob("tiny", "the embedded base, a name of `lfo models list`, a folder or a hub id", main=True)
    practice: Literal["auto", "off"] = knob(
        "auto", "`auto`: `lfo train` lets the embedded base practise tools that it does not know (docs/BASE_MODEL.md)"
    )
    env: str = knob("phone-calls", "or `oracle-codes`, `package.module:Class`, or docs/ADAPTERS.md", main=True)
    env_args: dict[str, Any] = knob(
        dict(SHIPPED_ENVIRONMENTS["phone-calls"]),
        "given to the environment's class, as `env_args.seed=1`; `levels=2,3` is short for `env_args.levels=[2,3]`",
        main=True,
    )
    coupling: str = knob(
        "separate", "how many adapters there are: two `separate` ones, or one `shared` by both jobs", main=True
    )
    lookahead: Literal["policy", "off"] = knob("policy", "who proposes what to imagine; `off`: nothing is", main=True)
    lookahead_source: SourceName = knob(
        "world_model", "who predicts replies; the last three are controls: docs/EVALUATION.md"
    )
    feedback: Feedback = knob(
        "off", "show half of each group a reply that the others received; `other_task` is a control"
    )
    surprise: Factor = knob(
        0.0, "coefficient of a bonus for prediction error, added to advantages; no group is drawn again then"
    )
    steps: Count = knob(100, "steps to train", main=True)
    seed: int = knob(0, "of all random numbers of the run", main=True, beside=True, ge=0, le=2**32 - 1)
    output_dir: str = knob("runs/latest", "the run's folder", main=True, beside=True)
    init_from: str | None = knob(
        None, "a run that this one goes on from: When the rules change; or a PEFT LoRA for the policy"
    )
    device: Literal["auto", "cpu", "cuda"] = knob("auto", "where to train", beside=True)
    micro_batch_tokens: Count = knob(
        16_384, "in one forward and backward: fewer take less memory", main=True, beside=True
    )
    checkpoint_every: Count = knob(10, "steps between checkpoints", beside=True)
    trackers: tuple[Tracker, ...] = knob((), "where metrics go beside the run's folder, with commas", beside=True)
    lora: LoraConfig = LoraConfig()
    rollout: RolloutConfig = RolloutConfig()
    policy: PolicyConfig = PolicyConfig()
    world_model: WorldModelConfig = WorldModelConfig()
    imagine: ImagineConfig = ImagineConfig()
    exploration: ExplorationConfig = ExplorationConfig()
    internalise: InternaliseConfig = InternaliseConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    eval: EvalConfig = EvalConfig()
    verl: dict[str, Any] = knob({}, "settings of verl itself, beside those made of these, as `verl.trainer.nnodes=2`")

    older: dict[str, Any] = Field(default_factory=dict)  # of a saved run: what no present setting can say

    def __post_init__(self) -> None:
        checks.check(self)

    @property
    def has_world_model(self) -> bool:
        return ALGORITHMS[self.algo].has_world_model

    @property
    def is_auto(self) -> bool:
        """Whether the run finds out itself what helps: `lfo.algorithms.auto`."""
        return self.algo == "auto"

    @property
    def looks_ahead(self) -> bool:
        return self.lookahead != "off"

    @property
    def source(self) -> Source:
        """Who predicts the replies of look-ahead."""
        return SOURCES[self.lookahead_source]

    @property
    def has_feedback(self) -> bool:
        return self.feedback != "off"

    @property
    def imitates(self) -> bool:
        """Whether the policy imitates rollouts that succeeded, once there are enough of them."""
        return self.internalise.rows > 0

    @property
    def shows_replies(self) -> bool:
        """Whether rollouts are shown replies that they did not receive, in the form `imagine.form`."""
        return self.looks_ahead or self.has_feedback

    @property
    def first_wave(self) -> int:
        """The rollouts of a group that run first: the explorers; with feedback but no explorers, half of the group."""
        size = self.rollout.group_size
        return round(size * self.exploration.blind_share) or (size // 2 if self.has_feedback else 0)

    @property
    def leaves_policy_alone(self) -> bool:
        """Whether the trained policy acts without look-ahead, so that success without it is what counts."""
        return self.looks_ahead and not self.is_auto and (self.imitates or self.internalise.until > 0)

    @property
    def is_plain_dapo(self) -> bool:
        """Whether this is the baseline: DAPO and nothing else."""
        return [name for name, algorithm in ALGORITHMS.items() if algorithm.takes_part(self)] == ["dapo"]

    @property
    def looks_ahead_untrained(self) -> bool:
        """Whether the base uses look-ahead in place of the policy, which learns to act without it."""
        return self.looks_ahead and self.imitates and self.internalise.teacher != "policy"


def _knobs(part: Any, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, info in part.__pydantic_fields__.items():
        if dataclasses.is_dataclass(info.annotation):
            yield from _knobs(info.annotation, f"{name}.")
        elif info.description:
            yield prefix + name, info


KNOBS: Mapping[str, FieldInfo] = dict(_knobs(RunConfig))
PARTS = frozenset(name.partition(".")[0] for name in KNOBS if "." in name)


def marked(mark: str) -> tuple[str, ...]:
    """Return the settings declared with `main` or with `beside`."""
    return tuple(name for name, info in KNOBS.items() if cast(dict[str, Any], info.json_schema_extra)[mark])


def flatten(config: RunConfig) -> dict[str, Any]:
    """Return every setting by the dotted name that a user types; `levels` has its short name."""
    settings = dict(by_name(dataclasses.asdict(config)))
    settings |= dotted(settings.pop("older"))
    if "levels" in settings["env_args"]:
        levels = settings["env_args"].pop("levels")  # another environment's levels may have any type
        settings["levels"] = tuple(levels) if isinstance(levels, list | tuple) else levels
    return settings


def by_name(tree: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Return the settings of nested mappings by their dotted names."""
    for name, value in tree.items():
        if name in PARTS and isinstance(value, Mapping):
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        else:
            yield str(name), value
