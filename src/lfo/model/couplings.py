"""The couplings: which adapters the policy and the world model use. Everything else follows from this table.

    coupling    the policy runs on                  the world model runs on
    separate    base + policy                       base + world_model
    shared      base + policy                       base + policy (the one adapter)
    stacked     base + world_model* + policy        base + world_model          * the policy loss does not train it

A new coupling is a new row. Importable without torch: config, training and export use the same table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lfo.errors import ConfigError
from lfo.settings import did_you_mean

POLICY = "policy"
WORLD_MODEL = "world_model"


@dataclass(frozen=True, kw_only=True, slots=True)
class Coupling:
    """The adapters in the forward pass of each role.

    >>> COUPLINGS["stacked"].adapters, COUPLINGS["stacked"].spared
    (('policy', 'world_model'), ('world_model',))
    """

    policy: tuple[str, ...]
    world_model: tuple[str, ...]  # empty: there is none
    spared: tuple[str, ...] = ()  # adapters in the policy's forward that the policy loss does not train

    @property
    def adapters(self) -> tuple[str, ...]:
        """All adapters: they are trained, saved and sent to rollout servers."""
        return tuple(name for name in (POLICY, WORLD_MODEL) if name in self.policy + self.world_model)

    @property
    def is_shared(self) -> bool:
        """Whether one adapter is both policy and world model."""
        return self.policy == self.world_model

    @property
    def summed(self) -> int:
        """The number of adapters in the policy's forward; a served or exported policy has this multiple of the rank."""
        return len(self.policy)

    @property
    def room(self) -> int:
        """How many times the rank a server must support: policy and world model are one LoRA each."""
        return max(len(self.policy), len(self.world_model))

    @property
    def meets(self) -> bool:
        """Whether the world-model loss trains an adapter that the policy uses."""
        return not set(self.policy).isdisjoint(self.world_model)

    @property
    def reads_inline(self) -> bool:
        """Whether the policy's forward can compute the world-model loss, because it uses the world model's adapters."""
        return bool(self.world_model) and set(self.world_model) <= set(self.policy)


COUPLINGS: Mapping[str, Coupling] = {
    "separate": Coupling(policy=(POLICY,), world_model=(WORLD_MODEL,)),
    "shared": Coupling(policy=(POLICY,), world_model=(POLICY,)),
    "stacked": Coupling(policy=(WORLD_MODEL, POLICY), world_model=(WORLD_MODEL,), spared=(WORLD_MODEL,)),
}


def coupling_of(name: str, *, with_world_model: bool = True) -> Coupling:
    """Return the coupling of a run; without a world model, only with the adapters of the policy.

    >>> coupling_of("separate", with_world_model=False).adapters
    ('policy',)
    """
    if name not in COUPLINGS:
        names = tuple(COUPLINGS)
        raise ConfigError(f"coupling must be one of {', '.join(names)}, not {name!r}{did_you_mean(name, names)}")
    row = COUPLINGS[name]
    # If the policy uses the world model's adapter, it exists in any case.
    return row if with_world_model or WORLD_MODEL in row.policy else dataclasses.replace(row, world_model=())


def names_where(has: Callable[[Coupling], bool]) -> list[str]:
    """Return the names of the couplings with a property, for messages.

    >>> names_where(lambda row: row.reads_inline)
    ['shared', 'stacked']
    """
    return [name for name, row in COUPLINGS.items() if has(row)]
