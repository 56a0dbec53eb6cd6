"""From what happened to what is trained: rollouts and replies as rows for a trainer that knows no algorithm."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lfo.protocol.world_model import WorldModelExample
from lfo.types import Origin, Rollout, TrainingSample


def policy_sample(
    rollout: Rollout,
    advantage: float | None,
    *,
    adapters: tuple[str, ...],
    inline: Collection[str] | None = frozenset(),
) -> TrainingSample | None:
    """A rollout as a row: advantage on every sampled token and, inline, weight on what the tools in `inline` said.

    Advantage None: the policy does not learn from this rollout. An advantage of 0 still counts in the mean over
    tokens, and for the KL and entropy terms. The row ends with its last token of any weight; a rollout without one
    is no row.
    """
    sampled = [float(origin == Origin.SAMPLED and advantage is not None) for origin in rollout.origins]
    observed = [0.0] * len(rollout.tokens)
    for turn in rollout.turns:
        heard = turn.call is not None and not turn.predicted and (inline is None or turn.call.name in inline)
        if heard:
            for place in range(turn.observation_start, turn.observation_end):
                observed[place] = 1.0
    weighted = [place for place in range(len(rollout.tokens)) if sampled[place] or observed[place]]
    if not weighted:
        return None
    end = weighted[-1] + 1
    return TrainingSample(
        tokens=rollout.tokens[:end],
        adapters=adapters,
        logprobs=rollout.logprobs[:end],
        advantages=[(advantage or 0.0) * weight for weight in sampled[:end]],
        policy_weights=sampled[:end],
        world_model_weights=observed[:end],
    )


def world_model_sample(example: WorldModelExample, *, adapters: tuple[str, ...]) -> TrainingSample:
    nothing = [0.0] * len(example.tokens)
    return TrainingSample(
        tokens=example.tokens,
        adapters=adapters,
        logprobs=nothing,
        advantages=nothing,
        policy_weights=nothing,
        world_model_weights=example.weights,
    )


@dataclass(slots=True)
class ReplayBuffer:
    """Every reply ever heard, once each: the world does not change, so old replies stay true.

    What is drawn for a step is a function of the buffer and the given seeds, so a resumed run draws the same.
    """

    examples: dict[str, WorldModelExample] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.examples)

    def add(self, examples: Iterable[WorldModelExample]) -> int:
        """Keep what is new; answers how much that was. What look-ahead asked about once is marked for good: a rollout
        that was shown the expected reply may make the same call without asking."""
        before = len(self.examples)
        for example in examples:
            if example.asked or example.key not in self.examples:
                self.examples[example.key] = example
        return len(self.examples) - before

    def draw(
        self, count: int, seeds: Sequence[int], *, without: Collection[str] = (), asked_first: bool = False
    ) -> list[WorldModelExample]:
        """At most `count` different examples whose keys are not in `without`, all equally likely.

        With `asked_first`, calls that look-ahead asks about come before all others: the world model practises what
        it will be asked. (Three quarters of them learned half as fast as all of them: docs/LOG.md.)
        """
        keys = [key for key in self.examples if key not in without]
        shuffled = [keys[place] for place in np.random.default_rng(list(seeds)).permutation(len(keys))]
        if asked_first:
            shuffled.sort(key=lambda key: not self.examples[key].asked)
        return [self.examples[key] for key in shuffled[:count]]

    def arrays(self) -> dict[str, np.ndarray]:
        """The whole buffer as flat arrays, for a checkpoint. Weights are 0 or 1."""
        rows = list(self.examples.values())
        return {
            "lengths": np.array([len(row.tokens) for row in rows], dtype=np.int64),
            "tokens": np.array([token for row in rows for token in row.tokens], dtype=np.int32),
            "weights": np.array([weight for row in rows for weight in row.weights], dtype=np.uint8),
            "asked": np.array([row.asked for row in rows], dtype=np.uint8),
            "keys": np.frombuffer(b"".join(bytes.fromhex(row.key) for row in rows), dtype=np.uint8),
        }

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> ReplayBuffer:
        buffer = cls()
        ends = np.cumsum(arrays["lengths"])
        size = len(arrays["keys"]) // max(1, len(ends))
        for place, end in enumerate(ends):
            start = end - arrays["lengths"][place]
            key = arrays["keys"][place * size : (place + 1) * size].tobytes().hex()
            tokens = tuple(map(int, arrays["tokens"][start:end]))
            weights = tuple(map(float, arrays["weights"][start:end]))
            buffer.examples[key] = WorldModelExample(
                tokens=tokens, weights=weights, key=key, asked=bool(arrays["asked"][place])
            )
        return buffer
