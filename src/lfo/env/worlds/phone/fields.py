"""The details that departments may ask for: 34 fields with their labels and value generators.

`REFERENCE` is not a detail of the user: a department gives it, and the next department asks for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

REFERENCE = "reference_number"

# fmt: off
_SYLLABLES = (
    "ba", "cor", "dan", "el", "fir", "gan", "hol", "is", "kar", "lun", "mor", "nal", "or", "pel", "ros", "tam",
)
# fmt: on


def _digits(count: int) -> Callable[[random.Random], str]:
    return lambda rng: str(rng.randrange(10 ** (count - 1), 10**count))


def _code(rng: random.Random) -> str:
    return rng.choice("ABCDEFGHKLMNPRTUVWXY") + str(rng.randrange(10_000, 100_000))


def _date(rng: random.Random) -> str:
    return f"{rng.randrange(1950, 2024)}-{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d}"


def _name(rng: random.Random) -> str:
    return "".join(rng.choice(_SYLLABLES) for _ in range(4)).capitalize()


def _amount(rng: random.Random) -> str:
    return f"{rng.randrange(100, 1000)}.{rng.randrange(100):02d}"


def _address(rng: random.Random) -> str:
    return f"{rng.randrange(1, 1000)} {_name(rng)} Street"


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """`Field(name="account_number", value=...)`; tools use the name, reps say its label (`label_of`)."""

    name: str
    value: Callable[[random.Random], str]
    alternative: str | None = None  # a field that is accepted instead


_ALL = (
    # what a customer is known by, two for each industry
    Field(name="account_number", value=_digits(8)),
    Field(name="card_number", value=_digits(8)),
    Field(name="policy_number", value=_code),
    Field(name="claim_number", value=_code),
    Field(name="mobile_number", value=_digits(8)),
    Field(name="contract_number", value=_code),
    Field(name="meter_number", value=_digits(8)),
    Field(name="premise_code", value=_code),
    Field(name="member_number", value=_code),
    Field(name="patient_number", value=_digits(6)),
    Field(name="booking_code", value=_code),
    Field(name="loyalty_number", value=_digits(8)),
    # what proves it to a department, one for each kind
    Field(name="billing_zip", value=_digits(5)),
    Field(name="last_payment", value=_amount),
    Field(name="security_answer", value=_name, alternative="callback_code"),
    Field(name="device_serial", value=_code, alternative="purchase_number"),
    Field(name="signing_date", value=_date, alternative="invoice_number"),
    Field(name="tax_number", value=_digits(8), alternative="employer_name"),
    Field(name="previous_address", value=_address),
    Field(name="date_of_birth", value=_date),
    Field(name="service_password", value=_name),
    Field(name="email_address", value=lambda rng: f"{_name(rng).lower()}{rng.randrange(10, 100)}@mail.example"),
    # what a sensitive service wants on top, one for each industry
    Field(name="maiden_name", value=_name),
    Field(name="driver_license", value=_code, alternative="vehicle_plate"),
    Field(name="account_pin", value=_digits(5)),
    Field(name="landlord_name", value=_name),
    Field(name="doctor_name", value=_name),
    Field(name="passport_number", value=_code, alternative="identity_card"),
    # accepted instead of another
    Field(name="callback_code", value=_digits(6)),
    Field(name="purchase_number", value=_digits(8)),
    Field(name="invoice_number", value=_digits(8)),
    Field(name="employer_name", value=_name),
    Field(name="vehicle_plate", value=_code),
    Field(name="identity_card", value=_code),
)

FIELDS: dict[str, Field] = {field.name: field for field in _ALL}
ALTERNATIVE: dict[str, str] = {field.name: field.alternative for field in _ALL if field.alternative}

# A company that deviates from the law asks for one of these instead. They have no alternative and are not one, so a
# deviation never makes a form longer than the law does.
PLAIN_FIELDS: tuple[str, ...] = tuple(
    name for name in FIELDS if name not in ALTERNATIVE and name not in ALTERNATIVE.values()
)


def label_of(name: str) -> str:
    return name.replace("_", " ")
