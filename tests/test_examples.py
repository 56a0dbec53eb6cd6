"""The examples say what their runs did, whatever it was."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_an_own_environment_is_shown_also_if_nothing_was_imagined(tmp_path: Path, monkeypatch, capsys):
    success = {"eval/val/success": 0.25, "eval/test_unseen_oracles/success": 0.5}
    accuracies = ({"eval/val/lookahead_accuracy": 0.75}, {"eval/val/lookahead_accuracy": None}, {})

    def fit() -> None:
        rows = [json.dumps({"tasks_seen": 8, **success, **accuracy}) for accuracy in accuracies]
        (tmp_path / "metrics.jsonl").write_text("\n".join(rows))

    monkeypatch.setattr("lfo.engines.create_trainer", lambda *_: SimpleNamespace(fit=fit))
    monkeypatch.setattr(sys, "argv", ["train_your_own_environment.py", "--output-dir", str(tmp_path)])
    runpy.run_path(str(EXAMPLES / "train_your_own_environment.py"), run_name="__main__")
    assert [line.split() for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["8", "25%", "50%", "75%"],
        ["8", "25%", "50%", "-"],
        ["8", "25%", "50%", "-"],
    ]
