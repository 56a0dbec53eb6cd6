"""Which settings of verl nothing reads here, and what to set instead.

    why_unread("actor_rollout_ref.actor.ppo_epochs")      "a rollout is trained on once: ..."
    why_unread("actor_rollout_ref.rollout.max_num_seqs")  None: the servers read it

Of verl 0.9.1 a run uses the worker group, the FSDP engine, the agent loops, the servers and the queue. Its loop,
losses, optimizer, data set, reward and reference model are not used: settings of theirs would be shown and change
nothing. The table was made from a trace of every setting that the processes of a run on a CPU read, with one rank and
with two, and from the source of verl's vLLM server. tests/test_verl_config.py has those that are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_ACTOR, _SAMPLING, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"

_LOOP = "lfo's own loop trains; set steps, eval.every, checkpoint_every, output_dir or trackers instead"
_SCORES = "advantages are lfo's own, made from the rewards of a group; set rollout.group_size or surprise instead"
_LOSS = (
    "the policy's loss is fixed (docs/TRAINING.md, One step); set policy.learning_rate or world_model.weight instead"
)
_NO_KL = "the loss has no KL term, so there is no reference model; set policy.learning_rate lower instead"
_REWARD = "the environment gives the reward; set env and env_args instead"
_ENVIRONMENT = "tasks and tools come from the environment; set env, env_args and rollout.prompts instead"
_BATCHES = "set micro_batch_tokens instead"
_SHARDS = (
    "lfo shards the base and computes forward and loss itself; of fsdp_config set model_dtype, optimizer_offload, "
    "reshard_after_forward, fsdp_size, full_determinism or qat instead"
)
_OPTIMIZER = "lfo makes the optimizer; set policy.learning_rate, optimizer.warmup_steps or optimizer.constant instead"
_LORA = "lfo makes both adapters; set lora.rank, lora.targets or init_from instead"
_FORWARD = "lfo's forward does not use it; to save memory set micro_batch_tokens lower instead"
_NOBODY = "verl itself does not read it in synchronous training; leave it out"
_WORDS = "every request has its own limits; set rollout.temperature, rollout.max_context or rollout.max_turns instead"
_PROFILER = "only verl's own loop starts its profiler; read the seconds of a step in metrics.jsonl instead"

# Part of verl's config, names in it (none: the whole part), and why nothing reads them; None if something does. The
# longest name counts.
_TABLE: Sequence[tuple[str, str, str | None]] = (
    ("algorithm", "", _SCORES),
    ("algorithm", "kl_penalty kl_ctrl", _NO_KL),
    ("algorithm", "filter_groups", "set policy.max_resamples instead"),
    (
        "algorithm",
        "rollout_correction",
        "no weights correct the difference of server and trainer; "
        "set verl.algorithm.rollout_correction.bypass_mode=false instead",
    ),
    ("algorithm.rollout_correction", "bypass_mode", None),
    (_ACTOR, "", _LOSS),
    (_ACTOR, "kl_loss_coef kl_loss_type", _NO_KL),
    (
        _ACTOR,
        "clip_ratio_c",
        "there is no dual clip: only the ratio is clipped, to 0.8 .. 1.28, with no setting for it",
    ),
    (
        _ACTOR,
        "ppo_epochs shuffle data_loader_seed",
        "a rollout is trained on once, in the order of tasks; set rollout.mini_batch_prompts for more updates instead",
    ),
    (_ACTOR, "ppo_micro_batch_size ppo_micro_batch_size_per_gpu", _BATCHES),
    (_ACTOR, "optim", _OPTIMIZER),
    (_ACTOR, "checkpoint", _LOOP),
    (_ACTOR, "profiler", _PROFILER),
    (_ACTOR, "fsdp_config qat use_fused_kernels use_prefix_grouper freeze_vision_tower pad_to_length", _SHARDS),
    (_ACTOR, "ulysses_sequence_parallel_size", None),  # verl's validation refuses it
    (
        f"{_ACTOR}.fsdp_config",
        "model_dtype optimizer_offload reshard_after_forward fsdp_size full_determinism qat "
        "ulysses_sequence_parallel_size",
        None,
    ),
    ("actor_rollout_ref", "ref", _NO_KL),
    ("actor_rollout_ref", "hybrid_engine nccl_timeout", _NOBODY),
    (_MODEL, "lora lora_adapter_path exclude_modules", _LORA),
    (f"{_MODEL}.lora", "fully_sharded_loras", None),
    (_MODEL, "enable_activation_offload use_fused_kernels fused_kernel_options tiled_mlp", _FORWARD),
    (_SAMPLING, "do_sample top_k top_p val_kwargs prompt_length response_length over_sample_rate", _WORDS),
    (_SAMPLING, "multi_turn", _ENVIRONMENT),
    (_SAMPLING, "nnodes", "servers are where the ranks are; set verl.trainer.nnodes instead"),
    (_SAMPLING, "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu", _BATCHES),
    (_SAMPLING, "log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu", _BATCHES),
    (_SAMPLING, "agent trace", "lfo's own agent loop plays the rollouts; read the folder rollouts/ of the run instead"),
    (f"{_SAMPLING}.agent", "num_workers", None),
    (_SAMPLING, "multi_stage_wake_up skip_tokenizer_init moe_load_balance_metrics_interval", _NOBODY),
    (_SAMPLING, "profiler", _PROFILER),
    (f"{_SAMPLING}.engine_kwargs", "sglang trtllm", "servers are lfo or vllm; set engine_kwargs.vllm instead"),
    ("critic", "", "there is no critic: rollouts are compared with their group; set rollout.group_size instead"),
    ("custom_reward_function", "", _REWARD),
    ("reward", "", _REWARD),
    ("reward_model", "", _REWARD),
    ("sandbox_fusion", "", _REWARD),
    ("data", "", _ENVIRONMENT),
    ("distillation", "", "there is no teacher model; set algo=internalise to imitate the base with look-ahead instead"),
    ("global_profiler", "", _PROFILER),
    ("model_engine", "", "the engine is always FSDP2; leave it out"),
    ("ray_kwargs", "timeline_json_file", _PROFILER),
    ("skip", "", _LOOP),
    ("trainer", "", _LOOP),
    ("trainer", "nnodes n_gpus_per_node", None),
)
UNREAD: Mapping[str, str | None] = {
    f"{part}.{name}" if name else part: why for part, names, why in _TABLE for name in names.split() or [""]
}


def why_unread(name: str) -> str | None:
    """Return why a setting of verl, by its dotted name, would change nothing; None if something reads it."""
    parts = name.split(".")
    prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((UNREAD[prefix] for prefix in prefixes if prefix in UNREAD), None)
