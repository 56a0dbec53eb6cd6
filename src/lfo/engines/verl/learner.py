"""The update of `lfo.model.learner`, shared among the ranks of a distributed run.

Every rank gets the whole mini-batch and computes its share of it. Gradients are then added up, so all ranks make the
same step on their copies of the adapters. Loss, clipping and optimizer are the code of the local engine.

The base is sharded, so all ranks take part in each forward and backward of a layer: they must make the same passes in
the same order. Therefore there are rounds: in each round every rank has a micro-batch with the same adapter, and a rank
without samples gets an empty part, which has no weights.

    lengths          9 8 7 5 5 4 2        2 ranks, 16 tokens at most for one micro-batch of one rank
    round 1          9 8                  rank 0: 9      rank 1: 8
    round 2          7 5 5 4              rank 0: 7 5    rank 1: 5 4
    round 3          2                    rank 0: 2      rank 1: nothing
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lfo.config import RunConfig
from lfo.model.adapters import DualAdapterModel
from lfo.model.learner import Batch, Learner, collate
from lfo.types import TrainingSample


def rounds(samples: Sequence[TrainingSample], *, ranks: int, tokens: int) -> Iterator[list[list[TrainingSample]]]:
    """Yield the samples of each rank for each round, longest first; samples of a round use the same adapters."""
    by_adapters: dict[tuple[str, ...], list[TrainingSample]] = defaultdict(list)
    for sample in samples:
        by_adapters[sample.adapters].append(sample)
    for adapters in sorted(by_adapters):
        left = sorted(by_adapters[adapters], key=lambda sample: len(sample.tokens), reverse=True)
        while left:
            count = max(1, tokens // len(left[0].tokens)) * ranks
            yield [left[:count][rank::ranks] or [empty_part(left[0])] for rank in range(ranks)]
            left = left[count:]


def empty_part(sample: TrainingSample) -> TrainingSample:
    """Return the shortest sample with the same adapters that trains nothing."""
    zeros = (0.0, 0.0)
    return dataclasses.replace(
        sample,
        tokens=tuple(sample.tokens[:2]),
        logprobs=zeros,
        advantages=zeros,
        policy_weights=zeros,
        world_model_weights=zeros,
        imitation_weights=(),
    )


def without_world_model(sample: TrainingSample) -> TrainingSample:
    return dataclasses.replace(sample, world_model_weights=(0.0,) * len(sample.tokens))


class RankedLearner(Learner):
    """The learner of one rank. All ranks must call each method with the same samples."""

    def __init__(self, model: DualAdapterModel, config: RunConfig, *, micro_batch_tokens: int) -> None:
        super().__init__(model, config)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.micro_batch_tokens = micro_batch_tokens

    def update(
        self, samples: Sequence[TrainingSample], *, world_model_weight: float, rate_factor: float
    ) -> dict[str, float]:
        # With weight 0, a rank makes no pass for a world-model sample, but a rank without samples would: remove them.
        samples = samples if world_model_weight else [without_world_model(sample) for sample in samples]
        return super().update(samples, world_model_weight=world_model_weight, rate_factor=rate_factor)

    def _micro_batches(self, samples: Sequence[TrainingSample]) -> Iterator[Batch]:
        if self.ranks == 1 and self.model.mixes_rows:
            yield from super()._micro_batches(samples)
            return
        for parts in rounds(samples, ranks=self.ranks, tokens=self.micro_batch_tokens):
            yield collate(parts[self.rank], self.model.device)

    def _backward(
        self, batch: Batch, tokens: Mapping[str, float], world_model_weight: float, sums: dict[str, Any]
    ) -> None:
        if batch.losses:
            super()._backward(batch, tokens, world_model_weight, sums)
            return
        # Make the same passes as the other ranks.
        hidden_BTD = self.model.hidden(batch.tokens_BT, batch.adapters)
        (hidden_BTD.sum() * 0.0).backward()

    @torch.no_grad()
    def _gather(self, watched: dict[str, float]) -> None:
        if self.ranks == 1:
            return
        idle = torch.tensor(
            [float(all(each.grad is None for each in group)) for group in self.parameters.values()],
            device=self.model.device,
        )
        dist.all_reduce(idle)
        for alone, group in zip(idle.tolist(), self.parameters.values(), strict=True):
            if alone == self.ranks:  # no rank trained this adapter: without a gradient AdamW does not change it
                continue
            gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in group]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            for parameter, part in zip(group, flat.split([each.numel() for each in group]), strict=True):
                parameter.grad = part.view_as(parameter).clone()
        everybody: list[dict[str, float]] = [{} for _ in range(self.ranks)]
        dist.all_gather_object(everybody, dict(watched))
        watched.clear()
        for theirs in everybody:
            for name, value in theirs.items():
                watched[name] = watched.get(name, 0.0) + value

    @torch.no_grad()
    def policy_logprobs(self, samples: Sequence[TrainingSample]) -> list[Tensor]:
        """Return the log-probs of each sample's policy tokens under the current adapters, in order; 0 elsewhere."""
        named = {id(sample): index for index, sample in enumerate(samples)}
        mine: dict[int, Tensor] = {}
        for parts in rounds(samples, ranks=self.ranks, tokens=self.micro_batch_tokens):
            part = parts[self.rank]
            batch = collate(part, self.model.device)
            logprobs_BT, _ = self._policy_logprobs(self._hidden(batch), batch)
            for sample, logprobs_T in zip(part, logprobs_BT.cpu(), strict=True):
                if id(sample) in named:
                    mine[named[id(sample)]] = logprobs_T[: len(sample.tokens)].clone()
        everybody: list[dict[int, Tensor]] = [{} for _ in range(self.ranks)]
        dist.all_gather_object(everybody, mine)
        merged = {index: logprobs for theirs in everybody for index, logprobs in theirs.items()}
        return [merged[index] for index in range(len(samples))]
