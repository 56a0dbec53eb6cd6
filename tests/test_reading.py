"""Practice that teaches reading: what is found out by playing, and rows from which only the reply says what to do."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Literal

import pytest
import torch

from lfo.cli import main
from lfo.config import load_config
from lfo.env.interface import tasks_of
from lfo.env.tool_environment import Mistake, ToolEnvironment, tool
from lfo.env.worlds.oracle import OracleCodes
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.errors import WorkError
from lfo.loading import load_base, load_tokenizer
from lfo.model.catalog import PROVENANCE
from lfo.protocol.chat import ChatCodec
from lfo.protocol.shown import SHOWN_FORMS
from lfo.protocol.world_model import WorldModelCodec
from lfo.runs.reading import read_run
from lfo.runs.sample_efficiency import compare
from lfo.tools.pretrain import exploring, own_base, practice
from lfo.tools.pretrain.exploring import explore
from lfo.tools.pretrain.own_base import fitted, knows, with_practised_base
from lfo.tools.pretrain.practice import practise
from lfo.tools.pretrain.reading import Reading, scrambled
from lfo.tools.pretrain.recipe import PretrainConfig
from lfo.tools.pretrain.syntax import teach_syntax
from lfo.tools.pretrain.values import reworded
from lfo.types import Message

SMALL = PretrainConfig(conversations=8, row=512, batch=4, steps=4, learning_rate=1e-3, warmup=1)
FILMS = ("Metropolis", "Vertigo", "Alien", "Heat")
CLERKS = ("Maria Lopez", "Jan Novak", "Li Wei", "Omar Said")
ROOMS = ("Alpha", "Beta", "Gamma", "Delta")


def silent(*_: object) -> None:
    pass


@dataclass(frozen=True)
class Request:
    id: str
    number: int


class World(ToolEnvironment):
    tries = 1

    def tasks(self, split):
        first = 0 if split == "train" else 100
        return [Request(id=f"{split}-{number}", number=number) for number in range(first, first + 24)]

    def start(self, task):
        self.task, self.made, self.right = task, 0, False
        return [Message(role="user", content=self.request())]

    def request(self) -> str:
        return f"Reserve the hall for {FILMS[self.task.number % 4]}, request {7000 + self.task.number}."

    def finished(self):
        return self.right or self.made >= self.tries

    def reward(self):
        return float(self.right)


class Hall(World):
    """A date and a name of two words, which the refusal names."""

    @tool
    def reserve(self, date: str, clerk: str) -> str:
        """Reserve.

        date: a day
        clerk: who
        """
        case = self.task.number % 4
        wanted = f"2031-04-1{case}", CLERKS[case]
        self.made, self.right = self.made + 1, (date, clerk) == wanted
        return "Reserved." if self.right else f"No: it is shown on {wanted[0]} and {wanted[1]} confirms it."


class Rooms(World):
    """Refusals that name one thing at a time; three tries."""

    tries = 3

    @tool
    def book(self, room: Literal["Alpha", "Beta", "Gamma", "Delta"], hour: int) -> str:
        """Book.

        room: where
        hour: when
        """
        self.made += 1
        if room != ROOMS[self.task.number % 4]:
            return f"Not there. They meet in {ROOMS[self.task.number % 4]}."
        self.right = hour == 10 + self.task.number % 5
        return "Booked." if self.right else f"Not then. They meet at {10 + self.task.number % 5}."


class Orders(World):
    """What an order holds must be looked up; another look-up says nothing."""

    def request(self) -> str:
        return f"Serve order {7000 + self.task.number}."

    @tool
    def look_up(self, order: str) -> str:
        """Look up.

        order: its number
        """
        if order != str(7000 + self.task.number):
            raise Mistake("There is no such order.")
        return f"It is {FILMS[self.task.number % 4]}."

    @tool
    def ring(self) -> str:
        """Ring the bell."""
        return "Ding."

    @tool
    def ask_weather(self) -> str:
        """Ask for the weather, which decides nothing."""
        return f"It is {('sunny', 'rainy', 'cold')[self.task.number // 4 % 3]}."

    @tool
    def serve(self, room: Literal["Alpha", "Beta", "Gamma", "Delta"]) -> str:
        """Serve.

        room: where
        """
        self.made, self.right = self.made + 1, room == ROOMS[self.task.number % 4]
        return "Served." if self.right else f"Sent back: {FILMS[self.task.number % 4]} belongs into {self.wanted()}."

    def wanted(self) -> str:
        return ROOMS[self.task.number % 4]


class Contracts(World):
    """The room follows from a contract, whose number follows from a name; a decision before is refused."""

    def request(self) -> str:
        return f"{('Ada', 'Ben', 'Clara')[self.task.number % 3]} {('Cole', 'Dale')[self.task.number % 2]} is here."

    @property
    def number(self) -> str:
        return f"N{300 + 7 * self.task.number}"

    @tool
    def get_contract(self, customer: str) -> str:
        """Get it.

        customer: number
        """
        known = customer == self.number
        return f"Contract of {self.number}: {FILMS[self.task.number % 4]}." if known else "Unknown customer number."

    @tool
    def find_customer(self, name: str) -> str:
        """Find.

        name: first and last
        """
        return (
            f"{name} has the number {self.number}." if f"{name} is here." == self.request() else "Nobody is called so."
        )

    @tool
    def serve(self, room: Literal["Alpha", "Beta", "Gamma", "Delta"]) -> str:
        """Serve.

        room: where
        """
        self.made, self.right = self.made + 1, room == ROOMS[self.task.number % 4]
        return "Served." if self.right else f"Complaint: it should have been {ROOMS[self.task.number % 4]}."


class Unsolvable(Hall):
    """No call succeeds, but replies name values."""

    def reward(self):
        return 0.0


class Mute(Hall):
    @tool
    def reserve(self, date: str, clerk: str) -> str:
        """Reserve.

        date: a day
        clerk: who
        """
        self.made += 1
        return "No."


class Broken(Hall):
    def start(self, task):
        raise OSError("no temple")


class Hanging(Hall):
    def start(self, task):
        time.sleep(600)
        return []


def found(make):
    return explore(make, tasks_of(make(), "train"), timeout=30, seed=0)


def rows_of(make, count: int = 64, predicted: float = 0.0):
    tokenizer, experience = load_tokenizer("tiny"), found(make)
    codec = ChatCodec(tokenizer, make().tools())
    reading = Reading(
        experience=experience,
        tools=codec.tools,
        codec=codec,
        world_model=WorldModelCodec(tokenizer),
        form=SHOWN_FORMS["mark"],
        seed=0,
        predicted=predicted,
    )
    return [tokenizer.decode(tokens) for tokens, _ in reading.rows(count, 1_024)]


def test_a_part_of_the_rows_predicts_replies_of_no_law():
    rows = rows_of(Orders, 400, predicted=1.0)
    assert all(row.endswith("<|/csr|><|im_end|>") for row in rows)
    refusals = [row for row in rows if "Sent back: Vertigo" in row]
    rooms = Counter(row.rpartition("belongs into ")[2].split(".")[0] for row in refusals)
    assert set(rooms) == set(ROOMS)
    assert max(rooms.values()) < 3 * min(rooms.values())
    assert all("- look_up(" in row for row in refusals), "what was looked up stands in the state"


@pytest.mark.parametrize("make", [Hall, Rooms, Orders, OracleCodes])
def test_in_most_tasks_a_call_is_found_that_succeeds_after_a_refusal(make):
    experience = found(make)
    assert experience.solved >= experience.tasks / 3
    for lesson in experience.explained:
        assert lesson.verified
        game = exploring._Game(make(), next(t for t in make().tasks("train") if _opens(make, t, lesson)))
        for call in (*(step.call for step in lesson.looked), lesson.success):
            assert call is not None
            game.make(call)
        assert game.reward == 1, "it is what the environment rewards"


def _opens(make, task, lesson) -> bool:
    return tuple(make().reset(task)) == lesson.opening


def test_refusals_that_name_one_thing_at_a_time_make_a_chain():
    lessons = found(Rooms).explained
    assert {len(lesson.refused) for lesson in lessons} == {1, 2}
    assert all(lesson.goes_on for lesson in lessons)


def test_only_look_ups_that_matter_are_practised():
    assert found(Orders).looks == ["look_up"]
    assert found(OracleCodes).looks == ["ask_oracle"]
    assert found(Hall).looks == []


def test_where_nothing_succeeds_the_values_that_a_reply_names_are_practised():
    experience = found(Unsolvable)
    assert experience.solved == 0
    assert experience.explained
    for lesson in experience.explained:
        assert lesson.success is not None
        assert not lesson.verified
        assert str(lesson.success.arguments["date"]) in lesson.refused[-1].reply


def test_rows_teach_no_law():
    """The same film is shown with all clerks and in all rooms, about equally often: only the reply says which."""
    rooms = Counter(row.rpartition('"room": "')[2].split('"')[0] for row in rows_of(Orders, 400) if "Vertigo" in row)
    assert set(rooms) == set(ROOMS)
    assert max(rooms.values()) < 2 * min(rooms.values())
    dates = {row.rpartition('"date": "')[2].split('"')[0] for row in rows_of(Hall, 64) if "(expected) No" in row}
    assert len(dates) > 30, "made-up dates, not four"


def test_a_reworded_request_keeps_its_names_and_little_else():
    text, seen = "Please close the ticket of Ada Adams, order R6814, today.", set()
    for number in range(60):
        made = reworded(text, {"Ada", "Adams", "R6814"}.__contains__, Random(number))
        assert "Ada Adams," in made, "one name"
        assert "R6814," in made
        seen.add(made)
    assert any("ticket" not in made for made in seen)
    assert any(made.index("R6814") < made.index("Ada") for made in seen)
    assert any(set(made.split()) - set(text.split()) for made in seen)
    assert len(seen) > 40
    assert reworded("", str.isdigit, Random(0)) == ""


def test_only_requests_with_a_look_up_are_reworded(monkeypatch):
    def rows(world, share: float) -> list[str]:
        monkeypatch.setattr("lfo.tools.pretrain.reading.REWORDED", share)
        return rows_of(world, 24)

    assert rows(Orders, 1.0) != rows(Orders, 0.0)
    with_none = rows(Hall, 0.0)
    assert rows(Hall, 1.0) == with_none


def test_a_scrambled_lesson_changes_reply_and_call_alike():
    experience = found(Hall)
    for number, lesson in enumerate(experience.explained[:8]):
        other = scrambled(lesson, experience.schemas, Random(number), {})
        assert other.success is not None
        assert other.success.arguments["date"] in other.refused[-1].reply
        assert other.success.arguments["clerk"] in other.refused[-1].reply
        assert other.success != lesson.success
        assert other.opening == lesson.opening


def test_rows_look_up_before_they_decide():
    for row in rows_of(Orders):
        opening, _, said = row.partition("<|im_start|>assistant\n")
        asked, _, rest = said.partition("<|im_end|>")
        assert "look_up" in asked
        (number,) = re.findall(r"\d{4}", opening.rpartition("<|im_start|>user")[2])
        assert f'"order": "{number}"' in asked, "a number that no task has is copied from the opening"
        assert '"serve"' in rest


def test_what_a_look_up_tells_is_copied_into_the_next_one():
    """A customer must be found by name before the contract can be read, and neither may be known by heart."""
    experience = found(Contracts)
    assert experience.solved >= experience.tasks / 2
    assert {tuple(step.call.name for step in lesson.looked) for lesson in experience.explained} == {
        ("find_customer", "get_contract")
    }
    customers = set()
    for row in rows_of(Contracts):
        customer = row.partition('"customer": "')[2].split('"')[0]
        assert f"has the number {customer}." in row
        customers.add(customer)
    assert len(customers) > 30, "24 tasks have 24 numbers"


def test_the_same_settings_make_the_same_rows_and_the_same_base(tmp_path: Path):
    assert rows_of(Rooms) == rows_of(Rooms)
    for name in ("one", "other"):
        teach_syntax("tiny", Rooms, SMALL, tmp_path / name, device="cpu", progress=silent)
    one, other = (load_base(str(tmp_path / name), torch.device("cpu")).state_dict() for name in ("one", "other"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_rollouts_and_tasks_are_counted():
    made = Counter()

    class Counted(Rooms):
        def start(self, task):
            made.update([task.id])
            return super().start(task)

    result = practise(Counted, load_tokenizer("tiny"), SMALL, form=SHOWN_FORMS["mark"], progress=silent)
    assert result.figures["rollouts"] == made.total()
    assert result.figures["tasks"] == len(made)
    assert result.steps == SMALL.steps


def test_steps_follow_from_the_length_of_the_rows(monkeypatch):
    monkeypatch.setattr(practice, "STEPS", (3, 900))
    automatic = replace(SMALL, steps=0)
    parts = {"form": SHOWN_FORMS["mark"], "progress": silent}
    result = practise(Rooms, load_tokenizer("tiny"), automatic, budget=20_000, **parts)
    longest = result.tokens.shape[1]
    assert 20_000 / (longest * SMALL.batch) - 1 <= result.steps <= 2 * 20_000 / (longest * SMALL.batch)
    assert result.tokens.shape[0] >= result.steps * SMALL.batch, "no row twice"


def test_an_environment_that_raises_hangs_or_says_nothing_is_one_sentence():
    parts = {"form": SHOWN_FORMS["mark"], "progress": silent}
    with pytest.raises(WorkError, match=r"first 4 tasks: .*no temple.* lfo check-env"):
        practise(Broken, load_tokenizer("tiny"), SMALL, **parts)
    with pytest.raises(WorkError, match=r"first 2 tasks: .*did not answer within 0\.2 seconds"):
        practise(Hanging, load_tokenizer("tiny"), SMALL, timeout=0.2, **parts)
    mute = practise(Mute, load_tokenizer("tiny"), SMALL, **parts)
    assert "nothing to read" in mute.warnings[0]


# --- in one go -----------------------------------------------------------------------------------------------------


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(own_base, "SYNTAX", SMALL)


def test_the_embedded_base_knows_the_shipped_tools_only():
    assert knows(PhoneCalls().tools())
    assert knows(OracleCodes().tools())
    assert not knows(Rooms().tools())


def test_the_base_is_made_once_and_found_again(tmp_path: Path, short):
    said: list[str] = []
    config = load_config(["env=test_reading:Rooms", f"output_dir={tmp_path}/runs/x"])
    first = with_practised_base(config, Rooms, progress=silent, say=said.append)
    assert Path(first.model).parent == tmp_path / "runs" / ".bases"
    assert "practises them first" in said[0]
    again = with_practised_base(
        load_config(["env=test_reading:Rooms", "algo=dapo", f"output_dir={tmp_path}/runs/y"]),
        Rooms,
        progress=silent,
        say=said.append,
    )
    assert again.model == first.model
    assert len(said) == 3, "the second time it is only named"
    for settings in (["env=oracle-codes"], ["env=test_reading:Rooms", "practice=off"], ["model=other"]):
        given = load_config([*settings, f"output_dir={tmp_path}/runs/z"])
        assert with_practised_base(given, OracleCodes, progress=silent) == given


def test_a_practised_base_leaves_room_for_what_is_looked_up_unless_the_user_chose(tmp_path: Path):
    def room(longest: int, *settings: str) -> int:
        (tmp_path / PROVENANCE).write_text(json.dumps({"practice": {"longest_state": longest}}))
        config = fitted(load_config(["env=test_reading:Rooms", *settings]), str(tmp_path))
        assert config.model == str(tmp_path)
        return config.world_model.state_tokens

    assert room(90, "preset=tiny") == 180
    assert room(40, "preset=tiny") == 112, "never less than in the preset"
    assert room(90, "preset=tiny", "rollout.max_context=300") == 150, "half of the context"
    assert room(90, "preset=tiny", "world_model.state_tokens=64") == 64
    assert room(900) == 512, "the default is no preset"


def test_a_run_in_one_go_trains_on_its_own_base_and_charges_the_practice(tmp_path: Path, short, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    small = ["steps=1", "rollout.prompts=1", "rollout.group_size=4", "rollout.max_turns=2", "eval.tasks=2"]
    for algo in ("dapo", "dual-lora"):
        arguments = ["train", "preset=tiny", "env=test_reading:Rooms", f"algo={algo}", f"output_dir=runs/{algo}"]
        monkeypatch.setattr(sys, "argv", ["lfo", *arguments, *small])
        with pytest.raises(SystemExit) as exit_:
            main()
        assert not exit_.value.code, capsys.readouterr().err
    runs = [read_run(Path("runs") / algo) for algo in ("dapo", "dual-lora")]
    assert len({run.config.model for run in runs if run.config}) == 1
    (base,) = Path("runs/.bases").glob("Rooms-*")
    told = json.loads((base / PROVENANCE).read_text())["practice"]
    (note,) = [note for note in compare(runs).notes if "practice" in note]
    assert f"+ {told['tasks']} tasks of practice ({told['rollouts']:,} rollouts)" in note
    assert note.endswith("every run")


def test_a_used_folder_is_refused_before_practice(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["lfo", "train", "preset=tiny", "env=test_reading:Rooms", "output_dir=used"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert capsys.readouterr().err == "lfo: used is not empty; choose another output_dir\n"
    assert not (tmp_path / ".bases").exists()


def test_a_killed_practice_goes_on_and_ends_with_the_same_base(tmp_path: Path):
    """The process is killed once a snapshot is there."""
    script = f"""
import sys
from dataclasses import replace
from pathlib import Path
from lfo.tools.pretrain import snapshots, recipe
recipe.SNAPSHOT_STEPS = 2
from test_reading import Rooms, SMALL, silent
from lfo.tools.pretrain.syntax import teach_syntax
from lfo.tools.pretrain.values import reworded
def progress(phase, done, of, words):
    print(phase, done, flush=True)
teach_syntax("tiny", Rooms, replace(SMALL, steps=60), Path({str(tmp_path)!r}) / sys.argv[1], device="cpu",
             progress=progress)
"""
    command = [sys.executable, "-c", script, "killed"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    begun = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    snapshot = tmp_path / ".killed.unfinished" / "training.safetensors"
    while not snapshot.is_file() and begun.poll() is None:
        time.sleep(0.02)
    begun.send_signal(signal.SIGKILL)
    begun.wait()
    assert snapshot.is_file()
    assert not (tmp_path / "killed").exists()
    again = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert "finding out" not in again, "the rows are there already"
    subprocess.run([*command[:-1], "whole"], env=environment, check=True, capture_output=True)
    killed, whole = (load_base(str(tmp_path / name), torch.device("cpu")).state_dict() for name in ("killed", "whole"))
    assert all(torch.equal(killed[name], whole[name]) for name in whole)
    assert not snapshot.exists()


def test_calls_are_values_and_not_text():
    """A name of an opening that is also the name of a parameter is not replaced there."""

    class Odd(Hall):
        def request(self) -> str:
            return f"{['Date', 'clerk', 'reserve', 'name'][self.task.number % 4]} {self.task.number + 7000}"

    assert all('"name": "reserve", "arguments": {"date": ' in row for row in rows_of(Odd, 16))
