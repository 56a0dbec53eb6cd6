"""The lean forward is the modules' own forward: hidden states and every gradient, for all families and couplings."""

from __future__ import annotations

import pytest
import torch

from lfo.model.adapters import Coupling, DualAdapterModel
from lfo.model.lean import LeanForward
from test_sampler import COUPLINGS, VOCABULARY, make_model

TOKENS = torch.randint(VOCABULARY, (3, 17), generator=torch.Generator().manual_seed(0))


def gradients(model: DualAdapterModel, hidden: torch.Tensor) -> dict[str, list[torch.Tensor | None]]:
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    for name in model.adapter_names:
        for parameter in model.adapter_parameters(name):
            parameter.grad = None
    (hidden.float() * weights).sum().backward()
    return {name: [weight.grad for weight in model.adapter_parameters(name)] for name in model.adapter_names}


@pytest.mark.parametrize(
    ("family", "coupling"),
    [
        *((family, coupling) for family in ("qwen3", "llama") for coupling in COUPLINGS),
        *((family, "stacked") for family in ("qwen2", "llama-scaled")),
    ],
)
def test_hidden_states_and_gradients_are_those_of_the_modules(family: str, coupling: Coupling):
    model = make_model(family, coupling)
    lean = LeanForward(model)
    for adapters, detached in (
        (model.policy_adapters, ()),
        (model.policy_adapters, model.policy_detached),
        (model.world_model_adapters, ()),
    ):
        expected = model.hidden(TOKENS, adapters, detached)
        with model.active(adapters, detached):
            hidden = lean(TOKENS, adapters)
        assert torch.allclose(hidden, expected, atol=1e-4, rtol=1e-4)
        found, wanted = gradients(model, hidden), gradients(model, expected)
        for name in model.adapter_names:
            for one, other in zip(found[name], wanted[name], strict=True):
                assert (one is None) == (other is None), (name, adapters, detached)
                if one is not None and other is not None:
                    assert (one - other).norm() <= 1e-4 * other.norm() + 1e-6


def test_the_bare_base_and_some_targets():
    model = make_model("qwen3")
    assert torch.allclose(LeanForward(model)(TOKENS, ()), model.hidden(TOKENS, ()), atol=1e-4)
    thin = DualAdapterModel.build(
        make_model("llama").peft_model.unload(), coupling="separate", seed=0, targets=["q_proj", "v_proj", "o_proj"]
    )
    with torch.no_grad():
        for parameter in thin.adapter_parameters("policy"):
            parameter.add_(0.1)
    hidden, expected = LeanForward(thin)(TOKENS, ("policy",)), thin.hidden(TOKENS, ("policy",))
    assert torch.allclose(hidden, expected, atol=1e-4)
    found, wanted = gradients(thin, hidden)["policy"], gradients(thin, expected)["policy"]
    assert all(torch.allclose(one, other, rtol=1e-3, atol=1e-4) for one, other in zip(found, wanted, strict=True))


def test_it_takes_over_trained_weights():
    model = make_model("llama")
    lean = LeanForward(model)
    before = lean(TOKENS, ("policy",))
    with torch.no_grad():
        for parameter in model.adapter_parameters("policy"):
            parameter.mul_(-0.5)
    after = lean(TOKENS, ("policy",))
    assert not torch.allclose(before, after, atol=1e-2)
    assert torch.allclose(after, model.hidden(TOKENS, ("policy",)), atol=1e-4)


def test_a_bf16_base_gives_fp32_gradients_near_the_exact_ones():
    exact, rounded = make_model("qwen3"), make_model("qwen3", dtype=torch.bfloat16)
    one = gradients(exact, LeanForward(exact)(TOKENS, ("policy",)))["policy"]
    other = gradients(rounded, LeanForward(rounded)(TOKENS, ("policy",)))["policy"]
    for wanted, found in zip(one, other, strict=True):
        assert found is not None
        assert wanted is not None
        assert found.dtype == torch.float32
        assert (found - wanted).norm() < 0.25 * wanted.norm()
