"""The sampler gives the same tokens as a plain forward of the whole slot, independent of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from lfo.config.couplings import COUPLINGS
from lfo.model.adapters import DualAdapterModel
from lfo.model.fast import fused_decoder
from lfo.model.fast.decoder import HFDecoder
from lfo.model.fast.fused_decoder import FusedDecoder
from lfo.model.fast.row_tree import common_prefix
from lfo.model.sampler import Sampler, Session, draw
from lfo.types import Speech

VOCABULARY = 53
EOS = (3, 4)
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama-scaled": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE, attention_bias=True, mlp_bias=True),
    "gpt_neox": GPTNeoXConfig(**{key: value for key, value in SIZES.items() if key != "num_key_value_heads"}),
}


@torch.no_grad()
def make_model(family: str, coupling: str = "separate", dtype: torch.dtype = torch.float32) -> DualAdapterModel:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(CONFIGS[family])
    for parameter in base.parameters():  # biases and norms start as 0 and 1, which would hide their absence
        parameter.add_(torch.randn_like(parameter) * 0.05)
    model = DualAdapterModel.build(base.to(dtype), coupling=coupling, rank=4, alpha=8, seed=0)
    for name in model.adapter_names:
        for parameter in model.adapter_parameters(name):
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model


def forward_logprobs(model: DualAdapterModel, adapters: Sequence[str], row: Sequence[int]) -> torch.Tensor:
    """Entry t is the distribution of token t."""
    with torch.no_grad():
        logprobs = model.logits(torch.tensor([row]), adapters)[0].log_softmax(-1)
    return torch.cat([torch.zeros(1, logprobs.shape[1]), logprobs[:-1]])


def play(session: Session, seed: int = 0, turns: int = 4) -> dict[int, list[tuple[int, Speech]]]:
    """Six ragged slots, two of them with one prompt, over several turns; slots drop out and limits differ."""
    generator = np.random.default_rng(seed)

    def tokens(count: int) -> list[int]:
        return generator.integers(5, VOCABULARY, count).tolist()

    system, twin = tokens(20), tokens(9)
    prompts = [system + twin, system + tokens(3), system + tokens(17), system + twin, system + tokens(1), system]
    said: dict[int, list[tuple[int, Speech]]] = {slot: [] for slot in range(6)}
    session.extend(range(6), prompts)
    slots = [0, 1, 2, 3, 4, 5]
    for turn in range(turns):
        limits = generator.integers(1, 16, len(slots)).tolist()
        starts = [len(session.tokens(slot)) for slot in slots]
        uniforms = generator.random((len(slots), 16))
        answers = session.decode(slots, max_new_tokens=limits, temperature=1.0, uniforms=uniforms)
        for slot, start, answer in zip(slots, starts, answers, strict=True):
            said[slot].append((start, answer))
        slots = [[5, 0, 3, 4], [2, 1, 3, 0], [4, 1, 2, 3, 5]][turn % 3]
        session.extend(slots, [tokens(int(generator.integers(0, 12))) for _ in slots])
    return said


def check_against_forward(model: DualAdapterModel, adapters: Sequence[str], session: Session, said: dict) -> int:
    """Every log-prob of every turn against one forward of the whole slot; answers how many were compared."""
    checked = 0
    for slot, turns in said.items():
        tokens = session.tokens(slot)
        expected = forward_logprobs(model, adapters, tokens)
        for start, answer in turns:
            assert tokens[start : start + len(answer.tokens)] == answer.tokens
            for offset, (token, logprob) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
                assert abs(logprob - expected[start + offset, token].item()) < 1e-4
                checked += 1
    return checked


@pytest.mark.parametrize(
    ("family", "coupling"),
    [
        *((family, coupling) for family in ("qwen3", "llama") for coupling in COUPLINGS),
        *((family, "separate") for family in ("qwen2", "llama-scaled", "gpt_neox")),
    ],
)
def test_logprobs_equal_a_plain_forward_over_many_ragged_turns(family: str, coupling: str):
    model = make_model(family, coupling)
    sampler = Sampler(model, max_context=200, eos_ids=EOS)
    for adapters in dict.fromkeys((model.policy_adapters, model.world_model_adapters, ())):
        session = sampler.session(slots=6, adapters=adapters)
        assert check_against_forward(model, adapters, session, play(session)) > 60


def test_the_check_above_can_fail():
    """Negative control: the same slot under other adapters is far away."""
    model = make_model("qwen3")
    session = Sampler(model, max_context=200, eos_ids=EOS).session(slots=6, adapters=("policy",))
    said = play(session)
    with pytest.raises(AssertionError):
        check_against_forward(model, ("world_model",), session, said)


TURNS = st.lists(
    st.fixed_dictionaries(
        {
            "rows": st.permutations(range(7)),
            "count": st.integers(1, 7),
            "limits": st.lists(st.integers(1, 6), min_size=7, max_size=7),
            "numbers": st.lists(st.sampled_from([0.2, 0.7]), min_size=7, max_size=7),
            "differs_from": st.integers(0, 6),
            "rewound": st.lists(st.integers(0, 4), min_size=7, max_size=7),
            "reply": st.lists(st.sampled_from([7, 8]), min_size=7, max_size=7),
        }
    ),
    min_size=1,
    max_size=5,
)


def turn(rows: list[int], limits: list[int], differs_from: int) -> dict[str, object]:
    same: dict[str, object] = {"numbers": [0.2, 0.2, 0.7, 0.2, 0.2, 0.2, 0.2], "rewound": [0] * 7, "reply": [7] * 7}
    return same | {"rows": rows, "count": len(rows), "limits": limits, "differs_from": differs_from}


@settings(deadline=None, max_examples=60)
# Row 0 ends its turn first; rows 1 and 2 differ later, and the new slot must not be that of row 0.
@example(prompts=[(9, 6)] + [(9, 5, 6)] * 6, turns=[turn([1, 2, 0], [1, 6, 6, 6, 6, 6, 6], 3), turn([0], [6] * 7, 0)])
@given(prompts=st.lists(st.sampled_from([(9, 6), (9, 5, 6)]), min_size=7, max_size=7), turns=TURNS)
def test_rows_that_share_their_tokens_for_a_while_are_computed_as_if_alone(prompts, turns):
    """Random numbers of two values make rows sample the same tokens up to a random position, and then others."""
    model = make_model("qwen3")
    sampler = Sampler(model, max_context=60, eos_ids=EOS)
    with mock.patch.object(fused_decoder, "_CAPACITY_STEP", 4):  # memory grows while rows share it
        for _ in range(2):  # and is used again
            check_shared_rows(sampler, prompts, turns)


def check_shared_rows(sampler: Sampler, prompts: Sequence[Sequence[int]], turns: Sequence[dict[str, Any]]) -> None:
    model, session = sampler.model, sampler.session(slots=7, adapters=("policy",))
    session.extend(range(7), prompts)
    for turn in turns:
        rows = turn["rows"][: turn["count"]]
        for row, dropped in enumerate(turn["rewound"]):
            if dropped > 2:  # less often than not
                session.rewind(row, max(2, len(session.tokens(row)) - dropped))
        session.extend(rows, [[turn["reply"][row]] for row in rows])
        starts = [len(session.tokens(row)) for row in rows]
        uniforms = [[0.4] * turn["differs_from"] + [turn["numbers"][row]] * 6 for row in rows]
        limits = [min(turn["limits"][row], session.room(row)) for row in rows]
        answers = session.decode(rows, max_new_tokens=limits, temperature=0.7, uniforms=uniforms)
        for row, start, answer in zip(rows, starts, answers, strict=True):
            tokens = session.tokens(row)
            assert tokens[start:] == answer.tokens
            logits = model.logits(torch.tensor([tokens]), ("policy",))[0].detach()
            expected = (logits / 0.7).log_softmax(-1)[torch.arange(start - 1, len(tokens) - 1), list(answer.tokens)]
            assert torch.allclose(torch.tensor(answer.logprobs), expected, atol=1e-4)


def test_equal_rows_are_computed_once_until_they_differ():
    model = make_model("qwen3")
    decoder = FusedDecoder(model, ("policy",), max_context=60)
    computed: list[int] = []
    forward = decoder.forward
    decoder.forward = lambda tokens_M, *rest: computed.append(len(tokens_M)) or forward(tokens_M, *rest)
    cache = decoder.cache(4, 60)
    cache.start([0, 1, 2, 3], [[7, 8]] * 3 + [[7, 9]], [0] * 4)
    assert computed == [4]  # two prompts
    for tokens in ([5, 5, 5, 5], [5, 6, 5, 5], [5, 5, 6, 5]):
        cache.step(torch.tensor(tokens))
    assert computed[1:] == [2, 3, 4]
    assert cache.keep([True, False, True, True]) == [0, 2, 3]
    cache.step(torch.tensor([5, 5, 5]))
    assert computed[4:] == [3]


def test_memory_is_used_again_and_survives_a_failed_allocation(monkeypatch: pytest.MonkeyPatch):
    decoder = FusedDecoder(make_model("qwen3"), ("policy",), max_context=200)

    def logits(prompt: list[int], rows: int = 2) -> torch.Tensor:
        return decoder.cache(rows, 200).start([0], [prompt], [0])

    expected = logits([7] * 150)
    (memory,) = decoder._free
    assert memory.capacity >= 150
    assert torch.allclose(logits([7] * 150), expected)
    assert decoder._free == [memory]
    logits([7], rows=3)  # needs more slots
    (larger,) = decoder._free
    assert larger.slots == 3

    def no_memory(*_: object) -> torch.Tensor:
        raise MemoryError

    decoder._free.clear()
    with monkeypatch.context() as patch:
        patch.setattr(fused_decoder._Memory, "_zeros", no_memory)
        with pytest.raises(MemoryError):
            logits([7] * 150)
    assert torch.allclose(logits([7] * 150), expected)


def test_fused_for_the_llama_family_and_the_models_own_forward_for_the_rest():
    assert {family: FusedDecoder.supports(make_model(family)) for family in CONFIGS} == {
        "qwen3": True,
        "qwen2": True,
        "llama": True,
        "llama-scaled": True,
        "gpt_neox": False,
    }
    sliding = Qwen3Config(**SIZES, head_dim=16, use_sliding_window=True, sliding_window=8, max_window_layers=0)
    dynamic = LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    for config in (sliding, dynamic):
        model = DualAdapterModel.build(AutoModelForCausalLM.from_config(config), coupling="shared", seed=0)
        assert not FusedDecoder.supports(model)


def test_both_decoders_say_the_same(monkeypatch: pytest.MonkeyPatch):
    model = make_model("qwen3")

    def said() -> dict:
        return play(Sampler(model, max_context=200, eos_ids=EOS).session(slots=6, adapters=model.policy_adapters))

    fused = said()
    monkeypatch.setattr(FusedDecoder, "supports", staticmethod(lambda model: False))
    plain = said()
    for row in fused:
        for (start, one), (other_start, other) in zip(fused[row], plain[row], strict=True):
            assert (start, one.tokens, one.stopped) == (other_start, other.tokens, other.stopped)


@pytest.mark.parametrize("family", ["qwen3", "gpt_neox"])
def test_what_a_row_says_does_not_depend_on_its_neighbours(family: str):
    sampler = Sampler(make_model(family), max_context=120, eos_ids=EOS)
    generator = np.random.default_rng(5)
    prompts = [generator.integers(5, VOCABULARY, n).tolist() for n in (7, 30, 30, 18, 2, 40, 11, 3, 25)]
    uniforms = generator.random((len(prompts), 40))
    options = {"adapters": ("policy",), "max_new_tokens": 40, "temperature": 1.0}
    together = sampler.generate(prompts, uniforms=uniforms, **options)
    for prompt, numbers, answer in zip(prompts, uniforms, together, strict=True):
        (alone,) = sampler.generate([prompt], uniforms=[numbers], **options)
        assert (alone.tokens, alone.stopped) == (answer.tokens, answer.stopped)
        assert alone.logprobs == pytest.approx(answer.logprobs, abs=1e-4)
    assert len({len(answer.tokens) for answer in together}) > 3, "rows of one length would not test leaving"


def test_a_row_ends_with_an_end_token_or_at_its_limit():
    sampler = Sampler(make_model("llama"), max_context=120, eos_ids=EOS)
    generator = np.random.default_rng(1)
    session = sampler.session(slots=40, adapters=("policy",))
    session.extend(range(40), [[5, 6, 7]] * 40)
    limits = generator.integers(0, 60, 40).tolist()
    answers = session.decode(range(40), max_new_tokens=limits, temperature=1.0, uniforms=generator.random((40, 60)))
    assert {answer.stopped for answer in answers} == {True, False}
    for answer, limit in zip(answers, limits, strict=True):
        assert not any(token in EOS for token in answer.tokens[:-1])
        assert answer.stopped == (bool(answer.tokens) and answer.tokens[-1] in EOS)
        assert len(answer.tokens) == len(answer.logprobs) <= limit
        assert answer.stopped or len(answer.tokens) == limit


def test_decoding_in_two_parts_is_decoding_once():
    sampler = Sampler(make_model("qwen3"), max_context=120, eos_ids=())
    uniforms = np.random.default_rng(2).random((1, 30))
    (whole,) = sampler.generate([[5, 6]], adapters=(), max_new_tokens=30, temperature=1.0, uniforms=uniforms)
    session = sampler.session(slots=1, adapters=())
    session.extend([0], [[5, 6]])
    parts = []
    for part in (uniforms[:, :11], uniforms[:, 11:12], uniforms[:, 12:]):
        parts += session.decode([0], max_new_tokens=[part.shape[1]], temperature=1.0, uniforms=part)
    assert sum((part.tokens for part in parts), ()) == whole.tokens


def test_the_cache_grows_without_forgetting():
    model = make_model("llama")
    session = Sampler(model, max_context=700, eos_ids=()).session(slots=2, adapters=("policy",))
    session.extend([0, 1], [[9, 10], [11]])
    said: dict[int, list[tuple[int, Speech]]] = {0: [], 1: []}
    for chunk in ([], list(range(5, 50)) * 5, [7], list(range(20, 40)) * 10):
        session.extend([1], [chunk])
        for row in (1, 0):
            start = len(session.tokens(row))
            said[row].append((start, session.decode([row], max_new_tokens=[9], temperature=0.0)[0]))
    assert check_against_forward(model, ("policy",), session, said) == 72
    assert len(session.tokens(1)) > 450


def test_the_context_is_never_exceeded():
    session = Sampler(make_model("qwen3"), max_context=150, eos_ids=()).session(slots=2, adapters=("policy",))
    session.extend([0, 1], [[7] * 140, [7] * 100])
    first, second = session.decode([0, 1], max_new_tokens=[99, 50], temperature=0.0)
    assert (len(first.tokens), len(second.tokens), first.stopped) == (10, 50, False)
    assert (session.room(0), session.room(1)) == (0, 0)
    assert session.decode([0], max_new_tokens=[5], temperature=0.0)[0].tokens == ()
    with pytest.raises(ValueError, match="do not fit"):
        session.extend([1], [[5]])


def test_greedy_takes_the_likeliest_and_computes_one_prompt_once(monkeypatch: pytest.MonkeyPatch):
    model = make_model("llama")
    sampler = Sampler(model, max_context=60, eos_ids=EOS)
    batches = []
    decode = Session.decode
    monkeypatch.setattr(
        Session, "decode", lambda self, rows, **kw: batches.append(len(rows)) or decode(self, rows, **kw)
    )
    prompts = [[5, 6, 7], [8, 9], [5, 6, 7], [5, 6, 7]]
    answers = sampler.generate(prompts, adapters=("policy",), max_new_tokens=12)
    assert batches == [2]
    assert answers[0] == answers[2] == answers[3] != answers[1]
    for prompt, answer in zip(prompts, answers, strict=True):
        row = [*prompt, *answer.tokens]
        expected = forward_logprobs(model, ("policy",), row)[len(prompt) :]
        assert expected.argmax(-1).tolist() == list(answer.tokens)
        assert expected.max(-1).values.tolist() == pytest.approx(answer.logprobs, abs=1e-4)
    assert sampler.generate([], adapters=("policy",), max_new_tokens=5) == []


def test_a_shared_beginning_is_computed_once(monkeypatch: pytest.MonkeyPatch):
    computed = []
    forward = FusedDecoder.forward

    def counting(self, tokens_M, *rest):
        computed.append(len(tokens_M))
        return forward(self, tokens_M, *rest)

    monkeypatch.setattr(FusedDecoder, "forward", counting)
    sampler = Sampler(make_model("qwen3"), max_context=100, eos_ids=EOS)
    system = list(range(10, 40))
    prompts = [[*system, 41], [*system, 42, 43], [*system, 41], [*system, 41]]
    options = {"adapters": ("policy",), "max_new_tokens": 1, "temperature": 1.0, "uniforms": np.full((4, 1), 0.5)}
    sampler.generate(prompts, **options)
    assert sum(computed) == 30 + 1 + 2


def test_refresh_takes_over_trained_weights_and_ends_sessions():
    model = make_model("qwen3")
    sampler = Sampler(model, max_context=200, eos_ids=EOS)
    old = sampler.session(slots=6, adapters=("policy",))
    play(old)
    with torch.no_grad():
        for parameter in model.adapter_parameters("policy"):
            parameter.mul_(-0.5)
    sampler.refresh()
    new = sampler.session(slots=6, adapters=("policy",))
    assert check_against_forward(model, ("policy",), new, play(new)) > 60
    with pytest.raises(RuntimeError, match="start a new session"):
        old.decode([0], max_new_tokens=[1], temperature=0.0)


def test_sampling_leaves_the_model_trainable():
    model = make_model("gpt_neox")
    play(Sampler(model, max_context=200, eos_ids=EOS).session(slots=6, adapters=model.policy_adapters))
    for adapters in (model.policy_adapters, model.world_model_adapters):
        model.logits(torch.tensor([[5, 6, 7]]), adapters).square().mean().backward()
    assert all(p.grad is not None for name in model.adapter_names for p in model.adapter_parameters(name))


def test_a_bf16_base_is_sampled_in_fp32_on_the_cpu():
    model = make_model("qwen3", dtype=torch.bfloat16)
    decoder = FusedDecoder(model, ("policy",), max_context=50)
    assert decoder.dtype == decoder.layers[0].qkv.dtype == torch.float32
    weight = model.causal_lm.model.layers[0].mlp.down_proj.base_layer.weight.float()
    delta = model.deltas(("policy",))["model.layers.0.mlp.down_proj"]
    assert torch.allclose(decoder.layers[0].down, weight + delta.scale * delta.b @ delta.a, atol=1e-6)


def test_bad_requests_are_refused():
    sampler = Sampler(make_model("qwen3"), max_context=50, eos_ids=EOS)
    session = sampler.session(slots=2, adapters=("policy",))
    with pytest.raises(ValueError, match="vocabulary"):
        session.extend([0], [[VOCABULARY]])
    session.extend([0], [[5]])
    with pytest.raises(ValueError, match="only once"):
        session.decode([0, 0], max_new_tokens=[1, 1], temperature=0.0)
    with pytest.raises(ValueError, match="extend it before"):
        session.decode([0, 1], max_new_tokens=[1, 1], temperature=0.0)
    with pytest.raises(ValueError, match="too few"):
        session.decode([0], max_new_tokens=[2], temperature=1.0, uniforms=[[0.5]])
    with pytest.raises(ValueError, match="in \\[0, 1\\)"):
        session.decode([0], max_new_tokens=[1], temperature=1.0, uniforms=[[1.0]])
    assert session.tokens(0) == (5,)


def test_draw_inverts_the_distribution_function():
    probabilities = torch.tensor([[0.2, 0.0, 0.5, 0.3, 0.0]])
    logits = probabilities.log()
    uniforms = [0.0, 0.19, 0.21, 0.69, 0.71, 1 - 2**-24]
    tokens = [draw(logits, 1.0, torch.tensor([u]))[0].item() for u in uniforms]
    assert tokens == [0, 0, 2, 2, 3, 3]
    _, logprob = draw(logits, 0.5, torch.tensor([0.5]))
    assert logprob.exp().item() == pytest.approx(0.25 / 0.38)  # squares: 0.04, 0.25, 0.09
    assert draw(logits, 0.0, None)[0].item() == 2
    assert draw(logits, 0.0, None)[1].exp().item() == pytest.approx(0.5)


def test_draw_has_the_right_frequencies():
    probabilities = torch.tensor([0.1, 0.4, 0.05, 0.45])
    uniforms = (torch.arange(2000) + 0.5) / 2000
    tokens, _ = draw(probabilities.log().expand(2000, -1), 1.0, uniforms)
    assert (tokens.bincount() / 2000).tolist() == pytest.approx(probabilities.tolist(), abs=1e-3)


def test_common_prefix_leaves_a_token_to_each():
    assert common_prefix([(1, 2, 3), (1, 2, 4)]) == 2
    assert common_prefix([(1, 2), (1, 2, 4)]) == 1
    assert common_prefix([(1, 2, 3), (2, 2, 3)]) == 0
    assert common_prefix([(5,), (5, 6)]) == 0


def test_the_hf_decoder_needs_no_refresh():
    model = make_model("gpt_neox")
    decoder = HFDecoder(model, ("policy",))
    before = decoder.cache(1, 8).start([0], [[5, 6]], [0])
    with torch.no_grad():
        model.adapter_parameters("policy")[0].add_(1.0)
    assert not torch.allclose(before, decoder.cache(1, 8).start([0], [[5, 6]], [0]))
