"""What a person sees while a run goes on: one line with success, losses, speed and the time left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from lfo.config import RunConfig


class Progress:
    """A bar on a terminal; one plain line for each evaluation elsewhere. Everything goes to stderr."""

    def __init__(self, config: RunConfig) -> None:
        self._console = Console(stderr=True)
        self._eval = "-"
        self._warned: set[str] = set()
        self._bar = RichProgress(
            TextColumn(config.output_dir),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=config.steps, words="")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, row: Mapping[str, Any]) -> None:
        if "eval/val/success" in row:
            self._eval = f"{row['eval/val/success']:.0%}"
        words = " | ".join([f"val {self._eval}", *_measured(row)])
        self._bar.update(self._task, completed=row["step"], words=words)
        if not self._console.is_terminal and "eval/val/success" in row:
            self._console.print(
                f"step {row['step']} | {row['tasks_seen']} tasks | {words}", highlight=False, soft_wrap=True
            )
        for warning in row.get("warnings", ()):
            if warning not in self._warned:  # the rows repeat it as long as it holds; a person needs it once
                self._warned.add(warning)
                self._console.print(f"step {row['step']}: {warning}", style="yellow", highlight=False, soft_wrap=True)


def _measured(row: Mapping[str, Any]) -> Iterator[str]:
    """What this step measured, of what is worth a place in one line."""
    for name, words in (
        ("success", "train {:.0%}"),
        ("policy_loss", "policy {:+.3f}"),
        ("world_model_loss", "world {:.3f}"),
        ("tokens_per_second", "{:.0f} tok/s"),
    ):
        if row.get(name) is not None:
            yield words.format(row[name])
