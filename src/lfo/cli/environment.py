"""`lfo generate` writes the phone-call world to files; `lfo check-env` checks any environment."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lfo.cli.common import Json, answer, bars, counted, flag, option, visible, working
from lfo.cli.practice import practised
from lfo.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lfo.config import RunConfig
    from lfo.env.interface import EnvironmentFactory


def generate(
    num_companies: Annotated[int, option("Companies of the training tasks.")] = 100,
    num_train_tasks: Annotated[int, option("Tasks in train.jsonl.")] = 500,
    num_val_tasks: Annotated[int, option("Tasks in val.jsonl, and in each test split.")] = 100,
    output_dir: Annotated[Path, option("Folder to write.", "DIR")] = Path("data"),
    seed: Annotated[int, option("The seed of the world: the same seed gives the same files.")] = 0,
    law: Annotated[
        int, option("The seed of the departments' requirements: 0 is the law with meaningful names, others are drawn.")
    ] = 0,
    levels: Annotated[str, option("Levels, as 1-5 or 2,3.")] = "1-5",
    force: Annotated[bool, flag("--force", "Replace data of other options.")] = False,
    as_json: Json = False,
) -> None:
    """Write companies and tasks to files: lfo generate --output-dir data --seed 0"""
    from lfo.env.worlds.phone import generator

    manifest = generator.generate(
        output_dir,
        num_companies=num_companies,
        num_train_tasks=num_train_tasks,
        num_val_tasks=num_val_tasks,
        seed=seed,
        law=law,
        levels=generator.parse_levels(levels),
        force=force,
    )
    if as_json:
        typer.echo(json.dumps(manifest))
        return
    typer.echo(f"Wrote {output_dir} (seed {seed}, law {law}):")
    for split, counts in manifest["counts"].items():
        ceilings = ", ".join(f"level {level} {value:.1%}" for level, value in manifest["ceilings"][split].items())
        typer.echo(f"  {split}: {sum(counts.values())} tasks; information ceiling: {ceilings}")


def check_env(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME=VALUE", help="Any environment, as env=textarena:FrozenLake-v0 env_args.size=5."),
    ] = None,
    episodes: Annotated[int, option("Rollouts of each player.", min=1)] = 20,
    logs: Annotated[
        Path | None, option("Recorded rollouts, to measure how predictable the replies are.", "PATH")
    ] = None,
    run: Annotated[
        Path | None, option("Check environment and base of this run, and keep the gate in its folder.", "RUN")
    ] = None,
    gate: Annotated[
        int | None,
        option("Training tasks on which model=... is measured alone and with true replies; 0: do not measure.", min=0),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check any environment, and whether look-ahead can help a base in it.

    lfo check-env env=my_world:Safes model=base; lfo check-env --run runs/x;
    lfo check-env env=my_world:Safes --logs rollouts.jsonl
    """
    if logs is not None and not overrides and run is None:
        raise UsageError("--logs needs the environment of the rollouts: lfo check-env env=NAME --logs FILE")
    if overrides and run is not None:
        raise UsageError(f"--run takes all settings from {run}; leave out {overrides[0]}")
    with working("checking"):
        from lfo.config import load_config
        from lfo.loading import environment_factory, load_tokenizer, refuse_missing_model
        from lfo.measure.gate import write_gate
        from lfo.runs.folder import run_folder
        from lfo.runs.reading import saved_config

        config = load_config(overrides or []) if run is None else saved_config(run_folder(run))
        make_environment = environment_factory(config)
        refuse_missing_model(config.model)
        tokenizer = load_tokenizer(config.model)
        result = _checked(config, make_environment, tokenizer, logs, episodes)
    if logs is None and result["ok"] and gate != 0:
        config = practised(config)
        tokenizer = load_tokenizer(config.model)  # of the base that practised
        result["gate"] = measured_gate(config, make_environment, tokenizer, gate, as_json)
        if run is not None:
            write_gate(run_folder(run), result["gate"])
    answer(result, lambda: (_show_replies if logs else _show_any)(config.env, result), as_json=as_json)
    if not result["ok"]:
        raise typer.Exit(1)


def _checked(
    config: RunConfig,
    make_environment: EnvironmentFactory,
    tokenizer: PreTrainedTokenizerBase,
    logs: Path | None,
    episodes: int,
) -> dict[str, Any]:
    from lfo.env.answers import tools_of
    from lfo.measure.environment_check import check_environment
    from lfo.measure.forewarning import forewarning
    from lfo.measure.predictability import predictability
    from lfo.play.records import read_rollouts
    from lfo.protocol.chat import ChatCodec

    def length_of(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    @cache  # made by the first call: an environment that cannot start has been reported by then
    def codec() -> ChatCodec:
        return ChatCodec(tokenizer, tools_of(make_environment()), thinking=config.rollout.thinking)

    if logs is not None:
        rollouts = read_rollouts(logs, make_environment())
        later = forewarning(rollouts)
        return {"ok": True, **predictability(rollouts, length_of=length_of), **({"later": later} if later else {})}
    return check_environment(
        make_environment,
        episodes=episodes,
        max_turns=config.rollout.max_turns,
        timeout=config.rollout.environment_timeout,
        specials=tokenizer.all_special_tokens,
        length_of=length_of,
        prompt_length=lambda messages: len(codec().opening(messages).ids),
        room=config.rollout.max_context,
    )


def measured_gate(
    config: RunConfig,
    make_environment: EnvironmentFactory,
    tokenizer: PreTrainedTokenizerBase,
    tasks: int | None,
    as_json: bool,
) -> dict[str, Any]:
    """Measure the gate under a progress bar."""
    from lfo.tools.gate import PASSES, gate_of

    with bars(hidden=as_json, transient=True) as shown:
        bar = shown.add_task("rollouts of the untrained base", total=None)
        return gate_of(
            config,
            make_environment,
            tokenizer,
            tasks=tasks,
            on_start=lambda count: shown.update(bar, total=PASSES * count),
            progress=lambda played: shown.advance(bar, played),
        )


def show_gate(gate: dict[str, Any]) -> None:
    console = Console()
    names = {"alone": "alone", "true_replies": "shown the true reply", "feedback": "shown a reply that it received"}
    table = Table("the untrained base", "success", "95 % interval", title=f"the gate: {visible(gate['model'])}")
    for key, name in names.items():
        each = gate[key]
        interval = f"{each['low']:.0%}-{each['high']:.0%}"
        table.add_row(name, f"{each['success']:.0%} of {each['n']}", interval)
    console.print(table)
    for warning in gate["warnings"]:
        console.print(f"warning: {visible(warning)}", markup=False, soft_wrap=True)
    console.print(f"{visible(gate['verdict'])} ({gate['seconds']:.0f} s)", markup=False, soft_wrap=True)


def _show_any(env: str, result: dict[str, Any]) -> None:
    console = Console()
    if "players" in result:
        table = Table("player", "reward", "lowest", "highest", "success", "turns", title=visible(env))
        for name, each in result["players"].items():
            cells = (f"{each[key]:.3g}" for key in ("reward", "lowest", "highest"))
            table.add_row(name, *cells, f"{each['success']:.0%}", f"{each['turns']:.1f}")
        console.print(table)
        seconds, lengths = result["seconds"], result["lengths"]
        tasks = ", ".join(f"{split} {count:,}" for split, count in result["tasks"].items())
        console.print(f"Tasks: {tasks}. Tools: {visible(', '.join(result['tools']))}.", markup=False)
        console.print(
            f"Seconds: reset {seconds['reset']:.4f}, step {seconds['step']:.4f}, slowest {seconds['slowest']:.3f}."
        )
        console.print(
            "Tokens, median and longest: "
            + "; ".join(f"{name} {each['median']:g}, {each['longest']:g}" for name, each in lengths.items())
            + f". Random calls: {result['random_mistakes']:.0%} mistakes."
        )
    for word, sentences in (("BROKEN", result["problems"]), ("warning", result["warnings"])):
        for sentence in sentences:
            console.print(f"{word}: {visible(sentence)}", markup=False, soft_wrap=True)
    problems = counted(len(result["problems"]), "problem")
    console.print("The environment works." if result["ok"] else f"{problems} must be fixed.")
    if "gate" in result:
        show_gate(result["gate"])


def _show_replies(env: str, result: dict[str, Any]) -> None:
    console = Console()
    headings = ("tool", "replies", "distinct", "constant", "memory", "frequency", "new words", "tokens", "predict?")
    table = Table(*headings, title=f"replies of {visible(env)}")
    for name, row in result["tools"].items():
        shares = (f"{row[key]:.0%}" for key in ("constant", "by_memory", "by_frequency", "new_words"))
        counts = (f"{row[key]:,}" for key in ("replies", "distinct"))
        table.add_row(visible(name), *counts, *shares, f"{row['length']:g}", row["verdict"])
    console.print(table)
    if "later" in result:
        _show_later(console, result["later"])
    names = ",".join(result["worth_predicting"])
    words = f"Train with world_model.predict={names}" if names else "No tool's replies are worth predicting yet."
    console.print(words, markup=False, soft_wrap=True)


def _show_later(console: Console, later: dict[str, Any]) -> None:
    """Show what the earlier conversations say about the later ones."""
    title = f"the last {later['later']} conversations, foretold from the {later['earlier']} before"
    table = Table("tool", "calls", "memory", "frequency", "failed", "warned", "false alarms", title=title)
    for name, row in later["tools"].items():
        shares = (f"{row[key]:.0%}" for key in ("by_memory", "by_frequency"))
        table.add_row(visible(name), f"{row['calls']:,}", *shares, *(f"{row[key]:,}" for key in _COUNTS))
    console.print(table)
    for each in later["examples"]:
        for word in ("call", "expected", "actual"):
            console.print(f"{word:>8}  {visible(each[word])[:_SHOWN]}", markup=False, soft_wrap=True)
    known = f"Outcomes are known of {later['outcomes_known']} of {later['earlier'] + later['later']} conversations."
    console.print(known, markup=False, soft_wrap=True)


_COUNTS = ("failed", "warned", "false_alarms")
_SHOWN = 300  # characters of an example
