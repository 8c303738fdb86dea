"""The page and the report in a real browser."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path

import psutil
import pytest

from lockstep.monitoring.page_server import PageServer, RunsView
from lockstep.monitoring.report import build_report, write_report
from lockstep.monitoring.run_catalog import Catalog
from lockstep.system.locks import try_lock

from .browser import CHROMIUM, Browser, chromium
from .made_runs import (
    END,
    EVENTS,
    HOSTILE,
    MEASURED,
    event,
    job,
    lines,
    make_hostile_run,
    make_long_run,
    make_run,
    metrics,
    steps,
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")

LOADED = (
    "charts.has('membership') && byId('log').textContent"
    " && [...charts.values()].every((one) => one.spec.kind === 'bars' || (one.loaded && !one.loading))"
)
SECTIONS = [
    *("Summary", "Loss and metrics", "Throughput", "Where the time of a step goes", "Membership", "Waits"),
    *("Load", "Logs", "Checkpoints", "Events", "Configuration and versions", "Comparison"),
]
DRAWN = """
(() => {
  const canvas = document.querySelector('figure[data-chart="%s"] canvas');
  const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  let found = 0;
  for (let at = 0; at < data.length; at += 4) {
    const [red, green, blue, alpha] = data.subarray(at, at + 4);
    if (alpha > 200 && Math.max(red, green, blue) - Math.min(red, green, blue) > 60) found += 1;
  }
  return found;
})()
"""
"""The number of pixels in the colors of series."""
CONTRAST = """
(() => {
  const parse = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([red, green, blue]) => [red, green, blue].map((one) => one / 255)
    .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
    .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
  const ratio = (one, other) => {
    const [most, least] = [light(one), light(other)].sort((a, b) => b - a);
    return (most + 0.05) / (least + 0.05);
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const color = parse(getComputedStyle(node).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    if (text && node.checkVisibility() && !['SCRIPT', 'STYLE'].includes(node.tagName)) {
      found.push([ratio(parse(getComputedStyle(node).color), behind(node)), node.tagName, text.slice(0, 40)]);
    }
  }
  const mark = (name, ground) => {
    const node = document.createElement('span');
    node.style.color = `var(--${name})`;
    node.style.backgroundColor = `var(--${ground})`;
    document.body.append(node);
    const style = getComputedStyle(node);
    const found = ratio(parse(style.color), parse(style.backgroundColor));
    node.remove();
    return [found, 'mark', name];
  };
  const marks = [
    ...['control', 'muted', 'bad', 'warn', 'good', 'train'],
    ...Array.from({ length: 8 }, (_, at) => `series-${at}`),
    ...['input', 'compute', 'wait', 'exchange', 'update', 'other'].map((one) => `part-${one}`),
  ];
  const lowest = (rows) => rows.sort((a, b) => a[0] - b[0]).slice(0, 5);
  const all = marks.flatMap((one) => [mark(one, 'page'), mark(one, 'panel')]);
  return { texts: lowest(found), marks: lowest(all) };
})()
"""
"""The lowest contrasts of texts and of marks in charts with what is behind them."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("browser")) as found:
        yield found


@contextmanager
def watching(browser: Browser, *folders: Path, wait: bool = True) -> Iterator[PageServer]:
    """Open the page of runs."""
    with PageServer(("127.0.0.1", 0), socket.AF_INET, RunsView(Catalog(folders))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            browser.size(1280, 6000)
            browser.open(server.address)
            if wait:
                browser.wait(LOADED)
            yield server
        finally:
            browser.open("about:blank")
            server.shutdown()
            thread.join()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs" / "one")


def check_panels(browser: Browser) -> None:
    text = browser.text("main")
    for shown in (
        *("finished", "640\nexamples/s", "ab12", "2 of 2", "val_loss; not finite at 60"),
        *("12.3 ms", "321 µs", "worker 1 was killed by SIGKILL", "step 20 of fit 1", "1.5 s"),
        *("saved/step-40", "250 ms", "the needle is here", "GPU 0 of node1", "Cores in use on each host"),
        "2.5 s for the start and the first step, 12.6 ms for pauses, 2.99 s for everything else",
        *("keras", "3.15.1", "seed", "paused", "view 3 with workers 0 and 2: worker 2 joined"),
    ):
        assert shown in text, shown
    browser.wait("[...charts.values()].every((one) => !one.drawing)")
    for chart in browser.run("[...charts.keys()]"):
        assert browser.run(DRAWN % chart) > 20, chart


def test_every_panel_shows_its_data(browser: Browser, run: Path) -> None:
    with watching(browser, run):
        headings = browser.run("[...document.querySelectorAll('section > h2')].map((one) => one.textContent)")
        assert headings == SECTIONS
        check_panels(browser)
        assert browser.text("#status") == "one: finished, 2 of 2 workers, 1 lost, 1 joined"
        assert "?token" not in browser.run("location.href")
        assert browser.complaints() == []


def test_a_run_that_grows_while_it_is_watched(browser: Browser, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one", EVENTS[:6], [])
    lock = try_lock(folder / "lock")
    assert lock is not None
    with watching(browser, tmp_path):
        assert "No data yet." in browser.text("#metrics")
        assert browser.text("#progress-text") == "compiling"
        with (folder / "measurements.jsonl").open("ab") as file:
            file.write(lines(MEASURED))
        browser.wait("charts.get('metric:loss')?.runSeries[0]?.series[0].x.length === 2")
        with (folder / "events.jsonl").open("ab") as file:
            file.write(lines(EVENTS[6:]))
        with (folder / "measurements.jsonl").open("ab") as file:
            file.write(lines([metrics(9.0, 70, None, loss=0.3)]))
        browser.run("poll()")
        browser.wait("document.querySelector('#status').textContent.includes('1 lost')")
        browser.wait("charts.get('metric:loss').runSeries[0].series[0].x.length === 3")
        with (folder / "worker-0.log").open("a") as log:
            log.write("a line that came later\n")
        browser.run("poll()")
        browser.wait("document.querySelector('#log').textContent.includes('a line that came later')")
        with (folder / "events.jsonl").open("ab") as file:
            file.write(lines(END))
        os.close(lock)
        browser.run("poll()")
        browser.wait("document.querySelector('#state').textContent === 'finished'")
        make_run(tmp_path / "two")
        browser.run("poll()")
        browser.wait("document.querySelectorAll('#runs-list li').length === 2")
        assert browser.complaints() == []


def test_a_run_that_trains_shows_its_progress_metrics_and_what_slows_it(
    browser: Browser, tmp_path: Path
) -> None:
    begins = event(2.0, "call", worker=0, name="fit 1", initial_epoch=0, epochs=4, steps_per_epoch=30)
    folder = make_run(tmp_path / "one", [*EVENTS[:5], begins])
    lock = try_lock(folder / "lock")
    assert lock is not None
    with watching(browser, tmp_path):
        # 40 steps took 4 seconds, and 69 are left.
        assert browser.text("#progress-text") == "Epoch 3 of 4 · step 51 of 120 · 43 % · 7 s left"
        assert browser.run("byId('progress-bar').getAttribute('aria-valuenow')") == "43"
        tiles = " ".join(browser.text("#tiles").split())
        assert tiles == "loss 0.4 validation not finite best 0.65 in epoch 1 accuracy 0.8 validation 0.76"
        advice = "[...document.querySelectorAll('#advice li')].map((one) => one.textContent)"
        assert browser.run(advice) == ["Nothing stands out: computing takes 40 % of the time."]
        for number in (1, 2):
            with (folder / "measurements.jsonl").open("ab") as file:
                reading = {"input": 1.5, "compute": 0.5, "wait": 0.0}
                file.write(
                    lines(steps(20.0 + number, worker, 50 + 10 * number, **reading) for worker in (0, 1))
                )
        browser.run("poll()")
        browser.wait("byId('advice').textContent.includes('reading')")
        (said,) = browser.run(advice)
        assert said.startswith("reading takes 65 % of the time: cache or prefetch the data, or do less")
        assert "input 65 %" in browser.text("#shares-legend")
    os.close(lock)


def test_the_first_look_says_how_a_run_went_what_it_cost_and_what_to_do(
    browser: Browser, tmp_path: Path
) -> None:
    full = {"failed_checkpoints": 2, "checkpoint_failure": "No space left on device", "saved": 40}
    end = event(10.0, "finished", status=0, message="", steps=60, before=20, checkpoints=1, **full)
    make_run(tmp_path / "night", [job(tags=["lr=1"]), *EVENTS[1:], end])
    error = 'Traceback:\n  File "train.py", line 1, in f\nValueError: x\n'
    failed = event(9.0, "failed", worker=0, summary="ValueError: x", traceback=error)
    end = event(10.0, "finished", status=1, message="worker 1 exited with status 1: ValueError: x", steps=60)
    make_run(tmp_path / "bad", [*EVENTS, failed, end])
    make_run(tmp_path / "good", [*EVENTS, *END], [one for one in MEASURED if "val_loss" not in str(one)])
    looks = {
        "good": ("✓", "Finished without problems", "", ""),
        "night": (
            *("!", "Finished with 2 problems"),
            "2 checkpoints failed, the newest complete one is from step 40 of 60 (No space left on device)",
            "Free space on the disk of the checkpoints",
        ),
        "bad": (
            *("✕", "Failed: worker 1 exited with status 1: ValueError: x (exit status 1)"),
            "not finite: val_loss, first seen at step 60",
            "Mend the script; the same command resumes from step 40",
        ),
    }
    with watching(browser, tmp_path):
        browser.size(1280, 800)
        icons = set()
        for name, (sign, said, trouble, remedy) in looks.items():
            browser.run(f"choose('{name}')")
            browser.wait(f"byId('title').textContent === '{name}'")
            assert browser.run("byId('headline').textContent") == said
            assert trouble in browser.text("#outcome")
            assert remedy in browser.text("#outcome")
            assert browser.run("document.title").startswith(f"{sign} {name} (")
            icons.add(browser.run("byId('icon').href"))
            # All of it is on the first screen.
            assert browser.run("byId('costs').getBoundingClientRect().bottom") < 800
            assert ("ValueError: x\n" in browser.text("#outcome")) == (name == "bad")
        assert len(icons) == 3
        browser.run("choose('night')")
        browser.wait("byId('title').textContent === 'night'")
        assert browser.text("#costs").split("\n") == [
            *("Time", "10 s", "Effective training", "45 %"),
            "2.5 s for the start and the first step, 12.6 ms for pauses, 2.99 s for everything else",
            *(
                "Steps",
                "60",
                "20 of them before",
                "Mean speed",
                "640",
                "examples/s",
                "Workers",
                "2 of 2",
                "1 lost, 1 joined",
            ),
            *("Pauses", "2", "12.6 ms in total", "Checkpoints", "1", "the newest is from step 40"),
        ]
        assert browser.text("#tags") == "lr=1"
        assert browser.run("document.querySelectorAll('.sparkline polyline').length") == 4
        moods = "[...document.querySelectorAll('#runs-list .dot')].map((one) => one.className)"
        assert sorted(browser.run(moods)) == ["dot bad", "dot good", "dot warn"]
        assert browser.complaints() == []


def test_a_run_that_has_ended_does_not_wait_for_data(browser: Browser, tmp_path: Path) -> None:
    make_run(tmp_path / "one", [job(replicas=1), *EVENTS[1:6], *END], [])
    with watching(browser, tmp_path):
        text = browser.text("main")
        assert "No data yet." not in text
        assert "No metrics were recorded" in browser.text("#metrics")
        assert "Keras itself takes the steps of one replica" in browser.text("#parts")
        assert browser.run("byId('progress').hidden")


def test_checkpoints_that_newer_ones_have_replaced_are_folded(browser: Browser, tmp_path: Path) -> None:
    written = [
        event(7.0 + at, "checkpoint", worker=0, path=f"/saved/step-{at}", step=at, seconds=0.25)
        for at in range(1, 6)
    ]
    keeps = event(6.5, "keeps", worker=0, folder="/saved", keep=2)
    make_run(tmp_path / "one", [*EVENTS[:-1], keeps, *written, *END])
    with watching(browser, tmp_path):
        paths = "[...document.querySelectorAll('%s td.long')].map((one) => one.textContent)"
        assert browser.run(paths % "#checkpoints-table") == ["/saved/step-5", "/saved/step-4"]
        assert browser.text("#checkpoints-deleted summary") == "3 older, which newer ones have replaced"
        assert not browser.run("document.querySelector('#checkpoints-deleted table').checkVisibility()")
        browser.run("document.querySelector('#checkpoints-deleted summary').click()")
        assert browser.run(paths % "#checkpoints-deleted") == [f"/saved/step-{at}" for at in (3, 2, 1)]


def test_a_spike_is_cut_off_with_a_mark_and_can_be_shown(browser: Browser, tmp_path: Path) -> None:
    measured = [steps(2.0 + at, 0, 10 * at + 1) for at in range(1, 9)]
    spike = steps(2.5, 0, 5, count=4, compute=40.0)
    make_run(tmp_path / "one", EVENTS[:6], [spike, *measured])
    with watching(browser, tmp_path):
        chart = "charts.get('parts:0')"
        browser.wait(f"!{chart}.drawing")
        # The other steps take 100 ms.
        assert browser.run(f"{chart}.scale.high") < 0.12
        assert browser.run(f"{chart}.beyond.textContent") == "▲ one point above 100 ms, up to 10.2 s: show"
        assert browser.run(DRAWN % "parts:0") > 5000
        browser.run(f"{chart}.beyond.click()")
        browser.wait(f"{chart}.scale.high > 10")
        assert browser.run(f"{chart}.beyond.textContent") == "Cut off one point above 100 ms, up to 10.2 s"
        browser.run(f"{chart}.beyond.click()")
        browser.wait(f"{chart}.scale.high < 0.12")
        # Without the spike, there is nothing to cut off.
        assert browser.run("spikeLimit([1, 2, 3, 4, 5, 6, 7, 8], 0, 3)") is None
        assert browser.run("spikeLimit([2, 2, 2], 0, 3)") is None


def check_hostile(browser: Browser) -> None:
    assert browser.run("typeof window.attacked") == "undefined"
    assert browser.run("document.querySelectorAll('main img').length") == 0
    places = [
        "#about",
        "#facts",
        "#failure",
        "#views-table",
        "#workers-table",
        "#waits-table",
        "#checkpoints-table",
    ]
    places += ["#events-table", "#configuration-table", "#metrics-charts", "#log", "#load-charts"]
    for place in places:
        text = browser.run(f"document.querySelector({json.dumps(place)}).textContent")
        assert HOSTILE in text, place
    assert browser.complaints() == []


def test_markup_in_a_run_is_text(browser: Browser, tmp_path: Path) -> None:
    make_hostile_run(tmp_path / "<img src=x onerror=window.attacked=1>")
    with watching(browser, tmp_path):
        check_hostile(browser)
        assert browser.text("h1") == "<img src=x onerror=window.attacked=1>"
        browser.run("byId('log-text').value = 'onerror'")
        browser.run("find(0)")
        assert browser.run("byId('log-results').textContent") == HOSTILE
        # A script that gets into the page does not run.
        browser.run(
            "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.attacked=1\">');"
            "const made = document.createElement('script'); made.textContent = 'window.attacked=1';"
            "document.body.append(made)"
        )
        assert browser.run("typeof window.attacked") == "undefined"
        assert browser.complaints() != []


def test_the_report_needs_no_network(browser: Browser, run: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, build_report(run).html)
    shutil.rmtree(run)
    browser.size(1280, 6000)
    browser.open(path.as_uri())
    browser.wait(LOADED)
    check_panels(browser)
    assert browser.requests() == [path.as_uri()]
    assert browser.complaints() == []
    browser.run("byId('log-text').value = 'NEEDLE'")
    browser.run("find(0)")
    assert browser.run("byId('log-results').textContent") == "the needle is here"
    browser.run("byId('metric-axis').value = 'time'; byId('metric-axis').dispatchEvent(new Event('change'))")
    browser.wait("charts.get('metric:loss').runSeries[0].series[0].x[0] === 3")
    assert not browser.run("document.querySelector('#comparison').checkVisibility()")


def test_markup_in_a_report_is_text(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, build_report(make_hostile_run(tmp_path / "<!--<script>")).html)
    browser.size(1280, 6000)
    browser.open(path.as_uri())
    browser.wait(LOADED)
    check_hostile(browser)
    browser.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.attacked=1\">')")
    assert browser.run("typeof window.attacked") == "undefined"


def test_keys_and_mouse_move_the_charts(browser: Browser, run: Path) -> None:
    with watching(browser, run):
        span = "metricSpan.range().map(Math.round)"
        assert browser.run(span) == [10, 60]
        browser.run("charts.get('metric:loss').plot.focus()")
        browser.key("+")
        start, stop = browser.run("metricSpan.range()")
        assert stop - start == pytest.approx(50 / 1.5)
        browser.key("ArrowRight")
        assert browser.run("metricSpan.range()[0]") == pytest.approx(start + 50 / 1.5 / 8)
        browser.key("ArrowRight", shift=True)
        browser.wait("charts.get('metric:loss').readout.style.display === 'block'")
        assert "loss:" in browser.run("charts.get('metric:loss').readout.textContent")
        browser.key("0")
        assert browser.run(span) == [10, 60]
        x, y, width = browser.run(
            "(() => { const { x, y, width } = charts.get('metric:accuracy').plot.getBoundingClientRect();"
            "return [x, y, width]; })()"
        )
        middle = x + width / 2
        browser.mouse("mousePressed", middle, y + 50, button="left", clickCount=1)
        browser.mouse("mouseReleased", middle, y + 50, button="left", clickCount=1)
        browser.mouse("mouseWheel", middle, y + 50, deltaX=0, deltaY=-400)
        browser.wait("metricSpan.start !== null")
        start, stop = browser.run("metricSpan.range()")
        assert stop - start < 25
        browser.mouse("mousePressed", middle, y + 50, button="left", clickCount=1)
        browser.mouse("mouseMoved", middle - 50, y + 50, button="left")
        browser.mouse("mouseReleased", middle - 50, y + 50, button="left", clickCount=1)
        assert browser.run("metricSpan.range()[0]") > start
        # Both charts of metrics show the same steps, others are as before.
        assert browser.run("timeSpan.start") is None
        browser.run("document.querySelector('[aria-label=\"Show everything: loss\"]').click()")
        assert browser.run(span) == [10, 60]


def test_smoothing_and_a_logarithmic_axis(browser: Browser, run: Path) -> None:
    with watching(browser, run):
        set_value = "(id, value) => { byId(id).value = value; byId(id).dispatchEvent(new Event('input')); }"
        browser.run(f"({set_value})('smoothing', 20)")
        assert browser.text("#smoothing-value") == "mean over 20 % of what is shown"
        browser.wait("charts.get('metric:loss').runSeries[0].series[0].mean[0] === 0.9")
        browser.run("byId('log-axis').click()")
        browser.wait("!charts.get('metric:loss').drawing")
        assert browser.run(DRAWN % "metric:loss") > 20


def test_marks_of_an_axis_and_series_of_a_metric_can_be_told_apart(browser: Browser, run: Path) -> None:
    with watching(browser, run):
        for unit, values, texts in (
            ("", [1.79, 1.7905, 1.791, 1.7915], ["1.79", "1.7905", "1.791", "1.7915"]),
            ("", [0.5, 1], ["0.5", "1"]),
            ("s", [100.001, 100.002], ["100.001 s", "100.002 s"]),
        ):
            assert browser.run(f"marksOf({values}, '{unit}')") == texts
        assert browser.run("ticks(0, 437, 4, true)") == [0, 120, 240, 360]
        assert browser.run("ticks(0, 437, 4)") == [0, 200, 400]
        colors = browser.run("charts.get('metric:loss').lines().map((line) => line.color)")
        assert len(set(colors)) == len(colors) == 3
        assert browser.run("byId('costs').textContent").count("Mean speed640examples/s") == 1


def test_two_runs_are_overlaid_and_compared(browser: Browser, tmp_path: Path) -> None:
    make_run(tmp_path / "one")
    two = [job(seed=8, tags=["lr=1"]), *EVENTS[1:], *END]
    make_run(tmp_path / "two", two, [*MEASURED, metrics(8.5, 60, 2, loss=0.2)])
    with watching(browser, tmp_path):
        chosen = browser.run("state.run")
        assert "Overlay other runs" in browser.text("#results-table")
        other = {"one": "two", "two": "one"}[chosen]
        browser.run(f"document.querySelector('[aria-label=\"Overlay {other}\"]').click()")
        browser.wait("charts.get('metric:loss').runSeries.length === 2")
        legend = browser.run("charts.get('metric:loss').legend.innerText")
        assert f"val_loss ({other})" in legend
        assert f"val_loss ({chosen})" in legend
        browser.wait("document.querySelector('#comparison-table tbody tr.differs')")
        rows = browser.run(
            "[...document.querySelectorAll('#comparison-table tbody tr')].map((one) => one.innerText)"
        )
        seeds, tags = ("7\t8", "\tlr=1") if chosen == "one" else ("8\t7", "lr=1\t")
        assert [row for row in rows if row.startswith("differs")] == [
            f"differs\tjob\tseed\t{seeds}",
            f"differs\tjob\ttags\t{tags}",
        ]
        assert rows[0].startswith("differs")
        # Their results are side by side, and can be sorted.
        results = "[...document.querySelectorAll('#results-table tbody tr')].map((one) => one.innerText)"
        press = "document.querySelector('#results-table button[data-key=loss]').click()"
        browser.run(press)
        two, one = browser.run(results)
        assert two.startswith("two\tfinished\tlr=1\t0.2\tnot finite\t0.8\t0.76\t60\t")
        assert one.startswith(
            "one\tfinished\t\t0.4\tnot finite\t0.8\t0.76\t60\t10 s\t45 %\t1\tnot finite: val_loss"
        )
        browser.run(press)
        assert browser.run(results) == [one, two]
        # Areas of several runs cannot be added up.
        assert browser.run("[{ kind: 'stack' }, {}].map(chartRuns)") == [[chosen], [chosen, other]]
        browser.size(400, 900)
        boxes = browser.run(
            "[...document.querySelectorAll('#results-table th')].map((one) => one.getBoundingClientRect())"
            ".map((box) => [box.left, box.top, box.right, box.bottom])"
        )
        for first, second in combinations(boxes, 2):
            assert any(first[at + 2] <= second[at] or second[at + 2] <= first[at] for at in (0, 1)), boxes
        browser.size(1280, 6000)
        # The address has the choice, so that it survives loading the page again.
        browser.reload()
        browser.wait(LOADED + " && state.others.size === 1")


def test_searching_in_a_log(browser: Browser, run: Path) -> None:
    (run / "worker-0.log").write_text("".join(f"line {at}\n" for at in range(50_000)) + "the End\n")
    with watching(browser, run):
        assert browser.run("byId('log').textContent").endswith("the End\n")
        browser.run("byId('log-text').value = 'line 4242'; byId('log-search').requestSubmit()")
        browser.wait("byId('log-found').textContent === '11 lines found'")
        browser.run("byId('log-results').querySelector('button').click()")
        browser.wait("byId('log').textContent.startsWith('line 4242\\n')")
        browser.run(
            "byId('log-text').value = 'END'; byId('log-case').click(); byId('log-search').requestSubmit()"
        )
        browser.wait("byId('log-found').textContent === '0 lines found'")
        browser.run("byId('log-first').click()")
        browser.wait("byId('log').textContent.startsWith('line 0\\n') && byId('log-previous').disabled")
        browser.run("byId('log-next').click()")
        browser.wait("!byId('log').textContent.startsWith('line 0\\n')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(browser: Browser, run: Path, scheme: str) -> None:
    try:
        browser.scheme(scheme)
        with watching(browser, run):
            assert (
                browser.run("getComputedStyle(document.body).backgroundColor")
                == {
                    "light": "rgb(255, 255, 255)",
                    "dark": "rgb(16, 20, 24)",
                }[scheme]
            )
            found = browser.run(CONTRAST)
            assert found["texts"][0][0] >= 4.5, found["texts"]
            assert found["marks"][0][0] >= 3.0, found["marks"]
            print(scheme, found["texts"][0], found["marks"][0])
    finally:
        browser.scheme("light")


BROKEN = """
(() => {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    const parent = node.parentElement;
    if (!parent.checkVisibility() || ['SCRIPT', 'STYLE', 'PRE'].includes(parent.tagName)) continue;
    for (const word of node.textContent.matchAll(/[A-Za-z]+/g)) {
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const tops = new Set([...range.getClientRects()].map((one) => Math.round(one.top)));
      if (tops.size > 1) found.push(word[0]);
    }
  }
  return found;
})()
"""
"""The words of the page that have a line break within."""
CUT = """
(async () => {
  const found = [], draw = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    const width = this.measureText(text).width;
    const left = { left: x, center: x - width / 2, right: x - width }[this.textAlign];
    const { clientWidth, clientHeight } = this.canvas;
    if (left < -0.5 || left + width > clientWidth + 0.5 || y > clientHeight) found.push(text);
    draw.call(this, text, x, y);
  };
  for (const chart of charts.values()) chart.draw();
  CanvasRenderingContext2D.prototype.fillText = draw;
  for (const link of document.querySelectorAll('#sections a, header p')) {
    const { left, right } = link.getBoundingClientRect();
    if (left < 0 || right > innerWidth) found.push(link.textContent);
  }
  return found;
})()
"""
"""The texts in charts and in the navigation that are cut off."""


@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_is_wider_than_the_page_cut_off_or_broken(
    browser: Browser, tmp_path: Path, width: int
) -> None:
    names = {"sparse_categorical_accuracy": 0.25, "validation_of_something_different": 12345678.9}
    measured = [*MEASURED, *(metrics(9.0, 123_456_789 + at, 3 + at, loss=0.3, **names) for at in (0, 1))]
    make_run(tmp_path / "train-20261128-201530", [job(strategy="different"), *EVENTS[1:], *END], measured)
    make_run(tmp_path / "train-20261128-211530")
    with watching(browser, tmp_path):
        browser.size(width, 900)
        browser.wait(f"innerWidth === {width}")
        browser.run("document.querySelector('#runs details').open = true")
        browser.run("byId('comparison-run').value = state.runs.at(-1).id; drawComparison(true)")
        browser.wait("document.querySelector('#comparison-table thead')")
        assert browser.run("document.documentElement.scrollWidth") == width
        assert browser.run("charts.get('metric:loss').plot.clientWidth") > 250
        # Tables are blocks of named values on a narrow page, and nothing is beyond its side.
        wider = "[...document.querySelectorAll('.scroll')].filter((one) => one.checkVisibility() && %s)"
        wider %= "one.scrollWidth > one.clientWidth"
        assert width > 400 or browser.run(f"{wider}.length") == 0
        assert browser.run("document.querySelector('#views-table').getAttribute('role')") == "table"
        assert browser.run(BROKEN) == []
        assert browser.run(CUT) == []


def test_a_step_is_a_whole_number_wherever_the_cursor_is(browser: Browser, run: Path) -> None:
    with watching(browser, run):
        for step in (17.4, 20.5):
            assert re.match(r"step \d+\n", browser.run(f"charts.get('metric:loss').read({step})"))
        browser.run("metricSpan.show(20, 22)")
        browser.run("charts.get('metric:loss').draw()")
        assert browser.run("onAxis(20.5, 'step')") == "21"


def test_validation_and_training_are_both_seen_where_they_are_equal(browser: Browser, tmp_path: Path) -> None:
    equal = [metrics(at, 10 * at, at, loss=1 / at, val_loss=1 / at) for at in range(1, 6)]
    make_run(tmp_path / "one", measured=[*MEASURED[:4], *equal])
    pixels = """
    (() => {
      const chart = charts.get('metric:loss');
      chart.draw();
      const { width, height } = chart.canvas;
      const data = chart.canvas.getContext('2d').getImageData(0, 0, width, height).data;
      return chart.lines().map((line) => {
        const wanted = line.color.match(/[0-9a-f]{2}/g).map((one) => parseInt(one, 16));
        let found = 0;
        for (let at = 0; at < data.length; at += 4) {
          const near = wanted.every((value, of) => Math.abs(data[at + of] - value) < 12);
          if (data[at + 3] > 200 && near) found += 1;
        }
        return found;
      });
    })()
    """
    with watching(browser, tmp_path):
        training, validation = browser.run(pixels)
        assert min(training, validation) > 100


def test_screen_readers_find_everything(browser: Browser, run: Path) -> None:
    with watching(browser, run):
        browser.run("document.querySelector('figure[data-chart=\"metric:loss\"] summary').click()")
        browser.wait("charts.get('metric:loss').table.rows.length === 7")
        nodes = browser.ask("Accessibility.getFullAXTree")["nodes"]
        shown = [node for node in nodes if not node.get("ignored")]
        roles = {node["role"]["value"] for node in shown}
        assert {"banner", "main", "navigation", "region", "search", "status", "table", "heading"} <= roles
        acting = ("button", "checkbox", "combobox", "searchbox", "slider", "link", "application", "region")
        for node in shown:
            if node["role"]["value"] in acting:
                assert node.get("name", {}).get("value"), node
        assert browser.run("document.documentElement.lang") == "en"
        labels = browser.run("[...charts.values()].map((one) => one.plot.getAttribute('aria-label'))")
        assert "loss; last values: loss 0.7, loss, epochs 0.4, val_loss not finite" in labels
        # The focus is visible wherever the Tab key leads.
        browser.run("document.body.focus()")
        for _ in range(30):
            browser.key("Tab")
            style = browser.run(
                "(() => { const style = getComputedStyle(document.activeElement);"
                "return [style.outlineStyle, parseFloat(style.outlineWidth)]; })()"
            )
            assert style[0] != "none"
            assert style[1] >= 1


def test_a_server_that_has_ended_is_reported(browser: Browser, run: Path) -> None:
    with watching(browser, run) as server:
        cookie, server.cookie = server.cookie, "another"
        browser.run("poll()")
        browser.wait("byId('status').textContent.includes('run lockstep ui again')")
        server.cookie = cookie
        browser.run("poll()")
        browser.wait("byId('status').textContent.startsWith('one: finished')")


def test_a_page_without_runs(browser: Browser, tmp_path: Path) -> None:
    with watching(browser, tmp_path, wait=False):
        browser.wait("byId('status').textContent === 'There is no run yet.'")
        assert "lockstep run -n 2 train.py" in browser.text("#empty")
        assert not browser.run("byId('summary').checkVisibility() || byId('sections').checkVisibility()")
        assert browser.complaints() == []


PROGRAM = """
import keras, numpy as np
x = np.random.default_rng(0).normal(size=(4096, 8)).astype("float32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, x[:, :1], batch_size=16, epochs=100_000, verbose=0)
"""


@pytest.mark.slow
def test_a_killed_worker_appears_on_the_page_of_its_job(
    browser: Browser, tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    words = ("run", "--ui", "-n", "2", "--backend", "jax", "--run-dir", "run", "train.py")
    job = subprocess.Popen(
        [sys.executable, "-m", "lockstep", *words],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stderr is not None
    try:
        line = next(line for line in job.stderr if "the page is at" in line)
        browser.size(1280, 6000)
        browser.open(re.findall(r"http://\S+", line)[0])
        browser.wait("charts.get('parts:1')?.runSeries[0]?.series[0].x.length > 1")
        worker = browser.run("partsOf(state.run).workers.find((one) => one.worker === 1)")
        os.kill(worker["pid"], signal.SIGKILL)
        browser.wait("byId('status').textContent.includes('1 lost')")
        browser.wait("byId('status').textContent.includes('1 joined')")
        browser.wait("partsOf(state.run).views.length === 2 && partsOf(state.run).views[1].pause !== null")
        shown = browser.text("#views-table")
        assert "worker 1" in shown
        assert re.search(r"[0-9.]+ (µs|ms|s)\t", shown)
        assert browser.run(DRAWN % "membership") > 100
        # The page may hang or die: the training does not notice.
        page = next(one for one in psutil.Process(job.pid).children() if "ui" in one.cmdline())
        page.suspend()
        browser.open("about:blank")
        job.send_signal(signal.SIGTERM)
        job.stderr.read()
        assert job.wait(600) == 143
        assert not psutil.pid_exists(page.pid)
    finally:
        job.kill()
        job.wait()
        job.stderr.close()


@pytest.mark.slow
def test_two_hundred_runs(browser: Browser, tmp_path: Path) -> None:
    for number in range(200):
        make_run(tmp_path / f"train-{number:03}", [job(seed=number), *EVENTS[1:], *END])
    began = time.monotonic()
    with watching(browser, tmp_path):
        browser.wait("document.querySelectorAll('#runs-list li').length === 200")
        print(f"200 runs: shown after {time.monotonic() - began:.1f} s")
        browser.run("byId('runs-filter').value = '12'; drawRuns()")
        assert browser.text("#runs-count") == "12 of 200"
        browser.run("byId('runs-filter').value = 'train-123'; drawRuns()")
        browser.run("document.querySelector('#runs-list button').click()")
        browser.wait("document.querySelector('h1').textContent === 'train-123'")
        assert browser.complaints() == []


FRAMES = """
new Promise((done) => {
  const times = [];
  let last = performance.now();
  function frame(now) {
    times.push(now - last);
    last = now;
    const share = times.length / 241;
    if (share >= 1) {
      times.shift();
      times.sort((a, b) => a - b);
      const at = (part) => times[Math.floor(times.length * part)];
      done([times.length, at(0.5), at(0.95), times.at(-1)]);
      return;
    }
    if (share < 0.5) metricSpan.zoom(0.96);
    else metricSpan.pan(share < 0.75 ? 0.02 : -0.02);
    requestAnimationFrame(frame);
  }
  requestAnimationFrame(frame);
})
"""
"""Zooms and pans in 240 frames: their number, and the median, 95 % and maximum of their ms."""


@pytest.mark.slow
def test_a_million_points_scroll(browser: Browser, tmp_path: Path) -> None:
    folder = make_long_run(tmp_path / "long", 1_000_000)
    began = time.monotonic()
    with watching(browser, folder):
        print(f"1,000,000 points: shown after {time.monotonic() - began:.1f} s")
        series = browser.run("charts.get('metric:loss').runSeries[0].series[0]")
        assert series["count"] == 1_000_000
        assert max(series["high"]) == 1e6
        count, middle, late, longest = browser.run(FRAMES)
        print(f"{count} frames: median {middle:.1f} ms, 95 % {late:.1f} ms, longest {longest:.1f} ms")
        # A frame draws at most 2,000 points of a series, and some beyond its edges, whatever its length.
        assert (
            browser.run(
                "Math.max(...charts.get('metric:loss').runSeries[0].series.map((one) => one.x.length))"
            )
            <= 2002
        )
        browser.wait(
            "charts.get('metric:loss').loaded.includes('\"start\"') && !charts.get('metric:loss').loading"
        )


@pytest.mark.slow
def test_a_log_of_a_gigabyte(browser: Browser, run: Path) -> None:
    with (run / "worker-0.log").open("wb") as file:
        block = b"".join(b"a line of the log with some text, number %08d\n" % at for at in range(20_000))
        while file.tell() < 10**9:
            file.write(block)
        file.write(b"the only needle\n")
    with watching(browser, run):
        began = time.monotonic()
        browser.run("byId('log-text').value = 'ONLY NEEDLE'; byId('log-search').requestSubmit()")
        browser.wait("byId('log-found').textContent === '1 lines found'")
        print(f"1 GB searched in {time.monotonic() - began:.1f} s")
        browser.run("byId('log-results').querySelector('button').click()")
        browser.wait("byId('log').textContent === 'the only needle\\n'")
