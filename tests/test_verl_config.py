"""Our config in verl's keys: complete, validated by verl, and open to verl's own keys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import Qwen3Config

from lfo.config import KNOBS, PRESETS, load_config
from lfo.engines import create_trainer
from lfo.engines.verl.config import _FIXED, _chosen, _translated, is_small
from lfo.engines.verl.unread import UNREAD, why_unread
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.errors import ConfigError
from lfo.loading import load_tokenizer
from small_tokenizers import QWEN3, small_tokenizer

ROOT = Path(__file__).parent.parent
LFO = Path(sys.executable).parent / "lfo"


def test_what_a_config_says_of_verl_is_kept_and_later_settings_win():
    queue = "verl.transfer_queue.metrics.port=1"
    config = load_config(["engine=verl", "verl.trainer.nnodes=2", "verl.trainer.nnodes=4", queue])
    assert config.verl == {"trainer": {"nnodes": 4}, "transfer_queue": {"metrics": {"port": 1}}}


def test_a_run_without_verl_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = load_config(["preset=tiny", "engine=verl"])
    with pytest.raises(ConfigError, match=r"needs verl: pip install"):
        create_trainer(config, PhoneCalls, None)


def test_a_template_that_knows_no_thoughts_is_refused_before_any_process_starts():
    pytest.importorskip("verl")
    config = load_config(["preset=tiny", "engine=verl", "rollout.thinking=true"])
    with pytest.raises(ConfigError, match="does not support thoughts"):
        create_trainer(config, PhoneCalls, load_tokenizer("tiny"))


def test_controls_that_need_all_rollouts_in_one_process_are_refused():
    pytest.importorskip("verl")
    for source in ("shuffled", "memory"):
        config = load_config(["preset=tiny", "engine=verl", f"lookahead_source={source}"])
        with pytest.raises(ConfigError, match="use engine=local"):
            create_trainer(config, PhoneCalls, None)


# --- with verl, in processes of their own: it must be imported after its platform is chosen ------------------------

# The trees for some settings; and for every preset what verl's servers and workers make of its tree.
_ASK = """
import dataclasses, json, sys
from omegaconf import OmegaConf
from lfo.config import PRESETS, load_config
from lfo.engines.verl.config import _defaults, _validate, verl_config
from lfo.errors import ConfigError
from lfo.settings import dotted
trees = {}
for name, overrides in json.loads(sys.argv[1]).items():
    try:
        trees[name] = OmegaConf.to_container(verl_config(load_config(overrides)), resolve=True)
    except ConfigError as error:
        trees[name] = str(error)
tree = verl_config(load_config(["preset=tiny", "engine=verl"]))
tree.actor_rollout_ref.actor.profiler.tool_config.torch_memory.stack_depth = 0
try:
    _validate(tree)
except ConfigError as error:
    trees["refused by a part"] = str(error)
leaves = [name for name, _ in dotted(OmegaConf.to_container(_defaults()))]

from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig, RolloutConfig
objects = {}
for preset in PRESETS:
    tree = verl_config(load_config([f"preset={preset}", "engine=verl", f"model={sys.argv[2]}"])).actor_rollout_ref
    plain = {part: omega_conf_to_dataclass(tree[part]) for part in ("model", "rollout", "actor")}
    typed = {
        part: omega_conf_to_dataclass(OmegaConf.to_container(tree[part], resolve=True), its_type)
        for part, its_type in {"model": HFModelConfig, "rollout": RolloutConfig}.items()
    }
    objects[preset] = {
        part: {field.name: str(made[field.name]) for field in dataclasses.fields(made)}
        for part, made in {**plain, **typed}.items()
    }
    # verl makes actors without a look at their types, to which its own defaults do not keep.
    objects[preset]["actor"]["not whole"] = str([
        field.name
        for part in (plain["actor"], plain["actor"].optim, plain["actor"].engine)
        for field in dataclasses.fields(part)
        if field.type is int and isinstance(part[field.name], float)
    ])
print("ANSWERS" + json.dumps({"trees": trees, "objects": objects, "leaves": leaves}))
"""
ASKED: dict[str, list[str]] = {
    "tiny": ["preset=tiny", "engine=verl", "policy.overlong_buffer=64"],
    "8 GPUs": ["preset=qwen3-8b-8x24gb"],
    "1 GPU": ["preset=qwen3-1.7b-1gpu", "engine=verl"],
    "own keys": [
        "preset=tiny",
        "engine=verl",
        "verl.trainer.nnodes=3",
        "verl.ray_kwargs.ray_init.address=auto",
        "verl.actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
    ],
    "mistyped": ["preset=tiny", "engine=verl", "verl.actor_rollout_ref.actor.fsdp_config.optimiser_offload=true"],
    "refused": ["preset=tiny", "engine=verl", "verl.actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"],
    "own rate": ["preset=tiny", "engine=verl", "verl.actor_rollout_ref.actor.optim.lr=1.0"],
    "own group": ["preset=tiny", "engine=verl", "verl.actor_rollout_ref.rollout.n=4"],
    "own steps": ["preset=tiny", "engine=verl", "verl.trainer.total_training_steps=3"],
    "own run": ["preset=tiny", "engine=verl", "verl.actor_rollout_ref.model.lora.run.seed=3"],
    "own loss": ["preset=tiny", "engine=verl", "verl.actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"],
    "same loss": ["preset=tiny", "engine=verl", "verl.actor_rollout_ref.actor.loss_agg_mode=token-mean"],
    "fsdp1": ["preset=tiny", "engine=verl", "verl.actor_rollout_ref.actor.strategy=fsdp"],
    "offload": ["preset=tiny", "engine=verl", "verl.actor_rollout_ref.actor.fsdp_config.param_offload=true"],
    "sglang": ["preset=tiny", "engine=verl", "verl.actor_rollout_ref.rollout.name=sglang"],
    "half a server": ["preset=tiny", "engine=verl", "verl.actor_rollout_ref.rollout.tensor_model_parallel_size=2"],
}
NOTHING_READS = {
    "actor_rollout_ref.actor.policy_loss.loss_mode": "the policy's loss is fixed",
    "actor_rollout_ref.actor.ppo_epochs": "set rollout.mini_batch_prompts",
    "actor_rollout_ref.actor.clip_ratio_c": "there is no dual clip",
    "actor_rollout_ref.actor.tau_pos": "the policy's loss is fixed",
    "actor_rollout_ref.actor.kl_loss_coef": "no KL term",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "set micro_batch_tokens",
    "actor_rollout_ref.actor.optim.num_cycles": "set policy.learning_rate",
    "actor_rollout_ref.actor.fsdp_config.forward_prefetch": "of fsdp_config set model_dtype",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "no reference model",
    "actor_rollout_ref.model.lora.dropout": "set lora.rank",
    "actor_rollout_ref.rollout.top_p": "set rollout.temperature",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "set rollout.temperature",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": "set env",
    "algorithm.gamma": "set rollout.group_size",
    "algorithm.lam": "set rollout.group_size",
    "algorithm.kl_ctrl.kl_coef": "no KL term",
    "algorithm.rollout_correction.rollout_is": "set verl.algorithm.rollout_correction.bypass_mode=false",
    "algorithm.filter_groups.max_inflight_gen_batches": "set policy.max_resamples",
    "critic.optim.lr": "there is no critic",
    "reward.reward_manager.name": "set env",
    "reward_model.enable": "set env",
    "data.shuffle": "set env",
    "distillation.enabled": "no teacher model",
    "global_profiler.tool": "profiler",
    "trainer.val_only": "set steps",
    "trainer.v1.trainer_mode": "lfo's own loop trains",
}
ASKED |= {name: ["preset=tiny", "engine=verl", f"verl.{name}=1"] for name in NOTHING_READS}
# What verl 0.9.1 itself reads in our runs, with our servers or with vLLM's; all else is in one of our tables.
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VERL_READS = {
    f"{part}.{name}" if part else name
    for part, names in (
        (ACTOR, "ulysses_sequence_parallel_size"),
        (f"{ACTOR}.fsdp_config", "fsdp_size full_determinism model_dtype optimizer_offload qat reshard_after_forward"),
        (f"{ACTOR}.fsdp_config", "ulysses_sequence_parallel_size"),
        ("actor_rollout_ref.model", "_target_ custom_chat_template enable_gradient_checkpointing hf_config_path mtp"),
        ("actor_rollout_ref.model", "override_config trust_remote_code use_liger use_shm"),
        (ROLLOUT, "_target_ agent.num_workers checkpoint_engine cudagraph_capture_sizes data_parallel_size"),
        (ROLLOUT, "disable_log_stats disaggregation dtype enable_chunked_prefill enable_prefix_caching"),
        (ROLLOUT, "enable_rollout_routing_replay enforce_eager engine_kwargs.vllm expert_parallel_size"),
        (ROLLOUT, "free_cache_engine full_determinism gpu_memory_utilization ignore_eos layered_summon load_format"),
        (ROLLOUT, "logprobs_mode max_num_batched_tokens max_num_seqs mode mtp n_gpus_per_node name"),
        (ROLLOUT, "pipeline_model_parallel_size prometheus qat quantization quantization_config_file"),
        (ROLLOUT, "router_config_path scheduling_policy tensor_model_parallel_size"),
        ("", "algorithm.rollout_correction.bypass_mode ray_kwargs.ray_init transfer_queue"),
        ("", "trainer.n_gpus_per_node trainer.nnodes"),
    )
    for name in names.split()
}


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> dict[str, Any]:
    pytest.importorskip("verl", reason="verl is not installed: pip install -e '.[verl]'")
    model = tmp_path_factory.mktemp("qwen3")
    small_tokenizer(QWEN3).save_pretrained(model)
    Qwen3Config(num_hidden_layers=1, architectures=["Qwen3ForCausalLM"]).save_pretrained(model)
    command = [sys.executable, "-W", "ignore", "-c", _ASK, json.dumps(ASKED), model]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS")]
    return json.loads(line.removeprefix("ANSWERS"))


@pytest.fixture(scope="module")
def answers(asked) -> dict[str, Any]:
    return asked["trees"]


@pytest.mark.verl
def test_the_tiny_preset_in_verls_words(answers):
    tree = answers["tiny"]
    assert tree["algorithm"]["adv_estimator"] == "grpo"
    assert tree["algorithm"]["filter_groups"]["enable"]
    actor, rollout, model = (tree["actor_rollout_ref"][part] for part in ("actor", "rollout", "model"))
    assert (actor["clip_ratio_low"], actor["clip_ratio_high"]) == (0.2, 0.28)
    assert actor["loss_agg_mode"] == "token-mean"
    assert actor["strategy"] == "fsdp2"
    assert actor["optim"]["lr"] == 5e-4
    assert (rollout["n"], rollout["temperature"]) == (8, 1.0)
    assert rollout["multi_turn"]["max_tool_response_length"] > 4096, "the default of 256 would cut replies"
    assert (model["lora_rank"], model["lora"]["rank"]) == (16, 16)
    assert model["lora"]["run"]["policy"]["overlong_buffer"] == 64
    assert tree["trainer"]["device"] == "cpu"


@pytest.mark.verl
def test_the_preset_for_eight_gpus_has_the_reference_numbers(answers):
    tree = answers["8 GPUs"]
    actor, rollout, model = (tree["actor_rollout_ref"][part] for part in ("actor", "rollout", "model"))
    assert tree["trainer"]["n_gpus_per_node"] == 8
    assert tree["data"]["train_batch_size"] == 8
    assert (rollout["n"], actor["ppo_mini_batch_size"]) == (8, 2)
    assert rollout["multi_turn"]["max_assistant_turns"] == 16
    assert (actor["clip_ratio_low"], actor["clip_ratio_high"], actor["grad_clip"]) == (0.2, 0.28, 1.0)
    optim = actor["optim"]
    assert (optim["betas"], optim["weight_decay"], optim["clip_grad"]) == ([0.9, 0.95], 0.1, 1.0)
    assert (optim["lr_warmup_steps"], optim["lr_scheduler_type"]) == (10, "cosine")
    assert optim["lr"] == 1e-4, "the documents' 1e-6 does not learn with LoRA"
    assert (model["lora_rank"], model["lora_alpha"]) == (16, 32)
    assert model["path"] == "Qwen/Qwen3-8B"
    assert model["enable_gradient_checkpointing"]
    assert actor["fsdp_config"]["optimizer_offload"]
    assert rollout["name"] == "vllm"
    assert rollout["temperature"] == 1.0
    assert model["lora"]["run"]["world_model"]["state_tokens"] == 512


@pytest.mark.parametrize(
    ("size", "settings", "small"),
    [
        (270 << 20, (), True),
        (3 << 30, (), False),
        (0, (), False),  # a base of the hub: its size is not known
        (270 << 20, ("verl.trainer.n_gpus_per_node=2",), False),
        (270 << 20, ("verl.trainer.nnodes=2",), False),
    ],
)
def test_a_small_base_on_one_gpu_needs_neither_checkpointing_nor_compilation(tmp_path, size, settings, small):
    (tmp_path / "config.json").write_text("{}")
    if size:
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.truncate(size)  # sparse: it takes no space
    config = load_config([f"model={tmp_path}", "engine=verl", "device=cuda", *settings])
    assert is_small(config) is small
    chosen = _chosen(config)
    assert chosen["actor_rollout_ref.model.enable_gradient_checkpointing"] is not small
    compilation = "actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config"
    assert (compilation in chosen) is small, "vLLM compiles larger bases"


@pytest.mark.verl
def test_the_preset_for_one_gpu_needs_no_vllm(answers):
    tree = answers["1 GPU"]
    assert tree["trainer"]["n_gpus_per_node"] == tree["trainer"]["nnodes"] == 1
    assert tree["trainer"]["device"] == "cuda"
    assert tree["actor_rollout_ref"]["rollout"]["name"] == "lfo"


@pytest.mark.verl
def test_verls_own_keys_win_and_mistyped_ones_are_named(answers):
    tree = answers["own keys"]
    assert tree["trainer"]["nnodes"] == 3
    assert tree["ray_kwargs"]["ray_init"]["address"] == "auto"
    assert tree["actor_rollout_ref"]["rollout"]["gpu_memory_utilization"] == 0.3
    assert answers["mistyped"] == (
        "verl has no setting 'actor_rollout_ref.actor.fsdp_config.optimiser_offload'; "
        "the nearest is verl.actor_rollout_ref.actor.fsdp_config.optimizer_offload"
    )
    assert answers["refused"] == (
        "verl rejects this config: When using sequence parallelism for actor/ref policy, you must enable "
        "`use_remove_padding`."
    )
    assert answers["refused by a part"] == "verl rejects this config: stack_depth must be positive, got 0"


@pytest.mark.verl
def test_what_our_settings_or_our_code_decide_cannot_be_set_in_verls_words(answers):
    actor = "verl.actor_rollout_ref.actor"
    assert answers["own rate"] == f"set policy.learning_rate instead of {actor}.optim.lr"
    assert answers["own group"] == "set rollout.group_size instead of verl.actor_rollout_ref.rollout.n"
    assert answers["own steps"] == "set steps instead of verl.trainer.total_training_steps"
    assert answers["own run"] == "set the run's own settings instead of verl.actor_rollout_ref.model.lora.run.seed"
    one_way = "the code of lfo supports no other value"
    assert answers["own loss"] == f"{actor}.loss_agg_mode must be token-mean: {one_way}"
    assert answers["fsdp1"] == f"{actor}.strategy must be fsdp2: {one_way}"
    assert answers["offload"] == f"{actor}.fsdp_config.param_offload must be False: {one_way}"
    assert answers["same loss"]["actor_rollout_ref"]["actor"]["loss_agg_mode"] == "token-mean"


@pytest.mark.verl
@pytest.mark.parametrize(("name", "instead"), NOTHING_READS.items())
def test_what_nothing_reads_is_refused_by_name(answers, name, instead):
    refusal = answers[name]
    assert isinstance(refusal, str), f"verl.{name} was accepted"
    assert refusal.startswith(f"verl.{name} would change nothing: ")
    assert instead in refusal


@pytest.mark.verl
def test_every_setting_of_verl_is_ours_or_read_by_verl_or_refused(asked):
    ours = {*_FIXED, *(name for theirs in _translated(load_config(["engine=verl"]), None).values() for name in theirs)}

    def below(name: str, names: Collection[str]) -> bool:
        return any(name == each or name.startswith(f"{each}.") for each in names)

    others = [name for name in asked["leaves"] if not below(name, ours)]
    refused, read = {name for name in others if why_unread(name)}, {name for name in others if below(name, VERL_READS)}
    assert len(refused) > 600
    assert refused | read == set(others)
    assert not refused & read
    unknown = [name for name in UNREAD if not any(below(leaf, [name]) for leaf in asked["leaves"])]
    assert unknown == ["actor_rollout_ref.model.lora.fully_sharded_loras"], "vLLM's server reads it from a free part"


def test_what_we_choose_for_a_machine_can_be_chosen_otherwise():
    for device in ("cpu", "cuda"):
        chosen = _chosen(load_config(["preset=tiny", "engine=verl", f"device={device}"]))
        assert [name for name in chosen if why_unread(name)] == []


@pytest.mark.verl
def test_servers_that_cannot_start_are_refused_before_anything_starts(answers):
    servers = "verl.actor_rollout_ref.rollout"
    assert answers["sglang"] == f"{servers}.name must be lfo or vllm, not sglang"
    assert answers["half a server"] == (
        f"a server of lfo holds the whole base: set {servers}.tensor_model_parallel_size=1, or {servers}.name=vllm"
    )


@pytest.mark.verl
def test_verls_own_types_accept_every_preset(asked):
    made = asked["objects"]
    assert made.keys() == PRESETS.keys()
    for preset, parts in made.items():
        config = load_config([f"preset={preset}"])
        assert parts["model"]["lora_alpha"] == f"{config.lora.alpha:g}"
        assert parts["model"]["lora_rank"] == str(config.lora.rank)
        assert parts["rollout"]["n"] == str(config.rollout.group_size)
        assert parts["actor"]["clip_ratio_high"] == "0.28"
        assert parts["actor"]["not whole"] == "[]"
    assert made["qwen3-8b-8x24gb"]["rollout"]["name"] == "vllm"


@pytest.mark.verl
def test_a_refused_setting_leaves_no_run_behind(tmp_path):
    pytest.importorskip("verl", reason="verl is not installed: pip install -e '.[verl]'")
    settings = ["preset=tiny", "engine=verl", f"output_dir={tmp_path / 'run'}", "verl.actor_rollout_ref.rollout.n=4"]
    command = [sys.executable, "-W", "ignore", "-c", "from lfo.cli import main; main()", "train", *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stderr == "lfo: set rollout.group_size instead of verl.actor_rollout_ref.rollout.n\n"
    assert done.returncode == 2
    assert not (tmp_path / "run").exists()


def test_log_probs_of_other_servers_are_computed_again():
    name, vllm = "algorithm.rollout_correction.bypass_mode", "verl.actor_rollout_ref.rollout.name=vllm"
    assert _chosen(load_config(["preset=tiny", "engine=verl"]))[name]
    assert not _chosen(load_config(["preset=tiny", "engine=verl", vllm]))[name]


def test_what_is_named_in_place_of_verls_key_can_be_set():
    named = set(_translated(load_config(["preset=tiny", "engine=verl"]), None)) - {"the run's own settings"}
    assert named <= KNOBS.keys()


@pytest.mark.verl
@pytest.mark.parametrize("script", ["run_baseline_dapo.sh", "run_dual_lora_dapo.sh"])
def test_the_scripts_of_the_documents_print_a_whole_config(script):
    pytest.importorskip("verl", reason="verl is not installed: pip install -e '.[verl]'")
    command = [ROOT / "configs" / script, "--print-config", "verl.trainer.nnodes=2"]
    environment = {"PATH": f"{LFO.parent}:/usr/bin:/bin", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    tree = yaml.safe_load(done.stdout)
    run = tree["actor_rollout_ref"]["model"]["lora"]["run"]
    assert tree["trainer"]["nnodes"] == 2
    assert run["algo"] == ("dapo" if "baseline" in script else "dual-lora")
    assert run["world_model"]["weight"] == (0.0 if "baseline" in script else 0.5)


@pytest.mark.parametrize(
    ("size", "executor"), [("tensor_model_parallel_size=1", "uni"), ("tensor_model_parallel_size=2", "mp")]
)
def test_vllm_starts_no_process_for_a_model_on_one_gpu(size: str, executor: str):
    servers = "actor_rollout_ref.rollout"
    config = load_config(["preset=tiny", "engine=verl", f"verl.{servers}.name=vllm", f"verl.{servers}.{size}"])
    assert _chosen(config)[f"{servers}.engine_kwargs.vllm.distributed_executor_backend"] == executor


def test_what_every_process_of_verls_imports_of_us_is_light():
    """Its platform lies in this package; balancer and queue, and vLLM's engine, need nothing else of ours."""
    code = "import sys, lfo.engines.verl; print(*sorted(name for name in sys.modules if name.startswith('lfo')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["lfo", "lfo.engines", "lfo.engines.verl"]
