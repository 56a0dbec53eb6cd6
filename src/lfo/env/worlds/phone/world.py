"""Companies: a name, an industry, departments with services and phone numbers, and hidden rules.

A company is a pure function of (seed, index, law). The directory shows departments, numbers and services, but never the
requirements of a department.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache

from lfo.env.seeds import stream
from lfo.env.worlds.phone.rules import IDENTIFIERS, WINDOW, Requirement, deviation, law

INDUSTRIES: tuple[str, ...] = tuple(IDENTIFIERS)
UNSEEN = 1_000_000  # index of the first company that no training task uses


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """`Service(name="invoice copy", sensitive=False)`; its last word is shared with other departments' services."""

    name: str
    sensitive: bool


# Kind of department -> its plain and its sensitive service. The last words repeat across departments on purpose: an
# "invoice copy" and a "contract copy" look alike but belong to different departments.
SERVICES: dict[str, tuple[Service, Service]] = {
    kind: (Service(name=plain, sensitive=False), Service(name=sensitive, sensitive=True))
    for kind, (plain, sensitive) in {
        "billing": ("invoice copy", "payment change"),
        "refunds": ("refund status", "refund payout"),
        "cancellations": ("contract end date", "deposit payout"),
        "renewals": ("renewal date", "tariff change"),
        "complaints": ("complaint status", "complaint payout"),
        "security": ("alert status", "password exchange"),
        "repairs": ("repair date", "device exchange"),
        "records": ("contract copy", "full file copy"),
        "moving": ("moving date", "address change"),
        "appointments": ("appointment date", "appointment change"),
    }.items()
}
_SERVICE_NAMES: dict[str, str] = {kind: ", ".join(each.name for each in pair) for kind, pair in SERVICES.items()}

# Seven kinds for each industry. The last of each row exists in training directories, but no training task needs it:
# the combination of that industry and kind is held out for `test_unseen_rules`.
KINDS: dict[str, tuple[str, ...]] = {
    "bank": ("billing", "refunds", "security", "records", "moving", "complaints", "appointments"),
    "insurance": ("refunds", "cancellations", "records", "repairs", "appointments", "renewals", "moving"),
    "telecom": ("cancellations", "renewals", "repairs", "moving", "security", "complaints", "billing"),
    "energy": ("billing", "renewals", "moving", "repairs", "appointments", "cancellations", "security"),
    "clinic": ("billing", "complaints", "records", "appointments", "security", "refunds", "repairs"),
    "airline": ("refunds", "complaints", "security", "records", "cancellations", "renewals", "appointments"),
}
HELD_OUT_RULES: frozenset[tuple[str, str]] = frozenset((industry, kinds[-1]) for industry, kinds in KINDS.items())

# fmt: off
_SYLLABLES = (
    "al", "bre", "cor", "dun", "est", "far", "gor", "hal", "il", "kes", "lor", "mar",
    "nor", "os", "per", "qui", "rol", "sel", "tur", "ven", "wex", "yar", "zan",
)
# fmt: on
_NAMES = len(_SYLLABLES) ** 3  # three syllables; 7919 is coprime to it, so that no two companies share a name
_SUFFIXES = {
    "bank": ("Bank", "Savings"),
    "insurance": ("Insurance", "Mutual"),
    "telecom": ("Telecom", "Mobile"),
    "energy": ("Energy", "Power"),
    "clinic": ("Clinic", "Health"),
    "airline": ("Airlines", "Air"),
}
_DEPARTMENT_SUFFIXES = ("", " Desk", " Team", " Office", " Line")


@dataclass(frozen=True, kw_only=True, slots=True)
class Department:
    """`Department(kind="billing", name="Billing Desk", number="555-0147", rules=(plain, sensitive))`

    `rules` is hidden: the requirements of the plain and of the sensitive service, with deviations.
    """

    kind: str
    name: str
    number: str
    rules: tuple[Requirement, Requirement]

    @property
    def services(self) -> tuple[Service, Service]:
        return SERVICES[self.kind]

    def requirement(self, service: str) -> Requirement:
        """Return the requirement of this department for a service, with its deviation."""
        return self.rules[[each.name for each in self.services].index(service)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Company:
    index: int
    name: str
    industry: str
    departments: tuple[Department, ...]
    law: int = 0  # the seed of the law that its departments follow

    @property
    def unseen(self) -> bool:
        return self.index >= UNSEEN

    def department(self, kind: str) -> Department:
        return next(department for department in self.departments if department.kind == kind)

    def directory(self, *, moved: str | None = None, moved_number: str = "") -> str:
        """Return what `search_company` shows; `moved`: the kind whose listed number is old."""
        lines = [f"{self.name}, {self.industry}"]
        for department in self.departments:
            number = moved_number if department.kind == moved else department.number
            lines.append(f"{department.name} {number}: {_SERVICE_NAMES[department.kind]}")
        return "\n".join(lines)


@lru_cache(maxsize=65536)
def _kinds(seed: int, index: int) -> tuple[str, ...]:
    """Return three to six departments of the industry, and always the one held out for unseen rules."""
    rng = stream(seed, "departments", index)
    *usual, held_out = KINDS[INDUSTRIES[index % len(INDUSTRIES)]]
    kinds = [*rng.sample(usual, rng.randint(3, 6)), held_out]
    rng.shuffle(kinds)
    return tuple(kinds)


def _rules(seed: int, index: int, kind: str, law_seed: int) -> tuple[Requirement, Requirement]:
    """Return the requirements of the plain and the sensitive service, with this company's deviation, if any."""
    industry = INDUSTRIES[index % len(INDUSTRIES)]
    rank = sum(kind in _kinds(seed, other) for other in range(index - index % WINDOW, index))
    changed = deviation(seed, index, rank, industry, kind, law_seed)
    change = {changed[0]: changed[1]} if changed else {}
    plain, sensitive = (law(industry, kind, sensitive=which, seed=law_seed) for which in (False, True))
    return dataclasses.replace(plain, **change), dataclasses.replace(sensitive, **change)


@lru_cache(maxsize=4096)
def company(seed: int, index: int, law_seed: int = 0) -> Company:
    """Return the company of that index in the world of that seed. The law changes only hidden facts."""
    rng = stream(seed, "company", index)
    industry = INDUSTRIES[index % len(INDUSTRIES)]
    number = (index % UNSEEN + (_NAMES // 2 if index >= UNSEEN else 0)) * 7919 % _NAMES
    stem = "".join(_SYLLABLES[number // len(_SYLLABLES) ** power % len(_SYLLABLES)] for power in range(3))
    kinds = _kinds(seed, index)
    numbers = rng.sample(range(1000, 10_000), len(kinds))
    return Company(
        index=index,
        name=f"{stem.capitalize()} {rng.choice(_SUFFIXES[industry])}",
        industry=industry,
        departments=tuple(
            Department(
                kind=kind,
                name=kind.capitalize() + rng.choice(_DEPARTMENT_SUFFIXES),
                number=f"555-{number}",
                rules=_rules(seed, index, kind, law_seed),
            )
            for kind, number in zip(kinds, numbers, strict=True)
        ),
        law=law_seed,
    )
