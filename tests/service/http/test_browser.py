"""The status page in a real browser, from the real HTTP port with its headers: headless Chromium, in light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus
from itertools import pairwise
from pathlib import Path
from typing import Literal

import browser
import pytest
import statusviews
from browser import Browser
from statusviews import recent, running, server

from service.http.page import status_page
from service.http.pages import Page, Route
from service.http.server import HttpServer
from service.http.views import ModelView, ServerView

pytestmark = pytest.mark.skipif(browser.find() is None, reason="no Chromium on PATH (Debian: apt-get install chromium)")

NARROWEST, PHONE, TABLET, BETWEEN, DESK = 320, 360, 900, 1160, 1280
HOSTILE = "<script>document.title = 'obeyed'</script>" + "x" * 400

# The least contrast of a line or a bar with the card behind it (WCAG 2.2, 1.4.11: at least 3).
DRAWN = """
(() => {
  const light = text => { const rgb = text.match(/[\\d.]+/g).map(Number);
    return [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => { const s = rgb[i] / 255;
      return sum + weight * (s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4); }, 0); };
  const card = light(getComputedStyle(document.querySelector(".figures div")).backgroundColor);
  return Math.min(...[...document.querySelectorAll(".trace, .limit, .used")].map(e => {
    const style = getComputedStyle(e), own = light(style.stroke === "none" ? style.fill : style.stroke);
    return (Math.max(own, card) + 0.05) / (Math.min(own, card) + 0.05); }));
})()
"""

# Tables and lists that are wider than the card or column that holds them, less its padding.
SPILLING = """
[...document.querySelectorAll("section table, section dl")].filter(part => {
  const around = part.parentElement, room = parseFloat(getComputedStyle(around).paddingRight);
  return part.getBoundingClientRect().right > around.getBoundingClientRect().right - room + 1;
}).map(part => part.textContent.slice(0, 80))
"""


class Shown:
    """An HTTP port that serves the page of :attr:`view`."""

    def __init__(self) -> None:
        self.view: ServerView = statusviews.everything()
        self._http = HttpServer("127.0.0.1", 0, {"/": Route(self._page)})
        self._http.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._http.port}/"

    def _page(self, _: str) -> Page:
        return Page(HTTPStatus.OK, "text/html; charset=utf-8", status_page(self.view).encode())

    def close(self) -> None:
        self._http.close()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    binary = browser.find()
    assert binary is not None
    with Browser(binary, tmp_path_factory.mktemp("profile")) as started:
        started.call("Accessibility.enable")
        yield started


@pytest.fixture
def shown() -> Iterator[Shown]:
    shown = Shown()
    yield shown
    shown.close()


def unfold(chromium: Browser) -> None:
    chromium.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")


@pytest.mark.parametrize("width", [NARROWEST, PHONE, TABLET, BETWEEN, DESK])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_loads_nothing_else_fits_the_window_and_has_enough_contrast(
    chromium: Browser, shown: Shown, scheme: Literal["light", "dark"], width: int
) -> None:
    chromium.emulate_display(scheme, width)
    seen = chromium.open(shown.address)
    assert (seen.requests, seen.complaints) == ([], [])
    unfold(chromium)
    assert chromium.evaluate("document.documentElement.scrollWidth") == width
    wide = f"[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > {width}).length"
    assert chromium.evaluate(wide) == 0
    assert chromium.evaluate(SPILLING) == []
    ratio, text = chromium.least_contrast()
    assert ratio >= 4.5, text
    assert chromium.evaluate(DRAWN) >= 3
    background = chromium.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(part) for part in background[4:-1].split(",")) < 3 * 128) == (scheme == "dark")


def test_a_screen_reader_gets_landmarks_headings_and_the_values_of_charts(chromium: Browser, shown: Shown) -> None:
    chromium.emulate_display("light", DESK)
    chromium.open(shown.address)
    heard = chromium.accessibility_nodes()
    roles = [role for role, _ in heard]
    for landmark in ("banner", "main", "contentinfo"):
        assert roles.count(landmark) == 1
    assert ("navigation", "Pages") in heard
    assert ("region", "Not ready: 2 of 5 models do not answer") in [(r, n.strip("✗ ")) for r, n in heard]
    pictures = [name for role, name in heard if role in ("image", "img")]
    assert len(pictures) == 8
    assert "Latency p99, last 15\u00a0min: last 17.4\u00a0ms, least 10.5\u00a0ms, most 29.9\u00a0ms" in pictures
    tables = [name for role, name in heard if role == "table"]
    assert tables
    assert all(tables)
    assert all(name for role, name in heard if role in ("link", "heading", "columnheader", "rowheader"))


def test_headings_skip_no_level_and_tables_name_rows_and_columns(chromium: Browser, shown: Shown) -> None:
    chromium.open(shown.address)
    assert chromium.evaluate("document.documentElement.lang") == "en"
    levels = chromium.evaluate("[...document.querySelectorAll('h1, h2, h3, h4')].map(h => +h.tagName[1])")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    scoped = """[...document.querySelectorAll('table')].every(t => t.caption && t.querySelector('thead th[scope=col]')
      && [...t.querySelectorAll('tbody tr')].every(r => r.cells[0].matches('th[scope]')))"""
    assert chromium.evaluate(scoped)
    ids = "(ids => new Set(ids).size === ids.length)([...document.querySelectorAll('[id]')].map(e => e.id))"
    assert chromium.evaluate(ids)
    ends = "[...document.querySelectorAll('a[href^=\"#\"]')].every(a => document.querySelector(a.getAttribute('href')))"
    assert chromium.evaluate(ends)


def test_the_keyboard_reaches_every_link_in_order_with_visible_focus(chromium: Browser, shown: Shown) -> None:
    chromium.emulate_display("light", DESK)
    chromium.open(shown.address)
    wanted = chromium.evaluate("[...document.querySelectorAll('a[href], summary')].map(e => e.textContent)")
    reached = []
    for _ in wanted:
        chromium.press("Tab")
        reached.append(chromium.evaluate("document.activeElement.textContent"))
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert chromium.evaluate(outline) != "none", reached[-1]
        inside = "document.activeElement.getBoundingClientRect().top >= 0"
        assert chromium.evaluate(inside), reached[-1]
    assert reached == wanted
    assert reached[0] == "Skip to content"


def test_the_skip_link_works_and_enter_opens_a_section(chromium: Browser, shown: Shown) -> None:
    chromium.open(shown.address)
    chromium.press("Tab")
    chromium.press("Enter")
    assert chromium.evaluate("document.activeElement.id") == "main"
    assert chromium.evaluate("document.querySelectorAll('details[open]').length") == 0
    chromium.evaluate("document.querySelector('summary').focus()")
    chromium.press("Enter")
    assert chromium.evaluate("document.querySelectorAll('details[open]').length") == 1


@pytest.mark.parametrize(("motion", "scrolling"), [("reduce", "auto"), ("no-preference", "smooth")])
def test_scrolling_is_smooth_only_without_a_preference_for_reduced_motion(
    chromium: Browser, shown: Shown, motion: str, scrolling: str
) -> None:
    chromium.emulate_display("light", DESK)
    chromium.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": motion}])
    chromium.open(shown.address)
    assert chromium.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == scrolling
    assert chromium.evaluate("document.getAnimations().length") == 0


def test_a_chart_line_stays_within_its_chart_and_rises_with_its_values(chromium: Browser, shown: Shown) -> None:
    chromium.emulate_display("light", DESK)
    chromium.open(shown.address)
    inside = """[...document.querySelectorAll('svg.spark')].every(svg => {
      const box = svg.getBoundingClientRect(), own = svg.querySelector('.trace').getBoundingClientRect();
      return box.width > 100 && own.width > 0.9 * box.width && own.left >= box.left - 1 && own.right <= box.right + 1
        && own.top >= box.top - 1 && own.bottom <= box.bottom + 1; })"""
    assert chromium.evaluate(inside)
    over = "document.querySelector('#m1 .trends div:last-child svg .trace').getBBox().y"
    limit = "document.querySelector('#m1 .trends div:last-child svg .limit').getBBox().y"
    assert chromium.evaluate(over) < chromium.evaluate(limit)  # over budget: above the line
    assert chromium.evaluate(over.replace("m1", "m0")) > chromium.evaluate(limit.replace("m1", "m0"))


def test_hostile_and_very_long_names_do_not_break_the_page(chromium: Browser, shown: Shown) -> None:
    specs = running(inputs=(HOSTILE,), outputs=(HOSTILE,), choice=HOSTILE, golden=HOSTILE, device=HOSTILE, note=HOSTILE)
    seen = recent(output=HOSTILE, ratio=1e9)
    models = [ModelView(HOSTILE, 1, "ready", "", specs, seen), ModelView(HOSTILE, 2, "unavailable", HOSTILE)]
    shown.view = server(models, version=HOSTILE)
    chromium.emulate_display("dark", PHONE)
    page = chromium.open(shown.address)
    assert (page.requests, page.complaints) == ([], [])
    unfold(chromium)
    assert chromium.evaluate("document.title") == "bf16-serve: not ready"
    assert chromium.evaluate("document.scripts.length") == 0
    assert chromium.evaluate("document.documentElement.scrollWidth") == PHONE


def test_an_injected_script_does_not_run(chromium: Browser, shown: Shown, tmp_path: Path) -> None:
    page = Page(HTTPStatus.OK, "text/html", b"<title>calm</title><script>document.title = 'obeyed'</script>")
    http = HttpServer("127.0.0.1", 0, {"/": Route(lambda _: page)})
    http.start()
    try:
        seen = chromium.open(f"http://127.0.0.1:{http.port}/")
    finally:
        http.close()
    assert any("Content Security Policy" in complaint for complaint in seen.complaints)
    assert chromium.evaluate("document.title") == "calm"


def test_the_page_can_be_printed_as_pdf(chromium: Browser, shown: Shown) -> None:
    chromium.open(shown.address)
    assert chromium.pdf().startswith(b"%PDF")
