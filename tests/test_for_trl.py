"""Our environments in TRL, and one real step of its trainer if it is installed."""

from __future__ import annotations

import importlib.util
import zlib
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import get_json_schema

from lfo.env.for_trl import OVER, trl_environment, trl_rows
from lfo.env.tool_environment import ToolEnvironment, tool
from lfo.env.worlds.oracle import OracleCodes
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.errors import UsageError

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_with_trl.py"


class FussyOracle(OracleCodes):
    """Rewards an arbitrary half of all tries, so that the rollouts of a group differ."""

    def reward(self) -> float:
        return float(zlib.crc32(" ".join(sorted(self.spoken or ())).encode()) % 2)


def test_tools_are_methods_with_the_schema_that_the_model_reads():
    environment: Any = trl_environment(OracleCodes)()
    told = {name: get_json_schema(getattr(environment, name))["function"] for name in ("ask_oracle", "open_door")}
    ours = {each["function"]["name"]: each["function"] for each in OracleCodes().tools()}
    for name, schema in told.items():
        assert schema["description"] == ours[name]["description"]
        assert schema["parameters"]["required"] == ours[name]["parameters"]["required"]
    words = told["open_door"]["parameters"]["properties"]["words"]
    assert (words["type"], words["items"]) == ("array", {"type": "string"})
    assert all(
        get_json_schema(getattr(trl_environment(PhoneCalls)(), each["function"]["name"]))
        for each in PhoneCalls().tools()
    )


def test_a_rollout_goes_as_in_our_own_environment():
    rows = trl_rows(OracleCodes, count=2)
    assert [message["role"] for message in rows[0]["prompt"]] == ["system", "user"]
    environment: Any = trl_environment(OracleCodes)()
    task = next(task for task in OracleCodes().tasks("train") if task.id == rows[1]["task_id"])
    for _ in range(2):  # TRL uses an environment again
        environment.reset(**rows[1])
        assert task.order in environment.ask_oracle(oracle=task.oracle)
        environment.open_door(words=list(task.code))
        assert environment.ask_oracle(oracle=task.oracle) == OVER
        assert environment.get_reward() == 1.0
    environment.reset(**rows[1])
    assert environment.get_reward() == 0.0, "who stops early gets what stopping is worth"


def test_optional_arguments_are_left_out_and_bad_ones_answered():
    class Lamp(ToolEnvironment):
        def tasks(self, split):
            return OracleCodes().tasks(split)

        def start(self, task):
            self.said = ""
            return OracleCodes().reset(task)

        @tool
        def light(self, lamp: str, colour: str = "red", watts: int | None = None) -> str:
            """Light a lamp.

            lamp: which
            """
            self.said = f"{lamp} {colour}"
            return self.said

        def finished(self):
            return False

        def reward(self):
            return 0.0

    environment: Any = trl_environment(Lamp)()
    environment.reset(**trl_rows(Lamp, count=1)[0])
    assert environment.light(lamp="left") == "left red"
    assert environment.light(lamp="left", colour="blue") == "left blue"
    assert environment.light.__annotations__["watts"] is int
    assert environment.light(lamp=7) == "Argument lamp of light must be a string."


def test_a_task_that_is_not_there_is_named():
    with pytest.raises(UsageError, match="has no task nowhere; make the rows with trl_rows"):
        trl_environment(OracleCodes)().reset(task_id="nowhere")


@pytest.mark.filterwarnings("ignore")  # of TRL, which calls the feature experimental
def test_trl_trains_one_real_step():
    pytest.importorskip("trl", reason="trl is not installed: pip install '.[trl]'")
    spec = importlib.util.spec_from_file_location("train_with_trl", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    first = example.train(FussyOracle, steps=1)[0]
    assert first["tools/call_frequency"] > 1
    assert first["tools/failure_frequency"] == 0
    assert first["rewards/TrlEnvironment/std"] > 0
    assert first["grad_norm"] > 0
