"""Every knob of a run, once: its default, its range and a line of help; and the names by which it is set.

A config is data: nothing here looks at a model, a run, an environment or a device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lfo.env.shipped import SHIPPED
from lfo.settings import leaves

# The arguments that an environment of the package has where a config names none.
SHIPPED_ENVIRONMENTS: Mapping[str, Mapping[str, Any]] = {name: each.arguments for name, each in SHIPPED.items()}


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
    thinking: bool = False  # let a model think before it speaks, as its chat template has it
    environment_timeout: float = 30.0  # seconds that one reset or step may take
    environment_retries: int = 2  # how often one reset or step that raised is tried again; a late one is not
    environment_workers: int = 16  # environments that step at the same time


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig:
    learning_rate: float = 1e-4
    frozen: bool = False  # leave the policy as it is, and train the world model alone: the control of what RL adds
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
    lora_plus: float = 1.0  # LoRA+: the adapter's B matrices learn at so many times the rate of its A matrices
    input: Literal["state", "inline"] = "state"  # rows of their own, or the observation tokens of the rollout itself
    predict: str = "default"  # whose replies: what the environment says, all, none, or names of tools with commas
    state_tokens: int = 512  # the state is compressed to so many tokens
    reply_tokens: int = 96  # a predicted reply ends there at the latest
    target_tokens: int = 512  # of a reply the first so many are learned, never fewer than reply_tokens
    replay: bool = True  # keep every reply heard and train on it again
    examples_per_mini_batch: int = 32  # cap on fresh and replayed examples together
    swap_names: float = 0.0  # chance that a word of few states is swapped for another, each time it is practised
    wording: float = 1.0  # weight of a reply's token that all replies hold, where one of few weighs 1
    schedule: Literal["joint", "alternating", "world_model_first", "hierarchical"] = "joint"
    first_steps: int = 0  # world_model_first: steps before the policy begins to learn
    every: int = 1  # hierarchical: the world model learns in every so many-th step
    adaptive_weight: bool = False  # let prediction accuracy and success set the weight
    from_logs: str | None = None  # with policy.frozen: a file of rollouts to learn from, instead of rolling out


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagineConfig:
    """Look-ahead that the policy proposes."""

    tools: str = "default"  # whose calls may be imagined: those whose replies are predicted, all, or names with commas
    most: int = 2  # imagined exchanges that stay in one rollout
    drafts: int = 1  # candidates for a turn, until the expected reply to one changes what is said
    certainty: bool = False  # say in words how sure the world model is of what it expects


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplorationConfig:
    blind_share: float = 0.5  # share of each group that explores: imagines less than the others, or nothing
    blind_steps: int = 0  # first steps in which every rollout does
    inquiries: bool = True  # explorers take turns in really making the first, second, ... call that others imagine


@dataclass(frozen=True, kw_only=True, slots=True)
class InternaliseConfig:
    """Successes become part of the policy's weights, with all that was shown to them cut out."""

    rows: int = 0  # successes in one mini-batch, each at most once in a step; 0 = off
    weight: float = 1.0  # of the imitation loss
    learning_rate: float = 1e-3  # of the policy adapter in updates that imitate
    first_tasks: int = 24  # begin when so many tasks have succeeded
    until: int = 0  # steps after which look-ahead and world model end, and DAPO alone goes on; 0 = never
    hindsight: bool = False  # imitate also what failures said after their first call, as if they had known its reply
    teacher: Literal["base", "policy"] = "base"  # who acts until then; policy: but for explorers that imagine nothing

    def over(self, step: int) -> bool:
        """Whether DAPO alone goes on."""
        return 0 < self.until <= step


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0  # largest gradient norm of each adapter
    warmup_steps: int = 10
    constant: bool = False  # keep the rates after the warm-up, instead of a cosine to a tenth of them
    separate: bool = False  # one AdamW for each adapter instead of one for both


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    every: int = 10  # steps between evaluations; 0 = never
    tasks: int = 200  # fixed tasks of each split
    splits: tuple[str, ...] = ("val",)
    final_splits: tuple[str, ...] = ()  # evaluated after the last step only, beside `splits`


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One run, completely: with this, the code and a machine, it can be repeated."""

    preset: Literal["default", "tiny", "smollm2-135m", "documents", "qwen3-8b-8x24gb", "qwen3-1.7b-1gpu"] = "default"
    algo: Literal["dual-lora", "internalise", "dapo"] = "dual-lora"
    engine: Literal["local", "verl"] = "local"
    model: str = "tiny"  # the embedded base, a fetched one, a folder or a hub id
    env: str = "phone-calls"  # or oracle-codes, package.module:Class, or an adapter's word:name (env/adapters)
    # Given to the environment's class; `levels=2,3` is short for env_args.levels=[2,3].
    env_args: Mapping[str, Any] = field(default_factory=lambda: dict(SHIPPED_ENVIRONMENTS["phone-calls"]))
    coupling: str = "separate"  # how the adapters meet: separate, shared or stacked (model/couplings.py)
    lookahead: Literal["policy", "environment", "off"] = "policy"  # who proposes what to imagine; true: policy
    lookahead_source: Literal["world_model", "truth", "shuffled", "memory"] = "world_model"  # all others are controls
    feedback: bool = False  # show half of each group what the other half heard on the same task
    feedback_source: Literal["own", "other_task"] = "own"  # other_task is a control
    surprise: float = 0.0  # coefficient of the reward for prediction error
    steps: int = 100
    seed: int = 0
    output_dir: str = "runs/latest"
    init_from: str | None = None  # a run whose adapters this one starts from, or a PEFT LoRA for the policy
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 0  # CPU threads; 0 = let torch decide
    micro_batch_tokens: int = 16_384  # in one forward and backward; a matter of memory and speed alone
    checkpoint_every: int = 10  # steps
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()  # who is told of every row of metrics beside the file
    lora: LoraConfig = field(default_factory=LoraConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    world_model: WorldModelConfig = field(default_factory=WorldModelConfig)
    imagine: ImagineConfig = field(default_factory=ImagineConfig)
    exploration: ExplorationConfig = field(default_factory=ExplorationConfig)
    internalise: InternaliseConfig = field(default_factory=InternaliseConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    verl: Mapping[str, Any] = field(default_factory=dict)  # engine=verl: its own settings, beside those made of ours

    @property
    def has_world_model(self) -> bool:
        return self.algo != "dapo"

    @property
    def looks_ahead(self) -> bool:
        return self.lookahead != "off"

    @property
    def leaves_policy_alone(self) -> bool:
        """Whether the policy is to act without look-ahead in the end, and is judged by that."""
        return self.looks_ahead and (self.internalise.rows > 0 or self.internalise.until > 0)

    @property
    def is_plain_dapo(self) -> bool:
        """The baseline: nothing beside DAPO."""
        return not self.has_world_model and not self.feedback and not self.internalise.rows

    @property
    def looks_ahead_untrained(self) -> bool:
        """Whether the base looks ahead, without the policy adapter: the policy learns to act without look-ahead."""
        return self.looks_ahead and self.internalise.rows > 0 and self.internalise.teacher == "base"


ABOVE_0 = 5e-324  # the smallest number that is
# Closed ranges of every number; None = unbounded.
RANGES: Mapping[str, tuple[float, float | None]] = {
    "surprise": (0, None),
    "steps": (1, None),
    "seed": (0, 2**32 - 1),
    "threads": (0, None),
    "micro_batch_tokens": (1, None),
    "checkpoint_every": (1, None),
    "lora.rank": (1, None),
    "lora.alpha": (ABOVE_0, None),
    "rollout.prompts": (1, None),
    "rollout.group_size": (2, None),
    "rollout.mini_batch_prompts": (1, None),
    "rollout.max_turns": (1, None),
    "rollout.temperature": (ABOVE_0, None),
    "rollout.max_context": (1, None),
    "rollout.max_turn_tokens": (1, None),
    "rollout.environment_timeout": (ABOVE_0, None),
    "rollout.environment_retries": (0, None),
    "rollout.environment_workers": (1, None),
    "policy.learning_rate": (ABOVE_0, 1),
    "policy.clip_low": (ABOVE_0, 1),
    "policy.clip_high": (ABOVE_0, None),
    "policy.entropy": (0, None),
    "policy.entropy_share": (ABOVE_0, 1),
    "policy.kl": (0, None),
    "policy.max_resamples": (0, None),
    "policy.overlong_buffer": (0, None),
    "world_model.weight": (0, 2),
    "world_model.learning_rate": (ABOVE_0, 1),
    "world_model.lora_plus": (ABOVE_0, None),
    "world_model.state_tokens": (32, None),
    "world_model.reply_tokens": (1, None),
    "world_model.target_tokens": (1, None),
    "world_model.examples_per_mini_batch": (1, None),
    "world_model.swap_names": (0, 1),
    "world_model.wording": (0, 1),
    "world_model.first_steps": (0, None),
    "world_model.every": (1, None),
    "imagine.most": (1, 8),
    "imagine.drafts": (1, 16),
    "exploration.blind_share": (0, 1),
    "exploration.blind_steps": (0, None),
    "internalise.rows": (0, None),
    "internalise.weight": (ABOVE_0, None),
    "internalise.learning_rate": (ABOVE_0, 1),
    "internalise.first_tasks": (1, None),
    "internalise.until": (0, None),
    "optimizer.betas": (0, 0.999999),
    "optimizer.weight_decay": (0, None),
    "optimizer.clip": (ABOVE_0, None),
    "optimizer.warmup_steps": (0, None),
    "eval.every": (0, None),
    "eval.tasks": (1, None),
}

# Names

LEAVES = leaves(RunConfig)
PARTS = frozenset(name.partition(".")[0] for name in LEAVES if "." in name)
# What may be typed, or stand in a file, in place of a longer name; and its type.
SHORT_FORMS: Mapping[str, tuple[str, Any]] = {"levels": ("env_args.levels", tuple[int, ...])}
# Values that are written otherwise today; older files and command lines have them.
OLD_VALUES: Mapping[str, Mapping[str, str]] = {
    "lookahead": {"true": "policy", "True": "policy", "false": "off", "False": "off"},
    "world_model.predict": {"phone": "default", "phone_form": "make_phone_call,auth_info_form"},
}


# Settings that have another name today.
OLD_NAMES: Mapping[str, str] = {"world_model.only": "policy.frozen"}


def flatten(config: RunConfig) -> dict[str, Any]:
    """Every setting under the dotted name that a user types, the short one where there is one."""
    settings = dict(by_name(dataclasses.asdict(config)))
    for short, (name, _) in SHORT_FORMS.items():
        group, _, key = name.partition(".")
        if key in settings[group]:
            value = settings[group].pop(key)
            settings[short] = tuple(value) if isinstance(value, list) else value
    return settings


def by_name(tree: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """The settings of a config as nested mappings, by their dotted names."""
    for name, value in tree.items():
        if name in PARTS and isinstance(value, Mapping):
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        else:
            yield str(name), value
