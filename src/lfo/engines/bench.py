"""What a training step costs and how fast the sampler is, on this machine and one thread.

    lfo bench step       a dual-LoRA step against a plain DAPO step, phase by phase
    lfo bench rollout    our sampler against transformers' generate()

Seconds are processor time, medians over repetitions in which the variants take turns, so that other programs on
the machine and its moods fall on all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch

from lfo.config import load_config
from lfo.engines.loading import environment_factory, load_base, load_tokenizer
from lfo.engines.local import Trainer, create_trainer
from lfo.engines.recipe import Collected
from lfo.env.phone_calls import PhoneCalls
from lfo.env.tool_environment import format_tool_call
from lfo.model.adapters import DualAdapterModel
from lfo.model.sampler import Sampler
from lfo.objectives.advantages import DynamicSamplingReport
from lfo.protocol.chat import ChatCodec
from lfo.types import RolloutGroup, ToolCall, TrainingSample

# What each variant adds to the settings of the run; look-ahead is the only one that rolls out differently.
_ONE_THREAD = ("device=cpu", "threads=1")
_NO_WORLD_MODEL = ("world_model.weight=0", "world_model.only=false", "world_model.adaptive_weight=false", "surprise=0")
VARIANTS: dict[str, tuple[str, ...]] = {
    "dapo": ("algo=dapo", "lookahead=false", *_NO_WORLD_MODEL),
    "dual": ("algo=dual-lora", "lookahead=false", "world_model.input=state"),
    "inline": ("algo=dual-lora", "lookahead=false", "coupling=shared", "world_model.input=inline"),
    "lookahead": ("algo=dual-lora", "lookahead=true", "world_model.input=state"),
}
STEP_NOTE = (
    "Rollouts of the base policy, recorded once. Their rewards are replaced by alternating 0 and 1, so that every "
    "group is informative and the policy learns from every row. Rolling out is timed once for the variants "
    "without look-ahead, which sample from the same shapes."
)


@dataclass(slots=True)
class _Variant:
    """A trainer with rollouts to learn from, and the seconds of its phases."""

    trainer: Trainer
    groups: Sequence[RolloutGroup]
    seconds: dict[str, list[float]]


def bench_step(overrides: Sequence[str] = (), *, repeats: int = 5, replayed_batches: int = 3) -> dict[str, Any]:
    """Cost of a step (rollouts, examples, update) of each variant, and its ratio to that of plain DAPO."""
    variants = {name: _variant([*overrides, *_ONE_THREAD, *settings]) for name, settings in VARIANTS.items()}
    for variant in variants.values():
        _fill_replay(variant.trainer, replayed_batches)
    for repeat in range(repeats + 1):  # the first one warms up and does not count
        for name, variant in variants.items():
            if name in ("dapo", "lookahead"):
                _timed(variant, "rollout", lambda trainer=variant.trainer: trainer.recipe.draw(0, 0, trainer.roll_out))
            _train(variant)
        if repeat == 0:
            for variant in variants.values():
                variant.seconds = {}
    for name in ("dual", "inline"):
        variants[name].seconds["rollout"] = variants["dapo"].seconds["rollout"]
    phases = {
        name: {phase: median(variant.seconds[phase]) for phase in ("rollout", "examples", "update")}
        for name, variant in variants.items()
    }
    totals = {name: sum(seconds.values()) for name, seconds in phases.items()}
    return {
        "phases": phases,
        **{f"{name}_over_dapo": totals[name] / totals["dapo"] for name in ("dual", "inline", "lookahead")},
        "tokens": {name: _count(variant) for name, variant in variants.items()},
        "examples_per_mini_batch": variants["dual"].trainer.config.world_model.examples_per_mini_batch,
        "repeats": repeats,
        "note": STEP_NOTE,
    }


def _variant(settings: Sequence[str]) -> _Variant:
    config = load_config(["preset=tiny", *settings])
    trainer = create_trainer(config, environment_factory(config), load_tokenizer(config.model))
    groups = trainer.recipe.draw(0, 0, trainer.roll_out)
    return _Variant(trainer=trainer, groups=[_mixed(group) for group in groups], seconds={})


def _mixed(group: RolloutGroup) -> RolloutGroup:
    rollouts = (replace(rollout, reward=float(place % 2)) for place, rollout in enumerate(group.rollouts))
    return replace(group, rollouts=tuple(rollouts))


def _collected(groups: Sequence[RolloutGroup]) -> Collected:
    report = DynamicSamplingReport(kept=len(groups), all_failed=0, all_succeeded=0)
    return Collected(groups=groups, kept=dict(enumerate(groups)), report=report)


def _fill_replay(trainer: Trainer, batches: int) -> None:
    """As if some steps had been trained already."""
    if trainer.recipe.state.weight and trainer.config.world_model.replay:
        for step in range(1, batches + 1):
            trainer.recipe.hear(trainer.recipe.draw(step, 0, trainer.roll_out))


def _train(variant: _Variant) -> None:
    """Examples and update, after which the adapters are as before: every repetition does the same work."""
    trainer = variant.trainer
    parameters = [weight for weights in trainer.learner.parameters.values() for weight in weights]
    before = [weight.detach().clone() for weight in parameters]
    trainer.agent.world_model_codec._encode.cache_clear()  # in training every step brings new texts
    heard = _timed(variant, "examples", lambda: trainer.recipe.hear(variant.groups))

    def update() -> None:
        trainer.update(trainer.recipe.plan(0, _collected(variant.groups), heard))
        trainer.sampler.refresh()

    _timed(variant, "update", update)
    with torch.no_grad():
        for weight, old in zip(parameters, before, strict=True):
            weight.copy_(old)
    trainer.sampler.refresh()


def _timed(variant: _Variant, phase: str, work: Callable[[], Any]) -> Any:
    started = time.process_time()
    result = work()
    variant.seconds.setdefault(phase, []).append(time.process_time() - started)
    return result


def _count(variant: _Variant) -> dict[str, int]:
    """What one step computes, and how much of it each loss looks at."""
    trainer, learnt = variant.trainer, []

    def note(samples: Sequence[TrainingSample], **_: Any) -> dict[str, float]:
        learnt.extend(samples)
        return {}

    update, trainer.learner.update = trainer.learner.update, note  # pyright: ignore[reportAttributeAccessIssue]
    trainer.update(trainer.recipe.plan(0, _collected(variant.groups), trainer.recipe.hear(variant.groups)))
    trainer.learner.update = update
    policy = [row for row in learnt if any(row.policy_weights)]
    other = [row for row in learnt if not any(row.policy_weights)]
    return {
        "rollouts": sum(len(group.rollouts) for group in variant.groups),
        "policy_rows": len(policy),
        "policy_row_tokens": sum(len(row.tokens) for row in policy),
        "policy_loss_tokens": round(sum(sum(row.policy_weights) for row in learnt)),
        "world_model_rows": len(other),
        "world_model_row_tokens": sum(len(row.tokens) for row in other),
        "world_model_loss_tokens": round(sum(sum(row.world_model_weights) for row in learnt)),
    }


# --- the sampler -------------------------------------------------------------------------------------------------


def bench_rollout(
    *, model: str = "tiny", tasks: int = 8, group_size: int = 8, max_new_tokens: int = 160, repeats: int = 3
) -> dict[str, Any]:
    """Sampled tokens per second of both, after the directory was shown, on the same prompts and adapter.

    `speedup` is for the policy's real turns, which end at different lengths; `speedup_fixed_length` lets every row
    say the same number of tokens, so that it shows the cost of a token alone.
    """
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(model)
    codec = ChatCodec(tokenizer, PhoneCalls().tools())
    dual = DualAdapterModel.build(load_base(model, torch.device("cpu")), coupling="separate", seed=0)
    prompts = [prompt for prompt in _prompts(codec, tasks) for _ in range(group_size)]
    room = max(map(len, prompts)) + max_new_tokens
    natural = Sampler(dual, max_context=room, eos_ids=[codec.end_of_turn])
    endless = Sampler(dual, max_context=room, eos_ids=[])
    length = 48
    speeds: dict[str, list[float]] = {"ours": [], "generate": [], "ours_fixed": [], "generate_fixed": []}
    for repeat in range(repeats + 1):
        turns = {
            "ours": lambda repeat=repeat: _sample(natural, prompts, max_new_tokens, repeat),
            "generate": lambda repeat=repeat: _generate(dual, codec, prompts, max_new_tokens, repeat, fixed=False),
            "ours_fixed": lambda repeat=repeat: _sample(endless, prompts, length, repeat),
            "generate_fixed": lambda repeat=repeat: _generate(dual, codec, prompts, length, repeat, fixed=True),
        }
        for name, work in turns.items():
            started = time.process_time()
            tokens = work()
            if repeat:  # the first round warms up
                speeds[name].append(tokens / (time.process_time() - started))
    speed = {name: median(values) for name, values in speeds.items()}
    return {
        "tokens_per_second": speed["ours"],
        "generate_tokens_per_second": speed["generate"],
        "speedup": speed["ours"] / speed["generate"],
        "speedup_fixed_length": speed["ours_fixed"] / speed["generate_fixed"],
        "batch": len(prompts),
        "prompt_tokens": sum(map(len, prompts)) / len(prompts),
        "max_new_tokens": max_new_tokens,
    }


def _prompts(codec: ChatCodec, tasks: int) -> list[list[int]]:
    """What the policy has read when it has just seen the directory."""
    prompts = []
    for task in PhoneCalls(levels=(2,)).tasks("val")[:tasks]:
        environment = PhoneCalls(levels=(2,))
        opening = environment.reset(task)
        search = format_tool_call(ToolCall(name="search_company", arguments={"name": task.company_name}))
        shown = codec.after_action(environment.step(search).observation, stopped=False)
        prompts.append([*codec.opening(opening).ids, *codec.encode(search), *shown.ids])
    return prompts


def _sample(sampler: Sampler, prompts: Sequence[Sequence[int]], limit: int, seed: int) -> int:
    uniforms = np.random.default_rng(seed).random((len(prompts), limit))
    adapters = sampler.model.policy_adapters
    answers = sampler.generate(prompts, adapters=adapters, max_new_tokens=limit, temperature=1.0, uniforms=uniforms)
    return sum(len(answer.tokens) for answer in answers)


@torch.inference_mode()
def _generate(
    model: DualAdapterModel, codec: ChatCodec, prompts: Sequence[Sequence[int]], limit: int, seed: int, *, fixed: bool
) -> int:
    longest, end = max(map(len, prompts)), codec.end_of_turn
    tokens = torch.tensor([[end] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    torch.manual_seed(seed)
    with model.active(model.policy_adapters):
        rows = model.causal_lm.generate(
            input_ids=tokens,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=limit,
            min_new_tokens=limit if fixed else None,
            eos_token_id=end,
            pad_token_id=end,
        )[:, longest:]
    said = (rows == end).int().cumsum(1)
    # A row's tokens up to and including its first end of turn; the padding behind it is not speech.
    return int(((said - (rows == end).int()) == 0).sum())
