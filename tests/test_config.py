"""Settings: how they are layered, what is refused and in which words, and that a saved config comes back the same."""

import dataclasses
import re
import typing
from collections import Counter
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lfo.config import (
    RunConfig,
    differences,
    experiment,
    fingerprint,
    flatten,
    from_yaml,
    load_config,
    to_yaml,
)
from lfo.config.algorithms import ALGORITHMS
from lfo.config.knobs import KNOBS, LoraConfig
from lfo.config.older import RETIRED
from lfo.config.presets import PRESETS
from lfo.config.sources import SOURCES, SourceName
from lfo.errors import ConfigError
from lfo.runs.grouping import group_names
from lfo.runs.reading import read_run
from lfo.settings import assign, dotted


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_without_overrides_the_defaults_hold():
    assert load_config([]) == RunConfig()


def test_algo_internalise_is_a_plan_of_three_phases_that_the_command_line_can_change():
    config = load_config(["preset=tiny", "algo=internalise"])
    assert (config.internalise.rows, config.internalise.until, config.steps, config.imagine.drafts) == (8, 0, 160, 4)
    assert (config.looks_ahead_untrained, config.leaves_policy_alone, config.has_world_model) == (True, True, True)
    assert load_config(["preset=tiny", "algo=internalise", "internalise.until=5"]).internalise.until == 5
    assert not load_config(["algo=dapo"]).has_world_model


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_preset_is_valid_with_every_algorithm(preset, algo):
    config = load_config([f"preset={preset}", f"algo={algo}"])
    assert (config.preset, config.algo) == (preset, algo)


def test_the_documents_preset_has_the_documents_numbers():
    config = load_config(["preset=documents"])
    assert config.policy.learning_rate == config.world_model.learning_rate == 1e-6
    assert config.lora == LoraConfig(rank=16, targets="q_proj,v_proj,o_proj")
    assert config.lora.target_modules == ["q_proj", "v_proj", "o_proj"]
    assert config.world_model.weight == 0.5
    assert RunConfig().lora.target_modules == "all-linear"


def test_the_preset_comes_first_wherever_it_is_written_and_later_overrides_win():
    config = load_config(["world_model.weight=0.1", "preset=documents", "world_model.weight=0.3"])
    assert config.world_model.weight == 0.3
    assert load_config(["world_model.weight=0.1", "preset=documents"]).world_model.weight == 0.1


def test_plain_dapo_has_no_world_model_and_no_lookahead_unless_asked_and_then_refuses():
    config = load_config(["preset=tiny", "algo=dapo"])
    assert (config.lookahead, config.looks_ahead) == ("off", False)
    assert config.world_model.weight == 0
    for value, name in (("true", "policy"), ("policy", "policy")):
        assert f"lookahead={name} needs algo=dual-lora" in refused("algo=dapo", f"lookahead={value}")
    assert "world_model.weight=0.5 needs algo=dual-lora" in refused("algo=dapo", "world_model.weight=0.5")


def test_values_are_read_by_the_type_of_their_setting():
    config = load_config(
        [
            "policy.learning_rate=1e-5",
            "levels=2,3",
            "eval.splits=[val,test_unseen_companies]",
            "model=1e5",
            "init_from=none",
            "lookahead=false",
            "env_args.world.seed=7",
            "output_dir=runs/${algo}-${seed}=x",
        ]
    )
    assert config.policy.learning_rate == 1e-5
    assert config.eval.splits == ("val", "test_unseen_companies")
    assert config.model == "1e5"
    assert config.init_from is None
    assert config.lookahead == "off"
    assert config.env_args == {"levels": [2, 3], "world": {"seed": 7}}
    assert config.output_dir == "runs/dual-lora-0=x"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("world_model.wieght=1", "'world_model.wieght'; the nearest is world_model.weight"),
        ("wieght=1", "the nearest is world_model.weight"),
        ("polcy.learning_rate=1", "the nearest is policy.learning_rate"),
        ("lora.rnak=1", "the nearest is lora.rank"),
        ("lora=1", "lora is a group of settings; set one of lora.rank, "),
        ("steps=abc", "steps must be a valid integer, not 'abc'"),
        ("steps=2.5", "steps must be a valid integer, not 2.5"),
        ("steps=true", "steps must be a valid integer, not True"),
        ("surprise=[1]", "surprise must be a valid number, not [1]"),
        ("surprise=.nan", "surprise must be a finite number, not nan"),
        ("surprise=.inf", "surprise must be a finite number, not inf"),
        ("lookahead=2", "lookahead must be 'policy' or 'off', not '2'"),
        ("env_args=3", "env_args must be a mapping"),
        ("coupling=shard", "coupling must be one of separate, shared, not 'shard'; did you mean shared?"),
        ("preset=tyni", "not 'tyni'; did you mean tiny?"),
        (
            "trackers=[tensorbord]",
            "trackers must be 'tensorboard' or 'wandb', not 'tensorbord'; did",
        ),
        ("trackers=wandb,wandb", "trackers names something twice: wandb, wandb"),
        ("lora.dropout=0.05", "there is no setting 'lora.dropout'"),
        ("world_model.from_logs=x", "world_model.from_logs needs policy.frozen=true"),
        ("env=phone-cals", "did you mean phone-calls?"),
        ("env=my_package", "package.module:Class"),
        ("steps", "a setting is written name=value"),
        ("=3", "a setting is written name=value"),
        ("output_dir=${nope}", "'nope'"),
        ("config=no/such.yaml", "cannot read the config no/such.yaml"),
    ],
)
def test_a_bad_setting_is_refused_in_one_sentence(override, words):
    assert words in refused(override)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["world_model.from_logs=x", "policy.frozen=true", "world_model.replay=false"], "world_model.replay=true"),
        (["lora.rank=0"], "lora.rank must be greater than or equal to 1, not 0"),
        (["lora.rank=8.5"], "lora.rank must be a valid integer, not 8.5"),
        (["output_dir=runs\u2028x"], "output_dir must be printable text"),
        (["rollout.mini_batch_prompts=3"], "rollout.mini_batch_prompts must divide rollout.prompts"),
        (["rollout.group_size=1"], "rollout.group_size must be greater than or equal to 2"),
        (["world_model.predict=open_door,"], "world_model.predict must be a word or names with commas"),
        (["world_model.weight=2.1"], "world_model.weight must be less than or equal to 2, not 2.1"),
        (["policy.learning_rate=0"], "policy.learning_rate must be greater than 0, not 0"),
        (["world_model.input=inline"], "needs coupling=shared"),
        (["world_model.input=inline", "coupling=shared"], "trains no world model for look-ahead"),
        (["rollout.group_size=2"], "leaves one rollout with look-ahead"),
        (["rollout.group_size=3"], "leaves one rollout with look-ahead"),
        (["surprise=0.1", "world_model.weight=0"], "surprise needs world_model.weight above 0"),
        (["surprise=0.1", "world_model.predict=none"], "surprise needs world_model.weight above 0"),
        (["world_model.schedule=adaptive", "eval.every=0"], "needs eval.every above 0"),
        (["rollout.max_turn_tokens=1024"], "must be below rollout.max_context=1024"),
        (["policy.overlong_buffer=1024"], "must be below rollout.max_context=1024"),
        (["world_model.schedule=world_model_first:101"], "world_model_first:101 needs steps=101 or more"),
        (["world_model.schedule=hierarchical"], "world_model.schedule must be joint, alternating"),
        (["lookahead=false", "lookahead_source=truth"], "lookahead_source=truth needs lookahead=policy"),
        (["algo=dapo", "surprise=0.1"], "surprise=0.1 needs algo=dual-lora"),
        (["policy.frozen=true", "world_model.weight=0"], "needs world_model.weight above 0"),
        (["policy.frozen=true", "world_model.predict=none", "lookahead=off"], "has nothing to learn"),
        (["eval.splits="], "eval.splits must have at least one value"),
        (["eval.final_splits=test,val"], "eval names something twice: val, test, val"),
        (
            ["eval.final_splits=test", "eval.every=0"],
            "eval.final_splits needs eval.every above 0",
        ),
        (["lora.targets=q_proj,"], "lora.targets must be"),
        (["output_dir="], "output_dir must be printable text"),
    ],
)
def test_an_impossible_config_is_refused_in_one_sentence(overrides, words):
    assert words in refused(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["coupling=shared", "world_model.input=inline", "lookahead=false"],
        ["world_model.schedule=world_model_first:5"],
        ["world_model.schedule=hierarchical:4"],
        ["lookahead_source=shuffled"],
        ["env=my.package:World", "world_model.weight=2", "levels=1,5"],
    ],
)
def test_what_the_refusals_ask_for_is_accepted(overrides):
    load_config(overrides)


def test_every_knob_has_a_line_of_help_and_every_number_a_range():
    for name, info in KNOBS.items():
        assert info.description, name
        assert "\n" not in info.description, name
        numbers = typing.get_args(info.annotation) if typing.get_origin(info.annotation) is tuple else [info.annotation]
        if {int, float} & set(numbers):
            assert {type(limit).__name__ for limit in info.metadata} & {"Ge", "Gt"}, name


def test_a_config_that_is_built_in_python_is_checked_too():
    with pytest.raises(ConfigError, match="coupling must be one of"):
        RunConfig(coupling="shard")
    with pytest.raises(ValueError, match="steps"):
        RunConfig(steps="5")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        dataclasses.replace(RunConfig(), steps=0)


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().lora.rank = 3  # type: ignore[misc]


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(st.characters(codec="ascii", exclude_characters="$"), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), inner),
    max_leaves=6,
)
configs = st.builds(
    RunConfig,
    seed=st.integers(0, 2**32 - 1),
    env_args=st.builds(
        lambda levels, others: {**others, "levels": sorted(levels)},
        st.sets(st.integers(1, 5), min_size=1),
        st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), plain, max_size=3),
    ),
    output_dir=st.text(
        st.characters(codec="utf-8", categories=["L", "N", "P", "S"], exclude_characters="$") | st.just(" "), min_size=1
    ).filter(str.strip),
    init_from=st.none() | st.sampled_from(["none", "null", "1", "true", "~", "runs/x"]),
    lora=st.builds(LoraConfig, rank=st.integers(1, 64)),
)


@settings(max_examples=40, deadline=None)
@given(config=configs)
def test_a_saved_config_comes_back_the_same(config, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert from_yaml(path) == config


def test_a_hand_written_file_starts_from_its_preset_and_overrides_win_over_it(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text("preset: documents\nsteps: 7\nworld_model:\n  weight: 0.25\n")
    config = from_yaml(path)
    assert (config.steps, config.world_model.weight, config.policy.learning_rate) == (7, 0.25, 1e-6)
    assert load_config(["steps=9", f"config={path}"]) == dataclasses.replace(config, steps=9)


def test_of_two_files_the_later_one_wins(tmp_path: Path):
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("steps: 1\nseed: 1\n")
    two.write_text("steps: 2\n")
    config = load_config([f"config={one}", f"config={two}"])
    assert (config.steps, config.seed) == (2, 1)


def test_a_files_settings_of_verl_add_to_those_of_its_preset(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text("preset: qwen3-8b-8x24gb\nverl:\n  trainer:\n    nnodes: 2\n")
    typed = load_config(["preset=qwen3-8b-8x24gb", "verl.trainer.nnodes=2"])
    assert from_yaml(path).verl == typed.verl != {"trainer": {"nnodes": 2}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lora:\n  rnak: 3\n", "the nearest is lora.rank (in "),
        ("steps: '3'\n", "steps must be a valid integer"),
        ("steps: 3\nsteps: 4\n", "line 2 is not valid YAML"),
        ("steps: [3\n", "is not valid YAML"),
        ("- steps\n", "must be a mapping of settings"),
        ("lora: 3\n", "lora is a group of settings"),
        ("steps: !!python/object/apply:os.getcwd []\n", "is not valid YAML"),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence(tmp_path: Path, text, words):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert words in refused(f"config={path}")


def test_plain_dapo_is_one_experiment_whatever_is_set_about_a_world_model():
    def one(algo: str, tokens: int) -> str:
        return experiment(load_config([f"algo={algo}", f"world_model.state_tokens={tokens}"]))

    assert one("dapo", 96) == one("dapo", 112)
    assert one("dual-lora", 96) != one("dual-lora", 112)


def test_looking_more_often_is_another_experiment_only_where_it_sets_the_weight():
    def one(every: int, schedule: str) -> str:
        return experiment(load_config([f"eval.every={every}", f"world_model.schedule={schedule}"]))

    assert one(5, "joint") == one(10, "joint")
    assert one(5, "adaptive") != one(10, "adaptive")


def test_a_fingerprint_joins_runs_that_differ_by_seed_and_parts_all_others():
    config = load_config(["preset=tiny"])
    same = load_config(["preset=tiny", "seed=5", "output_dir=elsewhere"])
    other = load_config(["preset=tiny", "lora.rank=8"])
    assert fingerprint(config) == fingerprint(same)
    assert fingerprint(config) != fingerprint(other)
    assert fingerprint(config, without=()) != fingerprint(same, without=())
    assert fingerprint(config, without=("lora",)) == fingerprint(other, without=("lora",))
    assert differences(config, other) == {"lora.rank": (16, 8)}
    with pytest.raises(ConfigError, match="nearest is seed"):
        fingerprint(config, without=("sed",))


def test_flatten_names_every_setting_as_a_user_types_it():
    assert set(flatten(RunConfig())) == {*KNOBS, "levels"}
    assert flatten(load_config(["levels=2,3", "env_args.seed=1"]))["levels"] == (2, 3)
    assert set(flatten(load_config(["env=oracle-codes"]))) == set(KNOBS)


# Levels are an argument of the environment


def test_a_shipped_environment_brings_its_arguments(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text("env_args: {seed: 3}\nlevels: [4]\n")
    for typed, arguments in (
        ([], {"levels": [2]}),
        (["env_args.seed=3"], {"levels": [2], "seed": 3}),
        (["levels=3", "env_args={seed: 3}"], {"levels": [3], "seed": 3}),
        (["env_args={levels: [3]}"], {"levels": [3]}),
        ([f"config={path}"], {"levels": [4], "seed": 3}),
        ([f"config={path}", "levels=1,5"], {"levels": [1, 5], "seed": 3}),
        ([f"config={path}", "env=oracle-codes"], {"seed": 3}),
        (["env=oracle-codes"], {}),
        (["env=my.package:World", "levels=1"], {"levels": [1]}),
    ):
        assert load_config(typed).env_args == arguments


OLD = "env: {env}\nenv_args: {args}\nlevels:\n- 2\nworld_model:\n  predict: {predict}\n"


@pytest.mark.parametrize("constant", [True, False])
def test_with_a_constant_rate_a_longer_run_is_the_same_experiment(constant: bool):
    short, long = (experiment(load_config([f"optimizer.constant={constant}", f"steps={steps}"])) for steps in (40, 80))
    assert (short == long) == constant


@pytest.mark.parametrize(
    ("env", "predict", "now"),
    [
        ("phone-calls", "phone", ["world_model.predict=default"]),
        ("phone-calls", "phone_form", ["world_model.predict=make_phone_call,auth_info_form"]),
        ("phone-calls", "none", ["world_model.predict=none"]),
        ("oracle-codes", "all", ["env=oracle-codes", "world_model.predict=all"]),
        ("my_world:Safes", "all", ["env=my_world:Safes", "world_model.predict=all"]),
    ],
)
def test_a_file_of_an_older_version_is_the_same_experiment(tmp_path: Path, env, predict, now):
    """Every one of them names levels, whatever its environment, and has the old words for the predicted tools."""
    path = tmp_path / "config.yaml"
    path.write_text(OLD.format(env=env, args="{}", predict=predict))
    for config in (from_yaml(path), from_yaml(path, known_only=True), load_config([f"config={path}"])):
        assert config == load_config(now)
        assert experiment(config) == experiment(load_config(now))
    assert load_config([f"world_model.predict={predict}", *now[:-1]]) == load_config(now)
    path.write_text(OLD.format(env="phone-calls", args="{levels: [3]}", predict="all"))
    assert from_yaml(path).env_args == {"levels": [3]}, "the long name wins, as it did"


RESULTS = Path(__file__).parent.parent / "research" / "results"


@pytest.mark.parametrize(
    ("run", "typed"),
    [
        ("own-questions/policy-0", ["levels=2"]),
        ("own-questions-levels234/policy-0", ["levels=2,3,4"]),
        ("level2/dapo-0", ["algo=dapo"]),
    ],
)
def test_a_committed_run_is_one_experiment_with_a_new_run_of_its_settings(run: str, typed: list[str]):
    old = from_yaml(RESULTS / run / "config.yaml", known_only=True)
    assert old.world_model.predict == "default"
    told = {name: before for name, (before, _) in differences(old, load_config(["preset=tiny", *typed])).items()}
    assert told.keys().isdisjoint({"levels", "env_args", "world_model.predict"})
    rest = [f"{name}={','.join(value) if isinstance(value, tuple) else value}" for name, value in told.items()]
    assert experiment(load_config(["preset=tiny", *typed, *rest])) == experiment(old)


def test_a_saved_run_does_not_take_on_what_its_preset_says_of_newer_settings(tmp_path: Path):
    saved = to_yaml(load_config(["preset=tiny", "steps=7"]))
    newer = ("lora_plus", "swap_names", "wording")
    older = "\n".join(line for line in saved.splitlines() if not line.strip().startswith(newer))
    path = tmp_path / "config.yaml"
    path.write_text(older)
    world, usual = from_yaml(path, known_only=True).world_model, RunConfig().world_model
    assert [getattr(world, name) for name in newer] == [getattr(usual, name) for name in newer]
    path.write_text("preset: tiny\nsteps: 7\n")  # by hand: today's preset
    assert from_yaml(path) == load_config(["preset=tiny", "steps=7"])


# Knobs that are gone


def older_run(tmp_path: Path, **changed: str) -> Path:
    """A run as it was saved before knobs were dropped, with some of its lines changed."""
    text = (RESULTS / "own-questions" / "policy-0" / "config.yaml").read_text()
    for line, value in changed.items():
        text, count = re.subn(rf"(?m)^(\s*{line}): .*$", rf"\1: {value}", text)
        assert count == 1, line
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


STACKED = [
    f"{study}/stacked{rest}-{seed}"
    for study, rest, seeds in (
        ("level2", "", 3),
        ("level2", "-lookahead", 3),
        ("levels234", "", 3),
        ("levels234", "-lookahead", 3),
        ("smollm2-levels234", "-lookahead", 2),
        ("smollm2-repeated", "-lookahead", 3),
    )
    for seed in range(seeds)
]
ASKED_BY_ENVIRONMENT = {
    "few-replies": 5,
    "knobs": 23,
    "level2": 20,
    "levels234": 19,
    "own-questions": 5,
    "smollm2-level2": 5,
    "smollm2-levels234": 20,
    "smollm2-repeated": 7,
    "verl-tiny": 2,
}


def test_every_committed_run_opens_and_says_only_what_no_run_has_today(caplog):
    told: dict[str, dict[str, typing.Any]] = {}
    asked: Counter[str] = Counter()
    for path in sorted(RESULTS.glob("**/config.yaml")):
        caplog.clear()
        config = from_yaml(path)
        kept = dict(dotted(config.older))
        assert len(caplog.messages) == len(kept.keys() - RETIRED.keys())
        asked[path.relative_to(RESULTS).parts[0]] += kept.pop("lookahead", "") == "environment"
        if kept:
            told[str(path.parent.relative_to(RESULTS))] = kept
    assert told == {
        "certainty-in-words/true-0": {"imagine.certainty": True},
        "knobs/entropy-0": {"policy.entropy": 0.01},
        "knobs/kl-0": {"policy.kl": 0.01},
        "knobs/no-inquiries-0": {"exploration.inquiries": False},
        "knobs/scale-free-0": {"policy.scale_by_std": False},
        "levels234/no-inquiries-1": {"exploration.inquiries": False},
        **{run: {"coupling": "stacked"} for run in STACKED},
    }
    assert +asked == ASKED_BY_ENVIRONMENT


def test_a_study_with_retired_arms_names_them():
    seeds = RESULTS / "level2"
    runs = [read_run(seeds / f"{arm}-0") for arm in ("dual", "shared", "stacked", "stacked-lookahead")]
    assert not any(run.problem for run in runs)
    assert group_names([run.config for run in runs if run.config]) == [
        "dual-lora lookahead=environment",
        "dual-lora coupling=shared lookahead=off blind_share=0",
        "dual-lora coupling=stacked lookahead=off blind_share=0",
        "dual-lora coupling=stacked lookahead=environment",
    ]


@pytest.mark.parametrize(
    ("run", "setting", "commit"),
    [
        ("level2/stacked-0", "coupling=stacked", "836ca30"),
        ("level2/dual-0", "lookahead=environment", "836ca30"),
        ("certainty-in-words/true-0", "imagine.certainty=True", "2cf7692"),
    ],
)
def test_a_retired_setting_can_be_read_and_neither_trained_nor_resumed(
    tmp_path: Path, run: str, setting: str, commit: str
):
    path, (name, _, value) = RESULTS / run / "config.yaml", setting.partition("=")
    words = (
        f"{setting} is retired and can only be read (research/LOG.md has its figures); its code is in commit {commit}"
    )
    assert refused(setting) == words
    (tmp_path / "metrics.jsonl").touch()
    for text in (path.read_text(), to_yaml(from_yaml(path))):
        (tmp_path / "config.yaml").write_text(text)
        assert str(flatten(from_yaml(tmp_path / "config.yaml"))[name]) == value
        for load in (
            lambda: load_config(run=tmp_path),
            lambda: load_config([f"config={tmp_path / 'config.yaml'}"]),
        ):
            with pytest.raises(ConfigError) as error:
                load()
            assert str(error.value) == f"{tmp_path / 'config.yaml'}: {words}"


def test_an_older_run_with_a_knob_that_is_gone_stays_an_experiment_of_its_own(tmp_path: Path, caplog):
    path = older_run(tmp_path, kl="0.01")
    config = from_yaml(path)
    assert caplog.messages == [f"{path}: policy.kl=0.01 is no longer a setting; new runs ignore it"]
    plain = from_yaml(RESULTS / "own-questions" / "policy-0" / "config.yaml")
    assert experiment(config) != experiment(plain)
    assert differences(config, plain) == {"policy.kl": (0.01, None)}
    path.write_text(to_yaml(config))
    assert from_yaml(path) == config, "saved anew it is the same"
    assert load_config([f"config={path}"]).older == {}, "a new run from that file does without it"


def test_a_removed_setting_cannot_be_typed():
    for typed in ("policy.kl=0.1", "lora.alpha=8", "exploration.blind_steps=3"):
        words = "is no longer a setting: docs/TRAINING.md has those of today"
        assert refused(typed) == f"{typed.partition('=')[0]} {words}"


@pytest.mark.parametrize(
    ("older", "today"),
    [
        (["feedback=true"], ["feedback=own"]),
        (["feedback=true", "feedback_source=other_task"], ["feedback=other_task"]),
        (["world_model.schedule=hierarchical", "world_model.every=3"], ["world_model.schedule=hierarchical:3"]),
        (
            ["world_model.schedule=world_model_first", "world_model.first_steps=3"],
            ["world_model.schedule=world_model_first:3"],
        ),
        (["exploration.blind_steps=3"], ["world_model.schedule=explore_first:3"]),
    ],
)
def test_knobs_that_became_part_of_others(older: list[str], today: list[str], tmp_path: Path):
    """A file of an older version is read as what it meant."""
    tree: dict[str, typing.Any] = {}
    for name, value in (setting.split("=") for setting in older):
        assign(tree, name, yaml.safe_load(value))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    read = load_config([f"config={tmp_path / 'config.yaml'}"])
    assert read == load_config(today) != load_config([])


def test_settings_that_changed_no_weights_are_dropped_without_a_word(tmp_path: Path, caplog):
    file = tmp_path / "config.yaml"
    file.write_text("threads: 4\noptimizer: {separate: true}\n")
    assert load_config([f"config={file}"]) == load_config([])
    assert caplog.messages == []


def test_an_old_run_with_two_schedules_keeps_the_second_apart(tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text("world_model: {schedule: alternating, adaptive_weight: true}\nexploration: {blind_steps: 3}\n")
    config = from_yaml(file)
    assert config.world_model.schedule == "alternating"
    assert config.older == {"world_model": {"adaptive_weight": True}, "exploration": {"blind_steps": 3}}


def test_a_schedule_under_its_old_and_its_new_name_is_one_schedule(tmp_path: Path, caplog):
    text = "world_model: {schedule: 'explore_first:3'}\nexploration: {blind_steps: 3}"
    (tmp_path / "config.yaml").write_text(text)
    assert from_yaml(tmp_path / "config.yaml").older == {}
    assert caplog.messages == []


def test_a_bad_value_beside_a_removed_setting_is_one_sentence(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("lora: {rank: null, alpha: 32}\n")
    with pytest.raises(ConfigError, match=r"lora\.rank must be a valid integer"):
        from_yaml(tmp_path / "config.yaml")


def test_levels_of_another_environment_may_be_anything():
    config = load_config(["env=my.world:World", "env_args.levels=3"])
    assert experiment(config) != experiment(load_config(["env=my.world:World", "env_args.levels=4"]))


def test_what_only_older_runs_have_cannot_be_typed():
    assert "only saved runs of earlier versions" in refused("older.policy.kl=0.1")
    assert "there is no setting 'olderly'; the nearest is" in refused("olderly=3")


def test_every_lookahead_source_has_a_row():
    assert set(typing.get_args(SourceName)) == SOURCES.keys()
