"""Serving with OpenAI's chat API: the real client, a real server, the real sampler and look-ahead."""

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lfo.agent import Agent, build_agent
from lfo.errors import UsageError
from lfo.loading import environment_factory
from lfo.protocol.chat import ChatCodec
from lfo.serving import batcher as batcher_module
from lfo.serving.app import listen, make_app, make_server
from lfo.serving.batcher import Batcher
from lfo.serving.conversations import Answered, Context, Conversations, _alternates
from lfo.serving.speaker import local_speaker
from lfo.serving.wire import ChatRequest, RefusedRequest, Reply, chunks, completion, parse_request
from lfo.types import Message, ToolCall
from serving_load import malformed, play, words_of
from small_runs import base, fussy_calls, randomised, small_config, tokenizer

MODEL, TOKEN = "run", "the token"


def small_agent(*overrides: str) -> Agent:
    config = small_config(*overrides)
    agent = build_agent(config, environment_factory(config), tokenizer(), base())
    randomised(agent.model)
    agent.sampler.refresh()
    return agent


@pytest.fixture(scope="module")
def agent() -> Agent:
    return small_agent()


class Server(NamedTuple):
    url: str
    batcher: Batcher
    client: openai.OpenAI


@pytest.fixture(scope="module")
def server(agent: Agent) -> Iterator[Server]:
    with Batcher(local_speaker(agent)) as batcher, listen("127.0.0.1", 0) as bound:
        serving = make_server(make_app(batcher.submit, model=MODEL, token=TOKEN, figures=batcher.listener.figures))
        thread = threading.Thread(target=serving.run, kwargs={"sockets": [bound]})
        thread.start()
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
        with openai.OpenAI(base_url=url, api_key=TOKEN, max_retries=0) as client:
            yield Server(url, batcher, client)
        serving.should_exit = True
        thread.join()


def ask(server: Server, messages: list[Any], **options: Any) -> Any:
    return server.client.chat.completions.create(model=MODEL, messages=messages, temperature=0, **options)


def opening(agent: Agent, place: int = 0) -> list[Any]:
    messages = agent.make_environment().reset(agent.tasks("val")[place])
    return [{"role": each.role, "content": each.content} for each in messages]


def place_with_taken_back(agent: Agent) -> int:
    """The first task in which something is imagined and taken back."""
    rollouts = agent.roll_out(agent.tasks("val")[:6], greedy=True)
    return next(place for place, rollout in enumerate(rollouts) if rollout.taken_back)


def request(messages: list[Any], **options: Any) -> ChatRequest:
    return parse_request(json.dumps({"model": MODEL, "messages": messages, **options}).encode(), model=MODEL)


# --- the same agent ------------------------------------------------------------------------------------------------


def test_a_client_plays_as_the_agent_does_by_itself(agent: Agent, server: Server):
    tasks = agent.tasks("val")[:6]
    own = agent.roll_out(tasks, greedy=True)
    assert any(turn.predicted for rollout in own for turn in rollout.turns), "nothing was imagined and kept"
    assert any(rollout.taken_back for rollout in own), "nothing was imagined and taken back"
    options = {"max_turns": agent.runner_config.max_turns, "temperature": 0}
    with ThreadPoolExecutor(6) as pool:
        played = list(
            pool.map(lambda task: play(server.client, MODEL, agent.make_environment(), task, **options), tasks)
        )
    for rollout, (reward, said, heard) in zip(own, played, strict=True):
        real = [turn for turn in rollout.turns if not turn.predicted]
        assert said == [turn.action for turn in real]
        assert heard == [turn.observation for turn in real]
        assert reward == rollout.reward


@pytest.mark.parametrize(
    ("lookahead", "overrides"),
    [
        (True, ("imagine.drafts=2",)),
        (True, ("imagine.form=tool",)),
        (True, ("imagine.form=user",)),
        (False, ()),
    ],
)
def test_other_ways_of_looking_ahead_are_served_too(lookahead: bool, overrides: tuple[str, ...]):
    agent = small_agent(*overrides)
    (own,) = agent.roll_out(agent.tasks("val")[:1], greedy=True, lookahead=lookahead)
    imagined = [*(turn for turn in own.turns if turn.predicted), *own.taken_back]
    assert bool(imagined) == lookahead
    messages, told = opening(agent), []
    with Batcher(local_speaker(agent), lookahead=lookahead) as batcher:
        for turn in (turn for turn in own.turns if not turn.predicted):
            reply = batcher.submit(request(messages, temperature=0)).result()
            assert list(reply.calls.values()) == [turn.call] * (turn.call is not None)
            told += reply.imagined
            message = completion(reply, model=MODEL)["choices"][0]["message"]
            messages += [
                message,
                {"role": "tool", "tool_call_id": next(iter(reply.calls), ""), "content": turn.observation},
            ]
    assert len(told) == len(imagined), "what was imagined before counts"


def test_a_control_that_needs_the_worlds_own_tasks_is_refused():
    with pytest.raises(UsageError, match=r"lookahead_source=truth.*--no-lookahead"):
        Batcher(local_speaker(small_agent("lookahead_source=truth")))


def test_a_stream_says_the_same(agent: Agent, server: Server):
    whole = ask(server, opening(agent))
    events = list(ask(server, opening(agent), stream=True, stream_options={"include_usage": True}))
    deltas = [event.choices[0].delta for event in events if event.choices]
    (call,) = whole.choices[0].message.tool_calls
    pieces = [piece for delta in deltas for piece in delta.tool_calls or []]
    assert pieces[0].id.startswith("call_")
    assert pieces[0].id != call.id, "an id is never given twice"
    assert pieces[0].function.name == call.function.name
    assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments
    assert [event.choices[0].finish_reason for event in events if event.choices][-1] == "tool_calls"
    assert events[-1].usage == whole.usage
    assert whole.usage.prompt_tokens + whole.usage.completion_tokens == whole.usage.total_tokens


@pytest.mark.parametrize("kept", [True, False])
def test_what_was_imagined_comes_along(agent: Agent, server: Server, kept: bool):
    place = 0 if kept else place_with_taken_back(agent)
    task = agent.tasks("val")[place]
    (own,) = agent.roll_out([task], greedy=True)
    world, messages, imagined = agent.make_environment(), opening(agent, place), []
    world.reset(task)
    for _ in range(len(own.turns)):
        answer = ask(server, messages)
        imagined += [
            (each["name"], each["arguments"], each["expected"], each["kept"]) for each in answer.lfo["imagined"]
        ]
        message = answer.choices[0].message
        result = world.step(words_of(message))
        if result.done:
            break
        heard = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": result.observation}
        messages += [message.model_dump(exclude_none=True), heard]
    expected = [turn for turn in (*own.turns, *own.taken_back) if turn.predicted and turn.call]
    assert sorted(map(str, imagined)) == sorted(
        str((turn.call.name, turn.call.arguments, turn.observation, not turn.taken_back))
        for turn in expected
        if turn.call
    )
    assert kept in {each[3] for each in imagined}


def test_sampling_is_named_by_its_seed(agent: Agent, server: Server):
    said = [
        words_of(
            server.client.chat.completions.create(
                model=MODEL, messages=opening(agent), temperature=2, seed=seed, tools=[]
            )
            .choices[0]
            .message
        )
        for seed in (1, 1, 2, 3, 4)
    ]
    assert said[0] == said[1]
    assert len(set(said)) > 1


# --- conversations ---------------------------------------------------------------------------------------------------


def after_one_turn(server: Server, agent: Agent) -> tuple[list[Any], Any]:
    first = ask(server, opening(agent)).choices[0].message
    heard = {
        "role": "tool",
        "tool_call_id": first.tool_calls[0].id,
        "content": "Acme, bank\nDesk 555-1240: invoice copy",
    }
    return [*opening(agent), first.model_dump(exclude_none=True), heard], first


def rows_of(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From now on: how each request's context was made."""
    made: list[str] = []
    for name in ("_grown", "_written"):
        real = getattr(batcher_module.Conversations.context, "__globals__")[name]  # noqa: B009

        def watched(*arguments: Any, real: Any = real, name: str = name) -> Any:
            made.append(name)
            return real(*arguments)

        monkeypatch.setitem(batcher_module.Conversations.context.__globals__, name, watched)
    return made


def test_a_conversation_goes_on_only_behind_its_own_messages(agent: Agent, server: Server, monkeypatch):
    messages, first = after_one_turn(server, agent)
    made = rows_of(server, monkeypatch)
    own = words_of(ask(server, messages).choices[0].message)
    assert made == ["_grown"]
    again = words_of(ask(server, messages).choices[0].message)
    assert (made[1:], again) == (["_grown"], own), "a request may be repeated"

    changed = json.loads(json.dumps(messages))
    changed[1]["content"] = "I want something else from Acme."
    ask(server, changed)
    assert made[2:] == ["_written"], "an id opens nothing behind other messages"
    other_tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    ask(server, messages, tools=other_tools)
    assert made[3:] == ["_written"]
    unknown = json.loads(json.dumps(messages).replace(first.tool_calls[0].id, "call_of_a_stranger"))
    assert words_of(ask(server, unknown).choices[0].message)
    assert made[4:] == ["_written"], "after a restart a conversation is written from its messages"


def test_the_user_may_speak_again(agent: Agent, server: Server, monkeypatch):
    messages, _ = after_one_turn(server, agent)
    answer = ask(server, messages).choices[0].message
    made = rows_of(server, monkeypatch)
    assert answer.tool_calls
    heard = {"role": "user", "content": "Never mind. Thank you."}
    ask(server, [*messages, answer.model_dump(exclude_none=True), heard])
    ask(server, [*messages, {"role": "assistant", "content": "Shall I go on?"}, {"role": "user", "content": "Yes."}])
    assert made == ["_grown", "_grown"]
    ask(server, [*messages, {"role": "user", "content": "Two in a row."}])
    assert made[2:] == ["_written"]


def test_what_stands_beside_a_conversation_does_not_change_it(agent: Agent):
    """Answers of each conversation alone, and in one batch with others whose slots lie in the same sampler."""
    conversations = [opening(agent, place) for place in range(5)]

    def said(batcher: Batcher, together: bool) -> list[str]:
        futures = []
        for messages in conversations:
            futures.append(batcher.submit(request(messages, temperature=0)))
            if not together:
                futures[-1].result()
        return [str(list(each.result().calls.values())) for each in futures]

    with Batcher(local_speaker(agent), slots=2) as narrow, Batcher(local_speaker(agent), slots=8) as wide:
        alone = said(narrow, False)
        assert len(set(alone)) == 5
        assert said(narrow, True) == said(wide, True) == alone


def test_many_conversations_are_answered_in_few_batches(agent: Agent):
    batcher = Batcher(local_speaker(agent), slots=16)
    answers = [batcher.submit(request(opening(agent, place), temperature=0)) for place in range(20)]
    with batcher:
        assert all(answer.result().calls for answer in answers)
        assert batcher.batches == 2


def test_conversations_that_were_kept_too_long_are_forgotten(agent: Agent, monkeypatch):
    monkeypatch.setattr("lfo.serving.conversations.KEPT", 2)
    with Batcher(local_speaker(agent)) as batcher:
        for place in range(4):
            batcher.submit(request(opening(agent, place), temperature=0)).result()
        assert len(batcher._conversations) == 2


# --- what can go wrong -----------------------------------------------------------------------------------------------


def test_nothing_is_told_without_the_token(server: Server):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}]}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
        for path in ("/chat/completions", "/models", "/nothing"):
            answer = httpx.post(server.url + path, json=body, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "no_token")
    with pytest.raises(openai.PermissionDeniedError):
        openai.OpenAI(base_url=server.url, api_key="wrong", max_retries=0).models.list()
    assert [model.id for model in server.client.models.list()] == [MODEL]
    with pytest.raises(openai.NotFoundError, match="this server only has"):
        server.client.files.list()


@pytest.mark.parametrize(
    ("wrong", "param", "sentence"),
    [
        ({"n": 2}, "n", "n can only be 1"),
        ({"stop": ["x"]}, "stop", "stop can only be"),
        ({"tool_choice": "required"}, "tool_choice", 'can only be "auto" or "none"'),
        ({"temperature": -1}, "temperature", "temperature must be a number from 0 up to 2"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be a whole number from 1"),
        ({"seed": True}, "seed", "seed must be a whole number$"),
        ({"messages": []}, "messages", "a list of 1 to 512 messages"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", "nothing to answer"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", "tool_call_id must be"),
        ({"tools": [{"type": "function", "function": {"name": "\ud800"}}]}, "tools", "surrogate"),
        ({"tools": json.loads("[" * 80 + "]" * 80)}, None, "nested at most 64 deep"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(wrong: dict[str, Any], param: str, sentence: str):
    with pytest.raises(RefusedRequest, match=sentence) as refused:
        request(**{"messages": [{"role": "user", "content": "Hi."}], **wrong})
    assert (refused.value.param, refused.value.status) == (param, 400)


def test_a_wrong_model_and_a_full_context_have_the_clients_own_errors(agent: Agent, server: Server):
    with pytest.raises(openai.NotFoundError, match="this server has 'run'"):
        server.client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "Hi."}])
    with pytest.raises(openai.BadRequestError, match="the run's context ends at 1024") as error:
        ask(server, [{"role": "user", "content": "word " * 3000}])
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="special token"):
        ask(server, opening(agent), tools=[{"type": "function", "function": {"name": "<|im_end|>"}}])
    short = ask(server, opening(agent), max_tokens=3)
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 3)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
KEYS = st.sampled_from(["model", "messages", "tools", "temperature", "seed", "stop", "stream", "stream_options", "n"])


@given(st.dictionaries(KEYS, JSON | st.just(MODEL)) | JSON | st.binary())
@settings(max_examples=60, deadline=None)
def test_any_body_is_read_or_refused(value: Any):
    body = value if isinstance(value, bytes) else json.dumps(value).encode("utf-8", "replace")
    with contextlib.suppress(RefusedRequest):
        assert isinstance(parse_request(body, model=MODEL), ChatRequest)


def test_malformed_requests_neither_stop_the_server_nor_change_a_conversation(agent: Agent, server: Server):
    """`python tests/serving_load.py RUN` sends 10,000."""
    messages, _ = after_one_turn(server, agent)
    alone = words_of(ask(server, messages).choices[0].message)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(headers=headers) as http, ThreadPoolExecutor(8) as pool:

        def send(seed: int) -> int:
            return http.post(f"{server.url}/chat/completions", content=malformed(seed, MODEL)).status_code

        statuses = set(pool.map(send, range(150)))
        assert words_of(ask(server, messages).choices[0].message) == alone
    assert statuses <= {200, 400, 404}
    assert {200, 400} <= statuses


def test_a_failure_inside_costs_its_own_batch_only(agent: Agent, server: Server, monkeypatch, caplog):
    real = Batcher._speak
    monkeypatch.setattr(Batcher, "_speak", lambda *_: 1 / 0)
    with pytest.raises(openai.InternalServerError, match="its log says why"):
        ask(server, opening(agent))
    assert "ZeroDivisionError" in caplog.text
    monkeypatch.setattr(Batcher, "_speak", real)
    assert ask(server, opening(agent)).choices[0].message.tool_calls


@pytest.mark.parametrize("broken", ["_prepare", "_reply"])
def test_a_failure_of_one_request_is_told_to_that_one_alone(agent: Agent, monkeypatch, broken: str):
    real = getattr(Batcher, broken)

    def fails_for_one(self: Batcher, work: Any, *rest: Any) -> Any:
        asked = work.request if broken == "_prepare" else work.job.request
        return 1 / 0 if asked.seed == 13 else real(self, work, *rest)

    monkeypatch.setattr(Batcher, broken, fails_for_one)
    batcher = Batcher(local_speaker(agent))
    answers = [batcher.submit(request(opening(agent), temperature=0, seed=seed)) for seed in (12, 13, 14)]
    with batcher:
        assert [type(each.exception()) for each in answers] == [type(None), RefusedRequest, type(None)]
        assert batcher.batches == 1


def raw_request(server: Server, agent: Agent, **options: Any) -> tuple[socket.socket, bytes]:
    body = json.dumps({"model": MODEL, "messages": opening(agent), "temperature": 0, **options}).encode()
    address = httpx.URL(server.url)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    return socket.create_connection((address.host, address.port)), head.encode() + body


def test_slow_clients_and_clients_that_leave_hold_up_nobody(agent: Agent, server: Server):
    slow, wanted = raw_request(server, agent, stream=True)
    unsaid, _ = raw_request(server, agent)
    garbage, _ = raw_request(server, agent)
    with slow, unsaid, garbage:
        garbage.sendall(bytes(range(256)) + b"\r\n\r\n")
        assert garbage.recv(12) == b"HTTP/1.1 400"
        slow.sendall(wanted[:50])  # one that has not finished asking
        unsaid.sendall(b"GET")  # and one that never will
        assert ask(server, opening(agent)).choices[0].message.tool_calls
        slow.sendall(wanted[50:])
        assert slow.recv(12) == b"HTTP/1.1 200"  # reads a little, and then nothing
        assert ask(server, opening(agent)).choices[0].message.tool_calls
    stream = ask(server, opening(agent), stream=True)
    next(iter(stream))
    stream.close()
    assert ask(server, opening(agent)).choices[0].message.tool_calls


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_request_whose_client_has_left_is_not_computed(agent: Agent, server: Server, monkeypatch):
    busy, entered = threading.Event(), threading.Event()
    real, batches = Batcher._speak, []

    def held(self: Batcher, ready: Any, *rest: Any) -> None:
        batches.append(len(ready))
        entered.set()
        busy.wait()
        real(self, ready, *rest)

    monkeypatch.setattr(Batcher, "_speak", held)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, server, opening(agent))
        entered.wait()
        leaving, wanted = raw_request(server, agent)
        leaving.sendall(wanted)
        wait_for(lambda: not server.batcher._waiting.empty())
        job = server.batcher._waiting.queue[0]
        leaving.close()
        try:
            wait_for(job.answer.cancelled)
        finally:
            busy.set()
        assert first.result().choices[0].message.tool_calls
    assert ask(server, opening(agent)).choices[0].message.tool_calls
    assert batches == [1, 1]


def test_a_server_with_too_much_to_do_says_so(agent: Agent):
    batcher = Batcher(local_speaker(agent))  # nobody works
    batcher._waiting.maxsize = 1
    batcher.submit(request(opening(agent)))
    with pytest.raises(RefusedRequest) as refused:
        batcher.submit(request(opening(agent)))
    assert refused.value.status == 503


def test_a_taken_port_is_one_sentence():
    with listen("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        assert bound.getsockname()[0] == "127.0.0.1"
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1 port {port}: .*; choose another --port"):
            listen("127.0.0.1", port)


def test_text_around_a_call_is_its_content():
    call = ToolCall(name="look", arguments={"at": "é"})
    reply = Reply(content="Let me see.", calls={"call_1": call}, finish="tool_calls")
    message = completion(reply, model=MODEL)["choices"][0]["message"]
    assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": "é"}'}
    sent = {
        "messages": [
            {"role": "user", "content": "Hi."},
            message,
            {"role": "tool", "tool_call_id": "call_1", "content": "x"},
        ]
    }
    read = request(**sent)
    assert read.call_ids == (None, "call_1", None)
    assert (
        read.messages[1].content == 'Let me see.\n<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
    )
    assert read.messages[2] == Message(role="tool", content="x", name="look")
    plain = dataclasses.replace(reply, calls={}, finish="stop")
    assert [chunk["choices"][0]["delta"] for chunk in chunks(plain, model=MODEL)] == [
        {"role": "assistant", "content": "Let me see."},
        {},
    ]


def test_several_calls_of_a_reply_are_answered_one_by_one_behind_the_row_that_made_them():
    codec, tools = ChatCodec(tokenizer(), fussy_calls().tools()), "tools"
    calls = {"call_1": ToolCall(name="look", arguments={}), "call_2": ToolCall(name="say", arguments={"x": 1})}
    reply = Reply(content="Both.", calls=calls, finish="tool_calls")
    message = completion(reply, model=MODEL)["choices"][0]["message"]
    assert [call["id"] for call in message["tool_calls"]] == list(calls)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(reply, model=MODEL)]
    assert [delta["tool_calls"][0]["index"] for delta in deltas if "tool_calls" in delta] == [0, 0, 1, 1]

    heard = [{"role": "tool", "tool_call_id": number, "content": f"Answer to {number}."} for number in calls]
    user = {"role": "user", "content": "Go."}
    asked = request(messages=[user, message, *heard])
    conversations = Conversations()
    kept = Context(opening=asked.messages[:1], tokens=(5, 6, 7), turns=(), transcript=asked.messages[:2])
    conversations.keep("call_1", Answered(messages=asked.messages[:2], tools=tools, context=kept))
    grown = conversations.context(asked, codec, tools)
    after = codec.after_action("Answer to call_1.", "Answer to call_2.", stopped=True)
    assert list(grown.tokens) == [5, 6, 7, *after.ids], "its tokens go on"
    assert [(turn.call, turn.observation[-2]) for turn in grown.turns] == [
        (calls["call_1"], "1"),
        (calls["call_2"], "2"),
    ]
    anew = Conversations().context(asked, codec, tools)
    assert [turn.call for turn in anew.turns] == list(calls.values()), "after a restart too"


@pytest.mark.parametrize(
    ("roles", "alternates"),
    [
        (["user"], True),
        (["tool", "tool", "assistant", "user"], True),
        (["tool", "assistant", "user", "user"], False),
        (["tool", "assistant", "system"], False),
        (["user", "assistant", "assistant", "user"], False),
        (["user", "assistant"], False),
    ],
)
def test_only_a_conversation_of_turns_continues_another(roles: list[Any], alternates: bool):
    assert _alternates([Message(role=role, content="x") for role in roles]) is alternates
