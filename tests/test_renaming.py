"""Swapped names in successes: the same in the whole row, never in what the agent decided, never a control token."""

from __future__ import annotations

from itertools import groupby

import pytest

from lfo.protocol.chat import ChatCodec
from lfo.rollout.renaming import Renaming
from lfo.rollout.successes import Success
from small_runs import tokenizer

CODEC = ChatCodec(tokenizer())
END = CODEC.end_of_turn
COMPANIES = [
    f"{first}{second}" for first in ("Acme", "Zylo", "Orba", "Kest") for second in ("lan", "mor", "vex", "dun", "hal")
]


def row(*texts: str) -> Success:
    """Alternating texts of the environment and the agent, each message followed by the end of the turn."""
    tokens: list[int] = []
    sampled: list[bool] = []
    for index, text in enumerate(texts):
        ids = [*CODEC.encode(text), END]
        tokens += ids
        sampled += [index % 2 == 1] * len(ids)
    return Success(tokens=tuple(tokens), sampled=tuple(sampled))


def texts_of(success: Success) -> list[str]:
    pieces = groupby(zip(success.tokens, success.sampled, strict=True), key=lambda each: each[1])
    return [CODEC.decode([token for token, _ in piece]) for _, piece in pieces]


def success_of(company: str, field: str = "account_number") -> Success:
    return row(f"Call {company} for me.", f"form {field}", f"{field} of {company}", f"call {company} with {field}")


KNOWN = [success_of(company) for company in COMPANIES]


def renamed(success: Success, seed: int = 0, chance: float = 1.0, known: list[Success] = KNOWN) -> Success:
    ((found,),) = Renaming(tokenizer(), chance=chance).of([[success]], [*known, success], (seed,))
    return found


def test_a_name_becomes_another_one_in_the_whole_row():
    found = set()
    for seed in range(10):
        task, form, reply, call = texts_of(renamed(success_of("Newcomer"), seed))
        company = task.split()[1]
        found.add(company)
        assert (task, form) == (f"Call {company} for me.", "form account_number")
        assert (reply, call) == (f"account_number of {company}", f"call {company} with account_number")
    assert len(found) > 3
    assert found <= {*COMPANIES, "Newcomer"}


def test_what_the_agent_decided_stays_even_if_it_is_rare_and_the_environment_repeats_it():
    for seed in range(10):
        _, form, reply, call = texts_of(renamed(success_of("Newcomer", "passport_scan"), seed))
        assert form == "form passport_scan"
        assert reply.startswith("passport_scan of ")
        assert call.endswith(" with passport_scan")


def test_without_a_chance_nothing_changes_and_equal_seeds_give_equal_rows():
    assert renamed(KNOWN[0], chance=0.0) == KNOWN[0]
    assert renamed(KNOWN[0], 3) == renamed(KNOWN[0], 3)
    assert len({renamed(KNOWN[0], seed) for seed in range(10)}) > 3


@pytest.mark.parametrize("text", ["Acmelan said <|im_end|> and", "<|im_start|>system Acmelan"])
def test_text_that_looks_like_control_tokens_stays_text(text: str):
    found = renamed(row(text, "form account_number"))
    assert found.tokens.count(END) == 2
    assert len(found.tokens) == len(found.sampled)


def test_a_row_in_unusual_tokens_stays():
    """As a model samples them: letter by letter, where the tokenizer has a longer token."""
    letters = tuple(token for letter in "account" for token in CODEC.encode(letter))
    assert list(letters) != CODEC.encode("account")
    usual = row("Call Newcomer.", "x")
    said = (*letters, *CODEC.encode(" for Newcomer"), END)
    odd = Success(tokens=usual.tokens + said, sampled=usual.sampled + (True,) * len(said))
    assert renamed(odd) == odd
