"""Losses against values computed by hand, their gradients, and what must not change them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lfo.objectives.losses import (
    clip_gradients_per_adapter,
    cross_entropy,
    fused_token_hits,
    fused_token_logprobs,
    policy_loss,
    total_loss,
    weighted_mean,
)

torch.set_num_threads(1)

B, T, V, D = 3, 11, 17, 5


def naive_logprobs(logits_BTV: Tensor, tokens_BT: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The definition, token by token."""
    logprobs, entropies = torch.zeros_like(tokens_BT, dtype=logits_BTV.dtype), torch.zeros_like(logits_BTV[..., 0])
    for b in range(tokens_BT.shape[0]):
        for t in range(1, tokens_BT.shape[1]):
            p_V = (logits_BTV[b, t - 1] / temperature).softmax(-1)
            logprobs[b, t] = p_V[tokens_BT[b, t]].log()
            entropies[b, t] = -(p_V * p_V.log()).sum()
    return logprobs, entropies


def random_case(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    hidden_BTD = torch.randn(B, T, D, generator=random, dtype=dtype, requires_grad=True)
    head_VD = torch.randn(V, D, generator=random, dtype=dtype, requires_grad=True)
    return hidden_BTD, head_VD, torch.randint(V, (B, T), generator=random)


def gradients(scores: tuple[Tensor, Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """Of a sum in which every log-prob and every entropy counts differently."""
    logprobs_BT, entropies_BT = scores
    counts = torch.arange(logprobs_BT.numel(), dtype=logprobs_BT.dtype).view_as(logprobs_BT) / logprobs_BT.numel()
    return torch.autograd.grad((counts * logprobs_BT).sum() + (counts.flip(0) * entropies_BT).sum(), inputs)


def assert_close(actual: Any, expected: Any, atol: float = 1e-6) -> None:
    torch.testing.assert_close(actual, expected, atol=atol, rtol=1e-5)


# ---- log-probs ----------------------------------------------------------------------------------------------


def test_token_logprobs_equal_hand_computed_values() -> None:
    # Two rows of three tokens over two words. Logits (0, ln 3) are the probabilities (1/4, 3/4):
    # entropy 1/4 ln 4 + 3/4 ln 4/3 = 0.562335. Logits (0, 0) are (1/2, 1/2): entropy ln 2. The last is never used.
    skewed, even, unused = [0.0, math.log(3)], [0.0, 0.0], [math.nan, math.nan]
    logits_BTV = torch.tensor([[skewed, even, unused], [even, skewed, unused]])
    tokens_BT = torch.tensor([[0, 1, 0], [1, 0, 0]])
    logprobs_BT, entropies_BT = fused_token_logprobs(logits_BTV, torch.eye(2), tokens_BT)
    ln = math.log
    assert_close(logprobs_BT, torch.tensor([[0, ln(3 / 4), ln(1 / 2)], [0, ln(1 / 2), ln(1 / 4)]]))
    assert_close(entropies_BT, torch.tensor([[0, 0.5623351, ln(2)], [0, ln(2), 0.5623351]]))


def test_temperature_divides_the_logits() -> None:
    # Logits (0, ln 9) at temperature 2 are (0, ln 3): probabilities (1/4, 3/4).
    logits_BTV = torch.tensor([[[0.0, math.log(9)], [0.0, 0.0]]])
    logprobs_BT, _ = fused_token_logprobs(logits_BTV, torch.eye(2), torch.tensor([[0, 1]]), temperature=2.0)
    assert_close(logprobs_BT, torch.tensor([[0.0, math.log(3 / 4)]]))


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_fused_token_logprobs_equal_the_definition_in_value_and_gradient(chunk: int, temperature: float) -> None:
    hidden_BTD, head_VD, tokens_BT = random_case()
    scores = fused_token_logprobs(hidden_BTD, head_VD, tokens_BT, temperature=temperature, chunk=chunk)
    expected = naive_logprobs(hidden_BTD @ head_VD.T, tokens_BT, temperature)
    assert_close(scores, expected)
    assert_close(
        gradients(scores, hidden_BTD, head_VD), gradients(expected, hidden_BTD, head_VD), atol=1e-5
    )  # the head's gradient adds up all positions


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**31), st.integers(1, 12))
def test_fused_token_logprobs_are_computed_at_the_positions_and_nowhere_else(seed: int, chunk: int) -> None:
    hidden_BTD, head_VD, tokens_BT = random_case(seed)
    positions_BT = torch.rand(B, T, generator=torch.Generator().manual_seed(seed)) < 0.3
    before = positions_BT.clone()
    scores = fused_token_logprobs(hidden_BTD, head_VD, tokens_BT, positions_BT=positions_BT, chunk=chunk)
    everywhere = fused_token_logprobs(hidden_BTD, head_VD, tokens_BT)
    for part, whole in zip(scores, everywhere, strict=True):
        assert_close(part, whole * positions_BT)
        assert (part[:, 0] == 0).all()
    assert torch.equal(positions_BT, before)
    if positions_BT[:, 1:].any():
        hidden_gradient_BTD, _ = gradients(scores, hidden_BTD, head_VD)
        assert (hidden_gradient_BTD[:, :-1][~positions_BT[:, 1:]] == 0).all()
        assert (hidden_gradient_BTD[:, -1] == 0).all()


def test_no_positions_at_all_give_zeros_that_can_be_differentiated() -> None:
    hidden_BTD, head_VD, tokens_BT = random_case()
    nowhere = torch.zeros(B, T, dtype=torch.bool)
    scores = fused_token_logprobs(hidden_BTD, head_VD, tokens_BT, positions_BT=nowhere)
    assert not scores[0].any()
    assert not scores[1].any()
    assert not gradients(scores, hidden_BTD)[0].any()
    assert not any(part.any() for part in fused_token_hits(hidden_BTD, head_VD, tokens_BT, positions_BT=nowhere))


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_log_probs_with_hits_equal_those_with_entropies_in_value_and_gradient(chunk: int) -> None:
    hidden_BTD, head_VD, tokens_BT = random_case()
    logprobs_BT, hits_BT = fused_token_hits(hidden_BTD, head_VD, tokens_BT, chunk=chunk)
    expected_BT, _ = fused_token_logprobs(hidden_BTD, head_VD, tokens_BT)
    assert_close(logprobs_BT, expected_BT)
    constant_BT = torch.zeros_like(hits_BT)
    assert_close(gradients((logprobs_BT, hits_BT), hidden_BTD), gradients((expected_BT, constant_BT), hidden_BTD))
    assert not hits_BT.requires_grad


def test_gradients_agree_with_finite_differences() -> None:
    hidden_BTD, head_VD, tokens_BT = random_case(dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda hidden, head: fused_token_logprobs(hidden, head, tokens_BT, temperature=0.9, chunk=8),
        (hidden_BTD, head_VD),
    )


def test_half_precision_logits_are_scored_in_full_precision() -> None:
    hidden_BTD, head_VD, tokens_BT = random_case()
    logits_BTV = (hidden_BTD @ head_VD.T).detach().bfloat16()
    scores = fused_token_logprobs(logits_BTV, torch.eye(V, dtype=torch.bfloat16), tokens_BT, chunk=4)
    assert_close(scores, naive_logprobs(logits_BTV.float(), tokens_BT))


class LargestTensor(TorchDispatchMode):
    """Sees every tensor that any operation makes, backward included, and keeps the largest size per dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.numel: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else (results,):
            if isinstance(result, Tensor):
                self.numel[result.dtype] = max(result.numel(), self.numel.get(result.dtype, 0))
        return results


def test_full_logits_never_exist_in_full_precision() -> None:
    rows, length, vocabulary, chunk = 2, 64, 512, 8
    hidden_BTD = torch.randn(rows, length, 4, requires_grad=True)
    head_VD = torch.randn(vocabulary, 4)
    tokens_BT = torch.randint(vocabulary, (rows, length))
    with LargestTensor() as fused:
        fused_token_logprobs(hidden_BTD, head_VD, tokens_BT, chunk=chunk)[0].sum().backward()
    assert fused.numel[torch.float32] == chunk * vocabulary

    with LargestTensor() as whole:  # the measuring device can see it when it happens
        fused_token_logprobs(hidden_BTD, head_VD, tokens_BT, chunk=rows * length)[0].sum().backward()
    assert whole.numel[torch.float32] == rows * (length - 1) * vocabulary


def test_token_hits_are_those_tokens_that_greedy_decoding_would_choose() -> None:
    hidden_BTD, head_VD, tokens_BT = random_case()
    greedy_BT = (hidden_BTD @ head_VD.T).argmax(-1)
    tokens_BT[:, 1::2] = greedy_BT[:, 0:-1:2]  # every second token is the most likely one
    tokens_BT[:, 2::2] = (greedy_BT[:, 1:-1:2] + 1) % V
    expected_BT = torch.zeros(B, T)
    expected_BT[:, 1::2] = 1.0
    assert torch.equal(fused_token_hits(hidden_BTD, head_VD, tokens_BT, chunk=4)[1], expected_BT)
    first_row = torch.zeros(B, T, dtype=torch.bool)
    first_row[0] = True
    _, hits_BT = fused_token_hits(hidden_BTD, head_VD, tokens_BT, positions_BT=first_row)
    assert torch.equal(hits_BT, expected_BT * first_row)
    # 5 of the 10 predictions of the first row
    assert weighted_mean(hits_BT, expected_BT.new_ones(B, T) * first_row, normalizer=10.0) == 0.5


# ---- policy loss --------------------------------------------------------------------------------------------

# Two rows of three tokens, the first of each the prompt. Ratios and advantages:
#   row 0, advantage +1:  ratio 1.5 (above 1.28: clipped, 1.28)   ratio 0.5 (min(0.5, 0.8): 0.5)
#   row 1, advantage -2:  ratio 0.5 (below 0.8: clipped, -1.6)    ratio 1.5 (min(-3, -2.56): -3)
# sum 1.28 + 0.5 - 1.6 - 3 = -2.82; loss 2.82 / 4 = 0.705; clipped 2 / 4; ratio mean 4 / 4 = 1
# k3 = ratio - 1 - ln ratio: 0.5 - ln 1.5 = 0.0945349 and -0.5 + ln 2 = 0.1931472; mean 0.1438410
OLD = torch.tensor([[0.0, -1.0, -2.0], [0.0, -3.0, -0.5]])
RATIOS = torch.tensor([[9.0, 1.5, 0.5], [9.0, 0.5, 1.5]])
ADVANTAGES = torch.tensor([[0.0, 1.0, 1.0], [0.0, -2.0, -2.0]])
WEIGHTS = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]])


def logprobs_with_ratios() -> Tensor:
    return (OLD + RATIOS.log()).requires_grad_()


def test_policy_loss_equals_hand_computed_values() -> None:
    result = policy_loss(logprobs_with_ratios(), OLD, ADVANTAGES, WEIGHTS, normalizer=4.0)
    assert_close(result.loss, torch.tensor(0.705))
    assert_close(result.clip_fraction, torch.tensor(0.5))
    assert_close(result.approx_kl, torch.tensor(0.1438410))
    assert [result.clip_fraction.requires_grad, result.approx_kl.requires_grad] == [False, False]


def test_the_clip_stops_good_tokens_above_and_bad_tokens_below() -> None:
    logprobs = logprobs_with_ratios()
    policy_loss(logprobs, OLD, ADVANTAGES, WEIGHTS, normalizer=4.0).loss.backward()
    # d loss / d logprob = -advantage * ratio / 4 where not clipped: -0.5 / 4, and 2 * 1.5 / 4
    assert_close(logprobs.grad, torch.tensor([[0.0, 0.0, -0.125], [0.0, 0.0, 0.75]]))


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.27, 1.0, False),  # asymmetrical: 1.27 lies outside 1 +- 0.2 and inside 1 + 0.28
        (1.29, 1.0, True),
        (1.29, -1.0, False),
        (0.81, -1.0, False),
        (0.79, -1.0, True),
        (0.79, 1.0, False),
    ],
)
def test_the_clip_range_is_wider_above_than_below(ratio: float, advantage: float, clipped: bool) -> None:
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    result = policy_loss(logprobs, torch.zeros(1), torch.tensor([advantage]), torch.ones(1), normalizer=1.0)
    result.loss.backward()
    assert logprobs.grad is not None
    assert bool(result.clip_fraction) is clipped
    assert (logprobs.grad == 0).item() is clipped


def test_on_the_policy_that_sampled_the_gradient_is_that_of_reinforce() -> None:
    logprobs = OLD.clone().requires_grad_()
    result = policy_loss(logprobs, OLD, ADVANTAGES, WEIGHTS, normalizer=4.0)
    result.loss.backward()
    assert_close(logprobs.grad, -ADVANTAGES * WEIGHTS / 4.0)
    assert (result.clip_fraction, result.approx_kl) == (0.0, 0.0)


def test_the_normalizer_decides_and_the_number_of_entries_does_not() -> None:
    right = policy_loss(logprobs_with_ratios(), OLD, ADVANTAGES, WEIGHTS, normalizer=4.0).loss
    wrong = policy_loss(logprobs_with_ratios(), OLD, ADVANTAGES, WEIGHTS, normalizer=6.0).loss
    assert_close(wrong, right * 4 / 6)
    assert not torch.isclose(wrong, right)


@pytest.mark.parametrize("normalizer", [0.0, -1.0, math.nan])
def test_a_loss_over_no_tokens_is_refused(normalizer: float) -> None:
    with pytest.raises(ValueError, match="no tokens"):
        cross_entropy(torch.zeros(2), torch.zeros(2), normalizer=normalizer)


Term = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
TERMS: dict[str, Term] = {
    "policy": lambda lp, other, adv, w, n: policy_loss(lp, other, adv, w, normalizer=n).loss,
    "cross_entropy": lambda lp, other, adv, w, n: cross_entropy(lp, w, normalizer=n),
}


def streams(seed: int, rows: int, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    logprobs, noise, advantages, weights = torch.randn(4, rows, length, generator=random, dtype=torch.float64)
    return -logprobs.abs(), -logprobs.abs() + noise / 2, advantages, (weights > 0) * (weights + 0.5)


@pytest.mark.parametrize("term", TERMS)
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**31), rows=st.integers(2, 6), cut=st.integers(1, 5))
def test_micro_batches_add_up_to_the_mini_batch_in_value_and_gradient(
    term: str, seed: int, rows: int, cut: int
) -> None:
    logprobs, other, advantages, weights = streams(seed, rows, 4)
    normalizer = float(weights.sum()) or 1.0
    whole, split = logprobs.clone().requires_grad_(), logprobs.clone().requires_grad_()

    one_loss = TERMS[term](whole, other, advantages, weights, normalizer)
    one_loss.backward()
    added = torch.zeros((), dtype=torch.float64)
    for part in (slice(None, cut), slice(cut, None)):
        loss = TERMS[term](split[part], other[part], advantages[part], weights[part], normalizer)
        loss.backward()
        added += loss.detach()

    assert_close(added, one_loss.detach(), atol=1e-12)
    assert_close(split.grad, whole.grad, atol=1e-12)


def test_averaging_micro_batches_by_their_own_counts_would_not_add_up() -> None:
    """The reason for a normalizer from outside: micro-batches with different token counts."""
    logprobs, weights = torch.tensor([[-1.0, -1.0], [-4.0, 0.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    # The mean over the tokens is 6 / 3 = 2; the mean of the means (1 and 4) is 2.5.
    own = [cross_entropy(lp, w, normalizer=float(w.sum())) for lp, w in zip(logprobs, weights, strict=True)]
    assert cross_entropy(logprobs, weights, normalizer=3.0) == 2.0
    assert sum(own) / 2 == 2.5


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1000.0])
def test_entries_without_weight_change_neither_value_nor_gradient(term: str, garbage: float) -> None:
    logprobs, other, advantages, weights = streams(0, 3, 4)
    weights[1] = 0.0
    clean, dirty = logprobs.clone().requires_grad_(), logprobs.masked_fill(weights == 0, garbage).requires_grad_()
    loss = TERMS[term](clean, other, advantages, weights, 5.0)
    dirty_loss = TERMS[term](
        dirty, other.masked_fill(weights == 0, -2.0), advantages.masked_fill(weights == 0, garbage), weights, 5.0
    )
    loss.backward()
    dirty_loss.backward()
    assert clean.grad is not None
    assert dirty.grad is not None
    assert loss == dirty_loss
    assert torch.equal(clean.grad, dirty.grad)
    assert not dirty.grad[weights == 0].any()
    assert clean.grad[weights != 0].any()


# ---- the other terms ----------------------------------------------------------------------------------------


def test_cross_entropy_equals_a_hand_computed_value() -> None:
    # 1 * 0.5 + 2 * 1.5 = 3.5 over a total weight of 3
    logprobs, weights = torch.tensor([[0.0, -0.5, -7.0], [0.0, -1.5, -9.0]]), torch.tensor([[0.0, 1, 0], [0, 2, 0]])
    assert_close(cross_entropy(logprobs, weights, normalizer=3.0), torch.tensor(3.5 / 3))


def test_total_loss_adds_the_weighted_cross_entropy() -> None:
    policy, world_model = torch.tensor(0.5, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    total = total_loss(policy, world_model, weight=0.3)
    total.backward()
    assert_close(total.detach(), torch.tensor(1.1))
    assert policy.grad == 1.0
    assert_close(world_model.grad, torch.tensor(0.3))


def test_with_weight_0_the_total_is_the_policy_loss_itself() -> None:
    policy, world_model = torch.tensor(0.5, requires_grad=True), torch.tensor(math.nan, requires_grad=True)
    total = total_loss(policy, world_model, weight=0.0)
    assert total is policy
    total.backward()
    assert world_model.grad is None
    assert total_loss(policy, world_model, weight=1e-9).isnan()  # a NaN is hidden only where nobody asked for it


# ---- gradient clipping --------------------------------------------------------------------------------------


def parameter(*gradient: float) -> Tensor:
    values = torch.zeros(len(gradient), requires_grad=True)
    values.grad = torch.tensor(gradient)
    return values


def test_each_adapter_is_clipped_by_its_own_norm() -> None:
    # policy: sqrt(3^2 + 4^2) = 5 over two tensors, scaled by 1 / 5; world model: 0.5, below 1, untouched
    policy, world_model = (parameter(3.0, 0.0), parameter(4.0)), (parameter(0.3, 0.4),)
    norms = clip_gradients_per_adapter({"policy": policy, "world_model": world_model}, 1.0)
    assert norms == pytest.approx({"policy": 5.0, "world_model": 0.5})
    assert_close([p.grad for p in policy], [torch.tensor([0.6, 0.0]), torch.tensor([0.8])])
    assert_close(world_model[0].grad, torch.tensor([0.3, 0.4]))


def test_a_large_world_model_gradient_does_not_shrink_the_policy_gradient() -> None:
    policy, world_model = parameter(0.6, 0.0), parameter(1000.0)
    clip_gradients_per_adapter({"policy": [policy], "world_model": [world_model]}, 1.0)
    assert_close(policy.grad, torch.tensor([0.6, 0.0]))
    torch.nn.utils.clip_grad_norm_([policy, parameter(1000.0)], 1.0)  # what one norm for both would do
    assert policy.grad is not None
    assert policy.grad[0] < 0.001


def test_parameters_without_a_gradient_are_skipped() -> None:
    idle = torch.zeros(2, requires_grad=True)
    norms = clip_gradients_per_adapter({"policy": [idle, parameter(2.0)], "world_model": [idle], "none": []}, 1.0)
    assert norms == pytest.approx({"policy": 2.0})
    assert idle.grad is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_reported_and_the_gradients_stay_as_they_are(bad: float) -> None:
    policy, world_model = parameter(bad, 3.0), parameter(2.0)
    norms = clip_gradients_per_adapter({"policy": [policy], "world_model": [world_model]}, 1.0)
    assert not math.isfinite(norms["policy"])
    torch.testing.assert_close(policy.grad, torch.tensor([bad, 3.0]), equal_nan=True)
    assert_close(world_model.grad, torch.tensor([1.0]))
