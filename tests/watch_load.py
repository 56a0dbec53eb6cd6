"""Measure `lfo watch` on two growing runs of 1,000 steps, in a browser: python tests/watch_load.py FOLDER"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from pathlib import Path
from statistics import median

from browser import Browser
from lfo.report.watch import LivePage
from made_runs import write_large_set

NEWS = 10


def main() -> None:
    folder = Path(sys.argv[1])
    write_large_set(folder, runs=2, steps=1000, rollouts=200)
    runs = sorted(folder.glob("run-*"))
    rows = {run: (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines() for run in runs}
    for run in runs:  # the last steps are still to come
        (run / "metrics.jsonl").write_text("\n".join(rows[run][: -3 * NEWS]) + "\n", encoding="utf-8")

    def grow(number: int) -> None:
        for run in runs:
            with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(rows[run][-3 * NEWS + number] + "\n")

    with LivePage(runs, every=1).serving() as address, Browser() as browser:
        started, busy = time.monotonic(), time.process_time()
        with urllib.request.urlopen(address) as answer:
            size = len(answer.read())
        seconds, spent = time.monotonic() - started, time.process_time() - busy
        print(f"first page: {size / 1e6:.2f} MB in {seconds:.2f} s ({spent:.2f} s of a processor)")

        version, took, sizes = 0, [], []
        for number in range(NEWS):
            grow(number)
            time.sleep(0.6)
            busy = time.process_time()
            with urllib.request.urlopen(f"{address}data?have={version}") as answer:
                news = answer.read()
            took.append(time.process_time() - busy)
            sizes.append(len(news))
            version = json.loads(news)["version"]
        print(f"news of a step: {median(sizes[1:]) / 1e3:.0f} kB, {median(took[1:]):.2f} s of a processor")

        started = time.monotonic()
        page = browser.open(address, width=1300)
        print(f"drawn in the browser after {time.monotonic() - started:.2f} s")
        page.evaluate(
            """(() => {
                window.frames_apart = []; let before = performance.now();
                const frame = (at) => { frames_apart.push(at - before); before = at; requestAnimationFrame(frame); };
                requestAnimationFrame(frame);
            })()"""
        )
        for number in range(NEWS, 3 * NEWS - 5):
            grow(number)
            time.sleep(0.5)
        step = page.evaluate("document.querySelector('.card').innerText.match(/step ([0-9,]+)/)[1]")
        apart = sorted(page.evaluate("frames_apart"))
        print(
            f"while steps came twice a second, up to step {step}: {len(apart)} frames, median {median(apart):.0f} ms,"
        )
        print(f"99 % within {apart[int(len(apart) * 0.99)]:.0f} ms, the longest wait {apart[-1]:.0f} ms")


if __name__ == "__main__":
    main()
