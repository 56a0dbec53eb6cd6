"""Train one of our environments with TRL's GRPOTrainer, on the embedded base, for a few real steps.

    pip install 'learn-from-observation[trl]'
    python examples/train_with_trl.py

TRL needs a chat template that writes the tool calls of an assistant, and a schema to parse them. The embedded base has
neither, because `lfo` parses calls from text. Both are added here. TRL trains one policy and has no world model.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from lfo.env.for_trl import trl_environment, trl_rows
from lfo.env.interface import EnvironmentFactory
from lfo.env.worlds.oracle import OracleCodes
from lfo.loading import load_tokenizer, model_source

# The part of the base's template that writes a message, and the same with its calls, in the format of the base.
CONTENT = "message.content"
CONTENT_AND_CALLS = "(message.content or '') + '\\n'.join(calls.written)"
COLLECT_CALLS = (
    "{% set calls = namespace(written=[]) %}{% for call in message.tool_calls or [] %}"
    "{% set calls.written = calls.written + ['<tool_call>\\n{\"name\": ' + (call.function.name | tojson) + "
    "', \"arguments\": ' + (call.function.arguments | tojson) + '}\\n</tool_call>'] %}{% endfor %}"
)
# How TRL parses a sampled call: Hermes format.
RESPONSE_SCHEMA = {
    "x-regex": (
        r"^(?P<content>.*?)(?=(?:<tool_call>|<\|im_end\|>|$))"
        r"(?P<tool_calls>(?:<tool_call>.+?</tool_call>\s*)+)?\s*(?:<\|im_end\|>|$)"
    ),
    "type": "object",
    "properties": {
        "role": {"const": "assistant"},
        "content": {"type": "string"},
        "tool_calls": {
            "type": "array",
            "x-regex-iterator": r"<tool_call>\s*(.+?)\s*</tool_call>",
            "items": {
                "x-parser": "json",
                "x-parser-args": {"transform": "{type: 'function', function: @}"},
                "type": "object",
                "properties": {
                    "type": {"const": "function"},
                    "function": {
                        "type": "object",
                        "properties": {
                            "name": {"type": "string"},
                            "arguments": {"type": "object", "additionalProperties": {}},
                        },
                    },
                },
            },
        },
    },
}


def tokenizer_for_trl() -> Any:
    tokenizer: Any = load_tokenizer("tiny")
    loop = "{% for message in messages %}"
    template = tokenizer.chat_template.replace(CONTENT, CONTENT_AND_CALLS, 1)
    tokenizer.chat_template = template.replace(loop, loop + COLLECT_CALLS, 1)
    tokenizer.response_schema = RESPONSE_SCHEMA
    return tokenizer


def train(make_environment: EnvironmentFactory = OracleCodes, *, steps: int = 1) -> list[dict[str, Any]]:
    """Train and return the rows of TRL's log."""
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=steps,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=256,
        max_tool_calling_iterations=4,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
    )
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(model_source("tiny")),
        args=arguments,
        processing_class=tokenizer_for_trl(),
        environment_factory=trl_environment(make_environment),
        train_dataset=Dataset.from_list(trl_rows(make_environment, count=16)),
    )
    trainer.train()
    return trainer.state.log_history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train an environment of lfo with TRL's GRPO.")
    parser.add_argument("--steps", type=int, default=1)
    for row in train(steps=parser.parse_args().steps):
        print(row)
