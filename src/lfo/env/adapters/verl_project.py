"""An existing verl project, without changes: `env=verl:FOLDER`.

The folder contains the inputs of verl: prompts as parquet (`train*.parquet`; `val*`, `eval*` or `test*.parquet`, of
which the first that exists is `val`), a YAML file with `tools:` (verl's `tool_config_path`) or a Python file with
`@function_tool` (`function_tool_path`), and a Python file with the reward function `compute_score`
(`custom_reward_function.path`). They are found, or set by `env_args.tool_config=FILE`, `env_args.function_tools=FILE`,
`env_args.reward=FILE`, `env_args.reward_name=NAME`.

A rollout works as in verl's tool agent loop: `create`, `execute`, `release` for each call, with the state of a rollout
in `agent_data.extra_fields`. A message without a call, the last of `env_args.max_assistant_turns` (16) or the last of
`env_args.max_mistakes` (8) ends it, and `compute_score` gets the whole response: all messages and replies. As in verl,
rewards of single tool calls are not added.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet
from verl.tools.function_tool import FunctionTool, normalize_function_tool_return
from verl.tools.tool_registry import load_all_tools

from lfo.env.adapters.foreign import ForeignEnvironment, Reaction
from lfo.env.by_name import refuse_code_of_a_run, run_around
from lfo.errors import ConfigError, DataError, first_line
from lfo.types import Message, ToolCall

# The files of a split have the first prefix that has any: data for tests must not select checkpoints.
PREFIXES = {"train": ("train",), "val": ("val", "eval", "test"), "test": ("test",)}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a parquet file."""

    id: str
    row: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Project:
    tools: Mapping[str, Any]
    score: Callable[..., Any]
    splits: Mapping[str, Sequence[Prompt]]


class LibraryEnvironment(ForeignEnvironment):
    word = "verl"

    def __init__(
        self,
        name: str,
        *,
        max_assistant_turns: int = 16,
        max_mistakes: int = 8,
        reward_range: Sequence[float] | None = None,
        tool_config: str | None = None,
        function_tools: str | None = None,
        reward: str | None = None,
        reward_name: str = "compute_score",
    ) -> None:
        super().__init__(name, max_mistakes=max_mistakes, reward_range=reward_range)
        self._project = _opened(name, tool_config, function_tools, reward, reward_name)
        self._max_turns = max_assistant_turns
        self._turns: list[tuple[str, str]] = []  # messages and replies: the whole response, for `compute_score`
        self._state = SimpleNamespace(extra_fields={}, messages=[], tools_kwargs={})
        self._loop = asyncio.new_event_loop()

    def tools(self) -> list[dict[str, Any]]:
        return [_schema(tool) for tool in self._project.tools.values()]

    def splits(self) -> Mapping[str, Sequence[Prompt]]:
        return self._project.splits

    def open(self, task: Prompt) -> Sequence[Message]:
        self._row = task.row
        extra = self._row.get("extra_info") or {}
        self._state.tools_kwargs = extra.get("tools_kwargs") or {}
        self._state.messages = list(self._row["prompt"])
        return [Message(role=message["role"], content=str(message["content"])) for message in self._row["prompt"]]

    def act(self, call: ToolCall) -> Reaction:
        return Reaction(observation=self._loop.run_until_complete(self._execute(call)))

    def conclude(self, message: str, reaction: Reaction) -> Reaction:
        """Add a turn to the response, and score the response at its end."""
        self._turns.append((message, reaction.observation))
        done = reaction.done or len(self._turns) >= self._max_turns
        return replace(reaction, reward=self._score() if done else 0.0, done=done)

    async def _execute(self, call: ToolCall) -> str:
        tool, arguments = self._project.tools[call.name], dict(call.arguments)
        stateless, instance = isinstance(tool, FunctionTool), None
        try:
            if stateless:
                response, _, _ = normalize_function_tool_return(await tool.call(arguments))
            else:
                given = self._state.tools_kwargs.get(call.name, {})
                instance, _ = await tool.create(create_kwargs=given.get("create_kwargs", {}))
                response, _, _ = await tool.execute(instance, arguments, agent_data=self._state)
        except Exception as error:  # as in verl, the policy sees the error
            return f"Error executing tool '{call.name}': {error}"
        finally:
            if instance is not None:
                await tool.release(instance)
        return response.text or ""

    def _score(self) -> float:
        row = self._row
        num_turns = 1 + len(self._turns) + self._calls + self.mistakes  # as verl counts: prompt, messages, replies
        result = self._project.score(
            data_source=row.get("data_source"),
            solution_str="\n".join(text for turn in self._turns for text in turn if text),
            ground_truth=(row.get("reward_model") or {}).get("ground_truth"),
            extra_info={**(row.get("extra_info") or {}), **self._state.extra_fields, "num_turns": num_turns},
        )
        if inspect.isawaitable(result):
            result = self._loop.run_until_complete(result)
        return float(result["score"] if isinstance(result, Mapping) else result)

    def __del__(self) -> None:
        if hasattr(self, "_loop"):
            self._loop.close()


@functools.cache
def _opened(
    name: str, tool_config: str | None, function_tools: str | None, reward: str | None, reward_name: str
) -> Project:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"env=verl:{name}: this folder does not exist")
    try:
        for named in ("", tool_config, function_tools, reward):
            refuse_code_of_a_run(folder / (named or ""))
    except ImportError as error:
        raise ConfigError(f"env=verl:{name} cannot be loaded: {error}") from error
    if str(folder.absolute()) not in sys.path:  # its config names tools by module
        sys.path.insert(0, str(folder.absolute()))
    config = folder / tool_config if tool_config else _first(folder, "*.y*ml", "tools:")
    functions = folder / function_tools if function_tools else _first(folder, "*.py", "@function_tool")
    scorer = folder / reward if reward else _first(folder, "*.py", f"def {reward_name}(")
    if config is None and functions is None:
        raise ConfigError(f"env=verl:{name} has neither a YAML file with tools: nor a Python file with @function_tool")
    if scorer is None:
        raise ConfigError(f"env=verl:{name} has no Python file with the reward function {reward_name}")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # verl prints each schema
            tools = load_all_tools(config and str(config), functions and str(functions))
            score = getattr(_module_at(scorer), reward_name)
    except Exception as error:
        raise ConfigError(f"env=verl:{name} cannot be loaded: {type(error).__name__}: {first_line(error)}") from error
    return Project(tools={tool.name: tool for tool in tools}, score=score, splits=_splits(folder))


def _first(folder: Path, pattern: str, holding: str) -> Path | None:
    # Runs are often kept in the project.
    files = sorted(path for path in folder.rglob(pattern) if path.is_file() and run_around(path) is None)
    return next((path for path in files if holding in path.read_text(encoding="utf-8", errors="replace")), None)


def _module_at(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"lfo_verl_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _splits(folder: Path) -> dict[str, Sequence[Prompt]]:
    files = sorted(folder.rglob("*.parquet"))
    chosen: dict[str, list[Path]] = {}
    for split, prefixes in PREFIXES.items():
        of_prefixes = ([path for path in files if path.name.startswith(prefix)] for prefix in prefixes)
        chosen[split] = next(filter(None, of_prefixes), [])
        if not chosen[split] and split != "test":
            raise ConfigError(f"env=verl:{folder} has no parquet file whose name begins with {' or '.join(prefixes)}")
    if not chosen["test"] or chosen["test"] == chosen["val"]:
        del chosen["test"]
    rows = {split: [row for path in paths for row in _rows(path)] for split, paths in chosen.items()}
    return {split: [Prompt(f"{split}-{index}", row) for index, row in enumerate(rows[split])] for split in rows}


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        rows = pyarrow.parquet.ParquetFile(path).read().to_pylist()
    except Exception as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from error
    for index, row in enumerate(rows):
        if not isinstance(row.get("prompt"), list) or not row["prompt"]:
            raise DataError(f"{path}, row {index}: `prompt` must be a list of messages")
    return rows


def _schema(tool: Any) -> dict[str, Any]:
    return tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)
