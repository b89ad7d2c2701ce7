"""The status page in a real browser, from the real HTTP port with its headers: headless Chromium, in light and dark."""

import copy
import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Literal

import browser
import numpy as np
import pytest
import statusviews
from browser import Browser
from loopback import LoopbackModel, LoopbackRegistry
from starlette.responses import HTMLResponse
from waiting import until

from bf16kit.runtime import RuntimeInfo
from bf16kit.service.http.httpserver import HttpServer
from bf16kit.service.http.pages import Route, routes
from bf16kit.service.request import Timings
from bf16kit.service.telemetry.metrics import Metrics

pytestmark = pytest.mark.skipif(browser.find() is None, reason="no Chromium on PATH (Debian: apt-get install chromium)")

NARROWEST, PHONE, TABLET, BETWEEN, DESK = 320, 360, 900, 1160, 1280
HOSTILE = "<script>document.title = 'obeyed'</script><img src=x onerror=\"document.title = 'obeyed'\">" + "x" * 400
READINGS = 90  # ten seconds apart

# The least contrast of a chart's line with the card behind it (WCAG 2.2, 1.4.11: at least 3).
DRAWN = """
(() => {
  const light = text => { const rgb = text.match(/[\\d.]+/g).map(Number);
    return [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => { const s = rgb[i] / 255;
      return sum + weight * (s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4); }, 0); };
  const card = light(getComputedStyle(document.querySelector(".figures div")).backgroundColor);
  return Math.min(...[...document.querySelectorAll(".spark path")].map(e => {
    const own = light(getComputedStyle(e).stroke);
    return (Math.max(own, card) + 0.05) / (Math.min(own, card) + 0.05); }));
})()
"""


class Shown:
    """A browser with the page of a server that serves :attr:`status`; the page is paused after its first reading."""

    def __init__(self, chromium: Browser) -> None:
        self.chromium = chromium
        self.status: dict[str, Any] = statusviews.everything()
        self.reads = 0
        pages = routes(LoopbackRegistry([]), Metrics().expose, self._snapshot)
        self.http = HttpServer("127.0.0.1", 0, pages)
        self.http.start()

    def _snapshot(self) -> dict[str, Any]:
        self.reads += 1
        return self.status

    def open(self) -> browser.Page:
        self.reads = 0
        self.chromium.emulate_display("light", DESK)
        page = self.chromium.open(f"http://127.0.0.1:{self.http.port}/")
        until(lambda: self.evaluate("readings") > 0, what="the first reading")
        self.evaluate("document.getElementById('pause').click()")
        return page

    def evaluate(self, expression: str) -> Any:
        return self.chromium.evaluate(expression)

    def show(self, status: dict[str, Any], after: float, answered: int = 0) -> None:
        """Let the page read ``status`` so many seconds after the first reading, with more answers of two models."""
        later = copy.deepcopy(status)
        later["at_seconds"] += after
        for model in later["models"][:2] if answered else ():
            model["metrics"]["bf16kit_requests_total"]["OK"] += answered
            model["metrics"]["bf16kit_executions_total"] += answered
            for phase in ("request", "queue"):
                buckets = model["metrics"][f"bf16kit_{phase}_duration_seconds_bucket"]
                for bound in buckets:
                    buckets[bound] += answered if float(bound) >= 0.025 else 0
                model["metrics"][f"bf16kit_{phase}_duration_seconds_sum"] += 0.02 * answered
        self.evaluate(f"show({json.dumps(later)})")

    def text(self, selector: str) -> Any:
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    binary = browser.find()
    assert binary is not None
    with Browser(binary, tmp_path_factory.mktemp("profile")) as chromium:
        chromium.call("Accessibility.enable")
        shown = Shown(chromium)
        yield shown
        shown.http.close()


@pytest.fixture
def full(shown: Shown) -> Shown:
    """Return the page of everything after a quarter of an hour under load."""
    shown.status = statusviews.everything()
    page = shown.open()
    assert page.complaints == []
    assert {request.rpartition("/")[2] for request in page.requests} == {"status.json"}
    for at in range(1, READINGS + 1):
        shown.show(shown.status, 10 * at, answered=100 * at)
    return shown


@pytest.mark.long
def test_the_page_shows_rates_percentiles_and_drift(full: Shown) -> None:
    assert full.text("#verdict") == "✗ Not ready: 2 of 5 models do not answer"
    assert full.text("#about").startswith("Version")
    first = full.text("#m0")
    for words in (
        "minilm · version 1 ready", "Answered/s\n10\n", "p50 17.5 ms, p90 23.5 ms", "Drift within budget", "36 %",
        "34 % to 38 %", "over 17 %", "index 7 of axis 1", "212 effective samples", "change detector at 31 %",
        "up; last", "golden samples within budget", "onnxruntime on cpu", "cpu-bf16; auto: 2.65 ms a run", "45.2 MB",
        "avx512_bf16",
        "up to 8 rows, waiting up to 2 ms for more; one batch at once",
    ):  # fmt: skip
        assert words in first.replace("\u00a0", " "), words
    second = full.text("#m1").replace("\u00a0", " ")
    for words in (
        "Drift over budget", "131 %", "broken: more drift", "input_ids: 3 measured rows", "fell back 1 time",
        "failed at 02:39:05 UTC", "FAILED 2026-01-02", "loading again, or cannot be loaded",
        "bf16: measured on this device",
        "Answers in\nfp32: relative_l2 of output 'sentence_embedding' is 1.31 times its budget", ": changed",
    ):  # fmt: skip
        assert words in second, words
    assert "vision" in full.text(".verdict ul")
    assert full.evaluate("document.querySelectorAll('#models ~ table tbody tr').length") == 5


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_every_window_and_has_enough_contrast(full: Shown, scheme: Literal["light", "dark"]) -> None:
    full.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    for width in (NARROWEST, PHONE, TABLET, BETWEEN, DESK):
        full.chromium.emulate_display(scheme, width)
        assert full.evaluate("document.documentElement.scrollWidth") == width
        wide = f"[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > {width}).length"
        assert full.evaluate(wide) == 0
        ratio, text = full.chromium.least_contrast()
        assert ratio >= 4.5, text
        assert full.evaluate(DRAWN) >= 3
    background = full.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(part) for part in background[4:-1].split(",")) < 3 * 128) == (scheme == "dark")


@pytest.mark.long
def test_a_screen_reader_gets_landmarks_headings_and_the_values_of_charts(full: Shown) -> None:
    heard = full.chromium.accessibility_nodes()
    roles = [role for role, _ in heard]
    assert [roles.count(landmark) for landmark in ("banner", "main", "contentinfo")] == [1, 1, 1]
    assert ("navigation", "Pages") in heard
    pictures = [name for role, name in heard if role in ("image", "img")]
    assert len(pictures) == 8
    assert "Requests per second, last 14\u00a0min 50\u00a0s: last 10, least 10, most 10" in pictures
    assert all(
        name for role, name in heard if role in ("link", "heading", "columnheader", "rowheader", "table", "button")
    )
    levels = full.evaluate("[...document.querySelectorAll('h1, h2, h3, h4')].map(h => +h.tagName[1])")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    ends = "[...document.querySelectorAll('a[href^=\"#\"]')].every(a => document.querySelector(a.getAttribute('href')))"
    assert full.evaluate(ends)


@pytest.mark.long
def test_the_keyboard_reaches_everything_in_order_with_visible_focus(full: Shown) -> None:
    wanted = full.evaluate("[...document.querySelectorAll('a[href], summary, button')].map(e => e.textContent)")
    reached = []
    for _ in wanted:
        full.chromium.press("Tab")
        reached.append(full.evaluate("document.activeElement.textContent"))
        assert full.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", reached[-1]
    assert reached == wanted
    assert reached[0] == "Skip to content"


@pytest.mark.long
def test_a_reading_leaves_focus_and_unfolded_parts_as_they_are_and_falling_counts_begin_a_new_history(
    full: Shown,
) -> None:
    assert full.evaluate("seen.get('minilm/1').points.length") == READINGS
    full.evaluate("document.querySelector('summary').focus()")
    full.chromium.press("Enter")
    full.show(full.status, 910)
    assert full.evaluate("document.activeElement.tagName") == "SUMMARY"
    assert full.evaluate("document.querySelectorAll('details[open]').length") == 1
    assert full.evaluate("seen.get('minilm/1').points.length") == 0
    full.show(full.status, 920, answered=10)
    assert "Answered/s\n1\n" in full.text("#m0")
    later = copy.deepcopy(full.status)
    later["models"][0]["metrics"]["bf16kit_fallback_active"] = 1
    full.show(later, 2000, answered=20_000)
    assert "fp32 since 03:37:25 UTC (0\u00a0s ago)" in full.text("#m0"), "when it changed while the page was open"


def test_a_reference_that_is_still_loading_is_no_problem_and_the_counts_agree(shown: Shown) -> None:
    metrics = Metrics()
    models = [LoopbackModel(name) for name in "ab"]
    for series in (both := [metrics.add(model.name, 1) for model in models]):
        series.reference_up(False)
    shown.status = statusviews.status(models, metrics, ready=True)
    shown.open()
    assert shown.text(".verdict") == "✓ Ready: 2 models answer"
    assert "Reference\nloading\n" in shown.text("#m0")
    shown.show(statusviews.status([*models, LoopbackModel("c", state="unavailable")], metrics, ready=True), 10)
    assert shown.text("#verdict") == "✗ Ready: 2 of 3 models answer"
    assert shown.text(".figures div").replace("\n", " ").startswith("Models ready 2 of 3")
    both[0].sampled("failed", 1)
    shown.show(statusviews.status(models, metrics, ready=True), 20)
    assert "a · version 1: drift is not measured" in shown.text(".verdict").replace("\u00a0", " ")


def test_percentiles_are_those_of_the_samples_but_for_the_width_of_a_bucket(shown: Shown) -> None:
    shown.open()
    random = np.random.default_rng(28)
    for _ in range(20):
        metrics = Metrics()
        series = metrics.add("m", 1)
        times = 10 ** random.uniform(-3.9, 0.9, random.integers(1, 60))
        for time in times:
            series.executed(1, 1, Timings(compute_infer=float(time)))
        (model,) = statusviews.status([LoopbackModel("m")], metrics)["models"]
        found = shown.evaluate(f"durations({json.dumps(model['metrics'])}, null, 'compute')")
        assert found["mean"] == pytest.approx(times.mean())
        for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            true = np.quantile(times, q, method="inverted_cdf")
            assert true / 2.5 <= found[name] * (1 + 1e-9)
            assert found[name] <= 2.5 * true * (1 + 1e-9)


def test_hostile_and_very_long_names_are_text(shown: Shown) -> None:
    metrics = Metrics()
    info = RuntimeInfo(HOSTILE, HOSTILE, HOSTILE, HOSTILE, "bf16", HOSTILE, HOSTILE, choice=HOSTILE)
    model, broken = (
        statusviews.busy(metrics, HOSTILE, output=HOSTILE, ratio=1e9),
        LoopbackModel("m", state="unavailable"),
    )
    model.info, model.golden, broken.reason = info, HOSTILE, HOSTILE
    shown.status = statusviews.status([model, broken], metrics, version=HOSTILE)
    page = shown.open()
    shown.chromium.emulate_display("dark", PHONE)
    shown.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert page.complaints == []
    assert shown.evaluate("document.title") == "bf16-serve: not ready"
    assert shown.evaluate("[document.scripts.length, document.images.length]") == [1, 0]
    assert shown.evaluate("document.documentElement.scrollWidth") == PHONE
    assert shown.evaluate("document.body.textContent").count("onerror") > 15
    assert shown.evaluate("grown({bf16kit_a: {constructor: 3}}, {bf16kit_a: {}}, 'a').constructor") == 3


def test_no_other_script_runs_on_this_port(shown: Shown) -> None:
    injected = "<title>calm</title><script>document.title = 'obeyed'</script><img src=x onerror=\"document.title = 1\">"
    port = HttpServer("127.0.0.1", 0, {"/": Route(lambda _: HTMLResponse(injected))})
    port.start()
    try:
        seen = shown.chromium.open(f"http://127.0.0.1:{port.port}/")
    finally:
        port.close()
    assert any("Content Security Policy" in complaint for complaint in seen.complaints)
    assert shown.evaluate("document.title") == "calm"


def test_an_empty_server_and_a_thousand_broken_models_have_a_page(shown: Shown) -> None:
    shown.status = statusviews.status([], Metrics())
    shown.open()
    assert "bf16-convert checkpoint" in shown.text("main")
    many = [LoopbackModel(f"m{at}", state="unavailable") for at in range(1000)]
    shown.evaluate(f"show({json.dumps(statusviews.status(many, Metrics()))})")
    assert shown.evaluate("document.querySelectorAll('main > section[id]').length") == 100
    assert shown.evaluate("document.querySelectorAll('#models ~ table tbody tr').length") == 1000
    assert "and 980 more" in shown.text(".verdict")


@pytest.mark.long
def test_the_page_reads_until_it_is_paused_and_says_when_the_server_does_not_answer(shown: Shown) -> None:
    shown.status = statusviews.everything()
    shown.open()
    paused = shown.reads
    shown.evaluate("document.getElementById('pause').click()")
    until(lambda: shown.reads > paused + 1, what="two more readings")
    shown.status = {**shown.status, "models": None}
    until(lambda: "No answer from the server" in shown.text("#about"), what="the error")
    shown.status = statusviews.everything()
    until(lambda: "up for" in shown.text("#about"), what="the next answer")
