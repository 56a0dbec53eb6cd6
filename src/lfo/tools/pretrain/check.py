"""Measure what a base can do and what it does not know: `lfo pretrain --check`.

A base should use what it reads: solve level 1 alone, and the main levels with true replies as look-ahead. It should not
know the requirements of departments: fail from level 2 on alone, and ask for fields that are independent of the
department.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import log
from statistics import fmean
from typing import Any

import numpy as np
import torch

from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.env.worlds.phone.fields import FIELDS
from lfo.env.worlds.phone.tasks import LEVEL, Task
from lfo.env.worlds.phone.world import company
from lfo.loading import load_base, load_tokenizer
from lfo.model.adapters import DualAdapterModel
from lfo.model.sampler import Sampler
from lfo.play.look_ahead import LookAhead
from lfo.play.predictors import true_reply_predictor
from lfo.play.runner import Runner, RunnerConfig
from lfo.protocol.chat import ChatCodec
from lfo.statistics import wilson
from lfo.tools.pretrain.syntax import rollouts_of_base
from lfo.types import Rollout

MAX_CONTEXT = 1_536
PERMUTATIONS = 2_000
FORMS = 512  # rollouts from which blind forms are collected

# The conditions for a usable base.
READS = 0.9  # least success on level 1 alone
IGNORANT = 0.02  # most success on levels 2 to 5 alone
GUESSES = 0.2  # most success on level 6 alone, where guesses sometimes succeed
UNIFORM = 0.97  # least entropy of the fields of blind forms, as a share of its maximum
CHANCE = 0.001  # p-value below which forms show knowledge


@dataclass(frozen=True, kw_only=True, slots=True)
class BlindForm:
    """A form that was filled in before the first call."""

    task: Task
    industry: str
    fields: tuple[str, ...]


class Player:
    """The base as a policy in the phone-call world."""

    def __init__(self, model: str, device: torch.device, law: int = 0) -> None:
        self._environment = partial(PhoneCalls, law=law)
        self._codec = ChatCodec(load_tokenizer(model), PhoneCalls().tools())
        # The model needs adapters, but none is active here.
        self._model = DualAdapterModel.build(load_base(model, device), coupling="separate", seed=0, rank=1)
        self._sampler = Sampler(self._model, max_context=MAX_CONTEXT, eos_ids=[self._codec.end_of_turn])

    def play(
        self, tasks: Sequence[Task], *, temperature: float, with_true_replies: bool = False, batch: int = 64
    ) -> list[Rollout]:
        environment, runner_config, lookahead = self._environment, RunnerConfig(), None
        if with_true_replies:
            lookahead = LookAhead(predictor=true_reply_predictor(environment, runner_config), proposed_by="environment")
        runner = Runner(environment, self._codec, config=runner_config, lookahead=lookahead)
        return rollouts_of_base(runner, self._sampler, tasks, batch=batch, temperature=temperature)


def check_base(
    model: str = "tiny",
    *,
    tasks: int = 64,
    law: int = 0,
    device: torch.device | None = None,
    progress: Callable[[str], None] = lambda words: None,
) -> dict[str, Any]:
    """Return success by level, alone and with true replies; the fields of blind forms; and violated conditions."""
    player = Player(model, device or torch.device("cpu"), law)
    levels: dict[str, Any] = {}
    for level in LEVEL:
        chosen = PhoneCalls(law=law, levels=(level,), counts={"val": tasks}).tasks("val")
        levels[str(level)] = {}
        for name, true_replies in (("alone", False), ("true_replies", True)):
            for way, temperature in (("greedy", 0.0), ("sampled", 1.0)):
                progress(f"level {level}, {name.replace('_', ' ')}, {way}")
                rollouts = player.play(chosen, temperature=temperature, with_true_replies=true_replies)
                levels[str(level)][f"{name}_{way}"] = summary(rollouts)
    progress("blind forms")
    asked = blind_forms(player, PhoneCalls(law=law, levels=(2,), counts={"val": FORMS}).tasks("val"))
    knowledge = rule_knowledge(asked)
    problems = violated_conditions(levels, knowledge)
    return {
        "model": model,
        "law": law,
        "tasks": tasks,
        "levels": levels,
        "blind_forms": knowledge,
        "problems": problems,
        "ok": not problems,
    }


def summary(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    success = sum(rollout.reward for rollout in rollouts) / len(rollouts)
    low, high = wilson(success, len(rollouts))
    first_calls = [call for rollout in rollouts if (call := _first(rollout, "make_phone_call"))]
    return {
        "success": success,
        "low": low,
        "high": high,
        "empty_first_call": fmean([call.arguments.get("auth_info") == {} for call in first_calls] or [0.0]),
        "mistakes": fmean(float(rollout.info.get("mistakes", 0)) for rollout in rollouts),
    }


def _first(rollout: Rollout, tool: str) -> Any:
    calls = [turn.call for turn in rollout.turns if turn.call and not turn.predicted and turn.call.name == tool]
    return calls[0] if calls else None


def blind_forms(player: Player, tasks: Sequence[Task]) -> list[BlindForm]:
    """Return the forms of one sampled rollout of each task, if no call came before."""
    found = []
    for task, rollout in zip(tasks, player.play(tasks, temperature=1.0), strict=True):
        names = [turn.call.name for turn in rollout.turns if turn.call]
        form = _first(rollout, "auth_info_form")
        if form is None or "make_phone_call" in names[: names.index("auth_info_form")]:
            continue
        listed = form.arguments.get("fields")
        fields = tuple(name for name in listed if name in FIELDS) if isinstance(listed, list) else ()
        found.append(BlindForm(task=task, industry=company(0, task.company).industry, fields=fields))
    return found


def rule_knowledge(forms: Sequence[BlindForm], *, permutations: int = PERMUTATIONS) -> dict[str, Any]:
    """Test whether blind forms depend on their tasks.

    Each statistic is compared with its values when the forms are assigned to tasks at random; the p-value is the share
    of random assignments with at least the same value.
    """
    asked_NF = np.array([[name in form.fields for name in FIELDS] for form in forms], dtype=float)
    counts = Counter(name for form in forms for name in form.fields)
    total = sum(counts.values())
    entropy = -sum(count / total * log(count / total) for count in counts.values())
    required_NF = np.array(
        [[any(name in errand.requires for errand in form.task.errands) for name in FIELDS] for form in forms],
        dtype=float,
    )
    rng = np.random.default_rng(0)
    deals = [rng.permutation(len(forms)) for _ in range(permutations)]

    def compared(statistic: Callable[[np.ndarray], float]) -> dict[str, float]:
        observed, null = statistic(asked_NF), [statistic(asked_NF[deal]) for deal in deals]
        p = (1 + sum(value >= observed - 1e-12 for value in null)) / (1 + len(null))
        return {"observed": observed, "by_chance": fmean(null), "p": p}

    kinds = [form.task.errands[0].kind for form in forms]
    return {
        "forms": len(forms),
        "fields_per_form": total / len(forms),
        "entropy_share": entropy / log(len(FIELDS)),
        "rarest_field": min(counts[name] for name in FIELDS) / total,
        "commonest_field": max(counts[name] for name in FIELDS) / total,
        "required_fields_asked": compared(lambda asked: float((asked * required_NF).sum() / required_NF.sum())),
        "information_on_department": compared(partial(_information, labels=_one_hot(kinds))),
        "information_on_industry": compared(partial(_information, labels=_one_hot([each.industry for each in forms]))),
    }


def _one_hot(labels: Sequence[str]) -> np.ndarray:
    return np.array([[label == name for label in labels] for name in sorted(set(labels))], dtype=float)


def _information(asked_NF: np.ndarray, labels: np.ndarray) -> float:
    """Return the mutual information of a form's label and its fields, in nats."""
    joint_LF = labels @ asked_NF
    joint_LF = joint_LF / joint_LF.sum()
    independent_LF = joint_LF.sum(1, keepdims=True) * joint_LF.sum(0, keepdims=True)
    seen = joint_LF > 0
    return float((joint_LF[seen] * np.log(joint_LF[seen] / independent_LF[seen])).sum())


def violated_conditions(levels: dict[str, Any], knowledge: dict[str, Any]) -> list[str]:
    """Return the conditions for a usable base that these figures violate, as sentences."""
    problems = []
    for way in ("greedy", "sampled"):
        if (success := levels["1"][f"alone_{way}"]["success"]) < READS:
            problems.append(f"level 1 alone, {way}: success {success:.0%}, expected at least {READS:.0%}")
        for level, limits in LEVEL.items():
            most = READS if level == 1 else GUESSES if limits.lenient else IGNORANT
            alone = levels[str(level)][f"alone_{way}"]
            if level > 1 and (success := alone["success"]) > most:
                problems.append(f"level {level} alone, {way}: success {success:.0%}, expected at most {most:.0%}")
    if knowledge["entropy_share"] < UNIFORM:
        problems.append(f"blind forms prefer some fields: entropy {knowledge['entropy_share']:.1%} of its maximum")
    for name in ("required_fields_asked", "information_on_department", "information_on_industry"):
        if knowledge[name]["p"] < CHANCE:
            problems.append(f"blind forms are not blind: {name.replace('_', ' ')}, p = {knowledge[name]['p']:.4f}")
    return problems
