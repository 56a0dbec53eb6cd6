"""Play tasks with an exported policy, using only transformers and PEFT, without look-ahead and world model.

    lfo train preset=tiny algo=internalise output_dir=runs/x
    lfo export runs/x --out served
    python examples/act_with_peft.py served --tasks 100

With the limits of the run below, it prints the success rate of the card of the export (`served/README.md`).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from lfo.env.interface import Environment
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.protocol.chat import ChatCodec

MAX_TURNS = 16
MAX_TURN_TOKENS = 160
MAX_CONTEXT = 1024


def load(folder: Path, tools: Sequence[Mapping[str, Any]]) -> tuple[Any, ChatCodec]:
    """Load the model that `lfo export` wrote, and its codec."""
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype="float32")
    model = PeftModel.from_pretrained(base, str(folder / "policy")).eval()
    return model, ChatCodec(AutoTokenizer.from_pretrained(folder / "base"), tools)


@torch.inference_mode()
def play(model: Any, codec: ChatCodec, environment: Environment, task: Any) -> float:
    """Play one task greedily and return its reward."""
    row, reward = list(codec.opening(environment.reset(task)).ids), 0.0
    for _ in range(MAX_TURNS):
        prompt = torch.tensor([row])
        said = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=MAX_TURN_TOKENS,
            eos_token_id=list(codec.ends),
            pad_token_id=codec.end_of_turn,
        )[0, len(row) :].tolist()
        if said[-1] not in codec.ends:  # a message without an end token fails, as in training
            break
        heard = []
        for message in codec.read(said).messages:  # one for each call
            result = environment.step(message)
            reward += result.reward
            heard.append(result.observation)
            if result.done:
                return reward
        row += [*said, *codec.after_action(*heard, stopped=True).ids]
        if len(row) >= MAX_CONTEXT:
            break
    return reward


def main() -> None:
    parser = argparse.ArgumentParser(description="Play tasks of the phone-call world with an exported policy.")
    parser.add_argument("folder", type=Path, help="the folder of lfo export")
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--split", default="val")
    parser.add_argument("--level", type=int, default=2)
    options = parser.parse_args()

    model, codec = load(options.folder, PhoneCalls().tools())
    tasks = PhoneCalls(levels=[options.level]).tasks(options.split)[: options.tasks]
    rewards = [play(model, codec, PhoneCalls(levels=[options.level]), task) for task in tasks]
    solved = sum(reward >= 1.0 for reward in rewards)
    print(f"{solved} of {len(tasks)} tasks of {options.split} solved: {solved / len(tasks):.1%}")


if __name__ == "__main__":
    main()
