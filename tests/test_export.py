"""An export computes the same as the run, for every coupling and form, loaded as the model card says."""

import dataclasses
import json
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lfo.agent import build_agent, load_agent, saved_config
from lfo.cli import main
from lfo.config import to_yaml
from lfo.errors import UsageError
from lfo.loading import environment_factory, model_source
from lfo.tools.export import alone, export
from lfo.tools.model_card import model_card
from small_runs import base, model_of, randomised, small_config, small_trainer, tokenizer

COUPLINGS = ("separate", "shared")
TOKENS = torch.tensor([[1, 40, 300, 7, 512, 90, 33, 801]])
FORMS = [(coupling, form) for coupling in COUPLINGS for form in ("adapters", "merged")]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory) -> Callable[[str], Path]:
    """A small real run of each coupling, whose two adapters do quite different things."""
    made: dict[str, Path] = {}

    def run_of(coupling: str) -> Path:
        if coupling not in made:
            made[coupling] = tmp_path_factory.mktemp("runs") / coupling
            trainer = small_trainer(f"coupling={coupling}", "steps=1", f"output_dir={made[coupling]}")
            randomised(model_of(trainer), scale=0.05)
            trainer.fit()
        return made[coupling]

    return run_of


def python_of(card: str) -> str:
    """The code under `In Python` of a model card."""
    block = card.partition("In Python:\n\n")[2].partition("\n## ")[0]
    return "\n".join(line.removeprefix("    ") for line in block.splitlines())


def load_as_the_card_says(folder: Path, monkeypatch) -> dict[str, Any]:
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(python_of((folder / "README.md").read_text()), names)
    return names


def check_card(out: Path, files: list[str]) -> None:
    """The card names what lies there, and nothing of this machine."""
    card = (out / "README.md").read_text()
    for folder in ("policy", "world_model", "base"):
        assert (out / folder).is_dir() == (f"- `{folder}/`" in card), folder
        assert (f" {folder}={folder}" in card) <= (out / folder).is_dir()
    assert " policy=policy" in card or "vllm serve . " in card
    assert "(expected) " in card
    for file in files:
        if file.endswith((".json", ".md")):
            assert str(Path(__file__).parents[1]) not in (out / file).read_text(), file


def far_apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one - other).abs().max().item() > 0.05


@pytest.mark.parametrize(("coupling", "form"), FORMS)
@torch.no_grad()
def test_the_exported_weights_give_the_logits_of_the_run(run_of, tmp_path: Path, monkeypatch, coupling, form):
    agent = load_agent(run_of(coupling))
    policy = agent.model.logits(TOKENS, agent.model.policy_adapters)
    world_model = agent.model.logits(TOKENS, agent.model.world_model_adapters)
    untrained = agent.model.logits(TOKENS, ())
    # What the test could mistake for the policy is far from it.
    assert far_apart(policy, untrained)
    assert far_apart(policy, world_model) or coupling == "shared"

    files = export(agent, tmp_path / "out", run=run_of(coupling), form=form)
    check_card(tmp_path / "out", files)
    loaded = load_as_the_card_says(tmp_path / "out", monkeypatch)
    model = loaded["policy"] if form == "merged" else loaded["model"]
    torch.testing.assert_close(model(TOKENS).logits, policy, atol=1e-4, rtol=0)
    assert loaded["tokenizer"].chat_template
    if form != "merged":
        model.set_adapter("world_model")
        torch.testing.assert_close(model(TOKENS).logits, world_model, atol=1e-4, rtol=0)


@torch.no_grad()
def test_beside_a_merged_policy_lies_a_world_model_for_the_unmerged_base(run_of, tmp_path: Path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    agent = load_agent(run_of("separate"))
    world_model = agent.model.logits(TOKENS, agent.model.world_model_adapters)
    export(agent, tmp_path / "out", run=run_of("separate"), form="merged")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "base", dtype=torch.float32)
    served = PeftModel.from_pretrained(base, str(tmp_path / "out" / "world_model"))
    torch.testing.assert_close(served(TOKENS).logits, world_model, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("model", "folder"), [("my base", "my base"), ("smollm2-135m", "models/smollm2-135m")])
def test_a_base_in_a_folder_is_found_from_the_export(run_of, tmp_path: Path, monkeypatch, model: str, folder: str):
    monkeypatch.setenv("LFO_MODELS", "models")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model_source("tiny"), folder)
    (tmp_path / folder / "lfo_model.json").write_text("{}")
    run = shutil.copytree(run_of("separate"), tmp_path / "run")
    config = dataclasses.replace(saved_config(run), model=model)
    (run / "config.yaml").write_text(to_yaml(config))
    export(load_agent(run), tmp_path / "out", run=run)

    load_as_the_card_says(tmp_path / "out", monkeypatch)
    settings = json.loads((tmp_path / "out" / "policy" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tmp_path / folder)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "base_model:" not in card  # a path is no entry of the hub
    assert f"it is the folder `{tmp_path / folder}` of the machine" in card
    assert f"vllm serve {shlex.quote(str(tmp_path / folder))} --enable-lora" in card


def test_the_card_tells_the_figures_of_the_weights(run_of, tmp_path: Path):
    shutil.copytree(run_of("separate"), tmp_path / "run")
    rows = [{"step": step, "tasks_seen": 2 * step, "eval/val/success": 2 / 3 / step} for step in (1, 2)]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    export(load_agent(tmp_path / "run"), tmp_path / "out", run=tmp_path / "run")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "after step 1 (2 training tasks seen)" in card
    assert "| val | 3 | 66.7% | 20.8% - 93.9% | " in card  # Wilson's interval of 2 of 3


def test_rewards_beyond_one_are_no_share_of_the_tasks(run_of, tmp_path: Path):
    run = judged(run_of("separate"), tmp_path / "run", sighted=12.5, blind=-2)
    export(load_agent(run), tmp_path / "out", run=run)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| split | tasks | mean reward | interval |" in card
    assert "| val | 3 | 12.5 | - | " in card
    assert "Wilson" not in card


@pytest.mark.parametrize(
    ("overrides", "said", "unsaid"),
    [
        (
            (),
            ["draft its turn", "take the exchange back", "lookahead_source=world_model"],
            ["lookahead_query", "phone"],
        ),
        (("lookahead_source=memory",), ["A memory of real replies predicts", "lfo serve"], ["world model predicts"]),
        (("lookahead_source=truth",), ["The environment tells its real replies", "lfo run"], ["lfo serve"]),
        (("lookahead=off",), ["trained without look-ahead"], ["lfo run", "lfo serve"]),
    ],
)
def test_the_card_describes_the_look_ahead_of_the_run(tmp_path: Path, overrides, said: list[str], unsaid: list[str]):
    config = small_config(*overrides)
    agent = build_agent(config, environment_factory(config), tokenizer(), base())
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    text = model_card(agent, tmp_path, "adapters", own_world_model=True).partition("## Look-ahead")[2]
    assert [words for words in said if words not in text] == []
    assert [words for words in unsaid if words in text] == []


def test_plain_dapo_exports_a_policy_alone(tmp_path: Path):
    small_trainer("algo=dapo", "steps=1", f"output_dir={tmp_path / 'run'}").fit()
    files = export(load_agent(tmp_path / "run"), tmp_path / "out", run=tmp_path / "run")
    assert not any(file.startswith("world_model") for file in files)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "world_model=" not in card
    assert "## Look-ahead" not in card


def judged(run: Path, to: Path, *, sighted: float, blind: float) -> Path:
    """A copy of a run that was evaluated so."""
    shutil.copytree(run, to)
    row = {"step": 1, "tasks_seen": 2, "eval/val/success": sighted, "eval/val/success_blind": blind}
    (to / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return to


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_a_policy_that_suffices_alone_is_one_plain_lora(run_of, tmp_path: Path, monkeypatch, coupling: str):
    run = judged(run_of(coupling), tmp_path / "run", sighted=2 / 3, blind=2 / 3 - 0.04)
    agent = load_agent(run)
    assert (verdict := alone(agent, run)) is not None
    assert verdict.suffices
    files = export(agent, tmp_path / "out", run=run, form="alone")
    assert not any(file.startswith("world_model") for file in files)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Greedy, without look-ahead, at the run's evaluation after step 1" in card
    assert "| val | 3 | 62.7% |" in card
    assert "world_model/" not in card
    assert "world_model=" not in card
    assert "## Look-ahead" not in card
    served = load_as_the_card_says(tmp_path / "out", monkeypatch)["model"]
    torch.testing.assert_close(
        served(TOKENS).logits, agent.model.logits(TOKENS, agent.model.policy_adapters), atol=1e-4, rtol=0
    )


def test_the_example_says_with_peft_alone_what_the_run_says_blind(tmp_path: Path, monkeypatch):
    trainer = small_trainer("steps=1", f"output_dir={tmp_path / 'trained'}")
    randomised(model_of(trainer), scale=0.005)  # it still speaks as the base does, in other words
    trainer.fit()
    run = judged(tmp_path / "trained", tmp_path / "run", sighted=0.5, blind=0.5)
    agent = load_agent(run)
    export(agent, tmp_path / "out", run=run, form="alone")
    (task,) = agent.tasks("val")[:1]
    (rollout,) = agent.roll_out([task], greedy=True, lookahead=False)

    example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "act_with_peft.py"))
    said: list[str] = []
    environment = agent.make_environment()
    step = environment.step
    monkeypatch.setattr(environment, "step", lambda message: said.append(message) or step(message))
    example["play"](*example["load"](tmp_path / "out", environment.tools()), environment, task)
    assert said == [turn.action for turn in rollout.turns]
    assert len(said) > 1


@pytest.mark.parametrize(
    ("blind", "option", "form", "words"),
    [
        (0.6, (), "adapters", "alone does not suffice: 60.0% of val without look-ahead, 66.7% with it; serve it with"),
        (0.65, (), "alone", "alone suffices: 65.0% of val"),
        (0.65, ("--both",), "adapters", "alone suffices: 65.0% of val"),
    ],
)
def test_export_says_whether_the_policy_suffices_alone(
    run_of, tmp_path, monkeypatch, capsys, blind, option, form, words
):
    run = judged(run_of("separate"), tmp_path / "run", sighted=2 / 3, blind=blind)
    monkeypatch.setattr(sys, "argv", ["lfo", "export", str(run), "--out", str(tmp_path / "out"), *option])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().out.replace("\n", " ")
    assert words in said
    assert f"({form})" in said
    assert (tmp_path / "out" / "world_model").is_dir() == (form == "adapters")


def test_nothing_is_overwritten_and_nothing_half_written(run_of, tmp_path: Path, monkeypatch):
    agent = load_agent(run_of("separate"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    with pytest.raises(UsageError, match="already exists"):
        export(agent, tmp_path / "full", run=run_of("separate"))
    assert (tmp_path / "full" / "mine").read_text() == "x"

    monkeypatch.setattr("lfo.tools.export.model_card", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export(agent, tmp_path / "out", run=run_of("separate"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["full"]


def test_export_through_the_command_line(run_of, tmp_path: Path, monkeypatch, capsys):
    def lfo(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lfo", "export", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    run, out = run_of("separate"), tmp_path / "served" / "x"
    code, said, err = lfo(run, "--out", out)
    assert (code, err) == (0, "")
    assert str(out / "README.md") in said
    code, said, err = lfo(run, "--out", tmp_path / "merged", "--merged", "--json")
    assert (code, err) == (0, "")
    result = json.loads(said)
    assert result["form"] == "merged"
    assert {"model.safetensors", "tokenizer.json", "chat_template.jinja", "README.md"} <= set(result["files"])

    for arguments, words in [
        ((run, "--out", out), "already exists"),
        ((run, "--out", tmp_path / "y", "--merged", "--both"), "choose one"),
        ((run, "--out", tmp_path / "y", "--adapter", "none"), "no adapters to export"),
        ((tmp_path, "--out", tmp_path / "y"), "is not a run folder"),
    ]:
        code, said, err = lfo(*arguments)
        assert (code, said, err.count("\n")) == (2, "", 1)
        assert words in err
    assert not (tmp_path / "y").exists()
