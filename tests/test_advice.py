"""Advice: made-up runs with one problem each, and healthy runs without a finding."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lfo.cli import main
from lfo.config import load_config, to_yaml
from lfo.runs.advice import MIN_STEPS, Trouble, advise
from lfo.runs.correlation import LOOKAHEAD, VAL
from lfo.runs.reading import read_run

DUAL = load_config(["preset=tiny"])
SHARED = load_config(["preset=tiny", "coupling=shared"])
DAPO = load_config(["preset=tiny", "algo=dapo"])
INTERNALISED = load_config(["preset=tiny", "algo=internalise"])
MEANING = "world_model_eval/semantic_accuracy"


def healthy(steps: int = 60) -> list[dict[str, Any]]:
    """A run as dual-LoRA shows it on level 2: everything moves."""
    rows = [{"step": 0, "tasks_seen": 0, VAL: 0.0, MEANING: 0.0}]
    for step in range(1, steps + 1):
        done = step / steps
        rows.append(
            {
                "step": step,
                "tasks_seen": 8 * step,
                "success": 0.4 * done,
                "stops": {"done": 64},
                "policy_loss": 0.1 + 0.1 * done + 0.01 * (step % 3),
                "world_model_loss": 0.4 - 0.3 * done + 0.01 * (step % 2),
                "world_model_accuracy": 0.87 + 0.1 * done,
                "world_model_weight": 1.0,
                "entropy": 0.1,
                "gradient_norm/policy": 0.2,
                "gradient_norm/world_model": 0.4,
                "groups_kept": 6,
                "groups_all_failed": 2,
                "groups_all_succeeded": 0,
            }
        )
        if step % 10 == 0:
            rows[-1] |= {VAL: 0.6 * done, MEANING: 0.6 * done}
    return rows


def changed(evaluated: dict[str, Any] | None = None, /, **columns: Any) -> list[dict[str, Any]]:
    """A healthy run with some columns replaced: a value, or a function of the share of the run that is done."""
    rows = healthy()
    for row in rows:
        for key, value in {key.replace("__", "/"): value for key, value in columns.items()}.items():
            if key in row:
                row[key] = value(row["step"] / 60) if callable(value) else value
        if VAL in row:
            row |= {k: v(row["step"] / 60) if callable(v) else v for k, v in (evaluated or {}).items()}
    return rows


def rising(done: float) -> float:
    """Success that is low and rises a little."""
    return 0.19 * done


def without(rows: list[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in keys} for row in rows]


def names(rows: list[dict[str, Any]], config: Any = DUAL) -> list[str]:
    return [trouble.name for trouble in advise(rows, config)]


def only(rows: list[dict[str, Any]], config: Any = DUAL) -> Trouble:
    (trouble,) = advise(rows, config)
    return trouble


@pytest.mark.parametrize("config", [DUAL, SHARED, DAPO], ids=["dual", "shared", "dapo"])
def test_a_healthy_run_has_no_trouble(config):
    assert advise(healthy(), config) == []


def test_nothing_is_said_of_a_run_that_is_too_short_or_empty():
    assert advise([], DUAL) == []
    bad = changed(groups_kept=0, groups_all_failed=8)
    assert advise(bad[:MIN_STEPS], DUAL) == []
    assert names(bad[: MIN_STEPS + 1]) == ["nothing to learn from"]


# Drafts


def test_a_policy_that_imagines_nothing_is_told_so():
    rows = changed({"eval/val/drafts": 0.01, VAL: 0.1})
    trouble = only(rows)
    assert trouble.name == "imagines nothing"
    assert trouble.figure == "rollouts that look ahead imagine 0.01 calls each, at 10% success"
    assert trouble.knob == ("the policy calls no tool that may be imagined; check world_model.predict")
    assert names(changed({"eval/val/drafts": 0.2, VAL: rising})) == [], "one rollout in five does"
    assert names(changed({"eval/val/drafts": 0.0, VAL: 0.9})) == [], "and a policy that succeeds need not"


def test_only_a_policy_that_proposes_what_to_imagine_can_fail_to():
    assert names(changed({"eval/val/drafts": 0.0, VAL: rising}), load_config(["preset=tiny", "lookahead=off"])) == []


def test_where_nothing_was_evaluated_lately_training_tells():
    rows = without([{**row, "drafts": 0.0} for row in healthy()], VAL)
    assert names(rows) == ["imagines nothing"]
    assert names([{**row, "eval/val/drafts": 1.0} if VAL in row else row for row in changed(drafts=0.0)]) == []


def test_drafts_that_are_nearly_always_taken_back_change_nothing():
    trouble = only(changed({"eval/val/drafts": 1.5, "eval/val/drafts_kept": 0.02, VAL: 0.1}))
    assert trouble.name == "takes back what it imagines"
    assert trouble.figure.startswith("of 1.5 calls that a rollout imagines 2% are kept, at 10% success")
    assert "world_model.predict" in trouble.knob
    assert names(changed({"eval/val/drafts": 1.5, "eval/val/drafts_kept": 0.3, VAL: rising})) == []
    assert names(changed({"eval/val/drafts": 1.5, "eval/val/drafts_kept": 0.02, VAL: 0.8})) == []


def test_a_poor_world_model_explains_why_drafts_are_taken_back():
    rows = changed({"eval/val/drafts": 1.5, "eval/val/drafts_kept": 0.0, VAL: 0.1, MEANING: 0.0}, world_model_loss=0.4)
    assert names(rows) == ["world model not learning"]


# Nothing to learn from


def test_groups_that_all_fail_teach_nothing():
    trouble = only(changed({VAL: 0.02}, groups_kept=0, groups_all_failed=8), DAPO)
    assert trouble.name == "nothing to learn from"
    assert (
        trouble.figure == "in 100% of the last 160 groups every rollout failed, so the policy learned from 0% of them"
    )
    assert "algo=dual-lora" in trouble.knob
    assert "algo=dual-lora" not in only(changed(groups_kept=0, groups_all_failed=8)).knob


def test_groups_that_failed_only_in_the_beginning_are_no_trouble():
    rows = changed(
        groups_kept=lambda done: 0 if done < 0.5 else 6, groups_all_failed=lambda done: 8 if done < 0.5 else 2
    )
    assert names(rows) == []


def test_groups_that_all_succeed_are_no_trouble_once_val_is_good():
    easy = {"groups_kept": 0, "groups_all_failed": 0, "groups_all_succeeded": 8}
    assert names(changed({VAL: 0.9}, **easy)) == []
    assert "harder levels" in only(changed({VAL: 0.3}, **easy)).knob


def test_a_world_model_that_learns_alone_needs_no_groups():
    config = load_config(["preset=tiny", "policy.frozen=true"])
    assert names(changed({VAL: rising}, groups_kept=0, groups_all_failed=8), config) == []


# Entropy


def test_a_policy_that_is_certain_and_wrong_has_collapsed():
    trouble = only(changed({VAL: 0.19}, entropy=lambda done: 0.12 if done < 0.4 else 0.004), DAPO)
    assert trouble.name == "entropy collapse"
    assert trouble.figure.startswith("entropy went from 0.120 to 0.004 at 19% success")
    assert "policy.learning_rate" in trouble.knob


def test_a_policy_that_is_certain_and_right_has_not():
    assert names(changed({VAL: 0.85}, entropy=0.004)) == []
    assert names(changed({VAL: rising}, entropy=0.05)) == []


def test_a_policy_that_is_to_act_alone_is_judged_alone():
    trouble = only(changed({VAL: 0.85, BLIND: 0.19}, entropy=0.004), INTERNALISED)
    assert trouble.name == "entropy collapse"
    assert "at 19% success" in trouble.figure
    assert names(changed({VAL: 0.19, BLIND: 0.85}, entropy=0.004), INTERNALISED) == []


# World model


def test_a_world_model_whose_loss_does_not_fall_and_that_understands_nothing_does_not_learn():
    rows = changed({MEANING: 0.02}, world_model_loss=lambda done: 0.4 + 0.12 * done)
    trouble = only(rows)
    assert trouble.name == "world model not learning"
    assert trouble.figure == "its loss went from 0.421 to 0.501, and it understands 2% of the replies"
    assert "world_model.learning_rate" in trouble.knob


def test_it_is_judged_by_tokens_where_nobody_measured_meaning():
    stuck = without(changed(world_model_loss=0.4, world_model_accuracy=0.85), MEANING)
    assert only(stuck).figure.endswith("is right in 85% of the trained tokens, by weight")
    assert names(without(changed(world_model_loss=0.1, world_model_accuracy=0.97), MEANING)) == []


def test_a_flat_loss_of_a_world_model_that_understands_is_no_trouble():
    assert names(changed({MEANING: 0.9}, world_model_loss=0.05)) == []
    assert names(changed({MEANING: 0.02})) == []  # the loss still falls


def test_what_a_shuffled_look_ahead_said_is_not_held_against_the_world_model():
    config = load_config(["preset=tiny", "lookahead_source=shuffled"])
    rows = without(
        changed({"eval/val/lookahead_accuracy": 0.0}, world_model_loss=0.1, world_model_accuracy=0.97), MEANING
    )
    assert names(rows, config) == []
    assert names(rows, DUAL) == ["world model not learning"]


def test_an_untrained_world_model_that_speaks_is_told():
    rows = without(changed(world_model_weight=0.0), "world_model_loss", "world_model_accuracy")
    for setting in ("world_model.weight=0", "world_model.predict=none"):
        assert setting in only(rows, load_config(["preset=tiny", setting])).figure
    assert names(rows, load_config(["preset=tiny", "world_model.weight=0", "lookahead=false"])) == []
    truth = load_config(["preset=tiny", "world_model.weight=0", "lookahead_source=truth"])
    assert names(rows, truth) == []


# Weight


def test_a_weight_that_pushes_the_policy_out_is_too_high_where_the_losses_meet():
    fell = {VAL: lambda done: 0.5 if 0.3 < done < 0.6 else 0.2}
    trouble = only(changed(fell), SHARED)
    assert trouble.name == "weight too high"
    assert trouble.figure == (
        "with weight 1 the world model is right in 95% of the trained tokens, by weight, while success on val is 20% "
        "(best 50%)"
    )
    assert "world_model.weight" in trouble.knob
    assert names(changed(fell), DUAL) == ["success lost"]  # separate adapters: the weight never reaches the policy
    assert names(changed(fell, world_model_weight=0.05), SHARED) == ["success lost"]
    assert names(changed(fell, world_model_accuracy=0.5), SHARED) == ["success lost"]


def test_a_high_weight_beside_a_policy_that_gains_is_no_trouble():
    assert names(changed({VAL: lambda done: 0.4 * done}), SHARED) == []
    assert names(changed({VAL: 0.8}), SHARED) == []


# Flat losses


def test_losses_that_do_not_move_want_a_higher_rate():
    config = load_config(["preset=documents"])
    rows = changed({VAL: 0.0, MEANING: 0.0}, world_model_loss=0.44, policy_loss=0.01)
    trouble = only(rows, config)
    assert trouble.name == "both losses flat"
    assert "at learning rates 1e-06 and 1e-06" in trouble.figure
    assert "policy.learning_rate" in trouble.knob
    assert "group_size=64" in only(rows, DUAL).knob, "its rates are not low"


def test_noise_around_a_level_is_flat_and_a_trend_in_either_loss_is_not():
    still = {VAL: 0.0, MEANING: 0.0}
    noise = changed(still, world_model_loss=lambda done: 0.4 + 0.1 * ((int(done * 60) * 7) % 5 - 2), policy_loss=0.0)
    assert names(noise) == ["both losses flat"]
    assert names(changed(still, policy_loss=0.0)) == ["val never rises"]
    assert names(changed(still, world_model_loss=0.4)) == ["world model not learning"]


def test_flat_losses_of_a_run_that_gains_are_no_trouble():
    assert names(changed({VAL: lambda done: 0.5 * done, MEANING: 0.5}, world_model_loss=0.1, policy_loss=0.1)) == []


# Look-ahead that hinders

BLIND = f"{VAL}_blind"


def test_a_policy_that_is_better_without_look_ahead_is_reported():
    trouble = only(changed({VAL: lambda done: 0.6 * done, BLIND: lambda done: 0.9 * done}))
    assert trouble.name == "look-ahead hinders"
    assert "is 50% with look-ahead and 75% without" in trouble.figure  # at 4/6, 5/6 and 6/6 of the run


def test_look_ahead_that_helps_once_or_hardly_hinders_is_no_trouble():
    assert names(changed({VAL: lambda done: 0.6 * done, BLIND: lambda done: 0.6 * done + 0.04})) == []
    assert names(changed({VAL: lambda done: 0.6 * done, BLIND: lambda done: 0.9 * done if done < 1 else 0.5})) == []
    assert names(changed({VAL: lambda done: 0.6 * done})) == [], "nothing was evaluated without it"


# Look-ahead that changes nothing, and success that never rises


def test_a_policy_that_is_as_good_without_look_ahead_is_told_that_it_changes_nothing():
    equal = {VAL: lambda done: 0.3 * done, BLIND: lambda done: 0.3 * done + 0.01}
    trouble = only(changed(equal))
    assert trouble.name == "look-ahead changes nothing"
    assert "is 25% with look-ahead and 26% without" in trouble.figure
    assert "lfo check-env --run RUN" in trouble.knob
    assert names(changed(equal | {BLIND: lambda done: 0.3 * done if done < 1 else 0.2})) == [], "it helped once"
    assert names(changed({VAL: lambda done: 0.9 * done, BLIND: lambda done: 0.9 * done})) == [], "it is good enough"
    assert names(changed(equal), DAPO) == names(changed(equal), INTERNALISED) == []


def test_what_is_taken_back_explains_that_look_ahead_changes_nothing():
    equal = {VAL: lambda done: 0.3 * done, BLIND: lambda done: 0.3 * done}
    assert names(changed(equal | {"eval/val/drafts": 1.5, "eval/val/drafts_kept": 0.02})) == [
        "takes back what it imagines"
    ]


@pytest.mark.parametrize("config", [DUAL, DAPO], ids=["dual", "dapo"])
def test_success_that_never_rises_above_its_start_is_told(config):
    trouble = only(changed({VAL: lambda done: 0.2 if done == 0 else 0.21}), config)
    assert trouble.name == "val never rises"
    assert trouble.figure == "success on val began at 20% and was at most 21% in 6 evaluations"
    assert names(changed({VAL: lambda done: 0.23 if done == 0.5 else 0.2}), config) == []
    assert names(changed({VAL: 0.8}), config) == []
    rows = [row for row in changed({VAL: 0.0}) if VAL not in row or row["step"] in (0, 20, 40, 60)]
    assert names(rows, config) == ["val never rises"]
    assert names([row for row in rows if row["step"] < 60], config) == [], "two evaluations may be bad luck"


def test_what_is_known_to_keep_success_down_is_not_told_twice():
    assert names(changed({VAL: 0.0}, groups_kept=0, groups_all_failed=8)) == ["nothing to learn from"]


# Sampling


def test_sampled_rollouts_that_fail_where_greedy_ones_succeed_want_a_lower_temperature():
    rows = [{**row, "success_sighted": 0.05} if row["step"] else row for row in healthy()]
    trouble = only(rows, load_config(["preset=tiny", "rollout.temperature=1"]))
    assert trouble.name == "sampled calls break"
    assert trouble.figure == (
        "greedy rollouts with look-ahead succeed in 50% of val, those of training, sampled at temperature 1, in 5%"
    )
    assert trouble.knob.startswith("lower rollout.temperature, as to 0.5;")
    assert names([{**row, "success_sighted": 0.3} if row["step"] else row for row in healthy()]) == []
    assert names(healthy()) == []


# The gate


def gate(**found: Any) -> dict[str, Any]:
    return {"helps": False, "verdict": "shown the true reply it succeeds in 1 of 64 tasks, alone in 1: no", **found}


def test_a_gate_that_failed_is_told_first_and_explains_the_rest():
    still = {VAL: 0.0, BLIND: 0.0, "eval/val/drafts": 1.5, "eval/val/drafts_kept": 0.0}
    rows = changed(still)
    assert [each.name for each in advise(rows, DUAL)] == ["takes back what it imagines"]
    (trouble,) = advise(rows, DUAL, gate())
    assert (trouble.name, trouble.figure) == ("gate failed", gate()["verdict"])
    assert advise(rows[:5], DUAL, gate()) == [trouble], "it was known before the first step"
    for helps in (True, None):
        assert advise(rows, DUAL, gate(helps=helps)) == advise(rows, DUAL)
    assert advise(healthy(), DAPO, gate()) == [], "plain DAPO looks at nothing"
    assert advise(changed({VAL: 0.8}), DUAL, gate()) == []


# The runs that are kept

KEPT = sorted(path.parent for path in (Path(__file__).parents[1] / "research" / "results").rglob("config.yaml"))


def test_no_kept_run_that_learned_is_said_to_be_stuck():
    """Only what really stayed where it began is named."""
    stuck = {"val never rises": 0, "look-ahead changes nothing": 0, "sampled calls break": 0}
    for folder in KEPT:
        run = read_run(folder)
        assert run.config is not None
        for trouble in advise(run.rows, run.config):
            if trouble.name in stuck:
                stuck[trouble.name] += 1
                success = [row[VAL] for row in run.rows if isinstance(row.get(VAL), int | float)]
                assert "shuffled" in folder.name or success[-1] - success[0] < 0.05, folder
    assert stuck["val never rises"] > 10, "secretary, and controls"
    assert stuck["sampled calls break"] == 0


# Success that was there and is gone


def fallen(done: float) -> float:
    return 0.75 if done == 0.5 else 0.2 if done > 0.5 else done


def test_success_that_is_gone_while_look_ahead_is_right_is_the_policys_doing():
    trouble = only(changed({VAL: fallen, LOOKAHEAD: 0.9}))
    assert trouble.name == "success lost"
    assert trouble.figure == (
        "success on val was 75% and is 20% over the last 3 evaluations, while look-ahead is right in 90% of cases"
    )
    assert "policy.learning_rate" in trouble.knob
    assert "policy.learning_rate" in only(changed({VAL: fallen})).knob  # nobody asked the world model


def test_success_that_went_with_look_ahead_is_the_world_models_doing():
    both_fell = {VAL: fallen, LOOKAHEAD: lambda done: 0.8 if done <= 0.5 else 0.3}
    trouble = only(changed(both_fell))
    assert trouble.figure.endswith("look-ahead was right in 80% of cases and is in 30%")
    assert trouble.knob.startswith("lower world_model.learning_rate;")
    # A memory has no learning rate, and one adapter for both has the policy's.
    memory = load_config(["preset=tiny", "lookahead_source=memory", "world_model.weight=0"])
    assert "world_model.learning_rate" not in only(changed(both_fell), memory).knob
    assert "world_model.learning_rate" not in only(changed(both_fell, world_model_weight=0.05), SHARED).knob


def test_one_bad_evaluation_and_a_small_loss_are_no_trouble():
    assert names(changed({VAL: lambda done: 0.75 if done == 0.5 else 0.2 if done == 1 else 0.6})) == []
    assert names(changed({VAL: lambda done: 0.6 if done == 0.5 else 0.42})) == []
    assert names(changed({VAL: lambda done: float("nan") if done > 0.5 else 0.75})) == []


def test_an_evaluation_without_a_number_does_not_count():
    gap = {VAL: lambda done: 0.75 if done < 0.2 else float("nan") if 0.8 < done < 0.9 else 0.2}
    assert only(changed(gap)).figure.startswith("success on val was 75% and is 20% over the last 3 evaluations")


def test_what_the_untrained_policy_could_has_no_checkpoint():
    assert names(changed({VAL: lambda done: 0.75 if done == 0 else 0.2})) == ["val never rises"]


@pytest.mark.parametrize("steps", [20, 30, 40, 50, 60])
def test_success_that_rises_fast_is_not_lost_wherever_one_looks(steps: int):
    rows = changed({VAL: lambda done: min(0.85, 1.7 * done)})
    assert names([row for row in rows if row["step"] <= steps]) == []


def test_few_tasks_tell_little():
    rows = changed({VAL: lambda done: 0.67 if done == 0.5 else 0.33})
    assert names(rows) == ["success lost"]
    three = [row | {"eval/val/stops": {"done": 3}} if VAL in row else row for row in rows]
    assert names(three) == []


def test_a_world_model_that_learns_alone_loses_nothing():
    assert names(changed({VAL: fallen}), load_config(["preset=tiny", "policy.frozen=true"])) == []


def test_a_gradient_that_is_small_beside_the_other_is_not_blamed_for_what_was_lost():
    rows = changed({VAL: fallen}, gradient_norm__policy=0.01)
    assert names(rows) == ["success lost"]
    assert names(changed({VAL: rising}, gradient_norm__policy=0.01)) == ["gradient imbalance"]


# Gradients


@pytest.mark.parametrize(
    ("policy", "world", "figure", "knob"),
    [
        (0.01, 0.5, "the gradient of the world model was 50 times the policy's", "policy.learning_rate"),
        (0.5, 0.01, "the gradient of the policy was 50 times the world model's", "world_model.learning_rate"),
    ],
)
def test_one_gradient_far_above_the_other_is_told(policy, world, figure, knob):
    trouble = only(changed(gradient_norm__policy=policy, gradient_norm__world_model=world))
    assert trouble.name == "gradient imbalance"
    assert trouble.figure == f"{figure}, in the median of 20 steps"
    assert knob in trouble.knob


def test_gradients_within_ten_times_and_those_of_steps_without_a_policy_update_are_no_trouble():
    assert names(changed(gradient_norm__policy=0.05)) == []  # 1:8
    assert names(changed(gradient_norm__policy=0.0)) == []  # no policy update at all is another trouble
    assert names(changed(gradient_norm__policy=lambda done: 0.001 if done < 0.6 else 0.2)) == []
    assert names(changed({VAL: 0.9}, gradient_norm__policy=0.001)) == []


def test_an_imbalance_that_comes_from_having_nothing_to_learn_is_not_told_twice():
    assert names(changed(gradient_norm__policy=0.001, groups_kept=0, groups_all_failed=8)) == ["nothing to learn from"]


# Environment


def test_rollouts_that_the_environment_broke_off_are_counted():
    trouble = only(changed(stops={"done": 48, "environment_error": 12, "environment_timeout": 4}))
    assert trouble.name == "environment errors"
    assert trouble.figure == "the environment failed in 320 of the last 1280 rollouts (25%)"
    assert names(changed(stops={"done": 62, "environment_error": 2})) == []
    assert names(changed(stops={"max_turns": 64})) == []


def test_turns_without_an_end_are_counted():
    trouble = only(changed(stops={"done": 40, "turn_overflow": 24}))
    assert trouble.name == "endless turns"
    assert trouble.figure == "480 of the last 1280 rollouts (38%) ended in a turn of 160 tokens without an end"
    assert "rollout.max_turn_tokens" in trouble.knob
    assert "policy.overlong_buffer" in trouble.knob
    assert names(changed(stops={"done": 52, "turn_overflow": 12})) == []
    assert names(changed({VAL: 0.8}, stops={"turn_overflow": 64})) == [], "tasks are solved before"
    assert names(changed({VAL: fallen}, stops={"turn_overflow": 64})) == ["endless turns"], "it explains the loss"


# The command


@pytest.fixture
def lfo(monkeypatch, capsys):
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lfo", "advise", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return run


def written(folder: Path, rows: list[dict[str, Any]], config: Any = DUAL) -> str:
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_the_command_says_what_it_sees(lfo, tmp_path: Path):
    config = load_config(["preset=tiny", "steps=60"])
    assert lfo(written(tmp_path / "good", healthy(), config)) == (0, "No known problem in 60 steps.\n", "")
    run = written(tmp_path / "bad", changed(groups_kept=0, groups_all_failed=8))
    code, out, _ = lfo(run)
    assert code == 0
    assert out.splitlines()[0] == f"{run} has not ended: step 60 of 100."
    assert out.splitlines()[1].startswith("nothing to learn from: in 100% of the last 160 groups")
    assert out.splitlines()[2].startswith("  -> ")
    code, out, _ = lfo(run, "--json")
    answer = json.loads(out)
    assert (code, answer["steps"], answer["enough"]) == (0, 60, True)
    assert [list(trouble) for trouble in answer["troubles"]] == [["name", "figure", "knob"]]
    assert "Too early to tell: 9 steps" in lfo(written(tmp_path / "young", healthy()[:10]))[1]


def test_the_command_has_words_for_a_folder_that_is_no_run(lfo, tmp_path: Path):
    code, out, err = lfo(str(tmp_path))
    assert (code, out, err) == (2, "", f"lfo: {tmp_path} is not a run folder: it has no config.yaml\n")
