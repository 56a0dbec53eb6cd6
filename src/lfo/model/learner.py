"""One optimizer update of the adapters from training samples. It knows no algorithm, environment or text.

    total = policy_loss + weight * world_model_loss + imitation_loss

It makes one backward pass, clips gradients per adapter, and uses one AdamW.

Each loss is the mean over its own tokens of the whole mini-batch, independent of micro-batches.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lfo.checkpoints import reading
from lfo.config import RunConfig
from lfo.config.couplings import POLICY
from lfo.errors import WorkError
from lfo.model.adapters import DualAdapterModel
from lfo.model.fast.row_tree import RowTree
from lfo.objectives.losses import (
    clip_gradients_per_adapter,
    cross_entropy,
    fused_token_hits,
    fused_token_logprobs,
    policy_loss,
    total_loss,
    weighted_mean,
)
from lfo.types import ReplyScore, TrainingSample

LOGITS_AT_ONCE = 1 << 27  # predictions times vocabulary
CLIP_LOW, CLIP_HIGH = 0.2, 0.28  # of DAPO: the ratio to the policy that sampled is clipped to [1 - low, 1 + high]
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1  # of AdamW
MAX_NORM = 1.0  # of each adapter's gradient
GAP = "logprob_gap_mean"  # before the first update of a step it shows whether sampler and trainer compute the same


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Samples as rows, padded on the right, with the same adapters unless the model mixes rows.

    Suffixes: B rows, T tokens.
    """

    adapters: tuple[str, ...]  # all adapters in the batch
    adapters_of_rows: tuple[tuple[str, ...], ...]
    tree: RowTree
    tokens_BT: Tensor
    logprobs_BT: Tensor
    advantages_BT: Tensor
    policy_weights_BT: Tensor
    world_model_weights_BT: Tensor
    imitation_weights_BT: Tensor
    wanted_BT: Tensor  # on the host: positions whose next-token prediction has a weight
    has_policy: bool  # whether any token has such a weight; reading the tensor would sync the device
    has_world_model: bool
    has_imitation: bool


def collate(samples: Sequence[TrainingSample], device: torch.device) -> Batch:
    """Make each sample a row, padded with zeros; padding has no weight."""
    longest = max(len(sample.tokens) for sample in samples)

    def stack(stream: str, dtype: type[np.generic] = np.float32) -> np.ndarray:
        rows = np.zeros((len(samples), longest), dtype=dtype)  # numpy converts a list three times as fast as torch
        for row, sample in zip(rows, samples, strict=True):
            values = getattr(sample, stream)
            row[: len(values)] = values
        return rows

    def tensor(rows: np.ndarray) -> Tensor:
        return torch.from_numpy(rows).to(device)

    weighted = np.zeros((len(samples), longest), dtype=bool)
    for row, sample in zip(weighted, samples, strict=True):
        streams = sample.policy_weights, sample.world_model_weights, sample.imitation_weights
        row[: len(sample.tokens)] = np.any([stream for stream in streams if stream], axis=0)
    wanted = np.zeros_like(weighted)
    wanted[:, :-1] = weighted[:, 1:]  # the hidden state at the token before predicts a token

    adapters = tuple(sample.adapters for sample in samples)
    tokens_BT = stack("tokens", np.int64)
    return Batch(
        adapters=tuple(dict.fromkeys(name for row in adapters for name in row)),
        adapters_of_rows=adapters,
        tree=RowTree.of(tokens_BT, [len(sample.tokens) for sample in samples], adapters),
        tokens_BT=tensor(tokens_BT),
        logprobs_BT=tensor(stack("logprobs")),
        advantages_BT=tensor(stack("advantages")),
        policy_weights_BT=tensor(stack("policy_weights")),
        world_model_weights_BT=tensor(stack("world_model_weights")),
        imitation_weights_BT=tensor(stack("imitation_weights")),
        wanted_BT=torch.from_numpy(wanted),
        has_policy=any(any(sample.policy_weights) for sample in samples),
        has_world_model=any(any(sample.world_model_weights) for sample in samples),
        has_imitation=any(any(sample.imitation_weights) for sample in samples),
    )


def micro_batches(
    samples: Sequence[TrainingSample], device: torch.device, *, tokens: int, mixed: bool = False
) -> Iterator[Batch]:
    """Yield micro-batches of samples of similar length with at most `tokens` tokens; a longer one is alone.

    `mixed`: any adapters together, and padding is not counted. Otherwise only equal adapters, and padding counts.
    """
    by_adapters: dict[tuple[str, ...], list[TrainingSample]] = defaultdict(list)
    for sample in samples:
        by_adapters[() if mixed else sample.adapters].append(sample)
    for left in by_adapters.values():
        left.sort(key=lambda sample: len(sample.tokens), reverse=True)
        while left:
            costs = accumulate(len(sample.tokens) if mixed else len(left[0].tokens) for sample in left)
            count = max(1, sum(cost <= tokens for cost in costs))
            yield collate(left[:count], device)
            left = left[count:]


@dataclass(frozen=True, kw_only=True, slots=True)
class Normalizers:
    """The number of tokens of each loss in the whole mini-batch; 0 if it has no such loss."""

    policy: float
    world_model: float
    imitation: float

    @classmethod
    def of(cls, samples: Sequence[TrainingSample], *, world_model_weight: float) -> Normalizers:
        return cls(
            policy=sum(sum(sample.policy_weights) for sample in samples),
            world_model=sum(sum(sample.world_model_weights) for sample in samples) if world_model_weight else 0.0,
            imitation=sum(sum(sample.imitation_weights) for sample in samples),
        )


class Learner:
    """Updates the adapters with their optimizer."""

    def __init__(self, model: DualAdapterModel, config: RunConfig) -> None:
        self.model = model
        self.config = config
        self.micro_batch_tokens = config.micro_batch_tokens
        self.chunk = max(1, LOGITS_AT_ONCE // len(model.head))  # predictions whose logits are in memory at once
        self.parameters: Mapping[str, list[torch.nn.Parameter]] = {
            name: model.adapter_parameters(name) for name in model.adapter_names
        }
        groups = [group for name in self.parameters for group in self._groups_of(name)]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)

    def _groups_of(self, adapter: str) -> list[dict[str, Any]]:
        """Return the parameter groups of an adapter, with the learning rate for normal and for imitation updates."""
        parameters, world = self.parameters[adapter], self.config.world_model
        if adapter == POLICY:  # a shared adapter has the rate of the policy
            rates = {"rate": self.config.policy.learning_rate, "imitation_rate": self.config.internalise.learning_rate}
            return [{"params": parameters, **rates}]
        # A and B of each layer alternate.
        parts = (
            [(parameters, 1.0)]
            if world.lora_plus == 1
            else [(parameters[::2], 1.0), (parameters[1::2], world.lora_plus)]
        )
        return [
            {"params": part, "rate": world.learning_rate * ratio, "imitation_rate": world.learning_rate * ratio}
            for part, ratio in parts
        ]

    def update(
        self, samples: Sequence[TrainingSample], *, world_model_weight: float, rate_factor: float
    ) -> dict[str, float]:
        """Train on one mini-batch and return the metrics; `rate_factor` scales every learning rate."""
        # Drop samples that train nothing: their padding would change the rounding of other gradients.
        samples = [
            each
            for each in samples
            if any(each.policy_weights)
            or any(each.imitation_weights)
            or (world_model_weight and any(each.world_model_weights))
        ]
        tokens = Normalizers.of(samples, world_model_weight=world_model_weight)
        if not samples:
            return {}
        sums: dict[str, Any] = defaultdict(float)  # on the device, to avoid a sync
        self.optimizer.zero_grad(set_to_none=True)
        for batch in self._micro_batches(samples):
            self._backward(batch, tokens, world_model_weight, sums)
        watched = {name: float(value) for name, value in sums.items()}
        self._gather(watched)
        norms = clip_gradients_per_adapter(self.parameters, MAX_NORM)
        if not all(map(math.isfinite, (*norms.values(), *watched.values()))):
            raise WorkError(
                f"the loss or its gradient is not a finite number (gradient norms {norms}); continue in another folder "
                f"with init_from={self.config.output_dir} and a lower policy.learning_rate, world_model.learning_rate "
                "or, if the policy imitates, internalise.learning_rate"
            )
        for group in self.optimizer.param_groups:
            rate = group["imitation_rate"] if tokens.imitation else group["rate"]
            group["lr"] = rate * rate_factor
        self.optimizer.step()
        return {**watched, **{f"gradient_norm/{name}": norm for name, norm in norms.items()}}

    # Two hooks for a distributed learner: see engines/verl/learner.py.

    def _micro_batches(self, samples: Sequence[TrainingSample]) -> Iterator[Batch]:
        """Yield the micro-batches that this process computes: all of them."""
        tokens, mixed = self.micro_batch_tokens, self.model.mixes_rows
        yield from micro_batches(samples, self.model.device, tokens=tokens, mixed=mixed)

    def _gather(self, watched: dict[str, float]) -> None:
        """Add the gradients and metrics of other processes; here there are none."""

    def _backward(self, batch: Batch, tokens: Normalizers, world_model_weight: float, sums: dict[str, Any]) -> None:
        model = self.model
        has_policy = batch.has_policy or batch.has_imitation
        has_world = batch.has_world_model and tokens.world_model > 0
        if not (has_policy or has_world):
            return
        options: dict[str, Any] = {"tree": batch.tree, "wanted_BT": batch.wanted_BT}
        if model.mixes_rows:
            hidden_BTD = model.hidden_of_mixed_rows(batch.tokens_BT, batch.adapters_of_rows, **options)
        else:
            hidden_BTD = model.hidden(batch.tokens_BT, batch.adapters, **options)
        policy = world = hidden_BTD.new_zeros(())
        if batch.has_policy:
            policy = self._policy_loss(hidden_BTD, batch, tokens.policy, sums)
        if batch.has_imitation:
            weights_BT, count = batch.imitation_weights_BT, tokens.imitation
            policy = policy + self._cross_entropy("imitation", hidden_BTD, batch, weights_BT, count, sums)
        if has_world:
            weights_BT, count = batch.world_model_weights_BT, tokens.world_model
            world = self._cross_entropy("world_model", hidden_BTD, batch, weights_BT, count, sums)
        total_loss(policy, world, weight=world_model_weight).backward()

    def _policy_loss(self, hidden_BTD: Tensor, batch: Batch, tokens: float, sums: dict[str, Any]) -> Tensor:
        weights_BT = batch.policy_weights_BT
        # Log-probs of the policy use the sampling temperature; those of the world model always use 1.
        logprobs_BT, entropies_BT = fused_token_logprobs(
            hidden_BTD,
            self.model.head,
            batch.tokens_BT,
            positions_BT=weights_BT > 0,
            temperature=self.config.rollout.temperature,
            chunk=self.chunk,
        )
        result = policy_loss(
            logprobs_BT,
            batch.logprobs_BT,
            batch.advantages_BT,
            weights_BT,
            clip_low=CLIP_LOW,
            clip_high=CLIP_HIGH,
            normalizer=tokens,
        )
        sums["policy_loss"] += result.loss.detach()
        sums["clip_fraction"] += result.clip_fraction
        sums["policy_kl"] += result.approx_kl
        sums[GAP] += result.gap
        sums["entropy"] += weighted_mean(entropies_BT.detach(), weights_BT, normalizer=tokens)
        return result.loss

    def _cross_entropy(
        self, name: str, hidden_BTD: Tensor, batch: Batch, weights_BT: Tensor, tokens: float, sums: dict[str, Any]
    ) -> Tensor:
        """Return a loss on the tokens with a weight; add the loss and the share of weight on right tokens to `sums`.

        The share, `<name>_accuracy`, is the token accuracy only if all weights are equal, as for imitation.
        """
        states = hidden_BTD, self.model.head, batch.tokens_BT
        logprobs_BT, hits_BT = fused_token_hits(*states, positions_BT=weights_BT > 0, chunk=self.chunk)
        loss = cross_entropy(logprobs_BT, weights_BT, normalizer=tokens)
        sums[f"{name}_loss"] += loss.detach()
        sums[f"{name}_accuracy"] += weighted_mean(hits_BT, weights_BT, normalizer=tokens)
        return loss

    @torch.no_grad()
    def reply_scores(self, samples: Sequence[TrainingSample]) -> list[ReplyScore]:
        """Score how well the reply of each sample is predicted, in order; all use the same adapters."""
        scores: dict[int, ReplyScore] = {}
        longest_first = sorted(range(len(samples)), key=lambda index: len(samples[index].tokens), reverse=True)
        while longest_first:
            count = max(1, self.micro_batch_tokens // len(samples[longest_first[0]].tokens))
            indices, longest_first = longest_first[:count], longest_first[count:]
            batch = collate([samples[index] for index in indices], self.model.device)
            hidden_BTD = self.model.hidden(batch.tokens_BT, batch.adapters, tree=batch.tree)
            where_BT = batch.world_model_weights_BT > 0
            states = hidden_BTD, self.model.head, batch.tokens_BT
            logprobs_BT, hits_BT = fused_token_hits(*states, positions_BT=where_BT, chunk=self.chunk)
            sums = (where_BT.sum(-1).tolist(), hits_BT.sum(-1).tolist(), (-logprobs_BT).sum(-1).tolist())
            for index, tokens, hits, loss in zip(indices, *sums, strict=True):
                scores[index] = ReplyScore(tokens=tokens, hits=int(hits), loss=loss)
        return [scores[index] for index in range(len(samples))]

    # --- checkpoints -------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write the optimizer's state, by adapter and parameter."""
        tensors = {}
        for name, parameters in self.parameters.items():
            for index, parameter in enumerate(parameters):
                for key, value in self.optimizer.state.get(parameter, {}).items():
                    tensors[f"{name}.{index}.{key}"] = value.detach().cpu().contiguous().clone()
        save_file(tensors, path)

    def load(self, path: Path) -> None:
        with reading(path):
            tensors = load_file(path)
        for name, parameters in self.parameters.items():
            for index, parameter in enumerate(parameters):
                prefix = f"{name}.{index}."
                state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
                if state:
                    moved = {key: value.to(parameter) for key, value in state.items()}
                    self.optimizer.state[parameter] = moved
