"""Loading by name: every wrong name exits with 2 and one sentence."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from lfo.cli import main
from lfo.config import load_config
from lfo.env.worlds.oracle import OracleCodes
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.errors import ConfigError
from lfo.loading import (
    PACKAGED,
    environment_factory,
    limit_threads,
    load_base,
    load_tokenizer,
    model_source,
    naming_environment,
    pick_device,
)
from lfo.types import ToolCall


class NoEnvironment:
    def tasks(self, split: str) -> list:
        return []


class Empty(OracleCodes):
    """An environment that has nothing to do."""

    def tasks(self, split: str) -> list:
        return []


class Unimaginative(PhoneCalls):
    """An environment that names no call to look ahead to."""

    lookahead_query = None  # type: ignore[assignment]


class Undescribed(PhoneCalls):
    """An environment that does not say what its replies mean."""

    describe_reply = None  # type: ignore[assignment]


class Dreamer(PhoneCalls):
    def lookahead_query(self, transcript):
        return ToolCall(name="fly", arguments={})


class Mistaken(OracleCodes):
    predicted_tools = ("door",)


class Nameless(OracleCodes):
    def tasks(self, split: str) -> list:
        return [{"goal": "open the door"}]


class Generous(OracleCodes):
    def tasks(self, split: str):
        yield from super().tasks(split)


class Terse(OracleCodes):
    def start(self, task):
        return "Open the door."  # type: ignore[return-value]


class Lost(OracleCodes):
    """An environment that answers an unknown split as a dictionary does."""

    def tasks(self, split: str) -> list:
        raise KeyError(split)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["lora.rnak=3"], "there is no setting 'lora.rnak'; the nearest is lora.rank"),
        (["steps=many"], "steps must be a valid integer, not 'many'"),
        (["lora.rank=0"], "lora.rank must be greater than or equal to 1, not 0"),
        (["rollout.mini_batch_prompts=3"], "must divide rollout.prompts"),
        (["model=./nowhere"], "model=./nowhere: this folder does not exist"),
        (["model=/nowhere/at/all"], "this folder does not exist"),
        (["env=no_such_module:World"], "env=no_such_module:World cannot be imported"),
        (["env=lfo.env.worlds.oracle:Oracle"], "the module lfo.env.worlds.oracle has no Oracle"),
        (
            ["env=test_loading:NoEnvironment"],
            "is not an environment: it needs the methods tasks, tools, reset and step",
        ),
        (["env=oracle-codes", "env_args.sead=1"], "env=oracle-codes cannot be made with env_args={'sead': 1}"),
        (["levels=0"], "levels must be some of [1, 2, 3, 4, 5, 6], each once, not [0]"),
        (["levels=2,7"], "levels must be some of [1, 2, 3, 4, 5, 6], each once, not [2, 7]"),
        (["levels="], "levels must be some of [1, 2, 3, 4, 5, 6], each once, not []"),
        (["levels=2,2"], "levels must be some of [1, 2, 3, 4, 5, 6], each once, not [2, 2]"),
        (["env=oracle-codes", "levels=2"], "cannot be made with env_args={'levels': [2]}"),
        (
            ["world_model.predict=make_fone_call"],
            "no tool 'make_fone_call'; the nearest is make_phone_call",
        ),
        (
            ["env=oracle-codes", "world_model.predict=open_door,phone"],
            "OracleCodes has no tool 'phone'",
        ),
        (["env=test_loading:Mistaken"], "world_model.predict=default: the environment Mistaken has no tool 'door'"),
        (["env=test_loading:Nameless"], "each task needs an attribute id, which dict does not have"),
        (["env=test_loading:Generous"], "tasks() must return a sequence, such as a list"),
        (["env=test_loading:Terse"], "must return a list of Message"),
        (["env=test_loading:Dreamer"], "lookahead_query of Dreamer must name one of its tools, not 'fly'"),
        (["env=test_loading:Lost"], "the environment Lost has no split 'train'"),
        (["env=test_loading:Empty"], "the environment Empty has no tasks in its split 'train'"),
        (["eval.splits=exam"], "There is no split 'exam'"),
        (["init_from=nowhere"], "nowhere has no adapters"),
        (["world_model.input=inline", "coupling=separate"], "needs coupling=shared"),
        (["lora.targets=w_proj"], "do not fit this model"),
    ],
)
def test_a_bad_setting_is_exit_2_and_one_sentence(settings, words, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lfo", "train", "preset=tiny", *settings, f"output_dir={tmp_path / 'run'}"])
    with pytest.raises(SystemExit) as exit_:
        main()
    out, err = capsys.readouterr()
    assert exit_.value.code == 2
    assert words in err
    assert err.startswith("lfo: ")
    assert err.count("\n") == 1
    assert out == ""


ODD_TOOL = """
from lfo.env.tool_environment import ToolEnvironment, tool

class World(ToolEnvironment):
    @tool
    def look(self, where: set[str]) -> str:
        'Look.'
"""


@pytest.mark.parametrize(
    ("module", "code", "words"),
    [
        ("odd_hint", ODD_TOOL, r"TypeError: class World: tool look: .* set\[str\]; supported are str, int"),
        ("odd_name", "import sys; sys.nowhere", "AttributeError: module 'sys' has no attribute 'nowhere'"),
        ("odd_syntax", "class World(", "SyntaxError: "),
    ],
)
def test_a_module_that_cannot_be_imported_is_a_config_error(module, code, words, tmp_path: Path, monkeypatch):
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"env={module}:World cannot be imported: {words}"):
        environment_factory(load_config([f"env={module}:World"]))


def test_the_embedded_base_is_a_name_of_its_own_and_folders_are_folders(tmp_path: Path):
    for name in PACKAGED:
        assert (Path(model_source(name)) / "config.json").is_file()
    assert model_source("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    with pytest.raises(ConfigError, match=r"a folder without a config\.json"):
        model_source(str(tmp_path))


def test_a_damaged_model_folder_is_a_config_error(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    for load in (load_tokenizer, lambda name: load_base(name, torch.device("cpu"))):
        with pytest.raises(ConfigError, match="cannot be loaded"):
            load(str(tmp_path))


def test_a_saved_base_loads_from_its_folder(tmp_path: Path):
    base, tokenizer = load_base("tiny", torch.device("cpu")), load_tokenizer("tiny")
    base.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = load_base(str(tmp_path), torch.device("cpu"))
    ids = torch.tensor([tokenizer.encode("Search the company.")])
    assert torch.equal(again(ids).logits, base(ids).logits)
    assert load_tokenizer(str(tmp_path)).get_vocab() == tokenizer.get_vocab()
    assert {parameter.dtype for parameter in again.parameters()} == {torch.float32}


@pytest.mark.parametrize(("variable", "threads"), [(None, 1), ("2", 2)])
def test_a_small_base_runs_on_one_thread_unless_the_user_says_otherwise(
    monkeypatch, variable: str | None, threads: int
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        limit_threads(load_base("tiny", torch.device("cpu")))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_a_run_names_the_environment_that_it_was_given():
    """So that its folder can be evaluated later, by name alone."""
    config = load_config([])
    assert naming_environment(config, environment_factory(config)) is config
    assert naming_environment(config, lambda: PhoneCalls(levels=(3,))) is config
    assert naming_environment(config, Empty).env == "test_loading:Empty"
    named = naming_environment(config, partial(OracleCodes, seed=7))
    assert (named.env, named.env_args) == ("oracle-codes", {"seed": 7})
    assert environment_factory(named)().seed == 7  # type: ignore[attr-defined]
    other = naming_environment(config, partial(PhoneCalls, levels=(3,), seed=7))
    assert (other.env, other.env_args) == ("phone-calls", {"levels": [3], "seed": 7})
    everything = naming_environment(config, PhoneCalls)
    assert everything.env_args == {"levels": [1, 2, 3, 4, 5]}, "whoever names no levels plays them all"
    own_name = load_config(["env=lfo.env.worlds.oracle:OracleCodes", "env_args.seed=7"])
    assert naming_environment(own_name, environment_factory(own_name)) is own_name


def test_environments_by_name():
    assert isinstance(environment_factory(load_config(["levels=3,4"]))(), PhoneCalls)
    assert environment_factory(load_config(["levels=3,4"]))().levels == (3, 4)  # type: ignore[attr-defined]
    seeded = load_config(["env=lfo.env.worlds.oracle:OracleCodes", "env_args.seed=7"])
    assert environment_factory(seeded)().seed == 7  # type: ignore[attr-defined]


def test_a_module_in_the_current_folder_is_found(tmp_path: Path, monkeypatch):
    (tmp_path / "own_worlds").mkdir()
    (tmp_path / "own_worlds" / "doors.py").write_text("from lfo.env.worlds.oracle import OracleCodes as Doors\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    config = load_config(["env=own_worlds.doors:Doors"])
    with pytest.raises(ConfigError, match="cannot be imported"):
        environment_factory(config)
    monkeypatch.chdir(tmp_path)
    assert isinstance(environment_factory(config)(), OracleCodes)


def test_what_an_environment_prints_while_it_is_made_is_no_output_of_ours(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "loud_world.py").write_text(
        "from lfo.env.worlds.oracle import OracleCodes\n"
        "print('imported')\n"
        "class Loud(OracleCodes):\n"
        "    def __init__(self, seed: int = 0):\n"
        "        print('made')\n"
        "        super().__init__(seed=seed)\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    config = load_config(["env=loud_world:Loud", "env_args.seed=7"])
    make_environment = environment_factory(config)
    assert make_environment().seed == 7  # type: ignore[attr-defined]
    assert naming_environment(config, make_environment) == config
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[:3]) == ("", ["imported", "made", "made"])


def test_a_gpu_that_is_not_there_is_a_config_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="needs a GPU"):
        pick_device("cuda")


def test_a_missing_module_of_an_installed_package_names_its_folder():
    """A folder without __init__.py loses against an installed package of its name, and the user must see which won."""
    with pytest.raises(ConfigError, match=r"No module named 'yaml\.worlds'; Python found the package yaml in .*yaml"):
        environment_factory(load_config(["env=yaml.worlds:World"]))
