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
LOSSES = ("policy", "world_model", "imitation")  # a sample has a stream of weights for each: `policy_weights`, ...
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
    weights_BT: Mapping[str, Tensor]  # of each of `LOSSES`
    wanted_BT: Tensor  # on the host: positions whose next-token prediction has a weight
    losses: frozenset[str]  # those for which any token has a weight; reading the tensors would sync the device


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

    weights = {loss: stack(f"{loss}_weights") for loss in LOSSES}
    wanted = np.zeros((len(samples), longest), dtype=bool)
    wanted[:, :-1] = np.any(list(weights.values()), axis=0)[:, 1:]  # the hidden state before a token predicts it

    adapters = tuple(sample.adapters for sample in samples)
    tokens_BT = stack("tokens", np.int64)
    return Batch(
        adapters=tuple(dict.fromkeys(name for row in adapters for name in row)),
        adapters_of_rows=adapters,
        tree=RowTree.of(tokens_BT, [len(sample.tokens) for sample in samples], adapters),
        tokens_BT=tensor(tokens_BT),
        logprobs_BT=tensor(stack("logprobs")),
        advantages_BT=tensor(stack("advantages")),
        weights_BT={loss: tensor(rows) for loss, rows in weights.items()},
        wanted_BT=torch.from_numpy(wanted),
        losses=frozenset(loss for loss, rows in weights.items() if rows.any()),
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


def tokens_of(samples: Sequence[TrainingSample], loss: str) -> float:
    """Return the number of tokens of a loss, by weight."""
    return sum(sum(getattr(sample, f"{loss}_weights")) for sample in samples)


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
        losses = [loss for loss in LOSSES if loss != "world_model" or world_model_weight]
        # Drop samples that train nothing: their padding would change the rounding of other gradients.
        samples = [each for each in samples if any(any(getattr(each, f"{loss}_weights")) for loss in losses)]
        tokens = {loss: tokens_of(samples, loss) for loss in losses}
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
            rate = group["imitation_rate"] if tokens["imitation"] else group["rate"]
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

    def _backward(
        self, batch: Batch, tokens: Mapping[str, float], world_model_weight: float, sums: dict[str, Any]
    ) -> None:
        """Add the gradients of one micro-batch; `tokens` are those of each loss in the whole mini-batch."""
        trained = batch.losses & tokens.keys()
        if not trained:
            return
        hidden_BTD = self._hidden(batch)
        policy = world = hidden_BTD.new_zeros(())
        if "policy" in trained:
            policy = self._policy_loss(hidden_BTD, batch, tokens["policy"], sums)
        if "imitation" in trained:
            policy = policy + self._cross_entropy("imitation", hidden_BTD, batch, tokens, sums)
        if "world_model" in trained:
            world = self._cross_entropy("world_model", hidden_BTD, batch, tokens, sums)
        total_loss(policy, world, weight=world_model_weight).backward()

    def _hidden(self, batch: Batch) -> Tensor:
        options: dict[str, Any] = {"tree": batch.tree, "wanted_BT": batch.wanted_BT}
        return self.model.hidden(batch.tokens_BT, batch.adapters, adapters_of_rows=batch.adapters_of_rows, **options)

    def _policy_logprobs(self, hidden_BTD: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return log-probs at the sampling temperature, and entropies; those of the world model always use 1."""
        where_BT, temperature = batch.weights_BT["policy"] > 0, self.config.rollout.temperature
        states = hidden_BTD, self.model.head, batch.tokens_BT
        return fused_token_logprobs(*states, positions_BT=where_BT, temperature=temperature, chunk=self.chunk)

    def _policy_loss(self, hidden_BTD: Tensor, batch: Batch, tokens: float, sums: dict[str, Any]) -> Tensor:
        weights_BT = batch.weights_BT["policy"]
        logprobs_BT, entropies_BT = self._policy_logprobs(hidden_BTD, batch)
        result = policy_loss(logprobs_BT, batch.logprobs_BT, batch.advantages_BT, weights_BT, normalizer=tokens)
        sums["policy_loss"] += result.loss.detach()
        sums["clip_fraction"] += result.clip_fraction
        sums["policy_kl"] += result.approx_kl
        sums[GAP] += result.gap
        sums["entropy"] += weighted_mean(entropies_BT.detach(), weights_BT, normalizer=tokens)
        return result.loss

    def _cross_entropy(
        self, name: str, hidden_BTD: Tensor, batch: Batch, tokens: Mapping[str, float], sums: dict[str, Any]
    ) -> Tensor:
        """Return a loss on the tokens with a weight; add the loss and the share of weight on right tokens to `sums`.

        The share, `<name>_accuracy`, is the token accuracy only if all weights are equal, as for imitation.
        """
        weights_BT, states = batch.weights_BT[name], (hidden_BTD, self.model.head, batch.tokens_BT)
        logprobs_BT, hits_BT = fused_token_hits(*states, positions_BT=weights_BT > 0, chunk=self.chunk)
        loss = cross_entropy(logprobs_BT, weights_BT, normalizer=tokens[name])
        sums[f"{name}_loss"] += loss.detach()
        sums[f"{name}_accuracy"] += weighted_mean(hits_BT, weights_BT, normalizer=tokens[name])
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
            where_BT = batch.weights_BT["world_model"] > 0
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
