"""The dual-adapter model: gradients, active adapters, and ordinary PEFT folders."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig, PhiConfig, Qwen3Config

from lfo.config.couplings import COUPLINGS
from lfo.errors import ConfigError, DataError
from lfo.model.adapters import DualAdapterModel

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
TOKENS_BT = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 0, 0]])


def tiny_base(family: str = "qwen3", dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, head_dim=8) if family == "qwen3" else LlamaConfig(**SIZES)
    return AutoModelForCausalLM.from_config(config).to(dtype)


def tiny_model(coupling: str, *, random_b: bool = True, **options) -> DualAdapterModel:
    model = DualAdapterModel.build(tiny_base(), coupling=coupling, rank=4, alpha=6, seed=1, **options)
    if random_b:
        randomise(model)
    return model


@torch.no_grad()
def randomise(model: DualAdapterModel) -> None:
    """Adapters that have been trained a little: B is zero at the start and would hide every mistake."""
    generator = torch.Generator().manual_seed(7)
    for name in model.adapter_names:
        for parameter in model.adapter_parameters(name):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def grads(model: DualAdapterModel, name: str) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in model.adapter_parameters(name)]


def both_backward(model: DualAdapterModel) -> None:
    """Policy rows and world-model rows in one backward, as in a training step."""
    policy = model.logits(TOKENS_BT, model.policy_adapters)
    world_model = model.logits(TOKENS_BT.flip(0), model.world_model_adapters)
    (policy.log_softmax(-1)[..., 3].mean() + world_model.log_softmax(-1)[..., 5].mean()).backward()


def test_couplings_name_their_adapters():
    named = {coupling: tiny_model(coupling) for coupling in COUPLINGS}
    assert {c: (m.policy_adapters, m.world_model_adapters) for c, m in named.items()} == {
        "separate": (("policy",), ("world_model",)),
        "shared": (("policy",), ("policy",)),
    }
    assert named["shared"].adapter_names == ("policy",)
    assert tiny_model("separate", with_world_model=False).adapter_names == ("policy",)


def test_first_weights_depend_on_seed_and_adapter_only():
    alone = tiny_model("separate", with_world_model=False, random_b=False)
    state = torch.random.get_rng_state()
    base = tiny_base()
    torch.random.set_rng_state(state)
    beside = DualAdapterModel.build(base, coupling="separate", rank=4, alpha=6, seed=1)
    assert torch.equal(state, torch.random.get_rng_state()), "global random state was used"

    pairs = zip(alone.adapter_parameters("policy"), beside.adapter_parameters("policy"), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    world_model = beside.adapter_parameters("world_model")[0]
    assert not torch.equal(world_model, beside.adapter_parameters("policy")[0])
    other_seed = DualAdapterModel.build(tiny_base(), coupling="separate", rank=4, seed=2)
    assert not torch.equal(other_seed.adapter_parameters("policy")[0], alone.adapter_parameters("policy")[0])


def logits_of_modules(model: DualAdapterModel, adapters: tuple[str, ...]) -> torch.Tensor:
    return model.causal_lm.get_output_embeddings()(model.hidden_of_modules(TOKENS_BT, adapters))


def test_untrained_adapters_leave_the_base_as_it_is():
    base = tiny_base()
    expected = base(TOKENS_BT).logits
    model = DualAdapterModel.build(base, coupling="separate", seed=0)
    assert torch.equal(logits_of_modules(model, model.policy_adapters), expected)
    assert torch.allclose(model.logits(TOKENS_BT, model.policy_adapters), expected, atol=1e-6)
    randomise(model)
    assert not torch.allclose(model.logits(TOKENS_BT, model.policy_adapters), expected, atol=1e-3)
    assert torch.equal(logits_of_modules(model, ()), expected), "no adapters must be the bare base"
    assert torch.allclose(model.logits(TOKENS_BT, ()), expected, atol=1e-6)


def test_adapters_are_fp32_on_a_bf16_base():
    model = DualAdapterModel.build(tiny_base(dtype=torch.bfloat16), coupling="separate", seed=0)
    parameters = [parameter for name in model.adapter_names for parameter in model.adapter_parameters(name)]
    assert {parameter.dtype for parameter in parameters} == {torch.float32}
    assert model.logits(TOKENS_BT, ("policy",)).dtype == torch.bfloat16


def test_padding_on_the_right_changes_nothing_before_it():
    model = tiny_model("separate")
    padded = model.hidden(TOKENS_BT, model.policy_adapters)[1, :4]
    alone = model.hidden(TOKENS_BT[1:, :4], model.policy_adapters)[0]
    assert torch.allclose(padded, alone, atol=1e-6)


def test_active_nests_and_restores_after_an_exception():
    model = tiny_model("separate")

    def active() -> tuple[str, ...]:
        assert all(p.requires_grad for name in model.adapter_names for p in model.adapter_parameters(name))
        return tuple(next(iter(model._layers.values())).active_adapters)

    assert active() == ("policy",)
    with contextlib.suppress(ZeroDivisionError), model.active(("world_model",)):
        assert active() == ("world_model",)
        with model.active(("policy",)):
            assert active() == ("policy",)
            with model.active(()):
                assert active() == ()
        assert active() == ("world_model",)
        raise ZeroDivisionError
    assert active() == ("policy",)
    with pytest.raises(KeyError, match="unknown adapter 'critic'"):
        model.active(("critic",))
    with pytest.raises(TypeError):
        model.active("policy")


def test_policy_rows_give_the_world_model_no_gradient():
    model = tiny_model("separate")
    model.logits(TOKENS_BT, model.policy_adapters).square().mean().backward()
    assert all(grad is not None and grad.abs().max() > 0 for grad in grads(model, "policy"))
    assert all(grad is None for grad in grads(model, "world_model"))


def test_world_model_rows_give_the_policy_no_gradient():
    model = tiny_model("separate")
    model.logits(TOKENS_BT, model.world_model_adapters).square().mean().backward()
    assert all(grad is not None for grad in grads(model, "world_model"))
    assert all(grad is None for grad in grads(model, "policy"))


def test_the_base_never_trains():
    model = tiny_model("separate")
    both_backward(model)
    adapters = {id(p) for name in model.adapter_names for p in model.adapter_parameters(name)}
    frozen = [p for p in model.peft_model.parameters() if id(p) not in adapters]
    assert frozen
    assert all(p.grad is None and not p.requires_grad for p in frozen)


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_gradient_checkpointing_changes_no_gradient(coupling: str, monkeypatch: pytest.MonkeyPatch):
    plain, checkpointed = tiny_model(coupling), tiny_model(coupling, gradient_checkpointing=True)
    monkeypatch.setattr(plain, "_lean", None)  # checkpoints are made by the modules
    calls = count_layer_calls(checkpointed)
    both_backward(plain)
    both_backward(checkpointed)
    assert len(calls) == 2 * 2 * 2, "two layers, two forwards, each computed twice"
    for name in plain.adapter_names:
        for expected, actual in zip(grads(plain, name), grads(checkpointed, name), strict=True):
            assert expected is not None
            assert actual is not None
            assert torch.allclose(expected, actual, rtol=1e-5, atol=1e-8)
    assert tuple(next(iter(checkpointed._layers.values())).active_adapters) == checkpointed.policy_adapters


def test_plain_checkpointing_would_give_wrong_gradients():
    """The trap that the test above must be able to see: recomputing with the adapters active at backward."""
    plain, naive = tiny_model("separate"), tiny_model("separate", gradient_checkpointing=True)
    naive.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    both_backward(plain)
    both_backward(naive)
    expected, actual = grads(plain, "world_model"), grads(naive, "world_model")
    assert not all(
        e is not None and a is not None and torch.allclose(e, a) for e, a in zip(expected, actual, strict=True)
    )


def count_layer_calls(model: DualAdapterModel) -> list[str]:
    calls: list[str] = []
    for layer in model.causal_lm.model.layers:
        layer.input_layernorm.register_forward_hook(lambda *_: calls.append("call"))
    return calls


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_saved_folders_are_ordinary_peft_folders(coupling: str, tmp_path: Path):
    model = tiny_model(coupling)
    model.save(tmp_path)
    for folder, adapters in (("policy", ("policy",)), ("world_model", model.world_model_adapters)):
        loaded = PeftModel.from_pretrained(tiny_base(), tmp_path / folder).eval()
        expected = model.logits(TOKENS_BT, adapters)
        assert torch.allclose(loaded(TOKENS_BT).logits, expected, atol=1e-6)
        assert not torch.allclose(expected, model.logits(TOKENS_BT, ()), atol=1e-3)
    if coupling == "shared":
        for file in ("adapter_model.safetensors", "adapter_config.json"):
            assert (tmp_path / "policy" / file).read_bytes() == (tmp_path / "world_model" / file).read_bytes()


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_load_restores_every_weight(coupling: str, tmp_path: Path):
    saved = tiny_model(coupling)
    saved.save(tmp_path)
    loaded = tiny_model(coupling, random_b=False)
    loaded.load(tmp_path)
    for name in saved.adapter_names:
        pairs = zip(saved.adapter_parameters(name), loaded.adapter_parameters(name), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_a_wrong_or_damaged_folder_is_refused_and_changes_nothing(tmp_path: Path):
    model = tiny_model("separate")
    before = [parameter.clone() for parameter in model.adapter_parameters("policy")]
    with pytest.raises(DataError, match="no adapter"):
        model.load(tmp_path)
    DualAdapterModel.build(tiny_base(), coupling="separate", rank=2, seed=0).save(tmp_path / "rank")
    with pytest.raises(DataError, match="another rank"):
        model.load(tmp_path / "rank")
    DualAdapterModel.build(tiny_base(), coupling="separate", targets=["q_proj"], seed=0).save(tmp_path / "layers")
    with pytest.raises(DataError, match="other layers"):
        model.load(tmp_path / "layers")
    tiny_model("separate").save(tmp_path / "cut")
    file = tmp_path / "cut" / "world_model" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match="damaged"):
        model.load(tmp_path / "cut")
    DualAdapterModel.build(tiny_base(), coupling="separate", rank=4, alpha=2, seed=0).save(tmp_path / "alpha")
    with pytest.raises(DataError, match=r"the scale 0\.5 "):
        model.load(tmp_path / "alpha")
    tiny_model("separate").save(tmp_path / "json")
    (tmp_path / "json" / "policy" / "adapter_config.json").write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        model.load(tmp_path / "json")
    assert all(torch.equal(p, q) for p, q in zip(model.adapter_parameters("policy"), before, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coupling": "parallel"}, "coupling must be one of"),
        ({"coupling": "separate", "rank": 0}, "at least 1"),
        ({"coupling": "separate", "targets": ["no_such_layer"]}, "do not fit"),
        ({"coupling": "separate", "targets": ["lm_head"]}, "head"),
        ({"coupling": "separate", "targets": ["embed_tokens"]}, "linear layers"),
    ],
)
def test_impossible_models_are_refused(options: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        DualAdapterModel.build(tiny_base(), seed=0, **options)


def test_a_base_whose_output_layer_has_a_bias_is_refused():
    base = AutoModelForCausalLM.from_config(PhiConfig(**SIZES))
    with pytest.raises(ConfigError, match="output layer has a bias"):
        DualAdapterModel.build(base, coupling="separate", seed=0)
    base.lm_head.bias = None
    DualAdapterModel.build(base, coupling="separate", seed=0)
