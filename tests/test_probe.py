"""Cases for a world model: the shipped cases can be answered, and an error names the file and the case."""

from pathlib import Path

import pytest
import yaml

from lfo.cli.probe import _shipped
from lfo.env.worlds.oracle import OracleCodes
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.env.worlds.phone.reps import PHRASINGS
from lfo.errors import DataError, UsageError
from lfo.measure.probe import read_cases
from lfo.protocol.hermes import format_tool_call
from lfo.protocol.world_model import render_state
from lfo.types import ToolCall

CASE = {
    "name": "asks",
    "task": "Call Acme.",
    "before": [{"call": "search_company", "arguments": {"name": "Acme"}, "reply": 'Acme\n{"pin": "7"}'}],
    "call": "make_phone_call",
    "arguments": {"phone_number": "1", "auth_info": {}},
    "expect": {"category": "auth_failure", "reply": "YOUR (pin|account) number", "not": "done"},
}


def written(path: Path, *cases: object) -> Path:
    path.write_text(yaml.safe_dump({"cases": list(cases)}))
    return path


def test_a_state_is_built_as_in_training(tmp_path: Path):
    (case,) = read_cases(written(tmp_path / "cases.yaml", CASE))
    assert render_state(case.state(PhoneCalls())) == (
        "<|state|>\nTask: Call Acme.\nStep: 2\nPrevious Actions:\n"
        '- search_company("Acme"): Acme; {"pin": "7"}\nCollected Auth: {"pin": "7"}\n<|/state|>'
    )
    assert case.call.arguments == {"phone_number": "1", "auth_info": {}}


@pytest.mark.parametrize(
    ("reply", "problems"),
    [
        ("I have to ask you for your account number.", []),
        ("Good, the account number has gone through.", ["category", "YOUR"]),
        ("I have to ask you for your billing zip.", ["YOUR"]),
        ("Done: your account number", ["the environment would not say this", "must not say 'Done'"]),
        ("", ["the environment would not say this", "YOUR"]),
    ],
)
def test_what_is_wrong_with_a_reply_is_said(tmp_path: Path, reply: str, problems: list[str]):
    (case,) = read_cases(written(tmp_path / "cases.yaml", CASE))
    found = case.problems(reply, PhoneCalls())
    assert len(found) == len(problems)
    for problem, words in zip(found, problems, strict=True):
        assert words in problem


def test_the_shipped_cases_are_passed_by_what_reps_say_and_by_nothing_else():
    slots = {
        "fields": "your account number and your billing zip",
        "service": "invoice copy",
        "department": "Moving Team",
        "number": "555-1000",
    }
    special = {
        "a part of what was asked for, so the rep asks for the rest": "your billing zip",
        "the second of two departments without the reference, so the rep asks for it": "your reference number",
        "an insurance's cancellations department asks for policy number and signing date": (
            "your policy number and your signing date"
        ),
    }
    cases = read_cases(_shipped())
    assert {case.category for case in cases} == {
        "auth_failure",
        "success",
        "routing_violation",
        "lockout",
        "refusal",
    }
    for case in cases:
        own = slots | ({"fields": special[case.name]} if case.name in special else {})
        for category, phrasings in PHRASINGS.items():
            for phrasing in phrasings:
                problems = case.problems(phrasing.format(**own), PhoneCalls())
                assert (problems == []) == (category == case.category), (case.name, phrasing)


def test_the_shipped_cases_hold_in_the_real_world():
    """What every rep does, whatever a company wants: played in real tasks of the level that each case is about."""
    world = PhoneCalls(levels=(2,))
    for task in world.tasks("val")[:20]:
        answers = {}
        for name in ("no details", "wrong department", "unknown number", "second call"):
            environment = PhoneCalls(levels=(2,))
            environment.reset(task)
            right = environment.company.department(task.errands[0].kind).number
            wrong = next(d.number for d in environment.company.departments if d.kind != task.errands[0].kind)
            number = {"wrong department": wrong, "unknown number": "555-0000"}.get(name, right)
            call = ToolCall(name="make_phone_call", arguments={"phone_number": number, "auth_info": {}})
            for _ in range(2 if name == "second call" else 1):
                environment.step(format_tool_call(call))
            answers[name] = environment.category
        assert answers == {
            "no details": "auth_failure",
            "wrong department": "routing_violation",
            "unknown number": "refusal",
            "second call": "lockout",
        }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"expect": {}}, "case 2 (asks 2): expect needs category, reply or not"),
        ({"expect": {"reply": "("}}, "case 2 (asks 2): reply is not a valid regular expression"),
        ({"expect": {"catgory": "x"}}, "case 2 (asks 2): expect has no 'catgory'"),
        ({"call": 7}, "case 2 (asks 2): call must be a text, not 7"),
        ({"arguments": ["x"]}, "case 2 (asks 2): arguments must be a mapping"),
        ({"arguments": {"day": yaml.safe_load("2020-01-01")}}, "case 2 (asks 2): the arguments of make_phone_call"),
        ({"before": [{"call": "x"}]}, "case 2 (asks 2): reply must be a text"),
        ({"before": "x"}, "case 2 (asks 2): before must be a list"),
        ({"surprise": 1}, "case 2 (asks 2): a case has no 'surprise'"),
        ({"name": "asks"}, "case 2 (asks): another case has this name"),
        ({"task": None}, "case 2 (asks 2): task must be a text"),
    ],
)
def test_a_bad_case_is_named(tmp_path: Path, change: dict[str, object], words: str):
    path = written(tmp_path / "cases.yaml", CASE, CASE | {"name": "asks 2"} | change)
    with pytest.raises(DataError) as caught:
        read_cases(path)
    assert str(caught.value).startswith(f"{path}, {words}")


@pytest.mark.parametrize("text", ["", "cases: []", "cases: x", "- x", "cases:\n - x", "cases: [", "cases: *none"])
def test_a_file_that_holds_no_cases(tmp_path: Path, text: str):
    (tmp_path / "cases.yaml").write_text(text)
    with pytest.raises(DataError, match=r"cases\.yaml"):
        read_cases(tmp_path / "cases.yaml")


def test_yaml_makes_no_objects(tmp_path: Path):
    (tmp_path / "cases.yaml").write_text("cases: !!python/object/apply:os.getcwd []")
    with pytest.raises(DataError, match="not valid YAML"):
        read_cases(tmp_path / "cases.yaml")


def test_a_category_needs_an_environment_that_reads_replies(tmp_path: Path):
    class Mute:
        tasks = tools = reset = step = OracleCodes.tasks

    (case,) = read_cases(written(tmp_path / "cases.yaml", CASE))
    with pytest.raises(UsageError, match="'asks' expects a category"):
        case.problems("x", Mute())  # type: ignore[arg-type]
