"""A run folder is data: what its config names is called only if it is an environment, and no code in it is run.

`scripts/breaking/folders.py` opens such folders with every command, each in its own process.
"""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
import yaml

from lfo.agent import load_agent, load_models, saved_config
from lfo.cli import main
from lfo.config import load_config, to_yaml
from lfo.env import by_name
from lfo.env.by_name import hold_as_data
from lfo.env.interface import MARK, Environment, makes_environments
from lfo.env.worlds.oracle import OracleCodes
from lfo.errors import ConfigError, UsageError
from lfo.loading import environment_factory, load_base, load_tokenizer, model_source, naming_environment
from lfo.model.adapters import DualAdapterModel
from lfo.runs.folder import RunDirectory
from lfo.serving.speaker import upstream_speaker
from lfo.settings import MOST_CHARACTERS, read_yaml
from lfo.types import ReplyFacts

HERE = __name__
called: list[Any] = []  # what has been called that must not be


class Deploy:
    """A class that does something as soon as it is made."""

    def __init__(self, **arguments: Any) -> None:
        called.append(arguments)

    def __call__(self) -> Any:
        return OracleCodes()


class LateMethods(Deploy):
    """Its objects have the methods of an environment, but nobody can know before one is made."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks = self.tools = self.reset = self.step = lambda *_: None


class Agreeable:
    """Answers to every name, as mocks and proxies do."""

    def __getattr__(self, name: str) -> Any:
        return True if name == MARK else self

    def __call__(self, **arguments: Any) -> Any:
        called.append(arguments)
        return OracleCodes()


agreeable, deploying = Agreeable(), partial(Deploy, deep=True)
codes_of_seven = partial(OracleCodes, seed=7)


def unmarked(**arguments: Any) -> OracleCodes:
    called.append(arguments)
    return OracleCodes()


@makes_environments
def marked(seed: int = 0) -> OracleCodes:
    return OracleCodes(seed=seed)


class Judged(OracleCodes):
    """Not a shipped environment; it says what replies mean."""

    @staticmethod
    def describe_reply(observation: str) -> ReplyFacts | None:
        return ReplyFacts(category="judged")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Each test has its own imports, its own runs that are held as data, and nothing called."""
    monkeypatch.setattr(by_name, "_held", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    called.clear()
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("evil", "good", "runs", "leaver", "lean"):
            del sys.modules[name]


def made_by(env: str, **env_args: Any) -> Environment:
    return environment_factory(load_config([f"env={env}", f"env_args={json.dumps(env_args)}"]))()


# --- what is called ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ("os:system", "os is a module of Python itself"),
        ("builtins:exec", "builtins is a module of Python itself"),
        ("numpy:savetxt", "this is a function"),
        (f"{HERE}:unmarked", "mark a function of your own that makes one with @makes_environments"),
        (f"{HERE}:Deploy", "this class has no tasks and no tools and no reset and no step"),
        (f"{HERE}:LateMethods", "this class has no tasks"),
        (f"{HERE}:deploying", "this class has no tasks"),
        (f"{HERE}:agreeable", "this is an object of type Agreeable"),
        (f"{HERE}:HERE", "this is an object of type str"),
        ("lfo.env.worlds:oracle", "this is an object of type module"),
        (f"gymnasium:lfo.env.gym:lfo/PhoneCalls-v0,factory={HERE}:unmarked", "this is a function"),
    ],
)
def test_what_is_no_environment_is_never_called(env: str, words: str, tmp_path: Path):
    canary = tmp_path / "canary"
    env, _, factory = env.partition(",factory=")
    arguments = {"factory": factory} if factory else {"fname": str(canary), "command": f"touch {canary}"}
    with pytest.raises(ConfigError, match=words) as raised:
        made_by(env, **arguments)
    assert f"env={env}" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not called
    assert not canary.exists()


def test_gymnasium_makes_only_environments():
    with pytest.raises(ConfigError, match=f"factory={HERE}:unmarked is not an environment"):
        gymnasium.make("lfo.env.gym:lfo/OracleCodes-v0", factory=f"{HERE}:unmarked")
    assert not called


@pytest.mark.parametrize("name", ["antigravity:fly", "gymnasium:antigravity:World-v0"])
def test_pythons_own_modules_are_not_even_imported(name: str):
    """Some act when they are imported: this one opens a browser."""
    with pytest.raises(ConfigError, match="antigravity is a module of Python itself, which has no environments"):
        made_by(name)
    assert "antigravity" not in sys.modules


def test_a_module_of_the_project_may_have_the_name_of_a_test_of_pythons(tmp_path: Path, monkeypatch):
    (tmp_path / "this.py").write_text("from lfo.env.worlds.oracle import OracleCodes as World\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "this", raising=False)
    assert isinstance(made_by("this:World"), OracleCodes)
    monkeypatch.delitem(sys.modules, "this")


def test_a_module_that_ends_the_process_is_a_config_error(tmp_path: Path, monkeypatch):
    (tmp_path / "leaver.py").write_text("raise SystemExit(0)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="env=leaver:World cannot be imported: SystemExit: 0"):
        made_by("leaver:World")


def test_classes_classes_with_arguments_and_marked_functions_are_environments():
    assert isinstance(made_by(f"{HERE}:Judged"), Judged)
    assert made_by(f"{HERE}:codes_of_seven").seed == 7  # type: ignore[attr-defined]
    assert made_by(f"{HERE}:marked", seed=3).seed == 3  # type: ignore[attr-defined]
    config = load_config([f"env={HERE}:marked", 'env_args={"seed": 3}'])
    assert naming_environment(config, environment_factory(config)) is config, "the saved run names the function"
    assert makes_environments(marked) is marked


# --- modules of run folders -------------------------------------------------------------------------------------------

EVIL = "import test_hostile_folders\ntest_hostile_folders.called.append(__name__)\n"
WORLD = EVIL + "from lfo.env.worlds.oracle import OracleCodes as World\n"


@pytest.fixture
def run(tmp_path: Path, monkeypatch) -> Path:
    """A run folder with modules, below the current folder; no test has read it yet."""
    run = tmp_path / "runs" / "hostile"
    (run / "evil_package").mkdir(parents=True)
    for name in ("evil.py", "evil_package/__init__.py", "evil_package/world.py", "lean.py"):
        (run / name).write_text(WORLD)
    (run / "config.yaml").write_text(to_yaml(load_config(["preset=tiny"])))
    monkeypatch.chdir(tmp_path)
    return run


def refused(env: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        made_by(env)
    assert f"env={env}" in str(raised.value)
    assert not called


@pytest.mark.parametrize("env", ["runs.hostile.evil:World", "runs.hostile.evil_package.world:World"])
@pytest.mark.parametrize("adapter", ["", "gymnasium:"])
def test_a_module_below_a_run_is_refused_before_it_is_executed(run: Path, adapter: str, env: str):
    hold_as_data(Path("runs/hostile"))
    refused(adapter + env, "lies in the run folder runs/hostile, and a run folder is data, not code; if you trust")


def test_a_package_in_which_the_run_lies_is_not_executed_if_it_is_of_the_run(run: Path):
    (run / "__init__.py").write_text(EVIL)
    hold_as_data(run)
    refused("runs.hostile.evil:World", "__init__.py lies in the run folder")


def test_a_run_in_the_path_of_modules_has_none(run: Path, monkeypatch):
    monkeypatch.syspath_prepend(run)
    hold_as_data(run)
    refused("evil:World", "evil.py lies in the run folder")


@pytest.mark.parametrize("inside", [".", "evil_package"])
def test_the_current_folder_is_none_of_modules_if_it_lies_in_a_run(run: Path, inside: str, monkeypatch):
    monkeypatch.chdir(run / inside)
    hold_as_data(Path(".") if inside == "." else Path(".."))
    refused("evil:World" if inside == "." else "world:World", "the current folder lies in the run folder")
    assert str(Path.cwd()) not in sys.path, "or a file of the run could stand in for an installed module"


@pytest.mark.parametrize("links_to_run", [True, False])
def test_links_do_not_hide_a_run(run: Path, links_to_run: bool, tmp_path: Path, monkeypatch):
    if links_to_run:
        (tmp_path / "good").symlink_to(run)
    else:  # the run has a link to a module of ours
        (tmp_path / "good.py").write_text(WORLD)
        (run / "evil.py").unlink()
        (run / "evil.py").symlink_to(tmp_path / "good.py")
    hold_as_data(run)
    refused("good.evil:World" if links_to_run else "runs.hostile.evil:World", "lies in the run folder")


def test_a_verl_project_in_a_run_or_around_it_gives_no_code_of_the_run(run: Path, tmp_path: Path):
    pytest.importorskip("verl")
    (run / "evil.py").write_text(EVIL + "# @function_tool\ndef compute_score(**_): return 0\n")
    (run / "tools.yaml").write_text("tools:\n- class_name: runs.hostile.evil.Tool\n")
    hold_as_data(run)
    refused(f"verl:{run}", "lies in the run folder")
    refused("verl:.", "has neither a YAML file with tools: nor a Python file")
    (tmp_path / "tools.yaml").write_text("tools: []\n")
    (tmp_path / "score.py").write_text("def compute_score(**_): return 0\n")
    with pytest.raises(ConfigError, match="lies in the run folder"):
        made_by("lfo.env.adapters.verl_project:LibraryEnvironment", name=".", reward="runs/hostile/evil.py")
    assert not called


@pytest.mark.parametrize(
    ("env", "env_args"),
    [
        ("verl:PROJECT", {}),
        ("verl:.", {"reward": "PROJECT/score.py"}),
        ("lfo.env.adapters.verl_project:LibraryEnvironment", {"name": "PROJECT"}),
    ],
)
def test_a_run_names_no_verl_project_outside_of_the_current_folder(
    env: str, env_args: dict[str, str], tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    project = tmp_path.with_name(f"{tmp_path.name}-beside")
    project.mkdir()
    (project / "score.py").write_text(EVIL + "# @function_tool\ndef compute_score(**_): return 0\n")
    env = env.replace("PROJECT", str(project))
    env_args = {name: value.replace("PROJECT", str(project)) for name, value in env_args.items()}
    run = write_run(tmp_path / "runs" / "hostile", "oracle-codes")
    tree = {**yaml.safe_load((run / "config.yaml").read_text()), "env": env, "env_args": env_args}
    (run / "config.yaml").write_text(json.dumps(tree))
    words = rf"of a run names {project}.*, which is code outside of the current folder"
    for load in (
        lambda: load_agent(run, device="cpu"),
        lambda: upstream_speaker(run, "http://127.0.0.1:9/v1"),
        lambda: load_config([], run=run),
        lambda: load_config([f"config={run / 'config.yaml'}"]),
    ):
        with pytest.raises(ConfigError, match=words):
            load()
    assert load_config([f"env={env}"], run=run).env == env, "typed again"
    assert not called


def test_whoever_reads_the_config_of_a_run_holds_it_as_data(run: Path, monkeypatch):
    (run / "metrics.jsonl").write_text("")
    for read in (
        lambda: saved_config(run),
        lambda: load_config([], run=run),
        lambda: load_config([f"config={run / 'config.yaml'}"]),
    ):
        monkeypatch.setattr(by_name, "_held", {})
        read()
        refused("runs.hostile.evil:World", "lies in the run folder")


def test_a_project_is_not_a_run(tmp_path: Path, monkeypatch):
    """`lfo init` writes config.yaml beside the module that it names."""
    (tmp_path / "good.py").write_text("from lfo.env.worlds.oracle import OracleCodes as World\n")
    (tmp_path / "config.yaml").write_text("env: good:World\noutput_dir: runs/${algo}\n")
    monkeypatch.chdir(tmp_path)
    config = load_config(["config=config.yaml"])
    assert config.output_dir == "runs/dual-lora"
    assert isinstance(environment_factory(config)(), OracleCodes)


# --- reading without an environment -----------------------------------------------------------------------------------


VAL = {"tasks": 5, "fingerprint": "0", "ceiling": None}


def write_run(run: Path, env: str) -> Path:
    """Write a small run with adapters and a kept rollout of the oracle's world, without training it."""
    config = load_config(["preset=tiny", f"env={env}", "lora.rank=1", "env_args={}", f"output_dir={run}"])
    DualAdapterModel.of_run(load_base("tiny", torch.device("cpu")), config).save(run / "adapters")
    (run / "config.yaml").write_text(to_yaml(config))
    (run / "metrics.jsonl").write_text('{"step": 0, "tasks_seen": 0, "eval/val/success": 0.5}\n' * 2)
    (run / "data.json").write_text(
        json.dumps({"environment": env, "levels": [], "splits": {"val": VAL}, "predicted_tools": ["open_door"]})
    )
    action = '<tool_call>{"name": "%s", "arguments": {}}</tool_call>'
    turns = [
        {"action": action % "ask_oracle", "observation": "The oracle of the north.", "category": "introduction"},
        {"action": action % "open_door", "observation": "It stays shut.", "category": "refusal", "facts": ["ash"]},
    ]
    (run / "rollouts").mkdir()
    rollout = {"task_id": "1", "opening": [{"role": "user", "content": "Open the door."}], "turns": turns}
    (run / "rollouts" / "step-000001.jsonl").write_text(json.dumps(rollout) + "\n")
    return run


@pytest.fixture
def lfo(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lfo", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return run


@pytest.mark.parametrize(
    "command",
    [
        ("inspect", "RUN", "--device", "cpu"),
        ("export", "RUN", "--out", "OUT"),
        ("report", "RUN", "-o", "OUT"),
        ("compare", "RUN"),
        ("advise", "RUN"),
    ],
)
def test_commands_that_read_a_run_import_and_make_no_environment(command, lfo, tmp_path: Path):
    run = write_run(tmp_path / "run", f"{HERE}:Deploy")
    words = {"RUN": run, "OUT": tmp_path / "out"}
    code, _, err = lfo(*(words.get(word, word) for word in command))
    assert (code, err) == (0, "")
    assert not called


@pytest.mark.parametrize("command", ["eval", "run", "rollouts", "probe", "serve", "inspect", "train"])
def test_commands_that_act_say_what_the_run_names(command: str, lfo, tmp_path: Path):
    run = write_run(tmp_path / "run", f"{HERE}:Deploy")
    cases = tmp_path / "cases.yaml"
    cases.write_text("cases:\n- {name: a, task: b, call: open_door, expect: {reply: c}}\n")
    options = {"probe": ("--cases", cases), "inspect": ("--judge",)}.get(command, ())
    code, out, err = lfo(command, *(("--resume",) if command == "train" else ()), run, *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"lfo: env={HERE}:Deploy is not an environment")
    assert not called


def test_models_are_loaded_without_the_environment_and_predict_the_same(tmp_path: Path):
    run = write_run(tmp_path / "run", "oracle-codes")
    alone, whole = load_models(run, device="cpu"), load_agent(run, device="cpu")
    prompts = [whole.tokenizer.encode(text) for text in ("Open the door.", "The oracle of the north says")]
    assert alone.complete(prompts) == whole.complete(prompts)
    with pytest.raises(UsageError, match="loaded without its environment"):
        alone.tasks("val")


def test_inspect_describes_replies_as_the_file_does_and_judges_where_it_can(lfo, tmp_path: Path):
    """What a reply means needs no environment in a shipped world, and in another one it is asked for with --judge."""
    shown = {}
    for env in ("oracle-codes", f"{HERE}:Judged"):
        run = write_run(tmp_path / env.partition(":")[2], env)
        for options in ((), ("--judge",)):
            code, out, err = lfo("inspect", run, "--json", "--device", "cpu", *options)
            assert (code, err) == (0, "")
            shown[env, options] = json.loads(out)["replies"]
    assert shown["oracle-codes", ()] == shown["oracle-codes", ("--judge",)]
    (reply,) = shown["oracle-codes", ()]
    assert (reply["actual"], reply["category"]) == ("It stays shut.", "refusal")
    assert reply["same_meaning"] is not None
    alone, judged = shown[f"{HERE}:Judged", ()][0], shown[f"{HERE}:Judged", ("--judge",)][0]
    assert alone | {"same_meaning": True} == judged
    assert alone["same_meaning"] is None


# --- configs ----------------------------------------------------------------------------------------------------------

LEVELS = [(f"l{number}", f"l{number + 1}", ", ".join([f"*l{number}"] * 10)) for number in range(9)]
ALIASES = "".join(f"  {after}: &{after} [{ten}]\n" for _, after, ten in LEVELS)
MERGED = "".join(f"  {after}: &{after} {{<<: [{ten}]}}\n" for _, after, ten in LEVELS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("env_args:\n  l0: &l0 [1]\n" + ALIASES, "repeats too much by aliases"),
        ("env_args:\n  l0: &l0 {x: 1}\n" + MERGED, "repeats too much by aliases"),
        ("env_args: &a\n  again: *a\n", "repeats too much by aliases"),
        (f"env_args:\n  a: &a {'x' * 50_000}\n  b: [*a, *a]\n", "repeats too much by aliases"),
        ("seed: 0 #" + MOST_CHARACTERS * "x", "is too long: it must have at most 100,000 bytes"),
        ("env_args: " + 1_000 * "{a: " + 1_000 * "}", "is nested too deeply"),
        ("env_args: " + 1_000 * "[" + 1_000 * "]", "is nested too deeply"),
        (f"seed: {9_000 * '9'}", "is not valid YAML"),
        ("seed: \x00", "is not valid YAML"),
        ("seed: !!python/object/apply:os.system ['true']", "line 1 is not valid YAML"),
    ],
)
def test_a_config_that_would_fill_the_memory_is_refused(text: str, words: str, tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as raised:
        read_yaml(path)
    assert str(path) in str(raised.value)


def test_a_config_may_use_aliases(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text("rollout: &mine\n  prompts: 8\neval:\n  <<: *mine\n  tasks: 3\nlist: [*mine, *mine]\n")
    assert read_yaml(path)["eval"] == {"prompts": 8, "tasks": 3}


def test_a_saved_config_cannot_ask_for_the_environment_variables_of_its_reader(run: Path, monkeypatch, lfo):
    monkeypatch.setenv("LFO_TEST_SECRET", "s3cret")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(
        text.replace("env: phone-calls", 'env: "openenv:http://x/\\x24{oc.env:LFO_TEST_SECRET}"')
    )
    for command in (("eval", run), ("train", "--resume", run), ("export", run, "--out", "out"), ("advise", run)):
        code, out, err = lfo(*command)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"{run / 'config.yaml'} contains ${{...}}" in err
        assert "s3cret" not in err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("actor_rollout_ref.actor._target_", "os.system"),
        ("global_profiler.finish_hook_cmd", "reboot"),
        ("actor_rollout_ref.model.trust_remote_code", True),
        ("ray_kwargs.ray_init.runtime_env.pip", ["package"]),
        ("ray_kwargs.ray_init.address", "10.0.0.1:6379"),
        ("data.custom_cls.path", "evil.py"),
    ],
)
def test_what_verl_would_run_for_a_saved_config_must_be_typed_again(run: Path, name: str, value: Any):
    plain = ["engine=verl", "verl.trainer.nnodes=2", "verl.actor_rollout_ref.rollout.name=vllm", "verl.data.x=[1, 0.5]"]
    typed = f"verl.{name}={json.dumps(value)}"
    (run / "config.yaml").write_text(to_yaml(load_config([*plain, typed])))
    with pytest.raises(
        ConfigError, match=f"verl.{name}=.* may name code, a command or a machine; if you trust it, type"
    ):
        load_config([], run=run)
    assert load_config([typed], run=run) == load_config([*plain, typed])
    (run / "config.yaml").write_text(to_yaml(load_config(plain)))
    assert load_config([], run=run) == load_config(plain)


# --- models -----------------------------------------------------------------------------------------------------------


def test_a_base_is_data_too(tmp_path: Path):
    """No pickle is loaded, and no code that comes with a model is run or offered to be run."""
    model = tmp_path / "model"
    shutil.copytree(model_source("tiny"), model)
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Deploy()))
    called.clear()
    with pytest.raises(ConfigError, match=r"no file named model\.safetensors"):
        load_base(str(model), torch.device("cpu"))
    for file, change in (
        ("config.json", {"auto_map": {"AutoConfig": "evil.World"}, "model_type": "evil"}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.World", None]}, "tokenizer_class": "Evil"}),
    ):
        tree = json.loads((model / file).read_text())
        (model / file).write_text(json.dumps(tree | change))
    (model / "evil.py").write_text(WORLD)
    for load in (lambda: load_base(str(model), torch.device("cpu")), lambda: load_tokenizer(str(model))):
        with pytest.raises(ConfigError, match="contains custom code"):
            load()
    assert not called


def test_a_chat_template_has_no_way_out_of_its_sandbox(tmp_path: Path):
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = "{{ messages.__class__.__mro__[-1].__subclasses__() }}"
    with pytest.raises(Exception, match="access to attribute '__class__' of 'list' object is unsafe"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)


# --- what is written --------------------------------------------------------------------------------------------------


def empty_run(path: Path) -> Any:
    config = load_config(["preset=tiny", f"output_dir={path}"])
    RunDirectory.create(path, config).close()
    return config


@pytest.mark.parametrize(
    "name", [".lock", "metrics.jsonl", "data.json", "config.yaml", "checkpoints", "rollouts", "checkpoints/step-000001"]
)
@pytest.mark.parametrize("exists", [True, False])
def test_a_run_with_a_link_is_not_continued(name: str, exists: bool, tmp_path: Path):
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    config = empty_run(run)
    folder = not Path(name).suffix and name != ".lock"
    elsewhere.mkdir()
    if exists and folder:
        (elsewhere / "target" / "step-000009").mkdir(parents=True)
    elif exists:
        shutil.copy(run / "config.yaml", elsewhere / "target")
    elif name == "config.yaml":
        pytest.skip("no run without a config")
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(elsewhere / "target")
    before = {path: path.is_dir() or path.read_bytes() for path in elsewhere.rglob("*")}
    with pytest.raises(UsageError, match=f"{name} is a symbolic link"):
        RunDirectory.create(run, config, resume=True)
    assert {path: path.is_dir() or path.read_bytes() for path in elsewhere.rglob("*")} == before


def test_a_lock_that_is_none_is_not_written_into(tmp_path: Path):
    run = tmp_path / "run"
    config = empty_run(run)
    (run / ".lock").write_text("precious\n")
    with pytest.raises(UsageError, match=r"\.lock is not a lock of ours: it holds something else"):
        RunDirectory.create(run, config, resume=True)
    assert (run / ".lock").read_text() == "precious\n"
    (run / ".lock").unlink()
    (run / ".lock").mkdir()
    with pytest.raises(UsageError, match=r"\.lock is not a lock of ours but a folder"):
        RunDirectory.create(run, config, resume=True)


def test_only_our_own_leftovers_are_removed(tmp_path: Path):
    run = tmp_path / "run"
    config = empty_run(run)
    theirs = [".cache.tmp/thesis", ".notes.1.tmp", "checkpoints/.mine.tmp/weights", "rollouts/.step-1.tmp"]
    ours = [".config.yaml.1.tmp", "checkpoints/.step-000001.1.tmp/half", "rollouts/.step-000010.jsonl.1.tmp"]
    ours += [".adapters.replaced.1.tmp/policy/weights", "checkpoints/.last.1.tmp", ".data.json.1.tmp"]
    for name in (*theirs, *ours):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("x")
    RunDirectory.create(run, config, resume=True).close()
    assert [name for name in (*theirs, *ours) if (run / name).exists()] == theirs
    (tmp_path / "other" / ".cache.tmp").mkdir(parents=True)
    with pytest.raises(UsageError, match="is not empty"):
        RunDirectory.create(tmp_path / "other", config)


@pytest.mark.parametrize("command", [("init", "new/.."), ("export", "RUN", "--out", "new/..")])
def test_a_detour_into_a_full_folder_is_refused_and_nothing_is_touched(command, lfo, tmp_path: Path, monkeypatch):
    run = write_run(tmp_path / "run", f"{HERE}:Judged") if "RUN" in command else tmp_path
    desk = tmp_path / "desk"
    desk.mkdir()
    (desk / "world.py").write_text("precious\n")
    monkeypatch.chdir(desk)
    code, out, err = lfo(*(run if word == "RUN" else word for word in command))
    assert (code, out) == (2, "")
    assert "new/.. already exists and is not empty" in err
    assert {path.name: path.read_text() for path in desk.iterdir()} == {"world.py": "precious\n"}
