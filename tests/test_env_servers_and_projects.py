"""Environments of OpenEnv, verifiers, verl and ScienceWorld, with the real libraries if installed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lfo.config import load_config
from lfo.env.interface import flaw_of
from lfo.env.patience import call_all
from lfo.errors import ConfigError, DataError, UsageError
from lfo.loading import environment_factory
from lfo.protocol.hermes import format_tool_call
from lfo.types import ToolCall


def make(*settings: str) -> Any:
    return environment_factory(load_config(list(settings)))()


def call(tool: str, **arguments: Any) -> str:
    return format_tool_call(ToolCall(name=tool, arguments=arguments))


# --- verl ---------------------------------------------------------------------------------------------------------

TOOL = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class Adder(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        total = parameters["a"] + parameters["b"]
        if total > 100:
            raise ValueError("too large")
        kwargs["agent_data"].extra_fields["total"] = total
        return ToolResponse(text=f"{total}"), 0.0, {}
"""
TOOL_CONFIG = """
tools:
  - class_name: {module}.Adder
    config: {{type: native}}
    tool_schema:
      type: function
      function:
        name: add
        description: Adds two numbers.
        parameters:
          type: object
          properties: {{a: {{type: integer, description: one}}, b: {{type: integer, description: other}}}}
          required: [a, b]
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums" and extra_info["num_turns"] >= 0
    return {"score": float(ground_truth in solution_str.split()), "acc": 1}
"""


@pytest.fixture
def verl_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("verl", reason="verl is not installed: pip install '.[verl]'")
    import pandas

    monkeypatch.setattr(sys, "path", list(sys.path))
    module = f"adder_{abs(hash(tmp_path)) % 10**8}"  # modules are imported once
    (tmp_path / f"{module}.py").write_text(TOOL)
    (tmp_path / "tool_config.yaml").write_text(TOOL_CONFIG.format(module=module))
    (tmp_path / "reward.py").write_text(REWARD)
    for split, numbers in (("train", range(4)), ("test", range(4, 6))):
        rows = [
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": f"What is {number} + 40?"}],
                "reward_model": {"style": "rule", "ground_truth": f"{number + 40}"},
                "extra_info": {"index": number},
            }
            for number in numbers
        ]
        pandas.DataFrame(rows).to_parquet(tmp_path / f"{split}.parquet")
    return tmp_path


def test_a_verl_project_plays_unchanged(verl_project: Path):
    environment = make(f"env=verl:{verl_project}")
    assert flaw_of(environment_factory(load_config([f"env=verl:{verl_project}"]))) is None
    (schema,) = environment.tools()
    assert schema["function"]["name"] == "add"
    assert schema["function"]["parameters"]["required"] == ["a", "b"]
    assert [len(environment.tasks(split)) for split in ("train", "val")] == [4, 2]
    with pytest.raises(UsageError, match="has no split 'test'; it has train, val"):
        environment.tasks("test")
    opening = environment.reset(environment.tasks("train")[2])
    assert [(each.role, each.content) for each in opening] == [("user", "What is 2 + 40?")]
    assert environment.step(call("add", a=2, b=40)).observation == "42"
    assert environment.step(call("add", a=99, b=40)).observation == "Error executing tool 'add': too large"
    assert environment.step(call("add", a="2", b=40)).info["mistake"]
    end = environment.step("It is 42 .")
    assert (end.done, end.reward) == (True, 1.0)


def test_a_verl_rollout_that_runs_out_of_turns_is_scored_too(verl_project: Path):
    environment = make(f"env=verl:{verl_project}", "env_args.max_assistant_turns=2")
    environment.reset(environment.tasks("train")[2])
    first, last = environment.step(call("add", a=1, b=1)), environment.step(call("add", a=2, b=40))
    assert (first.done, first.reward, last.done, last.reward) == (False, 0.0, True, 1.0)


def test_validation_in_a_verl_project_uses_no_data_for_tests(verl_project: Path):
    shutil.copy(verl_project / "train.parquet", verl_project / "val.parquet")
    environment = make(f"env=verl:{verl_project}")
    numbers = {
        split: [task.row["extra_info"]["index"] for task in environment.tasks(split)] for split in ("val", "test")
    }
    assert numbers == {"val": [0, 1, 2, 3], "test": [4, 5]}


NOTES = """
import json
from pathlib import Path


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    given = {"solution": solution_str, "ground_truth": ground_truth, "num_turns": extra_info["num_turns"]}
    Path(__file__).with_name("given.json").write_text(json.dumps(given))
    return 0.5
"""


def given_to_score(project: Path, messages: list[str], *settings: str) -> tuple[list[Any], dict[str, Any]]:
    """Play messages; return the results and what `compute_score` got."""
    (project / "reward.py").write_text(NOTES)
    environment = make(f"env=verl:{project}", *settings)
    environment.reset(environment.tasks("train")[0])
    results = [environment.step(message) for message in messages]
    assert [result.done for result in results] == [False] * (len(messages) - 1) + [True]
    return results, json.loads((project / "given.json").read_text())


def test_the_score_of_a_verl_project_gets_all_messages_and_replies(verl_project: Path):
    messages = [f"I think 42. {call('add', a=2, b=40)}", "Oops <tool_call>{", "It is 42."]
    results, given = given_to_score(verl_project, messages)
    texts = [messages[0], "42", messages[1], results[1].observation, messages[2]]
    assert given["solution"] == "\n".join(texts)
    assert given["num_turns"] == 6, "the prompt, three messages and two replies"


@pytest.mark.parametrize("limit", ["max_assistant_turns", "max_mistakes"])
def test_a_verl_rollout_that_ends_with_a_mistake_is_scored(limit: str, verl_project: Path):
    results, given = given_to_score(verl_project, ["<tool_call>a", "<tool_call>b"], f"env_args.{limit}=2")
    assert [result.reward for result in results] == [0.0, 0.5]
    assert given["solution"].startswith("<tool_call>a\n")
    assert given["num_turns"] == 5


def test_a_verl_rollout_that_ends_with_a_call_counts_it(verl_project: Path):
    _, given = given_to_score(verl_project, [call("add", a=2, b=40)], "env_args.max_assistant_turns=1")
    assert given["num_turns"] == 3, "the prompt, the call and its reply"


def test_ground_truth_of_a_verl_project_is_exact(verl_project: Path):
    import pandas

    exact = 0.12345678901234567
    row = {"prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": [exact]}}
    pandas.DataFrame([row]).to_parquet(verl_project / "train.parquet")
    _, given = given_to_score(verl_project, ["?"])
    assert given["ground_truth"] == [exact]


def test_a_wrong_answer_in_a_verl_project_is_0(verl_project: Path):
    environment = make(f"env=verl:{verl_project}")
    environment.reset(environment.tasks("train")[2])
    assert environment.step("41").reward == 0.0


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("reward.py", "has no Python file with the reward function compute_score"),
        ("tool_config.yaml", "neither a YAML file with tools: nor a Python file with @function_tool"),
        ("test.parquet", "no parquet file whose name begins with val or eval or test"),
    ],
)
def test_an_incomplete_verl_project_is_one_sentence(missing: str, words: str, verl_project: Path):
    (verl_project / missing).unlink()
    with pytest.raises(ConfigError, match=words):
        make(f"env=verl:{verl_project}")


def test_a_damaged_parquet_file_is_named(verl_project: Path):
    (verl_project / "train.parquet").write_text("no parquet")
    with pytest.raises(DataError, match=r"train\.parquet is not a readable parquet file"):
        make(f"env=verl:{verl_project}")
    with pytest.raises(ConfigError, match="this folder does not exist"):
        make(f"env=verl:{verl_project / 'nowhere'}")


# --- verifiers ----------------------------------------------------------------------------------------------------

TOOL_ENVIRONMENT = '''
import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one
        b: the other
    """
    return a + b


def right(completion, answer, **kwargs) -> float:
    return float(answer in str(completion[-1].content))


def load_environment(first: int = 0, **kwargs):
    rows = [{"question": f"What is {n} + 40?", "answer": str(n + 40)} for n in range(first, first + 10)]
    return vf.ToolEnv(
        dataset=Dataset.from_list(rows), tools=[add], rubric=vf.Rubric(funcs=[right]), max_turns=4,
        system_prompt="You add.",
    )
'''
TALKING_ENVIRONMENT = """
import verifiers as vf
from datasets import Dataset


class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["tries"] = 0

    async def env_response(self, messages, state, **kwargs):
        state["tries"] += 1
        return [{"role": "user", "content": f"No, not {messages[-1].content}."}]

    @vf.stop
    async def guessed(self, state):
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1].content == state["answer"]


async def quick(state) -> float:
    return 1.0 / (1 + state["tries"])


def load_environment():
    rows = [{"question": "Guess a number.", "answer": str(n)} for n in range(4)]
    return Guess(dataset=Dataset.from_list(rows), eval_dataset=Dataset.from_list(rows[:1]),
                 rubric=vf.Rubric(funcs=[quick]), max_turns=3)
"""


@pytest.fixture
def verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("verifiers.clients", reason="verifiers 0.1 is not installed: pip install '.[verifiers]'")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adding_env.py").write_text(TOOL_ENVIRONMENT)
    (tmp_path / "guess_env.py").write_text(TALKING_ENVIRONMENT)
    for name in ("adding_env", "guess_env"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    from lfo.env.adapters import verifiers_env

    verifiers_env._loaded.cache_clear()
    return tmp_path


def test_a_tool_environment_of_verifiers_plays_with_its_own_rubric(verifiers: Path):
    interrupts = signal.getsignal(signal.SIGINT)
    environment = make("env=verifiers:adding-env")
    assert signal.getsignal(signal.SIGINT) is interrupts, "Ctrl-C stays ours"
    (schema,) = environment.tools()
    assert schema["function"]["name"] == "add"
    assert len(environment.tasks("train")) == 8
    assert len(environment.tasks("val")) == 2
    questions = {task.input["prompt"][-1]["content"] for split in ("train", "val") for task in environment.tasks(split)}
    assert len(questions) == 10, "no task is in both splits"
    opening = environment.reset(environment.tasks("train")[2])
    assert [(each.role, each.content) for each in opening] == [("system", "You add."), ("user", "What is 2 + 40?")]
    step = environment.step(call("add", a=2, b=40))
    assert (step.observation, step.done) == ("42", False)
    end = environment.step("The answer is 42.")
    assert (end.done, end.reward) == (True, 1.0)
    with pytest.raises(UsageError, match="has no split 'exam'"):
        environment.tasks("exam")


def test_a_tool_environment_of_verifiers_ends_after_its_own_turns(verifiers: Path):
    environment = make("env=verifiers:adding-env", "env_args.first=5")
    environment.reset(environment.tasks("train")[0])
    results = [environment.step(call("add", a=1, b=1)) for _ in range(4)]
    assert [result.done for result in results] == [False, False, False, True]
    assert results[-1].reward == 0.0


def test_an_environment_of_verifiers_without_tools_is_talked_to(verifiers: Path):
    environment = make("env=verifiers:guess-env")
    assert environment.tools()[0]["function"]["name"] == "say"
    assert len(environment.tasks("val")) == 1
    environment.reset(environment.tasks("train")[3])
    first, second = environment.step(call("say", text="1")), environment.step(call("say", text="3"))
    assert (first.observation, first.done, first.reward) == ("No, not 1.", False, 0.0)
    assert (second.done, second.reward) == (True, 0.5)


def test_rollouts_of_one_verifiers_environment_do_not_mix(verifiers: Path):
    factory = environment_factory(load_config(["env=verifiers:guess-env"]))

    def rollout(place: int) -> float:
        environment: Any = factory()
        environment.reset(environment.tasks("train")[place])
        return sum(environment.step(call("say", text=str(number))).reward for number in range(place + 1))

    calls = [lambda place=place: rollout(place) for place in (0, 1, 2, 0, 1, 2)]
    assert call_all(calls, timeout=30, retries=0, workers=6) == pytest.approx([1, 1 / 2, 1 / 3] * 2)


def test_a_verifiers_environment_that_is_not_there_is_one_sentence(verifiers: Path):
    with pytest.raises(ConfigError, match="env=verifiers:no-such-env cannot be loaded: Could not import") as error:
        make("env=verifiers:no-such-env")
    assert "\n" not in str(error.value)


# --- OpenEnv ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def servers() -> Any:
    """Two real servers on the loopback address: one with an action, one with tools."""
    pytest.importorskip("openenv.core", reason="openenv-core is not installed: pip install '.[openenv]'")
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app

    started, urls = [], {}
    for name, (environment, action, observation) in _server_parts().items():
        app = create_fastapi_app(environment, action, observation, max_concurrent_envs=16)
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        started.append((server, thread))
        deadline = time.monotonic() + 30
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.02)
        urls[name] = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    yield urls
    for server, thread in started:
        server.should_exit = True
        thread.join(timeout=10)


def _server_parts() -> dict[str, Any]:
    import random

    from fastmcp import FastMCP
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
    from openenv.core.env_server.types import Action, Observation, State

    class Guess(Action):
        number: int

    class Heard(Observation):
        text: str = ""

    class Guessing(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **kwargs):
            self.secret = random.Random(seed).randint(0, 9)
            self.count = 0
            return Heard(text=f"Guess; its parity is {self.secret % 2}.")

        def step(self, action, timeout_s=None, **kwargs):
            self.count += 1
            if action.number > 99:
                raise ValueError("no such number")
            right = action.number == self.secret
            return Heard(text="Yes." if right else "No.", reward=float(right), done=right or self.count == 3)

        @property
        def state(self):
            return State(step_count=getattr(self, "count", 0))

    class Adding(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            server = FastMCP("adding")

            @server.tool
            def add(a: int, b: int) -> int:
                """Add two numbers."""
                return a + b

            super().__init__(server)

        def reset(self, seed=None, episode_id=None, **kwargs):
            return Observation(metadata={"hidden": seed})

        def _step_impl(self, action, timeout_s=None, **kwargs):
            raise ValueError("only tools")

        @property
        def state(self):
            return State()

    return {"action": (Guessing, Guess, Heard), "tools": (Adding, CallToolAction, CallToolObservation)}


def test_a_server_with_an_action_has_one_typed_tool(servers: dict[str, str]):
    environment = make(f"env=openenv:{servers['action']}")
    schema = environment.tools()[0]["function"]
    assert (schema["name"], list(schema["parameters"]["properties"])) == ("act", ["number"])
    opening = environment.reset(environment.tasks("train")[0])
    assert opening[1].content.startswith("Guess; its parity is ")
    assert environment.step(call("act", number="x")).observation == "Argument number of act must be of type integer."
    results = [environment.step(call("act", number=number)) for number in (10, 11, 12)]
    assert [(result.observation, result.done, result.reward) for result in results] == [
        ("No.", False, 0.0),
        ("No.", False, 0.0),
        ("No.", True, 0.0),
    ]


def test_sessions_of_a_server_are_apart_and_repeat_by_seed(servers: dict[str, str]):
    def rollout(place: int) -> tuple[str, int]:
        """What is heard first, and the number that is right."""
        for number in range(10):
            environment = make(f"env=openenv:{servers['action']}")
            opening = environment.reset(environment.tasks("train")[place])
            result = environment.step(call("act", number=number))
            if result.reward:
                assert result.done
                return opening[1].content, number
        raise AssertionError

    places = [0, 1, 2, 0, 1, 2]
    found = call_all([lambda place=place: rollout(place) for place in places], timeout=60, retries=0, workers=6)
    assert found[:3] == found[3:]


@pytest.mark.filterwarnings("ignore")  # of the server's own libraries
def test_a_server_with_tools_keeps_them(servers: dict[str, str]):
    environment = make(f"env=openenv:{servers['tools']}")
    assert environment.tools()[0]["function"]["name"] == "add"
    opening = environment.reset(environment.tasks("train")[7])
    assert "7" not in opening[1].content, "metadata is not shown"
    assert environment.step(call("add", a=2, b=40)).observation == "42"


def test_a_server_that_is_not_there_is_one_sentence():
    pytest.importorskip("openenv.core", reason="openenv-core is not installed")
    with pytest.raises(ConfigError, match="no OpenEnv server answers there"):
        make("env=openenv:http://127.0.0.1:9")


# --- ScienceWorld -------------------------------------------------------------------------------------------------


@pytest.fixture
def scienceworld() -> None:
    pytest.importorskip("scienceworld", reason="scienceworld is not installed: pip install '.[scienceworld]'")
    if shutil.which("java") is None:
        pytest.skip("there is no Java")


def test_scienceworld_plays_its_variations(scienceworld: None):
    environment = make("env=scienceworld:boil")
    splits = [{task.number for task in environment.tasks(split)} for split in ("train", "val", "test")]
    assert all(splits)
    assert not splits[0] & splits[1] | splits[0] & splits[2] | splits[1] & splits[2]
    opening = environment.reset(environment.tasks("train")[0])
    assert "Your task is to boil" in opening[1].content
    beside = make("env=scienceworld:boil")  # in the same Java process
    beside.reset(beside.tasks("train")[0])
    environment.step(call("act", action="open door to kitchen"))
    assert environment.step(call("act", action="go to kitchen")).observation == "You move to the kitchen."
    assert "hallway" in beside.step(call("act", action="look around")).observation
    assert not environment.step(call("act", action="fly")).done


def test_scienceworld_names_what_it_has(scienceworld: None, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="ScienceWorld has no task boyl; the nearest is boil"):
        make("env=scienceworld:boyl")
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(ConfigError, match="needs Java, which is not installed"):
        make("env=scienceworld:boil")


@pytest.mark.parametrize("word", ["openenv", "verifiers", "verl", "scienceworld"])
def test_every_library_that_is_missing_names_its_extra(word: str, monkeypatch: pytest.MonkeyPatch):
    from lfo.env.adapters import ADAPTERS

    for name in [each for each in sys.modules if each == word or each.startswith(f"{word}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, word, None)
    monkeypatch.delitem(sys.modules, f"lfo.env.adapters.{ADAPTERS[word]}", raising=False)
    with pytest.raises(ConfigError) as error:
        make(f"env={word}:anything")
    sentence = f"env={word}:anything needs {word}, which is not installed: pip install 'learn-from-observation[{word}]'"
    assert str(error.value) == sentence
