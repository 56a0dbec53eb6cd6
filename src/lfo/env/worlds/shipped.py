"""The table of the environments that ship with the package; none of them is imported before it is made."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple


class Shipped(NamedTuple):
    place: str  # module:Class
    arguments: Mapping[str, Any]  # the defaults of env_args
    splits: Mapping[str, str]  # what a reader should know about the tasks of each

    @property
    def made_by(self) -> type:
        module, _, name = self.place.partition(":")
        return getattr(import_module(module), name)


SHIPPED: Mapping[str, Shipped] = {
    "phone-calls": Shipped(
        "lfo.env.worlds.phone.environment:PhoneCalls",
        {"levels": [2]},
        {
            "val": "new tasks, known companies",
            "test_unseen_companies": "companies never seen in training",
            "test_unseen_rules": "rules never seen in training",
            "test_unseen_phrasing": "phrasings never seen in training",
        },
    ),
    "oracle-codes": Shipped("lfo.env.worlds.oracle:OracleCodes", {}, {}),
}
