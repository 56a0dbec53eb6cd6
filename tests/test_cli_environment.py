"""`lfo generate`, `lfo check-env`, `lfo play` and `lfo bench env`, as a user runs them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bounds as check_module
from lfo.cli import main
from lfo.cli.play import to_message, values_in
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.env.worlds.phone.generator import load
from lfo.env.worlds.phone.players import informed_form
from lfo.env.worlds.phone.world import company

ROOT = Path(__file__).parents[1]
SMALL = ("--num-companies", "12", "--num-train-tasks", "10", "--num-val-tasks", "5", "--levels", "1-2")


@pytest.fixture
def lfo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `lfo ARGUMENTS` in this process: exit code, stdout, stderr."""

    def run(*arguments: str, typed: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lfo", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return run


def test_generate_writes_a_folder_and_says_what_is_in_it(lfo: Any, tmp_path: Path) -> None:
    data = tmp_path / "data"
    code, out, err = lfo("generate", *SMALL, "--output-dir", str(data), "--seed", "3")
    assert (code, err) == (0, "")
    assert "train: 10 tasks; information ceiling: level 1 100.0%, level 2 9" in out
    assert load(data).options.seed == 3
    code, out, _ = lfo("generate", *SMALL, "--output-dir", str(data), "--seed", "3", "--json")
    assert code == 0
    assert json.loads(out) == json.loads((data / "manifest.json").read_text())
    code, out, err = lfo("generate", *SMALL, "--output-dir", str(data), "--seed", "4")
    assert (code, out) == (2, "")
    assert "--force" in err
    assert err.count("\n") == 1
    assert lfo("generate", *SMALL, "--output-dir", str(data), "--seed", "4", "--force")[0] == 0
    assert load(data).options.seed == 4


def test_the_script_takes_the_same_options_in_snake_case(tmp_path: Path) -> None:
    options = ["--num_companies", "12", "--num_train_tasks=10", "--num_val_tasks", "5", "--levels", "1-2"]
    subprocess.run(
        [sys.executable, ROOT / "scripts" / "generate_environment.py", *options, "--output_dir=my_data"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONHASHSEED": "99"},
        check=True,
        capture_output=True,
    )
    assert len(load(tmp_path / "my_data").tasks["train"]) == 10


def test_check_env_answers_in_json_and_in_a_table(lfo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = str(tmp_path / "data")
    lfo("generate", *SMALL, "--output-dir", data)
    small_check = check_module.check
    monkeypatch.setattr(check_module, "check", lambda *a, **k: small_check(*a, **k, tasks_per_level=30))
    code, out, _ = lfo("bench", "bounds", "--data", data, "--json")
    result = json.loads(out)
    assert (code, result["ok"]) == (0, True)
    assert result["players"]["reader"]["1"]["success"] == 1.0
    code, out, _ = lfo("bench", "bounds", "--data", data)
    assert code == 0
    assert "All bounds hold." in out
    monkeypatch.setattr(check_module, "bound_problems", lambda *_: ["a bound [red] is broken"])
    code, out, _ = lfo("bench", "bounds", "--data", data)
    assert code == 1
    assert "BROKEN: a bound [red] is broken" in out


def test_bad_data_is_exit_2_with_file_and_line(lfo: Any, tmp_path: Path) -> None:
    code, out, err = lfo("bench", "bounds", "--data", str(tmp_path / "nowhere"))
    assert (code, out) == (2, "")
    assert "lfo generate" in err
    data = tmp_path / "data"
    lfo("generate", *SMALL, "--output-dir", str(data))
    (data / "train.jsonl").write_bytes((data / "train.jsonl").read_bytes()[:-30])
    for command in (("bench", "bounds", "--data", str(data)), ("play", "--data", str(data))):
        code, out, err = lfo(*command)
        assert (code, out) == (2, "")
        assert "train.jsonl, line 10: " in err
        assert err.count("\n") == 1


def test_a_person_can_win(lfo: Any) -> None:
    task = next(task for task in PhoneCalls().tasks("train") if task.level == 3)
    form = informed_form(task)
    numbers = [company(0, task.company).department(errand.kind).number for errand in task.errands]
    typed = "\n".join(
        [
            "help",
            f"search {task.company_name}",
            "nonsense",
            f"form {', '.join(form)}",
            f"call {numbers[0]} {' '.join(form)}",
            "history",
            f"call {numbers[1]} {' '.join(form)} reference_number",
        ]
    )
    code, out, err = lfo("play", "--task", task.id, typed=typed)
    assert (code, err) == (0, "")
    assert task.goal in out
    assert company(0, task.company).directory() in out
    assert "There is no command 'nonsense'" in out
    assert f"you: call {numbers[0]}" in out
    assert "Success: your user is happy.\n2 of 4 calls, 0 mistakes." in out


def test_a_person_can_lose_and_is_told_why(lfo: Any) -> None:
    code, out, _ = lfo("play", "--level", "2", "--seed", "1", typed='{"name": "fly", "arguments": {}}\nfields\nquit\n')
    assert code == 0
    assert 'There is no tool "fly"' in out
    assert "account_number, card_number" in out
    assert "Failed: 0 of 1 done." in out
    assert "What was wanted:" in out
    assert lfo("play", "--level", "2", "--seed", "1")[1].splitlines()[0] == out.splitlines()[0]


def test_play_refuses_what_does_not_exist(lfo: Any) -> None:
    assert lfo("play", "--task", "nothing")[0] == 2
    assert lfo("play", "--level", "9")[0] == 2


def test_commands_become_tool_calls() -> None:
    known = {"account_number": "12345678"}
    assert to_message("call 555-1234 account_number billing_zip=12345", known) == (
        '<tool_call>\n{"name": "make_phone_call", "arguments": {"phone_number": "555-1234", '
        '"auth_info": {"account_number": "12345678", "billing_zip": "12345"}}}\n</tool_call>'
    )
    assert to_message("call", known) is not None
    assert to_message("dance", known) is None
    assert values_in('{"account_number": "1", "unavailable": ["billing_zip"]}') == {"account_number": "1"}
    assert values_in("Good. Your reference number is R1234.") == {"reference_number": "R1234"}
    assert values_in("[1]") == values_in("hello") == {}


def test_bench_env_has_its_keys(lfo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import environment

    monkeypatch.setattr(environment, "TASKS", 100)
    monkeypatch.setattr(environment, "REPEATS", 2)
    code, out, _ = lfo("bench", "env", "--json")
    result = json.loads(out)
    assert code == 0
    assert set(result) == {"tool_calls_per_second", "generate_seconds"}
    assert result["tool_calls_per_second"] > 2_000  # the figures are for `lfo bench env` on an idle machine
    assert 0 < result["generate_seconds"] < 60
    assert "tool calls a second" in lfo("bench", "env")[1]


def test_the_examples_of_the_documentation_run() -> None:
    text = (ROOT / "docs" / "ENVIRONMENT.md").read_text()
    blocks = [block.partition("```")[0] for block in text.split("```python\n")[1:]]
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "docs/ENVIRONMENT.md", "exec", dont_inherit=True), {"__name__": __name__})
