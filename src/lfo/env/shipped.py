"""The table of the environments that ship with the package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lfo.env.oracle import OracleCodes
from lfo.env.phone_calls import PhoneCalls


class Shipped(NamedTuple):
    made_by: type
    arguments: Mapping[str, Any]  # the defaults of env_args


SHIPPED: Mapping[str, Shipped] = {
    "phone-calls": Shipped(PhoneCalls, {"levels": [2]}),
    "oracle-codes": Shipped(OracleCodes, {}),
}
