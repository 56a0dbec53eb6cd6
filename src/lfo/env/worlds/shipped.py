"""The table of the environments that ship with the package; none of them is imported before it is made."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple


class Shipped(NamedTuple):
    place: str  # module:Class
    arguments: Mapping[str, Any]  # the defaults of env_args

    @property
    def made_by(self) -> type:
        module, _, name = self.place.partition(":")
        return getattr(import_module(module), name)


SHIPPED: Mapping[str, Shipped] = {
    "phone-calls": Shipped("lfo.env.worlds.phone.environment:PhoneCalls", {"levels": [2]}),
    "oracle-codes": Shipped("lfo.env.worlds.oracle:OracleCodes", {}),
}
