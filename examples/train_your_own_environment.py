"""Train an agent in your own environment, on a CPU, in a few minutes:

    python examples/train_your_own_environment.py --steps 60

The environment here is `OracleCodes` (src/lfo/env/worlds/oracle.py), the second shipped example: an oracle names its order,
then a door takes two code words, and only a wrong try reveals the right words. A hidden law gives the words from order
and colour. An agent has one try in each task, so the reply comes too late for this task; the world model learns from it
and tells the policy in later tasks by look-ahead.

You write a class with four methods:

    tasks(split)    the tasks, each with an `id`; at least "train" and "val"
    tools()         the tool schemas, in OpenAI format
    reset(task)     the opening messages, system and user
    step(message)   takes a message of the policy, returns StepResult(observation, reward, done)

Look-ahead needs nothing else: the policy proposes which calls to imagine.

`lfo.env.tool_environment.ToolEnvironment` implements `tools`, `reset` and `step` from typed methods; see `OracleCodes`.

Measured results: research/LOG.md, section 8.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from lfo.config import load_config
from lfo.engines import create_trainer
from lfo.env.worlds.oracle import OracleCodes
from lfo.loading import load_tokenizer

SETTINGS = (
    "preset=tiny",
    "world_model.predict=all",  # the oracle's order and the reply of the door
    "world_model.learning_rate=3e-3",  # thirty rules with different pairs of words must be learned
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
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="config overrides, as for lfo train")
    options = parser.parse_args()

    config = load_config([*SETTINGS, f"steps={options.steps}", f"output_dir={options.output_dir}", *options.settings])
    # One environment plays one rollout, so the trainer gets a factory: a class, or a function without arguments.
    # The same by name: lfo train env=oracle-codes, or env=your_package.module:YourClass.
    create_trainer(config, OracleCodes, load_tokenizer(config.model)).fit()

    print("tasks seen   val   unseen oracles   look-ahead right")
    for line in (Path(options.output_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "eval/val/success" in row:
            right = row.get("eval/val/lookahead_accuracy")  # None if nothing was imagined
            print(
                f"{row['tasks_seen']:10}  {row['eval/val/success']:4.0%}   "
                f"{row['eval/test_unseen_oracles/success']:14.0%}   {'-' if right is None else f'{right:.0%}':>16}"
            )


if __name__ == "__main__":
    main()
