"""Named sets of settings: what `preset=` stands for, by the dotted names of `knobs` (`algo=`: `algorithms`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    # The embedded base on a laptop without a GPU.
    "tiny": {
        "model": "tiny",
        "device": "cpu",
        "policy.learning_rate": 5e-4,
        "policy.max_resamples": 0,
        # Many small updates teach the world model most for the same work. A state without room for a whole directory
        # is cut to what concerns the call, which is cheaper, and learned in half the tasks.
        "rollout.mini_batch_prompts": 1,
        # Ten examples learn far faster than three, as fast as twelve; LoRA+, swapped names and less weight on wording
        # make a faster start (research/world_model_bench).
        "world_model.learning_rate": 1e-3,
        "world_model.lora_plus": 8.0,
        "world_model.examples_per_mini_batch": 10,
        "world_model.swap_names": 0.9,
        "world_model.wording": 0.05,
        "world_model.state_tokens": 112,
        "internalise.learning_rate": 2e-3,  # at 4e-3 it fails
        "optimizer.warmup_steps": 3,
    },
    # A real language model on one GPU: lfo models fetch smollm2-135m, lfo pretrain --base smollm2-135m
    "smollm2-135m": {
        "model": "smollm2-135m-warm",
        "micro_batch_tokens": 24_576,  # a mini-batch in one pass: launching takes longer than computing
        "rollout.max_context": 2048,  # the tools alone are described in about 500 of its tokens
        "policy.learning_rate": 3e-5,  # at 1e-4 one policy of three forgot on levels 2 to 4 what it could
        "policy.max_resamples": 0,
        "world_model.learning_rate": 2e-3,
        "world_model.examples_per_mini_batch": 12,
        "world_model.state_tokens": 128,
        "optimizer.warmup_steps": 3,
    },
    # The numbers of the project's first documents but for their dropout of 0.05, kept for reproduction: at this rate
    # LoRA does not learn.
    "documents": {
        "coupling": "separate",
        "lookahead": "off",
        "lora.targets": "q_proj,v_proj,o_proj",
        "policy.learning_rate": 1e-6,
        "world_model.learning_rate": 1e-6,
        "world_model.weight": 0.5,
        "world_model.replay": False,
        "exploration.blind_share": 0.0,
    },
    # Eight GPUs of 24 GB: the base sharded over all of them, rollouts in vLLM on pairs of them.
    "qwen3-8b-8x24gb": {
        "engine": "verl",
        "model": "Qwen/Qwen3-8B",
        "device": "cuda",
        "micro_batch_tokens": 8192,
        "rollout.max_context": 8192,
        "rollout.max_turn_tokens": 1024,
        "eval.every": 20,
        "steps": 500,
        "verl.trainer.n_gpus_per_node": 8,
        "verl.actor_rollout_ref.rollout.name": "vllm",
        "verl.algorithm.rollout_correction.bypass_mode": False,  # vLLM's log-probs are not exactly the trainer's
        "verl.actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
        "verl.actor_rollout_ref.rollout.gpu_memory_utilization": 0.6,
        "verl.actor_rollout_ref.actor.fsdp_config.optimizer_offload": True,
    },
    # One GPU of 80 GB. At this size our sampler is faster than vLLM (research/LOG.md, section 35).
    "qwen3-1.7b-1gpu": {
        "model": "Qwen/Qwen3-1.7B",
        "device": "cuda",
        "micro_batch_tokens": 8192,
        "rollout.max_context": 4096,
        "rollout.max_turn_tokens": 512,
        "steps": 300,
    },
}
