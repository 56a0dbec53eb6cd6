"""How the ranks of a distributed run share a mini-batch. Needs no verl."""

from __future__ import annotations

from lfo.engines.verl.learner import empty_part, rounds
from lfo.types import TrainingSample


def row(
    length: int,
    *,
    policy: bool = False,
    world: bool = False,
    imitation: bool = False,
    adapters: tuple[str, ...] = ("policy",),
):
    def weights(on: bool) -> tuple[float, ...]:
        return (0.0,) + (float(on),) * (length - 1)

    return TrainingSample(
        tokens=tuple(range(length)),
        adapters=adapters,
        logprobs=(0.0,) * length,
        advantages=(0.5,) * length,
        policy_weights=weights(policy),
        world_model_weights=weights(world),
        imitation_weights=weights(imitation) if imitation else (),
    )


def lengths(samples, ranks: int, tokens: int = 16) -> list[list[list[int]]]:
    return [
        [[len(each.tokens) for each in part] for part in parts] for parts in rounds(samples, ranks=ranks, tokens=tokens)
    ]


def test_the_example_of_the_docstring():
    samples = [row(length, policy=True) for length in (5, 9, 2, 7, 8, 5, 4)]
    assert lengths(samples, 2) == [[[9], [8]], [[7, 5], [5, 4]], [[2], [2]]]
    *_, (mine, theirs) = rounds(samples, ranks=2, tokens=16)
    assert any(mine[0].policy_weights)
    assert not any(theirs[0].policy_weights), "a rank without rows takes part with a row that trains nothing"


def test_every_row_is_computed_once_whatever_the_number_of_ranks():
    samples = [row(3 + n % 7, policy=n % 3 > 0, world=n % 3 == 0) for n in range(23)]
    for ranks in (1, 2, 3, 8):
        found = [each for parts in rounds(samples, ranks=ranks, tokens=20) for part in parts for each in part]
        trained = [each for each in found if any(each.policy_weights) or any(each.world_model_weights)]
        assert sorted(map(id, trained)) == sorted(map(id, samples))
        assert all(len(parts) == ranks for parts in rounds(samples, ranks=ranks, tokens=20))


def test_in_a_round_all_ranks_have_rows_of_one_adapter():
    samples = [
        *(row(4, policy=True) for _ in range(3)),
        *(row(4, world=True, adapters=("world_model",)) for _ in range(4)),
        *(row(4, imitation=True) for _ in range(3)),
        *(row(4, world=True) for _ in range(3)),
    ]
    for parts in rounds(samples, ranks=2, tokens=4):
        assert len({each.adapters for part in parts for each in part}) == 1, "also of a rank that has nothing to do"


def test_an_empty_part_copies_no_weight():
    stale = row(9, policy=True, world=True, imitation=True)
    part = empty_part(stale)
    assert part.adapters == stale.adapters
    assert len(part.tokens) == 2
    assert not any((*part.policy_weights, *part.world_model_weights, *part.imitation_weights, *part.advantages))
