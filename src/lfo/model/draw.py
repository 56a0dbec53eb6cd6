"""Sample a token by inverting the distribution function at a given number."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(logits_BV: Tensor, temperature: float, uniforms_B: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choose a token for each row: by inverting its distribution function at `uniforms_B`, or the likeliest one.

    >>> draw(torch.tensor([[0.0, 0.0]]).repeat(2, 1), 1.0, torch.tensor([0.49, 0.51]))[0].tolist()
    [0, 1]
    """
    if temperature == 0:
        logprobs_BV = logits_BV.log_softmax(-1)
        chosen_B = logits_BV.argmax(-1)
    else:
        if uniforms_B is None:
            raise ValueError("sampling needs uniform numbers")
        logprobs_BV = (logits_BV / temperature).log_softmax(-1)
        distribution_BV = logprobs_BV.exp().cumsum(-1)
        target_B1 = uniforms_B[:, None] * distribution_BV[:, -1:]
        # right=True: the first token whose sum exceeds the target, so a token of probability 0 is never chosen.
        chosen_B = torch.searchsorted(distribution_BV, target_B1, right=True)[:, 0].clamp(max=logits_BV.shape[-1] - 1)
    return chosen_B, logprobs_BV.gather(-1, chosen_B[:, None])[:, 0]
