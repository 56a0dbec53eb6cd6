"""Load what a config names: base model, tokenizer and environment.

torch and transformers are imported late: a wrong name is refused in a second, and they take many to import.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lfo.config import SHIPPED_ENVIRONMENTS, RunConfig
from lfo.env.adapters import ADAPTERS, adapter_class, adapter_word, refuse_code_elsewhere
from lfo.env.by_name import environment_named
from lfo.env.interface import Environment, EnvironmentFactory
from lfo.env.patience import QuietFactory, ask, kept_process_state, naming
from lfo.env.worlds.shipped import SHIPPED
from lfo.errors import ConfigError, EnvironmentFailed, first_line
from lfo.model import catalog
from lfo.model.untrained_tags import untrained_tags, write_as_text
from lfo.settings import did_you_mean

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

EMBEDDED = "tiny"  # for the environments that ship with the package
GENERAL = "general"  # where practice starts in any other environment
PACKAGED = (EMBEDDED, GENERAL)
ONE_THREAD_BELOW = 20_000_000  # parameters: for smaller bases more threads cost more than they save


def model_source(name: str) -> str:
    """Return where transformers finds a model: a base of this package, a fetched model, a folder or a hub id."""
    if name in PACKAGED:
        return str(resources.files("lfo") / "assets" / name)
    if catalog.is_known(name):
        return str(catalog.resolve(name))
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"model={name} is a folder without a config.json; name a folder that holds a model")
        return str(path)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"model={name}: this folder does not exist")
    return name


def refuse_missing_model(name: str) -> None:
    """Raise a `ConfigError` if a base is neither on this machine nor on the hub; its weights are not fetched."""
    source = model_source(name)
    if os.path.isdir(source):
        return
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        if not isinstance(try_to_load_from_cache(source, "config.json"), str):
            get_hf_file_metadata(hf_hub_url(source, "config.json"))  # asks once, unlike a download
    except (HfHubHTTPError, HFValidationError) as error:
        raise ConfigError(f"model={name} cannot be loaded from a folder or the hub: {first_line(error)}") from error
    except Exception as error:  # of the network; its kind depends on the version of the hub's library
        raise ConfigError(
            f"model={name} is no folder and not in the cache, and the hub cannot be reached; name a folder that holds "
            "a model, or try again when there is a network"
        ) from error


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a base; tags on which the base was never trained are ordinary text."""
    from transformers import AutoTokenizer

    tokenizer = _from_hub_or_folder(partial(AutoTokenizer.from_pretrained, trust_remote_code=False), name)
    if tags := untrained_tags(tokenizer, partial(_file_of, model_source(name))):
        write_as_text(tokenizer, tags)
        _say_untrained(name, tuple(tags))
    return tokenizer


@cache  # once in a process
def _say_untrained(name: str, tags: tuple[str, ...]) -> None:
    logger.warning(
        "model=%s was never trained on the tokens %s; they are written as ordinary text", name, ", ".join(tags)
    )


def _file_of(source: str, name: str) -> Path | None:
    """Return where a file of a model is, after fetching it from the hub if need be; None if there is none."""
    if os.path.isdir(source):
        path = Path(source) / name
        return path if path.is_file() else None
    from transformers.utils.hub import cached_file

    found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def load_base(name: str, device: torch.device) -> Any:
    """Load the base model: fp32 on a CPU, bf16 on a GPU; those of this package are always fp32.

    A base is data: no code of its folder is run, and weights in pickles, which could be code, are refused.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    dtype = torch.float32 if device.type == "cpu" or name in PACKAGED else torch.bfloat16
    as_data = {"trust_remote_code": False, "use_safetensors": True}
    return _from_hub_or_folder(partial(AutoModelForCausalLM.from_pretrained, dtype=dtype, **as_data), name).to(device)


def limit_threads(base: Any) -> None:
    """Let this process use one CPU thread if the base is small and OMP_NUM_THREADS is not set."""
    if base.num_parameters() < ONE_THREAD_BELOW and "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(1)


def _from_hub_or_folder(load: Any, name: str) -> Any:
    source = model_source(name)
    try:
        return load(source)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"model={name} cannot be loaded from a folder or the hub: {reason}") from error


def pick_device(name: str) -> torch.device:
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda needs a GPU that torch can use, and this machine has none; set device=cpu")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def environment_factory(config: RunConfig) -> EnvironmentFactory:
    """Return a factory that makes one environment for each rollout; it has made one, to see that it can."""
    made_by = _class_of(config.env)  # checked to be an environment: nothing that only has the name is called
    # The first argument of an adapter is the text after the colon, a name of its library.
    named = [config.env.partition(":")[2]] if adapter_word(config.env) else []
    make_environment = QuietFactory(made_by, *named, **config.env_args)
    try:
        environment = ask(
            make_environment, timeout=config.rollout.environment_timeout, what=f"the constructor of {config.env}"
        )
    except EnvironmentFailed as error:
        if isinstance(error.__cause__, TypeError):
            raise ConfigError(
                f"env={config.env} cannot be made with env_args={dict(config.env_args)}: {error.__cause__}"
            ) from error
        raise
    if not isinstance(environment, Environment):
        raise ConfigError(f"env={config.env} is not an environment: it needs the methods tasks, tools, reset and step")
    return cast(EnvironmentFactory, make_environment)


def environment_of_run(config: RunConfig) -> EnvironmentFactory:
    """`environment_factory` for the config of a run folder, which may be a stranger's."""
    refuse_code_elsewhere(config.env, config.env_args)
    return environment_factory(config)


def naming_environment(config: RunConfig, make_environment: EnvironmentFactory) -> RunConfig:
    """Return the config with `env` and `env_args` of this factory, so that the run folder names its environment."""
    factory = make_environment if isinstance(make_environment, partial) else partial(make_environment)
    name = config.env
    made = ask(make_environment, timeout=config.rollout.environment_timeout)
    spec = getattr(made, "spec", "")  # set by our adapters; elsewhere it may mean something else
    if isinstance(spec, str) and adapter_word(spec):
        name = spec
    elif factory.func is not _class_of(config.env):
        kind = type(made)
        name = next(
            (each for each, known in SHIPPED.items() if kind is known.made_by), f"{kind.__module__}:{kind.__name__}"
        )
        if name == config.env:
            return config  # the factory is a function that makes the environment of the config
    # Arguments that were not passed would get the values of the config when it is read back.
    arguments = {key: getattr(made, key) for key in SHIPPED_ENVIRONMENTS.get(name, {})} | factory.keywords
    # The saved config has no tuples, so compare with lists.
    arguments = {key: list(value) if isinstance(value, tuple) else value for key, value in arguments.items()}
    named = dataclasses.replace(config, env=name, env_args=arguments)
    return config if named == config else named


def _class_of(name: str) -> Any:
    if name in SHIPPED:
        return SHIPPED[name].made_by
    # Modules may print, change defaults and even leave while they are imported.
    with kept_process_state(), naming(f"the module of env={name}"):
        if adapter_word(name):
            return adapter_class(name)
        return environment_named(name, hint=did_you_mean(name.partition(":")[0], (*ADAPTERS, *_modules_here())))


def _modules_here() -> list[str]:
    return [file.stem for file in sorted(Path().glob("*.py"))]
