"""A coupling is one row of the table: config, model, training, files and servers follow from it."""

from pathlib import Path

import pytest
import torch

from lfo.agent import load_agent
from lfo.config import load_config, to_yaml
from lfo.engines.verl.config import _translated
from lfo.errors import ConfigError, UsageError
from lfo.model import couplings
from lfo.model.adapters import DualAdapterModel
from lfo.model.couplings import POLICY, WORLD_MODEL, Coupling, coupling_of, names_where
from lfo.model.learner import Learner
from lfo.tools.export import Form, export
from lfo.types import TrainingSample
from small_runs import base, model_of, randomised, small_config, small_trainer, weights
from test_export import TOKENS, load_as_the_card_says

# One in which the policy loss moves the world model under the policy, and one with the world model over the policy.
NEW = {
    "joint": Coupling(policy=(WORLD_MODEL, POLICY), world_model=(WORLD_MODEL,)),
    "over": Coupling(policy=(POLICY,), world_model=(POLICY, WORLD_MODEL)),
}


@pytest.fixture(params=sorted(NEW))
def new(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a coupling that is in the table for one test."""
    for name, row in NEW.items():
        monkeypatch.setitem(couplings.COUPLINGS, name, row)  # type: ignore[arg-type]
    return request.param


def sample(adapters: tuple[str, ...], *, policy: bool) -> TrainingSample:
    zeros, ones = (0.0,) * 8, (0.0, *[1.0] * 7)
    return TrainingSample(
        adapters=adapters,
        tokens=tuple(TOKENS[0].tolist()),
        logprobs=(-3.0,) * 8,
        advantages=(1.0,) * 8,
        policy_weights=ones if policy else zeros,
        world_model_weights=zeros if policy else ones,
    )


def test_settings_accept_a_new_row_and_name_it(new: str):
    config = small_config(f"coupling={new}")
    assert config.coupling == new
    assert f"coupling: {new}\n" in to_yaml(config)
    assert names_where(lambda row: row.reads_inline) == ["shared", "stacked", "joint"]
    with pytest.raises(ConfigError, match="stacked, joint, over, not 'jiont'; did you mean joint"):
        load_config(["coupling=jiont"])
    with pytest.raises(ConfigError, match="needs coupling=shared or coupling=stacked or coupling=joint"):
        load_config(["world_model.input=inline"])


def test_each_loss_moves_the_adapters_of_its_row(new: str, tmp_path: Path):
    config = small_config(f"coupling={new}")
    for trains_policy in (True, False):
        model = randomised(DualAdapterModel.of_run(base(), config))
        row = NEW[new]
        before = {name: weights(model, name) for name in model.adapter_names}
        assert list(before) == [POLICY, WORLD_MODEL]
        used = row.policy if trains_policy else row.world_model
        Learner(model, config).update([sample(used, policy=trains_policy)], world_model_weight=1.0, rate_factor=1.0)
        assert {name for name in before if not torch.equal(before[name], weights(model, name))} == set(used)

        model.save(tmp_path)
        loaded = DualAdapterModel.of_run(base(), config)
        loaded.load(tmp_path)
        for adapters in (row.policy, row.world_model):
            assert torch.equal(loaded.logits(TOKENS, adapters), model.logits(TOKENS, adapters))


def test_servers_have_room_for_the_larger_of_two_sums(new: str):
    config = small_config(f"coupling={new}", "engine=verl", "lora.rank=4")
    ranks = _translated(config, None)["lora.rank"]
    found = {name.rpartition("model.")[2]: rank for name, rank in ranks.items() if name.endswith("rank")}
    assert found == {"lora_rank": 4, "lora.rank": 8}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tmp_path_factory.mktemp("runs") / name for name in NEW}


@pytest.mark.parametrize("form", ["adapters", "merged", "stacked"])
@torch.no_grad()
def test_a_run_is_trained_loaded_and_exported(new: str, form: Form, runs: dict[str, Path], tmp_path: Path, monkeypatch):
    if not runs[new].exists():
        with torch.enable_grad():
            trainer = small_trainer(f"coupling={new}", "steps=1", f"output_dir={runs[new]}")
            randomised(model_of(trainer), scale=0.05)
            trainer.fit()
    agent = load_agent(runs[new])
    policy = agent.model.logits(TOKENS, agent.model.policy_adapters)
    world_model = agent.model.logits(TOKENS, agent.model.world_model_adapters)
    if form == "stacked" and new == "over":
        with pytest.raises(UsageError, match=r"--stacked is for coupling=stacked or joint, and .* has coupling=over"):
            export(agent, tmp_path / "out", run=runs[new], form=form)
        return
    export(agent, tmp_path / "out", run=runs[new], form=form)
    card = (tmp_path / "out" / "README.md").read_text()
    loaded = load_as_the_card_says(tmp_path / "out", monkeypatch)
    model = loaded["policy"] if form == "merged" else loaded["model"]
    torch.testing.assert_close(model(TOKENS).logits, policy, atol=1e-4, rtol=0)
    if form != "merged":
        model.set_adapter("world_model")
        torch.testing.assert_close(model(TOKENS).logits, world_model, atol=1e-4, rtol=0)
    widest = max(NEW[new].summed if form == "stacked" else 1, len(NEW[new].world_model))
    assert f"--max-lora-rank {16 * widest}" in card


def test_the_rows_of_the_table():
    rows = couplings.COUPLINGS
    assert {name for name, row in rows.items() if row.meets} == {"shared", "stacked"}
    assert {name for name, row in rows.items() if row.is_shared} == {"shared"}
    assert {name: (row.summed, row.room) for name, row in rows.items()} == {
        "separate": (1, 1),
        "shared": (1, 1),
        "stacked": (2, 2),
    }
    assert coupling_of("stacked", with_world_model=False) == rows["stacked"], "its policy runs on it"
    assert coupling_of("shared", with_world_model=False).world_model == ()
