"""Our settings as verl's: the whole OmegaConf tree that verl would have made of its YAML files and overrides.

    tree = verl_config(config)                       RunConfig -> verl's config, checked
    lfo train engine=verl preset=tiny --print-config

verl's defaults come first, then what our settings mean in its words, then `verl.a.b.c=value` as the user typed it.
Where verl has no word for a setting (couplings, look-ahead, replay), our code reads our own config, which travels
inside verl's as `actor_rollout_ref.model.lora.run`. Nothing here starts a process or loads a model.
"""

# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
import io
import os
import warnings
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from lfo.config import RunConfig
from lfo.engines.loading import model_source, pick_device
from lfo.errors import ConfigError

PLUGIN = "lfo.engines.verl.plugin"  # registers our parts wherever verl builds a model config
PLATFORM = "lfo.engines.verl.platform"  # imported with verl itself
ENGINE = "dual_lora"  # the name under which our engine is registered
AGENT_LOOP = "lfo"
SAMPLER = "lfo"  # the rollout replica made of our own sampler
RATE_FLOOR = 0.1

# Parts of verl's config that are dictionaries of anything: what stands below them cannot be checked.
_FREE = ("override_config", "ray_init", "engine_kwargs", "sampler_kwargs", "reward_kwargs", "mixed_precision", "lora")


def is_cpu(config: RunConfig) -> bool:
    return config.device == "cpu" or (config.device == "auto" and pick_device("auto").type == "cpu")


def world_model_folder(output_dir: Path, step: int) -> Path:
    """Where vLLM finds the world model of a step: see vllm.py."""
    return output_dir.absolute() / "servers" / f"world_model-{step:06d}"


def prepare_environment(config: RunConfig) -> None:
    """What verl reads from the environment while it is imported; must come before the first `import verl`."""
    if importlib.util.find_spec("verl") is None:
        raise ConfigError("engine=verl needs verl: pip install 'learn-from-observation[verl]'")
    os.environ["VERL_USE_EXTERNAL_MODULES"] = PLATFORM
    os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if is_cpu(config):
        os.environ["VERL_PLATFORM"] = "cpu"
    warnings.filterwarnings("ignore", module=r"verl\b")  # engines of verl's that are not installed, and are not used


def verl_config(config: RunConfig, *, tokenizer: str | None = None) -> DictConfig:
    """The config that verl runs with; `tokenizer` is a folder, where it is not the model's own."""
    prepare_environment(config)
    tree = copy.deepcopy(_defaults())
    for source, settings in (("ours", _translated(config, tokenizer)), ("verl", dict(_leaves(config.verl)))):
        for name, value in settings.items():
            if source == "verl":
                _check_known(tree, name)
            with open_dict(tree):
                OmegaConf.update(tree, name, value, force_add=True)
    _validate(tree)
    return tree


@cache
def _defaults() -> DictConfig:
    """verl's own tree, composed once in a process: it takes a second."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "engine=verl needs verl 0.9.1, which is not installed: pip install learn-from-observation[verl]"
        )
    GlobalHydra.instance().clear()
    folder = Path(spec.origin).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        return compose("ppo_trainer")


def _translated(config: RunConfig, tokenizer: str | None) -> dict[str, Any]:
    """Our settings in verl's words, under verl's dotted names."""
    rollout, policy, optimizer = config.rollout, config.policy, config.optimizer
    cpu = is_cpu(config)
    stacked = 2 if config.coupling == "stacked" else 1
    actor, sampling, model = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
    settings: dict[str, Any] = {
        # DAPO
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": policy.scale_by_std,
        "algorithm.use_kl_in_reward": False,
        "algorithm.filter_groups.enable": policy.dynamic_sampling,
        "algorithm.filter_groups.metric": "reward",
        "algorithm.filter_groups.max_num_gen_batches": policy.max_resamples + 1,
        "algorithm.rollout_correction.bypass_mode": True,  # the ratio is to the policy that sampled
        # data: tasks are drawn from the environment, by step
        "data.train_files": [],
        "data.val_files": [],
        "data.train_batch_size": rollout.prompts,
        "data.max_prompt_length": rollout.max_context // 2,
        "data.max_response_length": rollout.max_context - rollout.max_context // 2,
        "data.dataloader_num_workers": 0,
        # model and adapters
        f"{model}.path": model_source(config.model),
        f"{model}.tokenizer_path": tokenizer,
        f"{model}.external_lib": PLUGIN,
        f"{model}.model_type": ENGINE,
        f"{model}.override_config.attn_implementation": "sdpa",
        f"{model}.use_remove_padding": False,  # rows are sorted by length and padded on the right
        f"{model}.enable_gradient_checkpointing": not cpu,
        f"{model}.lora_rank": config.lora.rank,
        f"{model}.lora_alpha": config.lora.alpha,
        f"{model}.target_modules": config.lora.target_modules,
        f"{model}.lora.rank": config.lora.rank * stacked,  # what a rollout server must have room for
        f"{model}.lora.alpha": config.lora.alpha,
        f"{model}.lora.run": dataclasses.asdict(config),
        # actor
        f"{actor}.strategy": "fsdp2",
        f"{actor}.fsdp_config.strategy": "fsdp2",
        f"{actor}.fsdp_config.model_dtype": "fp32" if cpu else "bf16",  # of the frozen base; adapters are fp32
        f"{actor}.fsdp_config.use_torch_compile": False,
        f"{actor}.fsdp_config.seed": config.seed,
        f"{actor}.use_torch_compile": False,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": config.micro_batch_tokens,
        f"{actor}.ppo_mini_batch_size": rollout.mini_batch_prompts,
        f"{actor}.clip_ratio": policy.clip_low,
        f"{actor}.clip_ratio_low": policy.clip_low,
        f"{actor}.clip_ratio_high": policy.clip_high,
        f"{actor}.loss_agg_mode": "token-mean",
        f"{actor}.entropy_coeff": policy.entropy,
        f"{actor}.use_kl_loss": policy.kl > 0,
        f"{actor}.kl_loss_coef": policy.kl,
        f"{actor}.grad_clip": optimizer.clip,
        f"{actor}.optim.lr": policy.learning_rate,
        f"{actor}.optim.betas": list(optimizer.betas),
        f"{actor}.optim.weight_decay": optimizer.weight_decay,
        f"{actor}.optim.clip_grad": optimizer.clip,
        f"{actor}.optim.lr_warmup_steps": optimizer.warmup_steps,
        f"{actor}.optim.lr_scheduler_type": "cosine",
        f"{actor}.optim.min_lr_ratio": RATE_FLOOR,
        f"{actor}.optim.total_training_steps": config.steps,
        # rollouts
        f"{sampling}.name": SAMPLER,
        f"{sampling}.n": rollout.group_size,
        f"{sampling}.temperature": rollout.temperature,
        f"{sampling}.calculate_log_probs": True,
        f"{sampling}.load_format": "auto",
        f"{sampling}.free_cache_engine": not cpu,
        f"{sampling}.dtype": "float32" if cpu else "bfloat16",
        f"{sampling}.tensor_model_parallel_size": 1,
        f"{sampling}.max_model_len": rollout.max_context,
        f"{sampling}.agent.default_agent_loop": AGENT_LOOP,
        f"{sampling}.agent.num_workers": 1 if cpu else 8,
        f"{sampling}.multi_turn.enable": True,
        f"{sampling}.multi_turn.max_assistant_turns": rollout.max_turns,
        # Replies are never cut: our agent loop does not go through verl's tools, whose limit is 256 characters.
        f"{sampling}.multi_turn.max_tool_response_length": rollout.max_context * 16,
        # reward: from the environment's final state, given by the agent loop
        "reward.num_workers": 0,
        "critic.enable": False,
        "reward.reward_model.rollout.name": SAMPLER,
        # run
        "trainer.device": "cpu" if cpu else "cuda",
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": config.steps,
        "trainer.total_epochs": 1,
        "trainer.test_freq": config.eval.every or -1,
        "trainer.save_freq": config.checkpoint_every,
        "trainer.val_before_train": config.eval.every > 0,
        "trainer.resume_mode": "disable",  # a run is resumed from its own folder
        "trainer.logger": [],
        "trainer.project_name": "lfo",
        "trainer.experiment_name": Path(config.output_dir).name,
        "trainer.default_local_dir": config.output_dir,
        "transfer_queue.enable": True,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1 if cpu else 8,
        "ray_kwargs.ray_init.include_dashboard": False,
    }
    return settings


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _check_known(tree: DictConfig, name: str) -> None:
    """A mistyped name would otherwise be added and change nothing."""
    *path, last = name.split(".")
    node: Any = tree
    for depth, key in enumerate((*path, last)):
        if not isinstance(node, DictConfig) or key not in node:
            above = path[:depth]
            if any(part in _FREE for part in above):
                return
            known = list(map(str, node)) if isinstance(node, DictConfig) else []
            near = get_close_matches(key, known, n=1)
            hint = f"; the nearest is verl.{'.'.join([*above, near[0]])}" if near else ""
            raise ConfigError(f"verl has no setting {name!r}{hint}")
        node = node._get_node(key)


def _validate(tree: DictConfig) -> None:
    """verl's own check; what it prints is not for our users."""
    from hydra.errors import InstantiationException
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    if tree.actor_rollout_ref.actor.strategy != "fsdp2":
        raise ConfigError("verl.actor_rollout_ref.actor.strategy must be fsdp2")
    checked: Any = tree
    if tree.actor_rollout_ref.rollout.name == "vllm" and importlib.util.find_spec("vllm") is None:
        # verl's check imports vLLM; everything else can be checked on a machine without it.
        checked = OmegaConf.merge(tree, {"actor_rollout_ref": {"rollout": {"name": SAMPLER}}})
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            validate_config(checked, use_reference_policy=need_reference_policy(tree), use_critic=need_critic(tree))
    except InstantiationException as error:  # hydra wraps what a part of the config said
        raise ConfigError(f"verl refuses these settings: {error.__cause__ or error}") from error
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"verl refuses these settings: {error}") from error
