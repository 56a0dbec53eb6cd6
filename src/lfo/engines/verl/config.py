"""Convert our config to verl's: the OmegaConf tree that verl would make of its YAML files and overrides.

    tree = verl_config(config)                       RunConfig -> verl's config, checked
    lfo train engine=verl preset=tiny --print-config

verl's defaults come first, then our config in verl's keys, then the overrides `verl.a.b.c=value` of the user. Keys that
our config or our code decide cannot be overridden, and neither can keys that nothing reads (`unread.py`). For options
that verl does not have (couplings, look-ahead, replay), our code reads our own config, which verl's config contains as
`actor_rollout_ref.model.lora.run`. Nothing here starts a process or loads a model.
"""

# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
import io
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from lfo.algorithms.dapo import most_draws
from lfo.config import RunConfig
from lfo.engines.verl.unread import why_unread
from lfo.errors import ConfigError
from lfo.loading import model_source, pick_device
from lfo.model.learner import BETAS, MAX_NORM, WEIGHT_DECAY
from lfo.objectives.losses import CLIP_HIGH, CLIP_LOW
from lfo.settings import dotted

PLUGIN = "lfo.engines.verl.plugin"  # registers our parts wherever verl builds a model config
PLATFORM = "lfo.engines.verl.platform"  # imported with verl itself
ENGINE = "dual_lora"  # the registered name of our engine
AGENT_LOOP = "lfo"
SAMPLER = "lfo"  # the rollout replica made of our own sampler
BASE = "base"  # requests the base without an adapter from a server
RATE_FLOOR = 0.1
SMALL_BYTES = 2 << 30  # of weights: a billion parameters in bf16
# Batch sizes for which vLLM captures graphs at start; its default is 51 sizes up to the same 512.
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# vLLM of a small base: compiling takes a minute, and makes rollouts a fifth shorter (LOG.md, section 35).
UNCOMPILED = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}

_ACTOR, _SAMPLING, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_PARALLEL = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")  # of one server

# Fixed values: what our code supports, and what makes verl use our code.
_FIXED: Mapping[str, Any] = {
    # DAPO
    "algorithm.adv_estimator": "grpo",
    "algorithm.use_kl_in_reward": False,
    "algorithm.filter_groups.metric": "reward",
    f"{_ACTOR}.loss_agg_mode": "token-mean",
    f"{_ACTOR}.optim.min_lr_ratio": RATE_FLOOR,
    # data: tasks are drawn from the environment, by step
    "data.train_files": [],
    "data.val_files": [],
    "data.dataloader_num_workers": 0,
    # model and rollouts
    f"{_MODEL}.external_lib": PLUGIN,
    f"{_MODEL}.model_type": ENGINE,
    f"{_MODEL}.use_remove_padding": False,  # rows are sorted by length and padded on the right
    f"{_ACTOR}.strategy": "fsdp2",
    f"{_ACTOR}.fsdp_config.strategy": "fsdp2",
    f"{_ACTOR}.fsdp_config.param_offload": False,
    f"{_ACTOR}.fsdp_config.offload_policy": False,
    f"{_ACTOR}.fsdp_config.forward_only": False,
    f"{_ACTOR}.fsdp_config.use_torch_compile": False,  # of verl's entropy, which is not computed
    f"{_ACTOR}.use_torch_compile": False,
    f"{_ACTOR}.use_dynamic_bsz": True,
    f"{_MODEL}.lora.merge": False,
    f"{_SAMPLING}.calculate_log_probs": True,
    f"{_SAMPLING}.agent.default_agent_loop": AGENT_LOOP,
    f"{_SAMPLING}.multi_turn.enable": True,
    # DAPO and AdamW, as our learner has them
    f"{_ACTOR}.clip_ratio": CLIP_LOW,
    f"{_ACTOR}.clip_ratio_low": CLIP_LOW,
    f"{_ACTOR}.clip_ratio_high": CLIP_HIGH,
    f"{_ACTOR}.entropy_coeff": 0.0,
    f"{_ACTOR}.use_kl_loss": False,
    f"{_ACTOR}.optim.betas": list(BETAS),
    f"{_ACTOR}.optim.weight_decay": WEIGHT_DECAY,
    f"{_ACTOR}.grad_clip": MAX_NORM,
    f"{_ACTOR}.optim.clip_grad": MAX_NORM,
    "algorithm.norm_adv_by_std_in_grpo": True,
    # reward: the agent loop returns it
    "reward.num_workers": 0,
    "reward.reward_model.rollout.name": SAMPLER,
    "critic.enable": False,
    # run
    "trainer.total_epochs": 1,
    "trainer.resume_mode": "disable",  # a run is resumed from its own folder
    "trainer.project_name": "lfo",
    "transfer_queue.enable": True,
}

# Parts of verl's config that are free dictionaries, so that keys below them cannot be validated.
_FREE = ("override_config", "ray_init", "engine_kwargs", "sampler_kwargs", "reward_kwargs", "mixed_precision", "lora")


def is_cpu(config: RunConfig) -> bool:
    return config.device == "cpu" or (config.device == "auto" and pick_device("auto").type == "cpu")


def sampling_parameters(
    server: str,
    *,
    limit: int,
    temperature: float,
    uniforms: Sequence[float],
    ends: Sequence[int] = (),
    repeatable: bool = False,
) -> dict[str, Any]:
    """Return the sampling parameters of a request. Our server samples with the given `uniforms`; others use their own.

    `repeatable` gives vLLM a seed for each request; it then samples row by row, which is much slower.
    """
    parameters: dict[str, Any] = {"temperature": temperature, "max_tokens": limit, "logprobs": True}
    if server == SAMPLER:
        return parameters | {"uniforms": [float(each) for each in uniforms[:limit]]}
    parameters |= {"top_p": 1.0, "top_k": -1}
    if ends:
        parameters["stop_token_ids"] = list(ends)
    if temperature and repeatable:
        parameters["seed"] = int(uniforms[0] * 2**31)
    return parameters


def run_name(rollout: Any) -> str:
    """Return the unique name of a run, from which the names of its servers and sockets are made."""
    return str(rollout.engine_kwargs[SAMPLER]["servers"])


def world_model_folder(output_dir: Path, step: int) -> Path:
    """Return the folder from which vLLM loads the world model of a step: see vllm.py."""
    return output_dir.absolute() / "servers" / f"world_model-{step:06d}"


def forget_world_models(present: Path, before: Path | None) -> None:
    """Remove all folders but the current one and the last one, which a server may still read.

    Compare names, not steps: a killed run may have left folders of later steps than the one it resumes from.
    """
    for old in present.parent.glob("world_model-*"):
        if old not in (present, before):
            shutil.rmtree(old, ignore_errors=True)


def prepare_environment(config: RunConfig) -> None:
    """Set the environment variables that verl reads on import; call it before the first `import verl`."""
    if importlib.util.find_spec("verl") is None:
        raise ConfigError("engine=verl needs verl: pip install 'learn-from-observation[verl]'")
    os.environ["VERL_USE_EXTERNAL_MODULES"] = PLATFORM
    os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # else Ray starts workers that we never use
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # else a call after the end of a run starts another Ray
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if is_cpu(config):
        os.environ["VERL_PLATFORM"] = "cpu"
    warnings.filterwarnings("ignore", module=r"verl\b")  # warnings about verl's optional engines, which we do not use


def verl_config(config: RunConfig, *, tokenizer: str | None = None) -> DictConfig:
    """Return the config for verl, validated; `tokenizer` is a folder, if it differs from the model's."""
    prepare_environment(config)
    tree = copy.deepcopy(_defaults())
    translated = _translated(config, tokenizer)
    with open_dict(tree):
        for settings in (*translated.values(), _FIXED, _chosen(config)):
            for name, value in settings.items():
                OmegaConf.update(tree, name, value, force_add=True)
        for name, value in dotted(config.verl):
            _check_known(tree, name)
            _check_open(name, value, translated)
            OmegaConf.update(tree, name, value, force_add=True)
    _validate(tree)
    _check_servers(tree.actor_rollout_ref.rollout)
    return tree


@cache
def _defaults() -> DictConfig:
    """Return verl's default config; cached, because composing it takes a second."""
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


def _translated(config: RunConfig, tokenizer: str | None) -> dict[str, dict[str, Any]]:
    """Return our config in verl's keys: our name -> verl's dotted names with their values."""
    rollout, policy, optimizer = config.rollout, config.policy, config.optimizer
    alpha = int(config.lora.alpha)  # verl needs an int
    return {
        "model": {f"{_MODEL}.path": model_source(config.model), f"{_MODEL}.tokenizer_path": tokenizer},
        "device": {"trainer.device": "cpu" if is_cpu(config) else "cuda"},
        "seed": {f"{_ACTOR}.fsdp_config.seed": config.seed, f"{_SAMPLING}.seed": config.seed},
        "steps": {
            f"{_ACTOR}.optim.total_training_steps": config.steps,
            "trainer.total_training_steps": config.steps,
        },
        "micro_batch_tokens": {f"{_ACTOR}.ppo_max_token_len_per_gpu": config.micro_batch_tokens},
        "checkpoint_every": {"trainer.save_freq": config.checkpoint_every},
        "eval.every": {
            "trainer.test_freq": config.eval.every or -1,
            "trainer.val_before_train": config.eval.every > 0,
        },
        "output_dir": {
            "trainer.experiment_name": Path(config.output_dir).name,
            "trainer.default_local_dir": config.output_dir,
        },
        "trackers": {"trainer.logger": []},  # our loop logs
        "lora.rank": {
            f"{_MODEL}.lora_rank": config.lora.rank,
            f"{_MODEL}.lora.rank": config.lora.rank,
            f"{_MODEL}.lora_alpha": alpha,
            f"{_MODEL}.lora.alpha": alpha,
        },
        "lora.targets": {f"{_MODEL}.target_modules": config.lora.target_modules},
        "rollout.prompts": {"data.train_batch_size": rollout.prompts},
        "rollout.group_size": {f"{_SAMPLING}.n": rollout.group_size},
        "rollout.mini_batch_prompts": {f"{_ACTOR}.ppo_mini_batch_size": rollout.mini_batch_prompts},
        "rollout.temperature": {f"{_SAMPLING}.temperature": rollout.temperature},
        "rollout.max_turns": {f"{_SAMPLING}.multi_turn.max_assistant_turns": rollout.max_turns},
        "rollout.max_context": {
            "data.max_prompt_length": rollout.max_context // 2,
            "data.max_response_length": rollout.max_context - rollout.max_context // 2,
            f"{_SAMPLING}.max_model_len": rollout.max_context,
            # Replies are never cut: our agent loop does not use verl's tools, which cut at 256 characters.
            f"{_SAMPLING}.multi_turn.max_tool_response_length": rollout.max_context * 16,
        },
        "policy.learning_rate": {f"{_ACTOR}.optim.lr": policy.learning_rate},
        "policy.max_resamples": {
            "algorithm.filter_groups.enable": policy.max_resamples >= 0,
            "algorithm.filter_groups.max_num_gen_batches": most_draws(config),
        },
        "optimizer.warmup_steps": {f"{_ACTOR}.optim.lr_warmup_steps": optimizer.warmup_steps},
        "optimizer.constant": {f"{_ACTOR}.optim.lr_scheduler_type": "constant" if optimizer.constant else "cosine"},
        "the run's own settings": {f"{_MODEL}.lora.run": dataclasses.asdict(config)},
    }


def _chosen(config: RunConfig) -> dict[str, Any]:
    """Return our defaults for verl's own options: machines, precision, servers. The user can override them."""
    cpu = is_cpu(config)
    servers = dict(dotted(config.verl)).get(f"{_SAMPLING}.name", SAMPLER)
    return {
        # The ratio is to the sampling policy. Only our own server computes the same log-probs as the trainer.
        "algorithm.rollout_correction.bypass_mode": servers == SAMPLER,
        f"{_MODEL}.override_config.attn_implementation": "sdpa",
        f"{_MODEL}.enable_gradient_checkpointing": not cpu and not is_small(config),
        f"{_ACTOR}.fsdp_config.model_dtype": "fp32" if cpu else "bf16",  # of the frozen base; adapters are fp32
        f"{_SAMPLING}.name": SAMPLER,
        f"{_SAMPLING}.load_format": "auto",
        f"{_SAMPLING}.free_cache_engine": not cpu,
        f"{_SAMPLING}.dtype": "float32" if cpu else "bfloat16",
        f"{_SAMPLING}.cudagraph_capture_sizes": list(GRAPH_SIZES),
        f"{_SAMPLING}.engine_kwargs.vllm.distributed_executor_backend": _executor(config),
        **({f"{_SAMPLING}.engine_kwargs.vllm.compilation_config": dict(UNCOMPILED)} if is_small(config) else {}),
        f"{_SAMPLING}.tensor_model_parallel_size": 1,
        f"{_SAMPLING}.agent.num_workers": 1 if cpu else 2,  # each runs many rollouts and needs seconds for its imports
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 1,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "ray_kwargs.ray_init.include_dashboard": False,
    }


def is_small(config: RunConfig) -> bool:
    """Whether one GPU trains a base whose activations fit without checkpointing: our own forward then runs it, which
    is several times as fast for small bases."""
    machines = dict(dotted(config.verl))
    if any(machines.get(f"trainer.{part}", 1) != 1 for part in ("nnodes", "n_gpus_per_node")):
        return False
    size = sum(file.stat().st_size for file in Path(model_source(config.model)).glob("*.safetensors"))
    return 0 < size < SMALL_BYTES


def _executor(config: RunConfig) -> str:
    """Return the executor of vLLM: `uni`, in the process of its engine, if one GPU holds a server.

    vLLM's own default is the same. verl sets `mp`, which starts one more process, in all cases.
    """
    chosen = dict(dotted(config.verl))
    return "uni" if all(chosen.get(f"{_SAMPLING}.{part}", 1) == 1 for part in _PARALLEL) else "mp"


def _check_known(tree: DictConfig, name: str) -> None:
    """Raise a `ConfigError` for an unknown key; OmegaConf would add it without effect."""
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


def _check_open(name: str, value: Any, translated: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise a `ConfigError` for a key that our config or our code decides, or that nothing reads."""
    for setting, theirs in translated.items():
        if any(name == each or name.startswith(f"{each}.") for each in theirs):
            raise ConfigError(f"set {setting} instead of verl.{name}")
    if name in _FIXED:
        if value != _FIXED[name]:
            raise ConfigError(f"verl.{name} must be {_FIXED[name]}: the code of lfo supports no other value")
    elif (why := why_unread(name)) is not None:
        raise ConfigError(f"verl.{name} would change nothing: {why}")


def _check_servers(rollout: Any) -> None:
    """Raise a `ConfigError` for servers that our code cannot start."""
    name = f"verl.{_SAMPLING}.name"
    if rollout.name not in (SAMPLER, "vllm"):
        raise ConfigError(f"{name} must be {SAMPLER} or vllm, not {rollout.name}")
    parallel = [part for part in _PARALLEL if rollout[part] != 1]
    if rollout.name == SAMPLER and parallel:
        raise ConfigError(f"a server of lfo holds the whole base: set verl.{_SAMPLING}.{parallel[0]}=1, or {name}=vllm")


def _validate(tree: DictConfig) -> None:
    """Run verl's own validation without its output."""
    from hydra.errors import InstantiationException
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    checked: Any = tree
    if tree.actor_rollout_ref.rollout.name == "vllm":
        # verl's validation imports vLLM to check the rank of the LoRA, which vLLM checks itself.
        checked = OmegaConf.merge(tree, {"actor_rollout_ref": {"rollout": {"name": SAMPLER}}})
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            validate_config(checked, use_reference_policy=need_reference_policy(tree), use_critic=need_critic(tree))
    except InstantiationException as error:  # hydra wraps the error of a config class
        raise ConfigError(f"verl rejects this config: {error.__cause__ or error}") from error
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"verl rejects this config: {error}") from error
