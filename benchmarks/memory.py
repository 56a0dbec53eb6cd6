"""Measure the memory of an update on a GPU with random weights, and compare it with the figures of `plan`.

lfo bench memory --json
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from benchmarks.speed import seconds_of
from lfo.config import load_config
from lfo.model.adapters import DualAdapterModel
from lfo.model.learner import Learner
from lfo.tools.plan import SHAPES, Shape, Work, training
from lfo.types import TrainingSample


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Rows of equal length that fill one micro-batch; a quarter of each row is trained."""

    shape: str
    rows: int
    length: int
    checkpointing: bool = False

    @property
    def work(self) -> Work:
        tokens = self.rows * self.length
        return Work(micro_batch_tokens=tokens, context=self.length, checkpointing=self.checkpointing)


CASES = (
    Case(shape="smollm2-135m", rows=8, length=1024),
    Case(shape="smollm2-135m", rows=16, length=1024),
    Case(shape="qwen3-0.6b", rows=8, length=1024),
    Case(shape="qwen3-1.7b", rows=4, length=1024),
    Case(shape="qwen3-1.7b", rows=4, length=2048, checkpointing=True),
    Case(shape="qwen3-4b", rows=4, length=2048, checkpointing=True),
    Case(shape="qwen3-8b", rows=2, length=1024),
    Case(shape="qwen3-8b", rows=4, length=2048, checkpointing=True),
)


def compare(cases: Sequence[Case] = CASES) -> Iterator[dict[str, Any]]:
    """Yield computed and measured bytes of each case."""
    for case in cases:
        planned = training(SHAPES[case.shape], case.work, gpus=1)
        found = measure_training(SHAPES[case.shape], case, torch.device("cuda"))
        computed, measured = sum(planned.values()), found["peak"]
        yield {
            "model": case.shape,
            "micro_batch_tokens": case.work.micro_batch_tokens,
            "checkpointing": case.checkpointing,
            "computed": computed,
            "measured": measured,
            "error": computed / measured - 1,
            "computed_parts": by_phase(planned),
            "measured_parts": {
                "weights": found["weights"],
                "adapters": found["adapters"],
                "optimizer": found["rest"] - found["weights"] - found["adapters"],
                "update": found["peak"] - found["rest"],
            },
            "seconds": found["seconds"],
        }


def by_phase(planned: Mapping[str, int]) -> dict[str, int]:
    """Return the figures of `plan` in parts that can be measured: before the adapters, with them, after a step of
    AdamW, and the rest of an update, with its gradients."""
    return {
        "weights": planned["weights"],
        "adapters": planned["adapters"],
        "optimizer": planned["optimizer"],
        "update": planned["gradients"] + planned["activations"] + planned["passing"] + planned["buffers"],
    }


def measure_training(shape: Shape, case: Case, device: torch.device) -> dict[str, float]:
    """Return the bytes after each part, the peak of the second update (in the first the optimizer has no state yet),
    and the seconds of a third."""
    gc.collect()
    torch.cuda.empty_cache()
    found: dict[str, float] = {}
    update = training_update(shape, case, device, note=partial(_note, found, device))
    update()
    found["rest"] = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    update()
    found["peak"] = torch.cuda.max_memory_allocated(device)
    found["seconds"], _ = seconds_of(update, device)
    return found


def _note(found: dict[str, float], device: torch.device, name: str) -> None:
    """Record the bytes added since the last call."""
    found[name] = torch.cuda.memory_allocated(device) - sum(found.values())


def training_update(
    shape: Shape, case: Case, device: torch.device, note: Callable[[str], None] = lambda name: None
) -> Any:
    """Return an update of both adapters on random rows: one micro-batch of policy rows and a short world-model row."""
    with torch.device(device):
        base = AutoModelForCausalLM.from_config(model_config(shape), dtype=torch.bfloat16)
    note("weights")
    work = case.work
    model = DualAdapterModel.build(
        base, coupling="separate", seed=0, rank=work.rank, gradient_checkpointing=case.checkpointing
    )
    note("adapters")
    learner = Learner(model, load_config(["lookahead=off"]))
    sampled = work.predicted // case.rows

    def row(adapters: tuple[str, ...], length: int, policy: int, world: int) -> TrainingSample:
        tokens = torch.randint(shape.vocabulary, (length,)).tolist()
        zeros = [0.0] * length
        return TrainingSample(
            adapters=adapters,
            tokens=tuple(tokens),
            logprobs=tuple(zeros),
            advantages=tuple([1.0] * length),
            policy_weights=(*zeros[policy:], *[1.0] * policy),
            world_model_weights=(*zeros[world:], *[1.0] * world),
        )

    rows = [row(model.policy_adapters, case.length, sampled, 0) for _ in range(case.rows)]
    rows.append(row(model.world_model_adapters, 64, 0, 32))
    return lambda: learner.update(rows, world_model_weight=1.0, rate_factor=1.0)


def model_config(shape: Shape) -> Any:
    """Return a transformers config with these sizes."""
    family: Any = Qwen3Config if shape.head_norms else Qwen2Config if shape.biases else LlamaConfig
    return family(
        architectures=[family.__name__.replace("Config", "ForCausalLM")],  # else vLLM loads a body without a head
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        head_dim=shape.head_size,
        tie_word_embeddings=shape.tied,
    )
