"""`lfo plan`: compute whether a model fits on these GPUs, and if not, which option to change."""

from __future__ import annotations

from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from lfo.cli.common import Json, answer, option

_PARTS = {
    "weights": "weights of the base",
    "adapters": "adapters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "passing": "logits, or the backward of a layer",
    "kv_cache": "cache of keys and values",
    "buffers": "buffers",
    "other_worker": "the other worker, at rest",
    "total": "total",
}


def plan(
    model: Annotated[str, option("A known shape (qwen3-8b, smollm2-135m, tiny, ...) or a folder.")],
    gpus: Annotated[str, option("As 8x24GB.", "NxMGB")],
    context: Annotated[int, option("Tokens of a rollout.", min=1)] = 2048,
    rollouts: Annotated[int, option("Rollouts in parallel.", min=1)] = 64,
    micro_batch_tokens: Annotated[int, option("Tokens of one forward and backward pass.", min=1)] = 16_384,
    rank: Annotated[int, option("Of LoRA.", min=1)] = 16,
    adapters: Annotated[int, option("2: policy and world model.", min=1, max=2)] = 2,
    checkpointing: Annotated[bool, option("Recompute activations in the backward pass.")] = False,
    tensor_parallel: Annotated[int, option("GPUs of one rollout server.", min=1)] = 1,
    as_json: Json = False,
) -> None:
    """Compute the memory on each GPU for training and rollouts: lfo plan --model qwen3-8b --gpus 8x24GB"""
    from lfo.tools.plan import Gpus, Work, shape_of
    from lfo.tools.plan import plan as make_plan

    work = Work(
        context=context,
        rollouts=rollouts,
        micro_batch_tokens=micro_batch_tokens,
        rank=rank,
        adapters=adapters,
        checkpointing=checkpointing,
        tensor_parallel=tensor_parallel,
    )
    result = make_plan(shape_of(model), Gpus.parse(gpus), work)
    answer(result, lambda: _show(result), as_json=as_json)


def _show(result: dict[str, Any]) -> None:
    def gib(phase: str, part: str) -> str:
        return f"{result[phase][part] / 2**30:.2f}" if part in result[phase] else ""

    table = Table("GiB on each GPU", "training", "rollout")
    for part, words in _PARTS.items():
        table.add_row(words, gib("training", part), gib("rollout", part))
    console = Console()
    console.print(table)
    usable = result["gpus"]["usable"] / 2**30
    console.print(f"usable: {usable:.2f} GiB of each; {result['basis']}")
    console.print("It fits." if result["fits"] else "It does not fit as it is:")
    for sentence in result["advice"]:
        console.print(f"- {sentence}", markup=False)
