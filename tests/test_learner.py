"""The update: which loss reaches which adapter, bit for bit, on recorded rollouts of the embedded base."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.errors import WorkError
from lfo.model import learner as learner_module
from lfo.model.adapters import DualAdapterModel
from lfo.model.learner import Learner, collate, micro_batches
from lfo.objectives.advantages import group_advantages
from lfo.protocol.world_model import WorldModelCodec
from lfo.rows.samples import policy_sample, world_model_sample
from lfo.types import NOTHING, Observed, RolloutGroup, TrainingSample
from small_runs import base, fussy_calls, gradient, small_config, small_model, small_trainer, tokenizer, weights

PHONE = frozenset(PhoneCalls.predicted_tools)
COUPLINGS = ("separate", "shared")


@pytest.fixture(scope="module")
def groups() -> list[RolloutGroup]:
    """Five groups that the untrained policy played: of each, one rollout that did well and one that did not."""
    trainer = small_trainer("lookahead=false", environment=fussy_calls)
    kept = [group for step in range(4) for group in trainer.collect(trainer.plan(step))[1].values()]
    assert len(kept) >= 5
    pairs = []
    for group in kept[:5]:
        worst, *_, best = sorted(group.rollouts, key=lambda rollout: rollout.reward)
        pairs.append(RolloutGroup(task_id=group.task_id, rollouts=(worst, best)))
    return pairs


def policy_rows(model: DualAdapterModel, group: RolloutGroup, *, inline: bool = False) -> list[TrainingSample]:
    rows = [
        policy_sample(
            rollout, advantage, adapters=model.policy_adapters, observed=Observed(tools=PHONE) if inline else NOTHING
        )
        for rollout, advantage in zip(group.rollouts, group_advantages(group.rewards), strict=True)
    ]
    return [row for row in rows if row is not None]


def world_rows(model: DualAdapterModel, group: RolloutGroup, *, inline: bool = False) -> list[TrainingSample]:
    if inline:
        rows = [
            policy_sample(r, None, adapters=model.policy_adapters, observed=Observed(tools=PHONE))
            for r in group.rollouts
        ]
        return [row for row in rows if row is not None]
    codec = WorldModelCodec(tokenizer())
    examples = {each.key: each for r in group.rollouts for each in codec.examples_of(r, predict=PHONE)}
    return [world_model_sample(each, adapters=model.world_model_adapters) for each in list(examples.values())[:2]]


def fresh(coupling: str, *settings: str) -> Learner:
    """A learner on fresh adapters, B zero, as a run begins."""
    config = small_config("lookahead=false", f"coupling={coupling}", *settings)
    dual = config.algo == "dual-lora"
    return Learner(DualAdapterModel.build(base(), coupling=config.coupling, seed=0, with_world_model=dual), config)


def used(coupling: str, *settings: str) -> Learner:
    """A learner on adapters with random weights, as in the middle of a run."""
    return Learner(small_model(coupling), small_config("lookahead=false", f"coupling={coupling}", *settings))


def train(learner: Learner, groups: list[RolloutGroup], weight: float, *, inline: bool = False) -> Learner:
    for group in groups:
        rows = policy_rows(learner.model, group, inline=inline)
        if not inline and learner.model.world_model_adapters:
            rows += world_rows(learner.model, group)
        learner.update(rows, world_model_weight=weight, rate_factor=1.0)
    return learner


@pytest.fixture(scope="module")
def trained(groups) -> Callable[[str, float], DualAdapterModel]:
    """The model after five updates with this coupling and weight; computed once."""
    return cache(lambda coupling, weight: train(fresh(coupling), groups, weight).model)


@pytest.fixture
def unclipped(monkeypatch) -> None:
    """Gradients as they are."""
    monkeypatch.setattr(learner_module, "MAX_NORM", 1e9)


# --- the negative control --------------------------------------------------------------------------------------


def test_separate_adapters_do_not_reach_the_policy_whatever_the_weight(trained):
    begin = fresh("separate").model
    without = weights(trained("separate", 0.0), "policy")
    assert not torch.equal(weights(begin, "policy"), without)
    for weight in (0.5, 2.0):
        model = trained("separate", weight)
        assert torch.equal(weights(model, "policy"), without)
        assert not torch.equal(weights(model, "world_model"), weights(begin, "world_model"))


def test_a_shared_adapter_does(trained):
    assert not torch.equal(*(weights(trained("shared", weight), "policy") for weight in (0.0, 0.5)))


@pytest.mark.parametrize("coupling", ["separate", "shared"])
def test_weight_zero_is_plain_dapo_bit_for_bit(groups, trained, coupling: str):
    plain = train(fresh(coupling, "algo=dapo"), groups, 0.0)
    assert plain.model.adapter_names == ("policy",)
    assert torch.equal(weights(plain.model, "policy"), weights(trained(coupling, 0.0), "policy"))


@pytest.mark.parametrize(
    ("coupling", "inline", "reaches"),
    [
        ("separate", False, False),
        ("shared", False, True),
        ("shared", True, True),
    ],
)
def test_the_world_model_loss_reaches_the_policy_adapter_only_where_they_meet(groups, coupling, inline, reaches):
    learner = used(coupling)
    before = weights(learner.model, "policy").clone()
    watched = learner.update(
        world_rows(learner.model, groups[0], inline=inline), world_model_weight=1.0, rate_factor=1.0
    )
    assert watched["world_model_loss"] > 0
    assert "policy_loss" not in watched
    reached = gradient(learner.model, "policy")
    assert (reached is not None and bool(reached.abs().max() > 0)) == reaches
    assert reaches or reached is None
    assert torch.equal(weights(learner.model, "policy"), before) != reaches
    if coupling != "shared":
        own = gradient(learner.model, "world_model")
        assert own is not None
        assert own.abs().max() > 0


def test_the_policy_loss_spares_the_world_model(groups):
    learner = used("separate")
    before = weights(learner.model, "world_model").clone()
    learner.update(policy_rows(learner.model, groups[0]), world_model_weight=0.0, rate_factor=1.0)
    assert gradient(learner.model, "world_model") is None
    assert torch.equal(weights(learner.model, "world_model"), before)
    policy = gradient(learner.model, "policy")
    assert policy is not None
    assert policy.abs().max() > 0


def gradients_of(learner: Learner, rows: list[TrainingSample], weight: float) -> dict[str, torch.Tensor | None]:
    learner.update(rows, world_model_weight=weight, rate_factor=0.0)
    found = {name: gradient(learner.model, name) for name in learner.model.adapter_names}
    return {name: None if grad is None else grad.clone() for name, grad in found.items()}


@pytest.mark.usefixtures("unclipped")
def test_inline_both_losses_add_up_on_the_one_adapter(groups):
    learner = used("shared")
    model = learner.model
    policy_only = gradients_of(learner, policy_rows(model, groups[0]), 0.5)["policy"]
    world_only = gradients_of(learner, world_rows(model, groups[0], inline=True), 0.5)["policy"]
    together = gradients_of(learner, policy_rows(model, groups[0], inline=True), 0.5)["policy"]
    torch.testing.assert_close(together, policy_only + world_only, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("unclipped")
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_both_losses_add_up_and_the_weight_multiplies_its_own(groups, coupling: str):
    learner = used(coupling)
    model = learner.model
    policy, world = policy_rows(model, groups[0]), world_rows(model, groups[0])
    alone = [gradients_of(learner, policy, 0.0), gradients_of(learner, world, 1.0)]
    together = gradients_of(learner, [*policy, *world], 0.3)
    for name in model.adapter_names:
        zero = torch.zeros_like(weights(model, name))
        first, second = (zero if each[name] is None else each[name] for each in alone)
        torch.testing.assert_close(together[name], first + 0.3 * second, rtol=1e-4, atol=1e-6)


def test_both_adapters_move(trained):
    begin, end = fresh("separate").model, trained("separate", 0.5)
    for name in ("policy", "world_model"):
        for before, after in zip(begin.adapter_parameters(name), end.adapter_parameters(name), strict=True):
            assert not torch.equal(before, after)


def test_an_adapter_that_did_not_train_has_no_gradient_norm(groups):
    """A 0 would count in a step's mean, as if the policy had hardly learned from the other mini-batches."""
    learner = used("separate")
    world = world_rows(learner.model, groups[0])
    both = learner.update(policy_rows(learner.model, groups[0]) + world, world_model_weight=1.0, rate_factor=1.0)
    alone = learner.update(world, world_model_weight=1.0, rate_factor=1.0)
    assert {"gradient_norm/policy", "gradient_norm/world_model"} <= set(both)
    assert "gradient_norm/policy" not in alone
    assert alone["gradient_norm/world_model"] > 0


def test_an_idle_adapter_stays_where_it_is_in_spite_of_its_momentum(groups):
    learner = train(used("separate"), groups[:2], 1.0)
    policy, world = (weights(learner.model, name).clone() for name in ("policy", "world_model"))
    learner.update(policy_rows(learner.model, groups[2]), world_model_weight=1.0, rate_factor=1.0)
    assert torch.equal(weights(learner.model, "world_model"), world)
    assert not torch.equal(weights(learner.model, "policy"), policy)
    policy = weights(learner.model, "policy").clone()
    learner.update(world_rows(learner.model, groups[2]), world_model_weight=1.0, rate_factor=1.0)
    assert torch.equal(weights(learner.model, "policy"), policy)
    assert not torch.equal(weights(learner.model, "world_model"), world)


# --- batching --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unclipped")
@pytest.mark.parametrize(("coupling", "inline"), [("separate", False), ("shared", False), ("shared", True)])
def test_the_size_of_micro_batches_does_not_change_the_gradient(groups, monkeypatch, coupling: str, inline: bool):
    learner = used(coupling, "rollout.temperature=1.4")
    model = learner.model
    # Some rows of one group, and of another only what was heard: rows of both losses, of either, of all lengths.
    rows = policy_rows(model, groups[0], inline=inline) + world_rows(model, groups[1], inline=inline)
    results = []
    for tokens in (1, 1_000_000):
        monkeypatch.setattr(learner_module, "micro_batches", partial(micro_batches, tokens=tokens))
        watched = learner.update(rows, world_model_weight=0.7, rate_factor=0.0)
        results.append((watched, {name: gradient(model, name) for name in model.adapter_names}))
    for watched, grads in results[1:]:
        assert watched == pytest.approx(results[0][0], rel=1e-3, abs=1e-6)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, results[0][1][name], rtol=2e-3, atol=1e-6)


def test_micro_batches_hold_every_row_once_and_keep_to_their_size(groups):
    model = small_model("separate")
    rows = policy_rows(model, groups[0]) + world_rows(model, groups[0]) + policy_rows(model, groups[1])
    batches = list(micro_batches(rows, torch.device("cpu"), tokens=900))
    assert sum(len(batch.tokens_BT) for batch in batches) == len(rows)
    assert sum(float(batch.weights_BT["policy"].sum()) for batch in batches) == sum(
        sum(row.policy_weights) for row in rows
    )
    for batch in batches:
        assert batch.tokens_BT.numel() <= 900 or len(batch.tokens_BT) == 1
        assert set(batch.adapters_of_rows) == {batch.adapters}
    assert {batch.adapters for batch in batches} == {("policy",), ("world_model",)}

    mixed = list(micro_batches(rows, torch.device("cpu"), tokens=900, mixed=True))
    assert sorted(length for batch in mixed for length in batch.tree.real_BT.sum(1)) == sorted(
        len(row.tokens) for row in rows
    )
    assert all(batch.tree.real_BT.sum() <= 900 or len(batch.tokens_BT) == 1 for batch in mixed)
    assert len(mixed) <= len(batches)


def test_padding_has_no_weight(groups):
    rows = policy_rows(small_model(), groups[0], inline=True)
    batch = collate(rows, torch.device("cpu"))
    for place, row in enumerate(rows):
        length = len(row.tokens)
        assert batch.tokens_BT[place, :length].tolist() == list(row.tokens)
        for stream in (batch.weights_BT["policy"], batch.weights_BT["world_model"], batch.advantages_BT):
            assert not stream[place, length:].any()


# --- what is watched -------------------------------------------------------------------------------------------


def test_at_the_first_update_the_ratio_is_one(groups):
    learner = fresh("separate")
    rows = [row for group in groups for row in policy_rows(learner.model, group)]
    watched = learner.update(rows, world_model_weight=0.0, rate_factor=1.0)
    assert watched["clip_fraction"] == 0.0
    assert watched["policy_kl"] < 1e-6
    expected = -sum(sum(row.advantages) for row in rows) / sum(sum(row.policy_weights) for row in rows)
    assert watched["policy_loss"] == pytest.approx(expected, abs=1e-4)
    assert 0 < watched["entropy"] < math.log(len(tokenizer()))


def test_rows_are_scored_at_the_temperature_they_were_sampled_with():
    trainer = small_trainer("lookahead=false", "rollout.temperature=3", environment=fussy_calls)
    group = trainer.collect(trainer.plan(0)).groups[0]

    def policy_kl(temperature: float) -> float:
        learner = fresh("separate", f"rollout.temperature={temperature}")
        rows = policy_rows(learner.model, group)
        return learner.update(rows, world_model_weight=0.0, rate_factor=0.0)["policy_kl"]

    assert policy_kl(3.0) < 1e-6
    assert policy_kl(1.0) > 1e-3


def test_the_world_model_loss_is_the_mean_over_its_tokens_whatever_the_policy_rows(groups):
    learner = used("separate")
    model = learner.model
    rows = world_rows(model, groups[0]) + world_rows(model, groups[1])
    total = count = hits = 0.0
    for row in rows:
        with torch.no_grad():
            logprobs = model.logits(torch.tensor([row.tokens]), row.adapters)[0].log_softmax(-1)
        for place, weight in enumerate(row.world_model_weights):
            if weight:
                total -= float(logprobs[place - 1, row.tokens[place]])
                hits += float(logprobs[place - 1].argmax() == row.tokens[place])
                count += 1
    losses = [score.loss / score.tokens for score in learner.reply_scores(rows)]
    watched = learner.update([*policy_rows(model, groups[2]), *rows], world_model_weight=2.0, rate_factor=0.0)
    assert watched["world_model_loss"] == pytest.approx(total / count, rel=1e-4)
    assert watched["world_model_accuracy"] == pytest.approx(hits / count)
    sizes = [sum(row.world_model_weights) for row in rows]
    assert sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / count == pytest.approx(
        total / count, rel=1e-4
    )


def test_replies_are_scored_in_order_however_they_are_batched(groups, monkeypatch):
    """Hits and losses of each row are those of that row alone, token by token."""
    learner = used("separate")
    model = learner.model
    rows = [row for group in groups[:3] for row in world_rows(model, group)]
    rows.sort(key=lambda row: len(row.tokens))  # the opposite of how they are batched
    assert len({len(row.tokens) for row in rows}) > 1
    learner.micro_batch_tokens = 2 * max(len(row.tokens) for row in rows)
    scored: list[list[TrainingSample]] = []

    def recorded(samples: list[TrainingSample], device: torch.device) -> object:
        scored.append(samples)
        return collate(samples, device)

    monkeypatch.setattr(learner_module, "collate", recorded)
    scores = learner.reply_scores(rows)
    assert all(len(batch) * len(batch[0].tokens) <= learner.micro_batch_tokens for batch in scored)
    assert len(scored[0]) == 2, "it fills a batch"
    for row, score in zip(rows, scores, strict=True):
        with torch.no_grad():
            logprobs_TV = model.logits(torch.tensor([row.tokens]), row.adapters)[0].log_softmax(-1)
        places = [place for place, weight in enumerate(row.world_model_weights) if weight]
        assert score.tokens == len(places)
        assert score.hits == sum(int(logprobs_TV[place - 1].argmax()) == row.tokens[place] for place in places)
        expected = -sum(float(logprobs_TV[place - 1, row.tokens[place]]) for place in places)
        assert score.loss == pytest.approx(expected, rel=1e-4)
    assert learner.reply_scores([]) == []


def test_learning_goes_the_right_way(groups):
    learner = used("separate")
    model = learner.model
    (best, *_) = sorted(policy_rows(model, groups[0]), key=lambda row: -max(row.advantages))
    rows = [best, *world_rows(model, groups[0])]
    watched = [learner.update(rows, world_model_weight=1.0, rate_factor=1.0) for _ in range(4)]
    assert watched[-1]["world_model_loss"] < watched[0]["world_model_loss"]
    assert watched[-1]["policy_loss"] < watched[0]["policy_loss"], "what did well becomes more likely"


def test_nothing_to_learn_from_moves_nothing(groups):
    learner = used("separate")
    before = weights(learner.model, "world_model").clone()
    assert learner.update([], world_model_weight=1.0, rate_factor=1.0) == {}
    assert learner.update(world_rows(learner.model, groups[0]), world_model_weight=0.0, rate_factor=1.0) == {}
    assert torch.equal(weights(learner.model, "world_model"), before)


def test_each_adapter_has_its_learning_rate(groups):
    slow, fast = fresh("separate"), fresh("separate", "world_model.learning_rate=1e-2")
    for learner in (slow, fast):
        train(learner, groups[:2], 1.0)
    assert torch.equal(weights(slow.model, "policy"), weights(fast.model, "policy"))
    begin = weights(fresh("separate").model, "world_model")
    moved = [(weights(learner.model, "world_model") - begin).norm() for learner in (slow, fast)]
    assert moved[1] > 3 * moved[0]


def test_lora_plus_moves_the_world_models_b_alone_by_as_much_more(groups, monkeypatch):
    """The first step of Adam is as large as the rate, wherever there is a gradient."""
    monkeypatch.setattr(learner_module, "WEIGHT_DECAY", 0.0)

    def steps(*more: str) -> dict[str, tuple[float, float]]:
        learner = used("separate", *more)
        before = {name: [each.detach().clone() for each in some] for name, some in learner.parameters.items()}
        train(learner, groups[:1], weight=1.0)
        moved = {
            name: [float((new.detach() - old).abs().max()) for new, old in zip(some, before[name], strict=True)]
            for name, some in learner.parameters.items()
        }
        return {name: (max(sizes[::2]), max(sizes[1::2])) for name, sizes in moved.items()}

    plain, plus = steps("world_model.lora_plus=1"), steps("world_model.lora_plus=4")
    assert plus["policy"] == plain["policy"]
    (plain_a, plain_b), (plus_a, plus_b) = plain["world_model"], plus["world_model"]
    assert plus_a == pytest.approx(plain_a, rel=0.01)
    assert plus_b == pytest.approx(4 * plain_b, rel=0.01)


class OneOptimizerPerAdapter:
    """AdamW for each adapter, behind the methods that a learner calls."""

    def __init__(self, learner: Learner) -> None:
        one = learner.optimizer
        options = {name: one.defaults[name] for name in ("lr", "betas", "weight_decay", "fused")}
        self.parts = [torch.optim.AdamW([group], **options) for group in one.param_groups]
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def zero_grad(self, *, set_to_none: bool) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        for part in self.parts:
            part.step()


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_two_optimizers_would_do_what_one_does(groups, coupling: str):
    """AdamW is elementwise and gradients are clipped per adapter, so there is no setting for two optimizers."""
    one, two = fresh(coupling), fresh(coupling)
    two.optimizer = OneOptimizerPerAdapter(two)  # type: ignore[assignment]
    for learner in (one, two):
        train(learner, groups[:2], 1.0)
    assert len(two.optimizer.parts) == len(two.model.adapter_names)  # type: ignore[attr-defined]
    for name in one.model.adapter_names:
        assert torch.equal(weights(one.model, name), weights(two.model, name))


# --- the optimizer ---------------------------------------------------------------------------------------------


def test_two_updates_are_those_of_adamw_by_hand(groups):
    """With betas 0.9 and 0.95, decay 0.1 and epsilon 1e-8, written out for each number of the adapter."""
    learner = used("separate", "policy.learning_rate=1e-2")
    model = learner.model
    wanted = weights(model, "policy").double()
    first = second = torch.zeros_like(wanted)
    for step, group in enumerate(groups[:2], start=1):
        learner.update(policy_rows(model, group), world_model_weight=0.0, rate_factor=0.5)
        grad = gradient(model, "policy").double()
        first, second = 0.9 * first + 0.1 * grad, 0.95 * second + 0.05 * grad**2
        ahead = (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
        wanted = wanted - 0.005 * (0.1 * wanted + ahead)
    torch.testing.assert_close(weights(model, "policy").double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("weight", "clipped"), [(1e-3, False), (1e3, True)])
def test_a_gradient_is_scaled_down_to_a_norm_of_one_and_a_smaller_one_stays(groups, weight: float, clipped: bool):
    learner = used("separate")
    rows = world_rows(learner.model, groups[0])
    told = learner.update(rows, world_model_weight=weight, rate_factor=1.0)["gradient_norm/world_model"]
    assert (told > 1) == clipped
    norm = float(gradient(learner.model, "world_model").norm())
    assert norm == pytest.approx(1.0 if clipped else told, rel=1e-4)


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped", "loss"),
    [(1.27, 1, 0, -1.27), (1.29, 1, 1, -1.28), (1.29, -1, 0, 1.29), (0.81, -1, 0, 0.81), (0.79, -1, 1, 0.8)],
)
def test_the_learner_clips_ratios_to_the_range_of_dapo(groups, ratio, advantage, clipped, loss):
    """The log-probs that the row says it was sampled with differ from the learner's by this ratio."""
    learner = fresh("separate")
    row = policy_rows(learner.model, groups[0])[0]
    said = (each - math.log(ratio) * weight for each, weight in zip(row.logprobs, row.policy_weights, strict=True))
    row = replace(row, logprobs=tuple(said), advantages=tuple(advantage * weight for weight in row.policy_weights))
    watched = learner.update([row], world_model_weight=0.0, rate_factor=0.0)
    assert watched["clip_fraction"] == pytest.approx(clipped)
    assert watched["policy_loss"] == pytest.approx(loss, rel=1e-3)


# --- failure and memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", ["policy", "world_model"])
def test_a_loss_that_is_no_number_stops_before_anything_moves(groups, poison: str):
    learner = used("separate")
    with torch.no_grad():
        learner.model.adapter_parameters(poison)[0][0, 0] = float("nan")
    before = {name: weights(learner.model, name).clone() for name in learner.model.adapter_names}
    with pytest.raises(WorkError, match=r"not a finite number.*init_from=.* and a lower policy.learning_rate"):
        train(learner, groups[:1], 1.0)
    for name, old in before.items():
        assert torch.equal(weights(learner.model, name).nan_to_num(), old.nan_to_num())


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_the_optimizers_memory_is_saved_with_nothing_lost(groups, tmp_path: Path, coupling: str):
    learner = train(fresh(coupling), groups[:1], 1.0)
    learner.save(tmp_path / "optimizer.safetensors")
    learner.model.save(tmp_path)
    restored = fresh(coupling)
    restored.model.load(tmp_path)
    forgetful = fresh(coupling)
    forgetful.model.load(tmp_path)
    restored.load(tmp_path / "optimizer.safetensors")
    for each in (learner, restored, forgetful):
        train(each, groups[1:2], 1.0)
    for name in learner.model.adapter_names:
        assert torch.equal(weights(learner.model, name), weights(restored.model, name))
        assert not torch.equal(weights(learner.model, name), weights(forgetful.model, name))
