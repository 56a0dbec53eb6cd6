"""The turn decoder gives the same tokens as the stepwise decoder; here on a CPU, without graphs."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from lfo.model import sampler as sampler_module
from lfo.model.fast import turn_decoder
from lfo.model.fast.turn_decoder import TurnCache, TurnDecoder
from lfo.model.sampler import Sampler, make_decoder
from test_sampler import COUPLINGS, EOS, VOCABULARY, check_against_forward, make_model, play


@pytest.fixture
def by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "make_decoder", TurnDecoder)


@pytest.mark.usefixtures("by_turns")
@pytest.mark.parametrize(
    ("family", "coupling"),
    [
        *(("qwen3", coupling) for coupling in COUPLINGS),
        *((family, "separate") for family in ("llama", "qwen2", "llama-scaled")),
    ],
)
def test_logprobs_equal_a_plain_forward_over_many_ragged_turns(family: str, coupling: str):
    model = make_model(family, coupling)
    sampler = Sampler(model, max_context=200, eos_ids=EOS)
    for adapters in dict.fromkeys((model.policy_adapters, model.world_model_adapters, ())):
        session = sampler.session(slots=6, adapters=adapters)
        assert isinstance(session._cache, TurnCache)
        assert check_against_forward(model, adapters, session, play(session)) > 60


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_tokens_equal_those_of_the_stepwise_decoder(temperature: float, monkeypatch: pytest.MonkeyPatch):
    model = make_model("qwen3")
    generator = np.random.default_rng(5)
    prompts = [generator.integers(5, VOCABULARY, n).tolist() for n in (7, 30, 30, 18, 2, 40, 11, 3, 25, 6)]
    options = {"adapters": model.policy_adapters, "max_new_tokens": 40, "temperature": temperature}
    uniforms = generator.random((len(prompts), 40))
    answers = []
    for decoder in (make_decoder, TurnDecoder):
        monkeypatch.setattr(sampler_module, "make_decoder", decoder)
        answers.append(Sampler(model, max_context=120, eos_ids=EOS).generate(prompts, uniforms=uniforms, **options))
    for stepwise, turn in zip(*answers, strict=True):
        assert (turn.tokens, turn.stopped) == (stepwise.tokens, stepwise.stopped)
        assert turn.logprobs == pytest.approx(stepwise.logprobs, abs=1e-4)


@pytest.mark.usefixtures("by_turns")
def test_rows_leave_for_a_smaller_graph_and_nobody_is_changed_by_it(monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []
    step = TurnDecoder.step
    monkeypatch.setattr(
        TurnDecoder, "step", lambda self, slots, memory: sizes.append(len(slots)) or step(self, slots, memory)
    )
    model = make_model("llama")
    session = Sampler(model, max_context=120, eos_ids=()).session(slots=20, adapters=("policy",))
    session.extend(range(20), [[5 + row, 6] for row in range(20)])
    limits = [3] * 11 + [30] * 8 + [40]
    answers = session.decode(range(20), max_new_tokens=limits, temperature=0.0)
    assert [len(answer.tokens) for answer in answers] == limits
    assert (sizes[0], sizes[-1]) == (32, 8)
    assert sizes == sorted(sizes, reverse=True)
    said = {row: [(2, answer)] for row, answer in enumerate(answers)}
    assert check_against_forward(model, ("policy",), session, said) == sum(limits)


@pytest.mark.usefixtures("by_turns")
def test_a_turn_ends_soon_after_its_last_row(monkeypatch: pytest.MonkeyPatch):
    steps: list[int] = []
    step = TurnDecoder.step
    monkeypatch.setattr(TurnDecoder, "step", lambda *arguments: steps.append(1) or step(*arguments))
    sampler = Sampler(make_model("qwen3"), max_context=120, eos_ids=range(VOCABULARY))
    (answer,) = sampler.generate([[5, 6]], adapters=(), max_new_tokens=50)
    assert (len(answer.tokens), answer.stopped) == (1, True)
    assert len(steps) == turn_decoder._AHEAD + 1


@pytest.mark.usefixtures("by_turns")
def test_refresh_copies_only_lora_and_the_right_adapter_speaks():
    model = make_model("qwen3")
    sampler = Sampler(model, max_context=200, eos_ids=EOS)
    session = sampler.session(slots=6, adapters=("policy",))
    decoder = session._cache._turns
    before = decoder.layers[0].qkv.weight.clone()
    with torch.no_grad():
        for parameter in model.adapter_parameters("policy"):
            parameter.mul_(-0.5)
    sampler.refresh()
    session = sampler.session(slots=6, adapters=("policy",))
    said = play(session)
    assert check_against_forward(model, ("policy",), session, said) > 60
    with pytest.raises(AssertionError):
        check_against_forward(model, ("world_model",), session, said)
    width = decoder.layers[0].qkv.a.shape[1]
    after = decoder.layers[0].qkv.weight
    assert torch.equal(before[:, :width], after[:, :width])
    assert not torch.equal(before[:, width:], after[:, width:])


def test_a_small_update_survives_bf16_where_merging_would_lose_it():
    model = make_model("llama", dtype=torch.bfloat16)
    with torch.no_grad():
        for place, parameter in enumerate(model.adapter_parameters("policy")):
            parameter.mul_(1.0 if place % 2 == 0 else 1e-3)
    decoder = TurnDecoder(model, ("policy",), max_context=50, dtype=torch.bfloat16)
    delta = model.deltas(("policy",))["model.layers.0.mlp.down_proj"]
    update = delta.scale * delta.b @ delta.a
    base = model.causal_lm.model.layers[0].mlp.down_proj.base_layer.weight
    merged = (base.float() + update).to(torch.bfloat16) - base
    wide = decoder.layers[0].down
    width = base.shape[1]
    held = wide.weight[:, width:].float() @ wide.a.float()
    assert (held - update).norm() / update.norm() < 0.01
    assert (merged.float() - update).norm() / update.norm() > 0.2


@pytest.mark.usefixtures("by_turns")
def test_sessions_that_live_together_have_memory_of_their_own_and_leave_it_to_later_ones():
    sampler = Sampler(make_model("qwen3", "shared"), max_context=100, eos_ids=())
    one, other = (sampler.session(slots=3, adapters=("policy",)) for _ in range(2))
    assert one._cache._memory is not other._cache._memory
    memory = other._cache._memory
    del other
    gc.collect()
    assert sampler.session(slots=8, adapters=("policy",))._cache._memory is memory
    assert sampler.session(slots=9, adapters=("policy",))._cache._memory.rows == 16


@pytest.mark.usefixtures("by_turns")
def test_a_short_prediction_takes_little_memory_and_the_same_one_again():
    sampler = Sampler(make_model("qwen3", "shared"), max_context=2_000, eos_ids=())
    decoder = sampler._decoder(("policy",))
    assert isinstance(decoder, TurnDecoder)
    whole = sampler.session(slots=3, adapters=("policy",))  # a rollout, in the middle of which look-ahead asks
    sizes = []
    for rows, length in ((3, 20), (3, 290), (9, 20), (3, 290)):
        sampler.generate(
            [[7] * length] * rows, adapters=("policy",), max_new_tokens=4, temperature=1.0, uniforms=np.zeros((rows, 4))
        )
        gc.collect()
        (memory,) = decoder._free
        sizes.append((memory.rows, memory.context))
    assert sizes == [(8, 256), (8, 512), (16, 512), (16, 512)]
    assert (whole._cache._memory.rows, whole._cache._memory.context) == (8, 2_000)
    del whole
    gc.collect()
    assert sampler.session(slots=3, adapters=("policy",), context=100)._cache._memory.context == 512
    assert sampler.session(slots=3, adapters=("policy",))._cache._memory.context == 2_000


def test_heads_that_the_kernels_cannot_take_are_left_to_the_other_decoders(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(turn_decoder, "find_spec", lambda name: object())
    assert TurnDecoder.supports(make_model("qwen3"))  # heads of 16
    assert not TurnDecoder.supports(make_model("llama"))  # of 8
    assert not TurnDecoder.supports(make_model("gpt_neox"))
    monkeypatch.setattr(turn_decoder, "find_spec", lambda name: None)
    assert not TurnDecoder.supports(make_model("qwen3"))
