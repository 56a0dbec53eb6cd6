"""Look-ahead in words in front of a chat server that knows nothing of lfo."""

import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import httpx
import openai
import pytest

from lfo.engines import create_trainer
from lfo.env.log_folder import numbered_records
from lfo.loading import environment_factory
from lfo.play.look_ahead import Question
from lfo.serving import following
from lfo.serving.app import Guarded, listen, make_server
from lfo.serving.following import FollowingWorldModel
from lfo.serving.in_words import InWords
from lfo.serving.proxy import Proxy
from lfo.serving.recording import Recorder
from serving_load import malformed
from small_runs import small_config, tokenizer
from test_record import upstream

TOKEN, KEY = "the token", "the key of the upstream"
NUMBER = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": NUMBER}} for name in ("open", "look")]


class Agent(BaseHTTPRequestHandler):
    """Drafts a call with the code 111; told of another in words, it takes that one."""

    asked: list[dict[str, Any]]
    stubborn = False
    acts_on = "That call has not been made"
    draft: ClassVar = {"code": "111"}

    def do_POST(self) -> None:
        wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["Authorization"] == f"Bearer {KEY}"
        assert not wanted.get("stream")
        self.asked.append(wanted)
        if wanted["model"] == "none":
            self.answer({"error": {"message": "no such model"}}, 404)
            return
        last, name = wanted["messages"][-1], wanted["tools"][0]["function"]["name"]
        told = last["role"] == "tool" and self.acts_on in last["content"] and not self.stubborn
        found = re.search(r"(?:is|be) (\w+)\.", last["content"]) if told else None
        (argument,) = wanted["tools"][0]["function"]["parameters"]["properties"]
        if last["role"] == "tool" and not told and "expected" not in last["content"] and not self.stubborn:
            message: dict[str, Any] = {"role": "assistant", "content": "Done."}
        else:
            arguments = {argument: found[1]} if found else self.draft
            function = {"name": name, "arguments": json.dumps(arguments)}
            call = {"id": f"call_{len(self.asked)}", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        finish = "stop" if message["content"] else "tool_calls"
        choice = {"index": 0, "message": message, "finish_reason": finish}
        usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
        self.answer({"id": "c", "created": 1, "model": "m", "object": "x", "choices": [choice], "usage": usage})

    def answer(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Served(NamedTuple):
    url: str
    client: openai.OpenAI
    asked: list[dict[str, Any]]  # by us, of the upstream, without the probe
    questions: list[Question]


@contextmanager
def served(
    folder: Path, *, tools: Sequence[str] | None = ("open",), probed: str = "m", **agent: Any
) -> Iterator[Served]:
    questions: list[Question] = []

    def predictor(batch: Sequence[Question]) -> list[str]:
        questions.extend(batch)
        return ["The code is 222."] * len(batch)

    handler = type("Handler", (Agent,), {"asked": [], **agent})
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), handler) as upstream,
        Recorder(folder, idle=600, most_bytes=10**6) as recorder,
        listen("127.0.0.1", 0) as bound,
    ):
        threading.Thread(target=upstream.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{upstream.server_port}/v1"
        proxy = Proxy(address, recorder, key=KEY, answerer=InWords(predictor, tools=tools))
        serving = make_server(Guarded(proxy, TOKEN), passes_through=True)
        thread = threading.Thread(target=serving.run, kwargs={"sockets": [bound]})
        thread.start()
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
        with openai.OpenAI(base_url=url, api_key=TOKEN, max_retries=0) as client:
            client.chat.completions.create(model=probed, messages=[{"role": "user", "content": "x"}], tools=TOOLS[1:])
            handler.asked.clear()
            yield Served(url, client, handler.asked, questions)
        serving.should_exit = True
        thread.join()
        upstream.shutdown()


OPENING: Any = [{"role": "user", "content": "Open the safe."}]


def codes(message: Any) -> list[str]:
    return [json.loads(call.function.arguments)["code"] for call in message.tool_calls or ()]


def test_the_upstream_redrafts_after_words_and_the_exchange_stays_with_the_conversation(tmp_path: Path):
    with served(tmp_path) as server:
        answer = server.client.chat.completions.create(model="m", messages=OPENING, tools=TOOLS)
        assert codes(answer.choices[0].message) == ["222"]
        (imagined,) = answer.lfo["imagined"]
        assert imagined == {
            "name": "open",
            "arguments": {"code": "111"},
            "expected": "The code is 222.",
            "kept": True,
            "checked": False,
        }
        assert answer.usage.total_tokens == 14
        first, second = server.asked
        assert first["messages"] == OPENING
        told = second["messages"][-1]
        assert told["content"] == (
            'That call has not been made. Its expected reply is: "The code is 222." Make the right call now.'
        )
        assert (told["role"], told["tool_call_id"]) == ("tool", second["messages"][-2]["tool_calls"][0]["id"])
        assert [(each.state.task, each.call.arguments) for each in server.questions] == [
            ("Open the safe.", {"code": "111"})
        ], "222 stands in the prediction, so it is called for real"
        message = answer.choices[0].message
        reply = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It is open."}
        after = [*OPENING, message.model_dump(exclude_none=True), reply]
        end = server.client.chat.completions.create(model="m", messages=after, tools=TOOLS)
        assert end.choices[0].message.content == "Done."
        assert [each["role"] for each in server.asked[-1]["messages"]] == ["user", *("assistant", "tool") * 2]
    (record,) = (each.record for each in numbered_records(tmp_path) if len(each.record["turns"]) > 1)
    assert [(turn["predicted"], turn["observation"]) for turn in record["turns"]] == [
        (True, "The code is 222."),
        (False, "It is open."),
        (False, ""),
    ]


def test_a_draft_stands_if_no_other_call_follows(tmp_path: Path):
    with served(tmp_path, stubborn=True) as server:
        answer = server.client.chat.completions.create(model="m", messages=OPENING, tools=TOOLS)
        assert codes(answer.choices[0].message) == ["111"]
        assert [each["kept"] for each in answer.lfo["imagined"]] == [False]
        again = [*OPENING, answer.choices[0].message.model_dump(exclude_none=True)]
        again.append({"role": "tool", "tool_call_id": answer.choices[0].message.tool_calls[0].id, "content": "No."})
        server.client.chat.completions.create(model="m", messages=again, tools=TOOLS)
        assert [each["role"] for each in server.asked[2]["messages"]] == ["user", "assistant", "tool"]


def test_a_call_that_does_not_fit_its_tool_is_told_so_and_no_prediction_is_made(tmp_path: Path):
    with served(tmp_path, draft={}) as server:
        answer = server.client.chat.completions.create(model="m", messages=OPENING, tools=TOOLS)
        assert "open needs the argument code." in server.asked[1]["messages"][-1]["content"]
        assert answer.lfo["imagined"][0]["checked"]


def test_a_stream_says_the_same(tmp_path: Path):
    with served(tmp_path) as server:
        stream = server.client.chat.completions.create(
            model="m", messages=OPENING, tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
    (call,) = chunks[0].choices[0].delta.tool_calls
    assert json.loads(call.function.arguments) == {"code": "222"}
    assert chunks[-1].usage.total_tokens == 14


@pytest.mark.parametrize(
    ("options", "requests"),
    [({"n": 2}, 1), ({"tools": []}, 1), ({"tools": TOOLS[1:]}, 1), ({"tool_choice": "none"}, 1)],
)
def test_what_cannot_be_imagined_is_the_upstreams_own(tmp_path: Path, options: dict[str, Any], requests: int):
    with served(tmp_path) as server:
        body = {"model": "m", "messages": OPENING, "tools": TOOLS, **options}
        headers = {"Authorization": f"Bearer {TOKEN}"}
        httpx.post(f"{server.url}/chat/completions", json=body, headers=headers)
        assert len(server.asked) == requests
        assert not server.questions


def test_errors_of_the_upstream_are_passed_on_and_strangers_are_refused(tmp_path: Path):
    with served(tmp_path) as server:
        with pytest.raises(openai.NotFoundError, match="no such model"):
            server.client.chat.completions.create(model="none", messages=OPENING, tools=TOOLS)
        assert httpx.post(f"{server.url}/chat/completions", json={}).status_code == 403


def test_an_upstream_that_acts_on_the_mark_only_is_told_with_the_mark(tmp_path: Path):
    with served(tmp_path, acts_on="(expected) ") as server:
        answer = server.client.chat.completions.create(model="m", messages=OPENING, tools=TOOLS)
        assert codes(answer.choices[0].message) == ["222"]
        assert server.asked[1]["messages"][-1]["content"] == "(expected) The code is 222."


def test_malformed_requests_get_no_error_of_ours(caplog: pytest.LogCaptureFixture):
    answerer = InWords(lambda batch: ["It says 222."] * len(batch), tools=None)
    with upstream() as server, listen("127.0.0.1", 0) as bound:
        serving = make_server(Proxy(server.url, None, answerer=answerer), passes_through=True)
        thread = threading.Thread(target=serving.run, kwargs={"sockets": [bound]})
        thread.start()
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1/chat/completions"
        with httpx.Client() as client:
            statuses = {client.post(url, content=malformed(seed, "m")).status_code for seed in range(200)}
        serving.should_exit = True
        thread.join()
    assert statuses == {200, 400}
    assert "without look-ahead" not in caplog.text


def test_a_new_checkpoint_is_taken_without_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(following, "LOOK_EVERY", 0.0)

    def train(steps: int, *, resume: bool) -> None:
        config = small_config(f"output_dir={tmp_path / 'run'}", "checkpoint_every=1", f"steps={steps}")
        create_trainer(config, environment_factory(config), tokenizer()).fit(resume=resume)

    train(1, resume=False)
    world_model = FollowingWorldModel(tmp_path / "run")
    before = [each.clone() for each in world_model.agent.model.adapter_parameters("world_model")]
    world_model.take_newest()
    assert world_model.loaded is not None
    assert world_model.loaded.name == "step-000001"
    train(2, resume=True)
    world_model.take_newest()
    assert world_model.loaded.name == "step-000002"
    after = world_model.agent.model.adapter_parameters("world_model")
    assert any(not one.equal(other) for one, other in zip(before, after, strict=True))
