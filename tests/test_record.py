"""Recording a running agent: the real client, the real proxy, a model server with canned answers."""

import asyncio
import contextlib
import json
import os
import queue
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from canned import Canned
from lfo.cli import main
from lfo.config import load_config
from lfo.engines import create_trainer
from lfo.env.log_folder import numbered_records
from lfo.errors import UsageError
from lfo.loading import environment_factory
from lfo.play.chat_logs import chat_rollout
from lfo.play.records import read_rollouts
from lfo.serving.app import listen, make_server
from lfo.serving.log_writer import LogWriter
from lfo.serving.proxy import Proxy
from lfo.serving.recording import Recorder
from lfo.types import ToolCall
from small_runs import small_config, tokenizer

KEY = "sk-of-the-client"
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


class Upstream(NamedTuple):
    url: str
    canned: Canned


@contextlib.contextmanager
def upstream() -> Iterator[Upstream]:
    canned, ports, end = Canned(), queue.Queue[int](), threading.Event()

    async def serve() -> None:
        server = await asyncio.start_server(canned.serve, "127.0.0.1", 0)
        ports.put(server.sockets[0].getsockname()[1])
        await asyncio.get_running_loop().run_in_executor(None, end.wait)
        server.close()
        for writer in canned.writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    yield Upstream(f"http://127.0.0.1:{ports.get(timeout=10)}", canned)
    end.set()
    thread.join()


@contextlib.contextmanager
def recording(url: str, folder: Path, *, idle: float = 600, **options: Any) -> Iterator[str]:
    """The address of a proxy in front of `url`."""
    with (
        listen("127.0.0.1", 0) as bound,
        Recorder(folder, idle=idle, **{"most_bytes": 10**6, **options}) as recorder,
    ):
        serving = make_server(Proxy(url, recorder), passes_through=True)
        thread = threading.Thread(target=serving.run, kwargs={"sockets": [bound]})
        thread.start()
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        serving.should_exit = True
        thread.join()


def ask(url: str, messages: list[Any], *, stream: bool = False, **options: Any) -> Any:
    """The message of the assistant, as a client sends it back, and the id of its completion."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        given = client.chat.completions.create(model="m", messages=messages, tools=TOOLS, stream=stream, **options)
        if not stream:
            return given.choices[0].message.model_dump(exclude_none=True), given.id
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        number = ""
        for chunk in given:
            number, delta = chunk.id, chunk.choices[0].delta
            message["content"] += delta.content or ""
            for part in delta.tool_calls or ():
                calls = message.setdefault("tool_calls", [])
                if part.id:
                    calls.append({"id": part.id, "type": "function", "function": part.function.model_dump()})
                else:
                    calls[0]["function"]["arguments"] += part.function.arguments
        return message, number


def converse(url: str, task: str, **options: Any) -> tuple[list[Any], str]:
    """A whole conversation: a call, its reply, a text."""
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": task}]
    message, _ = ask(url, messages, **options)
    reply = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": f"Reply to {task}."}
    messages += [message, reply]
    message, number = ask(url, messages, **options)
    return [*messages, message], number


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_is_recorded_as_one_rollout_that_can_be_read(tmp_path: Path, stream: bool):
    with upstream() as server, recording(server.url, tmp_path) as url:
        messages, _ = converse(url, "open it", stream=stream)
    (rollout,) = read_rollouts(tmp_path, None)
    assert [(each.role, each.content) for each in rollout.opening] == [("system", "Be brief."), ("user", "open it")]
    first, last = rollout.turns
    arguments = json.loads(messages[2]["tool_calls"][0]["function"]["arguments"])
    assert (first.call, first.observation) == (ToolCall(name="look", arguments=arguments), "Reply to open it.")
    assert (last.call, last.action, last.observation) == (None, messages[-1]["content"], "")
    (record,) = (each.record for each in numbered_records(tmp_path))
    assert (record["tools"], record["model"], record["reward"]) == (TOOLS, "m", None)


@pytest.mark.parametrize("stream", [False, True])
def test_the_bytes_are_those_of_the_upstream(tmp_path: Path, stream: bool):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "ü"}], "stream": stream})
    requests = [
        ("POST", "/v1/chat/completions", body),
        ("POST", "/v1/chat/completions", "{"),
        ("GET", "/v1/x?a=%2Fb", ""),
    ]
    with upstream() as server, recording(server.url, tmp_path) as url:
        for method, path, content in requests:
            direct, passed = (httpx.request(method, each + path, content=content) for each in (server.url, url))
            assert passed.content == direct.content
            assert passed.status_code == direct.status_code
            heads = [
                {name: value for name, value in each.headers.items() if name != "connection"}
                for each in (direct, passed)
            ]
            assert heads[0] == heads[1]
        assert server.canned.heads[-1].startswith("GET /v1/x?a=%2Fb HTTP/1.1")


def test_headers_for_the_recorder_go_no_further_and_the_clients_key_does(tmp_path: Path):
    headers = {"x-lfo-conversation": "mine", "x-lfo-outcome": "1", "Authorization": f"Bearer {KEY}", "x-other": "2"}
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    with upstream() as server, recording(server.url, tmp_path) as url:
        httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers)
        (head,) = server.canned.heads
    assert KEY in head
    assert "x-lfo" not in head.lower()
    assert "x-other: 2" in head
    (rollout,) = read_rollouts(tmp_path, None)
    assert (rollout.task_id, rollout.reward, rollout.info["outcome_known"]) == ("mine", 1.0, True)


def test_what_must_not_be_written_is_not_written_and_the_call_is_still_one(tmp_path: Path):
    card = "4111 1111 1111 1111"
    with upstream() as server, recording(server.url, tmp_path, hide=[re.compile(r"\b\d(?: ?\d){15}\b")]) as url:
        call = {"name": "pay", "arguments": json.dumps({"card": card, "number": 4111111111111111, "n": 2})}
        messages = [
            {"role": "user", "content": f"Pay with {card}, my key is {KEY}."},
            {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": f"{card} is refused."}]},
        ]
        ask(url, messages)
    text = "".join(path.read_text() for path in tmp_path.iterdir())
    assert not re.search("4111|" + KEY, text)
    (rollout,) = read_rollouts(tmp_path, None)
    assert rollout.turns[0].call == ToolCall(name="pay", arguments={"card": "[hidden]", "number": "[hidden]", "n": 2})
    assert rollout.turns[0].observation == "[hidden] is refused."


def test_outcomes_come_afterwards_before_or_after_the_conversation_is_written(tmp_path: Path):
    with upstream() as server, recording(server.url, tmp_path) as url:
        _, early = converse(url, "one")
        reply = [{"role": "user", "content": "Thanks."}]
        assert httpx.post(f"{url}/lfo/outcome", json={"id": early, "reward": 1, "messages": reply}).status_code == 200
        (rollout,) = read_rollouts(tmp_path, None)
        assert (rollout.reward, rollout.turns[-1].observation) == (1.0, "Thanks.")
        assert httpx.post(f"{url}/lfo/outcome", json={"id": early, "reward": 0.5}).json() == {"recorded": True}
        (rollout,) = read_rollouts(tmp_path, None)
        assert rollout.reward == 0.5
        for wrong, status in (
            ({"id": "x", "reward": 1}, 404),
            ({"reward": 1}, 400),
            ({"id": early, "reward": "1"}, 400),
        ):
            assert httpx.post(f"{url}/lfo/outcome", json=wrong).status_code == status
        assert httpx.get(f"{url}/lfo/status").json()["written"] == 1


def test_a_function_tells_outcomes_and_its_failure_loses_nothing(tmp_path: Path, caplog):
    def outcome(messages: Any) -> float | None:
        task = messages[1]["content"]
        return {"good": 1.0, "unknown": None}[task]

    with upstream() as server, recording(server.url, tmp_path, outcome=outcome) as url:
        for task in ("good", "unknown", "bad"):
            converse(url, task)
    found = {each.opening[1].content: each for each in read_rollouts(tmp_path, None)}
    assert {task: (each.reward, each.info["outcome_known"]) for task, each in found.items()} == {
        "good": (1.0, True),
        "unknown": (0.0, False),
        "bad": (0.0, False),
    }
    assert "KeyError: 'bad'" in caplog.text


def test_a_conversation_that_goes_on_after_it_was_written_counts_once(tmp_path: Path):
    with upstream() as server, recording(server.url, tmp_path, idle=0.1) as url:
        messages, _ = converse(url, "go on")
        while httpx.get(f"{url}/lfo/status").json()["open"]:
            pass
        ask(url, [*messages, {"role": "user", "content": "And now?"}])
    assert len([line for path in tmp_path.iterdir() for line in path.read_text().splitlines()]) == 2
    (rollout,) = read_rollouts(tmp_path, None)
    assert [turn.observation for turn in rollout.turns] == ["Reply to go on.", "And now?", ""]


def test_conversations_with_the_same_words_stay_apart(tmp_path: Path):
    """The canned server answers equal requests equally, as a greedy one does."""
    with upstream() as server, recording(server.url, tmp_path) as url:
        first, _ = converse(url, "same")
        second, _ = converse(url, "same")
        for messages, word in ((first, "one"), (second, "two"), (first, "three")):
            ask(url, [*messages, {"role": "user", "content": word}])
    said = sorted(each.turns[1].observation for each in read_rollouts(tmp_path, None))
    assert said == ["one", "three", "two"]


def test_files_rotate_and_an_unfinished_last_line_is_ignored(tmp_path: Path):
    with upstream() as server, recording(server.url, tmp_path, most_bytes=1500) as url:
        for task in "abcdef":
            converse(url, task)
    files = sorted(tmp_path.iterdir())
    assert len(files) > 1
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    with files[-1].open("a") as last:
        last.write('{"opening": [')
    assert sorted(each.opening[1].content for each in read_rollouts(tmp_path, None)) == [*"abcdef"]


def test_a_full_disk_is_no_error_and_lines_wait_for_room(tmp_path: Path, monkeypatch, caplog):
    real, full = os.write, [True]

    def write(descriptor: int, data: bytes) -> int:
        if full[0]:
            real(descriptor, data[:5])
            full[0] = None  # the rest does not fit
            return 5
        if full[0] is None:
            full[0] = True
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    writer = LogWriter(tmp_path, most_bytes=10**6)
    monkeypatch.setattr(os, "write", write)
    for number in range(3):
        writer.write({"opening": [], "turns": [], "task_id": str(number)})
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b""]
    assert "No space left" in caplog.text
    full[0] = False
    writer.write({"opening": [], "turns": [], "task_id": "3"})
    writer.close()
    assert [each.task_id for each in read_rollouts(tmp_path, None)] == ["0", "1", "2", "3"]
    assert (writer.written, writer.lost) == (4, 0)


def test_an_upstream_that_is_not_there_is_one_sentence(tmp_path: Path):
    with recording("http://127.0.0.1:9", tmp_path) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", content=b"{}")
    assert answer.status_code == 502
    assert answer.json()["error"]["message"].startswith("http://127.0.0.1:9 cannot be reached: ")


# --- what the logs are for -------------------------------------------------------------------------------------------


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    with upstream() as server, recording(server.url, folder) as url:
        for task in ("one", "two"):
            converse(url, task)
    return folder


def test_logs_are_an_environment_for_those_who_have_no_other(logs: Path):
    config = load_config([f"env=logs:{logs}"])
    environment = environment_factory(config)()
    assert environment.tools() == TOOLS
    task = environment.tasks("train")[0]
    recorded = next(each for each in read_rollouts(logs, environment) if each.task_id == task.id)
    assert environment.reset(task) == list(recorded.opening)
    assert environment.step(recorded.turns[0].action).observation == recorded.turns[0].observation
    with pytest.raises(UsageError, match=r"set eval\.every=0"):
        environment.tasks("val")


def test_a_resumed_run_learns_what_was_recorded_meanwhile(logs: Path, tmp_path: Path):
    overrides = [
        "policy.frozen=true",
        f"world_model.from_logs={logs}",
        "lookahead=off",
        f"output_dir={tmp_path / 'run'}",
    ]

    def trainer(*more: str) -> Any:
        config = small_config(*overrides, f"env=logs:{logs}", "practice=off", "checkpoint_every=1", *more)
        return create_trainer(config, environment_factory(config), tokenizer())

    trainer("steps=1").fit()
    record = {**numbered_records(logs)[0].record, "conversation": "new"}
    record["turns"][0]["observation"] = "Something new."
    (logs / "rollouts-99999999-1-0001.jsonl").write_text(json.dumps(record) + "\n")
    later = trainer("steps=2")
    later.fit(resume=True)
    assert len(later.mini_batches.replay) == 3


def test_conversations_of_a_file_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at": "red"}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Look."},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "A safe."},
        {"role": "assistant", "content": "A safe."},
    ]
    chats = tmp_path / "chats.jsonl"
    lines = [{"messages": messages, "tools": TOOLS, "reward": 1, "id": "first"}, messages]
    chats.write_text("\n".join(map(json.dumps, lines)))
    command = ["lfo", "record", "--import", str(chats), "--output", str(tmp_path / "logs")]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 0
    assert "2 conversations in " in capsys.readouterr().out
    one, other = read_rollouts(tmp_path / "logs", None)
    assert (one.task_id, one.reward, other.info["outcome_known"]) == ("first", 1.0, False)
    assert [each.role for each in one.opening] == ["system", "user"]
    assert one.turns[0].observation == other.turns[0].observation == "A safe."
    chats.write_text('{"messages": [1]}')
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 2
    assert f"{chats}, line 1: needs messages" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "name either the server to stand before"),
        (["--upstream", "http://x", "--hide", "("], "is no regular expression"),
        (["--upstream", "http://x", "--outcome", "no_such_module:f"], "no_such_module"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], sentence: str, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lfo", "record", *arguments, "--port", "0", "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 2
    assert sentence in capsys.readouterr().err


def test_several_calls_in_a_message_are_several_turns_and_broken_ones_stay_as_they_are():
    calls = [
        {"id": "a", "function": {"name": "look", "arguments": "{}"}},
        {"id": "b", "function": {"name": "look", "arguments": '{"at": NaN}'}},
        {"id": "c", "function": {"name": "look", "arguments": '{"at"'}},
    ]
    replies = [{"role": "tool", "tool_call_id": each, "content": f"reply {each}"} for each in "bca"]
    messages: list[Any] = [{"role": "assistant", "content": "So:", "tool_calls": calls}, *replies]
    rollout = chat_rollout([{"role": "user", "content": "x"}, *messages, {"role": "user", "content": "And?"}])
    assert [turn.observation for turn in rollout.turns] == ["reply a", "reply b", "reply c", "And?"]
    assert [turn.call and turn.call.arguments for turn in rollout.turns] == [{}, None, None, None]
    assert rollout.turns[0].action.startswith("So:\n<tool_call>")
    assert '{"at"' in rollout.turns[2].action
