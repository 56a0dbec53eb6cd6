"""`lfo pretrain` builds the embedded base or warms up another base; `--check` measures one."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lfo.cli.common import Device, Json, answer, flag, option, working
from lfo.cli.environment import measured_gate, show_gate
from lfo.cli.practice import practice_bars
from lfo.errors import UsageError


def pretrain(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME=VALUE", help="Where to practise, as env=my_world:Safes env_args.size=5."),
    ] = None,
    output_dir: Annotated[Path | None, option("New folder for the base.", "DIR")] = None,
    base: Annotated[
        str | None, option("Warm up this base instead of building one: a fetched model or a folder.")
    ] = None,
    general: Annotated[
        bool, flag("--general", "Build the base from which practice starts in other environments.")
    ] = False,
    steps: Annotated[int | None, option("Training steps; the default is that of the recipe.", min=1)] = None,
    conversations: Annotated[int | None, option("Practice conversations; likewise.", min=1)] = None,
    device: Device = "auto",
    workers: Annotated[int, option("Processes that write the corpus.", min=1)] = os.cpu_count() or 1,
    check: Annotated[bool, flag("--check", "Measure a base instead of building one.")] = False,
    model: Annotated[str, option("With --check: the base, a folder or tiny.")] = "tiny",
    tasks: Annotated[int | None, option("With --check: tasks of each level (64), or of env= (500).", min=1)] = None,
    law: Annotated[int, option("With --check: the law that the base must not know.", min=0)] = 0,
    env: Annotated[str | None, option("The old form of env=NAME.", hidden=True)] = None,
    env_arg: Annotated[list[str] | None, option("The old form of env_args.NAME=VALUE.", hidden=True)] = None,
    row: Annotated[int | None, option("With env=: tokens of a rollout.", min=64)] = None,
    reading: Annotated[bool, flag("--reading/--no-reading", "With env=: practise to act on what replies say.")] = True,
    as_json: Json = False,
) -> None:
    """Build the embedded base, warm up a base for the shipped environments or for any tools, or check a base.

    lfo pretrain --output-dir base; lfo pretrain --base smollm2-135m; lfo pretrain --check --model base;
    lfo pretrain env=my_world:Safes --output-dir base
    """
    overrides = _settings_of_environment(overrides or [], env, env_arg or [])
    if overrides:
        if check:
            _check_syntax(model, overrides, tasks or 500, row, device, as_json)
        else:
            practice = {"steps": steps, "conversations": conversations, "row": row}
            _teach_syntax(base or "general", overrides, output_dir, practice, device, as_json, reading)
        return
    tasks = tasks or 64
    if check:
        _check(model, tasks, law, device, as_json)
        return
    if output_dir is None and base is not None and not general:
        output_dir = _warm_folder(base)
    output_dir = _new_folder(output_dir)
    given = {"steps": steps, "conversations": conversations}
    changed = {name: value for name, value in given.items() if value is not None}
    if general:
        if base is not None:
            raise UsageError("--general builds a base from nothing; leave out --base")
        _build_general(output_dir, changed, device, workers, as_json)
    else:
        _build(output_dir, base, changed, device, workers, as_json)


def _settings_of_environment(typed: list[str], env: str | None, env_arg: list[str]) -> list[str]:
    """Return the typed settings, among them those in their old form; raise for any that practice does not read."""
    from lfo.config import load_config

    settings = [*([] if env is None else [f"env={env}"]), *(f"env_args.{each}" for each in env_arg), *typed]
    load_config(settings)
    for each in settings:
        name = each.partition("=")[0]
        if name not in ("env", "levels") and not name.startswith("env_args."):
            option_of = {"model": "--model or --base", "output_dir": "--output-dir", "steps": "--steps"}.get(name)
            right = f"; write {option_of}" if option_of else ""
            raise UsageError(f"lfo pretrain reads the settings env and env_args only, not {name}{right}")
    if settings and not any(each.startswith("env=") for each in settings):
        raise UsageError(f"lfo pretrain {settings[0]} needs the environment: env=NAME")
    return settings


def _warm_folder(base: str) -> Path:
    from lfo.model import catalog

    if base not in catalog.CATALOG:
        raise UsageError(f"--base {base} is not a fetched model; name the new folder with --output-dir DIR")
    return catalog.models_root() / (base + catalog.WARM)


def _new_folder(output_dir: Path | None) -> Path:
    from lfo.atomic import new_folder

    if output_dir is None:
        raise UsageError("lfo pretrain needs --output-dir DIR, or --check")
    return new_folder(output_dir)


def _build(
    output_dir: Path, base: str | None, changed: dict[str, int], device: str, workers: int, as_json: bool
) -> None:
    from dataclasses import replace

    from lfo.loading import pick_device
    from lfo.tools.pretrain.recipe import WARM_UP, Recipe, pretrain, warm_up

    with practice_bars() as progress:
        work: Any = {"device": pick_device(device).type, "workers": workers, "progress": progress}
        if base is None:
            loss = pretrain(replace(Recipe(), **changed), output_dir, **work)
        else:
            loss = warm_up(base, replace(WARM_UP, **changed), output_dir, **work)
    words = f"Wrote {output_dir}, final loss {loss:.3f}; check it with: lfo pretrain --check --model {output_dir}"
    answer({"output_dir": str(output_dir), "loss": loss}, lambda: typer.echo(words), as_json=as_json)


def _build_general(output_dir: Path, changed: dict[str, int], device: str, workers: int, as_json: bool) -> None:
    from dataclasses import replace

    from lfo.loading import pick_device
    from lfo.tools.pretrain.general import GeneralRecipe, pretrain_general

    with practice_bars() as progress:
        loss = pretrain_general(
            replace(GeneralRecipe(), **changed),
            output_dir,
            device=pick_device(device).type,
            workers=workers,
            progress=progress,
        )
    words = f"Wrote {output_dir}, final loss {loss:.3f}"
    answer({"output_dir": str(output_dir), "loss": loss}, lambda: typer.echo(words), as_json=as_json)


def _teach_syntax(
    base: str,
    overrides: list[str],
    output_dir: Path | None,
    practice: dict[str, int | None],
    device: str,
    as_json: bool,
    reading: bool,
) -> None:
    from dataclasses import replace

    from lfo.config import load_config
    from lfo.loading import environment_factory, pick_device

    make_environment = environment_factory(load_config(overrides))  # refused before seconds of imports
    folder = _new_folder(output_dir)
    from lfo.tools.pretrain.syntax import SYNTAX, teach_syntax

    chosen = replace(SYNTAX, **{name: value for name, value in practice.items() if value is not None})
    try:
        with practice_bars() as progress:
            result = teach_syntax(
                base,
                make_environment,
                chosen,
                folder,
                device=pick_device(device).type,
                progress=progress,
                reading=reading,
                about={"env": overrides},
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; the same command goes on with the practice") from None
    check = ["lfo", "pretrain", *overrides]
    check += [] if practice["row"] is None else ["--row", str(practice["row"])]
    words = (
        f"Wrote {folder}: {result['rollouts']:,} rollouts in {result['tasks']:,} tasks of train, final loss "
        f"{result['loss']:.3f}; check it with: {shlex.join([*check, '--check', '--model', str(folder)])}"
    )
    answer(result, lambda: typer.echo(words), as_json=as_json)


def _check_syntax(model: str, overrides: list[str], tasks: int, row: int | None, device: str, as_json: bool) -> None:
    from lfo.config import load_config
    from lfo.loading import environment_factory, pick_device
    from lfo.tools.pretrain.syntax import check_syntax

    with working("checking"):
        make_environment = environment_factory(load_config(overrides))
        room = {} if row is None else {"max_context": row}
        result = check_syntax(model, make_environment, episodes=tasks, device=pick_device(device), **room)
    context = [] if row is None else [f"rollout.max_context={row}"]
    _answer([*overrides, *context, f"model={model}", f"device={device}"], result, _show_syntax, as_json)


def _show_syntax(result: dict[str, Any]) -> None:
    for name in ("base", "random"):
        each = result[name]
        typer.echo(
            f"{name}: success {each['success']:.1%} ({each['low']:.1%}-{each['high']:.1%}), reward "
            f"{each['reward']:.3g}, {each['n']} rollouts"
        )
    typer.echo(f"{result['readable']:.1%} of {result['turns']:,} turns are valid calls.")
    for problem in result["problems"]:
        typer.echo(f"BROKEN: {problem}")


def _answer(
    overrides: list[str], result: dict[str, Any], show: Callable[[dict[str, Any]], None], as_json: bool
) -> None:
    """Measure the gate too, answer, and exit with 1 if the base violates a condition."""
    from lfo.config import load_config
    from lfo.loading import environment_factory, load_tokenizer

    config = load_config(overrides)
    result["gate"] = measured_gate(config, environment_factory(config), load_tokenizer(config.model), None, as_json)
    answer(result, lambda: show(result), as_json=as_json)
    if not as_json:
        show_gate(result["gate"])
    if not result["ok"]:
        raise typer.Exit(1)


def _check(model: str, tasks: int, law: int, device: str, as_json: bool) -> None:
    from lfo.loading import pick_device
    from lfo.tools.pretrain.check import check_base

    with working("checking") as status:
        result = check_base(
            model,
            tasks=tasks,
            law=law,
            device=pick_device(device),
            progress=lambda words: status.update(f"checking: {words}"),
        )
    _answer([f"model={model}", f"device={device}", f"env_args.law={law}"], result, _show, as_json)


def _show(result: dict[str, Any]) -> None:
    ways = ("alone_greedy", "alone_sampled", "true_replies_greedy", "true_replies_sampled")
    table = Table("level", *(way.replace("_", " ") for way in ways), "empty first call", "mistakes")
    for level, cells in result["levels"].items():
        shown = (f"{cells[way]['success']:.0%} ({cells[way]['low']:.0%}-{cells[way]['high']:.0%})" for way in ways)
        alone = cells["alone_sampled"]
        table.add_row(level, *shown, f"{alone['empty_first_call']:.0%}", f"{alone['mistakes']:.2f}")
    console = Console()
    console.print(table)
    forms = result["blind_forms"]
    console.print(
        f"{forms['forms']} blind forms of {forms['fields_per_form']:.1f} fields; field entropy "
        f"{forms['entropy_share']:.1%} of its maximum; each field {forms['rarest_field']:.1%} to "
        f"{forms['commonest_field']:.1%}"
    )
    for name in ("required_fields_asked", "information_on_department", "information_on_industry"):
        each = forms[name]
        console.print(
            f"{name.replace('_', ' ')}: {each['observed']:.4f}, by chance {each['by_chance']:.4f}, p = {each['p']:.3f}"
        )
    for problem in result["problems"]:
        console.print(f"BROKEN: {problem}", markup=False)
    console.print(
        "The base meets all conditions." if result["ok"] else f"{len(result['problems'])} conditions are violated."
    )
