"""The couplings: which adapters the policy and the world model use. Everything else follows from this table.

    coupling    the policy runs on    the world model runs on
    separate    base + policy         base + world_model
    shared      base + policy         base + policy (the one adapter)

Importable without torch: config, training and export use the same table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from lfo.errors import ConfigError
from lfo.settings import did_you_mean

POLICY = "policy"
WORLD_MODEL = "world_model"


@dataclass(frozen=True, kw_only=True, slots=True)
class Coupling:
    """The adapters in the forward pass of each role: one, or none.

    >>> COUPLINGS["separate"].adapters, COUPLINGS["shared"].adapters
    (('policy', 'world_model'), ('policy',))
    """

    policy: tuple[str, ...] = (POLICY,)
    world_model: tuple[str, ...]  # empty: there is none

    @property
    def adapters(self) -> tuple[str, ...]:
        """All adapters: they are trained, saved and sent to rollout servers."""
        return tuple(dict.fromkeys(self.policy + self.world_model))

    @property
    def is_shared(self) -> bool:
        """Whether one adapter is both policy and world model, so that each loss trains what the other uses."""
        return self.policy == self.world_model


COUPLINGS: Mapping[str, Coupling] = {
    "separate": Coupling(world_model=(WORLD_MODEL,)),
    "shared": Coupling(world_model=(POLICY,)),
}


def coupling_of(name: str, *, with_world_model: bool = True) -> Coupling:
    """Return the coupling of a run; without a world model, only with the adapter of the policy.

    >>> coupling_of("separate", with_world_model=False).adapters
    ('policy',)
    """
    if name not in COUPLINGS:
        names = tuple(COUPLINGS)
        raise ConfigError(f"coupling must be one of {', '.join(names)}, not {name!r}{did_you_mean(name, names)}")
    return COUPLINGS[name] if with_world_model else dataclasses.replace(COUPLINGS[name], world_model=())
