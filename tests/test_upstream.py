"""Serving in front of a vLLM server: the real look-ahead and HTTP, and our own sampler behind vLLM's interface."""

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lfo.agent import Agent
from lfo.checkpoints import MANIFEST
from lfo.cli import main
from lfo.config import to_yaml
from lfo.errors import UsageError, WorkError
from lfo.play.look_ahead import Question
from lfo.play.reply_store import situation_of
from lfo.protocol.world_model import WorldModelState
from lfo.serving.batcher import Batcher
from lfo.serving.speaker import upstream_speaker
from lfo.serving.upstream import Failed, Upstream, UpstreamSlots, completer
from lfo.serving.wire import Reply, completion
from lfo.types import Rollout, Speech, ToolCall
from small_runs import small_config, tokenizer
from test_serving import MODEL, opening, place_with_taken_back, request, small_agent


@pytest.fixture(scope="module")
def agent() -> Agent:
    return small_agent()


class Completions(BaseHTTPRequestHandler):
    """What `upstream` asks of vLLM, answered by the real sampler: no vLLM runs without a GPU."""

    agent: Agent
    models: tuple[str, ...]
    refuses: Callable[[dict[str, Any]], bool]
    one_at_a_time = threading.Lock()

    def do_GET(self) -> None:
        self.answer({"data": [{"id": model} for model in self.models]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refuses(asked):
            self.answer({"message": "too long"}, status=400)
            return
        model, end = self.agent.model, self.agent.codec.end_of_turn
        assert (asked["stop_token_ids"], asked["return_token_ids"], asked["temperature"]) == ([end], True, 0)
        adapters = {"policy": model.policy_adapters, "world_model": model.world_model_adapters}[asked["model"]]
        with self.one_at_a_time:
            (said,) = self.agent.sampler.generate(
                [asked["prompt"]], adapters=adapters, max_new_tokens=asked["max_tokens"]
            )
        self.answer({"choices": [{"token_ids": said.tokens, "finish_reason": "stop" if said.stopped else "length"}]})

    def answer(self, value: Any, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def served(
    agent: Agent,
    refuses: Callable[[dict[str, Any]], bool] = lambda asked: False,
    models: tuple[str, ...] = ("policy", "world_model"),
) -> Iterator[str]:
    handler = type("Handler", (Completions,), {"agent": agent, "models": models, "refuses": staticmethod(refuses)})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as upstream:
        threading.Thread(target=upstream.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{upstream.server_port}"
        upstream.shutdown()


def check_replies(batcher: Batcher, messages: list[Any], own: Rollout) -> list[Reply]:
    """Replay a rollout and check that each reply makes its call."""
    replies = []
    for turn in (turn for turn in own.turns if not turn.predicted):
        replies.append(reply := batcher.submit(request(messages, temperature=0)).result())
        assert list(reply.calls.values()) == [turn.call] * (turn.call is not None)
        message = completion(reply, model=MODEL)["choices"][0]["message"]
        answer = {"role": "tool", "tool_call_id": next(iter(reply.calls), ""), "content": turn.observation}
        messages = [*messages, message, answer]
    return replies


@pytest.fixture
def run(agent: Agent, tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(to_yaml(agent.config))
    return tmp_path


def test_a_server_that_holds_both_adapters_can_stand_in_for_the_sampler(agent: Agent, run: Path):
    place = place_with_taken_back(agent)
    (own,) = agent.roll_out([agent.tasks("val")[place]], greedy=True)
    assert own.taken_back, "tokens must be taken back there too"
    with served(agent) as url, Batcher(upstream_speaker(run, url)) as batcher:
        check_replies(batcher, opening(agent, place), own)
    with pytest.raises(WorkError, match=f"{url}/v1/models cannot be reached: .*refused"):
        upstream_speaker(run, url)


def test_an_address_of_something_else_is_one_sentence(run: Path, monkeypatch):
    with pytest.raises(WorkError, match="nowhere/v1/models cannot be reached: unknown url type"):
        upstream_speaker(run, "nowhere")
    for answer in ({"detail": "Not Found"}, ["policy"], {"data": None}):
        monkeypatch.setattr(Upstream, "_ask", lambda self, path, answer=answer: answer)
        with pytest.raises(WorkError, match="http://elsewhere/v1/models names no models"):
            upstream_speaker(run, "http://elsewhere")


@pytest.mark.parametrize("form", ["tool", "user"])
def test_words_are_told_there_as_here(form: str, tmp_path: Path):
    agent = small_agent(f"imagine.form={form}")
    (tmp_path / "config.yaml").write_text(to_yaml(agent.config))
    (own,) = agent.roll_out(agent.tasks("val")[:1], greedy=True)
    imagined = [*(turn for turn in own.turns if turn.predicted), *own.taken_back]
    asked: list[str] = []

    def noting(request: dict[str, Any]) -> bool:
        asked.append(tokenizer().decode(request["prompt"]))
        return False

    with served(agent, noting) as url, Batcher(upstream_speaker(tmp_path, url)) as batcher:
        replies = check_replies(batcher, opening(agent, 0), own)
    assert sum(len(reply.imagined) for reply in replies) == len(imagined) > 0
    assert any("That call has not been made." in prompt for prompt in asked)
    assert not any("(expected)" in prompt for prompt in asked)


def test_a_run_from_before_there_were_forms_is_served_with_the_mark(agent: Agent, tmp_path: Path):
    lines = to_yaml(agent.config).splitlines()
    (tmp_path / "config.yaml").write_text("\n".join(line for line in lines if not line.startswith("  form: ")))
    with served(agent) as url:
        assert upstream_speaker(tmp_path, url).runner_config.form == "mark"


def test_a_prompt_that_the_server_refuses_fails_only_its_own_request(agent: Agent, run: Path):
    short = opening(agent)
    long = [*short[:-1], {"role": "user", "content": short[-1]["content"] + " please" * 100}]
    (own,) = agent.roll_out(agent.tasks("val")[:1], greedy=True, lookahead=False)
    most = len(own.tokens[: own.turns[0].action_start])
    with served(agent, lambda asked: len(asked["prompt"]) > most) as url:
        batcher = Batcher(upstream_speaker(run, url))
        answers = [batcher.submit(request(each, temperature=0)) for each in (short, long, short)]
        with batcher:
            assert [type(each.exception()) for each in answers] == [type(None), WorkError, type(None)]
            assert "answered 400: " in str(answers[1].exception())
            assert list(answers[0].result().calls.values()) == [own.turns[0].call]
            assert batcher.batches == 1


def test_without_an_answer_after_a_prediction_the_draft_is_the_turn(agent: Agent, run: Path):
    tasks = agent.tasks("val")[:6]
    sighted = agent.roll_out(tasks, greedy=True)
    place = next(place for place, each in enumerate(sighted) if any(turn.predicted for turn in each.turns))
    (blind,) = agent.roll_out([tasks[place]], greedy=True, lookahead=False)

    def shows_prediction(asked: dict[str, Any]) -> bool:
        return asked["model"] == "policy" and "(expected)" in tokenizer().decode(asked["prompt"])

    with served(agent, shows_prediction) as url, Batcher(upstream_speaker(run, url)) as batcher:
        replies = check_replies(batcher, opening(agent, place), blind)
    assert any(reply.imagined for reply in replies)


def test_a_failed_prediction_is_an_empty_reply(agent: Agent):
    with served(agent, lambda asked: True) as url:
        (said,) = completer(Upstream(url, ends=agent.codec.ends), "world_model", 8)([[1, 2, 3]])
    assert agent.world_model_codec.decode_for_policy(said) == ""


def test_the_memory_is_that_of_the_chosen_checkpoint(agent: Agent, tmp_path: Path):
    state, call = WorldModelState(task="t", step=1, actions=(), collected={}), ToolCall(name="look", arguments={})
    (tmp_path / "config.yaml").write_text(to_yaml(small_config("lookahead_source=memory")))
    for step, best in ((1, True), (2, False)):
        folder = tmp_path / "checkpoints" / f"step-{step:06d}"
        (folder / "policy").mkdir(parents=True)
        (folder / MANIFEST).write_text(json.dumps({"step": step, "best": best, "files": {}}))
        (folder / "memory.json").write_text(json.dumps([[*situation_of(state, call), f"reply {step}"]]))

    def remembered(run: Path, **options: Any) -> str:
        lookahead = upstream_speaker(run, url, **options).lookahead
        assert lookahead is not None
        return lookahead.predictor([Question(task=None, state=state, call=call, messages=())])[0]

    with served(agent, models=("policy",)) as url:
        assert remembered(tmp_path) == "reply 2"
        assert remembered(tmp_path, adapter="best") == "reply 1"
        assert remembered(tmp_path / "checkpoints" / "step-000001") == "reply 1"


def test_a_missing_adapter_is_named_with_what_to_do(agent: Agent, run: Path):
    with (
        served(agent, models=("base",)) as url,
        pytest.raises(UsageError, match="'policy'; start vLLM with the --lora"),
    ):
        upstream_speaker(run, url)
    with served(agent, models=("policy",)) as url:
        with pytest.raises(UsageError, match=r"'world_model', .* export with --both, or serve with --no-lookahead"):
            upstream_speaker(run, url)
        assert upstream_speaker(run, url, lookahead=False).lookahead is None


def test_the_untrained_base_is_not_upstream(run: Path, monkeypatch, capsys):
    arguments = ["serve", str(run), "--upstream", "http://127.0.0.1:9", "--adapter", "none"]
    monkeypatch.setattr(sys, "argv", ["lfo", *arguments])
    with pytest.raises(SystemExit):
        main()
    assert "choose best or last" in capsys.readouterr().err


@pytest.mark.parametrize("token", [float("inf"), 2**80, -1, None, "x"])
def test_token_ids_that_are_none_fail_only_their_own_prompt(agent: Agent, monkeypatch, token: Any):
    answer = Completions.answer

    def spoilt(self: Completions, value: Any, status: int = 200) -> None:
        value["choices"][0]["token_ids"] = [token]
        answer(self, value, status)

    with served(agent) as url:
        upstream = Upstream(url, ends=agent.codec.ends)
        options: Any = {"limits": [8], "temperature": 0.0, "seeds": [0]}
        (right,) = upstream.complete("policy", [[1, 2, 3]], **options)
        assert not isinstance(right, Failed)
        monkeypatch.setattr(Completions, "answer", spoilt)
        (said,) = upstream.complete("policy", [[1, 2, 3]], **options)
    assert isinstance(said, Failed)
    assert "returned no token ids" in str(said.error)


def test_each_message_of_the_server_has_a_seed_of_its_own(monkeypatch):
    asked: dict[str, Any] = {}

    def complete(self: Upstream, model: str, prompts: Any, **options: Any) -> list[Speech]:
        asked.update(options)
        return [Speech(tokens=(7,), logprobs=(0.0,), stopped=True) for _ in prompts]

    monkeypatch.setattr(Upstream, "complete", complete)
    slots = UpstreamSlots(Upstream.__new__(Upstream), "policy", slots=2, context=10)
    slots.extend([0, 1], [[1, 2, 3], [1]])
    slots.decode([0, 1], max_new_tokens=[8, 8], temperature=1.0, uniforms=[[0.25], [0.5]])
    assert asked["seeds"] == [2**29, 2**30]
    assert asked["limits"] == [7, 8], "no more than there is room"
    assert slots.tokens(0) == (1, 2, 3, 7)
