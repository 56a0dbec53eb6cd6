"""The requirements of departments: one law for all companies, and the deviations of each company.

The requirement of a service has three parts:

    identifier   by industry and the department's group   a bank's money departments know you by account_number
    proof        by the department's kind                 every billing department wants billing_zip
    extra        by industry, only sensitive services     a bank's sensitive services want maiden_name on top

So an unseen combination still follows from its parts. With probability `DEVIATION` a department of a company asks for
another field instead of its identifier or its proof; nothing that an agent sees before its call depends on it.

Law 0 is written by hand, with names that make sense. Laws 1, 2, ... draw by seed which field is where in these tables,
so that common sense about names does not help: `PhoneCalls(law=3)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from lfo.env.seeds import stream
from lfo.env.worlds.phone.fields import ALTERNATIVE, FIELDS, PLAIN_FIELDS

DEVIATION = 0.1  # one company in ten, for each kind of department
_BLOCK = 10
WINDOW = 100  # ranks are counted within a window of this many companies

# Industry -> the identifier of its money departments, and that of its other departments.
IDENTIFIERS: dict[str, tuple[str, str]] = {
    "bank": ("account_number", "card_number"),
    "insurance": ("policy_number", "claim_number"),
    "telecom": ("contract_number", "mobile_number"),
    "energy": ("meter_number", "premise_code"),
    "clinic": ("member_number", "patient_number"),
    "airline": ("loyalty_number", "booking_code"),
}
EXTRAS: dict[str, str] = {
    "bank": "maiden_name",
    "insurance": "driver_license",
    "telecom": "account_pin",
    "energy": "landlord_name",
    "clinic": "doctor_name",
    "airline": "passport_number",
}
PROOFS: dict[str, str] = {
    "billing": "billing_zip",
    "refunds": "last_payment",
    "cancellations": "signing_date",
    "renewals": "email_address",
    "complaints": "service_password",
    "security": "security_answer",
    "repairs": "device_serial",
    "records": "tax_number",
    "moving": "previous_address",
    "appointments": "date_of_birth",
}
MONEY_KINDS = frozenset({"billing", "refunds", "cancellations", "renewals", "complaints"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirement:
    """`Requirement(identifier="account_number", proof="billing_zip", extra=None)`"""

    identifier: str
    proof: str
    extra: str | None

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(name for name in (self.identifier, self.proof, self.extra) if name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Law:
    """The tables above, or other tables of the same shape.

    `first_group`: the kinds of departments that use the first identifier of an industry.
    """

    identifiers: Mapping[str, tuple[str, str]]
    extras: Mapping[str, str]
    proofs: Mapping[str, str]
    first_group: frozenset[str]


_BY_HAND = Law(identifiers=IDENTIFIERS, extras=EXTRAS, proofs=PROOFS, first_group=MONEY_KINDS)


@lru_cache(maxsize=64)
def law_of(seed: int) -> Law:
    """Return law 0, or the law of that seed: the same fields, shuffled over industries and kinds of departments.

    As many proofs and extras as in law 0 have an alternative, and no identifier has one. So level 4, whose tasks need
    such a field, covers about as many rules as with law 0.
    """
    if not seed:
        return _BY_HAND
    rng = stream(seed, "law")
    plain, replaceable = list(PLAIN_FIELDS), list(ALTERNATIVE)
    rng.shuffle(plain)
    rng.shuffle(replaceable)
    extras, proofs = (
        [(replaceable if name in ALTERNATIVE else plain).pop() for name in table.values()] for table in (EXTRAS, PROOFS)
    )
    rng.shuffle(extras)
    rng.shuffle(proofs)
    return Law(
        identifiers={industry: (plain.pop(), plain.pop()) for industry in IDENTIFIERS},
        extras=dict(zip(EXTRAS, extras, strict=True)),
        proofs=dict(zip(PROOFS, proofs, strict=True)),
        first_group=frozenset(rng.sample(sorted(PROOFS), len(MONEY_KINDS))),
    )


def law(industry: str, kind: str, *, sensitive: bool, seed: int = 0) -> Requirement:
    """Return the requirement by the law of that seed, without deviations."""
    tables = law_of(seed)
    first, second = tables.identifiers[industry]
    return Requirement(
        identifier=first if kind in tables.first_group else second,
        proof=tables.proofs[kind],
        extra=tables.extras[industry] if sensitive else None,
    )


@lru_cache(maxsize=64)
def stand_ins(law_seed: int = 0) -> Mapping[str, frozenset[str]]:
    """Return the fields that a lenient department accepts, by industry: an identifier, the extra, or one of two or
    three other fields.

    All other fields are distributed over the industries, so that each field helps in exactly one.
    """
    tables = law_of(law_seed)
    own = {industry: (*pair, tables.extras[industry]) for industry, pair in tables.identifiers.items()}
    others = [name for name in FIELDS if not any(name in names for names in own.values())]
    stream(law_seed, "stand-ins").shuffle(others)
    return {
        industry: frozenset((*names, *others[index :: len(own)])) for index, (industry, names) in enumerate(own.items())
    }


def deviation_pool(industry: str, kind: str, law_seed: int = 0) -> tuple[str, ...]:
    """Return the fields that a deviating department may ask for instead, all with the same probability."""
    own = law(industry, kind, sensitive=True, seed=law_seed).fields
    return tuple(name for name in PLAIN_FIELDS if name not in own)


def deviation(
    seed: int, company: int, rank: int, industry: str, kind: str, law_seed: int = 0
) -> tuple[str, str] | None:
    """Return the (part, field) that this company changes in its department of this kind, or None.

    `rank` counts the companies before it with such a department. Exactly one in ten consecutive ones deviates, for each
    kind independently. So every department deviates with probability `DEVIATION`, the departments of a company are
    independent, and the realised rate of a world stays close to `DEVIATION`.
    """
    window = company // WINDOW
    block, index = divmod(rank, _BLOCK)
    if stream(seed, "deviation", kind, window, block).randrange(_BLOCK) != index:
        return None
    rng = stream(seed, "deviation", kind, "company", company)
    part = rng.choice(("identifier", "proof"))
    return part, rng.choice(deviation_pool(industry, kind, law_seed))
