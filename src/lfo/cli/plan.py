"""`lfo plan`: compute whether a model fits on these GPUs, and if not, which option to change."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lfo.cli.common import Json, answer

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
    model: Annotated[str, typer.Option(help="A known shape (qwen3-8b, smollm2-135m, tiny, ...) or a folder.")],
    gpus: Annotated[str, typer.Option(metavar="NxMGB", help="As 8x24GB.")],
    context: Annotated[int, typer.Option(min=1, help="Tokens of a rollout.")] = 2048,
    rollouts: Annotated[int, typer.Option(min=1, help="Rollouts in parallel.")] = 64,
    micro_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one forward and backward pass.")] = 16_384,
    rank: Annotated[int, typer.Option(min=1, help="Of LoRA.")] = 16,
    adapters: Annotated[int, typer.Option(min=1, max=2, help="2: policy and world model.")] = 2,
    checkpointing: Annotated[bool, typer.Option(help="Recompute activations in the backward pass.")] = False,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs of one rollout server.")] = 1,
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
