"""Practice of any tools: what the rows of random play hold, what is saved, and the check."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lfo.cli import main
from lfo.config import RunConfig
from lfo.env.worlds.oracle import OracleCodes
from lfo.errors import ConfigError, WorkError
from lfo.loading import load_base, load_tokenizer
from lfo.measure.environment_check import Playthrough
from lfo.model.catalog import PROVENANCE
from lfo.protocol.hermes import parse_tool_call
from lfo.tools.gate import gate_of
from lfo.tools.pretrain.drill import drill
from lfo.tools.pretrain.recipe import PretrainConfig, end_of, train_model
from lfo.tools.pretrain.syntax import _verdict, check_syntax, teach_syntax
from lfo.types import Rollout, StopReason, ToolCall, Turn

SMALL = PretrainConfig(conversations=12, row=512, batch=4, steps=2, learning_rate=1e-3, warmup=1)


def silent(*_: object) -> None:
    pass


class Knobs(OracleCodes):
    """The world of the oracles with legal moves that are named."""

    def moves(self):
        return [ToolCall(name="open_door", arguments={"words": ["ash", "salt"]})]


class Broken(OracleCodes):
    def start(self, task):
        raise OSError("no temple")


def test_only_calls_and_their_ends_are_wanted_and_each_of_them_can_be_read():
    tokenizer = load_tokenizer("tiny")
    rows = drill(OracleCodes, tokenizer, SMALL, silent)
    assert rows.tokens.shape == rows.wanted.shape
    assert len(rows.tokens) == 12
    calls = 0
    for tokens, wanted in zip(rows.tokens, rows.wanted, strict=True):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], wanted.astype(int), [0]])))
        for start, end in edges.reshape(-1, 2):
            text = tokenizer.decode(tokens[start:end])
            assert text.endswith("<|im_end|>")
            call = parse_tool_call(text.removesuffix("<|im_end|>"))
            assert call is not None
            assert call.name in ("ask_oracle", "open_door")
            calls += 1
        opening = tokenizer.decode(tokens[: edges[0]])
        assert "open_door" in opening, "the tools are described, and not learned by heart"
    assert calls == rows.turns
    assert 1 <= rows.tasks <= 12


def test_moves_that_an_environment_names_are_practised():
    tokenizer = load_tokenizer("tiny")
    rows = drill(Knobs, tokenizer, replace(SMALL, conversations=4), silent)
    for tokens, wanted in zip(rows.tokens, rows.wanted, strict=True):
        assert '{"name": "open_door", "arguments": {"words": ["ash", "salt"]}}' in tokenizer.decode(tokens[wanted])


def test_an_opening_that_does_not_fit_and_a_broken_environment_are_one_sentence():
    tokenizer = load_tokenizer("tiny")
    with pytest.raises(ConfigError, match=r"gave 0 rows with a call.* larger --row"):
        drill(OracleCodes, tokenizer, replace(SMALL, row=64), silent)
    with pytest.raises(WorkError, match=r"the first 12 rollouts of random play failed: .*OSError: no temple"):
        drill(Broken, tokenizer, SMALL, silent)


def test_the_loss_is_on_the_wanted_tokens_alone():
    """With one token wanted the loss is that token's; with a token changed that nobody is asked for, it is the same."""
    tokenizer = load_tokenizer("tiny")
    tokens = np.array([[5, 6, 7, 8, 9, 10]] * 4, dtype=np.int32)
    wanted = np.zeros(tokens.shape, dtype=bool)
    wanted[:, 3] = True
    practice = replace(SMALL, row=6, steps=1)

    def loss(rows: np.ndarray) -> float:
        base = load_base("tiny", torch.device("cpu"))
        return train_model(base, rows, practice, end=end_of(tokenizer), device="cpu", progress=silent, wanted=wanted)

    base = load_base("tiny", torch.device("cpu"))
    with torch.no_grad():
        logits = base(torch.tensor([[5, 6, 7]])).logits[0, -1]
    assert loss(tokens) == pytest.approx(-torch.log_softmax(logits, -1)[8].item(), abs=1e-4)
    changed = tokens.copy()
    changed[:, 4:] = 11
    assert loss(changed) == pytest.approx(loss(tokens), abs=1e-6)


def test_a_base_is_taught_saved_and_measured(tmp_path: Path):
    result = teach_syntax("tiny", OracleCodes, SMALL, tmp_path / "base", device="cpu", progress=silent)
    assert result["rollouts"] > 12, "random play, and what was tried to find lessons"
    assert result["solved"] > 0
    assert not list(tmp_path.glob(".*")), "nothing unfinished is left"
    provenance = json.loads((tmp_path / "base" / PROVENANCE).read_text())
    assert provenance["practice"]["calls"] == result["calls"], "what was used is told beside the weights"
    assert provenance["practice"]["tasks"] == result["tasks"]
    before = load_base("tiny", torch.device("cpu")).state_dict()
    after = load_base(str(tmp_path / "base"), torch.device("cpu")).state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    checked = check_syntax("tiny", OracleCodes, episodes=8, batch=8)
    assert checked["readable"] > 0.9, "the embedded base speaks these tools"
    assert (checked["base"]["n"], checked["random"]["n"]) == (8, 8)


def _rollout(reward: float, *calls: ToolCall | None) -> Rollout:
    spans = {"action_start": 0, "action_end": 0, "observation_start": 0, "observation_end": 0}
    turns = tuple(Turn(action="", observation="", call=call, **spans) for call in calls)
    parts = {"tokens": (), "origins": (), "logprobs": (), "opening": ()}
    return Rollout(task_id="t", turns=turns, reward=reward, stop=StopReason.DONE, **parts)


def _played(reward: float) -> Playthrough:
    return Playthrough(replies=[("", "", reward, True)])


def test_a_base_that_cannot_call_or_knows_too_much_is_told():
    good, unknown = ToolCall(name="act", arguments={}), ToolCall(name="fly", arguments={})
    names = {"act"}
    fine = _verdict("m", [_rollout(0, good, good)] * 50, [_played(0)] * 50, names)
    assert (fine["ok"], fine["readable"], fine["problems"]) == (True, 1.0, [])
    mute = _verdict("m", [_rollout(0, good, unknown, None, good)] * 50, [_played(0)] * 50, names)
    assert mute["problems"] == ["50% of its turns are valid calls, fewer than 90%"]
    knowing = _verdict("m", [_rollout(1, good)] * 50, [_played(0)] * 45 + [_played(1)] * 5, names)
    assert knowing["problems"] == ["it succeeds in 100.0%, above the 10.0% of random play"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--env", "oracle-codes"], "lfo pretrain needs --output-dir DIR"),
        (["--env", "no_such:World", "--output-dir", "base"], "env=no_such:World cannot be imported"),
    ],
)
def test_bad_options_are_one_sentence(arguments, words, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lfo", "pretrain", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    err = capsys.readouterr().err
    assert exit_.value.code == 2
    assert words in err
    assert err.count("\n") == 1


def test_an_unknown_device_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lfo", "pretrain", "--env", "no_such:World", "--check", "--device", "gpu"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert "'gpu' is not one of" in capsys.readouterr().err


def test_the_command_to_check_a_base_names_the_same_environment(tmp_path: Path, monkeypatch, capsys):
    taught = {"rollouts": 1, "tasks": 1, "loss": 0.5}
    monkeypatch.setattr("lfo.tools.pretrain.syntax.teach_syntax", lambda *given, **options: taught)
    monkeypatch.chdir(tmp_path)
    settings = ["env=phone-calls", "env_args.levels=[2, 3]"]
    for number, typed in enumerate((settings, ["--env", "phone-calls", "--env-arg", "levels=[2, 3]"])):
        command = ["lfo", "pretrain", *typed, "--row", "512", "--output-dir", f"base-{number}"]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit):
            main()
        _, _, check = capsys.readouterr().out.strip().partition("check it with: ")
        assert shlex.split(check) == ["lfo", "pretrain", *settings, "--row", "512", "--check", "--model", command[-1]]


def test_the_check_contains_the_gate_in_rows_of_the_same_length(monkeypatch, capsys):
    contexts: list[int] = []

    def measured(config: RunConfig, *given: object) -> dict[str, object]:
        contexts.append(config.rollout.max_context)
        return gate_of(config, *given[:2], tasks=4)  # type: ignore[arg-type]

    monkeypatch.setattr("lfo.cli.pretrain.measured_gate", measured)
    for row in ((), ("--row", "600")):
        arguments = ["--env", "oracle-codes", "--check", "--tasks", "8", *row, "--json"]
        monkeypatch.setattr(sys, "argv", ["lfo", "pretrain", *arguments])
        with pytest.raises(SystemExit):
            main()
        gate = json.loads(capsys.readouterr().out)["gate"]
        assert (gate["true_replies"]["success"], gate["model"]) == (1.0, "tiny")
    assert contexts == [1024, 600]
