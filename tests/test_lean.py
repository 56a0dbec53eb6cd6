"""The lean forward equals the modules' forward: hidden states and all gradients, for all families and couplings."""

from __future__ import annotations

import pytest
import torch

from lfo.config import load_config
from lfo.model.adapters import DualAdapterModel
from lfo.model.fast.lean import LeanForward
from lfo.model.fast.row_tree import RowTree
from lfo.model.learner import Learner
from lfo.types import TrainingSample
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
        *((family, "separate") for family in ("qwen2", "llama-scaled")),
    ],
)
def test_hidden_states_and_gradients_are_those_of_the_modules(family: str, coupling: str):
    model = make_model(family, coupling)
    lean = LeanForward(model.causal_lm)
    for adapters in dict.fromkeys((model.policy_adapters, model.world_model_adapters)):
        expected = model.hidden_of_modules(TOKENS, adapters)
        hidden = lean(TOKENS, [adapters] * 3)
        assert torch.allclose(hidden, expected, atol=1e-4, rtol=1e-4)
        found, wanted = gradients(model, hidden), gradients(model, expected)
        for name in model.adapter_names:
            for one, other in zip(found[name], wanted[name], strict=True):
                assert (one is None) == (other is None), (name, adapters)
                if one is not None and other is not None:
                    assert (one - other).norm() <= 1e-4 * other.norm() + 1e-6


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_mixed_rows_are_each_computed_alone(family: str):
    """Different lengths and adapters in one batch: packed, and with the hidden states and gradients of single rows."""
    model = make_model(family)
    lengths = [17, 9, 12]
    adapters = [("policy",), ("world_model",), ()]
    mixed = LeanForward(model.causal_lm)(TOKENS, adapters, tree=RowTree.unshared(lengths))
    together, apart = torch.zeros(()), torch.zeros(())
    for place, (row, length) in enumerate(zip(adapters, lengths, strict=True)):
        alone = model.hidden_of_modules(TOKENS[place : place + 1, :length], row)[0]
        assert torch.allclose(mixed[place, :length], alone, atol=1e-4, rtol=1e-4)
        weights = torch.randn(alone.shape, generator=torch.Generator().manual_seed(place))
        together, apart = together + (mixed[place, :length] * weights).sum(), apart + (alone * weights).sum()
    parameters = [weight for name in model.adapter_names for weight in model.adapter_parameters(name)]
    found, wanted = (torch.autograd.grad(loss, parameters) for loss in (together, apart))
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm() + 1e-6


@pytest.mark.parametrize("lengths", [(17, 17, 17), (17, 9, 12)])
@pytest.mark.parametrize("adapters", [[("policy",)] * 3, [("policy",), ("world_model",), ()]])
def test_what_is_wanted_is_as_if_all_were_and_the_rest_is_void(lengths, adapters):
    """Hidden states and gradients; a mask that reaches into the padding changes nothing."""
    model = make_model("qwen3")
    lean = LeanForward(model.causal_lm)
    wanted = torch.rand(TOKENS.shape, generator=torch.Generator().manual_seed(2)) < 0.3
    real = torch.arange(17) < torch.tensor(lengths)[:, None]
    weights = torch.randn(*TOKENS.shape, model.head.shape[1], generator=torch.Generator().manual_seed(3))
    weights = weights * (wanted & real)[..., None]
    parameters = [weight for name in model.adapter_names for weight in model.adapter_parameters(name)]
    results = []
    for mask in (None, wanted):
        hidden = lean(TOKENS, adapters, tree=RowTree.unshared(lengths), wanted_BT=mask)
        found = torch.autograd.grad((hidden * weights).sum(), parameters, allow_unused=True)
        results.append((hidden[wanted & real], found))
    (every, of_every), (some, of_some) = results
    assert torch.allclose(some, every, atol=1e-5)
    assert not hidden[~(wanted & real)].any()
    for one, other in zip(of_some, of_every, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert (one - other).norm() <= 1e-4 * other.norm() + 1e-6


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "adapters", [[("policy",)] * 4, [("policy",), ("policy",), ("world_model",), ("world_model",)]]
)
def test_common_prefixes_are_computed_once_and_change_nothing(masked: bool, adapters):
    """Hidden states and gradients are as if each row were computed in full, also of tokens that several rows want."""
    model = make_model("qwen3")
    lean = LeanForward(model.causal_lm)
    tokens = TOKENS[[0, 0, 0, 0]].clone()
    tokens[1, 11:] = TOKENS[1, 11:]
    tokens[3, 5:] = TOKENS[2, 5:]
    lengths = [17, 15, 12, 17]
    tree = RowTree.of(tokens.numpy(), lengths, adapters)
    assert len(tree.firsts_M) < sum(lengths) - 10
    wanted = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(2)) < 0.4
    wanted[:, 3] = True
    real = torch.arange(17) < torch.tensor(lengths)[:, None]
    weights = torch.randn(*tokens.shape, model.head.shape[1], generator=torch.Generator().manual_seed(3))
    weights = weights * (wanted & real)[..., None]
    parameters = [weight for name in model.adapter_names for weight in model.adapter_parameters(name)]
    results = []
    for some_tree in (RowTree.unshared(lengths), tree):
        hidden = lean(tokens, adapters, tree=some_tree, wanted_BT=wanted if masked else None)
        found = torch.autograd.grad((hidden * weights).sum(), parameters, allow_unused=True)
        results.append((hidden[wanted & real], found))
    (every, of_every), (once, of_once) = results
    assert torch.allclose(once, every, atol=1e-5)
    for one, other in zip(of_once, of_every, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert (one - other).norm() <= 1e-4 * other.norm() + 1e-6


def test_an_update_of_mixed_rows_is_that_of_separate_ones(monkeypatch: pytest.MonkeyPatch):
    def row(adapters: tuple[str, ...], length: int, policy: int, world: int) -> TrainingSample:
        generator = torch.Generator().manual_seed(length)
        zeros = [0.0] * length
        return TrainingSample(
            tokens=torch.randint(VOCABULARY, (length,), generator=generator).tolist(),
            adapters=adapters,
            logprobs=[-3.0] * length,
            advantages=[1.0 if length % 2 else -0.5] * length,
            policy_weights=[*zeros[policy:], *[1.0] * policy],
            world_model_weights=[*zeros[world:], *[1.0] * world],
        )

    learned = []
    for forward, mixed in (("modules", False), ("lean", False), ("lean", True)):
        model = make_model("qwen3")
        if forward == "modules":
            monkeypatch.setattr(model, "_lean", None)
        monkeypatch.setattr(DualAdapterModel, "mixes_rows", mixed)
        rows = [row(model.policy_adapters, length, 5, 0) for length in (17, 30, 22)]
        rows += [row(model.world_model_adapters, length, 0, 4) for length in (12, 9)]
        watched = Learner(model, load_config([])).update(rows, world_model_weight=0.7, rate_factor=1.0)
        # The gradients that AdamW was given: next to zero, rounding decides which way it moves a weight.
        grads = [w.grad for name in model.adapter_names for w in model.adapter_parameters(name) if w.grad is not None]
        learned.append((watched, grads))
    (wanted, modules), *others = learned
    assert len(modules) == sum(len(model.adapter_parameters(name)) for name in model.adapter_names)
    for watched, grads in others:
        assert watched == pytest.approx(wanted, rel=1e-3, abs=1e-5)
        assert all(
            (one - other).norm() <= 1e-4 * other.norm() + 1e-6 for one, other in zip(grads, modules, strict=True)
        )


def test_the_bare_base_and_some_targets():
    model = make_model("qwen3")
    hidden = LeanForward(model.causal_lm)(TOKENS, [()] * 3)
    assert torch.allclose(hidden, model.hidden_of_modules(TOKENS, ()), atol=1e-4)
    thin = DualAdapterModel.build(
        make_model("llama").peft_model.unload(), coupling="separate", seed=0, targets=["q_proj", "v_proj", "o_proj"]
    )
    with torch.no_grad():
        for parameter in thin.adapter_parameters("policy"):
            parameter.add_(0.1)
    hidden = LeanForward(thin.causal_lm)(TOKENS, [("policy",)] * 3)
    expected = thin.hidden_of_modules(TOKENS, ("policy",))
    assert torch.allclose(hidden, expected, atol=1e-4)
    found, wanted = gradients(thin, hidden)["policy"], gradients(thin, expected)["policy"]
    for one, other in zip(found, wanted, strict=True):
        assert one is not None
        assert other is not None
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-4)


def test_it_takes_over_trained_weights():
    model = make_model("llama")
    lean = LeanForward(model.causal_lm)
    before = lean(TOKENS, [("policy",)] * 3)
    with torch.no_grad():
        for parameter in model.adapter_parameters("policy"):
            parameter.mul_(-0.5)
    after = lean(TOKENS, [("policy",)] * 3)
    assert not torch.allclose(before, after, atol=1e-2)
    assert torch.allclose(after, model.hidden_of_modules(TOKENS, ("policy",)), atol=1e-4)


def test_weights_are_copied_in_few_launches():
    """One launch copies many tensors only where each lies in memory as its target does."""
    model = make_model("llama")
    lean = LeanForward(model.causal_lm)
    for adapters in (("policy",), ("policy", "world_model")):
        lean(TOKENS, [adapters] * 3)
        copies = lean._copies[adapters]
        assert all(one.stride() == other.stride() for one, other in zip(copies.sources, copies.targets, strict=True))
        assert len(copies.columns) == 7 * len(adapters), "one for all layers"


def test_a_bf16_base_gives_fp32_gradients_near_the_exact_ones():
    exact, rounded = make_model("qwen3"), make_model("qwen3", dtype=torch.bfloat16)
    one = gradients(exact, LeanForward(exact.causal_lm)(TOKENS, [("policy",)] * 3))["policy"]
    other = gradients(rounded, LeanForward(rounded.causal_lm)(TOKENS, [("policy",)] * 3))["policy"]
    for wanted, found in zip(one, other, strict=True):
        assert found is not None
        assert wanted is not None
        assert found.dtype == torch.float32
        assert (found - wanted).norm() < 0.25 * wanted.norm()
