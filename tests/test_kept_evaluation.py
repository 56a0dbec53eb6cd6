"""The kept evaluation of an untrained base: reused exactly where it would be repeated, and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.loading import environment_factory
from lfo.train import kept_evaluation as module
from lfo.train.kept_evaluation import KeptEvaluation, kept_evaluation
from small_runs import small_config

MEASURED = {"eval/val/success": 0.125}, [{"split": "val"}], [{"actual": "No."}]


@pytest.fixture
def place(tmp_path: Path) -> Callable[..., Path | None]:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "weights").write_text("1 2 3")

    def found(*settings: str, environment: Any = None, device: str = "cpu") -> Path | None:
        config = small_config(f"output_dir={tmp_path}/runs/x", *settings)
        environment = environment or environment_factory(config)
        kept = kept_evaluation(config, environment, base=tmp_path / "base", device=device)
        return kept and kept.path

    return found


def test_only_what_comes_after_the_first_step_shares_an_evaluation(place: Callable[..., Path | None], tmp_path: Path):
    first = place()
    assert first is not None
    assert first.parent == tmp_path / "runs" / ".evaluations"
    for same in ("seed=3", "steps=77", f"output_dir={tmp_path}/runs/y", "policy.learning_rate=0.1"):
        assert place(same) == first, same
    for other in ("eval.tasks=17", "levels=4", "world_model.state_tokens=201", "rollout.max_turns=7"):
        assert place(other) != first, other
    assert place(device="cuda") != first
    (tmp_path / "base" / "weights").write_text("1 2 4")
    assert place() != first


def test_other_code_is_evaluated_again(place: Callable[..., Path | None], monkeypatch: pytest.MonkeyPatch):
    first = place()
    monkeypatch.setattr(module, "_code", lambda: "changed")
    assert place() != first


def test_an_environment_that_no_digest_covers_is_always_played(place: Callable[..., Path | None]):
    assert place(environment=partial(PhoneCalls, levels=[2])) is None
    assert place(environment=lambda: PhoneCalls(levels=[2])) is None
    assert place("init_from=runs/other") is None


def test_it_is_measured_once_and_again_if_the_file_is_damaged(tmp_path: Path):
    kept, count = KeptEvaluation(tmp_path / "kept" / "1.json"), []

    def measure() -> Any:
        count.append(1)
        return MEASURED

    assert kept.of(measure) == kept.of(measure) == MEASURED
    assert len(count) == 1
    for damage in ("", "[1, 2]", json.dumps([1, 2, 3]), "\xff"):
        kept.path.write_text(damage)
        assert kept.of(measure) == MEASURED
    assert len(count) == 5
