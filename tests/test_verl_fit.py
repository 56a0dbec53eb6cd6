"""Real trainings on verl, on this CPU: Ray, worker processes, rollout servers, agent loops."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lfo.checkpoints import latest_checkpoint
from lfo.config import from_yaml
from lfo.play.episode import RolloutRequest
from lfo.play.records import rollout_record
from lfo.protocol.shown import SHOWN_FORMS
from lfo.runs.folder import read_metrics
from lfo.train.loop import Trainer
from lfo.types import Rollout
from small_runs import model_of, requests_of, small_trainer, tokenizer

pytest.importorskip("verl", reason="verl is not installed: pip install -e '.[verl]'")
pytestmark = pytest.mark.verl

from lfo.engines.verl.backend import LARGEST_GAP  # noqa: E402
from verl_worlds import LONG, TalkativeWorld, form_requests, shown, told_requests  # noqa: E402

HERE = Path(__file__).parent
CLOSE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fits")
    command = [sys.executable, "-W", "ignore", "verl_fits.py", str(folder)]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def numbers_of(rollout: Rollout) -> Iterator[tuple[int, ...]]:
    """What names the random numbers of each of a rollout's messages: its turn, and which draft after the first."""
    turn = look = 0
    for each in rollout.turns:
        yield (turn, look) if look else (turn,)
        turn, look = (turn, look + 1) if each.predicted else (turn + 1, 0)


def gap_of_draw(trainer: Trainer, request: RolloutRequest, rollout: Rollout, other: Sequence[int]) -> float:
    """How far the number that drew the first token that differs lies from the boundary between the two tokens.

    Engines round differently, so a number on the boundary may fall to either side; anything else is a difference.
    """
    place = next(at for at, pair in enumerate(zip(rollout.tokens, other, strict=False)) if pair[0] != pair[1])
    found = [
        (numbers, turn)
        for numbers, turn in zip(numbers_of(rollout), rollout.turns, strict=True)
        if turn.action_start <= place <= turn.action_end
    ]
    assert found, "what was not drawn must not differ"
    ((numbers, turn),) = found
    uniforms = np.random.default_rng([*request.seeds, *numbers]).random(
        trainer.backend.agent.runner_config.max_turn_tokens
    )
    with torch.no_grad():
        hidden = model_of(trainer).hidden(torch.tensor([rollout.tokens[:place]]), model_of(trainer).policy_adapters)[
            0, -1
        ]
        distribution = (
            (hidden @ model_of(trainer).head.T / trainer.backend.agent.runner_config.temperature).softmax(-1).cumsum(-1)
        )
    lower, upper = sorted((rollout.tokens[place], other[place]))
    drawn = uniforms[place - turn.action_start]
    return max(abs(drawn - float(distribution[lower])), abs(drawn - float(distribution[upper - 1])))


def test_the_tokenizer_lies_where_all_machines_see_it(folder, results):
    """In the run folder, and only as long as the run goes on."""
    assert Path(results["tokenizer"]).parent == folder
    assert not Path(results["tokenizer"]).exists()


def test_three_steps_are_those_of_the_local_engine(results):
    """The same rollouts, token by token, and the same losses: tasks, seeds, look-ahead, sampling and updates agree.

    All but a rollout at most that goes another way from a draw on the very boundary of two tokens.
    """
    trainer = small_trainer(
        "rollout.group_size=8",
        "policy.max_resamples=1",
        "steps=6",
        "seed=1",
        environment=TalkativeWorld,
    )
    theirs = [tuple(each["tokens"]) for each in results["rollouts"]]
    gaps: list[float] = []
    played: list[Rollout] = []
    roll_out = trainer.backend.roll_out

    def comparing(requests: Sequence[RolloutRequest], **options: Any) -> list[Rollout]:
        rollouts = roll_out(requests, **options)
        if not gaps:  # afterwards the two have learned from different rollouts
            for request, rollout, other in zip(requests, rollouts, theirs[len(played) :], strict=False):
                if rollout.tokens != other:
                    gaps.append(gap_of_draw(trainer, request, rollout, other))
        played.extend(rollouts)
        return rollouts

    trainer.backend.roll_out = comparing  # type: ignore[method-assign]
    kept = compared = 0
    for step in range(3):
        row = trainer.step(step)
        if gaps:
            break
        kept += row["groups_kept"]
        for name, value in row.items():
            if name.startswith(("seconds/", "tokens_per_second")):
                continue
            compared += 1
            if isinstance(value, float):
                assert results["rows"][step][name] == pytest.approx(value, abs=CLOSE), name
            else:
                assert results["rows"][step][name] == value, name
    assert gaps or len(played) == len(theirs)
    assert len(gaps) <= 1
    assert all(gap < CLOSE for gap in gaps)
    assert kept > 0, "dynamic sampling kept nothing: no policy update was compared"
    assert compared > 20


def test_the_base_acts_and_is_told_what_others_heard_as_in_the_local_engine(results):
    """Greedily, after the policy was trained there and before it is here: its adapter has no part in it."""
    trainer = small_trainer("rollout.group_size=8", "steps=6", "seed=1", environment=TalkativeWorld)
    requests = told_requests(requests_of(trainer.config, trainer.make_environment()))
    mine = trainer.backend.roll_out(requests, temperature=0.0)
    assert results["told"] == [[list(each.tokens), each.untrained, each.feedback, shown(each)] for each in mine]
    assert [[each.untrained, each.feedback, any(shown(each))] for each in mine] == [[True, False, False], [True] * 3]


@pytest.mark.parametrize("form", list(SHOWN_FORMS))
def test_an_agent_loop_plays_the_rows_of_the_local_runner_in_every_form(results, form: str):
    settings = ("rollout.group_size=8", "steps=6", "seed=1")
    trainer = small_trainer(*settings, f"imagine.form={form}", environment=TalkativeWorld)
    requests = form_requests(requests_of(trainer.config, trainer.make_environment()))
    mine = trainer.backend.roll_out(requests, temperature=0.0)
    theirs = results["forms"][form]
    assert [[list(each.tokens), list(each.origins), rollout_record(each)] for each in mine] == theirs
    turns = [turn for each in mine for turn in (*each.turns, *each.taken_back) if turn.predicted]
    assert {turn.feedback for turn in turns} == {True, False}, "feedback and look-ahead"
    words = "(expected) " if form == "mark" else "That call has not been made."
    assert sum(words in tokenizer().decode(each.tokens) for each in mine) >= 2


def test_rollouts_are_sampled_with_the_weights_that_are_trained(results, folder: Path):
    """After every weight sync, for each coupling; `separate` is in tests/test_verl_resume.py.

    Which rows a server decodes together changes the rounding of their log-probs: 1e-4 was seen.
    """
    gaps = [row["logprob_gap"] for row in results["rows"] if "logprob_gap" in row]
    gaps += [row["logprob_gap"] for row in read_metrics(folder / "oracle") if "logprob_gap" in row]
    assert len(gaps) >= 4
    assert max(gaps) < LARGEST_GAP


def test_a_server_that_missed_the_new_weights_is_noticed(results):
    assert "do not have the weights of the trainer" in results["stale"]


def cut_replies(rollouts: list[dict[str, Any]]) -> tuple[int, int]:
    """How many long replies the policy's rows and the world model's targets hold, and how many are not whole there."""
    decode = tokenizer().decode
    found = [
        reply
        for rollout in rollouts
        for turn, (start, end) in zip(rollout["record"]["turns"], rollout["spans"], strict=True)
        if end > start and not turn["predicted"]
        for reply in (turn["observation"], decode(rollout["tokens"][start:end]))
    ]
    found += [decode(target) for rollout in rollouts for target in rollout["targets"]]
    long = [reply for reply in found if LONG[:100] in reply]
    assert any(LONG[:100] in decode(target) for rollout in rollouts for target in rollout["targets"])
    return len(long), sum(LONG not in reply for reply in long)


def test_replies_reach_rollouts_and_world_model_whole(results):
    assert all(
        tokenizer().decode(rollout["tokens"][start:end]) == turn["observation"]
        for rollout in results["rollouts"]
        for turn, (start, end) in zip(rollout["record"]["turns"], rollout["spans"], strict=True)
        if end > start and not turn["predicted"]
    )
    long, cut = cut_replies(results["rollouts"])
    assert long > 0
    assert cut == 0


def test_verls_tools_would_cut_replies_and_that_shows(results):
    """Both guards: replies do not pass through verl's tools, and if they did, our limit there lets them through."""
    assert cut_replies(results["through_tools"]["ours"])[1] == 0
    long, cut = cut_replies(results["through_tools"]["verl's"])
    assert cut == long > 0


def test_a_run_with_words_tells_them_on_all_ranks(results, folder: Path):
    assert from_yaml(folder / "oracle" / "config.yaml").imagine.form == "user"
    told = [text for shown, text in results["words"] if shown]
    assert len(told) > 4
    assert all("Its expected reply is: " in text and "(expected) " not in text for text in told)


def test_what_an_explorer_may_imagine_reaches_the_agent_loop_and_comes_back(results):
    sent, came_back = results["imagine"]
    assert sent == came_back
    assert set(sent) == {None, 1}


def test_whose_calls_may_be_imagined_reaches_the_agent_loop(results):
    some, none = results["imagined"]
    assert some > 0
    assert none == 0


def test_another_environment_trains_on_two_ranks(results, folder: Path):
    run = folder / "oracle"
    assert results["oracle"]["steps"] == 2
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all("eval/val/success" in row for row in rows)
    assert rows[-1]["world_model_loss"] > 0
    assert rows[-1]["gradient_norm/policy"] > 0
    assert (run / "adapters" / "policy" / "adapter_model.safetensors").is_file()
    assert (run / "data.json").is_file()
    checkpoint = latest_checkpoint(run)
    assert checkpoint is not None
    assert checkpoint.step == 2
