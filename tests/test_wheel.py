"""The wheel: small, complete, and usable from any folder without the repository.

It is built and installed with pip, without a network: required packages come from the environment of the tests, and
nothing comes from the repository.
"""

import json
import os
import re
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parent.parent
MOST_BYTES = 5_000_000
SHORT = (
    *("rollout.prompts=1", "rollout.group_size=4", "rollout.mini_batch_prompts=1", "rollout.max_context=420"),
    *("eval.tasks=1", "eval.every=1", "eval.splits=val", "eval.final_splits=", "world_model.weight=0"),
)
MESSAGES = [
    {
        "role": "system",
        "content": "You make phone calls for your user. Search the company, ask the user once for details, then call.",
    },
    {
        "role": "user",
        "content": "I need the contract end date from Wexkeshal Insurance. Limits: 4 details, 3 calls, 1 failed check.",
    },
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    source = tmp_path_factory.mktemp("source")  # a copy: building leaves files behind
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    command = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(source), str(source))
    subprocess.run([sys.executable, "-m", "pip", *command], check=True)
    (built,) = source.glob("*.whl")
    return built


class Installed:
    """An environment with the wheel in it, and an empty folder to work in."""

    def __init__(self, wheel: Path, folder: Path) -> None:
        self.bin, self.folder = folder / "environment" / "bin", folder / "work"
        self.folder.mkdir()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "environment"], check=True)
        python = str(self.bin / "python")
        pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
        subprocess.run([*pip, str(wheel)], check=True)
        (packages,) = (folder / "environment" / "lib").glob("python*/site-packages")
        # Packages of the tests, but not what an editable install adds: only a site's own folder may add paths.
        lent = [*site.getsitepackages(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        lent = [path for path in lent if path and not (Path(path) / "lfo").exists()]
        (packages / "lent.pth").write_text("\n".join(lent))

    def start(self, *command: str) -> subprocess.Popen[str]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYTEST"))}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            [str(self.bin / command[0]), *command[1:]], cwd=self.folder, env=environment, text=True, **pipes
        )

    def run(self, *command: str) -> str:
        process = self.start(*command)
        out, err = process.communicate()
        assert process.returncode == 0, err
        return out


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory) -> Installed:
    return Installed(wheel, tmp_path_factory.mktemp("installed"))


def test_the_wheel_is_small_and_holds_what_is_no_python(wheel: Path):
    assert wheel.stat().st_size <= MOST_BYTES
    names = set(zipfile.ZipFile(wheel).namelist())
    source = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "lfo").rglob("*") if path.is_file()}
    source = {name for name in source if "__pycache__" not in name}
    assert source <= names
    assert {name for name in names if not name.startswith("lfo/")} == {
        name for name in names if ".dist-info/" in name
    }, "a wheel adds no top-level name but its own: neither benchmarks nor research"


def test_benchmarks_need_the_repository_and_say_so(installed: Installed):
    process = installed.start("lfo", "bench", "step", "--json")
    out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert err == "lfo: lfo bench needs a checkout of the repository; install from there: pip install --editable .\n"


def test_it_is_this_wheel_that_is_used_and_every_preset_is_in_it(installed: Installed):
    program = "import lfo; from lfo.config.presets import PRESETS; from lfo.config import load_config; "
    program += "print(len([load_config([f'preset={name}']) for name in PRESETS]), lfo.__file__)"
    presets, where = installed.run("python", "-c", program).split()
    assert Path(where).is_relative_to(installed.bin.parent)
    assert int(presets) > 3


def test_demo_train_report_and_serve_work_from_an_empty_folder(installed: Installed):
    told = json.loads(installed.run("lfo", "demo", "--steps", "1", "--json", *SHORT))
    assert {Path(run).name for group in told["groups"] for run in group["runs"]} == {"dapo", "dual-lora"}
    page = installed.folder / "runs" / "demo" / "report.html"
    assert "<!doctype html>" in page.read_text(encoding="utf-8")
    assert "own.html: 2 runs" in installed.run("lfo", "report", "runs/demo", "-o", "own.html")

    server = installed.start("lfo", "serve", "runs/demo/dual-lora", "--port", "0")
    try:
        assert server.stdout
        words = server.stdout.readline() + server.stdout.readline()
        found = re.search(r"BASE_URL=(http://127\.0\.0\.1:\d+/v1) \w+_KEY=(\S+)", words)
        assert found, words
        body = {"model": "dual-lora", "messages": MESSAGES, "temperature": 0}
        headers = {"Authorization": f"Bearer {found[2]}"}
        answer = httpx.post(f"{found[1]}/chat/completions", json=body, headers=headers, timeout=60)
        assert answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "search_company"
    finally:
        server.terminate()
        _, words = server.communicate()
    assert "Traceback" not in words
