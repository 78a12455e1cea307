"""The report of a run: what it has, that it is inert and self-contained, and how a browser shows it."""

from __future__ import annotations

import html
import math
import re
import time
from bisect import bisect_right
from pathlib import Path
from typing import Any

import msgspec
import pytest

from libra_hpc.config.run import RunConfig
from libra_hpc.config.run_file_text import DEFAULTS, HIDDEN, without_secrets
from libra_hpc.facts import series
from libra_hpc.facts.journal import LineLog
from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.starts import starts
from libra_hpc.facts.status import encode_status
from libra_hpc.files import write_atomic
from libra_hpc.pictures.report_charts import RunClock, charts, draw_run, node_stages
from libra_hpc.pictures.report_page import Standing, page
from libra_hpc.pictures.svg_chart import MOST_POINTS, Chart, Line, clock_ticks, short_number, svg, ticks
from tests.browser import Browser, ensure_browser
from tests.facts.synthetic import make_run, make_status

from .eventful import BEGIN, HOSTILE, JUDGE, SECRET, STEP_S, make_eventful_run, time_of

NOW = 1_800_000_000.0
CANCELLED = Standing("cancelled", HOSTILE, over=True)
WIDTHS = (390, 1280)
"""CSS pixels of a phone and of a laptop."""
LAYOUT = """({
  width: shown.documentElement.scrollWidth,
  title: shown.title,
  scripts: shown.querySelectorAll('script, img, iframe, link, object, embed').length,
  handlers: [...shown.querySelectorAll('*')].filter(e => [...e.attributes].some(a => a.name.startsWith('on'))).length,
  headings: [...shown.querySelectorAll('h1, h2')].map(e => e.textContent),
  charts: [...shown.querySelectorAll('figure > svg')].map(e => [e.clientWidth, e.clientHeight]),
  nameless: [...shown.querySelectorAll('figure > svg, [role=region]')].filter(e => !e.ariaLabel).length,
  bare: [...shown.querySelectorAll('table')].filter(e => !e.caption || !e.querySelector('th[scope=col]')).length,
  cut: [...shown.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).map(e => e.ariaLabel),
  reasons: [...shown.querySelectorAll('td.long')].map(e => getComputedStyle(e, '::before').content),
  small: Math.min(...[...shown.querySelectorAll('figure text')].map(e => e.getBoundingClientRect().height)),
})"""


@pytest.fixture(scope="session")
def browser() -> Browser:
    return ensure_browser()


@pytest.fixture
def eventful(tmp_path: Path) -> RunDir:
    return make_eventful_run(tmp_path)


@pytest.fixture
def text(eventful: RunDir) -> str:
    return page(eventful, CANCELLED, NOW)


@pytest.fixture
def written(eventful: RunDir, text: str) -> Path:
    eventful.report.write_text(text)
    return eventful.report


@pytest.fixture(scope="module")
def measured(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """The page at every width, from one start of the browser."""
    folder = tmp_path_factory.mktemp("measured")
    run = make_eventful_run(folder)
    run.report.write_text(page(run, CANCELLED, NOW))
    return dict(zip(WIDTHS, browser.measure(run.report, LAYOUT, folder, WIDTHS), strict=True))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_browser_shows_every_part_without_sideways_scrolling(width: int, measured: dict[int, dict[str, Any]]) -> None:
    found = measured[width]
    assert found["width"] == width
    assert found["headings"] == [
        "eventful-001",
        *("Key figures", "Charts", "Decisions of the planner", "Failures and restarts", "Configuration", "Environment"),
    ]
    sizes = found["charts"]
    assert len(sizes) == 7
    assert all(wide > 0.7 * min(width, 500) and high > 100 for wide, high in sizes)
    assert (found["nameless"], found["bare"]) == (0, 0)
    assert found["small"] >= 9.0, "a tick label must stay readable"
    assert found["cut"] == [], "a reason is read without scrolling sideways"
    assert ('"reason: "' in found["reasons"]) == (width < 600), "a cell without a head above it has it before it"


def test_texts_of_a_run_are_inert_in_a_browser(
    browser: Browser, measured: dict[int, dict[str, Any]], written: Path
) -> None:
    found = measured[1280]
    assert (found["title"], found["scripts"], found["handlers"]) == ("eventful-001: cancelled", 0, 0)
    # The same without the page's own policy: the texts must be escaped, not only forbidden to run.
    text = written.read_text()
    open_to_all = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    assert open_to_all != text
    written.write_text(open_to_all)
    dumped = browser.dom(written)
    assert "<title>eventful-001: cancelled</title>" in dumped
    assert "<script>" not in dumped


@pytest.mark.parametrize(("scheme", "back"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(13, 17, 23)")])
def test_page_and_picture_follow_the_readers_scheme(
    scheme: str, back: str, browser: Browser, written: Path, eventful: RunDir, tmp_path: Path
) -> None:
    draw_run(eventful, eventful.summary_picture)
    for file, what in (
        (written, "shown.body).backgroundColor"),
        (eventful.summary_picture, "shown.querySelector('.back')).fill"),
    ):
        assert browser.measure(file, f"getComputedStyle({what}", tmp_path, WIDTHS[:1], scheme) == [back]


def test_the_page_asks_for_nothing_outside_itself(text: str) -> None:
    assert not re.findall(r"<[^>]*\s(?:src|href|action|data|poster)=", text)
    assert not re.findall(r"<(?:script|link|img|iframe|object|embed|form)\b", text)
    assert "url(" not in text
    assert "@import" not in text
    assert """content="default-src 'none'; style-src 'unsafe-inline'\"""" in text


def test_options_of_the_task_and_what_may_be_a_secret_are_hidden_wherever_they_stand(eventful: RunDir) -> None:
    cause = f"the judge at {JUDGE} refuses the key {SECRET}"
    text = html.unescape(page(eventful, Standing("failed", cause, over=True), NOW))
    for hidden in (JUDGE, SECRET, "fast", "[7, 9]", "abcdefg", "hf 123456"):
        assert hidden not in text, hidden
    for shown in (
        "the judge at (hidden) refuses the key (hidden)",
        '{"judge": "(hidden)", "limits": ["(hidden)", "(hidden)"], "mode": "(hidden)"}',
        '["module load cuda", "export HF_TOKEN=(hidden)"]',
        '["--comment=pw_token=(hidden)"]',
        '"keychain"',
        "SERVICE_KEY",
    ):
        assert shown in text, shown


def test_no_key_of_a_run_file_is_taken_for_a_secret() -> None:
    tables = [key for key, value in DEFAULTS.items() if without_secrets(key, value) != value]
    assert tables == []
    assert without_secrets("x.api_key", "a") == without_secrets("task.options", 3) == HIDDEN
    assert without_secrets("x.max_tokens", 4096) == 4096


def test_lenders_have_a_table(text: str) -> None:
    rows = re.sub("<[^>]*>|\\s+", " ", text.partition("Lenders and guests")[2].partition("</table>")[0])
    assert "gpu-017-vllm-4711 lender gone 58% 1,204 310k users 3 min, silent server 12 s" in " ".join(rows.split())


def test_gains_of_a_decision_and_what_was_measured_after_its_move(text: str) -> None:
    rows = re.findall(r"<tr>(.*?)</tr>", text)
    decided = next(row for row in rows if "moving node 2 to train" in row)
    assert re.findall(r"<td[^>]*>([^<]*)</td>", decided)[1::2] == ["node 2 to train", "0.60 s"]
    assert any(re.findall(">([^<]*)</td>", row)[-2:] == ["0.60 s", "0.47 s"] and "to train" in row for row in rows)
    assert "hold, 8 times" in text


def test_hours_in_the_queue_are_neither_drawn_nor_counted(eventful: RunDir, text: str) -> None:
    rows, log = series.steps(eventful), series.events(eventful)
    begun = starts(rows, log)
    attempts = [(start.attempt, start.state, start.queued_s > 0) for start in begun]
    assert attempts == [(1, "", False), (1, "cancelled", False), (2, "cancelled", True)]
    drawn = charts(rows, log, starts=begun, eta=2, stages=node_stages(eventful, series.read(eventful)))
    line = drawn[1].lines[1]
    assert max(x for x in line.xs if math.isfinite(x)) < 150 * STEP_S
    assert sum(map(math.isnan, line.ys)) == 2, "no line crosses a start"
    (nodes,) = [chart for chart in drawn if chart.title == "Nodes of each stage"]
    clock = RunClock(begun)
    moved, restart = BEGIN + 10.0 + STEP_S * 15, time_of(30, 120) + 12.0
    for t, counts in (
        (moved - 1, [1, 1, 3]),
        (moved + 3, [1, 2, 3]),
        (restart - 1, [0, 0, 0]),
        (restart + 9, [1, 1, 2]),
    ):
        assert [line.ys[bisect_right(line.xs, clock.at(t)) - 1] for line in nodes.lines[::-1]] == counts, t
    assert "2.6" in re.findall(r"GPU hours</dt><dd class=\"value\">([^<]*)", text)[0]


def test_a_dry_run_is_reported_in_simulated_time_and_its_end_by_the_clock(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_atomic(run.status, encode_status(msgspec.structs.replace(make_status(run), speedup=60.0)))
    text = page(run, Standing("completed", "", over=True), NOW)
    assert "quick-001  dry run, x60" in text
    figures = dict(re.findall(r'<dt>([^<]*)</dt><dd class="value">([^<]*)', text))
    assert [figures[name] for name in ("time with nodes", "train speed")] == ["3:01:00", "15"]
    assert "<dt>ended</dt><dd>2023-11-14 22:16 UTC" in text


def test_a_run_without_steps_gets_no_empty_charts(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "young")
    run.write_json(run.config, RunConfig().as_data())
    text = page(run, Standing("pending", "waiting for free nodes", over=False), NOW)
    assert "has committed no step yet" in text
    assert "waiting for free nodes" in text
    assert "<svg" not in text


def test_a_run_of_another_version_is_reported_as_far_as_it_goes(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.write_json(run.config, {"run": {"steps": "many", "colour": 3}, "components": {"train": 7}})
    text = page(run, Standing("completed", "", over=True), NOW)
    assert text.count("<figure>") == 5, "what was not measured has no chart"
    assert "engine lost" in text


def test_ten_thousand_steps_stay_a_small_page(tmp_path: Path) -> None:
    run = make_eventful_run(tmp_path, steps=10_000)
    log = LineLog(run.events)
    for number in range(5_000):
        log.write({"t": 1_790_000_100.0 + number, "kind": "decision", "action": "hold", "reason": f"hold: {number}"})
        log.write({"t": 1_790_000_100.0 + number, "kind": "slow", "part": "engine r3.0", "reason": "late"})
    log.close()
    began = time.process_time()
    text = page(run, CANCELLED, NOW)
    assert time.process_time() - began < 10.0
    assert len(text) < 500_000
    assert "older rows are left out" in text
    assert "node 2 to train" in text, "holds are left out first"


@pytest.mark.parametrize("count", [1, 2, 7, 500, 12_345])
def test_a_long_line_is_its_means_before_a_band_of_its_extremes(count: int) -> None:
    ys = [1.0] * count
    ys[count // 3] = 100.0
    chart = Chart("t", "d", "step", "y", [Line("l", "train", list(map(float, range(count))), ys)])
    paths = dict(re.findall(r'<path class="(\w+) train" d="([^"]*)"', svg(chart)))
    assert (set(paths) == {"band", "line"}) == (count > MOST_POINTS)
    assert len(paths["line"].split()) <= 2 * MOST_POINTS + 2
    heights = [float(y) for y in re.findall(r"[ M][-\d.]+ ([-\d.]+)", paths.get("band", paths["line"]))]
    assert min(heights) < 25.0, "the peak must show"


def test_an_interrupted_line_stays_interrupted() -> None:
    line = Line("l", "train", [0.0, 1.0, 2.0, 3.0, 4.0], [1.0, math.nan, math.nan, 2.0, 2.5])
    drawn = re.findall(r'class="line train" d="([^"]*)"', svg(Chart("t", "d", "step", "y", [line])))[0]
    assert drawn.count("M") == 2
    assert drawn.index("h0") < drawn.rindex("M"), "a part of one point is a dot"


def test_ticks_are_round() -> None:
    assert ticks(0.0, 0.9) == [0.0, 0.2, 0.4, 0.6, 0.8]
    assert ticks(1.0, 3.0, whole=True) == [1.0, 2.0, 3.0]
    assert clock_ticks(400.0) == [60.0 * minute for minute in range(7)]
    assert clock_ticks(40 * 86400.0)[1] % 86400 == 0
    assert [short_number(v) for v in (0.5, 20.0, 1500.0, 3e6)] == ["0.5", "20", "1.5k", "3M"]
