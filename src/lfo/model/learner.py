"""One optimizer update: training samples in, moved adapters out. Blind to algorithms, environments and text.

    total = policy_loss + weight * world_model_loss + internalise.weight * imitation_loss

One backward, gradients clipped per adapter, one AdamW.

Each loss is the mean over its own tokens of the whole mini-batch, whatever the micro-batches are.
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

from lfo.config import RunConfig
from lfo.errors import WorkError
from lfo.model.adapters import DualAdapterModel
from lfo.model.couplings import POLICY
from lfo.objectives.losses import (
    clip_gradients_per_adapter,
    fused_token_hits,
    fused_token_logprobs,
    imitation_loss,
    policy_loss,
    total_loss,
    weighted_mean,
    world_model_loss,
)
from lfo.types import ReplyScore, TrainingSample

LOGITS_AT_ONCE = 1 << 27  # numbers: predictions times vocabulary
CLIP_LOW, CLIP_HIGH = 0.2, 0.28  # of DAPO: the ratio to the policy that sampled is clipped to [1 - low, 1 + high]
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1  # of AdamW
MAX_NORM = 1.0  # of each adapter's gradient


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Rows padded on the right, with the same adapters unless the model mixes rows. Suffixes: B rows, T tokens."""

    adapters: tuple[str, ...]  # all that occur in it
    adapters_of_rows: tuple[tuple[str, ...], ...]
    lengths: tuple[int, ...]
    tokens_BT: Tensor
    logprobs_BT: Tensor
    advantages_BT: Tensor
    policy_weights_BT: Tensor
    world_model_weights_BT: Tensor
    imitation_weights_BT: Tensor
    wanted_BT: Tensor  # on the host: the tokens behind which a prediction is weighed
    has_policy: bool  # whether any token has such a weight: asking the tensors would make the device wait
    has_world_model: bool
    has_imitation: bool


def collate(samples: Sequence[TrainingSample], device: torch.device) -> Batch:
    """Pad rows with zeros; no weight is ever on padding."""
    longest = max(len(sample.tokens) for sample in samples)

    def stack(stream: str, dtype: type[np.generic] = np.float32) -> Tensor:
        rows = np.zeros((len(samples), longest), dtype=dtype)  # numpy reads a list three times as fast as torch
        for row, sample in zip(rows, samples, strict=True):
            values = getattr(sample, stream)
            row[: len(values)] = values
        return torch.from_numpy(rows).to(device)

    weighed = np.zeros((len(samples), longest), dtype=bool)
    for row, sample in zip(weighed, samples, strict=True):
        streams = sample.policy_weights, sample.world_model_weights, sample.imitation_weights
        row[: len(sample.tokens)] = np.any([stream for stream in streams if stream], axis=0)
    wanted = np.zeros_like(weighed)
    wanted[:, :-1] = weighed[:, 1:]  # a token is predicted from the state behind the one before it

    return Batch(
        adapters=tuple(dict.fromkeys(name for sample in samples for name in sample.adapters)),
        adapters_of_rows=tuple(sample.adapters for sample in samples),
        lengths=tuple(len(sample.tokens) for sample in samples),
        tokens_BT=stack("tokens", np.int64),
        logprobs_BT=stack("logprobs"),
        advantages_BT=stack("advantages"),
        policy_weights_BT=stack("policy_weights"),
        world_model_weights_BT=stack("world_model_weights"),
        imitation_weights_BT=stack("imitation_weights"),
        wanted_BT=torch.from_numpy(wanted),
        has_policy=any(any(sample.policy_weights) for sample in samples),
        has_world_model=any(any(sample.world_model_weights) for sample in samples),
        has_imitation=any(any(sample.imitation_weights) for sample in samples),
    )


def micro_batches(
    samples: Sequence[TrainingSample], device: torch.device, *, tokens: int, mixed: bool = False
) -> Iterator[Batch]:
    """Rows of similar length, at most `tokens` of them together (a longer row goes alone).

    `mixed`: adapters of all kinds, and padding is free. Otherwise rows with the same adapters, and padding counts.
    """
    by_adapters: dict[tuple[str, ...], list[TrainingSample]] = defaultdict(list)
    for sample in samples:
        by_adapters[() if mixed else sample.adapters].append(sample)
    for rows in by_adapters.values():
        rows.sort(key=lambda row: len(row.tokens), reverse=True)
        while rows:
            costs = accumulate(len(row.tokens) if mixed else len(rows[0].tokens) for row in rows)
            count = max(1, sum(cost <= tokens for cost in costs))
            yield collate(rows[:count], device)
            rows = rows[count:]


@dataclass(frozen=True, kw_only=True, slots=True)
class Normalizers:
    """Tokens of the whole mini-batch that each loss is the mean over; 0: there is no such loss in it."""

    policy: float
    world_model: float
    imitation: float

    @classmethod
    def of(cls, samples: Sequence[TrainingSample], *, weight: float) -> Normalizers:
        return cls(
            policy=sum(sum(sample.policy_weights) for sample in samples),
            world_model=sum(sum(sample.world_model_weights) for sample in samples) if weight else 0.0,
            imitation=sum(sum(sample.imitation_weights) for sample in samples),
        )


class Learner:
    """The adapters' optimizer, and the update."""

    def __init__(self, model: DualAdapterModel, config: RunConfig) -> None:
        self.model = model
        self.config = config
        self.micro_batch_tokens = config.micro_batch_tokens
        self.chunk = max(1, LOGITS_AT_ONCE // len(model.head))  # predictions whose logits exist at the same time
        self.parameters: Mapping[str, list[torch.nn.Parameter]] = {
            name: model.adapter_parameters(name) for name in model.adapter_names
        }
        groups = [group for name in self.parameters for group in self._groups_of(name)]
        settings = config.optimizer
        options = {"lr": 0.0, "betas": BETAS, "weight_decay": WEIGHT_DECAY, "fused": True}
        parts = [self._groups_of(name) for name in self.parameters] if settings.separate else [groups]
        self.optimizers = [torch.optim.AdamW(part, **options) for part in parts]
        self._optimizer_of = {
            parameter: optimizer
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def _groups_of(self, adapter: str) -> list[dict[str, Any]]:
        """The weights of an adapter with their learning rate, and that of an update in which the policy imitates."""
        parameters, world = self.parameters[adapter], self.config.world_model
        if adapter == POLICY:  # with one shared adapter there is one rate, the policy's
            rates = {"rate": self.config.policy.learning_rate, "imitation_rate": self.config.internalise.learning_rate}
            return [{"params": parameters, **rates}]
        # A and B of each layer follow each other.
        parts = (
            [(parameters, 1.0)]
            if world.lora_plus == 1
            else [(parameters[::2], 1.0), (parameters[1::2], world.lora_plus)]
        )
        return [
            {"params": part, "rate": world.learning_rate * ratio, "imitation_rate": world.learning_rate * ratio}
            for part, ratio in parts
        ]

    def update(self, samples: Sequence[TrainingSample], *, weight: float, rate_factor: float) -> dict[str, float]:
        """Train on one mini-batch; `rate_factor` scales every learning rate. Answers what to watch."""
        # A row that trains nothing is no row: its padding would round the others' gradients differently.
        samples = [
            each
            for each in samples
            if any(each.policy_weights) or any(each.imitation_weights) or (weight and any(each.world_model_weights))
        ]
        tokens = Normalizers.of(samples, weight=weight)
        if not samples:
            return {}
        sums: dict[str, Any] = defaultdict(float)  # on the device: asking for a number would make it wait
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        for batch in self._micro_batches(samples):
            self._backward(batch, tokens, weight, sums)
        watched = {name: float(value) for name, value in sums.items()}
        self._gather(watched)
        norms = clip_gradients_per_adapter(self.parameters, MAX_NORM)
        if not all(map(math.isfinite, (*norms.values(), *watched.values()))):
            raise WorkError(
                f"the loss or its gradient is not a finite number (gradient norms {norms}); go on in another folder "
                f"with init_from={self.config.output_dir} and a lower policy.learning_rate, world_model.learning_rate "
                "or, where the policy imitates, internalise.learning_rate"
            )
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                rate = group["imitation_rate"] if tokens.imitation else group["rate"]
                group["lr"] = rate * rate_factor
            optimizer.step()
        return {**watched, **{f"gradient_norm/{name}": norm for name, norm in norms.items()}}

    # Two hooks for a learner that shares the work with others: see engines/verl/learner.py.

    def _micro_batches(self, samples: Sequence[TrainingSample]) -> Iterator[Batch]:
        """What this process computes of a mini-batch: all of it."""
        tokens, mixed = self.micro_batch_tokens, self.model.mixes_rows
        yield from micro_batches(samples, self.model.device, tokens=tokens, mixed=mixed)

    def _gather(self, watched: dict[str, float]) -> None:
        """Add what other processes computed to the gradients and to what is watched: there are none."""

    def _backward(self, batch: Batch, tokens: Normalizers, weight: float, sums: dict[str, Any]) -> None:
        model = self.model
        has_policy, has_world = (
            batch.has_policy or batch.has_imitation,
            batch.has_world_model and tokens.world_model > 0,
        )
        if not (has_policy or has_world):
            return
        # Inline and stacked, one forward serves all losses, and only those of the policy must spare the world model.
        spared = model.policy_detached if batch.adapters == model.policy_adapters else ()
        asked: dict[str, Any] = {"lengths": batch.lengths, "wanted_BT": batch.wanted_BT}
        if model.mixes_rows:
            hidden_BTD = model.hidden_of_mixed_rows(batch.tokens_BT, batch.adapters_of_rows, **asked)
        else:
            detached = () if has_world else spared
            hidden_BTD = model.hidden(batch.tokens_BT, batch.adapters, detached, **asked)
        policy = world = hidden_BTD.new_zeros(())
        if batch.has_policy:
            policy = self._policy_loss(hidden_BTD, batch, tokens.policy, sums)
        if batch.has_imitation:
            policy = policy + self._imitation_loss(hidden_BTD, batch, tokens.imitation, sums)
        if has_world:
            world = self._world_model_loss(hidden_BTD, batch, tokens.world_model, sums)
        if has_policy and has_world and spared:
            kept = [weight for name, group in self.parameters.items() if name not in spared for weight in group]
            everything = [weight for group in self.parameters.values() for weight in group]
            policy.backward(inputs=kept, retain_graph=True)
            (weight * world).backward(inputs=everything)
        else:
            total_loss(policy, world, weight=weight).backward()

    def _policy_loss(self, hidden_BTD: Tensor, batch: Batch, tokens: float, sums: dict[str, Any]) -> Tensor:
        weights_BT = batch.policy_weights_BT
        logprobs_BT, entropies_BT = fused_token_logprobs(
            hidden_BTD, self.model.head, batch.tokens_BT, positions_BT=weights_BT > 0, chunk=self.chunk
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
        sums["entropy"] += weighted_mean(entropies_BT.detach(), weights_BT, normalizer=tokens)
        return result.loss

    def _world_model_loss(self, hidden_BTD: Tensor, batch: Batch, tokens: float, sums: dict[str, Any]) -> Tensor:
        weights_BT = batch.world_model_weights_BT
        states = hidden_BTD, self.model.head, batch.tokens_BT
        logprobs_BT, hits_BT = fused_token_hits(*states, positions_BT=weights_BT > 0, chunk=self.chunk)
        loss = world_model_loss(logprobs_BT, weights_BT, tokens)
        sums["world_model_loss"] += loss.detach()
        sums["world_model_accuracy"] += weighted_mean(hits_BT, weights_BT, normalizer=tokens)
        return loss

    def _imitation_loss(self, hidden_BTD: Tensor, batch: Batch, tokens: float, sums: dict[str, Any]) -> Tensor:
        weights_BT = batch.imitation_weights_BT
        states = hidden_BTD, self.model.head, batch.tokens_BT
        logprobs_BT, hits_BT = fused_token_hits(*states, positions_BT=weights_BT > 0, chunk=self.chunk)
        loss = imitation_loss(logprobs_BT, weights_BT, tokens)
        sums["imitation_loss"] += loss.detach()
        sums["imitation_accuracy"] += weighted_mean(hits_BT, weights_BT, normalizer=tokens)
        return loss

    @torch.no_grad()
    def reply_scores(self, samples: Sequence[TrainingSample]) -> list[ReplyScore]:
        """How the reply of each row was predicted, in order, without training; all rows run on the same adapters."""
        scores: dict[int, ReplyScore] = {}
        longest_first = sorted(range(len(samples)), key=lambda place: len(samples[place].tokens), reverse=True)
        while longest_first:
            count = max(1, self.micro_batch_tokens // len(samples[longest_first[0]].tokens))
            places, longest_first = longest_first[:count], longest_first[count:]
            batch = collate([samples[place] for place in places], self.model.device)
            hidden_BTD = self.model.hidden(batch.tokens_BT, batch.adapters, lengths=batch.lengths)
            where_BT = batch.world_model_weights_BT > 0
            states = hidden_BTD, self.model.head, batch.tokens_BT
            logprobs_BT, hits_BT = fused_token_hits(*states, positions_BT=where_BT, chunk=self.chunk)
            sums = (where_BT.sum(-1).tolist(), hits_BT.sum(-1).tolist(), (-logprobs_BT).sum(-1).tolist())
            for place, tokens, hits, loss in zip(places, *sums, strict=True):
                scores[place] = ReplyScore(tokens=tokens, hits=int(hits), loss=loss)
        return [scores[place] for place in range(len(samples))]

    # --- checkpoints -------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write the optimizer's memory, by adapter and parameter."""
        tensors = {}
        for name, parameters in self.parameters.items():
            for place, parameter in enumerate(parameters):
                for key, value in self._optimizer_of[parameter].state.get(parameter, {}).items():
                    tensors[f"{name}.{place}.{key}"] = value.detach().cpu().contiguous().clone()
        save_file(tensors, path)

    def load(self, path: Path) -> None:
        tensors = load_file(path)
        for name, parameters in self.parameters.items():
            for place, parameter in enumerate(parameters):
                prefix = f"{name}.{place}."
                state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
                if state:
                    moved = {key: value.to(parameter) for key, value in state.items()}
                    self._optimizer_of[parameter].state[parameter] = moved
