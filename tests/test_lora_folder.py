"""`init_from` loads any LoRA of PEFT: at the start, the policy computes the same as the LoRA."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from lfo.errors import DataError
from small_runs import base, model_of, small_trainer

TOKENS = torch.arange(40, 60).reshape(1, -1)


def saved_lora(folder: Path, **settings) -> PeftModel:
    """A LoRA by PEFT alone, with random weights, as supervised fine-tuning would leave one."""
    torch.manual_seed(3)
    options = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False} | settings
    model = get_peft_model(base(), LoraConfig(**options))
    model.save_pretrained(folder)
    return model


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize(
    "settings",
    [
        {},  # fewer layers, a smaller rank, another scale
        {"target_modules": "all-linear"},
        {"use_rslora": True},
        {"r": 16, "lora_alpha": 16},
    ],
)
def test_the_policy_starts_as_the_lora_that_was_saved(settings, tmp_path: Path):
    theirs = logits(saved_lora(tmp_path, **settings).eval())
    trainer = small_trainer(f"init_from={tmp_path}")
    fresh = small_trainer()
    with torch.no_grad():
        ours = model_of(trainer).logits(TOKENS, ("policy",))
        bare = model_of(fresh).logits(TOKENS, ("policy",))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-3)  # rounded elsewhere
    assert (theirs - bare).abs().max() > 0.2, "the LoRA does something"
    for mine, untouched in zip(
        model_of(trainer).adapter_parameters("world_model"),
        model_of(fresh).adapter_parameters("world_model"),
        strict=True,
    ):
        assert torch.equal(mine, untouched), "the world model starts fresh"


def test_a_run_starts_from_the_policy_of_plain_dapo(tmp_path: Path):
    dapo = small_trainer("algo=dapo")
    with torch.no_grad():
        for parameter in model_of(dapo).adapter_parameters("policy"):
            parameter.add_(0.01)
    model_of(dapo).save(tmp_path)
    assert not (tmp_path / "world_model").exists()
    trainer = small_trainer(f"init_from={tmp_path}")
    with torch.no_grad():
        ours, theirs = (model_of(each).logits(TOKENS, ("policy",)) for each in (trainer, dapo))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"r": 32}, "has rank 32: set lora.rank=32 or more"),
        ({"use_dora": True}, "cannot be loaded by init_from, which reads plain LoRA only: its use_dora is True"),
        ({"bias": "all"}, "bias is all"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is"),
    ],
)
def test_a_lora_that_does_not_fit_is_one_sentence(settings, words, tmp_path: Path):
    saved_lora(tmp_path, **settings)
    with pytest.raises(DataError, match=words):
        small_trainer(f"init_from={tmp_path}")


def test_layers_that_the_run_does_not_adapt_are_named(tmp_path: Path):
    saved_lora(tmp_path, target_modules=["down_proj"])
    with pytest.raises(DataError, match=r"adapts the layer .*down_proj, .* name its modules in lora\.targets"):
        small_trainer(f"init_from={tmp_path}", "lora.targets=q_proj,v_proj")


def test_damaged_folders_are_named(tmp_path: Path):
    saved_lora(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(DataError, match="is damaged"):
        small_trainer(f"init_from={tmp_path}")
    weights.unlink()
    with pytest.raises(DataError, match=r"has no adapter_model\.safetensors"):
        small_trainer(f"init_from={tmp_path}")
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(DataError, match="is not valid JSON"):
        small_trainer(f"init_from={tmp_path}")
    (tmp_path / "adapter_config.json").write_text(json.dumps([]))
    with pytest.raises(DataError, match="must be a mapping"):
        small_trainer(f"init_from={tmp_path}")


@pytest.mark.parametrize("alpha", [float("nan"), float("inf"), "six", None])
def test_a_scale_that_is_no_number_is_named(tmp_path: Path, alpha):
    saved_lora(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "lora_alpha": alpha}))
    with pytest.raises(DataError, match=r"adapter_config\.json has no valid r and lora_alpha"):
        small_trainer(f"init_from={tmp_path}")


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_no_numbers_are_named(tmp_path: Path, value: float):
    saved_lora(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[1]
    tensors[name][0, 1] = value
    save_file(tensors, file)
    with pytest.raises(DataError, match=f"{file} has values that are not finite numbers, in {name}"):
        small_trainer(f"init_from={tmp_path}")


def test_adapters_of_a_run_with_weights_that_are_no_numbers_are_named(tmp_path: Path):
    trainer = small_trainer()
    model_of(trainer).save(tmp_path)
    file = tmp_path / "world_model" / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, file)
    with pytest.raises(DataError, match=f"{file} has values that are not finite numbers"):
        model_of(trainer).load(tmp_path)
