"""The headline of a comparison and its evidence, as text without markup.

Groups have their page names (`page_names`).

The headline states only what was measured: on how many seeds a target was reached, within how many tasks, and where it
was not reached. A ratio with censored runs is called a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lfo.config.sources import SOURCES
from lfo.runs.comparison_text import interval_in_words, is_control
from lfo.runs.grouping import FROZEN_POLICY, IMITATION, WITH_FEEDBACK
from lfo.runs.sample_efficiency import TARGET_SHARE, Comparison, Group, Ratio

# Display names of parts of `group_names`; other config values stay `name=value`.
SPOKEN = {
    "dapo": "plain DAPO",
    "dual-lora": "dual-LoRA",
    "auto": "what helps, decided by the run",
    "internalise": "internalised look-ahead",
    f"internalise{WITH_FEEDBACK}": "internalised look-ahead and feedback",
    f"dapo{WITH_FEEDBACK}": "plain DAPO with feedback",
    f"{IMITATION}{WITH_FEEDBACK}": "feedback without a world model",
    f"dual-lora{WITH_FEEDBACK}": "dual-LoRA with feedback",
    FROZEN_POLICY: "frozen policy",
    "teacher=policy": "own successes",
    "teacher=hindsight": "in hindsight",
    "lookahead=off": "no look-ahead",
    "lookahead=environment": "look-ahead asked by the environment",
    **{f"lookahead_source={name}": source.spoken for name, source in SOURCES.items() if source.spoken},
    "feedback=other_task": "feedback of another task",
    "coupling=shared": "one shared adapter",
    "coupling=stacked": "stacked adapters",
}


def page_names(names: Sequence[str]) -> list[str]:
    """Return display names of groups, without irrelevant parts: steps, and blind exploration without look-ahead.

    >>> page_names(["dapo", "dual-lora steps=60", "dual-lora lookahead=off rank=8 blind_share=0 steps=60"])
    ['plain DAPO', 'dual-LoRA', 'dual-LoRA, no look-ahead, rank=8']
    """
    full = [[SPOKEN.get(word, word) for word in name.split(" ")] for name in names]
    brief = []
    for words in full:
        idle = ("steps=", "blind_") if SPOKEN["lookahead=off"] in words else ("steps=",)
        brief.append([word for word in words if not word.startswith(idle)])
    chosen = [short if brief.count(short) == 1 else words for short, words in zip(brief, full, strict=True)]
    return [", ".join(words) for words in chosen]


def renamed(comparison: Comparison, names: Sequence[str]) -> Comparison:
    """Return the comparison with other names of its groups."""
    new = dict(zip((group.name for group in comparison.groups), names, strict=True))
    groups = tuple(replace(group, name=new[group.name]) for group in comparison.groups)
    return replace(comparison, groups=groups, baseline=comparison.baseline and new[comparison.baseline])


def headline(comparison: Comparison) -> tuple[str, str]:
    """Return the headline and a sentence with its evidence."""
    base = next((group for group in comparison.groups if group.name == comparison.baseline), None)
    others = [group for group in comparison.groups if group is not base and not is_control(group)]
    best = min(others, key=_eagerness, default=None)
    if best is None:
        return _capital(_alone(base or comparison.groups[0], comparison)), ""
    if base is None:
        return _capital(_alone(best, comparison)), _choice(others, best)
    target = _target_words(comparison)
    if best.ratio.value is not None and not best.ratio.censored:
        ratio = best.ratio.value
        how = f"{ratio:.1f} times fewer" if ratio >= 1 else f"{1 / ratio:.1f} times more"
        first = f"{best.name} needs {how} tasks than {base.name} to get to {target}."
        basis = [
            f"{_seeds(len(best.ratio.seeds))} of each, paired{_interval_words(best.ratio)}.",
            f"{_capital(best.name)} got there {_reached_words(best)}, {base.name} {_reached_words(base)}.",
        ]
    else:
        got_to, did = ("got to" if _got_there(best) else "did not get to"), ("did" if _got_there(base) else "did not")
        first = f"{best.name} {got_to} {target} {_reached_words(best)}; {base.name} {did} {_reached_words(base)}."
        basis = [_bound_words(best.ratio)]
    basis += [_unseen_words(best), _choice(others, best)]
    return _capital(first), " ".join(words for words in basis if words)


def percent(value: float) -> str:
    return f"{value:.0%}".replace("%", " %")


def _eagerness(group: Group) -> tuple[bool, float, float]:
    found = group.by_seed.values()
    return any(each.censored for each in found), max(each.tasks for each in found), -group.success


def _target_words(comparison: Comparison) -> str:
    share = percent(TARGET_SHARE)
    return f"{share} success" if comparison.ceiling is None else f"{share} of the ceiling"


def _got_there(group: Group) -> bool:
    return not all(each.censored for each in group.by_seed.values())


def _reached_words(group: Group) -> str:
    """Return a phrase such as "within 320 tasks on all 3 seeds"."""
    found = group.by_seed.values()
    there = [each.tasks for each in found if not each.censored]
    if not there:
        return f"in {_tasks(min(each.tasks for each in found))} on {_of_seeds(0, len(found))}"
    return f"within {_tasks(max(there))} on {_of_seeds(len(there), len(found))}"


def _of_seeds(some: int, n: int) -> str:
    if n == 1:
        return "one seed"
    if some == n:
        return "both seeds" if n == 2 else f"all {n} seeds"
    if some == 0:
        return "either seed" if n == 2 else f"any of {n} seeds"
    return f"{some} of {n} seeds"


def _tasks(tasks: float) -> str:
    return f"{tasks:,.0f} tasks"


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _seeds(n: int, kind: str = "") -> str:
    return f"{n} {kind}seed{'' if n == 1 else 's'}"


def _alone(group: Group, comparison: Comparison) -> str:
    ceiling = "" if comparison.ceiling is None else f", where {percent(comparison.ceiling)} is the ceiling"
    return (
        f"{group.name} succeeds in {percent(group.success)} of val after {group.tasks_seen:,} tasks"
        f"{ceiling} ({_seeds(len(group.runs))})."
    )


def _choice(others: Sequence[Group], best: Group) -> str:
    if len(others) < 2:
        return ""
    return f"Of {len(others)} ways of training besides the baseline, {best.name} did best here."


def _bound_words(ratio: Ratio) -> str:
    if ratio.note:
        return f"No ratio can be given: {ratio.note}."
    if ratio.value is None or ratio.bound is None:
        return ""
    few = "" if ratio.interval else ", too few for an interval"
    return (
        f"That is {ratio.bound} {ratio.value:.1f} times fewer tasks: a bound, because some runs ended before the "
        f"target ({_seeds(len(ratio.seeds), 'paired ')}{few})."
    )


def _interval_words(ratio: Ratio) -> str:
    if ratio.interval is None:
        return "; too few, or too much alike, for an interval"
    return f"; 95 % interval {interval_in_words(ratio.interval)} times"


def _unseen_words(group: Group) -> str:
    zero = group.zero_shot
    if zero is None or zero.baseline is None:
        return ""
    return (
        f"On {zero.split} it succeeds in {percent(zero.success)}, the baseline in "
        f"{percent(zero.baseline)}, both after {_tasks(zero.tasks)}."
    )
