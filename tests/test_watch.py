"""`lfo watch`: a page that follows its runs, needs the token, and never changes them."""

import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import Browser, Page, executable
from lfo.cli.watch import has_display
from lfo.config import load_config
from lfo.errors import UsageError
from lfo.report import live
from lfo.report.machine import Machine, process_of, read_gpus
from lfo.report.watch import LivePage
from lfo.runs.folder import RunDirectory
from lfo.runs.reading import read_run
from made_runs import prediction, rollout, world_model_row, write_run

HOSTILE = "<img src=x onerror='window.attacked = 1'></script><script>window.attacked = 2</script>\u202e"
needs_browser = pytest.mark.skipif(executable() is None, reason="there is no Chromium; see scripts/install_browser.sh")


def some_runs(folder: Path) -> Path:
    """A finished run and one at step 20 of 60 that worries."""
    write_run(folder / "dapo", "algo=dapo", steps=20)
    write_run(
        folder / "dual",
        steps=20,
        finished=False,
        extra=lambda step: {**world_model_row(step, step / 100), "warnings": [HOSTILE] if step == 7 else []},
        rollouts={20: [rollout(f"val-{n} {HOSTILE}", reply=HOSTILE, reward=n % 2) for n in range(4)]},
        predictions={20: [prediction(HOSTILE, "Your pin.")]},
    )
    config = (folder / "dual" / "config.yaml").read_text().replace("steps: 20", "steps: 60")
    (folder / "dual" / "config.yaml").write_text(config)
    return folder


def add_step(folder: Path, step: int, **figures: Any) -> None:
    row = {
        "step": step,
        "tasks_seen": 8 * step,
        "success": 0.9,
        "seconds/rollout": 1.5,
        "seconds/update": 0.5,
        **figures,
    }
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def get(address: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(address) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


# --- what is told, and to whom ---------------------------------------------------------------------------------------


def test_nothing_is_told_without_the_token(tmp_path: Path):
    with LivePage([some_runs(tmp_path)], every=0.2).serving() as address:
        assert address.startswith("http://127.0.0.1:")
        server, token = address[:-1].rsplit("/", 1)
        assert len(token) >= 32
        for path in ("", "/", "/data", "/wrong/", "/wrong/data", f"/{token[:-1]}/", f"/{token}x/", f"/x/{token}/"):
            status, words = get(server + path)
            assert (status, "dual" in words) == (403, False), path
        assert get(address)[0] == 200
        assert get(f"{address}nothing")[0] == get(f"{address}../etc/passwd")[0] == 404
        with pytest.raises(urllib.error.HTTPError, match="501"):
            urllib.request.urlopen(address, data=b"{}")


def test_it_listens_on_ipv6_too(tmp_path: Path):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with LivePage([some_runs(tmp_path)]).serving("::1") as address:
        assert address.startswith("http://[::1]:")
        assert get(address)[0] == 200


def test_an_address_of_another_machine_is_refused_with_both_options():
    words = "cannot listen on 192.0.2.1 .* choose another --port or --host"
    with pytest.raises(UsageError, match=words), LivePage([]).serving("192.0.2.1"):
        pass


def test_only_what_has_changed_is_told(tmp_path: Path):
    live_page = LivePage([some_runs(tmp_path)], every=0)
    first = live_page.news(0)
    assert {"live", "success", "training", "rollouts", "runs"} <= set(first)
    assert set(live_page.news(first["version"])) <= {"live", "version"}
    add_step(tmp_path / "dual", 21)
    second = live_page.news(first["version"])
    assert {"training", "runs", "live"} <= set(second)
    assert not {"rollouts", "success", "examples"} & set(second), "there was no evaluation"
    card = second["live"]["runs"][1]
    assert (card["step"], card["steps"], card["tasks"], card["state"]) == (21, 60, 168, "not running")
    assert set(live_page.news(0)) == set(first), "whoever comes new is told everything"


def test_runs_may_begin_later_and_a_row_may_be_half_written(tmp_path: Path):
    live_page = LivePage([tmp_path / "later"], every=0)
    assert live_page.news(0)["live"]["runs"] == []
    some_runs(tmp_path / "later")
    assert len(live_page.news(0)["live"]["runs"]) == 2
    with open(tmp_path / "later" / "dual" / "metrics.jsonl", "a") as file:
        file.write('{"step": 21, "tas')
    assert live_page.news(0)["live"]["runs"][1]["step"] == 20
    assert live_page.news(0)["problems"] == []


def test_the_end_of_a_cell_is_told_also_if_its_run_has_not_changed_since(tmp_path: Path):
    def failed(status: str) -> list[str]:
        cell = {"value": "0", "seed": 0, "run": "0-s0", "status": status, "error": ""}
        content = {"study": "weight", "setting": "world_model.weight", "cells": [cell]}
        (tmp_path / "ablation.json").write_text(json.dumps(content))
        return live_page.news(0)["ablations"][0]["failed"]

    write_run(tmp_path / "0-s0", steps=20)
    live_page = LivePage([tmp_path], every=0)
    assert failed("missing") == ["world_model.weight=0, seed 0: not run yet"]
    assert failed("done") == []


def test_watching_changes_nothing(tmp_path: Path):
    def everything() -> dict[str, tuple[int, int]]:
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")}

    some_runs(tmp_path)
    before = everything()
    with LivePage([tmp_path]).serving() as address:
        get(address)
        get(f"{address}data?have=0")
    assert everything() == before


def test_a_run_can_be_begun_and_taken_up_while_it_is_watched(tmp_path: Path):
    config = load_config(["preset=tiny", "steps=2", f"output_dir={tmp_path / 'run'}"])
    live_page = LivePage([tmp_path], every=0)
    with RunDirectory.create(tmp_path / "run", config) as run:
        run.append_metrics({"step": 1, "tasks_seen": 8})
        (card,) = live_page.news(0)["live"]["runs"]
        assert (card["state"], card["process"]["process"]) == ("running", os.getpid())
        assert process_of(tmp_path / "run") == os.getpid()
    assert process_of(tmp_path / "run") is None, "the number alone is not enough: its lock is not held any more"
    (card,) = live_page.news(0)["live"]["runs"]
    assert (card["state"], card["process"], card["left"]) == ("not running", None, None)
    with RunDirectory.create(tmp_path / "run", config, resume=True):
        assert live_page.news(0)["live"]["runs"][0]["state"] == "running"


# --- figures ---------------------------------------------------------------------------------------------------------


def test_the_time_left_counts_evaluations(tmp_path: Path):
    record = read_run(some_runs(tmp_path) / "dual")
    # 40 steps of 2 s, and evaluations of 9 s at 30, 40, 50 and 60.
    assert live.time_left(record) == pytest.approx(40 * 2 + 4 * 9)
    assert live.time_left(read_run(tmp_path / "dapo")) == 0
    write_run(tmp_path / "none", steps=1)
    (tmp_path / "none" / "metrics.jsonl").write_text('{"step": 0, "tasks_seen": 0}\n')
    assert live.time_left(read_run(tmp_path / "none")) is None


def test_warnings_are_told_once_each_with_the_latest_step(tmp_path: Path):
    def extra(step: int) -> dict[str, Any]:
        return {"warnings": ["always", f"only {step}"]}

    found = live.warnings(read_run(write_run(tmp_path / "run", steps=8, every=1000, extra=extra)))
    own = [each for each in found if each["step"] is not None]
    assert own[-2:] == [{"step": 8, "words": "always"}, {"step": 8, "words": "only 8"}]
    assert len(own) == live.WARNINGS


def test_a_process_and_its_use_are_read_from_outside():
    machine = Machine()
    ended = time.monotonic() + 0.1
    while time.monotonic() < ended:
        pass
    seen = machine.process(os.getpid())
    assert seen["process"] == os.getpid()
    assert seen["memory"] > 1_000_000
    assert 0 < seen["cpu"] < 64
    assert machine.process(2**22 + 1) == {"process": 2**22 + 1, "cpu": None, "memory": None}
    assert machine.whole()["cores"] >= 1
    assert read_gpus("broken\nA, [N/A], 1, 2\n") == []


def test_a_browser_is_opened_only_where_it_would_be_seen():
    assert has_display({"DISPLAY": ":0"}, "linux")
    assert has_display({}, "darwin")
    assert not has_display({}, "linux")
    assert not has_display({"DISPLAY": ":10", "SSH_CONNECTION": "x"}, "linux")


# --- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with LivePage([some_runs(tmp_path)], every=0.2).serving() as address:
        yield address


def wait_for(page: Page, expression: str) -> None:
    deadline = time.monotonic() + 60
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"{expression}: {page.evaluate('document.body.innerText')[:2000]}"
        time.sleep(0.1)


def text(page: Page, selector: str) -> str:
    return page.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")


def drawn(page: Page) -> list[str]:
    return page.evaluate(
        "[...document.querySelectorAll('#learning-chart path.mean')].map((path) => path.getAttribute('d'))"
    )


@needs_browser
def test_the_page_grows_with_its_runs_and_keeps_what_was_chosen(browser: Browser, address: str, tmp_path: Path):
    page = browser.open(address)
    card = text(page, ".card + .card")
    for words in (
        "dual",
        "not running",
        "step 20 of 60",
        "160 tasks",
        "val 40 % at step 20",
        "2.9 s a step",
        "rollout 52 %",
    ):
        assert words in card, card
    page.evaluate("document.querySelector('#learning [data-value=\"seconds\"]').click()")
    page.evaluate("[...document.querySelectorAll('.list button')][2].click()")
    page.evaluate("document.querySelector('[aria-label=\"Next turn\"]').click()")
    read = text(page, ".stage")
    before = drawn(page)
    new = [rollout("newest", reward=1.0)]
    (tmp_path / "dual" / "rollouts" / "step-000021.jsonl").write_text("".join(json.dumps(each) + "\n" for each in new))
    add_step(tmp_path / "dual", 21, **{"eval/val/success": 0.95, "seconds/eval": 9.0})
    wait_for(page, "document.querySelector('.card + .card').innerText.includes('step 21 of 60')")
    assert "val 95 % at step 21" in text(page, ".card + .card")
    wait_for(
        page, f"document.querySelectorAll('#learning-chart path.mean')[0].getAttribute('d') !== {json.dumps(before[0])}"
    )
    assert page.evaluate("document.querySelector('#learning [data-value=\"seconds\"]').ariaPressed") == "true"
    assert "newest" in text(page, ".list button"), "the newest rollout is the first of the list"
    assert text(page, ".stage") == read, "and whoever reads an older one goes on reading it"
    assert page.evaluate("document.querySelectorAll('section').length") == len(
        set(page.evaluate("[...document.querySelectorAll('section')].map((node) => node.id)"))
    )
    page.press("ArrowLeft")
    asked = {event["request"]["url"].split("?")[0] for event in page.happened("Network.requestWillBeSent")}
    assert asked - {f"{address.rsplit('/', 2)[0]}/favicon.ico"} == {address, f"{address}data"}
    assert page.happened("Runtime.exceptionThrown") == []
    page.close()


@needs_browser
def test_what_the_reader_points_at_is_not_taken_away(browser: Browser, address: str, tmp_path: Path):
    page = browser.open(address)
    page.evaluate("document.querySelector('#rollout-filters select').focus()")
    page.evaluate("window.list = document.querySelector('#rollout-filters select')")
    (tmp_path / "dual" / "rollouts" / "step-000021.jsonl").write_text(json.dumps(rollout("newest")) + "\n")
    add_step(tmp_path / "dual", 21)
    wait_for(page, "document.querySelector('.card + .card').innerText.includes('step 21 of 60')")
    assert page.evaluate("window.list.isConnected"), "an open list would close"
    page.evaluate("document.activeElement.blur()")
    wait_for(page, "document.querySelector('.list button').innerText.includes('newest')")
    page.close()


@needs_browser
def test_hostile_text_is_text_here_too(browser: Browser, address: str):
    page = browser.open(address)
    assert HOSTILE[:-1] in text(page, ".card .notices").replace("[U+202E]", "")
    assert HOSTILE[:-1] in page.evaluate("document.querySelector('.turn:not(.ahead) .said').textContent")
    wait_for(page, "performance.getEntriesByType('resource').some((entry) => entry.name.includes('data?have='))")
    assert page.evaluate("typeof window.attacked") == "undefined"
    assert page.evaluate("document.querySelectorAll('img, iframe').length") == 0
    assert page.evaluate("fetch('https://example.com').then(() => 'fetched', () => 'refused')") == "refused"
    page.close()


@needs_browser
@pytest.mark.parametrize("width", [400, 1300])
def test_the_cards_fit_on_any_screen(browser: Browser, address: str, width: int):
    page = browser.open(address, width=width, dark=width == 400)
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    wide = page.evaluate("[...document.querySelectorAll('.card, .card *')].map((n) => n.getBoundingClientRect().right)")
    assert max(wide) <= width
    page.close()


@needs_browser
def test_a_page_whose_server_has_ended_says_so_and_recovers(browser: Browser, tmp_path: Path, monkeypatch):
    live_page, port = LivePage([some_runs(tmp_path)], every=0.2), 0
    with live_page.serving(token="t") as address:
        port = int(address.split(":")[2].split("/")[0])
        page = browser.open(address)
    wait_for(page, "document.querySelector('#lost').innerText.includes('does not answer')")
    with live_page.serving(port=port, token="t"):
        wait_for(page, "document.querySelector('#lost').hidden")
    page.close()
