"""`lfo plan`: the sizes of real models, correct sums, and advice that leads to a plan that fits."""

from __future__ import annotations

import json
import sys
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from benchmarks.memory import CASES, model_config, training_update
from lfo.cli import main
from lfo.config import RunConfig, load_config
from lfo.errors import ConfigError, UsageError
from lfo.loading import load_base, model_source
from lfo.model.adapters import DualAdapterModel
from lfo.model.fast.lean import LeanForward
from lfo.model.fast.row_tree import RowTree
from lfo.objectives.losses import fused_token_logprobs
from lfo.tools.plan import (
    SHAPES,
    Gpus,
    Shape,
    Work,
    kept_by_layer,
    logits_bytes,
    plan,
    rollout,
    shape_of,
    training,
)

SMALL = Shape(
    name="small", layers=2, hidden=32, inner=48, heads=4, key_heads=2, head_size=16, vocabulary=99, tied=False
)


@pytest.mark.parametrize("shape", [SMALL, replace(SMALL, head_norms=True), replace(SMALL, biases=True, tied=True)])
def test_parameters_are_counted_as_they_are(shape: Shape):
    base = AutoModelForCausalLM.from_config(model_config(shape))
    assert model_config(shape).architectures == [type(base).__name__]
    assert shape.parameters == sum(parameter.numel() for parameter in base.parameters())
    model = DualAdapterModel.build(base, coupling="separate", seed=0, rank=4)
    assert shape.adapter_parameters(4) == sum(weight.numel() for weight in model.adapter_parameters("policy"))


def test_named_shapes_are_those_of_their_models():
    for name in ("tiny", "general"):
        assert SHAPES[name].parameters == sum(p.numel() for p in load_base(name, torch.device("cpu")).parameters())
        assert replace(shape_of(model_source(name)), name=name) == SHAPES[name]
    assert SHAPES["smollm2-135m"].parameters == 134_515_008
    assert SHAPES["qwen3-8b"].parameters == 8_190_735_360


def test_a_plan_takes_as_many_tokens_at_once_as_a_run_does(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lfo", "plan", "--model", "tiny", "--gpus", "8x24GB", "--json"])
    with pytest.raises(SystemExit):
        main()
    taken = json.loads(capsys.readouterr().out)["work"]["micro_batch_tokens"]
    assert taken == Work().micro_batch_tokens == RunConfig().micro_batch_tokens


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("head_norms", [True, False])
def test_what_a_layer_keeps_is_what_autograd_keeps(lean: bool, head_norms: bool):
    """Storages saved for the backward, with bf16 as on a GPU; the difference of two depths is that of the layers."""
    kept = []
    for layers in (1, 3):
        shape = replace(SMALL, layers=layers, head_norms=head_norms)
        base = AutoModelForCausalLM.from_config(model_config(shape), dtype=torch.bfloat16)
        model = DualAdapterModel.build(base, coupling="separate", seed=0)
        for layer in model._layers.values():
            layer.cast_input_dtype_enabled = False
        own = {parameter.untyped_storage().data_ptr() for parameter in model.peft_model.parameters()}
        seen: dict[int, torch.Tensor] = {}

        def note(tensor: torch.Tensor, own: set[int] = own, seen: dict[int, torch.Tensor] = seen) -> torch.Tensor:
            place = tensor.untyped_storage().data_ptr()
            # Weights of LoRA in bf16 are two-dimensional with its rank on one side: they are counted as adapters.
            if place not in own and not (tensor.dim() == 2 and 16 in tensor.shape and 80 not in tensor.shape):
                seen[place] = tensor
            return tensor

        mixed = nullcontext() if lean else torch.autocast("cpu")
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), mixed:
            tokens = torch.zeros(2 if lean else 1, 50 if lean else 80, dtype=torch.long)
            if lean:  # 80 tokens of 100 places
                LeanForward(model.causal_lm)(tokens, [("policy",)] * 2, tree=RowTree.unshared([50, 30]))
            else:
                model.hidden_of_modules(tokens, ("policy",))
        kept.append(sum(tensor.untyped_storage().nbytes() for tensor in seen.values()))
    measured = (kept[1] - kept[0]) / 2 / 80
    computed = kept_by_layer(replace(SMALL, head_norms=head_norms), 16, lean=lean)
    if lean:  # a CPU has no norm in one piece, and keeps what lies between its pieces
        assert 0.7 * measured < computed <= measured
    else:
        assert computed == pytest.approx(measured, rel=0.05)


class LiveBytes(TorchDispatchMode):
    """Records the largest number of bytes that the results of all operations take at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.seen:
                self.seen.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def free(self, storage: int, size: int) -> None:
        self.seen.remove(storage)
        self.now -= size


@pytest.mark.parametrize("predictions", [10, 25, 100])
def test_logits_take_the_computed_bytes_however_many_chunks_there_are(predictions: int):
    shape, chunk = replace(SMALL, hidden=2, vocabulary=20_000), 10
    hidden_BTD = torch.randn(1, predictions + 1, shape.hidden, requires_grad=True)
    head_VD, tokens_BT = torch.randn(shape.vocabulary, shape.hidden), torch.zeros(1, predictions + 1, dtype=torch.long)
    with LiveBytes() as live:
        logprobs_BT, entropies_BT = fused_token_logprobs(hidden_BTD, head_VD, tokens_BT, chunk=chunk)
        del entropies_BT  # as in Learner: their graph would keep every chunk
        logprobs_BT.sum().backward()
    head = 4 * shape.vocabulary * shape.hidden  # transposed: a view, counted as a result
    assert live.peak - head == pytest.approx(logits_bytes(shape, chunk), rel=0.05)


def test_parts_by_hand():
    work = Work(micro_batch_tokens=100, rank=4, adapters=2)
    parts = training(SMALL, work, gpus=1)
    trained = 2 * SMALL.adapter_parameters(4)
    assert parts["weights"] == 2 * SMALL.parameters
    assert (parts["gradients"], parts["optimizer"]) == (4 * trained, 8 * trained)
    assert logits_bytes(SMALL, 10) == 10 * 99 * 16
    # 2 of keys and values, 2 layers, 2 heads of 16, 2 bytes, 50 tokens; 8 rows and nobody's, for two decoders.
    rolled = rollout(SMALL, Work(context=50, rollouts=8), gpus=1)
    assert rolled["kv_cache"] == 2 * (2 * 2 * 2 * 16 * 2 * 50) * 9
    longer = rollout(SMALL, Work(context=2_000, rollouts=8), gpus=1)["kv_cache"]
    assert longer == (2 * 2 * 2 * 16 * 2) * (2_000 + 512) * 9  # a prediction is short, however long a rollout is
    shared = rollout(SMALL, Work(context=50, rollouts=8, tensor_parallel=2), gpus=4)
    assert shared["kv_cache"] == (2 * 2 * 2 * 16 * 2 * 50) * 4 // 2
    assert shared["weights"] == SMALL.parameters


def test_on_several_gpus_the_layers_are_sharded_and_the_rest_is_whole():
    work = Work(micro_batch_tokens=100, rank=4, adapters=2)
    one, four = training(SMALL, work, gpus=1), training(SMALL, work, gpus=4)
    # A layer: q, k, v, o; three of the feed-forward; two norms.
    layer = 32 * 64 + 2 * 32 * 32 + 64 * 32 + 3 * 32 * 48 + 2 * 32
    assert four["weights"] == 2 * (2 * layer // 4 + 2 * 99 * 32 + 32)
    assert four["buffers"] - one["buffers"] == 2 * 2 * layer, "two layers are gathered; what is whole need not be"
    trained = 2 * 2 * 4 * (96 + 64 + 64 + 96 + 3 * 80)
    whole = {"adapters": 6 * trained, "gradients": 4 * trained, "optimizer": 8 * trained}
    assert {name: four[name] for name in whole} == {name: one[name] for name in whole} == whole
    rests = plan(SMALL, Gpus.parse("4x24GB"), work)["rollout"]["other_worker"]
    assert rests == four["weights"] + 18 * trained


def test_the_reference_case_needs_checkpointing_and_servers_on_pairs_of_gpus():
    shape, gpus = SHAPES["qwen3-8b"], Gpus.parse("8x24GB")
    assert [sentence.rpartition("(")[2] for sentence in plan(shape, gpus, Work())["advice"]] == [
        "--checkpointing)",
        "--tensor-parallel 2)",
    ]
    found = plan(shape, gpus, Work(checkpointing=True, tensor_parallel=2))
    assert found["fits"]
    # 1.62 of layers, 2.32 of embedding and head, and 18 bytes for each of 87 million parameters of the adapters.
    assert found["rollout"]["other_worker"] / 2**30 == pytest.approx(1.617 + 2.318 + 1.463, abs=0.002)


def test_the_preset_for_eight_gpus_leaves_room_for_the_trainer_at_rest():
    config, gpus = load_config(["preset=qwen3-8b-8x24gb"]), Gpus.parse("8x24GB")
    serving = config.verl["actor_rollout_ref"]["rollout"]
    work = Work(
        context=config.rollout.max_context,
        micro_batch_tokens=config.micro_batch_tokens,
        rank=config.lora.rank,
        checkpointing=True,
        tensor_parallel=serving["tensor_model_parallel_size"],
    )
    found = plan(SHAPES["qwen3-8b"], gpus, work)
    assert found["training"]["total"] <= found["gpus"]["usable"]
    # vLLM takes a fixed share for weights and cache, whatever all rollouts would need.
    served = serving["gpu_memory_utilization"] * gpus.bytes_each
    assert config.verl["actor_rollout_ref"]["actor"]["fsdp_config"]["optimizer_offload"]
    rests = found["rollout"]["other_worker"] - found["training"]["optimizer"]
    assert served + rests <= found["gpus"]["usable"]
    assert served > found["rollout"]["weights"] + found["rollout"]["kv_cache"] / 2, "room for half of the rollouts"


def test_checkpointing_keeps_less_and_more_tokens_keep_more():
    def total(**knobs: object) -> int:
        return sum(training(SHAPES["qwen3-8b"], Work(**knobs), gpus=1).values())  # type: ignore[arg-type]

    assert total(checkpointing=True) < total() / 3
    assert total(micro_batch_tokens=8192) < total(micro_batch_tokens=16384)
    assert total(adapters=1) < total(adapters=2)


@pytest.mark.parametrize(("model", "gpus"), [("qwen3-8b", "8x24GB"), ("qwen3-8b", "141GB"), ("qwen3-1.7b", "2x8GB")])
def test_advice_leads_to_a_plan_that_fits(model: str, gpus: str):
    shape, cards, work = SHAPES[model], Gpus.parse(gpus), Work()
    first = plan(shape, cards, work)
    assert not first["fits"]
    knobs = {"--checkpointing": "checkpointing", "--micro-batch-tokens": "micro_batch_tokens"}
    knobs |= {"--tensor-parallel": "tensor_parallel", "--rollouts": "rollouts"}
    for sentence in first["advice"]:
        option = sentence.rpartition("(")[2].rstrip(")").split()
        work = replace(work, **{knobs[option[0]]: int(option[1]) if len(option) > 1 else True})
    second = plan(shape, cards, work)
    assert second["fits"]
    assert second["advice"] == []
    for phase in ("training", "rollout"):
        parts = dict(second[phase])
        assert parts.pop("total") == sum(parts.values()) <= second["gpus"]["usable"]


def test_the_gpus_of_a_server_divide_those_there_are():
    advice = plan(SHAPES["qwen3-8b"], Gpus.parse("6x24GB"), Work(rollouts=600))["advice"]
    assert "split each rollout server over 2 GPUs (--tensor-parallel 2)" in advice
    assert not any("4 GPUs" in sentence for sentence in advice)
    for gpus, parallel in (("1x80GB", 2), ("6x24GB", 4), ("2x24GB", 8)):
        with pytest.raises(UsageError, match=f"--tensor-parallel {parallel} must divide .* GPUs, {gpus[0]} "):
            plan(SHAPES["qwen3-8b"], Gpus.parse(gpus), Work(tensor_parallel=parallel))


def test_what_no_knob_can_help_is_said():
    result = plan(SHAPES["qwen3-8b"], Gpus.parse("16GB"), Work())
    assert not result["fits"]
    assert "use more or larger GPUs" in result["advice"][0]


def test_gpus_and_models_that_are_none_are_refused(tmp_path: Path):
    assert Gpus.parse("8x24GB") == Gpus(count=8, bytes_each=24_000_000_000)
    assert str(Gpus.parse("80gb")) == "1x80GB"
    for text in ("", "8", "0x24GB", "8x", "x24GB", "8x24TB"):
        with pytest.raises(UsageError, match="8x24GB"):
            Gpus.parse(text)
    with pytest.raises(ConfigError, match="neither one of tiny"):
        shape_of(str(tmp_path))
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    with pytest.raises(ConfigError, match="'num_attention_heads' is missing"):
        shape_of(str(tmp_path))


def test_the_command_answers_in_json_and_in_words(capsys, monkeypatch):
    for extra in (["--json"], []):
        command = ["lfo", "plan", "--model", "qwen3-8b", "--gpus", "8x24GB", *extra]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as exit_:
            main()
        assert exit_.value.code == 0
    answer, words = capsys.readouterr().out.split("\n", 1)
    assert json.loads(answer)["basis"] == "computed, not measured"
    assert "turn gradient checkpointing on" in words


def test_what_is_measured_on_a_gpu_runs():
    """One update of a small shape on the CPU, as `lfo bench memory` makes it."""
    watched = training_update(SMALL, replace(CASES[0], rows=2, length=64), torch.device("cpu"))()
    assert watched["gradient_norm/policy"] > 0
    assert watched["gradient_norm/world_model"] > 0
