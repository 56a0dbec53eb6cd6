"""Log-probs, and the losses made of them; both engines train with exactly these functions.

Shapes in names:

    B rows    T tokens of a row    V vocabulary    D hidden size    N selected predictions

Entry t of every BT stream belongs to the prediction of token t from the tokens before it, as in
`lfo.types.TrainingSample`; entry 0 has nothing before it and is 0. Losses look only at entries with a weight,
so what stands in the others (padding, prompt) changes neither value nor gradient, not even when it is NaN.

Every mean is a sum divided by `normalizer`, which the caller computes once over the whole mini-batch and all
ranks: the results of micro-batches are shares of the mini-batch's mean, and adding them up is exact. Each
loss has a normalizer of its own, so neither dilutes the other. (Where ranks average gradients instead of
adding them, multiply the loss by their number.)
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


def token_logprobs(
    logits_BTV: Tensor, tokens_BT: Tensor, *, temperature: float = 1.0, chunk: int = 256
) -> tuple[Tensor, Tensor]:
    """Log-prob of every token and entropy of every prediction, (logprobs_BT, entropies_BT), in fp32.

    Works through T in chunks and computes each again in the backward pass, so that never more than one chunk
    of the logits exists in fp32.
    """
    logprobs, entropies = _in_chunks(
        lambda logits, targets: _score(logits, targets, temperature),
        logits_BTV[:, :-1],
        tokens_BT[:, 1:],
        chunk=chunk,
        dim=1,
    )
    first = logprobs.new_zeros(len(tokens_BT), 1)
    return torch.cat([first, logprobs], dim=1), torch.cat([first, entropies], dim=1)


def fused_token_logprobs(
    hidden_BTD: Tensor,
    head_VD: Tensor,
    tokens_BT: Tensor,
    *,
    positions_BT: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` from the last hidden states and the weight of the output layer; the logits never exist.

    Only entries where `positions_BT` is True are computed, `chunk` of them at a time; the others are 0. Few
    tokens of a rollout are sampled or are targets, and the output layer is the widest of the model.
    For models whose logits are plainly `hidden @ head.T` (no bias, no soft-capping).
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
    """(logprobs_BT, hits_BT) like `fused_token_logprobs` at temperature 1.

    A hit is 1 where no token is likelier, else 0; its `weighted_mean` is the token accuracy. It has no gradient.
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
    ones_N, others_N = _in_chunks(
        lambda hidden_ND, targets_N: score(_logits(hidden_ND, head_VD), targets_N),
        hidden_BTD[:, :-1][mask_BT[:, 1:]],
        tokens_BT[mask_BT],
        chunk=chunk,
        dim=0,
    )
    empty_BT = ones_N.new_zeros(tokens_BT.shape)
    return empty_BT.masked_scatter(mask_BT, ones_N), empty_BT.masked_scatter(mask_BT, others_N)


def _logits(hidden_ND: Tensor, head_VD: Tensor) -> Tensor:
    """Rounded to bf16, a logit of 20 is off by up to 0.06, and its log-prob with it: a GPU can answer in fp32."""
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
    """Log-probs of the targets and entropies; V is the last dimension of `logits`."""
    all_logprobs = _in_full_precision(logits).div(temperature).log_softmax(dim=-1)
    entropies = -(all_logprobs.exp() * all_logprobs).sum(dim=-1)
    return all_logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropies


def _score_hits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets, and 1 where nothing is likelier."""
    logits = _in_full_precision(logits)
    of_targets = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    hits = (of_targets >= logits.detach().amax(dim=-1)).to(logits.dtype)
    return of_targets - logits.logsumexp(dim=-1), hits


def _in_full_precision(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _in_chunks(
    score: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], states: Tensor, targets: Tensor, *, chunk: int, dim: int
) -> tuple[Tensor, Tensor]:
    if states.shape[dim] <= chunk:  # computing it again would hold no less than keeping it
        return score(states, targets)
    # `split`, not slices: its backward joins the gradients once, where each slice would allocate all of them.
    pieces = zip(states.split(chunk, dim), targets.split(chunk, dim), strict=True)
    scores = [checkpoint(score, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    return torch.cat([logprobs for logprobs, _ in scores], dim), torch.cat([entropies for _, entropies in scores], dim)


def weighted_mean(values: Tensor, weights: Tensor, *, normalizer: float) -> Tensor:
    """This micro-batch's share of the mini-batch mean; entries without weight are not looked at."""
    if not normalizer > 0:
        raise ValueError(f"a loss over no tokens: normalizer {normalizer}; skip the loss instead")
    return (weights * values.masked_fill(weights == 0, 0.0)).sum() / normalizer


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """The loss and what to watch beside it, all of them shares of the mini-batch's mean; only `loss` has a gradient."""

    loss: Tensor
    clip_fraction: Tensor  # of the tokens, how many the clip kept from moving further
    approx_kl: Tensor  # from the policy that sampled to this one, estimator k3


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    normalizer: float,
) -> PolicyLoss:
    """DAPO's token-mean clipped objective, with the ratio to the policy that sampled.

    The range is wider above: an unlikely token with a good outcome may gain more than a likely one may lose.
    """
    # Before `exp`: there, garbage in an entry without weight would overflow and turn the gradient into NaN.
    log_ratio = (logprobs - old_logprobs).masked_fill(weights == 0, 0.0)
    ratio = log_ratio.exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    with torch.no_grad():
        clip_fraction = weighted_mean((clipped < unclipped).to(ratio.dtype), weights, normalizer=normalizer)
        approx_kl = weighted_mean(log_ratio.expm1() - log_ratio, weights, normalizer=normalizer)
    return PolicyLoss(
        loss=-weighted_mean(torch.minimum(unclipped, clipped), weights, normalizer=normalizer),
        clip_fraction=clip_fraction,
        approx_kl=approx_kl,
    )


def world_model_loss(logprobs: Tensor, weights: Tensor, normalizer: float) -> Tensor:
    """Cross-entropy on what the environment said, in nats per token."""
    return -weighted_mean(logprobs, weights, normalizer=normalizer)


def imitation_loss(logprobs: Tensor, weights: Tensor, normalizer: float) -> Tensor:
    """Cross-entropy on what the policy said where it succeeded, in nats per token."""
    return -weighted_mean(logprobs, weights, normalizer=normalizer)


def total_loss(policy: Tensor, world_model: Tensor, *, weight: float) -> Tensor:
    """`policy + weight * world_model`; with weight 0 the policy loss itself, so that plain DAPO is exact.

    (0 * NaN would be NaN, and an added 0 would still send gradients of 0 through the world model.)
    """
    return policy if weight == 0 else policy + weight * world_model


def clip_gradients_per_adapter(groups: Mapping[str, Sequence[Tensor]], max_norm: float) -> dict[str, float]:
    """Clip the gradients of each adapter by its own norm; answers the norms from before, by adapter.

    One norm for all would let a large world-model gradient shrink the policy's step. Parameters without a
    gradient are skipped, and an adapter without any is left out of the answer. Where a norm is not finite, it is
    answered as it is and the gradients stay untouched: scaling them would only spread the NaN, and stopping is the
    caller's decision.
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
