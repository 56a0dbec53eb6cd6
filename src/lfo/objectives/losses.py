"""Log-probs and losses. Both engines train with these functions.

Shapes in names:

    B rows    T tokens of a row    V vocabulary    D hidden size    N selected predictions

Entry t of every BT stream belongs to the prediction of token t from the tokens before it, as in
`lfo.types.TrainingSample`; entry 0 is 0, because no token is before it. Losses use only entries with a weight: values
in other entries (padding, prompt) change neither the loss nor the gradient, even if they are NaN.

Every mean is a sum divided by `normalizer`, which the caller computes once over the whole mini-batch and all ranks. The
results of micro-batches are therefore exact parts of the mini-batch mean: add them up. Each loss has its own
normalizer, so neither dilutes the other. (If ranks average gradients instead of adding them, multiply the loss by the
number of ranks.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint

CLIP_LOW, CLIP_HIGH = 0.2, 0.28  # of DAPO: the ratio to the policy that sampled is clipped to [1 - low, 1 + high]


def fused_token_logprobs(
    hidden_BTD: Tensor,
    head_VD: Tensor,
    tokens_BT: Tensor,
    *,
    positions_BT: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of every token and the entropy of every prediction, (logprobs_BT, entropies_BT), in fp32.

    Computes only entries where `positions_BT` is True, `chunk` at a time; the others are 0. This saves most of the
    work: few tokens of a rollout are sampled or are targets, and the output layer is the widest of the model. The
    backward pass computes the logits again, so that they are never stored. Only for models whose logits are
    `hidden @ head.T` (no bias, no soft-capping).
    """
    return _fused(
        lambda logits, targets: _score(logits, targets, temperature),
        (hidden_BTD, head_VD, tokens_BT),
        positions_BT,
        chunk,
    )


def fused_token_hits(
    hidden_BTD: Tensor, head_VD: Tensor, tokens_BT: Tensor, *, positions_BT: Tensor | None = None, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """Return (logprobs_BT, hits_BT), like `fused_token_logprobs` at temperature 1.

    A hit is 1 if no token is likelier, else 0; with equal weights the `weighted_mean` of hits is the token accuracy. It
    has no gradient.
    """
    return _fused(_score_hits, (hidden_BTD, head_VD, tokens_BT), positions_BT, chunk)


def _fused(
    score: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    states: tuple[Tensor, Tensor, Tensor],
    positions_BT: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    hidden_BTD, head_VD, tokens_BT = states
    mask_BT = _predictable(tokens_BT, positions_BT)
    first_N, second_N = _in_chunks(
        lambda hidden_ND, targets_N: score(logits_of(hidden_ND, head_VD), targets_N),
        hidden_BTD[:, :-1][mask_BT[:, 1:]],
        tokens_BT[mask_BT],
        chunk=chunk,
    )
    empty_BT = first_N.new_zeros(tokens_BT.shape)
    return empty_BT.masked_scatter(mask_BT, first_N), empty_BT.masked_scatter(mask_BT, second_N)


def logits_of(hidden_ND: Tensor, head_VD: Tensor) -> Tensor:
    """Return logits in fp32 on a GPU: rounded to bf16, a logit of 20 and its log-prob are off by up to 0.06."""
    if hidden_ND.device.type == "cuda" and hidden_ND.dtype != torch.float32 and not head_VD.requires_grad:
        return cast(Tensor, _PreciseLogits.apply(hidden_ND, head_VD))
    return linear(hidden_ND, head_VD)


class _PreciseLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, head_VD: Tensor) -> Tensor:
        ctx.save_for_backward(head_VD)
        return torch.mm(hidden_ND, head_VD.T, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (head_VD,) = ctx.saved_tensors
        return gradients[0].to(head_VD.dtype) @ head_VD, None


def _predictable(tokens_BT: Tensor, positions_BT: Tensor | None) -> Tensor:
    mask_BT = torch.ones_like(tokens_BT, dtype=torch.bool) if positions_BT is None else positions_BT.clone()
    mask_BT[:, 0] = False
    return mask_BT


def _score(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the log-probs of the targets and the entropies; V is the last dimension of `logits`."""
    all_logprobs = _in_full_precision(logits).div(temperature).log_softmax(dim=-1)
    entropies = -(all_logprobs.exp() * all_logprobs).sum(dim=-1)
    return all_logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropies


def _score_hits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probs of the targets, and 1 where no token is likelier."""
    logits = _in_full_precision(logits)
    of_targets = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    hits = (of_targets >= logits.detach().amax(dim=-1)).to(logits.dtype)
    return of_targets - logits.logsumexp(dim=-1), hits


def _in_full_precision(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _in_chunks(
    score: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], states: Tensor, targets: Tensor, *, chunk: int
) -> tuple[Tensor, Tensor]:
    if len(states) <= chunk:  # recomputing one chunk would save no memory
        return score(states, targets)
    # `split`, not slices: the backward of each slice would allocate a gradient of the full size.
    pieces = zip(states.split(chunk), targets.split(chunk), strict=True)
    scores = [checkpoint(score, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    return torch.cat([first for first, _ in scores]), torch.cat([second for _, second in scores])


def weighted_mean(values: Tensor, weights: Tensor, *, normalizer: float) -> Tensor:
    """Return this micro-batch's part of the mini-batch mean; entries without a weight are ignored."""
    if not normalizer > 0:
        raise ValueError(f"the normalizer must be above 0, not {normalizer}; skip a loss that has no tokens")
    return (weights * values.masked_fill(weights == 0, 0.0)).sum() / normalizer


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """The loss and its metrics, all as parts of the mini-batch mean; only `loss` has a gradient."""

    loss: Tensor
    clip_fraction: Tensor  # the share of tokens whose gradient the clip set to 0
    approx_kl: Tensor  # from the sampling policy to this one, estimator k3
    gap: Tensor  # mean absolute difference of the log-probs to those sampled


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    normalizer: float,
) -> PolicyLoss:
    """Return DAPO's token-mean clipped loss, with the ratio to the policy that sampled.

    The clip range is wider above 1, so an unlikely token with a good outcome can gain more than a likely one can lose.
    There is no dual clip: with a negative advantage the loss grows with the ratio without a bound, where verl's stops
    at 3 times the advantage (`clip_ratio_c`).
    """
    # Mask before `exp`: an arbitrary value in an entry without a weight could overflow and make the gradient NaN.
    log_ratio = (logprobs - old_logprobs).masked_fill(weights == 0, 0.0)
    ratio = log_ratio.exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1.0 - CLIP_LOW, 1.0 + CLIP_HIGH) * advantages
    with torch.no_grad():
        clip_fraction = weighted_mean((clipped < unclipped).to(ratio.dtype), weights, normalizer=normalizer)
        approx_kl = weighted_mean(log_ratio.expm1() - log_ratio, weights, normalizer=normalizer)
        gap = weighted_mean(log_ratio.abs(), weights, normalizer=normalizer)
    return PolicyLoss(
        loss=-weighted_mean(torch.minimum(unclipped, clipped), weights, normalizer=normalizer),
        clip_fraction=clip_fraction,
        approx_kl=approx_kl,
        gap=gap,
    )


def cross_entropy(logprobs: Tensor, weights: Tensor, *, normalizer: float) -> Tensor:
    """Return the loss of the world model on replies, and of a policy that imitates, in nats per token."""
    return -weighted_mean(logprobs, weights, normalizer=normalizer)


def total_loss(policy: Tensor, world_model: Tensor, *, weight: float) -> Tensor:
    """Return `policy + weight * world_model`; with weight 0 only the policy loss, so that plain DAPO is exact.

    (0 * NaN would be NaN, and an added 0 would still send gradients of 0 through the world model.)
    """
    return policy if weight == 0 else policy + weight * world_model


def clip_gradients_per_adapter(groups: Mapping[str, Sequence[Tensor]], max_norm: float) -> dict[str, float]:
    """Clip the gradients of each adapter by its own norm; return the norms before clipping, by adapter.

    With one norm for all, a large world-model gradient would shrink the policy's step. Parameters without a gradient
    are skipped; an adapter without any gradient is not in the result. If a norm is not finite, it is returned and the
    gradients are not changed: scaling would only spread the NaN, and the caller decides whether to stop.
    """
    norms: dict[str, float] = {}
    for name, parameters in groups.items():
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        if not trained:
            continue
        norm = get_total_norm([parameter.grad for parameter in trained if parameter.grad is not None])
        norms[name] = float(norm)
        if math.isfinite(norms[name]):
            clip_grads_with_norm_(trained, max_norm, norm)
    return norms
