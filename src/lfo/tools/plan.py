"""Compute the memory that a model needs on each GPU, without torch, weights or a GPU.

    lfo plan --model qwen3-8b --gpus 8x24GB

There are two kinds of workers. *Training* needs the frozen base, the adapters with gradients and AdamW moments, the
activations for the backward, and the largest chunk of logits. *Rollout* needs the weights again, in a layout for fast
decoding, and the cache of keys and values. On one GPU both are in memory together, as in the local engine. On several
GPUs the layers are sharded over all (FSDP) and the rest is replicated, as in engines/verl/engine.py; rollout servers
use tensor parallelism as needed, and both alternate.

`lfo bench memory` compares the training figures for one GPU with measured peaks (docs/PLANNING.md); those for several
GPUs and for rollout servers are only computed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lfo.errors import ConfigError, UsageError

HALF, FULL = 2, 4  # bytes of bf16 and fp32
USABLE = 0.92  # the driver, libraries and fragmentation need the rest
WORKSPACE = 72 * 2**20  # of the matrix library, on two streams
LOGITS_AT_ONCE = 1 << 27  # as in model/learner.py: predictions times vocabulary
SMALLEST_MICRO_BATCH = 1024
PREDICTION = 512  # tokens of a world-model prompt and reply
PADDING = 1.15  # of rows of different lengths in a micro-batch; affects only attention


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama-like model."""

    name: str
    layers: int
    hidden: int
    inner: int  # of the feed-forward
    heads: int
    key_heads: int
    head_size: int
    vocabulary: int
    tied: bool  # the head is the embedding
    head_norms: bool = False  # Qwen3 norms each head of queries and keys
    biases: bool = False  # Qwen2 has them on queries, keys and values

    @property
    def queries(self) -> int:
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        return self.key_heads * self.head_size

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of each linear layer of one transformer layer."""
        attention = ((self.hidden, self.queries), (self.hidden, self.keys), (self.hidden, self.keys))
        feed_forward = ((self.hidden, self.inner), (self.hidden, self.inner), (self.inner, self.hidden))
        return (*attention, (self.queries, self.hidden), *feed_forward)

    @property
    def layer_parameters(self) -> int:
        extra = 2 * self.hidden + (2 * self.head_size if self.head_norms else 0)
        extra += self.queries + 2 * self.keys if self.biases else 0
        return sum(wide * out for wide, out in self.linears) + extra

    @property
    def embedding_parameters(self) -> int:
        """Embedding and head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.embedding_parameters + self.hidden

    def adapter_parameters(self, rank: int) -> int:
        return self.layers * rank * sum(wide + out for wide, out in self.linears)


SHAPES: Mapping[str, Shape] = {
    row[0]: Shape(*row)
    for row in (
        # name, layers, hidden, inner, heads, key heads, head size, vocabulary, tied, head norms
        ("tiny", 4, 128, 384, 4, 2, 32, 1216, True, True),
        ("general", 4, 128, 384, 4, 2, 32, 4016, True, True),
        ("smollm2-135m", 30, 576, 1536, 9, 3, 64, 49152, True, False),
        ("qwen3-0.6b", 28, 1024, 3072, 16, 8, 128, 151936, True, True),
        ("qwen3-1.7b", 28, 2048, 6144, 16, 8, 128, 151936, True, True),
        ("qwen3-4b", 36, 2560, 9728, 32, 8, 128, 151936, True, True),
        ("qwen3-8b", 36, 4096, 12288, 32, 8, 128, 151936, False, True),
    )
}


def shape_of(model: str) -> Shape:
    """Return a named shape, or that of a config.json."""
    if model in SHAPES:
        return SHAPES[model]
    path = Path(model).expanduser()
    path = path if path.suffix == ".json" else path / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        known = ", ".join(SHAPES)
        raise ConfigError(f"--model {model} is neither one of {known} nor a folder with a config.json") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return Shape(
            name=str(model),
            layers=config["num_hidden_layers"],
            hidden=hidden,
            inner=config["intermediate_size"],
            heads=heads,
            key_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or hidden // heads,
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            head_norms=config.get("model_type") == "qwen3",
            biases=config.get("model_type") == "qwen2",
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path} does not describe a Llama-like model: {error} is missing") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpus:
    """`8x24GB`."""

    count: int
    bytes_each: int

    @classmethod
    def parse(cls, text: str) -> Gpus:
        match = re.fullmatch(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*GB", text.strip(), re.IGNORECASE)
        count = int(match[1] or 1) if match else 0
        if match is None or count < 1 or float(match[2]) <= 0:
            raise UsageError(f"--gpus must be written as 8x24GB or 80GB, not {text!r}")
        return cls(count=count, bytes_each=int(float(match[2]) * 1e9))

    def __str__(self) -> str:
        return f"{self.count}x{self.bytes_each / 1e9:g}GB"


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The options of a run that determine its memory."""

    context: int = 2048  # tokens of a rollout
    rollouts: int = 64  # in parallel, on all GPUs together
    micro_batch_tokens: int = 16_384  # in one forward and backward, padding included
    predictions: int | None = None  # tokens of a micro-batch with a loss; None: a quarter
    rank: int = 16
    adapters: int = 2
    checkpointing: bool = False  # keep only the input of each layer and recompute the rest in the backward
    tensor_parallel: int = 1  # GPUs that share one rollout server

    @property
    def predicted(self) -> int:
        return self.micro_batch_tokens // 4 if self.predictions is None else self.predictions


# --- the parts ---------------------------------------------------------------------------------------------------


def kept_by_layer(shape: Shape, rank: int, *, lean: bool) -> int:
    """Return the bytes of one token that one layer keeps for the backward. The base is frozen, so only LoRA and the
    nonlinear parts need activations. `lean`: our own forward (model/fast/lean.py), else the modules of transformers."""
    if lean:
        norms = 2 * 2 * HALF * shape.hidden  # two norms, input and output
        padded = int(PADDING * HALF * 2 * (shape.queries + shape.keys))  # q, k, v and output, as attention sees them
        attention = padded + HALF * shape.queries  # plus the output without padding
        attention += HALF * (shape.queries + 2 * shape.keys) if shape.head_norms else 0  # inputs of the head norms
    else:
        norms = 2 * (FULL + HALF) * shape.hidden  # the input in fp32, the output for LoRA's A
        attention = HALF * (2 * shape.queries + 2 * shape.keys)  # q, k, v, output
        attention += FULL * (shape.queries + shape.keys) if shape.head_norms else 0
    feed_forward = 4 * HALF * shape.inner  # gate, silu of it, up, their product
    return norms + attention + FULL * shape.heads + feed_forward + HALF * rank * len(shape.linears)


def passing_in_layer(shape: Shape, *, lean: bool) -> int:
    """Return the temporary bytes of one token in the backward of one layer."""
    if lean:
        return HALF * (4 * shape.hidden + 5 * shape.inner)
    return 8 * FULL * shape.hidden + HALF * (shape.hidden + shape.inner)  # most of them in fp32, in the norms


def logits_bytes(shape: Shape, predictions: int) -> int:
    """Return the bytes of the largest chunk of logits: four copies in fp32 (logits, log-probs, probabilities, their
    product). The backward needs no more, and frees each chunk before the next one."""
    return shape.vocabulary * min(predictions, LOGITS_AT_ONCE // shape.vocabulary) * 4 * FULL


def training(shape: Shape, work: Work, gpus: int) -> dict[str, int]:
    """Return the bytes on each GPU at the peak of an update."""
    trained = work.adapters * shape.adapter_parameters(work.rank)
    lean = gpus == 1 and not work.checkpointing
    tokens, layer = work.micro_batch_tokens, kept_by_layer(shape, work.rank, lean=lean)
    kept = HALF * shape.hidden if work.checkpointing else layer
    # After the last layer: the hidden state (in fp32 in the norm of the modules), the selected rows, their gradients.
    after = (6 * HALF if lean else 2 * HALF + 6 * FULL) * shape.hidden
    again = layer if work.checkpointing else 0
    layers = shape.layers * shape.layer_parameters
    gathered = 2 * HALF * shape.layer_parameters if gpus > 1 else 0  # the current layer and the next one
    return {
        "weights": HALF * (layers // gpus + shape.parameters - layers),
        "adapters": (FULL + HALF) * trained,  # with a bf16 copy for computing
        "gradients": FULL * trained,
        "optimizer": 2 * FULL * trained,
        "activations": (shape.layers * kept + after) * tokens,
        # Logits are freed before the backward of the layers: the larger of the two counts.
        "passing": max(logits_bytes(shape, work.predicted), (again + passing_in_layer(shape, lean=lean)) * tokens),
        "buffers": gathered + WORKSPACE,
    }


def cache_bytes_of_a_token(shape: Shape) -> int:
    """Return the bytes of the keys and values of one token in all layers."""
    return 2 * shape.layers * shape.keys * HALF


def rollout(shape: Shape, work: Work, gpus: int) -> dict[str, int]:
    """Return the bytes on each GPU during rollouts. One GPU: our decoders, one for each adapter; else servers."""
    parallel = work.tensor_parallel if gpus > 1 else 1
    servers = max(1, gpus // parallel)
    rows = -(-work.rollouts // servers)
    decoders = work.adapters if gpus == 1 else 1
    linear = shape.layers * shape.layer_parameters
    # Our decoders share embedding and head with the base; a server has its own.
    weights = decoders * HALF * linear if gpus == 1 else HALF * shape.parameters // parallel
    adapters = work.adapters * HALF * shape.adapter_parameters(work.rank) // parallel
    lengths = [work.context, *[min(work.context, PREDICTION)] * (decoders - 1)]
    slots = rows + 1 if gpus == 1 else rows
    cached = cache_bytes_of_a_token(shape) * sum(lengths) * slots
    return {
        "weights": weights,
        "adapters": adapters,
        "kv_cache": cached // parallel,
        "buffers": rows * shape.vocabulary * FULL * 2 + WORKSPACE,
    }


# --- the whole ---------------------------------------------------------------------------------------------------


def plan(shape: Shape, gpus: Gpus, work: Work) -> dict[str, Any]:
    """Return the memory of both workers, whether it fits, and which option to change if not."""
    if gpus.count % work.tensor_parallel:
        raise UsageError(
            f"--tensor-parallel {work.tensor_parallel} must divide the number of GPUs, {gpus.count} (--gpus {gpus})"
        )
    phases = _phases(shape, gpus, work)
    usable = int(USABLE * gpus.bytes_each)
    fits = all(phase["total"] <= usable for phase in phases.values())
    found = None if fits else _fitting(shape, gpus, work)
    return {
        "model": shape.name,
        "parameters": shape.parameters,
        "adapter_parameters": shape.adapter_parameters(work.rank),
        "gpus": {"count": gpus.count, "bytes": gpus.bytes_each, "usable": usable},
        "work": {name: value for name, value in asdict(work).items() if name != "predictions"},
        **phases,
        "fits": fits,
        "advice": [] if fits else _advice(shape, gpus, work, found),
        "basis": "checked against measured peaks" if gpus.count == 1 else "computed, not measured",
    }


def _phases(shape: Shape, gpus: Gpus, work: Work) -> dict[str, dict[str, int]]:
    """Return the memory of the idle worker: on one GPU it keeps everything, on several it releases what it can."""
    trains, rolls = training(shape, work, gpus.count), rollout(shape, work, gpus.count)
    # Gradients stay until the next update begins.
    trainer_rests = sum(trains[name] for name in ("weights", "adapters", "gradients", "optimizer"))
    held = rolls["weights"] + rolls["adapters"] + rolls["kv_cache"]
    sampler_rests = held if gpus.count == 1 else 0  # a server in sleep mode releases its weights
    trains["other_worker"], rolls["other_worker"] = sampler_rests, trainer_rests
    return {name: {**parts, "total": sum(parts.values())} for name, parts in (("training", trains), ("rollout", rolls))}


def _fits(shape: Shape, gpus: Gpus, work: Work, phase: str) -> bool:
    return _phases(shape, gpus, work)[phase]["total"] <= USABLE * gpus.bytes_each


def _fitting(shape: Shape, gpus: Gpus, work: Work) -> Work | None:
    """Return the first options that fit, changing the cheapest first; None if nothing helps."""
    while not _fits(shape, gpus, work, "training"):
        if not work.checkpointing:
            work = replace(work, checkpointing=True)
        elif work.micro_batch_tokens > max(SMALLEST_MICRO_BATCH, work.context):
            work = replace(work, micro_batch_tokens=max(work.micro_batch_tokens // 2, work.context))
        elif gpus.count == 1 and work.rollouts > 1:
            work = replace(work, rollouts=work.rollouts // 2)
        else:
            return None
    while not _fits(shape, gpus, work, "rollout"):
        if gpus.count % (work.tensor_parallel * 2) == 0:
            work = replace(work, tensor_parallel=work.tensor_parallel * 2)
        elif work.rollouts > gpus.count // work.tensor_parallel:
            work = replace(work, rollouts=work.rollouts // 2)
        else:
            return None
    return work


def _advice(shape: Shape, gpus: Gpus, work: Work, found: Work | None) -> list[str]:
    if found is None:
        return [f"{shape.name} does not fit on {gpus} with any of these options: use more or larger GPUs"]
    words = {
        "checkpointing": "turn gradient checkpointing on (--checkpointing)",
        "micro_batch_tokens": f"train on at most {found.micro_batch_tokens} tokens at once "
        f"(--micro-batch-tokens {found.micro_batch_tokens})",
        "tensor_parallel": f"split each rollout server over {found.tensor_parallel} GPUs "
        f"(--tensor-parallel {found.tensor_parallel})",
        "rollouts": f"run at most {found.rollouts} rollouts at the same time (--rollouts {found.rollouts})",
    }
    return [sentence for name, sentence in words.items() if getattr(found, name) != getattr(work, name)]
