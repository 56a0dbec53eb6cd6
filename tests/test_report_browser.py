"""The report in a real browser: it opens from disk, makes no request, draws, filters, steps, and trusts no text.

Skipped without Chromium; `scripts/install_browser.sh` installs Debian's.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import Browser, Page, executable
from lfo.cli.report import write_report
from made_runs import prediction, rollout, world_model_row, write_run

pytestmark = pytest.mark.skipif(executable() is None, reason="there is no Chromium; see scripts/install_browser.sh")

HOSTILE = (
    "<script>window.attacked = 1</script>",
    "</script><img src=x onerror='window.attacked = 2'>",
    "--> <svg onload='alert(1)'>",
    "<a href='javascript:alert(1)'>x</a> &lt;b&gt;",
    "nul\x00 half\ud800 \u202egnp.exe",
)


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    hostile = [
        rollout(f"task-{n} {text}", reply=text, level=3, reward=0.0, split=f"split {text}", error=text)
        for n, text in enumerate(HOSTILE)
    ]
    plain = [rollout(f"val-{n}", reward=n % 2) for n in range(6)]
    draft = {**plain[5]["turns"][0], "taken_back": True, "observation": "Who is calling?"}
    plain[5]["turns"].insert(0, draft)
    for seed in range(3):
        write_run(
            folder / f"dual-{seed}",
            f"seed={seed}",
            steps=60,
            success=lambda step, seed=seed: min(0.8, step / (50 + 10 * seed)),
            extra=lambda step: (
                {**world_model_row(step, step / 100), "eval/val/success_blind": step / 600}
                if step % 10 == 0
                else {"policy_loss": 0.1, "drafts": 1.0, "drafts_kept": 0.5}
            ),
            rollouts={60: [*plain, *hostile]} if seed == 0 else None,
            predictions={
                60: [prediction(HOSTILE[0], HOSTILE[1]), prediction("Your pin and name.", "Your pin and date.")]
            },
        )
        write_run(folder / f"dapo-{seed}", "algo=dapo", f"seed={seed}", steps=100, success=lambda step: step / 300)
    study = folder / "weight"
    write_run(study / "0-s0", "world_model.weight=0")
    cells = [
        {"value": "0", "seed": 0, "run": "0-s0", "status": "done", "error": ""},
        {"value": HOSTILE[1], "seed": 0, "run": "x", "status": "failed", "error": HOSTILE[0]},
    ]
    (study / "ablation.json").write_text(json.dumps({"study": "weight", "setting": HOSTILE[0], "cells": cells}))
    bad = folder / "bad <img src=x onerror='window.attacked = 3'>"
    bad.mkdir()
    (bad / "config.yaml").write_text("steps: [")
    page = folder / "report.html"
    write_report([folder], page)
    return page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, report: Path) -> Iterator[Page]:
    page = browser.open(report)
    yield page
    page.close()


def texts(page: Page, selector: str) -> list[str]:
    return page.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map(node => node.textContent)")


def choose(page: Page, label: str, value: str) -> None:
    """Pick an option as a person would, by the words on it."""
    page.evaluate(
        f"""(() => {{
            const select = document.querySelector('#rollout-filters select[aria-label="{label}"]');
            const option = [...select.options].find((each) => each.textContent === {json.dumps(value)});
            select.value = option.value;
            select.dispatchEvent(new Event("change", {{ bubbles: true }}));
        }})()"""
    )


def click(page: Page, selector: str) -> None:
    page.evaluate(f"document.querySelector({json.dumps(selector)}).click()")
    page.settle()


def point_at(page: Page, x: int) -> None:
    """Move the pointer to a place of the learning curve."""
    page.evaluate(
        f"""(() => {{
            const svg = document.querySelector("#learning-chart svg"), box = svg.getBoundingClientRect();
            svg.dispatchEvent(new PointerEvent("pointermove", {{ clientX: box.left + {x}, clientY: box.top + 90 }}));
        }})()"""
    )


def drawn(page: Page, chart: str) -> list[str]:
    return page.evaluate(f"[...document.querySelectorAll('{chart} path.mean')].map(path => path.getAttribute('d'))")


def test_it_opens_from_disk_without_a_word_or_a_request(page: Page, report: Path):
    page.evaluate("scrollTo({ top: document.body.scrollHeight, behavior: 'instant' })")
    page.settle()
    assert page.happened("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded") == []
    requests = [event["request"]["url"] for event in page.happened("Network.requestWillBeSent")]
    assert requests == [report.as_uri()]


def test_what_would_be_wrong_is_seen(browser: Browser, tmp_path: Path):
    (tmp_path / "bad.html").write_text(
        "<img src=x onerror='window.attacked = 1'><script>console.log(1); nothing()</script>"
    )
    page = browser.open(tmp_path / "bad.html")
    page.settle()
    assert page.evaluate("window.attacked") == 1
    for event in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
        assert len(page.happened(event)) == 1, event
    assert len(page.happened("Network.requestWillBeSent")) == 2
    page.close()


def test_the_policy_forbids_what_the_page_does_not_do(page: Page):
    assert page.evaluate("fetch('data:,x').then(() => 'fetched', () => 'refused')") == "refused"
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'attacked = 9'}))"
    )
    assert page.evaluate("typeof window.attacked") == "undefined"


def test_every_chart_is_drawn(page: Page):
    sizes = page.evaluate(
        """[...document.querySelectorAll(".chart")].map((chart) => [...chart.querySelectorAll("path, circle")]
            .map((shape) => shape.getBBox()).reduce((sum, box) => sum + box.width + box.height, 0))"""
    )
    assert len(sizes) >= 8
    assert min(sizes) > 5
    means = page.evaluate(
        """[...document.querySelectorAll("#learning-chart path.mean")].map((path) => path.getBBox())
            .map(({ width, height }) => [width, height])"""
    )
    assert len(means) == 2
    assert all(width > 100 and height > 50 for width, height in means)
    assert len(texts(page, "#learning-chart path.band")) == 1, "only seeds that differ have an interval"
    assert any("information ceiling 91 %" in words for words in texts(page, "#learning-chart text"))
    names = texts(page, "#learning-chart text.name")
    assert names == ["dual-LoRA, 3 seeds", "plain DAPO, 3 seeds"]
    assert page.evaluate("document.body.textContent").count("NaN") == 0


def test_an_axis_of_negative_values_has_labels_and_room_for_the_highest(browser: Browser, tmp_path: Path):
    write_run(tmp_path / "run", steps=60, extra=lambda step: {"policy_loss": -1 - step / 50})
    write_report([tmp_path / "run"], tmp_path / "report.html")
    page = browser.open(tmp_path / "report.html")
    page.settle()
    chart = 'svg[aria-label="policy loss"]'
    assert texts(page, f"{chart} text[text-anchor=end]") == ["-2", "-1.5", "-1"]
    top_of_plot, top_of_curve = 14, f"document.querySelector('{chart} path.mean').getBBox().y"
    assert page.evaluate(top_of_curve) >= top_of_plot
    page.close()


def test_the_axis_switches_between_tasks_and_time(page: Page):
    by_tasks = drawn(page, "#learning-chart")
    click(page, '#learning [data-value="seconds"]')
    assert any("time spent training" in words for words in texts(page, "#learning-chart text"))
    assert "2 min" in texts(page, "#learning-chart text")
    by_time = drawn(page, "#learning-chart")
    assert page.evaluate("""document.querySelector('#learning [data-value="seconds"]').ariaPressed""") == "true"
    click(page, '#learning [data-value="tasks"]')
    assert drawn(page, "#learning-chart") == by_tasks
    assert all(path.startswith("M") for path in by_time)
    assert "800" in texts(page, "#learning-chart text")


def test_a_name_in_the_legend_hides_and_shows_its_line(browser: Browser, report: Path):
    page = browser.open(report, width=500)
    assert len(drawn(page, "#learning-chart")) == 2
    click(page, "#learning-chart .legend button")
    assert len(drawn(page, "#learning-chart")) == 1
    assert page.evaluate("document.querySelector('#learning-chart .legend button').ariaPressed") == "false"
    click(page, "#learning-chart .legend button")
    assert len(drawn(page, "#learning-chart")) == 2
    page.close()


def test_pointing_at_a_curve_tells_its_figures(page: Page):
    point_at(page, 60)
    (tip,) = texts(page, "#learning-chart .tip")
    assert tip.startswith("0 tasks")
    assert "dual-LoRA: 0 %" in tip


def test_rollouts_are_filtered(page: Page):
    assert texts(page, "#rollout-count") == ["11 of 11 rollouts"]
    choose(page, "outcome", "succeeded")
    assert texts(page, "#rollout-count") == ["3 of 11 rollouts"]
    assert texts(page, ".list button span + span") == ["val-1", "val-3", "val-5"]
    choose(page, "reply", "auth_failure")
    assert texts(page, "#rollout-count") == ["0 of 11 rollouts"]
    assert texts(page, ".stage") == ["No rollout matches these filters."]
    choose(page, "outcome", "failed")
    choose(page, "level", "2")
    assert texts(page, ".list button span + span") == ["val-0", "val-2", "val-4"]
    choose(page, "level", "3")
    assert texts(page, "#rollout-count") == ["5 of 11 rollouts"]
    choose(page, "split", "val")
    assert texts(page, "#rollout-count") == ["0 of 11 rollouts"]


def test_buttons_and_arrow_keys_step_through_turns_and_rollouts(page: Page):
    page.evaluate("document.querySelector('#rollouts').scrollIntoView({ behavior: 'instant' })")
    page.settle()
    now = ".turn.now h4"
    assert texts(page, now)[0].startswith("1. imagined, not called")
    page.press("ArrowRight")
    assert texts(page, now)[0].startswith("2. make_phone_call")
    assert texts(page, "#turn-count") == ["turn 2 of 2"]
    page.press("ArrowRight")
    assert texts(page, "#turn-count") == ["turn 2 of 2"], "the last turn is the last"
    page.press("ArrowLeft")
    assert texts(page, "#turn-count") == ["turn 1 of 2"]
    current = '.list [aria-current="true"] span + span'
    page.press("ArrowRight", shift=True)
    assert texts(page, current) == ["val-1"]
    click(page, '[aria-label="Next rollout"]')
    assert texts(page, current) == ["val-2"]
    click(page, '[aria-label="Previous rollout"]')
    click(page, '[aria-label="Next turn"]')
    assert (texts(page, current), texts(page, "#turn-count")) == (["val-1"], ["turn 2 of 2"])
    page.evaluate("scrollTo({ top: 0, behavior: 'instant' })")
    page.settle()
    page.press("ArrowLeft")
    assert texts(page, "#turn-count") == ["turn 2 of 2"], "out of sight the keys belong to the page"


def test_predicted_and_actual_replies_stand_side_by_side(page: Page):
    expected, actual = texts(page, ".turn.ahead .pair > div")
    assert expected == "expected by the world modelI need your pin."
    assert actual == "said, to the same callYou are verified."
    left, right = page.evaluate(
        """[...document.querySelectorAll(".turn.ahead .pair > div")].map((box) => box.getBoundingClientRect().left)"""
    )
    assert right > left + 100
    assert texts(page, "#examples .said") == [*HOSTILE[:2], "Your pin and name.", "Your pin and date."]
    assert texts(page, "#examples mark") == ["name.", "date."], "only replies that are mostly alike are marked"


def test_what_was_imagined_and_taken_back_is_told_from_what_was_kept(page: Page):
    choose(page, "outcome", "succeeded")
    page.evaluate("[...document.querySelectorAll('.list button')].at(-1).click()")
    titles = [title.partition("call")[0] for title in texts(page, ".turn h4")]
    assert titles[:2] == ["1. imagined and taken back", "2. imagined, not "]
    assert texts(page, ".turn.back .expected .said") == ["Who is calling?"]
    lines = "[...document.querySelectorAll('.turn')].map((turn) => getComputedStyle(turn).borderLeftStyle)"
    assert page.evaluate(lines) == ["dotted", "solid", "solid"]


def test_blind_success_is_a_dotted_line_and_told_at_the_pointer(page: Page):
    (path,) = page.evaluate(
        """[...document.querySelectorAll("#learning-chart path.blind")]
            .map((path) => [path.getBBox().width, path.getBBox().height, getComputedStyle(path).strokeDasharray])"""
    )
    assert path[0] > 100
    assert 10 < path[1] < 60
    assert path[2] != "none"
    assert "blind is what the policy's weights know" in texts(page, "#learning .about")[0]
    point_at(page, 60)
    assert "dual-LoRA, blind: 0 %" in texts(page, "#learning-chart .tip")[0]


def test_the_costs_have_a_table_of_their_own(page: Page):
    assert texts(page, "#comparison .scroll:nth-of-type(3) caption")[0].startswith("Times less than plain DAPO")
    assert texts(page, "#comparison .scroll:nth-of-type(3) th")[1:] == [
        "tasks",
        "rollouts",
        "sampled tokens",
        "seconds",
    ]


def test_hostile_text_is_text(page: Page):
    choose(page, "level", "3")
    for number, hostile in enumerate(HOSTILE):
        said = texts(page, ".turn:not(.ahead) .said")[0]
        if number < 4:
            assert said == hostile
        else:
            assert said == "nul␀ half[U+D800] [U+202E]gnp.exe"
        click(page, '[aria-label="Next rollout"]')
    everything = page.evaluate("document.body.textContent")
    assert "bad <img src=x onerror='window.attacked = 3'>" in everything
    assert f"{HOSTILE[0]}={HOSTILE[1]}, seed 0: failed: {HOSTILE[0]}" in everything
    assert page.evaluate("typeof window.attacked") == "undefined"
    assert page.evaluate("document.querySelectorAll('img, iframe, a:not([href^=\"#\"])').length") == 0
    assert page.evaluate("document.scripts.length") == 2
    assert page.happened("Page.javascriptDialogOpening", "Runtime.exceptionThrown", "Log.entryAdded") == []


def test_light_and_dark_follow_the_system_and_the_button(browser: Browser, report: Path, page: Page):
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = page.evaluate(ground), browser.open(report, dark=True).evaluate(ground)
    assert (light, dark) == ("rgb(253, 252, 250)", "rgb(20, 21, 25)")
    click(page, "#theme")
    assert page.evaluate(ground) == dark
    click(page, "#theme")
    assert page.evaluate(ground) == light


@pytest.mark.parametrize("width", [360, 768])
def test_narrow_screens_scroll_only_downwards(browser: Browser, report: Path, width: int):
    page = browser.open(report, width=width)
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(overflow) == 0
    choose(page, "level", "3")
    page.settle()
    assert page.evaluate(overflow) == 0
    too_wide = page.evaluate(
        f"""[...document.querySelectorAll("body *")].filter((node) => !node.closest(".scroll, svg, [hidden]")
            && node.getBoundingClientRect().right > {width} + 1).map((node) => node.tagName + node.className)"""
    )
    assert too_wide == []
    outside = page.evaluate(
        f"""[...document.querySelectorAll("svg text")].filter((node) => node.getBoundingClientRect().right > {width}
            || node.getBoundingClientRect().left < 0).map((node) => node.textContent)"""
    )
    assert outside == []


def test_a_report_without_anything_to_show_says_so(browser: Browser, tmp_path: Path):
    write_run(tmp_path / "run", "eval.every=0", every=1000, finished=False)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "tasks_seen": 8}\n')
    write_report([tmp_path], tmp_path / "report.html")
    page = browser.open(tmp_path / "report.html")
    assert page.happened("Runtime.exceptionThrown", "Log.entryAdded") == []
    words = texts(page, ".empty")
    assert len(words) == 6
    assert "a learning curve needs at least one evaluation" in words[0]
