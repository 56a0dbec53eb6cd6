"""Measure the speed of the parts on this machine, one command for each: `python -m benchmarks`, or `lfo bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from lfo.cli import main
from lfo.cli.common import Json, answer, progress_bar, working
from lfo.errors import UsageError

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME=VALUE", help="Config overrides on top of preset=tiny, as for lfo train."),
]
Device = Annotated[Literal["cpu", "cuda"], typer.Option(help="One core of the CPU, or the GPU.")]

app = typer.Typer(help="Measure the speed of a part on this machine.", no_args_is_help=True)


@app.command("env")
def bench_environment(as_json: Json = False) -> None:
    """Measure the phone-call world: tool calls per second on one core, and seconds to generate the default data."""
    from benchmarks.environment import generate_seconds, tool_calls_per_second

    result = {"tool_calls_per_second": tool_calls_per_second(), "generate_seconds": generate_seconds()}
    words = f"{result['tool_calls_per_second']:,.0f} tool calls a second on one core\n"
    words += f"{result['generate_seconds']:.2f} s to generate the default data"
    answer(result, lambda: typer.echo(words), as_json=as_json)


@app.command("bounds")
def check_bounds(
    data: Annotated[Path, typer.Option("--data", metavar="DIR", help="A folder of `lfo generate`.")] = Path("data"),
    as_json: Json = False,
) -> None:
    """Check the phone-call world: every scripted player on fresh tasks, every bound; exit code 1 if one is broken."""
    from benchmarks.bounds import check, plays
    from lfo.env.worlds.phone.generator import load

    dataset = load(data)
    with progress_bar("players", plays(dataset.options), hidden=as_json) as advance:
        result = check(dataset, on_played=lambda: advance(1))
    answer(result, lambda: _show_bounds(result), as_json=as_json)
    if not result["ok"]:
        raise typer.Exit(1)


def _show_bounds(result: dict[str, Any]) -> None:
    levels = list(result["fresh_ceiling"])
    table = Table("player", *(f"level {level}" for level in levels), title="success on fresh tasks, 95 % interval")
    for name, scores in result["players"].items():
        cells = (scores[level] for level in levels)
        table.add_row(name, *(f"{each['success']:.1%} ({each['low']:.1%}-{each['high']:.1%})" for each in cells))
    table.add_row("information ceiling", *(f"{result['fresh_ceiling'][level]:.1%}" for level in levels))
    for name, scores in result["hostile"].items():
        table.add_row(
            f"hostile: {name}", *(f"{scores[level]['success']:.1%}" if level in scores else "-" for level in levels)
        )
    console = Console()
    console.print(table)
    for problem in result["problems"]:
        console.print(f"BROKEN: {problem}", markup=False)
    console.print("All bounds hold." if result["ok"] else f"{len(result['problems'])} bounds are broken.")


@app.command("step")
def bench_step(overrides: Overrides = None, device: Device = "cpu", as_json: Json = False) -> None:
    """Compare a training step with a world model to a plain DAPO step: lfo bench step world_model.weight=0.5"""
    from benchmarks import step

    with working("measuring training steps"):
        result = step.bench_step(overrides or [], device=device)
    if as_json:
        typer.echo(json.dumps(result))
        return
    typer.echo(result["note"])
    for name, phases in result["phases"].items():
        tokens = result["tokens"][name]
        seconds = ", ".join(f"{phase} {value:.2f} s" for phase, value in phases.items())
        ratio = f"{result[f'{name}_over_dapo']:.2f} x" if f"{name}_over_dapo" in result else "1 x"
        typer.echo(
            f"{name:10} {ratio:7} {seconds}; {tokens['policy_rows']} policy rows of {tokens['policy_row_tokens']} "
            f"tokens, {tokens['world_model_rows']} world-model rows of {tokens['world_model_row_tokens']} tokens; "
            f"{result['floor_fraction'][name]:.1%} of the arithmetic floor; "
            f"peak {result['peak_memory'][name] / 2**30:.2f} GiB"
        )
    typer.echo(f"at most {result['examples_per_mini_batch']} world-model examples per mini-batch")


@app.command("rollout")
def bench_rollout(
    model: Annotated[str, typer.Option(help="The embedded base (tiny), a fetched model, or a folder.")] = "tiny",
    device: Device = "cpu",
    against: Annotated[
        Literal["generate", "vllm"], typer.Option(help="vllm: on a GPU, random weights of several shapes.")
    ] = "generate",
    shapes: Annotated[
        str, typer.Option(help="With --against vllm: model shapes, separated by commas.")
    ] = "smollm2-135m,qwen3-1.7b,qwen3-8b",
    rows: Annotated[str, typer.Option(help="With --against vllm: batch sizes, separated by commas.")] = "16,64,256",
    as_json: Json = False,
) -> None:
    """Compare our sampler to transformers' generate() on 64 phone-call prompts, or to vLLM."""
    if against == "vllm":
        _against_vllm(shapes.split(","), numbers_in(rows, "--rows"), as_json)
        return
    from benchmarks import rollout

    with working("measuring sampling"):
        result = rollout.bench_rollout(model=model, device=device)
    if as_json:
        typer.echo(json.dumps(result))
        return
    where = "one core" if device == "cpu" else "one GPU"
    typer.echo(f"{result['tokens_per_second']:,.0f} sampled tokens a second, batch {result['batch']}, {where}")
    typer.echo(f"{result['generate_tokens_per_second']:,.0f} with transformers' generate(): {result['speedup']:.1f} x")
    typer.echo(f"{result['speedup_fixed_length']:.1f} x where all rows are equally long")
    typer.echo(
        f"a decode step takes {result['step_seconds'] * 1e3:.2f} ms; reading all weights and the cache once would take "
        f"{result['floor_step_seconds'] * 1e3:.2f} ms ({result['floor_fraction']:.0%})"
    )


def _against_vllm(shapes: list[str], rows: list[int], as_json: bool) -> None:
    from benchmarks import against_vllm
    from lfo.loading import pick_device

    against_vllm.require_vllm()
    pick_device("cuda")
    found = []
    for record in against_vllm.against_vllm(shapes, rows):
        found.append(record)
        ours, theirs = (f"{record[f'{name}_tokens_per_second']:,.0f} tokens/s" for name in ("lfo", "vllm"))
        steps = f"{record['lfo_step_ms']:.2f} and {record['vllm_step_ms']:.2f} ms"
        words = f"{record['shape']:14} {record['rows']:4} rows: ours {ours}, vLLM {theirs}, {record['ratio']:.2f} x"
        typer.echo(f"{words}; a decode step {steps}", err=as_json)
    if as_json:
        typer.echo(json.dumps(found))


def numbers_in(text: str, option: str) -> list[int]:
    """
    >>> numbers_in("40,80", "--tasks")
    [40, 80]
    """
    points = [int(part) for part in text.split(",") if part.strip().isdecimal()]
    if not points or len(points) != len(text.split(",")) or points != sorted(set(points)) or points[0] < 1:
        raise UsageError(f"{option} must be increasing numbers separated by commas, such as 40,80,160, not {text!r}")
    return points


@app.command("growth")
def bench_growth(as_json: Json = False) -> None:
    """Measure how the cost of a step, and of commands that read runs, grows with the length of a run."""
    from benchmarks.growth import exponent, growth

    found = []
    for name, sizes, seconds in growth():
        found.append({"name": name, "sizes": sizes, "seconds": seconds, "exponent": exponent(sizes, seconds)})
        words = ", ".join(f"{size:,}: {value:.3f} s" for size, value in zip(sizes, seconds, strict=True))
        typer.echo(f"{name:54} {words}; grows as n^{found[-1]['exponent']:.1f}", err=as_json)
    if as_json:
        typer.echo(json.dumps(found))


@app.command("memory")
def bench_memory(as_json: Json = False) -> None:
    """Compare lfo plan with the measured memory peak of an update on one GPU, for several shapes."""
    from benchmarks.memory import compare
    from lfo.loading import pick_device

    pick_device("cuda")
    with working("measuring peaks"):
        rows = list(compare())
    if as_json:
        typer.echo(json.dumps(rows))
        return
    for row in rows:
        typer.echo(
            f"{row['model']:14} {row['micro_batch_tokens']:6} tokens{' with checkpointing' * row['checkpointing']}: "
            f"computed {row['computed'] / 2**30:.2f} GiB, measured {row['measured'] / 2**30:.2f} GiB "
            f"({row['error']:+.1%}); an update takes {row['seconds']:.2f} s"
        )
        for name, measured in row["measured_parts"].items():
            computed = row["computed_parts"][name] / 2**30
            typer.echo(f"{'':14} {name:10} computed {computed:6.2f} GiB, measured {measured / 2**30:6.2f} GiB")


if __name__ == "__main__":
    main(app, "python -m benchmarks")
