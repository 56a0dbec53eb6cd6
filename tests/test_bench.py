"""The benches: all keys, correct counts, the same work for every variant."""

import json
import sys

import pytest
import torch

from benchmarks import against_vllm, rollout, speed
from benchmarks import step as bench
from benchmarks.memory import by_phase
from lfo.cli import main
from lfo.loading import load_base
from lfo.model.adapters import DualAdapterModel
from lfo.tools.plan import SHAPES, Work, training

SMALL = ("rollout.prompts=2", "rollout.group_size=4", "rollout.mini_batch_prompts=1")


@pytest.fixture(scope="module")
def step() -> dict:
    settings = [*SMALL, "world_model.examples_per_mini_batch=2"]
    return bench.bench_step(settings, repeats=1, replayed_batches=1)


def test_a_step_is_the_sum_of_its_phases(step):
    totals = {name: sum(phases.values()) for name, phases in step["phases"].items()}
    assert set(totals) == {"dapo", "dual", "inline", "lookahead"}
    assert all(set(phases) == {"rollout", "examples", "update"} for phases in step["phases"].values())
    for name in ("dual", "inline", "lookahead"):
        assert step[f"{name}_over_dapo"] == pytest.approx(totals[name] / totals["dapo"])
    assert step["phases"]["dual"]["rollout"] == step["phases"]["dapo"]["rollout"]
    for name, total in totals.items():
        assert step["floor_fraction"][name] == pytest.approx(sum(step["floors"][name].values()) / total)
        assert 0 < step["floor_fraction"][name] < 1
        assert step["peak_memory"][name] > 2**20


def test_counts_show_the_work_of_each_variant(step):
    tokens = step["tokens"]
    assert all(each["rollouts"] == each["policy_rows"] == 8 for each in tokens.values())
    assert tokens["dapo"]["policy_row_tokens"] == tokens["dual"]["policy_row_tokens"]
    assert tokens["dapo"]["policy_loss_tokens"] == tokens["inline"]["policy_loss_tokens"]
    # State form: rows of their own, two mini-batches with the cap of two each. Inline: no row more.
    assert [tokens[name]["world_model_rows"] for name in ("dapo", "dual", "inline")] == [0, 4, 0]
    assert tokens["dapo"]["world_model_loss_tokens"] == 0
    assert 0 < tokens["dapo"]["distinct_loss_tokens"] < tokens["dapo"]["policy_loss_tokens"]
    assert (
        tokens["dapo"]["distinct_loss_tokens"] < tokens["dapo"]["distinct_tokens"] < tokens["dapo"]["policy_row_tokens"]
    )
    assert tokens["dual"]["world_model_loss_tokens"] > 0
    assert tokens["inline"]["world_model_loss_tokens"] > 0


def test_repetitions_leave_the_adapters_as_they_were():
    variant = bench._variant([*SMALL, *bench.VARIANTS["dual"]])
    parameters = [weight for weights in variant.trainer.backend.learner.parameters.values() for weight in weights]
    before = [weight.detach().clone() for weight in parameters]
    bench._train(variant)
    assert all(bool((one == other).all()) for one, other in zip(parameters, before, strict=True))
    moments = [state["exp_avg"] for state in variant.trainer.backend.learner.optimizer.state.values()]
    assert any(bool(moment.any()) for moment in moments), "the update did not run"


def test_rollout_bench_counts_the_same_kind_of_tokens_on_both_sides(monkeypatch, capsys):
    result = rollout.bench_rollout(tasks=2, group_size=2, max_new_tokens=24, repeats=1)
    assert result["batch"] == 4
    assert result["speedup"] == pytest.approx(result["tokens_per_second"] / result["generate_tokens_per_second"])
    assert result["speedup_fixed_length"] > 0
    assert result["floor_fraction"] == pytest.approx(result["floor_step_seconds"] / result["step_seconds"])
    assert result["floor_tokens_per_second"] == pytest.approx(4 / result["floor_step_seconds"])

    monkeypatch.setattr(rollout, "bench_rollout", lambda **settings: result)
    monkeypatch.setattr(sys, "argv", ["lfo", "bench", "rollout", "--json"])
    with pytest.raises(SystemExit):
        main()
    assert {"tokens_per_second", "generate_tokens_per_second", "speedup"} <= set(json.loads(capsys.readouterr().out))


def test_floors_count_what_must_be_read_and_multiplied():
    model = DualAdapterModel.build(load_base("tiny", torch.device("cpu")), coupling="separate", seed=0)
    layer = 128 * (4 + 2 + 2) * 32 + 4 * 32 * 128 + 3 * 128 * 384
    assert speed.linear_parameters(model) == 4 * layer
    # Keys and values of 4 layers, 2 heads of 32; fp32.
    assert speed.bytes_of_a_step(model, 10) == 4 * (4 * layer + 1216 * 128 + 10 * 2 * 4 * 2 * 32)
    assert speed.training_operations(model, tokens=3, predictions=1) == 4 * (4 * layer * 3 + 1216 * 128)
    assert speed.copy_bandwidth(model.device, repeats=1) > 1e8


def test_tokens_with_the_same_past_count_once():
    rows = [("policy", [7, 8, 9], [0, 1, 0]), ("policy", [7, 8, 5], [0, 1, 1]), ("world_model", [7], [1])]
    assert bench.distinct(rows) == (5, 3)
    assert bench.distinct([]) == (0, 0)


def test_against_vllm_measures_every_speaker_on_the_same_prompts():
    """vLLM itself needs a GPU; our side of the comparison is measured here as there."""
    model = DualAdapterModel.build(load_base("tiny", torch.device("cpu")), coupling="separate", seed=0)
    prompts = against_vllm._prompts(1216, 9)
    assert [len(prompts), len(prompts[0]), len(set(map(tuple, prompts)))] == [9, against_vllm.PROMPT, 2]
    speak = against_vllm.sampler_of(model, against_vllm.PROMPT + against_vllm.LONG + 1)
    calls = []

    def noting(given, tokens: int) -> int:
        calls.append((given, tokens))
        return len(given) * tokens

    found = against_vllm._measured({"lfo": speak, "vllm": noting}, prompts, 1, model.device)
    assert found["ratio"] == pytest.approx(found["lfo_tokens_per_second"] / found["vllm_tokens_per_second"])
    assert [tokens for _, tokens in calls] == [against_vllm.SHORT, against_vllm.LONG] * 2
    assert all(given is prompts for given, _ in calls)
    with pytest.raises(AssertionError, match="said 1 tokens"):
        against_vllm._measured({"lfo": lambda given, tokens: 1}, prompts, 1, model.device)


def test_without_vllm_one_sentence_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(against_vllm.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["lfo", "bench", "rollout", "--against", "vllm"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "pip install learn-from-observation[vllm]" in capsys.readouterr().err


def test_phases_of_memory_hold_all_that_is_planned():
    planned = training(SHAPES["qwen3-4b"], Work(), gpus=1)
    assert sum(by_phase(planned).values()) == sum(planned.values())
    assert 3.9e9 < SHAPES["qwen3-4b"].parameters < 4.1e9
