"""Train an agent in an environment of your own, on a CPU, in a few minutes:

    python examples/train_your_own_environment.py --steps 60

The environment here is `OracleCodes` (src/lfo/env/oracle.py), which ships as the second example: an oracle tells
its order, then a door takes two code words, and only a wrong try is told which words it wanted. The words follow
from order and colour by a law that is written nowhere. An agent has one try in each task, so what it hears comes
too late for this task; the world model carries it to the next one and tells the policy by look-ahead.

What you write is a class with four methods:

    tasks(split)    the tasks, each with an `id`; at least "train" and "val"
    tools()         the tool schemas, in OpenAI form
    reset(task)     the opening messages, system and user
    step(message)   the policy's whole message in, StepResult(observation, reward, done) out

Look-ahead needs nothing more: the policy proposes what to imagine.

`lfo.env.tool_environment.ToolEnvironment` writes `tools`, `reset` and `step` for you from typed methods; read
`OracleCodes` to see how.

What it reached when it was measured: docs/LOG.md, section 8.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from lfo.config import load_config
from lfo.engines import create_trainer
from lfo.env.oracle import OracleCodes
from lfo.loading import load_tokenizer

SETTINGS = (
    "preset=tiny",
    "world_model.predict=all",  # who an oracle is, beside what its door says
    "world_model.learning_rate=3e-3",  # thirty laws over sixty pairs of words must be told apart
    "world_model.examples_per_mini_batch=12",
    "rollout.mini_batch_prompts=1",
    "rollout.max_context=512",
    "rollout.max_turns=4",
    "eval.every=10",
    "eval.tasks=60",
    "eval.splits=val,test_unseen_oracles",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the oracle world on the embedded base.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output-dir", default="runs/oracle-codes")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="more settings, as for lfo train")
    options = parser.parse_args()

    config = load_config([*SETTINGS, f"steps={options.steps}", f"output_dir={options.output_dir}", *options.settings])
    # One environment plays one rollout, so the trainer is given what makes them: a class, or a function of no
    # arguments. The same by names alone: lfo train env=oracle-codes, or env=your_package.module:YourClass.
    create_trainer(config, OracleCodes, load_tokenizer(config.model)).fit()

    print("tasks seen   val   unseen oracles   look-ahead right")
    for line in (Path(options.output_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "eval/val/success" in row:
            print(
                f"{row['tasks_seen']:10}  {row['eval/val/success']:4.0%}   "
                f"{row['eval/test_unseen_oracles/success']:14.0%}   {row['eval/val/lookahead_accuracy']:16.0%}"
            )


if __name__ == "__main__":
    main()
