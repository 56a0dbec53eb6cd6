#!/usr/bin/env python3
"""Write a base with the shape of a model and random weights: scripts/gpu/random_model.py qwen3-8b FOLDER

It has the tokenizer of the embedded base, because only the amount of work matters.
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM

from benchmarks.memory import model_config
from lfo.loading import load_tokenizer
from lfo.tools.plan import SHAPES


def main() -> None:
    shape, folder = sys.argv[1:]
    tokenizer = load_tokenizer("tiny")
    config = model_config(SHAPES[shape])
    config.eos_token_id, config.bos_token_id, config.max_position_embeddings = tokenizer.eos_token_id, None, 32_768
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
