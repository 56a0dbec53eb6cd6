"""Swapped names in successes: the same in the whole row, never in what the agent decided, never a control token."""

from __future__ import annotations

from itertools import chain, groupby

import pytest

from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.protocol.chat import ChatCodec
from lfo.rows.successes import Renaming, Success
from lfo.types import Message
from small_runs import small_trainer, tokenizer
from small_tokenizers import qwen3_tokenizer

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
    (found,) = Renaming(tokenizer(), chance=chance).of([success], [*known, success], (seed,))
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
    original = row(text, "form account_number")
    found = renamed(original)
    assert found != original
    assert found.tokens.count(END) == 2


def test_a_name_in_unusual_tokens_stays():
    """As a model samples them: letter by letter, where the tokenizer has a longer token."""
    letters = tuple(token for letter in "Zylomor" for token in CODEC.encode(letter))
    assert list(letters) != CODEC.encode("Zylomor")
    usual = row("Call Zylomor.", "x")
    odd = Success(tokens=(*usual.tokens, *letters, END), sampled=usual.sampled + (True,) * (len(letters) + 1))
    assert renamed(odd) == odd
    assert renamed(usual) != usual


def test_what_an_agent_decides_elsewhere_is_no_name_though_a_task_says_it_first():
    """Else `account` would be swapped here, and would take the place of other names."""
    said = row("Call Newcomer, they want the account.", "form account_number", "account_number of Newcomer", "x")
    polite = row("Call Newcomer kindly.", "form account_number", "ok", "x")
    for seed in range(20):
        task, form, *_ = texts_of(renamed(said, seed, known=[*KNOWN, polite]))
        assert task.endswith(" account.")
        assert form == "form account_number"
        assert "account" not in texts_of(renamed(polite, seed, known=[*KNOWN, said]))[0]


def test_a_name_that_the_agent_writes_in_another_form_stays():
    for seed in range(10):
        task, call = texts_of(renamed(row("Call Newcomer, number 555-1000.", "call newcomer 5551000"), seed))
        assert (task, call) == ("Call Newcomer, number 555-1000.", "call newcomer 5551000")


def test_two_names_of_a_row_become_two_others():
    first, second = COMPANIES[:2]
    for seed in range(30):
        task, _ = texts_of(renamed(row(f"Call {first} or {second}.", "x"), seed, known=KNOWN[2:8]))
        found = task.removesuffix(".").split()[1::2]
        assert len({*found, first, second}) == 4, "neither each other nor those that were there"


def test_a_tokenizer_that_would_join_the_end_of_a_text_with_the_template():
    """Qwen's has a token for a full stop and a line break, which a reply and the template after it never become."""
    qwen3 = qwen3_tokenizer()
    codec = ChatCodec(qwen3, PhoneCalls().tools())

    def chat(company: str) -> Success:
        before = codec.opening([Message(role="user", content=f"Call {company}.")])
        action, after = codec.encode_message("form account"), codec.after_action(f"This is {company}.", stopped=False)
        said = codec.encode_message(f"call {company}")
        sampled = [False] * len(before.ids), [True] * len(action), [False] * len(after.ids), [True] * len(said)
        return Success(tokens=(*before.ids, *action, *after.ids, *said), sampled=tuple(chain(*sampled)))

    known = [chat(company) for company in COMPANIES]
    found = Renaming(qwen3, chance=1.0).of(known, known, (0,))
    for company, success in zip(COMPANIES, found, strict=True):
        text = str(qwen3.decode(list(success.tokens)))
        assert company not in text
        assert sum(text.count(each) for each in COMPANIES) == 3


def test_a_run_imitates_renamed_successes():
    settings = ("levels=2", "rollout.max_turns=5", "lookahead_source=truth", "internalise.rows=2")
    rows = {}
    for chance in (0.0, 1.0):
        trainer = small_trainer(*settings, f"internalise.swap_names={chance}")
        trainer.mini_batches.successes.successes = {str(index): success for index, success in enumerate(KNOWN)}
        drawn = trainer.mini_batches._imitation_samples(0, None)
        rows[chance] = {tuple(each.tokens) for part in drawn for each in part}
    assert rows[0.0] <= {success.tokens for success in KNOWN}
    assert rows[1.0]
    assert not rows[1.0] & rows[0.0]
